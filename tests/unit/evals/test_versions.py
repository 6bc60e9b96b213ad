"""Which versions are evaluated: those that are asked for, each exactly one, and with a reason for each that is not."""

import asyncio
import shutil

import pytest

from prime_rl.config import ConfigError, EvalConfig, OrchestratorConfig, SFTConfig, parse, write_toml
from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from prime_rl.evals.versions import EvalVersions, with_environments
from prime_rl.monitor import Status
from prime_rl.transport.commit import TMPFS_PREFIX
from prime_rl.transport.incarnations import EVAL, read_lease
from support.evaluating import World

PUBLISHER = {"host": "h", "port": 1, "token": "t", "timeout": 1.0}


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def names(found):
    return [target for _, target in found]


def commit(world, *versions, incarnation=0):
    for version in versions:
        world.trainer.commit(version, incarnation)


async def test_all_or_the_named_with_or_without_the_base(world):
    commit(world, 0, 5, 10, 15)
    for settings, expected in (
        ({}, ["step_0", "step_5", "step_10", "step_15"]),
        ({"eval_base": False}, ["step_5", "step_10", "step_15"]),
        ({"steps": [15, 5]}, ["step_0", "step_5", "step_15"]),
        ({"steps": [0, 5], "eval_base": False}, ["step_0", "step_5"]),
        ({"interval": 10}, ["step_0", "step_10"]),
    ):
        config = {"weights_dir": world.weights, "output_dir": world.directory / str(settings), **settings}
        assert names(await world.run(**config)) == expected


def test_a_version_that_is_not_there_is_an_error_that_lists_what_is(world):
    commit(world, 0, 10, 20)
    with pytest.raises(UserError, match=r"there is no version 15, 30 in .*weights \(there: 0, 10, 20\)"):
        EvalVersions(world.config(weights_dir=world.weights, steps=[10, 15, 30])).check()
    (world.directory / "empty").mkdir()
    with pytest.raises(UserError, match=r"no version to evaluate in .*empty \(there: none; --follow waits"):
        EvalVersions(world.config(weights_dir=world.directory / "empty")).check()
    with pytest.raises(UserError, match="nowhere is not there"):
        EvalVersions(world.config(weights_dir=world.directory / "nowhere")).check()
    with pytest.raises(UserError, match=r"is a run: its versions are in .*weights"):
        EvalVersions(world.config(weights_dir=world.weights.parent)).check()
    EvalVersions(world.config(weights_dir=world.weights, steps=[20])).check()
    EvalVersions(world.config(weights_dir=world.directory / "nowhere", follow=True)).check()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--steps", "1"], "steps"),
        (["--follow"], "follow"),
        (["--no-eval-base"], "eval_base"),
        (["--interval", "2"], "interval"),
        (["--weights-dir", "w", "--steps", "1", "--follow"], "steps names the versions and follow chooses them"),
        (["--weights-dir", "w", "--steps", "-1"], "-1"),
        (["--weights-dir", "w", "--client.type", "chat"], "takes no weights"),
        (["--client.type", "chat", "--client.base-url", "http://a", "http://b"], "one address"),
    ],
)
def test_contradictions_are_one_line_that_names_the_key(given, named):
    with pytest.raises(ConfigError, match=named):
        parse(EvalConfig, ["--environment-ids", "a,b", *given], {})


ENV = {"id": "reverse-text", "args": {"num_tasks": 5}}
ORCH = {"environments": [ENV]}


@pytest.mark.parametrize(
    ("configs", "wanted", "source"),
    [
        ({"orchestrator": ORCH}, [ENV], "orchestrator"),
        ({"orchestrator": ORCH | {"eval": {}}}, [{**ENV, "args": {"num_tasks": 5, "split": "eval"}}], "orchestrator"),
        ({"orchestrator": ORCH | {"eval": {"environments": [{"id": "wordle"}]}}}, [{"id": "wordle", "args": {}}], "orchestrator"),
        ({"sft": {"eval": {"environments": [ENV]}}}, [ENV], "sft"),
        ({"orchestrator": ORCH, "sft": {}}, [ENV], "orchestrator"),
    ],
)  # fmt: skip
def test_environments_of_the_run_that_made_the_versions(tmp_path, heard, configs, wanted, source):
    """Contract: without --environment-ids those that the run was evaluated on, else those that it was trained on, as its own resolved config says."""
    for name, table in configs.items():
        cls = {"orchestrator": OrchestratorConfig, "sft": SFTConfig}[name]
        write_toml(cls.model_validate(table), tmp_path / "configs" / f"{name}.toml")
    config = with_environments(EvalConfig(weights_dir=tmp_path / "weights", sampling={"max_tokens": 7}))
    assert [{"id": env.id, "args": env.args} for env in config.environments] == wanted
    assert config.sampling.max_tokens == 7
    assert f"{source}.toml: " in heard.messages[-1]


@pytest.mark.parametrize("content", [None, "", "[environment]\nid = 'x'\nno_such_key = 1"])
def test_without_environments_an_error_lists_what_is_installed(tmp_path, content):
    """Contract: one line, where there is no run, one without evaluation, or one of another release."""
    if content is not None:
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs" / ("orchestrator.toml" if content else "sft.toml")).write_text(content)
    for weights_dir in (None, tmp_path / "weights"):
        with pytest.raises(UserError, match="no environment: give --environment-ids") as error:
            with_environments(EvalConfig(weights_dir=weights_dir))
        assert "\n" not in str(error.value)
        if content and weights_dir:
            assert "no_such_key" in str(error.value)
        else:
            listed = str(error.value).rpartition("installed are ")[2].split(", ")
            assert {"reverse-text", "math500", "wordle"} <= set(listed)
            assert not {"prime-rl", "benchmark-tasks", "verifiers"} & set(listed)


