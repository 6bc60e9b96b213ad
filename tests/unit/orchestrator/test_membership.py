"""How an orchestrator becomes a tenant: what is refused before anything starts, what is asked, what is answered."""

import asyncio
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from prime_rl.config import OrchestratorConfig, TrainerConfig, parse
from prime_rl.errors import UserError
from prime_rl.monitor import Status
from prime_rl.monitor.status import new_status, status_path, write_record
from prime_rl.orchestrator import membership
from prime_rl.transport import tenants
from prime_rl.transport.settings import check_and_commit
from support import partners
from support.scripted import fresh, has_batch, until

partner = partners.partner
KEY = "VLLM_API_KEY"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "")


def tenant(deployment: Path, name: str, *words: str) -> OrchestratorConfig:
    join = ["--environment.id", "x", "--tenant.join", str(deployment), "--tenant.name", name, "--max-steps", "3"]
    return parse(OrchestratorConfig, [*join, *words], {})


@pytest.fixture
def deployment(tmp_path: Path, partner: int) -> Path:
    """The run directory of a trainer with two slots, which lives."""
    words = ["--output-dir", str(tmp_path), "--lora.rank", "4", "--tenants.slots", "2"]
    check_and_commit(parse(TrainerConfig, words, {}), "trainer")
    partners.belongs_to(tmp_path, "trainer", partner)
    return tmp_path


def answer(directory: Path, outcome: str | None = None, **fields: object) -> None:
    status_path(directory, "trainer").parent.mkdir(parents=True, exist_ok=True)
    write_record(status_path(directory, "trainer"), replace(new_status("trainer"), outcome=outcome, **fields))


def fill(deployment: Path, *names: str) -> None:
    for name in names:
        directory = tenants.tenant_dir(deployment, name)
        tenants.claim_name(directory, f"key of {name}")
        tenants.ask_to_join(directory, {})


@pytest.mark.parametrize(
    ("words", "taken", "key", "message"),
    [
        ((), (), "", None),
        ((), ("bob", "alice"), "key of alice", None),  # it is a member already
        (("--model.name", "m"), (), "", "model.name is m here, but Qwen/Qwen3-0.6B in the trainer that it runs with"),
        (("--seq-len", "4096"), (), "", "seq_len is 4096 in the orchestrator, but 2048 in the trainer: samples would"),
        ((), ("bob", "carol"), "", "has 2 slots, taken by bob, carol: wait for one of them to end, or raise"),
        ((), ("alice",), "mine", "the tenant name alice is taken, by another key: choose another tenant.name"),
        ((), ("bob",), "key of bob", rf"the key in \${KEY} is that of the tenant bob: unset it, or give each its own"),
    ],
)
def test_what_cannot_be_is_one_line(
    deployment: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], taken: tuple[str, ...], key: str, message
) -> None:
    fill(deployment, *taken)
    monkeypatch.setenv(KEY, key)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        membership.prepare(tenant(deployment, "alice", *words))
    if message is None:  # a key of its own is kept, and workers and clients get it
        assert os.environ[KEY] == (key or (tenants.tenant_dir(deployment, "alice") / "key").read_text())
        assert tenants.owner(os.environ[KEY], tenants.key_hashes(deployment)) == "alice"


@pytest.mark.parametrize(
    ("words", "urls"),
    [((), ["http://a:9000/v1", "http://a:9001/v1"]), (("--client.base-url", "http://b:1"), ["http://b:1"])],
)
def test_a_tenant_finds_the_servers(deployment: Path, words: tuple[str, ...], urls: list[str]) -> None:
    """Where `rl tenants` says that they are, unless it names some."""
    tenants.publish_servers(deployment, ["http://a:9000/v1", "http://a:9001/v1"])
    assert membership.prepare(tenant(deployment, "alice", *words)).client.base_urls == urls


def test_starting_over_ends_the_membership(deployment: Path) -> None:
    """A second orchestrator of a name is refused, with `--clean`, too; of one that was killed the slot is given up."""
    directory = tenants.tenant_dir(deployment, "alice")
    config = tenant(deployment, "alice", "--clean")
    membership.prepare(config)
    tenants.ask_to_join(directory, {})
    answer(directory, "stopped")
    membership.prepare(config)
    assert tenants.joins(deployment) == {}
    check_and_commit(config, "orchestrator")
    tenants.ask_to_join(directory, {})
    trainer = json.loads((deployment / "settings/trainer.json").read_text())["status"]
    partners.belongs_to(directory, "orchestrator", trainer["pid"])
    membership.prepare(config)
    assert list(tenants.joins(deployment)) == ["alice"]
    with pytest.raises(UserError, match="another orchestrator .* is running in .*alice: .*another --tenant.name"):
        check_and_commit(tenant(deployment, "alice"), "orchestrator")


