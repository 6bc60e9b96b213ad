"""The RL trainer: takes batches of rollouts, makes policy versions. One flat loop; everything it calls is a function of its own room.

Also runs as a file: `torchrun … src/prime_rl/trainer/rl/train.py @ train.toml`.
"""

import time
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from prime_rl.config import TrainerConfig
from prime_rl.config.shared import TRAINER_STEPS
from prime_rl.config.trainer import ConstantScheduler
from prime_rl.config.trainer import FakeData as FakeConfig
from prime_rl.trainer import moe, perf
from prime_rl.trainer.canary import CanaryScorer
from prime_rl.trainer.ckpt import Checkpoints, Progress
from prime_rl.trainer.loss import describe, make_loss
from prime_rl.trainer.memory import watched
from prime_rl.trainer.model import build_policy, check_head, check_host_memory, compute_dtype
from prime_rl.trainer.optim import build_optimizer, learning_rate
from prime_rl.trainer.packing import Costs
from prime_rl.trainer.parallel import World, agree, close_world, init_world
from prime_rl.trainer.perf import SMALL_RL, HostSyncs, bench_table
from prime_rl.trainer.report import Report, Row, Rows, StopSignal, say_without_effect
from prime_rl.trainer.rl.data import Data, FakeData, RolloutData
from prime_rl.trainer.source import Source, load_tokenizer, locate_model
from prime_rl.trainer.step import Outcome, forward_backward, now, optimizer_step, warm_up
from prime_rl.trainer.weight_copy import on_device
from prime_rl.trainer.weight_publisher import WeightPublisher, export_dtype, tmpfs_of_config, transport_of
from prime_rl.transport.checkpoints import trainer_is_alone
from prime_rl.transport.rollouts import Sample


def train(given: TrainerConfig) -> None:
    """Train until `max_steps`, or until a signal asks to stop.

    Raises:
        UserError: anything the user can mend, on every rank.
    """
    stop = StopSignal()
    config = bench_config(given) if given.bench else given
    world = init_world(config.device, config.dist_timeout, config.model.dp_replicate)
    with Report(config, "trainer", world, recover=config.recover) as report, ExitStack() as ends:
        run(config, given, world, report, stop, ends)
    close_world()


_LOG_EXAMPLE_INTERVAL = 10  # steps


