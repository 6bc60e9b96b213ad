"""One cell of the fault matrix: a whole run of `rl` with one thing going wrong in it, and what is found afterwards.

The launcher, the trainer, the orchestrator and the environment worker are the real ones, each a process of its own. The engine is a fake one
outside of the run, watched and restarted by `EngineKeeper`, or with `engine="vllm"` the real one under the launcher.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import tomli_w

from conftest import free_port
from faults import audit
from prime_rl.faults import ENV as FAULTS
from prime_rl.faults import Fault
from prime_rl.lifeline import Lifeline
from support.processes import REPOSITORY, Command, inherited

MODEL = REPOSITORY / "assets" / "tiny-reverse"
MAX_STEPS = 4
INTERVAL = 2
TIMEOUT = 180.0
MORE_SECONDS = 60.0  # per fault
DISK_MIB = 96
BALLAST = "ballast"
STOPPED_SECONDS = 2.0

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        do, process, point: Its place in the table.
        faults: What the plan says; empty when the harness itself does the damage (to the `launcher` or the `disk`, once the path `point` stands in the run
            directory), or for an undisturbed run.
        exact: What must equal the undisturbed run bit for bit: `all`; `training` (weights, tokens and rewards, but attempts may have been
            repeated, which ledger and error counts show); or nothing, where sampling runs ahead of training and order depends on time.
        ends: Whether the run goes on by itself, or may end with a clear error, after which `rl --recover` goes on.
        engines: How many fake ones there are.
        resume: Instead of a new run, the undisturbed one is gone on with from this checkpoint.
        settings: On top of the common ones.
        inapplicable: Why there is nothing to run.
    """

    do: str
    process: str
    point: str
    faults: tuple[Fault, ...] = ()
    exact: Literal["all", "training", "nothing"] = "all"
    ends: Literal["goes on", "may end", "ends"] = "goes on"
    engine: Literal["fake", "vllm"] = "fake"
    engines: int = 1
    resume: int | None = None
    settings: Settings = field(default_factory=dict)
    inapplicable: str = ""

    @property
    def name(self) -> str:
        return f"{self.do} {self.process} {self.point}"

    @property
    def reference(self) -> str | None:
        """The undisturbed run that it is compared with."""
        return None if self.exact == "nothing" else self.engine


@dataclass(frozen=True)
class Result:
    """How a cell went: `went on`, `ended, recovered`, or what is wrong."""

    outcome: str
    problems: list[str]
    seconds: float
    incarnations: dict[str, int]


class EngineKeeper:
    """The supervisor of an engine that does not belong to the run: starts it, and starts it again when it dies or stops."""

    def __init__(self, directory: Path, port: int, env: Mapping[str, str], delay: float = 0.02) -> None:
        self.port, self.incarnations = port, 0
        self._log = directory / f"engine-{port}.log"
        self._command = [
            sys.executable, REPOSITORY / "tests" / "support" / "fake_engine.py",
            "--policy", "--model", MODEL, "--port", port, "--delay", delay, "--weights", directory / "run" / "weights",
        ]  # fmt: skip
        self._env = env
        self._line = Lifeline()
        self._ended = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="engine keeper", daemon=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        self.incarnations += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(part) for part in self._command],
                stdout=log, stderr=subprocess.STDOUT, env={**inherited(), **self._env, **self._line.env},
                pass_fds=self._line.pass_fds, start_new_session=True, cwd=REPOSITORY,
            )  # fmt: skip

    def _watch(self) -> None:
        stopped_since: float | None = None
        while not self._ended.wait(0.1):
            if self._process.poll() is not None:
                self._process = self._start()
            stopped = _state(self._process.pid) == "T"
            stopped_since = (stopped_since or time.monotonic()) if stopped else None
            if stopped_since is not None and time.monotonic() - stopped_since > STOPPED_SECONDS:
                self._process.kill()
                self._process.wait()

    def kill(self) -> None:
        """SIGKILL; it is started again."""
        self._process.kill()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()
        self._line.close()


class ServedWatcher:
    """Remembers the last answer to "what do you serve?": a server that belongs to the run is gone when the run is over."""

    def __init__(self, port: int) -> None:
        self.last: dict[str, Any] = {"version": None, "hash": ""}
        # A client of its own each time would load the system's certificates each time.
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2, trust_env=False, verify=False)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="served watcher", daemon=True)

    def look(self) -> None:
        try:
            answer = self._client.get("/weights")
        except httpx.TransportError:
            return
        if answer.is_success:
            self.last = answer.json()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):  # a run may end a fifth of a second after its last version is served
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()


