"""The Python API: make a run, read one from its files while it goes on or later, serve weights, ask and evaluate them.

It works in scripts and in notebooks. What cannot work raises a UserError, a line for people.
"""

import json
import os
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx

from prime_rl.config import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, write_toml
from prime_rl.config.inference import SERVER
from prime_rl.errors import UserError, say, user_errors
from prime_rl.evals.results import REPORT
from prime_rl.launcher import launch, ports
from prime_rl.launcher.plan import ProcessSpec, ServerSpec
from prime_rl.launcher.supervise import RunOutcome, SupervisedChild, Supervisor
from prime_rl.monitor import read_metrics, read_status
from prime_rl.monitor.monitor import metrics_path
from prime_rl.transport.commit import CommitError, list_steps, step_dir
from prime_rl.transport.settings import running_processes
from prime_rl.transport.weights import ADAPTER_CONFIG, read_adapter_config, weights_manifest
from prime_rl.wait import wait

if TYPE_CHECKING:
    import pyarrow as pa

_READY_SECONDS = 1200.0
_REPLY_SECONDS = 600.0  # between two pieces of a reply
_PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Run:
    """The directory of a run of `rl` or `sft`, or of a tenant. Every look reads its files, so it may be going on."""

    directory: Path

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The resolved settings of each process, as its TOML file has them."""
        return {path.stem: tomllib.loads(path.read_text()) for path in sorted(self.directory.glob("configs/*.toml"))}

    @property
    def running(self) -> list[str]:
        """The processes that are running."""
        return sorted(running_processes(self.directory))

    @property
    def steps(self) -> list[int]:
        """The steps whose samples are there."""
        return list_steps(self.directory / "rollouts")

    def metrics(self, process: str = "trainer") -> "pa.Table":
        """Return the metrics of a process, one row a step. Raises UserError: it has logged none."""
        if not (path := metrics_path(self.directory, process)).is_file():
            there = ", ".join(sorted(path.stem for path in path.parent.glob("*.jsonl"))) or "nobody's yet"
            raise UserError(f"{self.directory} has no metrics of {process}; there are {there}")
        return _table(read_metrics(path))

    @property
    def evals(self) -> "pa.Table":
        """The metrics of evaluations, one row for each version that was evaluated, whose number is `step`."""
        paths = [metrics_path(self.directory, process) for process in ("orchestrator", "eval")]
        found = [{key: row[key] for key in row if key.startswith("eval/")} | {"step": row["step"]}
                 for path in paths for row in read_metrics(path)]  # fmt: skip
        return _table([row for row in found if len(row) > 1])

    def samples(self, step: int | None = None) -> "pa.Table":
        """Return the samples of a step (None: the newest), a row each, with the columns of docs/reference/files.md.
        Raises UserError: there are none, or no more."""
        import pyarrow as pa

        from prime_rl.transport.rollouts import FILE, open_batch

        steps = self.steps
        if step is None and steps:
            step = steps[-1]
        if step is None or step not in steps:
            there = f"there are steps {_ranges(steps)}" if steps else "there are none yet"
            raise UserError(f"{self.directory} has no samples{'' if step is None else f' of step {step}'}: {there}")
        with user_errors(f"samples of step {step}", CommitError, OSError, pa.ArrowInvalid):
            batch = open_batch(step_dir(self.directory / "rollouts", step))
            with pa.OSFile(str(batch.directory / FILE)) as file:
                return pa.ipc.open_file(file).read_all()

    @property
    def weights(self) -> Path:
        """The newest version with files: a directory of a model, or of an adapter; the base model's before there is
        one. Raises UserError: there is no version."""
        for version in reversed(list_steps(self.directory / "weights")):
            with suppress(CommitError):  # pruned meanwhile
                manifest = weights_manifest(step_dir(self.directory / "weights", version))
                if manifest.publisher is None:  # else in the trainer's memory alone
                    return manifest.files
        tenants = ", ".join(str(path) for path in sorted(self.directory.glob("tenants/*")))
        raise UserError(f"{self.directory} has no weights yet{f'; its tenants: {tenants}' if tenants else ''}")


@dataclass(frozen=True)
class Server:
    """A server of the OpenAI API. `model` is the name that requests give."""

    base_url: str
    model: str
    api_key: str = field(default="none", repr=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> Iterator[str]:
        """Yield the reply to a conversation in pieces, as it is sampled. `parameters`: of the request (`max_tokens=…`).
        Raises UserError: the server refuses, or does not answer."""
        url, body = f"{self.base_url}/chat/completions", {"model": self.model, "messages": messages, "stream": True}
        headers = {"Authorization": f"Bearer {self.api_key}"}
        with user_errors(f"no reply from {self.base_url}", httpx.HTTPError):
            with httpx.stream(
                "POST", url, json=body | parameters, headers=headers, timeout=_REPLY_SECONDS, trust_env=False
            ) as response:
                _check(response)
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise UserError(f"{self.base_url}: {event['error']['message']}")
                        yield from (choice["delta"].get("content") or "" for choice in event["choices"])


def run(config: RLConfig) -> Run:
    """Make the run that `rl` makes, print its progress, and return it once it has ended. Interrupted once it finishes
    its step and saves that; in a thread other than the main one it cannot be.

    Raises:
        UserError: it cannot work, which is found before anything starts, or it has failed.
        KeyboardInterrupt: it was interrupted.
    """
    try:
        with user_errors(f"{config.output_dir}", CommitError):
            status = launch.run(config)
    finally:
        ports.release()
    _check_outcome(status, f"the run in {config.output_dir}", config.output_dir)
    return Run(config.output_dir)


def open_run(directory: str | Path) -> Run:
    """Return the run in a directory. Raises UserError: there is none."""
    if not any((Path(directory) / name).is_dir() for name in ("configs", "weights")):
        raise UserError(f"{directory} holds no run: give the output directory of one")
    return Run(Path(directory))


@contextmanager
def serve(weights: Run | str | Path, **settings: Any) -> Iterator[Server]:
    """Serve the newest weights of a run, or those in a directory, in a `with` block.

    A run that is going on has a server, which is used. Otherwise one is started, with the settings of the run's and
    those of `inference` in `settings` (`max_model_len=…`), and ends with the block.
    Raises UserError: there are no weights, or the server does not start.
    """
    given = (weights.directory if isinstance(weights, Run) else Path(weights)).resolve()
    if any((given / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        model, run_directory = given, given.parents[1]
    elif (server := _running_server(open_run(given))) is not None:
        yield server
        return
    else:
        model, run_directory = Run(given).weights, given
    with TemporaryDirectory(prefix="prime-rl-") as temporary:
        config = _inference_config(model, run_directory, Path(temporary), settings)
        key = config.api_key or os.environ.get("VLLM_API_KEY", "none")
        server = Server(f"{config.server.url}/v1", config.model.name, key)
        env = {"VLLM_API_KEY": config.api_key} if config.api_key else {}
        child = SupervisedChild(_process(SERVER, config, env, ServerSpec(server.base_url, _READY_SECONDS)))
        child.start(os.environ)
        try:
            wait(
                lambda: child.process.status is not None or _is_ready(config.output_dir),
                subject=f"server of {model}", owner="vLLM", seconds=_READY_SECONDS,
            )  # fmt: skip
            if child.process.status is not None:
                raise UserError(f"the server of {model} has ended: {' '.join(child.last_words('failed')[-1:])}")
            if config.lora is not None:
                body = {"weight_dir": str(model), "version": weights_manifest(model).version}
                headers = {"Authorization": f"Bearer {key}"}
                url = f"{config.server.url}/update_weights"
                _check(httpx.post(url, json=body, headers=headers, timeout=_REPLY_SECONDS, trust_env=False))
            yield server
        finally:
            child.process.reap()


def evaluate(
    server: Server, environments: Sequence[str | Mapping[str, Any]], **settings: Any
) -> dict[str, dict[str, float]]:
    """Evaluate what a server serves, as `eval` does. Return the metrics of each environment (`avg@1`, `pass@1`, …).

    Args:
        environments: Ids, or tables with settings (`{"id": …, "args": …}`).
        settings: Of `eval` (`num_examples=…`). Results are kept where `output_dir` is among them.

    Raises UserError: an environment cannot be loaded, or too many attempts failed.
    """
    tables = [{"id": one} if isinstance(one, str) else one for one in environments]
    with TemporaryDirectory(prefix="prime-rl-") as temporary:
        values = {"environments": tables, "output_dir": temporary, "model.name": server.model}
        config = EvalConfig.from_toml(**values | {"client.base_url": server.base_url} | settings)
        process = _process("eval", config, {config.client.api_key_var: server.api_key})
        supervisor = Supervisor([process], config.output_dir, say)
        _check_outcome(supervisor.run().value, "; ".join(supervisor.failures[:1]) or "the evaluation")
        results = json.loads((config.output_dir / "evals" / REPORT).read_bytes())["results"]
    return {result["environment"]: result["metrics"] for result in results}


def _process(
    name: str, config: InferenceConfig | EvalConfig, env: Mapping[str, str], server: ServerSpec | None = None
) -> ProcessSpec:
    """Write a process's configuration; return what starts it."""
    path = config.output_dir / "configs" / f"{name}.toml"
    write_toml(config, path)
    argv = (sys.executable, "-m", f"prime_rl.entrypoints.{name}", "@", str(path))
    return ProcessSpec(name, argv, config.output_dir / "logs" / f"{name}.log", env, server=server)


