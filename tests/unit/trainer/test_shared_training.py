"""Tenants in one trainer: each is trained as if it were alone, and nothing that happens to one reaches another."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from prime_rl.config.shared import TenantsConfig
from prime_rl.config.trainer import LoRAConfig, TrainerModel
from prime_rl.errors import UserError
from prime_rl.monitor import read_status
from prime_rl.trainer import model
from prime_rl.trainer.ckpt import Checkpoints
from prime_rl.trainer.lora import Slots, initialize
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.packing import collate
from prime_rl.trainer.parallel import close_world, init_world
from prime_rl.trainer.report import MetricRows, Report
from prime_rl.trainer.shared_training import FairQueue, SharedTrainer, SlotPolicy, tenant_config
from prime_rl.trainer.source import find_model
from prime_rl.transport import tenants
from prime_rl.transport.tenants import tenant_dir
from prime_rl.transport.token_stats import STATS, read_token_stats
from support import trainer as support

world, tied_model, run_training = support.world, support.tied_model, support.run_training
LORA: dict[str, Any] = {"rank": 8, "alpha": 16}
ALICE: dict[str, Any] = {"max_steps": 4, "seed": 2**62, "optim": {"type": "adamw", "lr": 1e-3}}
BOB: dict[str, Any] = {"max_steps": 3, "seed": 2, "seq_len": 64, "loss": {"type": "grpo"}, "async_level": 0}


class Deployment:
    """A shared trainer in this process."""

    def __init__(self, root: Path, model: Path, **settings: Any) -> None:
        self.root, self.world, self.turns = root, init_world("cpu", 60), 0
        every = {"lora": LORA, "tenants": {"slots": 2}, "weights": {"keep": None}, "optim": {"lr": 1e-3}}
        self.config = support.make_config(root, model, **every | settings)
        self.exit_stack = ExitStack()
        self.exit_stack.callback(close_world)
        self.start()

    def start(self) -> None:
        """Start the trainer, as after a kill if it runs."""
        report = Report(self.config, "trainer", self.world, recover=True)
        self.trainer = SharedTrainer(self.config, self.world, report)
        self.exit_stack.callback(report.status.close)

    def join(self, name: str, settings: dict[str, Any], samples: tuple[int, ...] = (6,)) -> Path:
        directory = tenant_dir(self.root, name)
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "rollouts").exists():
            support.write_rollouts(directory, settings["max_steps"], samples)
        tenants.ask_to_join(directory, settings)
        return directory

    def run(self, until: Callable[[], bool]) -> None:
        """Halt the trainer where it stands once `until` holds."""

        def stop() -> bool:
            self.turns += 1
            assert self.turns < 3_000, self.outcomes
            if until():
                raise KeyboardInterrupt
            return False

        with suppress(KeyboardInterrupt):
            self.trainer.run(stop)

    @property
    def outcomes(self) -> dict[str, str | None]:
        directories = [path for path in (self.root / "tenants").iterdir() if (path / "status").is_dir()]
        return {path.name: read_status(path)["trainer"].outcome for path in directories}

    def run_to_the_end(self) -> dict[str, str | None]:
        self.run(lambda: not tenants.joins(self.root))
        assert not self.trainer.unsaved
        return self.outcomes


@pytest.fixture
def deploy(tied_model, tmp_path):
    with ExitStack() as exit_stack:

        def make(**settings: Any) -> Deployment:
            deployment = Deployment(tmp_path / "shared", tied_model, **settings)
            exit_stack.callback(deployment.exit_stack.close)
            return deployment

        yield make


@pytest.fixture
def alone(run_training, tied_model, tmp_path):
    """Return what trains as a tenant is in a trainer of its own, on the same rollouts: the hashes of its versions."""

    def train(settings: dict[str, Any], samples: tuple[int, ...] = (6,)) -> dict[int, str]:
        output_dir = tmp_path / f"alone-{settings['seed']}"
        support.write_rollouts(output_dir, settings["max_steps"], samples)
        more = {"optim": {"lr": 1e-3}} | settings
        run_training(support.make_config(output_dir, tied_model, lora=LORA, weights={"keep": None}, **more))
        return support.hashes(output_dir)

    return train


def test_a_tenant_trains_as_if_alone(alone, deploy):
    """Contract: beside others, of other settings, every version of a tenant is that of its own trainer, bit for bit;
    also where the shared trainer is killed in between, or a member leaves, and each goes on from its own state."""
    want = [alone(ALICE, (6, 2)), alone(BOB)]
    one = deploy()
    directories = [one.join("alice", ALICE, (6, 2)), one.join("bob", BOB)]
    one.run(lambda: all(len(support.hashes(path)) > 1 for path in directories))
    one.start()  # as after a kill
    one.run(lambda: len(one.trainer.tenants) == 2)
    tenants.leave(directories[0])
    one.run(lambda: one.outcomes["alice"] == "stopped")
    one.join("alice", ALICE)
    assert one.run_to_the_end() == {"alice": "finished", "bob": "finished"}
    assert [support.hashes(path) for path in directories] == want
    assert len(want[0]) == 5
    assert not tenants.joins(one.root)
    row = support.metrics(directories[0])[-1]
    assert 0 < row["tenant/trainer_share"] <= 1
    assert row["tenant/queued"] >= 0


def stats_of(run: Path, step: int) -> np.ndarray:
    """Log ratio and entropy of every token of a step."""
    ids = [f"{step}-{number}" for number in range(6)]
    stats = read_token_stats(run, step, pa.array(ids))
    assert stats["sample_id"].to_pylist() == ids
    return np.array([stats[name].combine_chunks().flatten().to_numpy() for name in STATS])


def test_steps_that_are_computed_together(
    alone: Callable[..., dict[int, str]],
    deploy: Callable[..., Deployment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contract: grouped, as on GPUs, several micro-batches at a time give what each tenant gets alone, to rounding; a
    failure of what is computed together ends those memberships, and the next ones train. Each has its own tokens."""
    alone(ALICE), alone(BOB)
    group_slots(monkeypatch)
    one = deploy()
    parts, gradients = [], SharedTrainer._gradients

    def compute(trainer: SharedTrainer, batches: Any) -> Any:
        parts.append([tenant.name for tenant, _ in batches])
        if len(parts) == 1:
            raise RuntimeError("out of memory")
        return gradients(trainer, batches)

    monkeypatch.setattr(SharedTrainer, "_gradients", compute)
    directories = [one.join("alice", ALICE), one.join("bob", BOB)]
    one.run(lambda: bool(parts) and not one.trainer.leaving)
    assert one.outcomes[parts[0][0]] == "failed: out of memory"
    for name, settings in (("alice", ALICE), ("bob", BOB)):
        one.join(name, settings)
    assert one.run_to_the_end() == {"alice": "finished", "bob": "finished"}
    assert max(map(len, parts)) > 1
    for directory, settings in zip(directories, (ALICE, BOB), strict=True):
        for step in range(settings["max_steps"]):
            want, got = (stats_of(root, step) for root in (tmp_path / f"alone-{settings['seed']}", directory))
            np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-2)
        file = Path("weights", f"step_{settings['max_steps']}", "adapter_model.safetensors")
        want, got = (load_file(root / file) for root in (tmp_path / f"alone-{settings['seed']}", directory))
        for name, tensor in want.items():
            torch.testing.assert_close(got[name], tensor, atol=2e-5, rtol=1e-3, msg=name)