def run(
    config: TrainerConfig, given: TrainerConfig, world: World, report: Report, stop: StopSignal, ends: ExitStack
) -> None:
    """The run, from top to bottom. `ends` takes what must be closed, however it ends."""
    torch.manual_seed(config.seed)
    loss = make_loss(config.loss)
    fake = config.data.fake
    checkpoints = Checkpoints(
        config,
        world,
        alone=lambda: fake is not None or trainer_is_alone(config.output_dir),
        recover=config.recover,
        recovery_interval=config.recovery_interval,
    )
    ends.callback(checkpoints.close)
    if not config.bench:
        checkpoints.choose()

    report.phase("loading the model")
    source = locate_model(config.model, world, random_weights=fake is not None)
    if not config.bench:
        checkpoints.check_model(source)
    tokenizer = agree(world, lambda: load_tokenizer(source) if fake is None and world.is_main else None)
    check_host_memory(config, source, world, config.seq_len, SMALL_RL)
    policy = build_policy(
        source,
        config.model,
        world,
        config.seed,
        tokens=config.seq_len,
        optim=config.optim,
        published=partial(published_bytes, config, source, world),
    )
    check_head(policy, source, world)
    optimizer = build_optimizer(policy, config.optim)
    say_without_effect(config, policy, world)
    progress = checkpoints.load(policy, optimizer)
    start = progress.step

    matmul, width = perf.matmul_parameters(policy.lm), perf.attention_width(source.config)
    data = make_data(config, world, source, perf.costs(matmul, width), report)
    ends.callback(data.close)
    exported, scorer = export_dtype(config.weights.dtype, source), None
    if fake is None and config.weights.canary:  # else nobody reads the versions
        vocabulary = source.config.get_text_config().vocab_size
        scorer = CanaryScorer(policy, world, vocabulary, compute_dtype(config.model.dtype, world.device), exported)
    versions = WeightPublisher(
        config.output_dir,
        policy,
        source,
        world,
        exported,
        timeout=config.dist_timeout,
        canary=scorer,
        memory=transport_of(config, world),
        tmpfs=tmpfs_of_config(config),
        save_interval=config.weights.save_interval,
        on_committed=lambda version, times: report.more_metrics(version - 1, times),
    )
    ends.callback(versions.close)
    report.open(given)
    if not config.bench:
        report.phase("committing the starting weights")
        checkpoints.begin(versions, start)
    report.ready()
    report.text(f"ready on {world.size} × {world.device.type}, starting at step {start}")

    rows = ends.enter_context(Rows(report, world.device))
    syncs = ends.enter_context(HostSyncs(world.device, count=config.bench))
    ends.enter_context(watched(policy.memory, world.device))
    if fake is None and policy.compiled:  # the servers are loading meanwhile
        report.phase("compiling")
        warm_up(policy, loss, config, world, source.config.get_text_config().vocab_size, pads_to(world))
    weights = config.output_dir / "weights" if fake is None else None
    step, saving = start, 0.0
    while config.max_steps is None or step < config.max_steps:
        report.step(step)
        checkpoints.look(step)
        if not data.arrived(step):  # nothing is gained by running ahead: what the step before began is finished first
            rows.flush()
            versions.settle()
        started = time.perf_counter()
        if not data.wait(step, stop):
            break
        arrived = time.perf_counter()
        batch = data.read(step)
        waited, reading = time.perf_counter() - started, time.perf_counter() - arrived
        if step == start:
            rows.begin()
            waited = 0.0
        report.phase("training")
        perf.reset_peak_memory(world.device)

        lr = learning_rate(config.scheduler, config.optim.lr, step, config.max_steps)
        begun = now(world.device)
        sums = forward_backward(policy, batch.batches, loss, world)
        graded = now(world.device)
        rows.flush()  # of the step before: the device has this one's forward and backward to go on with
        versions.before_update()
        checkpoints.before_update()
        norm = optimizer_step(policy, optimizer, lr, config.optim.max_norm)
        outcome = Outcome(step, world, moe.join_loads(sums, policy), norm, (begun, graded, now(world.device)))
        progress = Progress(step + 1, progress.tokens + batch.tokens, progress.samples + len(batch.lengths))
        known = {
            "optim/lr": lr,
            "perf/peak_memory": perf.peak_memory_gib(world.device),
            "perf/peak_allocated": perf.peak_allocated_gib(world.device),
            **syncs.take(),
            "time/wait_for_batch": waited,
            "time/read_batch": reading,  # of the wait
            **({"time/save_ckpt": saving} if saving else {}),
            "progress/total_tokens": progress.tokens,
            "progress/total_samples": progress.samples,
        }
        ideal = perf.ideal_seconds(perf.flops(matmul, width, batch.lengths), world)
        named = moe.with_loads(partial(describe, batch.environments), policy)
        rows.put(Row(outcome, named, known, batch.tokens, ideal))

        if fake is None:
            durable = checkpoints.will_need(step + 1, config.async_level) or step + 1 == config.max_steps
            versions.publish(step + 1, outcome.read, durable=durable)
            versions.prune(config.async_level, config.weights.keep, checkpoints.needed)
        saving = 0.0
        if kind := checkpoints.due(step + 1):
            report.phase(f"saving a {kind}")
            started = time.perf_counter()
            if checkpoints.holds_up(kind):
                rows.flush()
                versions.settle()
            recorded = partial(rows.recorded, step, weights, durable=kind == "checkpoint")
            checkpoints.save(progress, kind, recorded)
            saving = time.perf_counter() - started
        if batch.example is not None and tokenizer is not None and step % _LOG_EXAMPLE_INTERVAL == 0:
            report.text(readable(batch.example, tokenizer))
        step += 1

    rows.flush()
    if not config.bench:
        report.phase("saving what is left")
        versions.settle()
        checkpoints.finish(progress)
        if step > 0:
            versions.ensure(step, durable=True)  # on fake data it is the only one
        versions.prune(config.async_level, config.weights.keep, checkpoints.needed)
        versions.leave_tmpfs(config.async_level, config.weights.keep, checkpoints.needed)
    if config.bench and world.is_main:  # it alone keeps the rows
        peer = perf.peer_flops(matmul, source.config, 1, config.seq_len)
        report.text(bench_table(report.history, world, peer))
    report.close("stopped" if stop() else "finished", f"{step} steps, {progress.tokens:,} tokens")