def _inference_config(model: Path, run: Path, output_dir: Path, settings: Mapping[str, Any]) -> InferenceConfig:
    """Return the configuration of a server of a model, or of an adapter beside its base model, as that of the run was,
    or of the run's deployment."""
    paths = [directory / "configs" / f"{SERVER}.toml" for directory in (run, run.parents[1])]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {
        "model.name": str(model), "lora": None, "output_dir": output_dir, "weights_root": None, "replica": 0,
        "servers_on_host": 1, "router_replay": False, "server": {"host": None, "port": port},
    }  # fmt: skip
    if (model / ADAPTER_CONFIG).is_file():
        adapter = read_adapter_config(model)
        lora = {"max_rank": adapter["r"], "tenants": None, "resident": None}
        values |= {"model.name": adapter["base_model_name_or_path"], "lora": lora}
    return InferenceConfig.from_toml(*[path for path in paths if path.is_file()][:1], **values | dict(settings))


def _running_server(run: Run) -> Server | None:
    """Return the server of a run that is going on; None where it does not answer, or there is none."""
    path, key = run.directory / "configs" / "orchestrator.toml", run.directory / "key"
    if not path.is_file() or not any(name.startswith((SERVER, "orchestrator")) for name in run.running):
        return None
    config = OrchestratorConfig.from_toml(path)
    secret = os.environ.get(config.client.api_key_var) or (key.read_text() if key.is_file() else "none")
    root = config.client.api_roots[0]
    with suppress(httpx.HTTPError):
        if httpx.get(f"{root}/health", timeout=_PROBE_SECONDS, trust_env=False).is_success:
            return Server(f"{root}/v1", config.model.name, secret)
    return None


