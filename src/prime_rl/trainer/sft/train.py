"""Supervised fine-tuning: the loop of the RL trainer with rows of a dataset and cross-entropy.

Also runs as a file: `torchrun … src/prime_rl/trainer/sft/train.py @ sft.toml`.
"""

import math
import time
from contextlib import ExitStack

import torch

from prime_rl.config import SFTConfig
from prime_rl.config.sft import FakeSFTData
from prime_rl.config.trainer import ConstantScheduler
from prime_rl.errors import UserError
from prime_rl.trainer import perf, weights
from prime_rl.trainer.ckpt import Checkpoints, Progress
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.optim import build_optimizer, learning_rate
from prime_rl.trainer.packing import Costs
from prime_rl.trainer.parallel import World, agree, close_world, init_world, on_main, sum_over_ranks
from prime_rl.trainer.report import BENCH_STEPS, Report, bench_table, saving
from prime_rl.trainer.sft.data import FakeRows, RowData
from prime_rl.trainer.sft.rows import load_rows
from prime_rl.trainer.source import Source, load_tokenizer, locate_model
from prime_rl.trainer.step import forward_backward, optimizer_step, read_sums
from prime_rl.trainer.stop import StopSignal


def train(given: SFTConfig) -> None:
    """Train until `max_steps`, or until a signal asks to stop.

    Raises:
        UserError: anything the user can mend, on every rank.
    """
    stop = StopSignal()
    config = bench_config(given) if given.bench else given
    world = init_world(config.device, config.dist_timeout)
    with Report(config, "sft", world) as report, ExitStack() as ends:
        run(config, given, world, report, stop, ends)
    close_world()


def run(config: SFTConfig, given: SFTConfig, world: World, report: Report, stop: StopSignal, ends: ExitStack) -> None:
    """The run, from top to bottom. `ends` takes what must be closed, however it ends."""
    torch.manual_seed(config.seed)
    checkpoints = Checkpoints(config, world, alone=lambda: True)
    if not config.bench:
        checkpoints.choose()

    report.phase("loading the model")
    source = locate_model(config.model, world, random_weights=config.data.fake is not None)
    if not config.bench:
        checkpoints.check_model(source)
    dtype = weights.export_dtype(config.weights.dtype, source)  # before transformers writes its own into the config
    policy = build_policy(source, config.model, world, config.seed)
    optimizer = build_optimizer(policy, config.optim)
    progress = checkpoints.load(policy, optimizer)
    start = progress.step

    report.phase("loading the data")
    matmul, width = perf.matmul_parameters(policy.lm), perf.attention_width(source.config)
    data = make_data(config, world, source, perf.costs(matmul, width), progress.samples)
    ends.callback(data.close)
    versions = weights.Versions(config.output_dir, policy, source, world, dtype)
    report.open(given)
    if not config.bench:
        checkpoints.begin(versions, start)
    report.ready()
    report.text(f"ready on {world.size} × {world.device.type}, starting at step {start}")

    step = start
    while config.max_steps is None or step < config.max_steps:
        if sum_over_ranks(world, [stop()])[0]:
            break
        started = time.perf_counter()
        report.step(step)
        checkpoints.look()
        report.phase("training")
        perf.reset_peak_memory(world.device)
        batch = data.read(step)
        read = time.perf_counter()

        lr = learning_rate(config.scheduler, config.optim.lr, step, config.max_steps)
        sums = forward_backward(policy, batch.batches, cross_entropy, world)
        norm = optimizer_step(policy, optimizer, lr, config.optim.max_norm)
        (loss, entropy), grad_norm = read_sums(world, sums, norm)
        trained = time.perf_counter()
        if not math.isfinite(grad_norm):
            raise UserError(f"step {step}: the gradient norm is {grad_norm}; nothing of this step is saved")

        progress = Progress(step + 1, progress.tokens + batch.tokens, batch.drawn)

        peak = perf.peak_flops(world.device)
        done = perf.flops(matmul, width, batch.lengths)
        metrics = {
            "loss/mean": loss,
            "entropy/mean": entropy,
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "perf/throughput": batch.tokens / (trained - started),
            "perf/peak_memory": perf.peak_memory_gib(world.device),
            **({"perf/mfu": 100 * done / (trained - read) / world.size / peak} if peak else {}),
            "time/step": trained - started,
            "time/wait_for_batch": read - started,
            "time/forward_backward": trained - read,
            "data/samples": len(batch.lengths),
            "data/loss_tokens": batch.loss_tokens,
            "data/packing_efficiency": batch.tokens / batch.capacity,
            **{f"data/dropped_{reason}": count for reason, count in batch.dropped.items()},
            "progress/total_tokens": progress.tokens,
            "progress/total_samples": progress.samples,
        }
        report.metrics(step, metrics)
        if checkpoints.due(step + 1):  # after the row is written: no state is ahead of its metrics
            report.phase("saving weights and checkpoint")
            versions.commit(step + 1)  # weights go with the checkpoint that they belong to
            checkpoints.save(progress)
            versions.prune(0, 0, checkpoints.needed)
            report.more_metrics(step, saving(started, trained, batch.tokens))
        step += 1

    if not config.bench and step > 0:
        report.phase("saving what is left")
        versions.ensure(step)
        checkpoints.finish(progress)
        versions.prune(0, 0, checkpoints.needed)
    if config.bench:
        report.text(bench_table(report.history))
    report.close("stopped" if stop() else "finished", f"{step} steps, {progress.tokens:,} tokens")


def bench_config(config: SFTConfig) -> SFTConfig:
    """A few steps on fake data, nothing saved."""
    data = config.data.model_copy(update={"fake": config.data.fake or FakeSFTData()})
    steps = min(config.max_steps or BENCH_STEPS, BENCH_STEPS)
    scheduler = ConstantScheduler()  # a decaying schedule might not fit into so few steps
    return config.model_copy(update={"data": data, "max_steps": steps, "ckpt": None, "scheduler": scheduler})


def make_data(config: SFTConfig, world: World, source: Source, costs: Costs, drawn: int) -> RowData | FakeRows:
    """The source of steps that the config names, after `drawn` rows of it."""
    vocabulary = source.config.get_text_config().vocab_size
    # Compiled CUDA kernels are fastest on whole tiles; a CPU would compute the padding.
    multiple_of = 128 if world.device.type == "cuda" else 1
    if config.data.fake is not None:
        return FakeRows(
            config.data,
            world,
            vocabulary=vocabulary,
            costs=costs,
            multiple_of=multiple_of,
            seed=config.seed,
            timeout=config.dist_timeout,
        )
    tokenizer = agree(world, lambda: load_tokenizer(source))
    on_main(world, lambda: len(load_rows(config.data)))  # downloads what is missing, and fills the cache
    rows = agree(world, lambda: load_rows(config.data))
    return RowData(
        rows,
        tokenizer,
        config.data,
        world,
        vocabulary=vocabulary,
        seed=config.seed,
        drawn=drawn,
        costs=costs,
        multiple_of=multiple_of,
        timeout=config.dist_timeout,
    )


if __name__ == "__main__":
    from prime_rl.entrypoints.sft import main

    main()
