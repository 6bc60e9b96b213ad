"""The RL trainer: takes batches of rollouts, makes policy versions. The loop is `training_loop.run`.

Also runs as a file: `torchrun … src/prime_rl/trainer/rl/train.py @ train.toml`.
"""

from functools import partial
from runpy import run_module

from prime_rl.config import TrainerConfig
from prime_rl.config.trainer import WeightsConfig
from prime_rl.trainer.loss import describe, make_loss
from prime_rl.trainer.rl.data import FakeSamples, RolloutData
from prime_rl.trainer.training_loop import Recipe


def make_recipe(config: TrainerConfig) -> Recipe:
    """RL: rollouts or fake samples, a policy loss, and a version for servers after every step. Raises UserError if a
    loss of the user's own cannot be used."""
    return Recipe(
        tokens=config.seq_len,
        loss=make_loss(config.loss),
        names=describe,
        open_data=partial(RolloutData if config.data.fake is None else FakeSamples, config),
        router_replay=config.router_replay,
        served=config if config.data.fake is None else None,
        # Fake data trains a model that nobody serves: its versions need no interval.
        weights=config.weights if config.data.fake is None else WeightsConfig(keep=config.weights.keep),
    )


if __name__ == "__main__":
    run_module("prime_rl.entrypoints.trainer", run_name="__main__")
