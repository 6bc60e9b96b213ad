"""`rl`: a whole run from one command, and other commands about runs: `rl doctor RUN`, `rl init`, …"""

import asyncio
import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_rl import processes
from prime_rl.config import EvalConfig, RLConfig
from prime_rl.config.base import BaseConfig
from prime_rl.config.commands import StarterConfig, ViewConfig
from prime_rl.config.rl import DeploymentConfig, ParityConfig
from prime_rl.config.schema import write_schemas
from prime_rl.entrypoints import run_command, show
from prime_rl.entrypoints.eval import run as evaluate
from prime_rl.errors import UserError, say, user_errors
from prime_rl.inference.checks import check_model
from prime_rl.launcher.starter import write_starter
from prime_rl.monitor import log

_EXAMINATIONS = {
    "doctor": "`rl doctor RUN`: what a run is doing, who waits for whom, and what keeps it from going on.",
    "audit": "`rl audit RUN`: where every episode of a run went, with mean length and reward.",
    "chat": "`rl chat RUN`: talk to the newest weights of a run, or to those in a directory; Ctrl-D ends.",
    "schema": "`rl schema DIRECTORY`: write JSON schemas of all configs, by which editors complete and check files.",
}


def main() -> None:
    what, *arguments = sys.argv[1:] or [""]
    if what == "plan":
        sys.argv[1:] = [*arguments, "--dry-run"]
        return run_command(RLConfig, "rl", _run, "rl plan")
    if what == "view":
        sys.argv[2:] = _name_runs(arguments)
    if what in _COMMANDS:
        kind, run = _COMMANDS[what]
        return run_command(kind, sys.argv.pop(1), run, f"rl {what}")
    commands = [*_EXAMINATIONS, *_COMMANDS, "plan"]
    if near := [] if what in _EXAMINATIONS else difflib.get_close_matches(what, commands, n=1):
        log.fail(UserError(f"`rl {what}` is no command; did you mean `rl {near[0]}`?"))
    if what not in _EXAMINATIONS:
        run_command(RLConfig, "rl", _run)
    elif arguments in (["-h"], ["--help"]) and what != "chat":
        print(_EXAMINATIONS[what])
    else:
        try:
            examine(what, arguments)
        except UserError as error:
            log.fail(error)
        except KeyboardInterrupt:
            sys.exit(130)


def _parity(config: ParityConfig) -> None:
    """Sample, then score."""
    from prime_rl.launcher import one_server

    check_model(config.model.name)
    directory = config.output_dir / "parity"
    if config.dry_run:
        return show(config, "parity", f"samples and scores are written to {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    if config.client is not None:
        say(f"sampling {config.replies} replies from {config.client.servers}")
        asyncio.run(one_server.sample(config, directory))
    else:
        one_server.serve_and_sample(config, directory)
    say("loading the model to score them by the trainer")
    from prime_rl.trainer.parity_scorer import score

    sys.exit(0 if score(config, directory) else 1)


def _name_runs(arguments: list[str]) -> list[str]:
    """Return the arguments of `rl view` with `--runs` before those that are neither option nor an option's value."""
    runs, options = list[str](), list[str]()
    for word, before in zip(arguments, ["", *arguments], strict=False):
        is_value = before.startswith("-") and "=" not in before and before != "--runs"
        (options if is_value or word.startswith(("-", "@")) else runs).append(word)
    return [*(word for word in options if word != "--runs"), *(["--runs", json.dumps(runs)] if runs else [])]


def _view(config: ViewConfig) -> None:
    from prime_rl.view.page_server import view

    runs = config.runs or [config.output_dir]
    if config.dry_run:
        return say(f"the page would show {', '.join(map(str, runs))}")
    view(runs, config.host, config.port, config.export)


def _run(config: RLConfig) -> None:
    from prime_rl.launcher.launch import run  # after --help and bad options have had their answer

    sys.exit(run(config))


_COMMANDS: dict[str, tuple[type[BaseConfig], Callable[[Any], object]]] = {
    "parity": (ParityConfig, _parity),
    "tenants": (DeploymentConfig, _run),
    "eval": (EvalConfig, evaluate),
    "init": (StarterConfig, write_starter),
    "view": (ViewConfig, _view),
}


def examine(what: str, arguments: list[str]) -> None:
    """Print what the run that `arguments` name has done. `doctor` ends with its own exit status."""
    processes.watch()
    if what == "chat":
        from prime_rl.entrypoints.chat import chat

        return chat(arguments, _EXAMINATIONS[what])
    if len(arguments) != 1 or arguments[0].startswith("-"):
        name = "DIRECTORY" if what == "schema" else "RUN (the run's output directory)"
        raise UserError(f"usage: rl {what} {name}")
    if what == "schema":
        with user_errors(f"{arguments[0]} cannot be written", OSError):
            return say("wrote " + ", ".join(map(str, write_schemas(Path(arguments[0])))))
    if what == "doctor":
        from prime_rl.launcher import doctor

        sys.exit(doctor.examine(Path(arguments[0])))
    from prime_rl.orchestrator.audit import audit_text

    say(audit_text(Path(arguments[0])))


if __name__ == "__main__":
    main()
