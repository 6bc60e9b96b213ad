"""One trainer for many tenants: a frozen model, and for each tenant an adapter in a slot of its own.

Each tenant is a `Training` in its own run directory, with its own optimizer, schedule, loss, steps and checkpoints.
Tenants share the base model and compute time. Their batches are packed as if each were alone, and micro-batches are
scheduled fairly: on a GPU those of several tenants run together, within `seq_len` tokens; on a CPU one at a time. A
tenant is updated as soon as its own batch is complete. A failure ends the membership of the tenant that caused it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
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
from prime_rl.trainer.rl.train import make_recipe
from prime_rl.trainer.source import locate_model
from prime_rl.trainer.training_loop import Training, make_policy, warm_up
from prime_rl.transport import tenants
from prime_rl.transport.commit import step_dir, subject_of
from prime_rl.transport.settings import check_and_commit
from prime_rl.transport.tenants import Join, tenant_dir
from prime_rl.wait import in_thread

_LOOK_SECONDS = 0.2  # between two looks for tenants that join or leave
_IDLE_SECONDS = 0.01  # between two looks for batches
_ROW_SECONDS = 1.0  # from an update, or its next batch, until a row that something waits for is written at the latest


class FairQueue:
    """Choose the next tenant by start-time fair queueing (Goyal, Vin and Cheng 1996).

    Tenants that always have work get compute in proportion to their weights. One that was idle is next, but is not
    compensated for the time that others used. A tenant with a limit is delayed. Costs are in any unit, times in seconds
    of any clock.
    """

    def __init__(self, config: TenantsConfig) -> None:
        self._weights, self._limits = config.weights, config.limits
        self._virtual = 0.0  # start tag of what was served last
        self._start: dict[str, float] = {}  # tags of the tenants that wait
        self._finish: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def next(self, waiting: Collection[str], time_now: float, among: Collection[str] | None = None) -> str | None:
        """Return the next of the tenants with work, and of those `among` them if given; None if there is none that is
        not delayed."""
        self._start = {name: start for name, start in self._start.items() if name in waiting}
        for name in waiting:
            self._start.setdefault(name, max(self._virtual, self._finish.get(name, 0.0)))
        allowed = [
            name for name in (waiting if among is None else among) if self._not_before.get(name, time_now) <= time_now
        ]
        return min(allowed, key=lambda name: (self._start[name], name), default=None)

    def charge(self, name: str, cost: float) -> None:
        """Charge `cost` to the tenant that `next` returned."""
        start = self._start.pop(name)
        self._virtual = max(self._virtual, start)
        self._finish[name] = start + cost / self._weights.get(name, 1.0)

    def is_limited(self, name: str) -> bool:
        return self._limits.get(name, 1.0) < 1.0

    def pace(self, name: str, spent: float, time_now: float) -> None:
        """Delay a tenant after `spent` seconds of compute, so that its share of all time stays within its limit."""
        earliest = max(self._not_before.get(name, 0.0), time_now - spent)
        self._not_before[name] = earliest + spent / self._limits.get(name, 1.0)


class SlotPolicy(Policy):
    """The policy as one tenant sees it: the parameters in its slot, by the names of a policy that has one adapter."""

    lm: Any

    def __init__(self, policy: Policy, slot: int) -> None:
        nn.Module.__init__(self)  # not Policy's, which would take over the model's modules
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
    cost: float = 0.0  # of its own micro-batches since the last update
    total_before: float = 0.0  # cost of all tenants' micro-batches at that update
    leaves: bool = False  # it is to be saved and closed as soon as nothing of it is being written,
    give_up: float = 0.0  # or closed alone from this time on


TenantBatch = tuple[TenantTraining, MicroBatch]


class SharedTrainer:
    """Admit tenants, schedule their micro-batches, update their adapters.

    A membership ends by `_end`, where everything is saved, or by `_dismiss` with the error; both close the training in
    a thread. `_free_slots` takes the slot back afterwards and has the tenant leave.
    """

    def __init__(self, config: TrainerConfig, world: World, report: Report) -> None:
        assert config.tenants is not None
        self.config, self.world, self.report, self.slots = config, world, report, config.tenants.slots
        report.phase("loading the model")
        self.source = locate_model(config.model, world, random_weights=False)
        report.phase("building the model")
        recipe = make_recipe(config)
        self.policy = make_policy(config, recipe, self.source, world, self.slots)
        if self.policy.slots.grouped and config.lora is not None and config.lora.rank % GROUPED_RANKS:
            raise UserError(f"lora.rank: tenants on a GPU need a multiple of {GROUPED_RANKS}, not {config.lora.rank}")
        self.costs = perf.step_costs(self.policy.lm, self.source.config)
        self.queue, self.tenants, self.total = FairQueue(config.tenants), dict[str, TenantTraining](), 0.0
        self.leaving: dict[str, tuple[TenantTraining, Future[None]]] = {}  # until their slots are free
        self.unsaved = set[str]()  # of those that have left
        self.ended: dict[str, Join] = {}  # last request of each that was refused or has ended
        if self.policy.compiled:
            report.phase("compiling")
            warm_up(SlotPolicy(self.policy, 0), recipe.loss, config, world, self.source.vocabulary)
            self.policy.zero_grad(set_to_none=True)

    def run(self, stop: Callable[[], bool]) -> None:
        """Train all tenants that join, until asked to stop."""
        looked = 0.0
        while not stop():  # bounded: until the process is stopped, as a server
            if time.monotonic() - looked > _LOOK_SECONDS:
                self._follow_joins()
                looked = time.monotonic()
            for tenant in [*self.tenants.values()]:
                self._guarded([tenant], partial(self._advance, tenant))
            if parts := self._choose():
                self._guarded([tenant for tenant, _ in parts], partial(self._train, parts))
            else:
                time.sleep(_IDLE_SECONDS)  # bounded: a moment
        for tenant in self.tenants.values():
            self._let_go(tenant)
        while self.tenants:  # bounded: by `give_up`
            for tenant in [*self.tenants.values()]:
                self._guarded([tenant], partial(self._advance, tenant))
            time.sleep(_IDLE_SECONDS)  # bounded: a moment
        wait_for_futures([closed for _, closed in self.leaving.values()], timeout=self.config.dist_timeout)
        self._free_slots()
        if unsaved := self.unsaved | self.leaving.keys():
            raise UserError(f"not saved: {', '.join(sorted(unsaved))}")

    # ---- who is a member

    def _follow_joins(self) -> None:
        self._free_slots()
        try:
            joins = tenants.joins(self.config.output_dir)
            left = {name for name in self.tenants if not tenants.has_joined(self._directory(name))}
        except OSError as error:  # a file system that is away for a moment ends no membership
            logger.warning("tenants cannot be listed: {}", error)
            return
        for tenant in [*self.tenants.values()]:
            if tenant.leaves:  # a new request is answered after that
                continue
            join = joins.get(tenant.name, tenant.join)
            if tenant.name in left or join.settings != tenant.join.settings:
                self._let_go(tenant)  # with changed settings it is admitted again after that
            else:
                tenant.join = join
        for name, join in joins.items():
            if name not in self.tenants and name not in self.leaving and self.ended.get(name) != join:
                self._admit(name, join)
        self.report.phase(f"training {', '.join(self.tenants)}" if self.tenants else "no tenants")
        self.report.status.progress()  # an idle trainer is not stalled

    def _admit(self, name: str, join: Join) -> None:
        directory = self._directory(name)
        holders = [*self.tenants.values(), *(tenant for tenant, _ in self.leaving.values())]
        taken = {tenant.policy.slot for tenant in holders}
        free = [slot for slot in range(self.slots) if slot not in taken]
        exit_stack = ExitStack()
        try:
            (directory / "status").mkdir(exist_ok=True)  # for the answer
            entries = directory, *directory.glob("*"), *directory.glob("*/*")
            if links := [path for path in entries if path.is_symlink()]:
                raise UserError(f"{links[0]} is a link, which may lead to another tenant's files: remove it")
            if not free:
                raise UserError(f"all {self.slots} slots are taken, by {', '.join(self.tenants)}")
            config = tenant_config(self.config, directory, join.settings)
            check_and_commit(config, "trainer")
            before = read_status(directory).get("trainer")
            report = Report(config, "trainer", self.world, recover=True, tenant=name)
            exit_stack.push(report.end)
            training = Training(config, make_recipe(config), self.world, report, exit_stack)
            if training.choose(None if before is None else before.outcome):
                exit_stack.close()
                return self._leave(name, join)
            training.open_data(self.source)
            policy = SlotPolicy(self.policy, free[0])
            initialize(policy, self.world, config.seed)
            training.begin(policy, self.costs)
        except BaseException as error:
            if isinstance(error, torch.AcceleratorError) or not isinstance(error, Exception):
                exit_stack.close()
                raise
            logger.warning("{} cannot join: {}", name, one_line(error))
            exit_stack.__exit__(type(error), error, None)
            with suppress(OSError):
                status_path(directory, "trainer").unlink(missing_ok=True)  # of an earlier membership
            say_for(directory, "trainer", f"failed: {one_line(error)}")
            return self._leave(name, join)
        at = time.perf_counter()
        self.tenants[name] = TenantTraining(name, join, training, policy, exit_stack, at, total_before=self.total)

    def _leave(self, name: str, join: Join) -> None:
        """End a membership, unless it was asked for anew meanwhile."""
        self.ended[name] = join  # also where its file cannot be removed
        with suppress(OSError):
            if tenants.joins(self.config.output_dir).get(name) == join:
                tenants.leave(self._directory(name))

    def _directory(self, name: str) -> Path:
        return tenant_dir(self.config.output_dir, name)

    def _let_go(self, tenant: TenantTraining) -> None:
        """Have a tenant end as soon as nothing of it is being written. A step that is not complete is left out."""
        tenant.leaves, tenant.give_up = True, time.perf_counter() + self.config.dist_timeout
        tenant.micro_batches.clear()

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
                    self.unsaved.add(tenant.name)
                    logger.error("{} is not saved: {}", tenant.name, one_line(failure))
                    say_for(self._directory(tenant.name), "trainer", f"failed: {one_line(failure)}")

        self.leaving[tenant.name] = tenant, in_thread(close, f"end of {tenant.name}")

    def _free_slots(self) -> None:
        """Free the slots of tenants whose training is closed."""
        for name, (tenant, closed) in [*self.leaving.items()]:
            if closed.done():
                del self.leaving[name]
                with torch.no_grad():
                    for parameter in tenant.policy.parameters():
                        parameter.zero_()
                        parameter.grad = None
                self._leave(name, tenant.join)

    def _guarded(self, those: Sequence[TenantTraining], action: Callable[[], object]) -> None:
        """Do something for tenants; whatever their files or settings make that raise ends their memberships alone."""
        try:
            action()
        except torch.AcceleratorError:  # the device is lost, for all
            raise
        except Exception as error:  # noqa: BLE001 - see above
            expected = isinstance(error, UserError | OSError)
            for tenant in {tenant.name: tenant for tenant in those}.values():
                logger.opt(exception=None if expected else error).error("{} ends: {}", tenant.name, one_line(error))
                self._dismiss(tenant, error if isinstance(error, UserError) else UserError(one_line(error)))

    # ---- steps

    def _advance(self, tenant: TenantTraining) -> None:
        """Update a tenant whose step is computed, and begin the next one if its batch has come. Waits for nothing: a
        tenant whose last version or checkpoint is still written waits itself."""
        training = tenant.training
        idle = training.versions.idle and training.checkpoints.idle
        computed = tenant.sums is not None and not tenant.micro_batches
        if not idle and (computed or time.perf_counter() - tenant.waiting_since > _ROW_SECONDS):
            training.rows.flush()  # a checkpoint waits for the row of its step; the device is done with that by now
        if tenant.leaves:
            if not idle and time.perf_counter() > tenant.give_up:
                raise UserError(f"what was trained could not be written within {self.config.dist_timeout:.0f} s")
            return self._end(tenant) if idle else None
        if tenant.micro_batches or (computed and not idle):
            return None
        if tenant.sums is not None:
            assert tenant.begun is not None
            share = tenant.cost / max(self.total - tenant.total_before, tenant.cost)
            training.update(tenant.sums, tenant.begun, {"tenant/trainer_share": share, "tenant/queued": tenant.queued})
            tenant.sums, tenant.begun, tenant.cost, tenant.total_before = None, None, 0.0, self.total
            tenant.waiting_since = time.perf_counter()
            self.report.status.progress()
            return None
        if idle:
            training.versions.settle()
        training.checkpoints.poll(training.step)
        if training.done:
            return self._let_go(tenant)
        training.report.status.step(training.step)
        waited, timeout = time.perf_counter() - tenant.waiting_since, self.config.rollout_timeout
        if not training.data.prepared(training.step):
            training.rows.flush()
            subject = subject_of(step_dir(training.config.output_dir / "rollouts", training.step))
            training.report.status.waiting(subject, "orchestrator", timeout)
            if waited > timeout:
                training.report.text(f"no batch for {timeout:.0f} s: its slot is for others")
                self._let_go(tenant)
            return None
        perf.reset_peak_memory(self.world.device)
        training.waited = waited
        tenant.micro_batches.extend(training.read().batches)
        training.report.phase("queued for the trainer")
        tenant.queued, tenant.waiting_since = 0.0, time.perf_counter()
        return None

    def _choose(self) -> list[TenantBatch]:
        """Take the micro-batches that are computed next: on a GPU as many as there is room for, else one."""
        multiple_of, parts = pads_to(self.world.device), list[TenantBatch]()
        room = -(-self.config.seq_len // multiple_of) * multiple_of
        while not parts or self.policy.slots.grouped:  # bounded: by the room
            waiting = {name: tenant.micro_batches[0] for name, tenant in self.tenants.items() if tenant.micro_batches}
            fitting = [name for name, batch in waiting.items() if len(batch.input_ids) <= room]
            name = self.queue.next(waiting, time.monotonic(), fitting)
            if name is None:
                break
            tenant = self.tenants[name]
            batch = tenant.micro_batches.popleft()
            cost = float(self.costs.of((batch.boundaries[1:] - batch.boundaries[:-1]).astype("int64")).sum())
            self.queue.charge(name, cost)
            tenant.cost, self.total, room = tenant.cost + cost, self.total + cost, room - len(batch.input_ids)
            parts.append((tenant, batch))
        return sorted(parts, key=lambda part: part[0].policy.slot)

    def _train(self, parts: Sequence[TenantBatch]) -> None:
        """Compute the gradients of micro-batches, and add up their metrics."""
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

    def _gradients(self, parts: Sequence[TenantBatch]) -> list[Tensor]:
        """Add the gradients of micro-batches to those of their tenants' adapters; return the metric sums of each."""
        policy, device = self.policy, self.world.device
        for unit in policy.units:
            # Gathered copies must not outlive an update, which may come before the next micro-batches.
            unit.set_reshard_after_backward(True, recurse=False)
        trainings = [(tenant.training, batch) for tenant, batch in parts]
        batches = [(to_device(batch, device, own.batch.sampled), own.recipe.loss) for own, batch in trainings]
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
    own = {key: value for key, value in settings.items() if key in tenants.SETTINGS}
    values = config.model_dump() | {"tenants": None, "output_dir": directory, "recover": True}
    values["recovery_interval"] = config.recovery_interval or "auto"
    values["weights"]["port"] = 0  # each has a publisher of its own
    if config.weights.transport == "auto" and not config.weights.shares_gpu:
        # Several NCCL transfers between two GPUs might wait for each other.
        values["weights"]["transport"] = "filesystem"
    if (name := own.pop("model", {}).get("name", config.model.name)) != config.model.name:
        raise UserError(f"the trainer's model is {config.model.name}, not {name}: give the same model.name")
    if own.get("seq_len", 0) > config.seq_len:
        raise UserError(f"seq_len {own['seq_len']} exceeds the trainer's, {config.seq_len}")
    if own.get("ckpt"):
        own["ckpt"] |= {"output_dir": None, "resume_step": None, "save_async": True}
    wandb = own.get("monitor", {}).get("wandb")  # other trackers write files, or open ports
    own["monitor"] = {"wandb": wandb and {key: value for key, value in wandb.items() if key != "dir"}}
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
