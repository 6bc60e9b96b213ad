"""Supervised fine-tuning: the trainer's loop (`training_loop.run`) with rows of a dataset and cross-entropy.

Also runs as a file: `torchrun … src/prime_rl/trainer/sft/train.py @ sft.toml`.
"""

from functools import partial
from runpy import run_module

from prime_rl.config import SFTConfig
from prime_rl.config.trainer import WeightsConfig
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.sft.rows import RowData
from prime_rl.trainer.training_loop import Recipe


def make_recipe(config: SFTConfig) -> Recipe:
    """Fine-tuning: rows, cross-entropy, and weights at checkpoints and evaluations. Versions of the evaluation's
    interval are kept for good: it may come to them much later."""
    return Recipe(
        tokens=config.data.seq_len * config.data.micro_batch_size,
        loss=cross_entropy,
        names=means,
        open_data=partial(RowData, config),
        weights=WeightsConfig(save_interval=None if config.eval is None else config.eval.interval),
    )


def means(sums: list[float]) -> dict[str, float]:
    """Name a step's sums, which are divided by its loss tokens already."""
    loss, entropy, *_ = sums
    return {"loss/mean": loss, "entropy/mean": entropy}


if __name__ == "__main__":
    run_module("prime_rl.entrypoints.sft", run_name="__main__")
