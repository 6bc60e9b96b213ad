"""`rl`: a whole run from one command; `rl doctor RUN` and `rl audit RUN` examine one."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from prime_rl import lifeline
from prime_rl.config import RLConfig, load
from prime_rl.config.loader import say
from prime_rl.errors import UserError
from prime_rl.monitor import log


def main() -> None:
    lifeline.watch()
    try:
        status = _examine(sys.argv[1], sys.argv[2:]) if sys.argv[1:2] in (["doctor"], ["audit"]) else _run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _run() -> int:
    for word in sys.argv[1:2]:
        if not word.startswith(("-", "@")):
            near = get_close_matches(word, ("doctor", "audit"), 1)
            meant = f"did you mean `rl {near[0]} RUN`?" if near else "there are `rl @ CONFIG.toml`, `rl doctor RUN` and `rl audit RUN`"  # fmt: skip
            raise UserError(f"there is no `rl {word}`: {meant}")
    config = load(RLConfig, prog="rl")
    log.setup(config.log.level, "rl")

    from prime_rl.launcher.launch import run  # after --help and bad options have had their answer

    return run(config)


def _examine(what: str, arguments: Sequence[str]) -> int:
    if what == "doctor":
        from prime_rl.launcher import doctor

        return doctor.main(arguments)
    from prime_rl.orchestrator.audit import audit_text

    if list(arguments) in (["-h"], ["--help"]):
        print("`rl audit RUN`: where every episode of a run went, with mean length and reward.")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("usage: rl audit RUN (the run's output directory)")
    say(audit_text(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    main()
