"""The training loop of RL and fine-tuning, which differ in data, loss, and who follows their versions (`Recipe`)."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from prime_rl.config import SFTConfig, TrainerConfig
from prime_rl.config.sft import FakeSFTData
from prime_rl.config.shared import TRAINER_STEPS
from prime_rl.config.trainer import ConstantScheduler, FakeData, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.monitor import Extras, read_status
from prime_rl.monitor.monitor import bench_table
from prime_rl.trainer import perf, router_replay, routing
from prime_rl.trainer.ckpt import Checkpoints, Progress
from prime_rl.trainer.lm_head import TokenLoss, merge_sums
from prime_rl.trainer.lora import load_adapter
from prime_rl.trainer.loss import STREAMS, SequenceLoss
from prime_rl.trainer.memory import watched
from prime_rl.trainer.model import Policy, build_policy, compute_dtype
from prime_rl.trainer.optim import build_optimizer, clip_gradients, learning_rate
from prime_rl.trainer.packing import (
    Costs,
    Document,
    MicroBatch,
    StepData,
    StepSource,
    collate,
    pads_to,
    pinned,
    to_device,
)
from prime_rl.trainer.parallel import Moment, World, agree, close_world, gather, init_world, now
from prime_rl.trainer.policy_check import check_policy
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.report import MetricRows, Named, Report, StepMetrics, stop_signal, sum_on_device
from prime_rl.trainer.router_replay import Routers
from prime_rl.trainer.source import Source, locate_model
from prime_rl.trainer.step_tokens import StepTokens
from prime_rl.trainer.weight_publisher import WeightPublisher, export_dtype, published_bytes, uses_memory
from prime_rl.transport.checkpoints import trainer_is_alone
from prime_rl.transport.commit import clean_stages, step_dir
from prime_rl.wait import TaskThread

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


class Training:
    """The training of one policy in a run directory: its data, optimizer, checkpoints, versions and metrics.

    Call in this order: `choose`, `open_data`, `begin`; for each step `wait` (of a tenant `SharedTrainer._advance`),
    `read` and, once the gradients are there, `update`; `commit_last`, `finish`. Every rank calls every method, at the
    same point of the run. Resources are registered on `exit_stack`. Raises UserError, on every rank, for what the user
    can mend.
    """

    policy: Policy

    def __init__(self, config: Config, recipe: Recipe, world: World, report: Report, exit_stack: ExitStack) -> None:
        self.config, self.recipe, self.world, self.report = config, recipe, world, report
        self.exit_stack = exit_stack
        alone = partial(trainer_is_alone, self.config.output_dir)
        self.checkpoints = Checkpoints(self.config, world, alone=lambda: not recipe.served or alone())
        exit_stack.callback(self.checkpoints.close)
        self.async_level = 0 if recipe.served is None else recipe.served.async_level
        self.waited = 0.0  # seconds for the data of the step
        self._saving = 0.0  # seconds that the loop waited for the last checkpoint
        self._skipped = False  # whether the token statistics of a step were left out

    def choose(self, outcome: str | None) -> bool:
        """Decide what to resume from; return whether nothing is left to do. `outcome`: of the trainer before."""
        if self.config.bench or not self.checkpoints.choose(outcome == "finished"):
            return False
        self.report.close(
            "finished", f"this run has made its {self.config.max_steps} steps already: nothing is trained again"
        )
        return True

    def open_data(self, source: Source) -> None:
        """Open what is trained on, before the model is built."""
        self.report.phase("loading the data")
        if not self.config.bench:
            self.checkpoints.check_model(source)
        self.source, self.data = source, self.recipe.open_data(self.world, source)
        self.exit_stack.callback(self.data.close)

    def begin(self, policy: Policy, costs: Costs) -> None:
        """Load the state into `policy`, which has its first values, and commit the version that it begins with."""
        config, recipe, world, source, lora = self.config, self.recipe, self.world, self.source, self.config.lora
        self.policy, self.costs = policy, costs
        if lora is not None and (adapter := lora.adapter) is not None and self.checkpoints.resumed is None:
            agree(world, lambda: load_adapter(policy, adapter, world))
        self.optimizer = build_optimizer(policy, config.optim)
        self.progress = self.checkpoints.load(policy, self.optimizer)
        self.start = self.step = self.progress.step
        self.data.start(costs, self.progress.samples)

        serve = None if lora is None else lora.serve
        computed = compute_dtype(config.model.dtype, world.device)
        # Adapters are small: they are exported in the type that is computed in
        adapts = serve == "adapter" and config.weights.dtype == "auto"
        exported = computed if adapts else export_dtype(config.weights.dtype, source)
        scorer, served = None, recipe.served
        if served is not None:  # only servers are checked against reference scores
            scorer = ReferenceScorer(policy, world, source.vocabulary, computed, exported, serve)
        self.versions = WeightPublisher(
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
            async_level=self.async_level,
            lora=lora,
            needed=self.checkpoints.needed,
            on_committed=lambda version, times: self.report.more_metrics(version - 1, times),
        )
        self.exit_stack.callback(self.versions.close)
        for directory in (config.output_dir / "token_stats").glob("step_*") if world.rank == 0 else ():
            clean_stages(directory)
        self.token_stats = TaskThread("token-stats", "the disk", config.dist_timeout)
        self.exit_stack.callback(self.token_stats.close)
        self.report.open()
        if not config.bench:
            self.report.phase("committing the starting weights")
            self.checkpoints.begin(self.versions, self.start)
        self.report.status.ready()  # a restart may help against what fails from here on
        self.report.text(f"ready on {world.size} × {world.device.type}, starting at step {self.start}")
        self.rows = MetricRows(self.report, world.device)
        self._names = partial(routing.step_metrics, policy.sparse, recipe.names)
        self.exit_stack.push(self.rows.end)

    @property
    def done(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def wait(self, stop: Callable[[], bool]) -> bool:
        """Wait for the data of the next step. False if a rank was asked to stop."""
        step, data = self.step, self.data
        self.report.status.step(step)
        self.checkpoints.poll(step)
        if not data.arrived(step):
            # Nothing is gained by running ahead: what the step before began is finished first.
            self.rows.flush()
            self.versions.settle(unless=partial(data.arrived, step))
        began = time.perf_counter()
        arrived = data.wait(step, stop, self.report.status.waiting)
        self.waited = time.perf_counter() - began
        return arrived

    def read(self) -> StepData:
        """Return the micro-batches of the next step, once they have arrived."""
        began = time.perf_counter()
        self.batch = self.data.read(self.step)
        self._reading = time.perf_counter() - began
        if self.step == self.start:
            self.rows.begin()
            self.waited = self._reading = 0.0
        self.report.phase("training")
        return self.batch

    def update(self, sums: Tensor, begun: Moment, known: Mapping[str, float] = MappingProxyType({})) -> None:
        """Update the policy by the gradients of a whole step, whose computation began at `begun`, and publish the next
        version. `sums`: the step's metric sums, on the device; `known`: further metrics of the step."""
        config, world, batch, step = self.config, self.world, self.batch, self.step
        graded = now(world.device)
        self.rows.flush()  # of the step before: the device has this one's forward and backward to go on with
        self.checkpoints.before_update()
        lr = learning_rate(config.scheduler, config.optim.lr, step, config.max_steps)
        norm = optimizer_step(self.policy, self.optimizer, lr, config.optim.max_norm)
        moments = begun, graded, now(world.device)
        last = self.progress
        self.progress = progress = Progress(step + 1, last.tokens + batch.tokens, last.samples + batch.samples)
        allocated, reserved = perf.peak_memory_gib(world.device)
        metrics = {
            "optim/lr": lr,
            "perf/peak_memory": reserved,
            "perf/peak_allocated": allocated,
            "time/wait_for_batch": self.waited + self._reading,
            "time/read_batch": self._reading,  # of the wait
            **({"time/save_ckpt": self._saving} if self._saving else {}),
            **batch.metrics,
            **known,
            "progress/total_tokens": progress.tokens,
            "progress/total_samples": progress.samples,
        }
        ideal = perf.ideal_seconds(self.costs.of(batch.lengths).sum(), world)
        extras = partial(Extras, distributions={"num_tokens": batch.lengths})
        if batch.sampled is not None:
            batch.sampled.send()
            self.token_stats.results(wait=False)  # forgets what is written
            if self.token_stats.idle:
                write = partial(batch.sampled.write, config.output_dir, step, world.rank)
                self.token_stats.submit(f"token_stats/step_{step}", write)
            elif not self._skipped:
                self._skipped = True
                logger.warning("token_stats/step_{} and others are left out: an earlier one is being written", step)
            extras = partial(batch.sampled.extras, batch.lengths)
        sums_norm = sum_on_device(world, sums, norm)
        routing.update_biases(self.policy.sparse, sums, config.model.moe_bias_update)
        row = StepMetrics(step, sums_norm, moments, self._names, metrics, batch.tokens, ideal, extras)
        self.rows.put(row)

        kind, weights, self._saving = self.checkpoints.due(step + 1), None, 0.0
        every = self.recipe.weights.save_interval  # of fine-tuning, whose evaluation waits for these versions
        served = self.recipe.served is not None
        if served or kind == "checkpoint" or (every is not None and (step + 1) % every == 0):
            weights = config.output_dir / "weights"
            durable = self.checkpoints.will_need(step + 1, self.async_level) or step + 1 == config.max_steps
            self.versions.publish(step + 1, row.read, durable=durable)
        if kind is not None:
            self.report.phase(f"saving a {kind}")
            began = time.perf_counter()
            if self.checkpoints.holds_up(kind):
                self.rows.flush()
                self.versions.settle()
            recorded = partial(self.rows.recorded, step, weights, durable=kind == "checkpoint")
            self.checkpoints.save(progress, kind, recorded)
            self._saving = time.perf_counter() - began
        self.step += 1

    def commit_last(self) -> None:
        """Commit the last version."""
        self.rows.flush()
        if not self.config.bench:
            self.report.phase("saving what is left")
            self.versions.settle()
            if self.step > 0:
                self.versions.ensure(self.step, durable=True)

    def finish(self) -> None:
        """Save the last state; say that the run is finished, or stopped before its last step. Computes nothing, so that
        of a single rank a thread may call it."""
        stopped, written = not self.done, ""  # on every rank, whichever was asked
        if not self.config.bench:
            self.checkpoints.finish(self.progress, stopped)
            self.versions.finish()
            if self.step > 0:
                written = f"; weights in {step_dir(self.config.output_dir / 'weights', self.step)}"
        elif self.world.is_main:  # it alone keeps the rows
            self.report.text(bench_table(self.config.output_dir, self.report.process))
        tokens = f"{self.step} steps, {self.progress.tokens:,} tokens{written}"
        self.report.close("stopped" if stopped else "finished", tokens)


