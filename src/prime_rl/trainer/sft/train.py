"""Supervised fine-tuning: the loop of the RL trainer with rows of a dataset and cross-entropy.

Also runs as a file: `torchrun … src/prime_rl/trainer/sft/train.py @ sft.toml`.
"""

import time
from contextlib import ExitStack
from functools import partial

import torch

from prime_rl.config import SFTConfig
from prime_rl.config.sft import FakeSFTData
from prime_rl.config.shared import TRAINER_STEPS
from prime_rl.config.trainer import ConstantScheduler
from prime_rl.trainer import moe, perf
from prime_rl.trainer.ckpt import Checkpoints, Progress
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.memory import watched
from prime_rl.trainer.model import build_policy, check_head, check_host_memory
from prime_rl.trainer.optim import build_optimizer, learning_rate
from prime_rl.trainer.packing import Costs
from prime_rl.trainer.parallel import World, agree, close_world, init_world, on_main, sum_over_ranks
from prime_rl.trainer.perf import SMALL_SFT, HostSyncs, bench_table
from prime_rl.trainer.report import Report, Row, Rows, StopSignal, say_without_effect
from prime_rl.trainer.sft.data import FakeRows, RowData
from prime_rl.trainer.sft.render import load_rows
from prime_rl.trainer.source import Source, load_tokenizer, locate_model, stop_ids
from prime_rl.trainer.step import Outcome, forward_backward, now, optimizer_step
from prime_rl.trainer.weight_publisher import WeightPublisher, export_dtype
from prime_rl.transport.weights import version_dir


def train(given: SFTConfig) -> None:
    """Train until `max_steps`, or until a signal asks to stop.

    Raises:
        UserError: anything the user can mend, on every rank.
    """
    stop = StopSignal()
    config = bench_config(given) if given.bench else given
    world = init_world(config.device, config.dist_timeout, config.model.dp_replicate)
    with Report(config, "sft", world) as report, ExitStack() as ends:
        run(config, given, world, report, stop, ends)
    close_world()