def test_without_a_trainer_of_tenants(tmp_path: Path) -> None:
    config = tenant(tmp_path, "alice")
    config.client.ready_timeout = 0.1
    with pytest.raises(UserError, match=f"trainer with tenants .*`rl tenants` in {tmp_path}"):
        membership.prepare(config)


def test_an_ordinary_orchestrator_is_no_tenant(deployment: Path) -> None:
    config = parse(OrchestratorConfig, ["--environment.id", "x", "--output-dir", str(deployment)], {})
    with pytest.raises(UserError, match=f"trains tenants: --tenant.join {deployment} --tenant.name NAME joins it"):
        check_and_commit(config, "orchestrator")


def test_the_trainer_gets_what_it_trains_with(tmp_path: Path) -> None:
    """Contract: by TrainerConfig's keys, as JSON; the trainer's W&B run has a name of its own, as in `rl`."""
    words = ["--tenant.optim.lr", "1e-3", "--tenant.scheduler.type", "linear", "--tenant.scheduler.decay-steps", "2"]
    words += [
        "--tenant.scheduler.warmup-steps",
        "1",
        "--ckpt.interval",
        "7",
        "--monitor.wandb.name",
        "a",
        "--seed",
        "5",
    ]
    config = tenant(tmp_path, "alice", *words, "--tenant.loss.type", "grpo")
    trained = TrainerConfig.model_validate(json.loads(json.dumps(membership.trainer_settings(config))))
    assert (trained.optim.lr, trained.scheduler.type, trained.loss.type) == (1e-3, "linear", "grpo")
    assert (trained.max_steps, trained.seed, trained.seq_len, trained.model.name) == (3, 5, 2048, config.model.name)
    assert trained.ckpt is not None
    assert trained.ckpt.interval == 7
    assert trained.monitor.wandb is not None
    assert trained.monitor.wandb.name == "a-trainer"


@pytest.mark.parametrize(
    ("before", "outcome", "message"),
    [
        (None, None, None),
        ("stopped", None, None),
        ("failed: it was full", None, None),  # an earlier answer
        (None, "failed: no room for 3 adapters", "^no room for 3 adapters$"),
    ],
)
async def test_the_trainer_answers(tmp_path: Path, before: str | None, outcome: str | None, message: str | None):
    config = tenant(tmp_path, "alice")
    status, directory = Status(config.output_dir, "orchestrator"), config.output_dir
    answer(directory, before, heartbeat=1.0)  # of the trainer before: also without a last word
    joining = asyncio.create_task(membership.join(config, status))
    await asyncio.sleep(0.3)
    assert not joining.done()
    assert list(tenants.joins(tmp_path)) == ["alice"]
    answer(directory, outcome)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        await joining
    status.close()


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (None, None),
        ("stopped", "of alice: it was stopped; what is trained is saved"),
        ("failed: the loss is not finite", "of alice: the loss is not finite"),
    ],
)
async def test_a_run_leaves_or_is_sent_away(tmp_path: Path, outcome: str | None, message: str | None) -> None:
    """Contract: a tenant that is asked to stop leaves, and ends once the trainer says so; one that the trainer trains
    no longer ends with the trainer's reason, while it waits for weights; another trainer's last word ends nothing."""
    directory = tenants.tenant_dir(tmp_path, "alice")
    answer(directory)
    world = fresh(directory, tenant={"join": tmp_path, "name": "alice"})
    tenants.ask_to_join(directory, {})
    orchestrator = world.orchestrator()
    run = asyncio.create_task(orchestrator.run())
    await until(has_batch(world, 0), run=run)
    answer(directory, "stopped")  # of a deployment that starts again: it has not left
    membership.check(directory)
    if message is None:
        orchestrator.stop()
        assert tenants.joins(tmp_path) == {}
    else:
        answer(directory, outcome)
        tenants.leave(directory)  # the trainer does
    with pytest.raises(UserError, match=message) if message else nullcontext():
        await asyncio.wait_for(run, 60)
