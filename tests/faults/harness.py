"""One cell of the fault matrix: a whole run of `rl` with one thing going wrong in it, and what is found afterwards.

The launcher, the trainer, the orchestrator and the environment worker are the real ones, each a process of its own. The
engine is a fake one outside of the run, restarted by `EngineKeeper`, or with `engine="vllm"` the launcher's real one.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import httpx
import tomli_w

from conftest import free_port
from faults import audit
from prime_rl import processes
from prime_rl.faults import ENV as FAULTS
from prime_rl.faults import Fault
from prime_rl.monitor import read_status
from support.processes import REPOSITORY, Command

TESTS = REPOSITORY / "tests"
MODEL = REPOSITORY / "assets" / "tiny-reverse"
MAX_STEPS = 4
INTERVAL = 2
TIMEOUT = 180.0
MORE_SECONDS = 60.0  # per fault
TENANTS = ("alice", "bob")
STOPPED_SECONDS = 2.0

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        do, process, point: Its place in the table.
        faults: The plan; empty when the harness itself does the damage (to the `launcher`, once the path `point` is in
            the run directory), or for an undisturbed run.
        exact: What must equal the undisturbed run bit for bit: `all`; `training` (weights, tokens and rewards, but not
            attempts, which ledger and error counts show); or nothing: sampling runs ahead, and order depends on time.
        ends: Whether the run goes on by itself, or may end with a clear error, after which `rl --recover` goes on.
        engines: How many fake ones there are.
        resume: Instead of a new run, the undisturbed one is gone on with from this checkpoint.
        lora: Adapters are trained.
        tenants: Two of them do what the undisturbed run does, in one trainer.
        settings: On top of the common ones.
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
    lora: bool = False
    tenants: bool = False
    settings: Settings = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.do} {self.process} {self.point}"

    @property
    def reference(self) -> str | None:
        """The undisturbed run that it is compared with."""
        return None if self.exact == "nothing" else f"{self.engine}{'-lora' * self.lora}"


@dataclass(frozen=True)
class Result:
    """How a cell went: `went on`, `ended, recovered`, or what is wrong."""

    outcome: str
    problems: list[str]
    seconds: float
    incarnations: dict[str, int]


@contextmanager
def repeated(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `look` again and again, in a thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            look()

    thread = threading.Thread(target=run, name=look.__qualname__, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class EngineKeeper:
    """Supervise an engine that does not belong to the run: start it, and start it again when it dies or stops."""

    def __init__(self, directory: Path, port: int, env: Mapping[str, str], weights: Path, delay: float = 0.02) -> None:
        self.incarnations, self._stopped_since = 0, 0.0
        self._arguments = ("--policy", "--model", MODEL, "--port", port, "--delay", delay, "--weights", weights)
        # It imports from `tests` by its own path.
        self._log, self._env = directory / f"engine-{port}.log", {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{TESTS}"}
        self._engine = self._start()

    def _start(self) -> Command:
        self.incarnations += 1
        return Command("engine", *self._arguments, log=self._log, env=self._env, module="support.fake_engine")

    def _look(self) -> None:
        process = self._engine.process
        if process.poll() is not None:
            self._engine.close()
            self._engine = self._start()
        elif (found := processes.read(process.pid)) is None or not found.stopped:
            self._stopped_since = 0.0
        else:
            self._stopped_since = self._stopped_since or time.monotonic()
            if time.monotonic() - self._stopped_since > STOPPED_SECONDS:
                self.kill()

    def kill(self) -> None:
        """SIGKILL; it is started again."""
        self._engine.process.kill()

    @contextmanager
    def running(self) -> Iterator[Self]:
        try:
            with repeated(self._look, 0.1):
                yield self
        finally:
            self._engine.close()


class ServedWatcher:
    """Keep the last answer to "what do you serve?": a server that belongs to the run is gone when the run is over."""

    def __init__(self, port: int) -> None:
        self.last: dict[str, Any] = {"version": None, "hash": ""}
        # A client of its own each time would load the system's certificates each time.
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2, trust_env=False, verify=False)

    def look(self) -> None:
        with suppress(httpx.TransportError):
            if (answer := self._client.get("/weights")).is_success:
                self.last = answer.json()

    @contextmanager
    def running(self) -> Iterator[Self]:
        # A run may end a fifth of a second after its last version is served.
        with self._client, repeated(self.look, 0.05):
            yield self


def run_cell(cell: Cell, directory: Path, reference: Path | None = None) -> Result:
    """Run it in `directory`, which is made; everything stays there for whoever wants to look.

    Args:
        reference: The run directory to compare with.
    """
    began = time.monotonic()
    directory.mkdir(parents=True)
    run, problems = directory / "run", list[str]()
    runs = [run / "tenants" / name for name in TENANTS] if cell.tenants else [run] * cell.engines
    ports = [free_port() for _ in runs]
    plan, config = directory / "plan.json", write_config(cell, directory, ports)
    plan.write_text(json.dumps([vars(fault) for fault in cell.faults]))  # counters go beside it
    env = environment()
    keepers: list[EngineKeeper] = []
    with ExitStack() as stack:
        if cell.engine == "fake":
            faulty = {**env, FAULTS: str(plan)}
            keepers = [
                stack.enter_context(EngineKeeper(directory, port, faulty, its / "weights").running())
                for port, its in zip(ports, runs, strict=True)
            ]
        watchers = [stack.enter_context(ServedWatcher(port).running()) for port in ports]
        if cell.resume is not None and reference is not None:
            shutil.copytree(reference, run)
        try:
            faulty = {**env, FAULTS: str(plan)}
            if cell.tenants:
                status = _run_tenants(config, ports, faulty)
            else:
                status = _run_rl(cell, config, directory / "rl.log", faulty)
            ended = status != 0
            if ended and cell.tenants:
                problems.append(f"a tenant, or the trainer, ended with status {status}")
            elif ended:
                problems += _badly_ended(cell, status, directory / "rl.log")
            if ended and not problems:
                with Command("rl", "@", config, "--recover", log=directory / "recover.log", env=env) as rl:
                    if (status := rl.process.wait(TIMEOUT)) != 0:
                        problems.append(f"rl --recover ended with status {status}: {_last_error(rl.log)}")
        except subprocess.TimeoutExpired as error:
            status, ended = -1, True
            problems.append(f"not over after {error.timeout:.0f} s: {_stuck(run)}")
        for watcher in watchers:
            watcher.look()
        problems += _unfired(cell, plan)
        if status == 0 and cell.tenants:
            for its, watcher in zip(runs, watchers, strict=True):
                wrong = audit.problems(its, MAX_STEPS, _kept(cell), watcher.last)
                if reference is not None and not wrong:
                    wrong = audit.differences(its, reference, attempts=cell.exact == "all")
                problems += [f"{its.name}: {each}" for each in wrong]
        elif status == 0:
            # One that was killed late may not be back before the run is over: the last version was the others' then.
            last = max((watcher.last for watcher in watchers), key=lambda served: served["version"] or 0)
            problems += [wrong for watcher in watchers if (wrong := audit.never_committed(run, watcher.last))]
            incarnations = sum(keeper.incarnations for keeper in keepers)
            if len(ports) > 1 and incarnations != len(ports) + len(cell.faults):
                problems.append(f"{incarnations} incarnations of {len(ports)} engines, with {len(cell.faults)} faults")
            problems += audit.problems(run, MAX_STEPS, _kept(cell), last, interrupted=ended)
            if reference is not None and not problems:
                problems += audit.differences(run, reference, attempts=cell.exact == "all")
    problems += survivors(run)
    outcome = "FAILED" if problems else "ended, then recovered" if ended else "went on"
    return Result(outcome, problems, time.monotonic() - began, _incarnations(run, keepers))


def environment() -> dict[str, str]:
    """What the processes of a run need on top of ours: this checkout's code, and the environments of the tests."""
    paths = [REPOSITORY / "src", TESTS / "support" / "envs", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONFAULTHANDLER": "1"}


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
            "fork_engine": True,
        }
        if exact:  # one sequence at a time, computed the same way whatever came before: equal seeds give equal tokens
            config["inference"]["vllm"] = {"max_num_seqs": 1, "enable_prefix_caching": False}
        del config["orchestrator"]["client"]["base_url"]
    merge(config, cell.settings)
    if cell.lora:
        merge(config, {"trainer": {"lora": {"rank": 4}}})
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


