"""`rl`: a whole run from one command."""

import sys

from prime_rl import lifeline
from prime_rl.config import RLConfig, load
from prime_rl.errors import UserError


def main() -> None:
    lifeline.watch()
    config = load(RLConfig, prog="rl")

    from prime_rl.launcher.run import run  # after --help and bad options have had their answer

    try:
        status = run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
