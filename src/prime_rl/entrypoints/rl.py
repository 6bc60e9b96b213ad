"""`rl`: a whole run from one command; `rl doctor RUN` and `rl audit RUN` examine one."""

import sys
from collections.abc import Sequence
from pathlib import Path

from prime_rl import lifeline
from prime_rl.config import RLConfig, load
from prime_rl.config.loader import say
from prime_rl.errors import UserError
from prime_rl.monitor import log

_EXAMINATIONS = {
    "doctor": "`rl doctor RUN`: what a run is doing, who waits for whom, and what keeps it from going on.",
    "audit": "`rl audit RUN`: where every episode of a run went, with mean length and reward.",
}


def main() -> None:
    lifeline.watch()
    try:
        examines = len(sys.argv) > 1 and sys.argv[1] in _EXAMINATIONS
        status = _examine(sys.argv[1], sys.argv[2:]) if examines else _run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _run() -> int:
    config = load(RLConfig, prog="rl")
    log.setup(config.log.level, "rl")

    from prime_rl.launcher.launch import run  # after --help and bad options have had their answer

    return run(config)


def _examine(what: str, arguments: Sequence[str]) -> int:
    if list(arguments) in (["-h"], ["--help"]):
        print(_EXAMINATIONS[what])
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"usage: rl {what} RUN (the run's output directory)")
    run = Path(arguments[0])
    if what == "doctor":
        from prime_rl.launcher.doctor import examine

        return examine(run)
    from prime_rl.orchestrator.audit import audit_text

    say(audit_text(run))
    return 0


if __name__ == "__main__":
    main()