def run(config: SFTConfig, given: SFTConfig, world: World, report: Report, stop: StopSignal, ends: ExitStack) -> None:
    """The run, from top to bottom. `ends` takes what must be closed, however it ends."""
    torch.manual_seed(config.seed)
    checkpoints = Checkpoints(config, world, alone=lambda: True)
    ends.callback(checkpoints.close)
    if not config.bench:
        checkpoints.choose()

    report.phase("loading the model")
    source = locate_model(config.model, world, random_weights=config.data.fake is not None)
    if not config.bench:
        checkpoints.check_model(source)
    tokens = config.data.seq_len * config.data.micro_batch_size
    check_host_memory(config, source, world, tokens, SMALL_SFT)
    policy = build_policy(source, config.model, world, config.seed, tokens=tokens, optim=config.optim)
    check_head(policy, source, world)
    optimizer = build_optimizer(policy, config.optim)
    say_without_effect(config, policy, world)
    progress = checkpoints.load(policy, optimizer)
    start = progress.step

    report.phase("loading the data")
    matmul, width = perf.matmul_parameters(policy.lm), perf.attention_width(source.config)
    data = make_data(config, world, source, perf.costs(matmul, width), progress.samples)
    ends.callback(data.close)
    versions = WeightPublisher(
        config.output_dir,
        policy,
        source,
        world,
        export_dtype(config.weights.dtype, source),
        timeout=config.dist_timeout,
        on_committed=lambda version, times: report.more_metrics(version - 1, times),
    )
    ends.callback(versions.close)
    report.open(given)
    if not config.bench:
        checkpoints.begin(versions, start)
    report.ready()
    report.text(f"ready on {world.size} × {world.device.type}, starting at step {start}")

    rows = ends.enter_context(Rows(report, world.device))
    syncs = ends.enter_context(HostSyncs(world.device, count=config.bench))
    ends.enter_context(watched(policy.memory, world.device))
    step, saving = start, 0.0
    while config.max_steps is None or step < config.max_steps:
        if sum_over_ranks(world, [stop()])[0]:
            break
        report.step(step)
        checkpoints.look(step)
        report.phase("training")
        started = time.perf_counter()
        batch = data.read(step)
        waited = time.perf_counter() - started
        perf.reset_peak_memory(world.device)

        lr = learning_rate(config.scheduler, config.optim.lr, step, config.max_steps)
        begun = now(world.device)
        sums = forward_backward(policy, batch.batches, cross_entropy, world)
        graded = now(world.device)
        rows.flush()  # of the step before: the device has this one's forward and backward to go on with
        versions.before_update()
        checkpoints.before_update()
        norm = optimizer_step(policy, optimizer, lr, config.optim.max_norm)
        outcome = Outcome(step, world, moe.join_loads(sums, policy), norm, (begun, graded, now(world.device)))
        progress = Progress(step + 1, progress.tokens + batch.tokens, batch.drawn)
        known = {
            "optim/lr": lr,
            "perf/peak_memory": perf.peak_memory_gib(world.device),
            "perf/peak_allocated": perf.peak_allocated_gib(world.device),
            **syncs.take(),
            "time/wait_for_batch": waited,
            **({"time/save_ckpt": saving} if saving else {}),
            "data/samples": len(batch.lengths),
            "data/loss_tokens": batch.loss_tokens,
            "data/packing_efficiency": batch.tokens / batch.capacity,
            **{f"data/dropped_{reason}": count for reason, count in batch.dropped.items()},
            "progress/total_tokens": progress.tokens,
            "progress/total_samples": progress.samples,
        }
        ideal = perf.ideal_seconds(perf.flops(matmul, width, batch.lengths), world)
        rows.put(Row(outcome, moe.with_loads(means, policy), known, batch.tokens, ideal))

        saving, kind = 0.0, checkpoints.due(step + 1)
        if kind or evaluated(config, step + 1):
            report.phase("saving weights and checkpoint" if kind else "saving weights")
            started = time.perf_counter()
            versions.publish(step + 1, outcome.read)
            if kind:
                if checkpoints.holds_up(kind):
                    rows.flush()
                    versions.settle()
                checkpoints.save(progress, kind, partial(rows.recorded, step, config.output_dir / "weights"))
            versions.prune(0, 0, checkpoints.needed)
            saving = time.perf_counter() - started
        step += 1

    rows.flush()
    if not config.bench and step > 0:
        report.phase("saving what is left")
        versions.ensure(step)
        checkpoints.finish(progress)
        versions.prune(0, 0, checkpoints.needed)
        versions.settle()
    if config.bench and world.is_main:  # it alone keeps the rows
        peer = perf.peer_flops(matmul, source.config, 1, config.data.seq_len)
        report.text(bench_table(report.history, world, peer))
    written = "" if config.bench or not step else f"; weights in {version_dir(config.output_dir / 'weights', step)}"
    report.close("stopped" if stop() else "finished", f"{step} steps, {progress.tokens:,} tokens{written}")


def means(sums: list[float]) -> dict[str, float]:
    """The metrics that a step's sums are: they are divided by its loss tokens already."""
    loss, entropy = sums
    return {"loss/mean": loss, "entropy/mean": entropy}


def evaluated(config: SFTConfig, version: int) -> bool:
    """Whether the evaluation beside the training waits for this version; the last one is exported anyway."""
    return config.eval is not None and config.eval.interval is not None and version % config.eval.interval == 0


def bench_config(config: SFTConfig) -> SFTConfig:
    """A few steps on fake data, nothing saved."""
    data = config.data.model_copy(update={"fake": config.data.fake or FakeSFTData()})
    scheduler = ConstantScheduler()  # a decaying schedule might not fit into so few steps
    return config.model_copy(
        update={
            "data": data,
            "max_steps": TRAINER_STEPS,
            "ckpt": None,
            "scheduler": scheduler,
            "eval": None,
            "inference": None,
        }
    )


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
        stop_ids=stop_ids(source),
    )


if __name__ == "__main__":
    from prime_rl.entrypoints.sft import main

    main()