def _is_ready(output_dir: Path) -> bool:
    status = read_status(output_dir).get(SERVER)
    return status is not None and status.ready is not None


def _check(response: httpx.Response) -> None:
    """Raise UserError with what the server says is wrong."""
    if response.is_error:
        response.read()
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:300]
        raise UserError(f"{response.url}: HTTP {response.status_code}: {message}")


def _check_outcome(status: int, what: str, output_dir: Path | None = None) -> None:
    """Raise what the exit status of a command stands for, with the reasons that its processes gave."""
    if status == RunOutcome.INTERRUPTED.value:
        raise KeyboardInterrupt(f"{what} was interrupted")
    if status:
        statuses = read_status(output_dir).items() if output_dir is not None else ()
        reasons = [f"{name} {one.outcome}" for name, one in statuses if (one.outcome or "").startswith("failed")]
        raise UserError(f"{what} has failed{': ' if reasons else ''}{'; '.join(reasons)}")


def _ranges(steps: Sequence[int]) -> str:
    """`0 to 3, 7`, of ascending numbers."""
    starts = [step for step in steps if step - 1 not in {*steps}]
    ends = [step for step in steps if step + 1 not in {*steps}]
    return ", ".join(f"{one}" if one == last else f"{one} to {last}" for one, last in zip(starts, ends, strict=True))


def _table(rows: Sequence[Mapping[str, float]]) -> "pa.Table":
    """A column for every key that a row has, `step` first; null where a row has it not."""
    import pyarrow as pa

    keys = dict.fromkeys(["step", *(key for row in rows for key in row)])
    return pa.table({key: [row.get(key) for row in rows] for key in keys})
