"""The training loop of RL and fine-tuning, which differ in data, loss, and who follows their versions (`Recipe`)."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from prime_rl.config import SFTConfig, TrainerConfig
from prime_rl.config.sft import FakeSFTData
from prime_rl.config.shared import TRAINER_STEPS
from prime_rl.config.trainer import ConstantScheduler, FakeData, WeightsConfig
from prime_rl.monitor import read_status
from prime_rl.monitor.monitor import bench_table
from prime_rl.trainer import perf, router_replay, routing
from prime_rl.trainer.ckpt import Checkpoints, Progress
from prime_rl.trainer.lm_head import TokenLoss, merge_sums
from prime_rl.trainer.lora import load_adapter
from prime_rl.trainer.loss import STREAMS, SequenceLoss
from prime_rl.trainer.memory import watched
from prime_rl.trainer.model import Policy, build_policy, compute_dtype
from prime_rl.trainer.optim import build_optimizer, clip_gradients, learning_rate
from prime_rl.trainer.packing import Document, MicroBatch, StepSource, collate, pads_to, pinned, to_device
from prime_rl.trainer.parallel import World, agree, close_world, init_world, now
from prime_rl.trainer.policy_check import check_policy
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.report import MetricRows, Named, Report, StepMetrics, stop_signal, sum_on_device
from prime_rl.trainer.router_replay import Routers
from prime_rl.trainer.source import Source, locate_model
from prime_rl.trainer.weight_publisher import WeightPublisher, export_dtype, published_bytes, uses_memory
from prime_rl.transport.checkpoints import trainer_is_alone
from prime_rl.transport.commit import step_dir

Config = TrainerConfig | SFTConfig
C = TypeVar("C", TrainerConfig, SFTConfig)


@dataclass(frozen=True)
class Recipe:
    """What RL and fine-tuning differ in."""

    tokens: int  # most of a micro-batch
    loss: TokenLoss | SequenceLoss
    names: Named  # for the summed metrics of `loss`
    open_data: Callable[[World, Source], StepSource]  # called before the model is built
    weights: WeightsConfig  # what versions are kept, and how servers get them
    served: TrainerConfig | None = None  # of a run whose versions servers follow (None: they are for checkpoints alone)
    router_replay: bool = False  # whether tokens go to the experts that the engine chose for them


def run(raw_config: C, make_recipe: Callable[[C], Recipe]) -> None:
    """Train until `max_steps`, or until a signal asks to stop. A finished run that is to be recovered is left as it is.

    Resources registered on `exit_stack` are always closed. Raises UserError, on every rank, for what the user can mend.
    """
    stop = stop_signal()
    config = bench_config(raw_config) if raw_config.bench else raw_config
    process = "trainer" if isinstance(config, TrainerConfig) else "sft"
    recover = isinstance(config, TrainerConfig) and config.recover
    before = read_status(config.output_dir).get(process) if recover else None
    world = init_world(config.device, config.dist_timeout, config.model.dp_replicate)
    with ExitStack() as exit_stack:
        report = Report(config, process, world, recover=recover)
        exit_stack.push(report.end)
        recipe = make_recipe(config)
        checkpoints = Checkpoints(config, world, alone=lambda: not recipe.served or trainer_is_alone(config.output_dir))
        exit_stack.callback(checkpoints.close)
        if not config.bench and checkpoints.choose(before is not None and before.outcome == "finished"):
            report.close(
                "finished", f"this run has made its {config.max_steps} steps already: nothing is trained again"
            )
            close_world()
            return

        torch.manual_seed(config.seed)
        served, lora = recipe.served, config.lora
        async_level = 0 if served is None else served.async_level
        report.phase("loading the model")
        source = locate_model(config.model, world, random_weights=config.data.fake is not None)
        if not config.bench:
            checkpoints.check_model(source)
        report.phase("loading the data")
        data = recipe.open_data(world, source)
        exit_stack.callback(data.close)
        report.phase("building the model")
        published = None if served is None else partial(published_bytes, served, source, world)
        policy = build_policy(
            source, config.model, world, config.seed,
            tokens=recipe.tokens, optim=config.optim, published=published, lora=lora,
        )  # fmt: skip
        computed = compute_dtype(config.model.dtype, world.device)
        check_policy(policy, source.name, world, computed)
        if lora is not None and (adapter := lora.adapter) is not None and checkpoints.resumed is None:
            agree(world, lambda: load_adapter(policy, adapter, world))
        optimizer = build_optimizer(policy, config.optim)
        progress = checkpoints.load(policy, optimizer)
        start = progress.step
        costs = perf.step_costs(policy.lm, source.config)
        if recipe.router_replay:
            data.routers = router_replay.set_up(policy.lm.model.layers, source.name)
        data.start(costs, progress.samples)

        vocabulary = source.config.get_text_config().vocab_size
        serve = None if lora is None else lora.serve
        adapts = (
            serve == "adapter" and config.weights.dtype == "auto"
        )  # what is small is exported as it is computed with
        exported = computed if adapts else export_dtype(config.weights.dtype, source)
        # Else nobody reads the scores
        scorer = ReferenceScorer(policy, world, vocabulary, computed, exported, serve) if served is not None else None
        versions = WeightPublisher(
            config.output_dir,
            policy,
            source,
            world,
            exported,
            timeout=config.dist_timeout,
            scorer=scorer,
            weights=recipe.weights,
            memory=served is not None and uses_memory(served.weights, world),
            gpu=served is not None,
            async_level=async_level,
            lora=lora,
            needed=checkpoints.needed,
            on_committed=lambda version, times: report.more_metrics(version - 1, times),
        )
        exit_stack.callback(versions.close)
        report.open(raw_config)
        if not config.bench:
            report.phase("committing the starting weights")
            checkpoints.begin(versions, start)
        report.status.ready()  # a restart may help against what fails from here on
        report.text(f"ready on {world.size} × {world.device.type}, starting at step {start}")

        rows, names = MetricRows(report, world.device), partial(routing.step_metrics, policy.sparse, recipe.names)
        exit_stack.push(rows.end)
        exit_stack.enter_context(watched(policy.memory))
        if served is not None and policy.compiled:  # the servers are loading meanwhile
            report.phase("compiling")
            warm_up(policy, recipe.loss, served, world, vocabulary, data.routers)
        step, saving = start, 0.0
        while config.max_steps is None or step < config.max_steps:
            report.status.step(step)
            checkpoints.poll(step)
            if not data.arrived(step):
                # Nothing is gained by running ahead: what the step before began is finished first.
                rows.flush()
                versions.settle(unless=partial(data.arrived, step))
            started = time.perf_counter()
            if not data.wait(step, stop, report.status.waiting):
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
            balance = config.model.moe_aux_loss  # times the mean over layers and tokens
            for block in policy.sparse if balance else ():
                block.router.loss_scale.fill_(balance / len(policy.sparse) / batch.tokens)
            sums = forward_backward(policy, batch.batches, recipe.loss, world)
            graded = now(world.device)
            rows.flush()  # of the step before: the device has this one's forward and backward to go on with
            checkpoints.before_update()
            norm = optimizer_step(policy, optimizer, lr, config.optim.max_norm)
            moments = begun, graded, now(world.device)
            progress = Progress(step + 1, progress.tokens + batch.tokens, progress.samples + batch.samples)
            allocated, reserved = perf.peak_memory_gib(world.device)
            known = {
                "optim/lr": lr,
                "perf/peak_memory": reserved,
                "perf/peak_allocated": allocated,
                "time/wait_for_batch": waited,
                "time/read_batch": reading,  # of the wait
                **({"time/save_ckpt": saving} if saving else {}),
                **batch.metrics,
                "progress/total_tokens": progress.tokens,
                "progress/total_samples": progress.samples,
            }
            ideal = perf.ideal_seconds(costs.of(batch.lengths).sum(), world)
            sums_norm = sum_on_device(world, sums, norm)
            routing.update_biases(policy.sparse, sums, config.model.moe_bias_update)
            row = StepMetrics(step, sums_norm, moments, names, known, batch.tokens, ideal)
            rows.put(row)

            kind, weights, saving = checkpoints.due(step + 1), None, 0.0
            every = recipe.weights.save_interval  # of fine-tuning, whose evaluation waits for these versions
            if served is not None or kind == "checkpoint" or (every is not None and (step + 1) % every == 0):
                weights = config.output_dir / "weights"
                durable = checkpoints.will_need(step + 1, async_level) or step + 1 == config.max_steps
                versions.publish(step + 1, row.read, durable=durable)
            if kind is not None:
                report.phase(f"saving a {kind}")
                started = time.perf_counter()
                if checkpoints.holds_up(kind):
                    rows.flush()
                    versions.settle()
                checkpoints.save(progress, kind, partial(rows.recorded, step, weights, durable=kind == "checkpoint"))
                saving = time.perf_counter() - started
            step += 1

        rows.flush()
        stopped = config.max_steps is None or step < config.max_steps  # on every rank, whichever was asked
        written = ""
        if not config.bench:
            report.phase("saving what is left")
            versions.settle()
            if step > 0:
                versions.ensure(step, durable=True)
                written = f"; weights in {step_dir(config.output_dir / 'weights', step)}"
            checkpoints.finish(progress, stopped)
            versions.finish()
        elif world.is_main:  # it alone keeps the rows
            report.text(bench_table(config.output_dir, report.process))
        report.close("stopped" if stopped else "finished", f"{step} steps, {progress.tokens:,} tokens{written}")
    close_world()


def bench_config(config: C) -> C:
    fake = config.data.fake or (FakeSFTData() if isinstance(config, SFTConfig) else FakeData())
    changes: dict[str, Any] = {
        "data": config.data.model_copy(update={"fake": fake}),
        "max_steps": TRAINER_STEPS,
        "scheduler": ConstantScheduler(),  # a decaying schedule might not fit into so few steps
        "ckpt": None,
    }
    changes |= {"eval": None, "inference": None} if isinstance(config, SFTConfig) else {"recovery_interval": None}
    return config.model_copy(update=changes)


# ---- one step


def forward_backward(
    policy: Policy, batches: Sequence[MicroBatch], loss_of: TokenLoss | SequenceLoss, world: World
) -> Tensor:
    """Compute the gradients of the summed losses of this rank's micro-batches. Every rank must pass as many of them.

    The streams must already be divided by the global counts: gradients are summed over micro-batches and ranks, never
    averaged. Returns this rank's metric sums (of experts: `routing.step_metrics`) on the device, without a sync.
    """
    total = None
    for i, host in enumerate(batches):
        is_last = i == len(batches) - 1
        for unit in policy.units:
            # Where weights stay gathered after forward, they stay until the step's last backward.
            unit.set_reshard_after_backward(policy.frees_weights or is_last, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)  # replicas exchange what all micro-batches add up to
        loss, sums = policy(to_device(host, world.device), loss_of)
        if policy.sparse:
            sums = torch.cat([*(block.experts.count_F for block in policy.sparse), sums])
        loss.backward()
        total = sums if total is None else merge_sums([total, sums])
    assert total is not None, "a step has at least one micro-batch on every rank"
    return total


def optimizer_step(policy: Policy, optimizer: torch.optim.Optimizer, lr: float, max_norm: float | None) -> Tensor:
    """Clip, update, clear the gradients. Returns the gradient norm before clipping, [] on the device."""
    norm = clip_gradients(policy, max_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def warm_up(
    policy: Policy,
    loss: TokenLoss | SequenceLoss,
    config: TrainerConfig,
    world: World,
    vocabulary: int,
    routers: Routers | None = None,
) -> None:
    """Compile blocks, loss and the scoring of versions. Every rank calls it, where anything is compiled.

    Weights and states of the optimizer stay as they are. Blocks are compiled for the longest micro-batch, then, since
    another number of tokens follows, once for any: those that the run packs later compile nothing. Both are as long as
    `seq_len` allows, so that what does not fit into memory fails here as in a step.

    `routers` are those of the model, if it replays the engine's choice of experts.
    """
    multiple_of = pads_to(world.device)
    longest = -(-config.seq_len // multiple_of) * multiple_of
    batches = [_random_batch(tokens, vocabulary, routers) for tokens in (longest, max(longest - multiple_of, 2))]
    forward_backward(policy, pinned(batches, world.device), loss, world)
    clip_gradients(policy, config.optim.max_norm)
    policy.zero_grad(set_to_none=True)
    ReferenceScorer(policy, world, vocabulary, torch.float32, torch.float32).score(as_exported=False, compiled=True)


def _random_batch(tokens: int, vocabulary: int, routers: Routers | None) -> MicroBatch:
    """Random tokens in a few documents. No token has a weight, hence no gradient."""
    draw = np.random.default_rng(0)
    documents = []
    for length in map(len, np.array_split(np.arange(tokens), min(3, tokens))):
        ids, streams = draw.integers(0, vocabulary, length), np.zeros((len(STREAMS), length), dtype=np.float32)
        documents.append(Document(ids, np.ones(length, dtype=np.bool_), 1.0, streams))
    return collate(documents, len(STREAMS), routers=routers)
