"""Which versions are evaluated: those that are asked for, each once, and with a reason for each that is not."""

import asyncio
import re
import shutil
from contextlib import nullcontext, suppress

import pytest

from prime_rl.config import ConfigError, EvalConfig, OrchestratorConfig, SFTConfig, parse, write_toml
from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from prime_rl.evals.results import report_table
from prime_rl.evals.run import check_versions, with_environments
from prime_rl.monitor import Status
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


@pytest.mark.parametrize(
    ("place", "settings", "problem"),
    [
        ("run/weights", {"steps": [10, 15, 30]}, r"there is no version 15, 30 in .*weights \(there: 0, 10, 20\)"),
        ("out", {}, r"no version to evaluate in .*out \(there: none.*--follow waits"),
        ("nowhere", {}, "no version to evaluate in .*nowhere"),
        ("run", {}, "those of a run are in its weights/"),
        ("run/weights", {"steps": [20]}, None),
        ("nowhere", {"follow": True}, None),
    ],
)
def test_a_version_that_is_not_there_is_an_error_that_lists_what_is(world, place, settings, problem):
    commit(world, 0, 10, 20)
    (world.directory / "out").mkdir()
    with pytest.raises(UserError, match=problem) if problem else nullcontext():
        check_versions(world.config(weights_dir=world.directory / place, **settings))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--steps 1", "steps"),
        ("--follow", "follow"),
        ("--no-eval-base", "eval_base"),
        ("--interval 2", "interval"),
        ("--weights-dir w --steps 1 --follow", "steps names the versions and follow chooses them"),
        ("--weights-dir w --steps -1", "-1"),
        ("--weights-dir w --client.type chat", "takes no weights"),
        ("--client.type chat --client.base-url http://a http://b", "one address"),
    ],
)
def test_contradictions_are_one_line_that_names_the_key(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(EvalConfig, ["--environment-ids", "a,b", *arguments.split()], {})


ENV = {"id": "reverse-text", "args": {"num_tasks": 5}}
ORCH = {"environments": [ENV]}


@pytest.mark.parametrize(
    ("configs", "wanted"),
    [
        ({"orchestrator": ORCH}, [ENV]),
        ({"orchestrator": ORCH | {"eval": {}}}, [{**ENV, "args": {"num_tasks": 5, "split": "eval"}}]),
        ({"orchestrator": ORCH | {"eval": {"environments": [{"id": "wordle"}]}}}, [{"id": "wordle", "args": {}}]),
        ({"sft": {"eval": {"environments": [ENV]}}}, [ENV]),
    ],
)  # fmt: skip
def test_environments_of_the_run_that_made_the_versions(tmp_path, configs, wanted):
    """Contract: without --environment-ids those that the run was evaluated on, else trained on, as its config says."""
    for name, table in configs.items():
        cls = {"orchestrator": OrchestratorConfig, "sft": SFTConfig}[name]
        write_toml(cls.model_validate(table), tmp_path / "configs" / f"{name}.toml")
    config = with_environments(EvalConfig(weights_dir=tmp_path / "weights", sampling={"max_tokens": 7}))
    assert [{"id": env.id, "args": env.args} for env in config.environments] == wanted
    assert config.sampling.max_tokens == 7


@pytest.mark.parametrize("content", [None, "[environment]\nid = 'x'\nno_such_key = 1"])
def test_without_environments_an_error_lists_what_is_installed(tmp_path, content):
    """Contract: one line, where there is no run, or one of another release."""
    if content is not None:
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs" / "orchestrator.toml").write_text(content)
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


async def followed(world, **settings):
    """The policies of a command that follows, and ends in time."""
    return names(await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True, **settings), 30))


def report(world, directory="out"):
    return report_table(world.directory / directory / "evals" / "report.json")


