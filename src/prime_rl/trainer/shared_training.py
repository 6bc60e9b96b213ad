"""One trainer for many tenants: a frozen model, and for each tenant an adapter in a slot of its own.

A tenant is a `Training` in its own run directory, with its own optimizer, schedule, loss, steps and checkpoints; what
it shares is the model and the time. Its batches are packed as if it were alone, and its micro-batches are what takes
turns: a GPU computes those of several tenants together, as many as `seq_len` allows, a CPU one after the other. Every
tenant is updated as soon as its own batch is complete. What fails for one ends its membership and no other's.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from pydantic import ValidationError
from torch import Tensor, nn

from prime_rl.config import TrainerConfig
from prime_rl.config.shared import TenantsConfig
from prime_rl.errors import UserError, one_line
from prime_rl.monitor import read_status
from prime_rl.monitor.status import say_for, status_path
from prime_rl.trainer import perf
from prime_rl.trainer.lm_head import TokenLoss, merge_sums
from prime_rl.trainer.lora import GROUPED_RANKS, initialize
from prime_rl.trainer.loss import SequenceLoss
from prime_rl.trainer.memory import watched
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import MicroBatch, pads_to, to_device
from prime_rl.trainer.parallel import Moment, World, close_world, init_world, now, seconds
from prime_rl.trainer.parameters import plain_name
from prime_rl.trainer.report import Report, stop_signal
from prime_rl.trainer.rl.train import make_recipe as recipe_of
from prime_rl.trainer.source import locate_model
from prime_rl.trainer.training_loop import Training, make_policy, warm_up
from prime_rl.transport import tenants
from prime_rl.transport.commit import CommitError, step_dir, subject_of
from prime_rl.transport.settings import check_and_commit
from prime_rl.transport.tenants import Join, tenant_dir
from prime_rl.wait import WaitTimeout, in_thread

_LOOK_SECONDS = 0.2  # between two looks for tenants that join or leave
_IDLE_SECONDS = 0.01  # between two looks for batches
_SETTINGS = (
    *("model", "max_steps", "async_level", "seed", "seq_len", "ckpt", "optim", "scheduler", "loss", "monitor"),
)


class FairQueue:
    """Whose micro-batch is next, by start-time fair queueing (Goyal, Vin and Cheng 1996).

    Tenants that always have something waiting are served in proportion to their weights; one that had nothing for a
    while is next, but is not owed the time that it left to others. A tenant with a limit is paced. Costs are in any
    unit, times in seconds of any clock.
    """

    def __init__(self, config: TenantsConfig) -> None:
        self._weights, self._limits = config.weights, config.limits
        self._virtual = 0.0  # start tag of what was served last
        self._start: dict[str, float] = {}  # tags of the tenants that wait
        self._finish: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def next(self, waiting: Collection[str], time_now: float) -> str | None:
        """Return whose turn it is; None if nobody may."""
        self._start = {name: start for name, start in self._start.items() if name in waiting}
        for name in waiting:
            self._start.setdefault(name, max(self._virtual, self._finish.get(name, 0.0)))
        allowed = [name for name in waiting if self._not_before.get(name, time_now) <= time_now]
        return min(allowed, key=lambda name: (self._start[name], name), default=None)

    def charge(self, name: str, cost: float) -> None:
        """A micro-batch of the tenant, which was `next`, is served."""
        self._virtual = start = self._start.pop(name)
        self._finish[name] = start + cost / self._weights.get(name, 1.0)

    def is_limited(self, name: str) -> bool:
        return self._limits.get(name, 1.0) < 1.0

    def pace(self, name: str, spent: float, time_now: float) -> None:
        """Have a tenant with a limit wait after `spent` seconds, so that they are no larger a share of all."""
        rested = max(self._not_before.get(name, 0.0), time_now - spent)
        self._not_before[name] = rested + spent / self._limits.get(name, 1.0)


class SlotPolicy(Policy):
    """The policy as one tenant sees it: the parameters in its slot, by the names of a policy that has one adapter."""

    lm: Any

    def __init__(self, policy: Policy, slot: int) -> None:
        nn.Module.__init__(self)
        self._shared = [policy]  # in a list, so that it is no submodule
        self.slot, self.lm = slot, nn.Module()
        self.units, self.sparse, self.frees_weights = policy.units, policy.sparse, policy.frees_weights
        for full_name, parameter in policy.lm.named_parameters():
            if (name := plain_name(full_name, slot)) == plain_name(full_name, -1):
                continue  # of the model, or in another slot
            module, (*path, last) = self.lm, name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, parameter)

    def forward(self, batch: MicroBatch, loss: TokenLoss | SequenceLoss | None = None) -> tuple[Tensor, Tensor]:
        """Compute as `Policy.forward`, with this slot's adapter."""
        (policy,) = self._shared
        policy.slots.assign({self.slot: len(batch.input_ids)}, batch.input_ids.device)
        return policy(batch, loss)


