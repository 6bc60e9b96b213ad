"""One launcher owns a run directory; earlier results are refused or cleaned, never mixed with."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from prime_rl.config import OrchestratorConfig, TrainerConfig
from prime_rl.entrypoints import begin
from prime_rl.errors import UserError
from prime_rl.launcher.rundir import LAUNCHER, Owner, clean, cleaned, refuse_results, refuse_running
from prime_rl.monitor import Status, read_status
from prime_rl.monitor.status import new_status, status_path, write_record
from prime_rl.processes import identify
from prime_rl.transport.settings import check_and_commit, other_directory
from support import partners
from support.partners import belongs_to

partner = partners.partner


def claim(root: Path, **fields: object) -> None:
    """The claim of another launcher."""
    path = status_path(root, LAUNCHER)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, replace(new_status(LAUNCHER), **fields))  # type: ignore[arg-type]


def overdue(owner: Owner) -> Owner:
    owner._claim = replace(owner._claim, heartbeat=0.0)
    return owner


def test_one_owner(tmp_path: Path, partner: int) -> None:
    """A living launcher keeps the directory: by pid on this host, else by heartbeat. A dead one's is taken over."""
    claim(tmp_path, **asdict(identify(partner)))
    with pytest.raises(UserError, match=rf"`rl` \(pid {partner} on .*\) is running in"):
        Owner(tmp_path)
    claim(tmp_path, pid=partner, started=1)  # the same pid, but another process: the old one has died
    first = Owner(tmp_path)
    claim(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(UserError, match="on elsewhere"):
        Owner(tmp_path)
    with pytest.raises(UserError, match="taken over by pid 1 on elsewhere"):
        overdue(first).beat()
    with first:
        pass
    assert status_path(tmp_path, LAUNCHER).exists(), "not the first one's any more"
    claim(tmp_path, host="elsewhere", heartbeat=1.0)
    Owner(tmp_path)


def test_another_directory_is_suggested(tmp_path: Path, partner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: one that does not exist yet, beside the run's own; of the default one below it."""
    monkeypatch.chdir(tmp_path)
    claim(root := Path("outputs"), **asdict(identify(partner)))
    with pytest.raises(UserError, match="is running in outputs: stop it, or give --output-dir outputs/run-2$"):
        Owner(root)
    (root / "run-2" / "weights" / "step_1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"remove it with --clean, give --output-dir outputs/run-3, or"):
        refuse_results(root / "run-2")
    assert other_directory(tmp_path / "run-1") == tmp_path / "run-2"


def test_an_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nor does bad input, in a directory made for it. A damaged claim is taken over, and harms no living owner; nor
    does a second run of its own process."""
    fresh = tmp_path / "a" / "run"
    with pytest.raises(RuntimeError), Owner(fresh):
        raise RuntimeError
    assert not fresh.exists()
    path = status_path(tmp_path, LAUNCHER)
    path.parent.mkdir()
    path.write_text('{"pid": 1}')
    with Owner(tmp_path) as owner:
        with pytest.raises(UserError, match="this process makes a run in .* already"):
            Owner(tmp_path)
        path.write_text("[]")
        overdue(owner).beat()
        assert json.loads(path.read_text())["pid"] == os.getpid()
        clean(tmp_path, LAUNCHER)
        assert path.exists()
    assert not path.exists()


WRITTEN = """
rollouts/step_0/x weights/step_1/x weights/.step_2.tmp-x/x recovery/step_2/x recovery/.step_4.tmp-x/x evals/.lock
checkpoints/step_2/x checkpoints/given_up_1_step_4/x logs/envs/x configs/trainer.toml evals/rt/step_0/results.jsonl
logs/trainer.log metrics/trainer.jsonl incarnations/0.json leases/orchestrator.json settings/trainer.json
settings/.trainer.json.tmp-1 status/trainer.json status/trainer.1.json status/.trainer.1.json.tmp-1 ledger.sqlite
ledger.sqlite-journal configs/mine.toml notes/x
"""


def test_results_are_refused_and_clean_removes_only_them(tmp_path: Path) -> None:
    """`--clean` removes the names that a run writes; a person's files beside them stay, even in `configs/`."""
    for name in WRITTEN.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=r"\(rollouts, weights, checkpoints, recovery, metrics\).*--clean.*--recover"):
        refuse_results(tmp_path)
    clean(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["configs", "configs/mine.toml", "notes", "notes/x"]
    refuse_results(tmp_path)
    (tmp_path / "elsewhere" / "step_1").mkdir(parents=True)
    (tmp_path / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        clean(tmp_path)
    assert (tmp_path / "elsewhere" / "step_1").exists()


def left_behind(root: Path) -> None:
    """What an earlier run, and a server that still runs, have written."""
    for name in ("rollouts/step_0", "weights/step_1", "logs"):
        (root / name).mkdir(parents=True)
    for name in ("inference", "orchestrator"):
        check_and_commit(OrchestratorConfig(output_dir=root, environment={"id": "x"}), name)  # type: ignore[arg-type]
        (root / "logs" / f"{name}.log").write_text("x")


def test_what_is_no_earlier_run(tmp_path: Path) -> None:
    """Contract: beside a server, an evaluation, or a failed start a run starts without `--clean`, and leaves them."""
    (tmp_path / "metrics").mkdir()
    for name in ("inference", "eval"):
        (tmp_path / "metrics" / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "evals" / "rt" / "api").mkdir(parents=True)
    (tmp_path / "metrics" / "orchestrator.jsonl").touch()  # of a run that failed at its start
    (tmp_path / "weights" / "step_0").mkdir(parents=True)
    Status(tmp_path, "eval").close()
    path = status_path(tmp_path, "eval")
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1}))  # its pid is another process's now
    refuse_results(tmp_path)
    with cleaned(tmp_path, "rl", keep_evals=True):
        assert read_status(tmp_path) == {}, "no wait of a process that is gone is shown"
    assert (tmp_path / "metrics" / "eval.jsonl").exists()
    assert (tmp_path / "evals" / "rt" / "api").is_dir()


def test_of_two_that_clean_the_second_removes_nothing(tmp_path: Path, partner: int) -> None:
    """Contract: neither removes what the other has begun, in any order; nobody empties a run that is going on."""
    left_behind(tmp_path)
    with cleaned(tmp_path, "trainer"):  # the trainer, first
        check_and_commit(TrainerConfig(output_dir=tmp_path), "trainer")
    belongs_to(tmp_path, "trainer", partner)
    (tmp_path / "weights" / "step_0").mkdir(parents=True)
    with cleaned(tmp_path, "orchestrator"):
        pass
    assert (tmp_path / "weights" / "step_0").is_dir()
    (tmp_path / "rollouts" / "step_0").mkdir(parents=True)
    for process, message in (
        ("trainer", "`trainer` is running"),
        ("orchestrator", r"would remove files of the running trainer .*\(rollouts\): stop that first"),
        # Also while none of its processes has started, or all of them are between two restarts.
        ("sft", rf"`rl` \(pid {partner} on .*\) is running in"),
    ):
        if process == "sft":
            claim(tmp_path, **asdict(identify(partner)))
        with pytest.raises(UserError, match=message), cleaned(tmp_path, process):
            pass
    assert (tmp_path / "rollouts" / "step_0").is_dir()


def test_nothing_is_removed_before_a_refusal(tmp_path: Path, partner: int) -> None:
    """Contract: settings that differ from a running server's are found before an earlier run is removed."""
    left_behind(tmp_path)
    belongs_to(tmp_path, "inference", partner)
    config = TrainerConfig.model_validate({"output_dir": tmp_path, "model": {"name": "other"}, "clean": True})
    with pytest.raises(UserError, match=r"model\.name is other here, but .* in the inference"):
        begin(config, "trainer", lambda _: [])
    assert (tmp_path / "rollouts" / "step_0").is_dir()


def test_a_server_by_hand_is_named(tmp_path: Path, partner: int) -> None:
    """Contract: where to find what is in the way."""
    status = replace(new_status("inference"), **asdict(identify(partner)))
    (tmp_path / "status").mkdir()
    write_record(status_path(tmp_path, "inference"), status)
    refuse_running(tmp_path, {"trainer", "orchestrator"})
    with pytest.raises(UserError, match=rf"`inference` \(pid {partner} on .*\) is running in .*: stop it, or"):
        refuse_running(tmp_path, {"trainer", "inference"})