def _run_rl(cell: Cell, config: Path, log: Path, env: dict[str, str]) -> int:
    """The exit status of the run, to which the harness does the damage itself where no fault of the plan does."""
    more = [] if cell.resume is None else ["--ckpt.resume-step", cell.resume]
    run = config.parent / "run"
    with Command("rl", "@", config, *more, log=log, env=env) as rl:
        if cell.process == "launcher":
            deadline = time.monotonic() + TIMEOUT
            while not (run / cell.point).exists() and rl.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            rl.process.kill()
        return rl.process.wait(TIMEOUT + MORE_SECONDS * len(cell.faults))


def _run_tenants(config: Path, ports: Sequence[int], env: dict[str, str]) -> int:
    """Run a trainer and two orchestrators, each started anew when it is killed, until the latter have ended. Return the
    first status that is not 0, else 0."""
    values, directory = tomllib.loads(config.read_text()), config.parent
    run, shared = values["output_dir"], {key: values[key] for key in ("device", "seq_len", "model")}
    trainer = values["trainer"] | shared | {"output_dir": run, "tenants": {"slots": len(ports)}}
    trainer["recovery_interval"] = values["recovery_interval"]
    own = {key: trainer.pop(key) for key in ("optim", "scheduler", "loss") if key in trainer}
    keys = "max_steps", "async_level", "seed", "seq_len", "model", "ckpt"
    configs = {"trainer": trainer}
    for name, port in zip(TENANTS, ports, strict=True):
        configs[name] = values["orchestrator"] | {key: values[key] for key in keys}
        configs[name] |= {"tenant": {"join": run, "name": name, **own}}
        configs[name]["client"] = configs[name]["client"] | {"base_url": f"http://127.0.0.1:{port}/v1"}
    for name, table in configs.items():
        (directory / f"{name}.toml").write_text(tomli_w.dumps(table))

    def start(name: str) -> Command:
        command, more = ("trainer", ["--recover"]) if name == "trainer" else ("orchestrator", [])
        return Command(command, "@", directory / f"{name}.toml", *more, log=directory / f"{name}.log", env=env)

    commands, deadline = {"trainer": start("trainer")}, time.monotonic() + TIMEOUT
    ready = Path(run) / "settings" / "trainer.json"
    try:
        while time.monotonic() < deadline:
            for name in configs if ready.exists() else ["trainer"]:
                status = commands[name].process.poll() if name in commands else -signal.SIGKILL
                if status == -signal.SIGKILL:
                    commands[name] = start(name)
                elif status:
                    return status
            if all(name in commands and commands[name].process.poll() == 0 for name in TENANTS):
                return 0
            time.sleep(0.1)
    finally:
        for command in commands.values():
            command.close()
    raise subprocess.TimeoutExpired("two tenants", TIMEOUT)