def test_rows_that_are_written_late(
    alone: Callable[..., dict[int, str]], deploy: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: where a row is written in the next step, as on GPUs, checkpoints that wait for it hold nobody up,
    neither a tenant that goes on nor one that leaves."""
    want = alone(ALICE)
    monkeypatch.setattr(MetricRows, "put", lambda rows, row: setattr(rows, "_row", row))
    one = deploy(recovery_interval=1)
    directory = one.join("alice", ALICE)
    one.run(lambda: len(support.hashes(directory)) > 2)
    tenants.leave(directory)
    one.run(lambda: one.outcomes["alice"] == "stopped")
    one.join("alice", ALICE)
    assert one.run_to_the_end() == {"alice": "finished"}
    assert support.hashes(directory) == want


def test_what_fails_for_one_reaches_no_other(alone, deploy):
    """Contract: NaN, a damaged batch, a failing disk or settings that cannot be end one membership, with the reason."""
    want = alone(BOB)
    one = deploy(tenants={"slots": 6})
    bob = one.join("bob", BOB)
    damaged, full = (one.join(name, ALICE) for name in ("damaged", "full"))
    one.join("nan", ALICE | {"optim": {"lr": 1e38}})
    one.join("odd", ALICE | {"ckpt": 5, "seed": 2**62})
    (one.join("thief", ALICE) / "weights").symlink_to(bob / "weights")
    one.join("wrong", ALICE | {"scheduler": {"type": "cosine", "warmup_steps": 9}})
    (damaged / "rollouts" / "step_1" / "samples.arrow").write_bytes(b"x")
    (full / "metrics").write_text("no directory")
    outcomes = one.run_to_the_end()
    assert outcomes.pop("bob") == "finished"
    assert support.hashes(bob) == want
    reasons = {
        "nan": "finite",
        "damaged": "samples.arrow",
        "full": "metrics",
        "wrong": "warmup",
        "odd": "",
        "thief": "is a link",
    }
    for name, reason in reasons.items():
        assert str(outcomes[name]).startswith("failed: "), name
        assert reason in str(outcomes[name]), name


def test_who_hangs_keeps_nobody_waiting(deploy: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: while the state of one that leaves cannot be written others train on; its slot is free after that."""
    one, event = deploy(), threading.Event()
    finish = Checkpoints.finish

    def hang(checkpoints: Checkpoints, *rest: Any) -> None:
        if checkpoints.output_dir.name == "alice":
            assert event.wait(60)
        finish(checkpoints, *rest)

    monkeypatch.setattr(Checkpoints, "finish", hang)
    one.join("alice", ALICE)
    bob = one.join("bob", BOB)
    one.run(lambda: len(one.trainer.tenants) == 2)
    tenants.leave(tenant_dir(one.root, "alice"))
    one.run(lambda: one.outcomes["bob"] == "finished")
    assert "alice" in one.trainer.leaving
    assert len(support.hashes(bob)) == 4
    event.set()
    one.run(lambda: not one.trainer.leaving)
    assert one.outcomes["alice"] == "stopped"


def test_slots_and_settings(deploy, tmp_path, tied_model):
    """Contract: more tenants than slots are refused by name; a slot is free when its tenant ends; nothing of a tenant's
    settings leads out of its directory or runs its code."""
    one = deploy(tenants={"slots": 1})
    waiting = one.join("alice", ALICE)
    for path in (waiting / "rollouts").glob("step_[123]"):
        path.rename(path.with_name(f"later_{path.name}"))
    one.run(lambda: len(support.hashes(waiting)) > 1)
    one.join("bob", BOB)
    one.run(lambda: one.outcomes.get("bob") is not None)
    assert one.outcomes["bob"] == "failed: all 1 slots are taken, by alice"
    for path in (waiting / "rollouts").glob("later_*"):
        path.rename(path.with_name(path.name.removeprefix("later_")))
    one.run(lambda: one.outcomes["alice"] == "finished")
    one.join("bob", BOB)
    assert one.run_to_the_end()["bob"] == "finished"

    away = {"ckpt": {"output_dir": "/tmp", "interval": 3}, "weights": {"host": "x"}, "output_dir": "/", "lora": None}
    mine = tenant_config(one.config, tmp_path, ALICE | away | {"monitor": {"wandb": {"dir": "/tmp"}, "prometheus": {}}})
    assert mine.ckpt is not None
    assert mine.monitor.wandb is not None
    assert mine.monitor.prometheus is None, "it would open a port of the trainer's host"
    assert (mine.ckpt.output_dir, mine.ckpt.interval, str(mine.monitor.wandb.dir)) == (None, 3, "logs")
    assert (mine.weights.host, mine.output_dir, mine.lora) == (None, tmp_path, LoRAConfig(**LORA))
    for wrong, message in (
        ({"loss": {"type": "custom", "path": "os:getcwd"}}, "runs no code"),
        ({"model": {"name": "other"}}, "the trainer's model is"),
        ({"seq_len": 129}, "seq_len 129 exceeds the trainer's, 128"),
    ):
        with pytest.raises(UserError, match=message):
            tenant_config(one.config, tmp_path, ALICE | wrong)


def group_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build policies as on GPUs, where micro-batches of several tenants are computed together."""
    monkeypatch.setattr(model.adapters, "Slots", lambda count, grouped: Slots(count, grouped=True))


@pytest.mark.parametrize(("broken", "reshard"), [(False, None), (True, None), (False, True)])
def test_micro_batches_that_are_computed_together(world, tied_model, monkeypatch, broken, reshard):
    """Contract: grouped, as on GPUs, they give a tenant the gradients that it has alone, whatever the others hold, and
    nothing to those that have none among them."""
    batches = [collate(support.random_documents(lengths), 1) for lengths in ((20, 30), (7, 11, 40))]

    def build() -> tuple[model.Policy, list[SlotPolicy]]:
        settings = TrainerModel(reshard_after_forward=reshard)
        policy = model.build_policy(find_model(str(tied_model)), settings, world, lora=LoRAConfig(**LORA), slots=3)
        torch.manual_seed(0)
        views = [SlotPolicy(policy, slot) for slot in (0, 2)]
        for view in views:
            initialize(view, world, 5 + view.slot)
            for name, parameter in view.lm.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(parameter.to_local(), std=0.1)
        return policy, views

    _, views = build()
    want, losses = [], []
    for view, batch in zip(views, batches, strict=True):
        loss, _ = view(batch, cross_entropy)
        loss.backward()
        losses.append(loss.item())
        want.append({name: p.grad.full_tensor() for name, p in view.lm.named_parameters()})
    group_slots(monkeypatch)
    policy, views = build()
    if broken:
        next(view for view in views[1].parameters()).data.fill_(torch.nan)
    for repeated in (1, 2):
        policy.slots.assign({0: 50, 2: 58}, world.device)
        outcomes = policy.forward_parts([(batch, cross_entropy) for batch in batches])
        assert outcomes[0][0].item() == pytest.approx(losses[0], rel=1e-6)
        torch.stack([loss for loss, _ in outcomes]).sum().backward()
        for view, gradients in list(zip(views, want, strict=True))[: 1 if broken else 2]:
            for name, parameter in view.lm.named_parameters():
                got = parameter.grad.full_tensor() / repeated
                torch.testing.assert_close(got, gradients[name], atol=1e-6, rtol=1e-5, msg=name)
    assert all(reshard or p.grad is None for p in SlotPolicy(policy, 1).lm.parameters())


@given(costs=st.lists(st.floats(0.1, 10), min_size=30, max_size=60), heavy=st.sampled_from([1.0, 2.0, 4.0]))
def test_turns_are_fair(costs, heavy):
    """Contract: who always waits gets time in proportion to its weight, to within a micro-batch each; who comes back is
    next, and is owed nothing; who has a limit waits."""
    queue, spent = FairQueue(TenantsConfig(weights={"a": heavy})), {"a": 0.0, "b": 0.0}
    for cost in costs:
        name = queue.next(["a", "b"], 0.0)
        assert name is not None
        queue.charge(name, cost)
        spent[name] += cost
        assert abs(spent["a"] / heavy - spent["b"]) <= max(costs) * (1 + 1 / heavy)
    turns = []
    for cost in costs[:4]:
        turns.append(queue.next(["a", "b", "c"], 0.0))
        queue.charge(turns[-1], cost)
    assert "c" in turns[:3]
    assert queue.next(["a", "b"], 0.0, ["b"]) == "b", "whose micro-batch fits"

    paced = FairQueue(TenantsConfig(limits={"a": 0.25}))
    assert paced.next(["a"], 10.0) == "a"
    paced.charge("a", 1.0)
    paced.pace("a", 2.0, 12.0)
    assert paced.next(["a"], 17.9) is None
    assert paced.next(["a", "b"], 17.9) == "b"
    assert paced.next(["a"], 18.0) == "a"
