"""Runs whose versions come by each of the transports, and incarnations of their trainers that die under faults.

As a program (`python -m support.transports`): reads jobs, one JSON object a line, forks for each a process that lives it, and answers its exit
status. A process that has run torch's threads cannot be forked safely; this one never has.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from prime_rl import faults
from prime_rl.config.trainer import TrainerModel, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.faults import Fault
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.parallel import World, init_world
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.commit import list_steps
from prime_rl.transport.weights import weights_manifest
from support.trainer import prune

INCARNATION_SECONDS = 120

TRANSPORTS: dict[str, dict[str, Any]] = {
    "filesystem": {},
    "tmpfs": {"keep": 7},
    "memory": {"transport": "memory", "host": "127.0.0.1", "timeout": 20.0},
}


@dataclass
class Run:
    """A run directory, a place in memory, and a policy that each version changes."""

    root: Path
    policy: Policy
    make: Callable[..., WeightPublisher]
    incarnations: list[WeightPublisher] = field(default_factory=list)

    @property
    def weights(self) -> Path:
        return self.root / "run" / "weights"

    @property
    def tmpfs(self) -> Path:
        return self.root / "tmpfs"

    def incarnation(self, start: int = 0) -> WeightPublisher:
        made = self.make()
        self.incarnations.append(made)
        made.open(start)
        return made

    def step(self) -> None:
        """As an optimizer does: a few elements become others."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.to_local().view(-1)[::7].add_(0.01)

    def train(self, incarnation: WeightPublisher, versions: range, durable: tuple[int, ...] = ()) -> dict[int, str]:
        """The hashes of what was committed."""
        for version in versions:
            self.step()
            incarnation.publish(version, durable=version in durable)
            incarnation.settle()
        return {version: weights_manifest(self.weights / f"step_{version}").hash for version in versions}

    def held(self) -> list[str]:
        """What lies in the tmpfs."""
        return sorted(path.name for path in self.tmpfs.glob("prime-rl-*"))

    def linked(self) -> set[str]:
        """To what of it versions have links."""
        return {path.readlink().parent.name for path in self.weights.glob("*/*") if path.is_symlink()}


@contextmanager
def open_run(transport: str, world: World, policy: Policy, model: Path, root: Path) -> Iterator[Run]:
    """In `root`; its incarnations are closed in the end."""
    source, options = find_model(str(model)), dict(TRANSPORTS[transport])
    (root / "tmpfs").mkdir(exist_ok=True)
    if transport == "tmpfs":
        options["tmpfs"] = root / "tmpfs"
    settings: dict[str, Any] = {"weights": WeightsConfig(**options), "memory": "transport" in options}
    made = Run(
        root,
        policy,
        lambda: WeightPublisher(root / "run", policy, source, world, torch.bfloat16, timeout=60, **settings),
    )
    try:
        yield made
    finally:
        for incarnation in made.incarnations:
            incarnation.close()


# ---- incarnations


def whole_incarnation(run: Run) -> None:
    """What trainers do: versions of both kinds, removing, an end."""
    incarnation = run.incarnation()
    run.train(incarnation, range(1, 5), durable=(2,))
    prune(incarnation, 0, 0, lambda: [2])
    incarnation.settle()
    incarnation.ensure(4, durable=True)
    incarnation.finish(lambda: [2])


def go_on(run: Run, start: int) -> None:
    """A further incarnation."""
    run.train(run.incarnation(start), range(start + 1, start + 3))


def through_a_full_disk(run: Run) -> None:
    """The second version finds no room."""
    incarnation = run.incarnation()
    run.train(incarnation, range(1, 2))
    with suppress(UserError):
        run.train(incarnation, range(2, 3))
    assert 2 not in list_steps(run.weights)
    run.train(incarnation, range(3, 4))


INCARNATIONS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (whole_incarnation, go_on, through_a_full_disk)
}


@contextmanager
def fork_server() -> Iterator["subprocess.Popen[str]"]:
    """The process that forks."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command, env = [sys.executable, "-m", "support.transports"], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process
        process.kill()


class Incarnations:
    """Processes that work on one run."""

    def __init__(self, forks: "subprocess.Popen[str]", transport: str, model: Path, root: Path) -> None:
        self._job = {"transport": transport, "model": str(model), "root": str(root)}
        self._root = root
        self._process = forks

    def live(self, incarnation: str, *args: int, fault: Fault | None = None) -> int:
        """Exit status of one of `INCARNATIONS`: 0, 3 for a `UserError`, -9 where it was killed. Each planned fault must have fired."""
        plan = self._root / "plan.json"
        plan.write_text(json.dumps([] if fault is None else [vars(fault)]))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({**self._job, "plan": str(plan), "incarnation": incarnation, "args": args}) + "\n"
        )
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())  # bounded: by INCARNATION_SECONDS
        seen = list(self._root.glob("plan.*.seen"))
        assert len(seen) == (fault is not None), f"a fault never fired; exit status {status}"
        for path in seen:
            path.unlink()
        return status


def _live(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ[faults.ENV] = job["plan"]
    faults.arm("trainer")
    world = init_world("cpu", 60)
    policy = build_policy(find_model(job["model"]), TrainerModel(), world)
    with open_run(job["transport"], world, policy, Path(job["model"]), Path(job["root"])) as run:
        INCARNATIONS[job["incarnation"]](run, *job["args"])


def _serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(INCARNATION_SECONDS)
            os.dup2(2, 1)
            status = 1
            try:
                _live(json.loads(line))
                status = 0
            except UserError as error:
                print(error, file=sys.stderr)
                status = 3
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