def _badly_ended(cell: Cell, status: int, log: Path) -> list[str]:
    """What is wrong with the way the run ended: it must say why in a line, unless it was killed from outside."""
    text = log.read_text(errors="replace")
    if cell.process == "launcher":
        return []
    if cell.ends == "goes on":
        return [f"ended with status {status}: {_last_error(log)}"]
    if status != 1 or "error: " not in text:
        return [f"ended with status {status} and no clear error: {text[-300:]}"]
    return ["ended with a traceback"] if "Traceback (most recent call last)" in text else []


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.strip() for line in lines if "error: " in line or "Error" in line]
    return (errors or lines or ["no output"])[-1][:400]


def _unfired(cell: Cell, plan: Path) -> list[str]:
    """Faults of the plan that never happened: then the cell has shown nothing."""
    found, numbers = [], dict.fromkeys({fault.process for fault in cell.faults}, 0)
    for fault in cell.faults:
        seen = plan.with_name(f"{plan.name}.{fault.process}.{numbers[fault.process]}.seen")
        numbers[fault.process] += 1
        if not seen.exists() or seen.stat().st_size < fault.nth:
            found.append(f"the fault never fired: {fault.do} in {fault.process} at {fault.point}")
    return found


def _stuck(run: Path) -> str:
    """What every process said last."""
    return "; ".join(
        f"{name}: {one.phase} {one.step} waiting for {one.waiting}" for name, one in read_status(run).items()
    )


def survivors(run: Path) -> list[str]:
    """Processes of the run that outlived it, by their command lines. They die within a second or so of the launcher."""
    deadline = time.monotonic() + 10
    while (alive := _mentioning(str(run))) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [f"still alive: {line[:150]}" for line in alive]


def _mentioning(text: str) -> list[str]:
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return [line for pid, line in lines.items() if text in line and pid != os.getpid()]


def _incarnations(run: Path, keepers: Sequence[EngineKeeper]) -> dict[str, int]:
    """How often each process was started, by what its log says."""
    logs = {name: run / "logs" / f"{name}.log" for name in ("trainer", "orchestrator")}
    texts = {name: log.read_text(errors="replace") if log.exists() else "" for name, log in logs.items()}
    incarnations = {name: text.count("fault injection is on") for name, text in texts.items()}
    return {**incarnations, **({"engine": sum(keeper.incarnations for keeper in keepers)} if keepers else {})}
