"""`inference`: vLLM's OpenAI server with the weight routes."""

from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.entrypoints import run_command
from prime_rl.launcher import slurm


def main() -> None:
    run_command(InferenceCommandConfig, "inference", run)


def run(config: InferenceCommandConfig) -> None:
    if config.slurm is not None:
        return slurm.submit(config, "inference")
    from prime_rl.inference import server

    server.dry_run(config) if config.dry_run else server.run(config)


if __name__ == "__main__":
    main()