def run(config: C, make_recipe: Callable[[C], Recipe]) -> None:
    """Train until `max_steps`, or until a signal asks to stop. A finished run that is to be recovered is left as it is.

    Resources registered on `exit_stack` are always closed. Raises UserError, on every rank, for what the user can mend.
    """
    stop = stop_signal()
    config = bench_config(config) if config.bench else config
    process = "trainer" if isinstance(config, TrainerConfig) else "sft"
    before = read_status(config.output_dir).get(process)
    world = init_world(config.device, config.dist_timeout, config.model.dp_replicate)
    config = common_config(config, world)
    recover = isinstance(config, TrainerConfig) and config.recover
    with ExitStack() as exit_stack:
        report = Report(config, process, world, recover=recover)
        exit_stack.push(report.end)
        recipe = make_recipe(config)
        training = Training(config, recipe, world, report, exit_stack)
        if training.choose(before.outcome if before is not None and recover else None):
            close_world()
            return

        torch.manual_seed(config.seed)
        report.phase("loading the model")
        source = locate_model(config.model, world, random_weights=config.data.fake is not None)
        training.open_data(source)
        report.phase("building the model")
        policy = make_policy(config, recipe, source, world)
        if recipe.router_replay:
            training.data.routers = router_replay.set_up(policy.lm.model.layers, source.name)
        training.begin(policy, perf.step_costs(policy.lm, source.config))

        exit_stack.enter_context(watched(policy.memory))
        if recipe.served is not None and policy.compiled:  # the servers are loading meanwhile
            report.phase("compiling")
            warm_up(policy, recipe.loss, recipe.served, world, source.vocabulary, training.data.routers)
        while not training.done and training.wait(stop):  # bounded: the wait has a deadline
            batch = training.read()
            perf.reset_peak_memory(world.device)
            begun = now(world.device)
            balance = config.model.moe_aux_loss  # times the mean over layers and tokens
            for block in policy.sparse if balance else ():
                block.router.loss_scale.fill_(balance / len(policy.sparse) / batch.tokens)
            training.update(forward_backward(policy, batch.batches, recipe.loss, world, batch.sampled), begun)
        training.commit_last()
        training.finish()
    close_world()