def run_cell(cell: Cell, directory: Path, reference: Path | None = None) -> Result:
    """Run it in `directory`, which is made; everything stays there for whoever wants to look.

    Args:
        reference: The run directory to compare with.
    """
    began = time.monotonic()
    directory.mkdir(parents=True)
    run, ports = directory / "run", [free_port() for _ in range(cell.engines)]
    plan = write_plan(directory, cell.faults)
    config = write_config(cell, directory, ports)
    env = environment()
    found: list[str] = []
    with ExitStack() as stack:
        keepers: list[EngineKeeper] = []
        if cell.process == "disk":
            try:
                stack.enter_context(small_disk(run))
            except PermissionError as error:
                return Result(f"not run: {error}", [], 0.0, {})
        if cell.engine == "fake":
            for port in ports:
                keepers.append(stack.enter_context(EngineKeeper(directory, port, {**env, FAULTS: str(plan)})))
        watchers = [stack.enter_context(ServedWatcher(port)) for port in ports]
        if cell.resume is not None and reference is not None:
            shutil.copytree(reference, run)
        status = _run_rl(cell, config, directory / "rl.log", {**env, FAULTS: str(plan)}, found)
        ended = status != 0
        if ended and not found:
            found += _badly_ended(cell, status, directory / "rl.log")
        (run / BALLAST).unlink(missing_ok=True)
        if ended and not found:
            status = _finish_by_recover(config, directory / "recover.log", env, found)
        for watcher in watchers:
            watcher.look()
        found += _unfired(cell, plan)
        if status == 0:
            # One that was killed late may not be back before the run is over: the last version was the others' then.
            last = max((watcher.last for watcher in watchers), key=lambda served: served["version"] or 0)
            found += [wrong for watcher in watchers if (wrong := audit.never_committed(run, watcher.last))]
            if len(ports) > 1 and (incarnations := sum(keeper.incarnations for keeper in keepers)) != len(ports) + len(
                cell.faults
            ):
                found.append(f"{incarnations} incarnations of {len(ports)} engines, with {len(cell.faults)} faults")
            found += audit.problems(run, MAX_STEPS, _kept(cell), last, interrupted=ended)
            if reference is not None and not found:
                found += audit.differences(run, reference, attempts=cell.exact == "all")
    found += survivors(run)
    outcome = ("ended, then recovered" if ended else "went on") if not found else "FAILED"
    return Result(outcome, found, time.monotonic() - began, _incarnations(run, keepers))