@dataclass
class TenantTraining:
    """A member, and the step that it is at. Times are of `time.perf_counter`."""

    name: str
    join: Join
    training: Training
    policy: SlotPolicy
    exit_stack: ExitStack
    waiting_since: float
    micro_batches: deque[MicroBatch] = field(default_factory=deque)  # of the step, still to be computed
    sums: Tensor | None = None  # of those that are computed
    begun: Moment | None = None  # when the device began the first of them
    queued: float = 0.0  # seconds until then, since the batch could be read
    cost: float = 0.0  # of all micro-batches since the last update, and of all tenants' until then
    total_before: float = 0.0


Part = tuple[TenantTraining, MicroBatch]


class SharedTrainer:
    """The tenants of a deployment, and the turns that they take."""

    def __init__(self, config: TrainerConfig, world: World, report: Report) -> None:
        assert config.tenants is not None
        self.config, self.world, self.report, self.slots = config, world, report, config.tenants.slots
        report.phase("loading the model")
        self.source = locate_model(config.model, world, random_weights=False)
        report.phase("building the model")
        recipe = recipe_of(config)
        self.policy = make_policy(config, recipe, self.source, world, self.slots)
        if self.policy.slots.grouped and config.lora is not None and config.lora.rank % GROUPED_RANKS:
            raise UserError(f"lora.rank: tenants on a GPU need a multiple of {GROUPED_RANKS}, not {config.lora.rank}")
        self.costs = perf.step_costs(self.policy.lm, self.source.config)
        self.queue, self.tenants, self.total = FairQueue(config.tenants), dict[str, TenantTraining](), 0.0
        self.leaving: dict[str, tuple[TenantTraining, Future[None]]] = {}  # until their slots are free
        if self.policy.compiled:
            report.phase("compiling")
            vocabulary = self.source.config.get_text_config().vocab_size
            warm_up(SlotPolicy(self.policy, 0), recipe.loss, config, world, vocabulary)
            self.policy.zero_grad(set_to_none=True)

    def run(self, stop: Callable[[], bool]) -> None:
        """Train whoever joins, until asked to stop."""
        looked = 0.0
        while not stop():  # bounded: until the process is stopped, as a server
            if time.monotonic() - looked > _LOOK_SECONDS:
                self._follow_joins()
                looked = time.monotonic()
            for tenant in [*self.tenants.values()]:
                self._guarded(tenant, self._advance)
            if not self._train(self._choose()):
                time.sleep(_IDLE_SECONDS)  # bounded: a moment
        for tenant in [*self.tenants.values()]:
            self._guarded(tenant, self._end)
        closed = [closed for _, closed in self.leaving.values()]
        wait_for_futures(closed, timeout=self.config.dist_timeout)
        self._free_slots()

    # ---- who is a member

    def _follow_joins(self) -> None:
        self._free_slots()
        joins = tenants.joins(self.config.output_dir)
        for tenant in [*self.tenants.values()]:
            join = joins.get(tenant.name)
            if join is None or (join != tenant.join and join.settings != tenant.join.settings):
                self._guarded(tenant, self._end)  # one that asks for something else joins anew
            elif join != tenant.join:
                tenant.join = join
        for name, join in joins.items():
            if name not in self.tenants and name not in self.leaving:
                self._admit(name, join)
        self.report.phase(f"training {', '.join(self.tenants)}" if self.tenants else "no tenants")
        self.report.status.progress()  # none of its own: it goes on with whatever comes

    def _admit(self, name: str, join: Join) -> None:
        directory = tenant_dir(self.config.output_dir, name)
        holders = [*self.tenants.values(), *(tenant for tenant, _ in self.leaving.values())]
        taken = {tenant.policy.slot for tenant in holders}
        free = [slot for slot in range(self.slots) if slot not in taken]
        exit_stack = ExitStack()
        try:
            (directory / "status").mkdir(exist_ok=True)  # for the answer
            if not free:
                raise UserError(f"all {self.slots} slots are taken, by {', '.join(self.tenants)}")
            config = tenant_config(self.config, directory, join.settings)
            check_and_commit(config, "trainer")
            before = read_status(directory).get("trainer")
            report = Report(config, "trainer", self.world, recover=True, tenant=name)
            exit_stack.push(report.end)
            training = Training(config, recipe_of(config), self.world, report, exit_stack)
            if training.choose(None if before is None else before.outcome):
                exit_stack.close()
                return self._leave(name, join)
            training.open_data(self.source)
            policy = SlotPolicy(self.policy, free[0])
            initialize(policy, self.world, config.seed)
            training.begin(policy, self.costs)
        except torch.AcceleratorError:
            exit_stack.close()
            raise
        except Exception as error:  # noqa: BLE001 - as in `_guarded`
            logger.warning("{} cannot join: {}", name, one_line(error))
            exit_stack.__exit__(type(error), error, None)
            status_path(directory, "trainer").unlink(missing_ok=True)  # of an earlier membership
            say_for(directory, "trainer", f"failed: {one_line(error)}")
            return self._leave(name, join)
        except BaseException:
            exit_stack.close()
            raise
        at = time.perf_counter()
        self.tenants[name] = TenantTraining(name, join, training, policy, exit_stack, at, total_before=self.total)

    def _leave(self, name: str, join: Join) -> None:
        """End a membership, unless it was asked for anew meanwhile."""
        if tenants.joins(self.config.output_dir).get(name) == join:
            tenants.leave(tenant_dir(self.config.output_dir, name))

    def _end(self, tenant: TenantTraining) -> None:
        """Save what a tenant has and free its slot."""
        tenant.training.commit_last()
        self._dismiss(tenant)

    def _dismiss(self, tenant: TenantTraining, error: Exception | None = None) -> None:
        """Save the state, unless an `error` ends the membership, and close everything; in a thread, where a disk that
        hangs keeps nobody else waiting."""
        del self.tenants[tenant.name]

        def close() -> None:
            try:
                with tenant.exit_stack:
                    if error is not None:
                        raise error
                    tenant.training.finish()
            except Exception as failure:  # noqa: BLE001 - as in `_guarded`
                if failure is not error:
                    logger.error("{}: {}", tenant.name, one_line(failure))

        self.leaving[tenant.name] = tenant, in_thread(close, f"end of {tenant.name}")

    def _free_slots(self) -> None:
        """Take back the slots of tenants whose end has come."""
        for name, (tenant, closed) in [*self.leaving.items()]:
            if closed.done():
                del self.leaving[name]
                with torch.no_grad():
                    for parameter in tenant.policy.parameters():
                        parameter.zero_()
                        parameter.grad = None
                self._leave(name, tenant.join)

    def _guarded(self, tenant: TenantTraining, action: Callable[[TenantTraining], None]) -> None:
        """Do something for a tenant; whatever its files or settings make that raise ends its membership alone."""
        try:
            action(tenant)
        except torch.AcceleratorError:  # the device is lost, for all
            raise
        except Exception as error:  # noqa: BLE001 - see above
            expected = isinstance(error, UserError | CommitError | OSError)
            logger.opt(exception=None if expected else error).error("{} ends: {}", tenant.name, one_line(error))
            self._dismiss(tenant, error if isinstance(error, UserError) else UserError(one_line(error)))

    # ---- steps

    def _advance(self, tenant: TenantTraining) -> None:
        """Update a tenant whose step is computed, and begin the next one if its batch has come. Waits for nothing: a
        tenant whose last version or checkpoint is still written waits itself."""
        training = tenant.training
        idle = training.versions.idle and training.checkpoints.idle
        if tenant.micro_batches or (not idle and (tenant.sums is not None or training.done)):
            return
        if tenant.sums is not None:
            assert tenant.begun is not None
            share = tenant.cost / max(self.total - tenant.total_before, tenant.cost)
            training.update(tenant.sums, tenant.begun, {"tenant/trainer_share": share, "tenant/queued": tenant.queued})
            tenant.sums, tenant.begun, tenant.cost, tenant.total_before = None, None, 0.0, self.total
            tenant.waiting_since = time.perf_counter()
            self.report.status.progress()
            return
        if idle:
            training.versions.settle()
        training.checkpoints.poll(training.step)
        if training.done:
            return self._end(tenant)
        training.report.status.step(training.step)
        waited, timeout = time.perf_counter() - tenant.waiting_since, self.config.rollout_timeout
        if not training.data.prepared(training.step):
            training.rows.flush()
            subject = subject_of(step_dir(training.config.output_dir / "rollouts", training.step))
            training.report.status.waiting(subject, "orchestrator", timeout)
            if waited > timeout:
                raise WaitTimeout(subject, "orchestrator", timeout)
            return
        training.waited = waited
        tenant.micro_batches.extend(training.read().batches)
        training.report.phase("queued for the trainer")
        tenant.queued, tenant.waiting_since = 0.0, time.perf_counter()

    def _choose(self) -> list[Part]:
        """Take the micro-batches that are computed next: on a GPU as many as there is room for, else one."""
        multiple_of, parts = pads_to(self.world.device), list[Part]()
        room = -(-self.config.seq_len // multiple_of) * multiple_of
        while True:  # bounded: by the room
            fitting = {
                name: tenant
                for name, tenant in self.tenants.items()
                if tenant.micro_batches and len(tenant.micro_batches[0].input_ids) <= room
            }
            name = self.queue.next(fitting, time.monotonic())
            if name is None or (parts and not self.policy.slots.grouped):
                break
            tenant = fitting[name]
            batch = tenant.micro_batches.popleft()
            cost = float(self.costs.of((batch.boundaries[1:] - batch.boundaries[:-1]).astype("int64")).sum())
            self.queue.charge(name, cost)
            tenant.cost, self.total, room = tenant.cost + cost, self.total + cost, room - len(batch.input_ids)
            parts.append((tenant, batch))
        return sorted(parts, key=lambda part: part[0].policy.slot)

    def _train(self, parts: Sequence[Part]) -> bool:
        """Compute the gradients of micro-batches, and add up their metrics. Returns whether there were any."""
        if not parts:
            return False
        begun, at = now(self.world.device), time.perf_counter()
        for (tenant, _), sums in zip(parts, self._gradients(parts), strict=True):
            if tenant.begun is None:
                tenant.begun, tenant.queued = begun, at - tenant.waiting_since
                tenant.training.report.phase("training")
            tenant.training.report.status.progress()
            tenant.sums = sums if tenant.sums is None else merge_sums([tenant.sums, sums])
        sizes = {tenant.name: len(batch.input_ids) for tenant, batch in parts if self.queue.is_limited(tenant.name)}
        if sizes:  # the host waits for the device here
            spent = seconds(begun, now(self.world.device)) / sum(len(batch.input_ids) for _, batch in parts)
            for name, size in sizes.items():
                self.queue.pace(name, spent * size, time.monotonic())
        return True

    def _gradients(self, parts: Sequence[Part]) -> list[Tensor]:
        """Add the gradients of micro-batches to those of their tenants' adapters; return the metric sums of each."""
        policy, device = self.policy, self.world.device
        for unit in policy.units:
            unit.set_reshard_after_backward(True, recurse=False)  # an update may come before the next ones
        batches = [(to_device(batch, device), tenant.training.recipe.loss) for tenant, batch in parts]
        if not policy.slots.grouped:
            outcomes = []
            for (tenant, _), own in zip(parts, batches, strict=True):
                loss, sums = tenant.policy(*own)
                loss.backward()
                outcomes.append(sums)
        else:
            rows = dict.fromkeys((tenant.policy.slot for tenant, _ in parts), 0)
            for tenant, batch in parts:
                rows[tenant.policy.slot] += len(batch.input_ids)
            policy.slots.assign(rows, device)
            losses, sums_of = zip(*policy.forward_parts(batches), strict=True)
            torch.stack(losses).sum().backward()
            outcomes = [*sums_of]
        counts = [block.experts.count_F for block in policy.sparse]  # of all that were computed together
        return [torch.cat([*counts, sums]) for sums in outcomes] if counts else outcomes


def tenant_config(config: TrainerConfig, directory: Path, settings: dict[str, Any]) -> TrainerConfig:
    """Return the settings that a tenant is trained with: its own where it may have any, else the deployment's.

    Nothing in them leads out of its directory, or runs code of its own. Raises UserError if they contradict each other.
    """
    own = {key: value for key, value in settings.items() if key in _SETTINGS}
    values = config.model_dump() | {"tenants": None, "output_dir": directory, "recover": True}
    values["recovery_interval"] = config.recovery_interval or "auto"
    values["weights"]["port"] = 0  # each has a publisher of its own
    if config.weights.transport == "auto" and not config.weights.shares_gpu:
        values["weights"]["transport"] = (
            "filesystem"  # several NCCL transfers between two GPUs might wait for each other
        )
    if (name := own.pop("model", {}).get("name", config.model.name)) != config.model.name:
        raise UserError(f"the trainer's model is {config.model.name}, not {name}: give the same model.name")
    if own.get("seq_len", 0) > config.seq_len:
        raise UserError(f"seq_len {own['seq_len']} exceeds the trainer's, {config.seq_len}")
    if own.get("ckpt"):
        own["ckpt"] |= {"output_dir": None, "resume_step": None}
    if wandb := own.get("monitor", {}).get("wandb"):
        wandb.pop("dir", None)
    if own.get("loss", {}).get("type") == "custom":
        raise UserError("tenant.loss.type is custom: a trainer that others share runs no code of a tenant's own")
    try:
        return TrainerConfig.model_validate(values | own)
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in error.errors()]
        raise UserError(f"the trainer cannot take these settings: {'; '.join(reasons)}") from error


def run(config: TrainerConfig) -> None:
    """Train for all tenants until a signal asks to stop. Raises UserError if the model cannot be trained."""
    stop = stop_signal()
    world = init_world(config.device, config.dist_timeout, config.model.dp_replicate)
    if world.size > 1:
        raise UserError(f"tenants share a trainer of one process, and this one has {world.size}")
    with ExitStack() as exit_stack:
        report = Report(config, "trainer", world, recover=config.recover)
        exit_stack.push(report.end)
        report.open()
        shared = SharedTrainer(config, world, report)
        exit_stack.enter_context(watched(shared.policy.memory))
        report.status.ready()
        report.text(f"ready on {world.device.type}, with {shared.slots} slots for tenants")
        shared.run(stop)
        report.close("stopped", "every tenant's state is saved")
    close_world()