def common_config(config: C, world: World) -> C:
    """Return the configuration of all ranks; whether to recover is up to rank 0. Raises UserError, on every rank, if
    anything else differs: each of several nodes is started with settings of its own."""
    first, *others = gather(world, config.model_dump(mode="json"))
    for rank, other in enumerate(others, 1):
        for key, value, expected in _differences(other, first):
            if key.partition(".")[0] not in ("recover", "log"):
                raise UserError(f"{key} is {value} for rank {rank}, and {expected} for rank 0: give all nodes one file")
    return config.model_copy(update={"recover": first["recover"]}) if "recover" in first else config


def _differences(value: Any, expected: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, dict) and isinstance(expected, dict):
        for name in sorted(value.keys() | expected.keys()):
            yield from _differences(value.get(name), expected.get(name), f"{key}.{name}" if key else name)
    elif value != expected:
        yield key, value, expected


def make_policy(config: Config, recipe: Recipe, source: Source, world: World, slots: int = 1) -> Policy:
    """Build the policy, with so many adapters beside each other, and check that it computes what the model does."""
    published = None if recipe.served is None else partial(published_bytes, recipe.served, source, world)
    policy = build_policy(
        source, config.model, world, config.seed,
        tokens=recipe.tokens, optim=config.optim, published=published, lora=config.lora, slots=slots,
    )  # fmt: skip
    check_policy(policy, source.name, world, compute_dtype(config.model.dtype, world.device))
    return policy


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
    policy: Policy,
    batches: Sequence[MicroBatch],
    loss_of: TokenLoss | SequenceLoss,
    world: World,
    sampled: StepTokens | None = None,
) -> Tensor:
    """Compute the gradients of the summed losses of this rank's micro-batches. Every rank must pass as many of them.

    The streams must already be divided by the global counts: gradients are summed over micro-batches and ranks, never
    averaged. `sampled` collects their tokens. Returns this rank's metric sums (of experts: `routing.step_metrics`) on
    the device, without a sync.
    """
    total = None
    for i, host in enumerate(batches):
        is_last = i == len(batches) - 1
        for unit in policy.units:
            # Where weights stay gathered after forward, they stay until the step's last backward.
            unit.set_reshard_after_backward(policy.frees_weights or is_last, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)  # replicas exchange what all micro-batches add up to
        loss, sums = policy(to_device(host, world.device, sampled), loss_of)
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
        documents.append(Document.of(draw.integers(0, vocabulary, length), streams=len(STREAMS)))
    return collate(documents, len(STREAMS), routers=routers)