def environment() -> dict[str, str]:
    """What the processes of a run need on top of ours: this checkout's code, and the environments of the tests."""
    paths = [
        REPOSITORY / "src",
        REPOSITORY / "tests" / "support" / "envs",
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONFAULTHANDLER": "1"}


def write_plan(directory: Path, planned: tuple[Fault, ...]) -> Path:
    """The plan's file, counters beside it."""
    path = directory / "plan.json"
    path.write_text(json.dumps([vars(fault) for fault in planned]))
    return path


def write_config(cell: Cell, directory: Path, ports: Sequence[int]) -> Path:
    """A small run, seeded and, unless the cell says otherwise, synchronous."""
    exact = cell.exact != "nothing"
    config: dict[str, Any] = {
        "max_steps": MAX_STEPS,
        "async_level": 0 if exact else 1,
        "seed": 5,
        "device": "cpu",
        "output_dir": str(directory / "run"),
        "seq_len": 256,
        "model": {"name": str(MODEL)},
        "ckpt": {"interval": INTERVAL},
        "max_restarts": 20,
        "recovery_interval": 1,
        "heartbeat_timeout": 60.0,
        "ready_timeout": 300.0,
        "trainer": {"optim": {"lr": 1e-3}, "weights": {"dtype": "float32"}},
        "orchestrator": {
            "batch_size": 4,
            "rollouts_per_example": 2,
            "rollout_timeout": 30.0,
            "weights_timeout": 120.0,
            "sampling": {"seeded": True, "max_tokens": 48},
            "client": {
                "base_url": [f"http://127.0.0.1:{port}/v1" for port in ports],
                "ready_timeout": 300.0,
                "timeout": 60.0,
            },
            "environment": {"id": "reverse-plain"},
        },
    }
    if exact:
        config["orchestrator"]["max_concurrent"] = 1
    if cell.engine == "vllm":
        config["inference"] = {
            "server": {"port": ports[0]},
            "max_model_len": 256,
            "deterministic": exact,
            "cpu": {"fork_engine": True},
        }
        del config["orchestrator"]["client"]["base_url"]
    merge(config, cell.settings)
    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def merge(config: dict[str, Any], more: Settings) -> None:
    """Lay `more` over `config`, table by table."""
    for key, value in more.items():
        if isinstance(value, Mapping):
            merge(config.setdefault(key, {}), value)
        else:
            config[key] = value


def _kept(cell: Cell) -> list[int]:
    """The checkpoints that stand there in the end."""
    saved = list(range(INTERVAL, MAX_STEPS + 1, INTERVAL))
    return saved[-cell.settings.get("ckpt", {}).get("keep", len(saved)) :]


def _run_rl(cell: Cell, config: Path, log: Path, env: dict[str, str], found: list[str]) -> int:
    seconds = TIMEOUT + MORE_SECONDS * len(cell.faults)
    more = [] if cell.resume is None else ["--ckpt.resume-step", cell.resume]
    with Command("rl", "@", config, *more, log=log, env=env) as rl:
        try:
            if cell.process == "launcher":
                _await(rl, config.parent / "run" / cell.point)
                rl.process.kill()
            if cell.process == "disk":
                _await(rl, config.parent / "run" / cell.point)
                _fill(config.parent / "run" / BALLAST)
            return rl.process.wait(seconds)
        except subprocess.TimeoutExpired:
            found.append(f"not over after {seconds:.0f} s: {_stuck(config.parent / 'run')}")
            return -1


def _await(rl: Command, path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not path.exists() and rl.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of its own, in memory, at `directory`.

    Raises:
        PermissionError: we may not mount (`unshare -rm` in front of the command helps).
    """
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise PermissionError(f"no right to mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], timeout=30, check=True)


def _fill(ballast: Path) -> None:
    """Write until the disk is full, to the last byte."""
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(b"x")


def _badly_ended(cell: Cell, status: int, log: Path) -> list[str]:
    """What is wrong with the way the run ended: it must say why in a line, unless it was killed from outside."""
    text = log.read_text(errors="replace")
    if cell.process == "launcher":
        return []
    if cell.ends == "goes on":
        return [f"ended with status {status}: {_last_error(text)}"]
    if status != 1 or "error: " not in text:
        return [f"ended with status {status} and no clear error: {text[-300:]}"]
    return ["ended with a traceback"] if "Traceback (most recent call last)" in text else []


def _finish_by_recover(config: Path, log: Path, env: dict[str, str], found: list[str]) -> int:
    with Command("rl", "@", config, "--recover", log=log, env=env) as rl:
        try:
            status = rl.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            found.append(f"rl --recover not over after {TIMEOUT:.0f} s: {_stuck(config.parent / 'run')}")
            return -1
    if status != 0:
        found.append(f"rl --recover ended with status {status}: {_last_error(log.read_text(errors='replace'))}")
    return status


def _last_error(text: str) -> str:
    lines = text.splitlines()
    errors = [line.strip() for line in lines if "error: " in line or "Error" in line]
    return (errors or lines or ["no output"])[-1][:400]


def _unfired(cell: Cell, plan: Path) -> list[str]:
    """Faults of the plan that never happened: then the cell has shown nothing."""
    found, numbers = [], dict.fromkeys({fault.process for fault in cell.faults}, 0)
    for fault in cell.faults:
        seen = plan.with_name(f"{plan.stem}.{fault.process}.{numbers[fault.process]}.seen")
        numbers[fault.process] += 1
        if not seen.exists() or seen.stat().st_size < fault.nth:
            found.append(f"the fault never fired: {fault.do} in {fault.process} at {fault.point}")
    return found


def _stuck(run: Path) -> str:
    """What every process said last."""
    told = []
    for path in sorted((run / "status").glob("*.json")):
        status = json.loads(path.read_text())
        waiting = status.get("waiting") or {}
        told.append(f"{path.stem}: {status.get('phase')} {status.get('step')} waiting for {waiting.get('subject')}")
    return "; ".join(told)


def survivors(run: Path) -> list[str]:
    """Processes of the run that outlived it, by their command lines. They die within a second or so of the launcher."""
    deadline = time.monotonic() + 10
    while (alive := _mentioning(str(run))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"still alive: {line[:150]}" for line in alive]


def _mentioning(text: str) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and int(path.parent.name) != os.getpid():
            lines.append(line)
    return lines


def _incarnations(run: Path, keepers: Sequence[EngineKeeper]) -> dict[str, int]:
    """How often each process was started, by what its log says."""
    incarnations = {
        name: _count(run / "logs" / f"{name}.log", "fault injection is on") for name in ("trainer", "orchestrator")
    }
    return {**incarnations, "engine": sum(keeper.incarnations for keeper in keepers)} if keepers else incarnations


def _count(log: Path, text: str) -> int:
    return log.read_text(errors="replace").count(text) if log.exists() else 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
