"""Sections that several entrypoints have in common."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from prime_rl.config.base import BaseConfig, Checks, Problem, Section, conflict, option
from prime_rl.redact import is_secret, key_in, without_password

WARM_UP = 3  # the trainer's steps that are not counted: they compile, for the first shape that comes and then for any
TRAINER_STEPS = WARM_UP + 5
ORCHESTRATOR_STEPS = 4

Device = Literal["auto", "cpu", "cuda"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[int, Field(ge=2)]
"""Tokens of what is trained on: each is predicted from those before it."""


def _all_or_some(tasks: int) -> int:
    if tasks < 1 and tasks != -1:
        raise ValueError("must be at least 1, or -1 for all")
    return tasks


Examples = Annotated[int, AfterValidator(_all_or_some)]
"""How many tasks are evaluated."""


class ModelConfig(Section):
    """The model."""

    name: str = option("Qwen/Qwen3-0.6B", "Hub name or local directory of the model.")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")


class LogExtrasConfig(Section):
    """Rollouts, and histograms: of the orchestrator, to read; of the trainer, what it computed of their tokens."""

    samples: bool = option(True, "A table of a few rollouts: of the trainer, means over the tokens of each.")
    distributions: bool = option(True, "Histograms: rewards, advantages, lengths; of the trainer, mismatch, entropy.")
    interval: PositiveInt = option(10, "Steps between two.")


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = option("prime-rl", "Project that the run appears under.")
    name: str | None = option(None, "Name of the run (None: W&B makes one up).")
    id: str | None = option(None, "Id of the run; give the one of an earlier run to continue it.")
    group: str | None = option(None, "Group of the run's processes (None: its name or id, else its directory's name).")
    entity: str | None = option(None, "User or team that owns the project (None: your default).")
    tags: list[str] = option(list, "Tags of the run.")
    dir: Path = option(Path("logs"), "Directory of W&B's local files.")
    offline: bool = option(False, "Write local files only, upload nothing.")
    log_extras: LogExtrasConfig | None = option(None, "Rollouts and histograms.")


class TensorboardConfig(Section):
    """TensorBoard: event files in tensorboard/ of the run directory."""

    log_extras: LogExtrasConfig | None = option(None, "Rollouts and histograms.")


class MlflowConfig(Section):
    """MLflow."""

    uri: str | None = option(None, "Tracking server (None: $MLFLOW_TRACKING_URI, else files in mlruns/).")
    experiment: str = option("prime-rl", "Experiment that the run appears under.")
    name: str | None = option(None, "Name of the run (None: that of its directory, and the process).")

    def checks(self) -> Checks:
        ways = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or all of it as MLFLOW_TRACKING_URI"
        yield conflict(is_secret("", self.uri), f"<uri> holds a password, which would be written and shown: {ways}")


class TrackioConfig(Section):
    """Trackio."""

    project: str = option("prime-rl", "Project that the run appears under.")
    name: str | None = option(None, "Name of the run; of an earlier one to continue it (None: its directory's, anew).")
    log_extras: LogExtrasConfig | None = option(None, "Rollouts and histograms.")


class PrometheusConfig(Section):
    """A page /metrics for Prometheus. Inference servers have one of their own."""

    port: PositiveInt = option(9464, "Port of the trainer; the orchestrator has the next one, `eval` the one after.")
    host: str = option("127.0.0.1", "Address to listen at (0.0.0.0: all; anyone who gets there can read).")


class SlurmConfig(Section):
    """A job of SLURM: the command submits a batch script that does its work, on a file system that all nodes see."""

    nodes: PositiveInt = option(1, "Nodes of the job.")
    inference_nodes: PositiveInt = option(1, "Of several nodes of `rl`, those that serve; the others train.")
    gpus_per_node: PositiveInt = option(8, "GPUs of each node (not used with device = cpu).")
    exclusive: bool = option(True, "Take whole nodes, with all their cores and memory (false: see `options`).")
    partition: str | None = option(None, "Partition (None: the cluster's default).")
    account: str | None = option(None, "Account that the job is charged to (None: the user's default).")
    time: str | None = option(None, "Time limit, such as 12:00:00 (None: the partition's).")
    options: list[str] = option(list, "More options of sbatch, such as --qos=high or --cpus-per-task=16.")
    save_seconds: PositiveInt = option(600, "Seconds before the time limit at which the run is asked to save and end.")
    requeue: bool = option(True, "Queue the job again, to recover, after a lost node, or where it ended on its way.")
    sweep: dict[str, list[Any]] = option(
        dict, "Values by option, such as trainer.optim.lr: a job for each combination."
    )
    template: Path | None = option(None, "Jinja2 template of the batch script (None: prime_rl/launcher/slurm.sh.j2).")

    def checks(self) -> Checks:
        words = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", self.time or "")
        if words is not None:  # minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]
            days, *parts = (int(word or 0) for word in words.groups())
            hours, minutes, seconds = parts if words[1] or words[4] else (0, *parts[:2])
            limit = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            late = f"<time> {self.time} is no longer than <save_seconds> {self.save_seconds}: the run would end at once"
            yield conflict(0 < limit <= self.save_seconds, late)


class TenantsConfig(Section):
    """Tenants: orchestrators that share the trainer and its servers, each with an adapter of its own."""

    slots: PositiveInt = option(4, "Most tenants at a time.")
    weights: dict[str, PositiveFloat] = option(dict, "Shares of the time by tenant, relative to the others (1 each).")
    limits: dict[str, Annotated[float, Field(gt=0, le=1)]] = option(dict, "Largest share by tenant (none: 1).")


class MonitorConfig(Section):
    """Where metrics go, beside metrics/*.jsonl."""

    wandb: WandbConfig | None = option(None, "Weights & Biases.")
    tensorboard: TensorboardConfig | None = option(None, "TensorBoard.")
    mlflow: MlflowConfig | None = option(None, "MLflow.")
    trackio: TrackioConfig | None = option(None, "Trackio.")
    prometheus: PrometheusConfig | None = option(None, "A page /metrics for Prometheus.")


class CkptConfig(Section):
    """Checkpoints of the full training state."""

    interval: PositiveInt | None = option(50, "Steps between two checkpoints (None: only a final one).")
    keep: PositiveInt | None = option(None, "Newest checkpoints kept (None: all).")
    keep_interval: PositiveInt | None = option(None, "Multiples of this step are kept for good (None: none).")
    save_async: bool = option(True, "Write in the background, from host memory (false: the loop waits).")
    resume_step: int | None = option(None, "Go on from this step; -1: from the newest (None: start anew).", ge=-1)
    output_dir: Path | None = option(None, "Directory that holds checkpoints/ (None: the run's output_dir).")


class RunConfig(BaseConfig):
    """What every training has."""

    max_steps: PositiveInt | None = option(None, "Steps to run (None: until stopped).")
    ckpt: CkptConfig | None = option(None, "Checkpoints of the full training state.")
    bench: bool = option(False, "Measure a few steps, in output_dir/bench: of a run both sides, each by itself.")
    clean: bool = option(False, "Remove an earlier run from output_dir first.", mark="one_time")

    def checks(self) -> Checks:
        step = self.ckpt.resume_step if self.ckpt is not None else None
        beyond = step is not None and self.max_steps is not None and self.max_steps < step
        yield conflict(beyond, f"<max_steps> {self.max_steps} is below <ckpt.resume_step> {step}")
        removed = "<clean> would remove the checkpoint that <ckpt.resume_step> names"
        yield conflict(self.clean and step is not None, removed)


class RecoverableRun(RunConfig):
    """What a run, and the processes that share its rollouts, have."""

    async_level: NonNegativeInt = option(1, "Steps that sampling may run ahead of training.")
    router_replay: bool = option(False, "Train each token through the experts that the engine chose for it.")
    recover: bool = option(False, "Go on from what is committed in output_dir.", mark="one_time")

    def checks(self) -> Checks:
        resumes = self.ckpt is not None and self.ckpt.resume_step is not None
        both = self.clean and self.recover and not resumes
        yield conflict(both, "<clean> would remove what <recover> goes on from")


def _is_address(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{without_password(url)!r} does not start with http:// or https://")
    if is_secret("", url):
        shown = "holds a password, which would be written and shown"
        raise ValueError(f"{shown}: put the key into the variable api_key_var")
    try:
        _ = urlsplit(api_root(url)).port
    except ValueError as error:
        raise ValueError(f"{without_password(url)!r} is no address: {error}") from None
    return url


Address = Annotated[str, AfterValidator(_is_address)]
"""Of a server, with or without /v1."""


def _one_or_several(urls: str | list[str]) -> str | list[str]:
    addresses = [_is_address(url) for url in ([urls] if isinstance(urls, str) else urls)]
    if not addresses:
        raise ValueError("names no server")
    if len(set(map(same_server, addresses))) < len(addresses):
        raise ValueError("a server is named twice")
    return addresses if len(addresses) > 1 else addresses[0]


def api_root(url: str) -> str:
    """A server's address without a trailing slash or /v1: where /health and the weight routes are."""
    return url.rstrip("/").removesuffix("/v1")


def same_server(url: str) -> str:
    """Equal for addresses of one server: whatever name this host has in them, with or without the default port."""
    parts = urlsplit(api_root(url))
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host_in_url(parts.hostname or '')}:{port}{parts.path}"


def host_in_url(host: str) -> str:
    """A host as addresses have it: `localhost` for any name of this one, an IPv6 address in brackets."""
    return "localhost" if is_own_host(host) else f"[{host}]" if ":" in host else host


def is_own_host(host: str) -> bool:
    """Return whether a name or address means the host that uses it: `localhost`, loopback or an unspecified address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def how_to_start(root: str) -> str:
    """What brings up a server at this address, in words that follow `; `; of an API of others what may be wrong."""
    parts = urlsplit(root)
    if parts.scheme == "https":
        return "is client.base_url right?"
    where = "" if is_own_host(parts.hostname or "") else f" on {parts.hostname}"
    return f"`uv run inference --model.name MODEL --server.port {parts.port or 80}` starts one{where}"


class ClientConfig(Section):
    """The inference servers to talk to."""

    base_url: Annotated[str | list[str], AfterValidator(_one_or_several)] = option(
        "http://localhost:8000/v1", "Address of the server, with or without /v1, or of several."
    )
    admin_base_url: Annotated[str | list[str], AfterValidator(_one_or_several)] | None = option(
        None, "Servers behind base_url, a router: for weights and their checks (None: base_url is no router)."
    )
    api_key_var: str = option("VLLM_API_KEY", "Environment variable that holds the API key.")
    ready_timeout: PositiveFloat = option(600.0, "Seconds to wait for a server to become ready.")
    timeout: PositiveFloat = option(600.0, "Seconds that one request may take.")

    def checks(self) -> Checks:
        if self.admin_roots and len(self.base_urls) != 1:
            yield Problem("<admin_base_url> names the servers behind one router: <base_url> has to name that one")
        elif same_server(self.base_urls[0]) in map(same_server, self.admin_roots):
            yield Problem("<base_url> is one of the servers in <admin_base_url>, not a router: list them in base_url")

    @property
    def servers(self) -> str:
        """Where the servers are, for people."""
        return ", ".join(self.base_urls)

    @property
    def base_urls(self) -> list[str]:
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url

    @property
    def api_roots(self) -> list[str]:
        return [api_root(url) for url in self.base_urls]

    @property
    def admin_roots(self) -> list[str]:
        """Of the servers behind a router; none where there is no router."""
        urls = [self.admin_base_url] if isinstance(self.admin_base_url, str) else self.admin_base_url or []
        return [api_root(url) for url in urls]


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: float = option(1.0, "Sampling temperature (0: greedy).", ge=0, le=2)
    top_p: float = option(1.0, "Probability mass that tokens are drawn from.", gt=0, le=1)
    top_k: int = option(-1, "Number of likeliest tokens drawn from (-1: all).", ge=-1)
    min_p: Fraction = option(0.0, "Least probability of a token, relative to the likeliest.")
    max_tokens: PositiveInt | None = option(None, "Most tokens per reply (None: up to seq_len).")
    min_tokens: int = option(0, "Fewest tokens per reply.", ge=0)
    seeded: bool = option(False, "Send a seed with each request, derived from the seed of the run.")

    def changed(self, override: "SamplingOverride | None") -> "SamplingConfig":
        """These settings with those that `override` gives."""
        return self.model_copy(update=override.model_dump(exclude_none=True)) if override else self


class SamplingOverride(Section):
    """Sampling settings that differ from the section above (None: as there)."""

    temperature: float | None = option(None, "Sampling temperature (0: greedy).", ge=0, le=2)
    top_p: float | None = option(None, "Probability mass that tokens are drawn from.", gt=0, le=1)
    top_k: int | None = option(None, "Number of likeliest tokens drawn from (-1: all).", ge=-1)
    min_p: Fraction | None = option(None, "Least probability of a token, relative to the likeliest.")
    max_tokens: PositiveInt | None = option(None, "Most tokens per reply.")
    min_tokens: int | None = option(None, "Fewest tokens per reply.", ge=0)
    seeded: bool | None = option(None, "Send a seed with each request, derived from the seed of the run.")


class EnvConfig(Section):
    """An environment: what gives tasks, runs them and judges the outcome."""

    id: str = Field(min_length=1, description="Name that the environment is installed under.")
    name: str = option("", "Name in metrics and logs, unique within the run (empty: the id).")
    args: dict[str, Any] = option(dict, "Arguments handed to the environment.")
    ratio: PositiveFloat = option(1.0, "Share of the tasks, relative to the other environments.")
    sampling: SamplingOverride | None = option(None, "Sampling settings of this environment alone.")
    adapter: Literal["auto", "verifiers", "classic", "python"] = option("auto", "Its kind (auto: by its module).")
    python: str | None = option(None, "Python interpreter of the worker processes (None: this one).")
    workers: PositiveInt | Literal["auto"] = option(
        "auto", "Worker processes (auto: as many as their load calls for, up to one for each core)."
    )
    max_workers: PositiveInt | None = option(None, "Most worker processes of workers = auto (None: one for each core).")
    max_concurrent: PositiveInt = option(256, "Most episodes that one worker runs at a time.")
    max_turns: PositiveInt | None = option(None, "Most replies in one conversation (None: any).")
    trajectories: Literal["interleaved", "branched"] = option("interleaved", "One sample a conversation, or a reply.")

    secrets: list[str] = option(list, "Variables with keys that its workers get, such as OPENAI_API_KEY; no others.")

    def checks(self) -> Checks:
        self.name = self.name or self.id
        workers, place = self.workers, key_in(self.args)  # settings are written to configs/; keys travel as variables
        word = "an environment cannot be named 'all', metrics' word for all of them: give another `<name>`"
        unused = f"<max_workers> has no effect with <workers> = {workers}: leave one of them out"
        key = f"<args>.{place} holds a key, which would be written to configs/: put it into a variable"
        yield conflict(self.name == "all", word, "id")
        yield conflict(self.max_workers is not None and workers != "auto", unused)
        yield conflict(place, f"{key} that the environment reads, and name that in `secrets`")


Env = TypeVar("Env", bound=EnvConfig)


class Environments(Section, Generic[Env]):
    """Either `[environment]` or `[[environments]]`, and ids alone; read `.environments`, which holds all forms."""

    environment: Env | None = option(None, "The environment, if there is one.")
    environments: list[Env] = option(list, "The environments, if there are several.")
    environment_ids: list[Annotated[str, Field(min_length=1)]] = option(
        list, "More environments, in short: ids only, with commas."
    )

    def checks(self) -> Checks:
        if self.environment is not None:
            yield conflict(self.environments, "give either [<environment>] or [[<environments>]], not both")
            self.environments, self.environment = [*self.environments, self.environment], None
        (of,) = get_args(type(self).model_fields["environments"].annotation)
        self.environments = [*self.environments, *(of(id=name) for name in self.environment_ids)]
        self.environment_ids = []
        names = [environment.name for environment in self.environments]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):  # metrics could not tell them apart
            yield Problem(f"two environments are named '{name}': give each its own `name`", "environments")
