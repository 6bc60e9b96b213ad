"""A server without a run around it, for `rl parity`, `rl chat` and `prime_rl.serve`."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import httpx

from prime_rl.config import EvalConfig, InferenceConfig, write_toml
from prime_rl.config.inference import SERVER
from prime_rl.errors import UserError
from prime_rl.launcher.plan import ProcessSpec, ServerSpec
from prime_rl.launcher.rundir import forget_status
from prime_rl.launcher.supervise import SupervisedChild
from prime_rl.monitor import read_status
from prime_rl.wait import wait

_PROBE_SECONDS = 5.0


def process_of(
    name: str, config: InferenceConfig | EvalConfig, env: Mapping[str, str], server: ServerSpec | None = None
) -> ProcessSpec:
    """Write the configuration of a process of `output_dir`, forget its earlier status, and return what starts it."""
    path = config.output_dir / "configs" / f"{name}.toml"
    write_toml(config, path)
    argv = (sys.executable, "-m", f"prime_rl.entrypoints.{name}", "@", str(path))
    log = config.output_dir / "logs" / f"{name}.log"
    forget_status(config.output_dir, name)
    defaults = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if isinstance(config, InferenceConfig) and config.api_key:
        defaults["VLLM_API_KEY"] = config.api_key
    return ProcessSpec(name, argv, log, {**defaults, **env}, server=server)


@contextmanager
def running_server(config: InferenceConfig, seconds: float) -> Iterator[None]:
    """Run a server with these settings during a `with` block. Raises UserError if it exits or is not ready in time."""
    child = SupervisedChild(process_of(SERVER, config, {}, ServerSpec(config.server.url, seconds)))

    def has_started() -> bool:
        status = read_status(config.output_dir).get(SERVER)
        if child.process.status is not None or status is None or status.ready is None:
            return child.process.status is not None
        with suppress(httpx.HTTPError):  # it is ready a moment before it listens
            return httpx.get(f"{config.server.url}/health", timeout=_PROBE_SECONDS, trust_env=False).is_success
        return False

    child.start(os.environ)
    try:
        wait(has_started, subject=f"server of {config.model.name}", owner="vLLM", seconds=seconds)
        if child.process.status is not None:
            reason = "\n".join(child.last_words("failed"))
            raise UserError(f"the server of {config.model.name} has ended: {reason}")
        yield
    finally:
        child.process.reap()
