"""The Python API, for scripts and notebooks: start a run, read its directory, serve and evaluate its weights.
Errors that the user can fix raise UserError."""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from prime_rl.config import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig
from prime_rl.config.inference import SERVER
from prime_rl.config.loader import from_files
from prime_rl.errors import UserError, user_errors
from prime_rl.evals.results import REPORT
from prime_rl.fleet.client import error_message
from prime_rl.launcher import launch
from prime_rl.launcher.one_server import process_of, running_server
from prime_rl.launcher.rundir import as_benchmark
from prime_rl.launcher.supervise import RunOutcome, Supervisor
from prime_rl.monitor.run_directory import RunDirectory, open_run
from prime_rl.transport.commit import MANIFEST, CommitError, step_dir
from prime_rl.transport.weights import ADAPTER_CONFIG, read_adapter_config, weights_manifest

_READY_SECONDS = 1200.0
_REPLY_SECONDS = 600.0  # between two pieces of a reply
_PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Server:
    """A server of the OpenAI API. Requests name `model`, of an adapter its base model, and carry `api_key`.
    `version`: of the weights in their run, when they were looked for; 0: a base model."""

    base_url: str
    model: str
    api_key: str = field(default="none", repr=False)
    version: int = 0

    def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> Iterator[str]:
        """Yield the reply in pieces of text, as it is sampled. `messages`: the conversation, as dicts with `role` and
        `content`. `parameters`: of the request (`max_tokens=…`). Raises UserError: it is rejected or not answered."""
        body = {"model": self.model, "messages": messages, "stream": True, **parameters}
        with self._post(f"{self.base_url}/chat/completions", body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise UserError(f"{self.base_url}: {event['error']['message']}")
                    yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    @contextmanager
    def _post(self, url: str, body: Mapping[str, Any]) -> Iterator[httpx.Response]:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        with user_errors(f"{url} does not answer", httpx.HTTPError):
            with httpx.stream("POST", url, json=body, headers=headers, timeout=_REPLY_SECONDS, trust_env=False) as sent:
                if sent.is_error:
                    sent.read()
                    raise UserError(f"{url} refuses: {error_message(sent)}")
                yield sent


def run(config: RLConfig) -> RunDirectory:
    """Run `rl` to the end and print its progress. In the main thread, the first Ctrl-C finishes and saves the current
    step. With `slurm` or `dry_run`, return at once. Raises UserError: it cannot work, which is found before anything
    starts, or it has failed. Raises KeyboardInterrupt: it was interrupted."""
    config = as_benchmark(config) if config.bench else config
    status = launch.run(config)
    if status == RunOutcome.INTERRUPTED.value:
        raise KeyboardInterrupt
    if status:
        raise UserError(f"the run in {config.output_dir} has failed: what it printed says why")
    return RunDirectory(config.output_dir)


@contextmanager
def serve(weights: RunDirectory | str | Path, **settings: Any) -> Iterator[Server]:
    """Serve the newest weights of a run, or those in a directory, in a `with` block.

    If the run is running and its server serves them, that server is used. Otherwise a new one is started, with the
    settings of the run and `settings` of `inference` (`max_model_len=…`); it ends with the block.
    Raises UserError: there are no weights, a new server does not start, the run's server does not answer or rejects the
    key, or `settings` are given and the run's server is used.
    """
    model = (weights.directory if isinstance(weights, RunDirectory) else Path(weights)).resolve()
    directory = model.parent.parent  # a version is RUN/weights/step_N
    if not any((model / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        if (running := _server_of(open_run(model))) is not None:
            if settings:
                raise UserError(f"{running.base_url}, the run's server, is used: leave out {', '.join(settings)}")
            yield running
            return
        directory, model = model, RunDirectory(model).weights
    with TemporaryDirectory(prefix="prime-rl-") as temporary:
        config = _inference_config(model, directory, Path(temporary), settings)
        key = config.api_key or os.environ.get("VLLM_API_KEY") or "none"
        manifest = weights_manifest(model) if config.lora or (model / MANIFEST).is_file() else None
        server = Server(f"{config.server.url}/v1", config.model.name, key, manifest.version if manifest else 0)
        with running_server(config, _READY_SECONDS):
            if manifest is not None:  # the server reports what it began with as version 0
                body = {"weight_dir": str(model), "version": server.version}
                with server._post(f"{config.server.url}/update_weights", body):
                    pass
            yield server


def evaluate(
    server: Server, environments: Sequence[str | Mapping[str, Any]], **settings: Any
) -> dict[str, dict[str, float]]:
    """Evaluate what a server serves, as `eval` does. Return the metrics (`avg@1`, …) of each environment.
    Raises UserError: an environment cannot be loaded, or too many attempts failed. Raises KeyboardInterrupt.

    Args:
        environments: Ids, or tables with settings (`{"id": …, "args": …}`).
        settings: Of `eval` (`num_examples=…`); results are kept where `output_dir` is among them.
    """
    tables = [{"id": entry} if isinstance(entry, str) else entry for entry in environments]
    with TemporaryDirectory(prefix="prime-rl-") as temporary:
        values = {"environments": tables, "output_dir": temporary, "model.name": server.model} | settings
        config = from_files(EvalConfig, **{"client.base_url": server.base_url} | values)
        process = process_of("eval", config, {config.client.api_key_var: server.api_key})
        supervisor = Supervisor([process], config.output_dir, lambda line: None)
        outcome = supervisor.run()
        if outcome is RunOutcome.INTERRUPTED:
            raise KeyboardInterrupt
        if outcome is not RunOutcome.SUCCESS:
            raise UserError("; ".join(supervisor.failures))
        results = json.loads((config.output_dir / "evals" / REPORT).read_bytes())["results"]
    return {result["environment"]: result["metrics"] for result in results}


def _inference_config(model: Path, run: Path, output_dir: Path, settings: Mapping[str, Any]) -> InferenceConfig:
    """Return the settings to serve a model, or an adapter and its base model, as in its run or deployment."""
    paths = [directory / "configs" / f"{SERVER}.toml" for directory in (run, run.parent.parent)]
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
    return from_files(InferenceConfig, *[path for path in paths if path.is_file()][:1], **values | dict(settings))


def _server_of(run: RunDirectory) -> Server | None:
    """Return the server of a run that is running; None if it has none, or that serves other weights.
    Raises UserError: the key cannot be read, or the server rejects it or does not answer."""
    path, own_key = run.directory / "configs" / "orchestrator.toml", run.directory / "key"
    if not path.is_file() or not any(name.startswith((SERVER, "orchestrator")) for name in run.running):
        return None
    config = from_files(OrchestratorConfig, path)
    with user_errors("the key of the run cannot be read", OSError):
        key = os.environ.get(config.client.api_key_var) or (own_key.read_text() if own_key.is_file() else "none")
    root = config.client.api_roots[0]
    headers = {"Authorization": f"Bearer {key}"}
    try:
        reply = httpx.get(f"{root}/weights", headers=headers, timeout=_PROBE_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        if any(name.startswith(SERVER) for name in run.running):
            problem = f"the run's server {root} does not answer ({type(error).__name__}): it may be starting or busy"
            raise UserError(f"{problem}; try again, or give a directory of weights") from error
        return None
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise UserError(f"the run's server {root} refuses the key: set {config.client.api_key_var}")
    with suppress(CommitError, ValueError, KeyError):
        served = reply.json()
        if weights_manifest(step_dir(run.directory / "weights", served["version"])).hash == served["hash"]:
            return Server(f"{root}/v1", config.model.name, key, served["version"])
    return None