async def test_a_version_that_cannot_be_loaded_is_skipped_and_reported(world):
    """Contract: one that was removed or was never written is no error of what is there; the report says which and why. It is a failure where it was named, or no other is there."""
    commit(world, 0, 5, 10)
    world.trainer.commit(8, publisher=PUBLISHER)
    world.pool.before = lambda env, task, number: shutil.rmtree(world.weights / "step_5", ignore_errors=True)
    assert names(await world.run(weights_dir=world.weights)) == ["step_0", "step_10"]
    for version, why in ((5, "it was removed before"), (8, ".* never written")):
        assert re.search(f"version {version}: {why}", report(world))
    with pytest.raises(UserError, match=r"version 8 was not evaluated: .* never written"):
        await world.run(weights_dir=world.weights, steps=[8, 10])
    shutil.rmtree(world.weights / "step_10")
    with pytest.raises(UserError, match=r"^version 8 was not evaluated: "):
        await world.run(weights_dir=world.weights, output_dir=world.directory / "other")


async def test_following_evaluates_each_version_until_the_run_has_ended(world):
    """Contract: those committed meanwhile and the last one, each on exactly itself; an error of one does not end it."""
    commit(world, 0, 10)
    run = Status(world.directory / "run", "sft")

    def before(env, task, number):
        if world.server.now.version == 10:
            commit(world, *(version for version in (15, 30, 37) if not (world.weights / f"step_{version}").exists()))
            run.done("finished")
        return Outcome.ERRORED if world.server.now.version == 0 else None

    world.pool.before = before
    with pytest.raises(UserError, match="4 of 4 attempts of env on version 0 failed"):
        await followed(world, interval=10)
    assert [made[2] for made in world.pool.made] == [0] * 4 + [10] * 4 + [30] * 4 + [37] * 4
    assert "step_37" in report(world)


async def test_following_evaluates_again_what_another_incarnation_of_the_trainer_made(world):
    """Contract: a number is not a policy: what replaced it is evaluated, and results are not mixed."""
    commit(world, 0, 5)
    trainer, seen = Status(world.directory / "run", "trainer"), []

    def before(env, task, number):
        seen.append(world.server.now.hash)
        if len(seen) == 8:  # the last of version 5
            shutil.rmtree(world.weights / "step_5")
            commit(world, 5, incarnation=1)
        if len(seen) == 12:
            trainer.done("stopped")

    world.pool.before = before
    assert await followed(world, max_concurrent=1) == ["step_0", "step_5"]
    assert (len(set(seen)), len(seen)) == (3, 12)


async def test_following_again_reports_what_was_evaluated_before_and_removed_since(world):
    """Contract: a follower that was killed loses nothing; what it had not finished is shown as not complete."""
    commit(world, 0, 5, 10)
    run = Status(world.directory / "run", "trainer")
    world.pool.before = lambda env, task, number: command.cancel() and None if number == 11 else None
    command = asyncio.create_task(followed(world, max_concurrent=1))
    with suppress(asyncio.CancelledError):
        await command
    for version in (5, 10):
        shutil.rmtree(world.weights / f"step_{version}")
    commit(world, 15)
    run.done("finished")
    world.pool.before = lambda *_: None
    assert await followed(world) == ["step_0", "step_15"]
    assert [line.split()[1] for line in report(world).splitlines()[1:]] == ["step_0", "step_5", "step_10", "step_15"]
    assert len(world.pool.made) == 11 + 4  # the third of version 10, and version 15
    assert re.search(r"step_10 +4 \(incomplete\)", report(world))


async def test_what_is_written_to_the_disk_only_later_is_evaluated_then(world):
    """Contract: a version that was sent counts as not there until its tensors are."""
    commit(world, 0, 10)
    world.trainer.commit(20, publisher=PUBLISHER)
    run = Status(world.directory / "run", "trainer")

    def write() -> None:
        shutil.rmtree(world.weights / "step_20")
        commit(world, 20)
        run.done("finished")

    asyncio.get_running_loop().call_later(0.3, write)
    assert await followed(world, interval=10) == ["step_0", "step_10", "step_20"]
