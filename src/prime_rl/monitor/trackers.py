"""Where the metrics of a process go beside its file: W&B, TensorBoard, MLflow, Trackio, Prometheus.

A tracker is started from its settings, logs steps, and closes. One that cannot start ends the process with a UserError;
one that fails later is warned about once, and left out from then on. Libraries are imported where they are used: each
takes a second or more.
"""

import netrc
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loguru import logger

from prime_rl.config import shared
from prime_rl.errors import UserError, one_line, user_errors
from prime_rl.redact import redacted
from prime_rl.wait import TaskThread

SAMPLE_COLUMNS = ("env", "prompt", "completion", "reward", "advantage")
_CLOSE_SECONDS = 300.0  # W&B uploads what it still holds
_CHECK_SECONDS = 5.0
_PORTS = {"orchestrator": 1, "eval": 2}  # beyond the port in the settings
_WANDB_HINT = (
    "log in with `uv run wandb login`, set WANDB_API_KEY, or write local files only with --wandb.offline "
    "(--monitor.wandb.offline of one process)"
)


@dataclass(frozen=True)
class Extras:
    """What a step may show beside its numbers: samples, rows of `columns`, and values to make histograms of."""

    samples: Sequence[Sequence[Any]] = ()
    distributions: Mapping[str, Any] = field(default_factory=dict)
    columns: Sequence[str] = SAMPLE_COLUMNS

    def media(self, library: Any) -> dict[str, Any]:
        """Return them as W&B shows them; Trackio has the same classes."""
        tables = {"samples": library.Table(columns=list(self.columns), data=self.samples)} if self.samples else {}
        histograms = {name: library.Histogram(values) for name, values in self.distributions.items()}
        return tables | {f"distributions/{name}": histogram for name, histogram in histograms.items()}


class Origin(NamedTuple):
    """Identifies the process that logs."""

    output_dir: Path
    process: str
    run_config: dict[str, Any]  # to be shown, without secrets

    def group(self, name: str | None) -> str:
        """The name that the processes of a run share: in `rl` each has its own as a suffix."""
        shared_name = (name or "").removesuffix(f"-{self.process}")
        return shared_name if shared_name != (name or "") else self.output_dir.resolve().name

    def name(self, name: str | None) -> str:
        return name or f"{self.output_dir.resolve().name}-{self.process}"


class Tracker(NamedTuple):
    log: Callable[[int, Mapping[str, float], Extras], object]
    close: Callable[[], object]


def start_wandb(settings: shared.WandbConfig, origin: Origin) -> Tracker:
    import wandb

    directory = origin.output_dir / settings.dir  # or `settings.dir`, if that is absolute
    directory.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        **settings.model_dump(include={"project", "entity", "name", "id", "tags"}),
        group=settings.group or origin.group(settings.name or settings.id),
        resume="allow" if settings.id else None,
        reinit="create_new",  # a process may have several, one a tenant
        dir=str(directory),
        mode="offline" if settings.offline else None,  # None: $WANDB_MODE, or online
        config=origin.run_config,
        job_type=origin.process,
        settings=wandb.Settings(console="off"),
    )
    # A resumed run repeats steps: with a step metric of our own W&B accepts them (its own counter only grows).
    run.define_metric("*", step_metric="step")
    return Tracker(lambda step, row, extras: run.log({"step": step, **row, **extras.media(wandb)}), run.finish)


def start_tensorboard(settings: shared.TensorboardConfig, origin: Origin) -> Tracker:
    import numpy as np
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(origin.output_dir / "tensorboard" / origin.process))

    def log(step: int, row: Mapping[str, float], extras: Extras) -> None:
        summaries = [scalar_pb(name, value) for name, value in row.items()]
        for name, values in extras.distributions.items():
            summaries.append(histogram_pb(f"distributions/{name}", np.asarray(values, np.float64)))
        if extras.samples:
            summaries.append(text_pb("samples", np.array([extras.columns, *extras.samples], dtype=str)))
        for summary in summaries:
            writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))
        writer.flush()

    return Tracker(log, writer.close)


def start_mlflow(settings: shared.MlflowConfig, origin: Origin) -> Tracker:
    # By itself MLflow tries to reach a server for a quarter of an hour, and refuses to write files.
    for name, value in {"HTTP_REQUEST_MAX_RETRIES": "5", "HTTP_REQUEST_TIMEOUT": "10", "ALLOW_FILE_STORE": "1"}.items():
        os.environ.setdefault(f"MLFLOW_{name}", value)
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    uri = _mlflow_uri(settings) or (origin.output_dir / "mlruns").resolve().as_uri()
    client = MlflowClient(uri)
    # In a file store, `/` would make a subdirectory.
    refused = r"[^\w\-. :/]" if uri.startswith("http") else r"[^\w\-. :]"
    known = client.get_experiment_by_name(settings.experiment)
    experiment = client.create_experiment(settings.experiment) if known is None else known.experiment_id
    tags = {"group": origin.group(settings.name), "process": origin.process}
    run = client.create_run(experiment, tags=tags, run_name=origin.name(settings.name)).info.run_id
    client.log_batch(run, params=[Param(key, str(value)[:500]) for key, value in origin.run_config.items()])

    def log(step: int, row: Mapping[str, float], extras: Extras) -> None:
        now = round(time.time() * 1000)
        named = {re.sub(refused, "_", name): value for name, value in row.items()}
        client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in named.items()])

    return Tracker(log, partial(client.set_terminated, run))


