"""Tortures of the commit protocol: a writer dies, tears its file or finds the disk full anywhere; what stands is whole.

The writers are forked from this process, so that a hundred deaths take seconds.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.faults import Fault
from prime_rl.transport.commit import clean_stages, list_steps, prune, stage, verify, write_atomically

COMMIT = ("write", "fsync", "manifest", "rename", "renamed")
BEFORE_IT_COUNTS = COMMIT[:-1]
KILLED = -signal.SIGKILL


@pytest.fixture
def live(tmp_path: Path) -> Callable[..., int]:
    """Run a forked writer under planned faults; its exit status: 0, 3 for a `UserError`, -9 where it was killed."""
    plans = tmp_path / "plans"
    plans.mkdir()
    incarnations = iter(range(1000))

    def run(write: Callable[[], None], *planned: Fault) -> int:
        plan = plans / f"{next(incarnations)}.json"
        plan.write_text(json.dumps([vars(fault) for fault in planned]))
        child = multiprocessing.get_context("fork").Process(target=_write, args=(write, plan))
        child.start()
        child.join(60)
        status = child.exitcode
        assert status is not None, "the writer did not end"
        seen = list(plans.glob(f"{plan.stem}.*.seen"))
        assert len(seen) == len(planned), "a fault never fired"
        return status

    return run


def _write(write: Callable[[], None], plan: Path) -> None:
    os.environ[faults.ENV] = str(plan)
    faults.arm("writer")
    status = 1
    try:
        write()
        status = 0
    except UserError:
        status = 3
    except BaseException:  # noqa: BLE001 - said here, and by the status
        traceback.print_exc()
    os._exit(status)  # what ends an interpreter may wait for a thread of the process that this is a fork of


def fault(do: str, point: str) -> Fault:
    return Fault(point, "writer", do)  # type: ignore[arg-type]


def publish(final: Path, text: str = "hello" * 100, step: int = 3) -> None:
    with stage(final, step=step, producer="test", extra={"text": text}) as path:
        (path / "sub").mkdir()
        (path / "sub" / "data.txt").write_text(text)
        (path / "small").write_text("x")


@pytest.mark.parametrize("do", ["kill", "tear", "enospc"])
@pytest.mark.parametrize("point", COMMIT)
def test_a_commit_is_all_or_nothing(tmp_path, live, point, do):
    """Whatever happens to the writer: before the rename nothing stands under the final name, from then on all of it."""
    final = tmp_path / "out" / "step_3"
    status = live(lambda: publish(final), fault(do, f"{point}:*"))
    assert status == (3 if do == "enospc" else KILLED)
    if point in BEFORE_IT_COUNTS:
        assert list_steps(final.parent) == []
    else:
        assert verify(final).extra == {"text": "hello" * 100}
    clean_stages(final.parent)
    assert [path.name for path in final.parent.iterdir()] == (["step_3"] if point == "renamed" else [])


@pytest.mark.parametrize("do", ["kill", "tear", "enospc"])
@pytest.mark.parametrize("point", ["rename", "renamed"])
def test_a_small_file_is_the_old_one_or_the_new_one(tmp_path, live, point, do):
    path = tmp_path / "file.json"
    write_atomically(path, b"old")
    assert live(lambda: write_atomically(path, b"new"), fault(do, f"{point}:*")) == (3 if do == "enospc" else KILLED)
    assert path.read_bytes() == (b"old" if point == "rename" else b"new")
    clean_stages(tmp_path)
    assert [left.name for left in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("point", ["prune", "pruned"])
def test_a_prune_is_all_or_nothing(tmp_path, live, point):
    """A reader sees the directory whole, or not at all."""
    final = tmp_path / "out" / "step_3"
    publish(final)
    assert live(lambda: prune(final), fault("kill", f"{point}:*")) == KILLED
    if point == "prune":
        verify(final)
    else:
        assert list_steps(final.parent) == []
    clean_stages(final.parent)
    assert [path.name for path in final.parent.iterdir()] == (["step_3"] if point == "prune" else [])