def bench_config(config: TrainerConfig) -> TrainerConfig:
    """A few steps on fake data, nothing saved."""
    fake = config.data.fake or FakeConfig()
    data = config.data.model_copy(update={"fake": fake})
    scheduler = ConstantScheduler()  # a decaying schedule might not fit into so few steps
    unsaved = {"ckpt": None, "recovery_interval": None}
    return config.model_copy(update={"data": data, "max_steps": TRAINER_STEPS, "scheduler": scheduler, **unsaved})


def pads_to(world: World) -> int:
    """Micro-batches are padded to a multiple of so many tokens: compiled CUDA kernels are fastest on whole tiles; a CPU would compute the padding."""
    return 128 if world.device.type == "cuda" else 1


def make_data(config: TrainerConfig, world: World, source: Source, costs: Costs, report: Report) -> Data:
    """The source of steps that the config names."""
    vocabulary = source.config.get_text_config().vocab_size
    if config.data.fake is not None:
        return FakeData(
            config.data.fake,
            world,
            seq_len=config.seq_len,
            vocabulary=vocabulary,
            costs=costs,
            multiple_of=pads_to(world),
            seed=config.seed,
            read_seconds=config.dist_timeout,
            loss=config.loss,
        )
    return RolloutData(
        config.output_dir / "rollouts",
        world,
        seq_len=config.seq_len,
        vocabulary=vocabulary,
        costs=costs,
        multiple_of=pads_to(world),
        timeout=config.rollout_timeout,
        read_seconds=config.dist_timeout,
        loss=config.loss,
        on_wait=lambda subject, _: report.waiting(subject, "orchestrator", config.rollout_timeout),
    )


def readable(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """A rollout for people: what was given, what was sampled (if nothing was, what is imitated), what it was worth."""
    ids = [int(token) for token in sample.input_ids]
    of_loss = np.asarray(sample.loss_mask, dtype=bool)
    if not of_loss.any() and sample.ce_weight is not None:  # a teacher's tokens
        of_loss = np.asarray(sample.ce_weight) != 0
    first = int(np.argmax(of_loss)) if of_loss.any() else len(ids)
    prompt, completion = (str(tokenizer.decode(part)) for part in (ids[:first], ids[first:]))
    title = f"sample of {sample.env} (task {sample.task_id}), reward {sample.reward:.3f}"
    return f"{title}\n  prompt: {_shortened(prompt)}\n  completion: {_shortened(completion)}"


def _shortened(text: str, limit: int = 500) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


if __name__ == "__main__":
    from prime_rl.entrypoints.trainer import main

    main()


def published_bytes(config: "TrainerConfig", source: Source, world: World, parameters: int) -> float:
    """Bytes per parameter of a rank's share that published weights take on the trainer's GPU.

    A server that shares the GPU takes twice as much again for its own copy, which it wants to find free
    (`inference.staging`).
    """
    if transport_of(config, world) is None:
        return 0.0
    itemsize = export_dtype(config.weights.dtype, source).itemsize
    if not on_device(parameters * itemsize, world.device):
        return 0.0
    return (3 if config.weights.shares_gpu else 1) * itemsize * world.shards
