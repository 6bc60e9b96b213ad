"""`inference`: vLLM's OpenAI server with the weight routes."""

from prime_rl.config import InferenceConfig
from prime_rl.entrypoints import run_command


def main() -> None:
    run_command(InferenceConfig, "inference", run)


def run(config: InferenceConfig) -> None:
    from prime_rl.inference import server

    server.dry_run(config) if config.dry_run else server.run(config)


if __name__ == "__main__":
    main()
