"""`inference`: vLLM's OpenAI server with the weight routes."""

from prime_rl import faults, lifeline
from prime_rl.config import InferenceConfig, load
from prime_rl.errors import UserError


def main() -> None:
    lifeline.watch()
    faults.arm("inference")
    config = load(InferenceConfig, prog="inference")
    from prime_rl.inference import server
    from prime_rl.monitor import log

    try:
        if config.dry_run:
            server.dry_run(config)
        else:
            server.run(config)
    except UserError as error:
        log.fail(error)


if __name__ == "__main__":
    main()