async def test_a_version_that_cannot_be_loaded_is_skipped_and_reported(world):
    """Contract: one that is removed before its turn, or lay in the memory of a host that was started again, is no error
    of what is there; the report says which and why."""
    commit(world, 0, 5, 7, 10)
    tensors = world.weights / "step_7" / "model.safetensors"
    tensors.unlink(missing_ok=True)
    tensors.symlink_to(world.directory / f"{TMPFS_PREFIX}gone" / "model.safetensors")
    world.pool.before = lambda env, task, number: shutil.rmtree(world.weights / "step_5", ignore_errors=True)
    assert names(await world.run(weights_dir=world.weights)) == ["step_0", "step_10"]
    report = (world.directory / "out" / "evals" / "report.md").read_text()
    assert "* 5: it was removed before it was its turn" in report
    assert "* 7: its tensors were in memory" in report


async def test_following_evaluates_each_version_until_the_run_has_ended(world):
    """Contract: those committed meanwhile and the last ones, each on exactly itself."""
    world.weights.mkdir(parents=True)
    run = Status(world.directory / "run", "sft")
    commit(world, 0, 10)

    def before(env, task, number):
        if world.server.now.version == 10:
            commit(world, *(version for version in (15, 30, 37) if not (world.weights / f"step_{version}").exists()))
            run.done("finished")

    world.pool.before = before
    found = await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True, interval=10), 30)
    assert names(found) == ["step_0", "step_10", "step_30", "step_37"]  # the last of the run, too
    assert {made[2] for made in world.pool.made} == {0, 10, 30, 37}


async def test_following_evaluates_again_what_another_incarnation_of_the_trainer_made(world):
    """Contract: a number is not a policy: what replaced it is evaluated, and the results of the one before are not mixed with it."""
    commit(world, 0, 5)
    trainer = Status(world.directory / "run", "trainer")
    seen = []

    def before(env, task, number):
        seen.append(world.server.now.hash)
        if len(seen) == 8:  # the last of version 5
            shutil.rmtree(world.weights / "step_5")
            commit(world, 5, incarnation=1)
        if len(seen) == 12:
            trainer.done("stopped")

    world.pool.before = before
    found = await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True, max_concurrent=1), 30)
    assert names(found) == ["step_0", "step_5"]
    assert len(set(seen)) == 3
    assert len(seen) == 12


async def test_following_again_reports_what_was_evaluated_before_and_removed_since(world):
    """Contract: a follower that was killed loses nothing; what it had not finished is no result."""
    commit(world, 0, 5, 10)
    run = Status(world.directory / "run", "trainer")

    def before(env, task, number):
        if number == 10:  # the second attempt at version 10
            command.cancel()

    world.pool.before = before
    command = asyncio.create_task(world.run(weights_dir=world.weights, follow=True, max_concurrent=1))
    await asyncio.wait([command], timeout=30)
    shutil.rmtree(world.weights / "step_5")
    shutil.rmtree(world.weights / "step_10")
    commit(world, 15)
    run.done("finished")
    world.pool.before = lambda *_: None
    found = await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True), 30)
    assert names(found) == ["step_0", "step_5", "step_15"]
    assert len(world.pool.made) == 10 + 4
    assert "* 10: it was removed before its evaluation was complete" in (world.directory / "out" / "evals" / "report.md").read_text()  # fmt: skip


async def test_what_is_written_to_the_disk_only_later_is_evaluated_then(world):
    """Contract: a version that was sent counts as not there until its tensors are."""
    commit(world, 0)
    world.trainer.commit(5, publisher=PUBLISHER)
    run = Status(world.directory / "run", "trainer")

    def write() -> None:
        shutil.rmtree(world.weights / "step_5")
        commit(world, 5)
        run.done("finished")

    asyncio.get_running_loop().call_later(0.5, write)
    found = await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True), 30)
    assert names(found) == ["step_0", "step_5"]


async def test_a_version_that_was_asked_for_and_is_not_evaluated_is_a_failure(world):
    """Contract: the exit status says that it is not there; without names it is one only if no version could be loaded."""
    commit(world, 0, 10)
    world.trainer.commit(5, publisher=PUBLISHER)
    assert names(await world.run(weights_dir=world.weights)) == ["step_0", "step_10"]
    with pytest.raises(UserError, match=r"version 5 was not evaluated: .* never written"):
        await world.run(weights_dir=world.weights, steps=[5, 10])
    shutil.rmtree(world.weights / "step_10")
    with pytest.raises(UserError, match=r"version 5 was not evaluated: .* never written"):
        await world.run(weights_dir=world.weights, output_dir=world.directory / "other")


async def test_a_follower_holds_what_it_will_evaluate_and_no_more(world):
    """Contract: versions that are never evaluated may be removed."""
    commit(world, 0, 10)
    run = Status(world.directory / "run", "sft")
    held = []

    def look() -> None:
        held.append(read_lease(world.directory / "run", EVAL).version)
        run.done("finished")

    asyncio.get_running_loop().call_later(0.5, look)
    await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True, hold=True, interval=10), 30)
    assert held == [20]


async def test_an_error_of_an_environment_does_not_end_following(world):
    commit(world, 0, 5)
    Status(world.directory / "run", "trainer").done("finished")
    world.pool.before = lambda env, task, number: Outcome.ERRORED if world.server.now.version == 0 else None
    with pytest.raises(UserError, match="no episode of env on version 0 succeeded"):
        await world.run(weights_dir=world.weights, follow=True)
    assert "step_5" in (world.directory / "out" / "evals" / "report.md").read_text()