def start_trackio(settings: shared.TrackioConfig, origin: Origin) -> Tracker:
    import trackio

    run = Context().run(  # Trackio ends the run before in the same context, which may be another tenant's
        trackio.init,
        settings.project,
        name=origin.name(settings.name),
        group=origin.group(settings.name),
        config=origin.run_config,
        resume="allow" if settings.name else "never",
    )
    return Tracker(lambda step, row, extras: run.log({**row, **extras.media(trackio)}, step=step), run.finish)


def start_prometheus(settings: shared.PrometheusConfig, origin: Origin) -> Tracker:
    """Serve the last value of each metric: `reward/mean` is `prime_rl_reward_mean{process="orchestrator"}`."""
    from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    ProcessCollector(registry=registry)  # memory, CPU, open files
    host, port = _address(settings, origin.process)
    with user_errors(f"{host}:{port}, choose another monitor.prometheus.port", OSError):
        server, _ = start_http_server(port, host, registry)

    def log(step: int, row: Mapping[str, float], extras: Extras) -> None:
        for name, value in {"step": step, **row}.items():
            key = "prime_rl_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            if key not in gauges:
                gauges[key] = Gauge(key, name, ["process"], registry=registry)
            gauges[key].labels(origin.process).set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()

    return Tracker(log, close)


_STARTERS: dict[str, Callable[[Any, Origin], Tracker]] = {
    "wandb": start_wandb,
    "tensorboard": start_tensorboard,
    "mlflow": start_mlflow,
    "trackio": start_trackio,
    "prometheus": start_prometheus,
}


class Trackers:
    """The trackers of one process. They are asked by a thread, in order, so that none of them holds up the caller."""

    def __init__(
        self, config: shared.MonitorConfig, output_dir: Path, process: str, run_config: dict[str, Any]
    ) -> None:
        """Raises UserError if one cannot start."""
        self._thread = TaskThread("trackers", "the trackers", _CLOSE_SECONDS)
        self.active, self._extras = dict[str, Tracker](), dict[str, shared.LogExtrasConfig | None]()
        origin = Origin(output_dir, process, redacted(run_config))
        for name, settings in _chosen(config):
            try:
                self.active[name] = _STARTERS[name](settings, origin)
            except Exception as error:
                self.close()
                ways = f"; {_WANDB_HINT}" if name == "wandb" else ""
                raise UserError(f"{name} did not start: {one_line(error)}{ways}") from error
            self._extras[name] = getattr(settings, "log_extras", None)

    def log(self, step: int, row: Mapping[str, float], extras: Callable[[], Extras]) -> None:
        """Hand on numbers of a step, and the extras that a tracker wants at this step: only then are they made."""
        self._thread.results(wait=False)
        wanted = {name: one for name, one in self._extras.items() if one is not None and step % one.interval == 0}
        made = extras() if wanted else Extras()
        for name, tracker in [*self.active.items()]:
            some = wanted.get(name)
            samples = made.samples if some is not None and some.samples else ()
            distributions = made.distributions if some is not None and some.distributions else {}
            self._ask(name, partial(tracker.log, step, row, Extras(samples, distributions, made.columns)))

    def close(self) -> None:
        for name, tracker in [*self.active.items()]:
            self._ask(name, tracker.close)
        for failure in self._thread.close():
            logger.warning(failure)

    def _ask(self, name: str, work: Callable[[], object]) -> None:
        def attempt() -> None:
            if name in self.active:
                try:
                    work()
                except Exception as error:  # noqa: BLE001  a library may raise anything, and no run ends for a curve
                    del self.active[name]
                    text = f"{type(error).__name__}: {one_line(error)}"
                    logger.warning("{} failed and gets nothing more of this run: {}", name, text)

        self._thread.submit(f"{name} to take a step", attempt)


def check_trackers(configs: Mapping[str, shared.MonitorConfig]) -> None:
    """Raise UserError where a tracker of one of these processes could not start, without importing any."""
    for process, config in configs.items():
        for name, settings in _chosen(config):
            library = "prometheus_client" if name == "prometheus" else name
            if find_spec(library) is None:
                raise UserError(f"{name} needs the library {library}: add `--extra trackers` to `uv sync`")
            address = ("", 0)
            try:
                server = urlsplit(_mlflow_uri(settings) if name == "mlflow" else "")
                if name == "prometheus":
                    address = _address(settings, process)
                    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
                    socket.create_server(address, family=family).close()
                elif server.scheme in ("http", "https"):
                    address = server.hostname or "", server.port or {"http": 80, "https": 443}[server.scheme]
                    socket.create_connection(address, _CHECK_SECONDS).close()
            except (OSError, OverflowError, ValueError) as error:
                used = ":".join(map(str, address)) if any(address) else "its uri"  # which may have a password
                raise UserError(f"{name} cannot use {used}: {error}") from error
    check_wandb(*(config.wandb for config in configs.values()))


def check_wandb(*configs: shared.WandbConfig | None) -> None:
    """Raise UserError where one of these uploads to W&B, which has no key: of a variable, or of `wandb login`."""
    if all(config is None or config.offline for config in configs):
        return
    if os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    try:
        logins = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        logins = {}
    if not any("wandb" in host or host == own for host in logins):
        raise UserError(f"W&B has no key: {_WANDB_HINT}")


def _chosen(config: shared.MonitorConfig) -> Iterator[tuple[str, Any]]:
    return ((name, settings) for name in _STARTERS if (settings := getattr(config, name)) is not None)


def _address(settings: shared.PrometheusConfig, process: str) -> tuple[str, int]:
    return settings.host, settings.port + _PORTS.get(process, 0)


def _mlflow_uri(settings: shared.MlflowConfig) -> str:
    return settings.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
