"""A whole evaluation in a scripted world: each attempt counts once, for the version that sampled it."""

import asyncio
import itertools
import json
import re
import shutil
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest

from prime_rl.config import ConfigError, EvalConfig, parse
from prime_rl.entrypoints import eval as command
from prime_rl.envs.protocol import Outcome
from prime_rl.errors import UserError
from prime_rl.evals.results import report_table
from prime_rl.evals.run import Evaluation, check_versions
from prime_rl.fleet.replicas import ReplicaPool
from prime_rl.monitor import Status, read_metrics
from prime_rl.monitor.status import read_status
from prime_rl.transport.commit import step_dir
from prime_rl.transport.weights import weights_manifest
from support.evaluating import World

TWO = [{"id": "one"}, {"id": "two", "rollouts_per_example": 3, "num_examples": 2, "sampling": {"temperature": 0.5}}]
PUBLISHER = {"host": "h", "port": 1, "token": "t", "timeout": 1.0}
HOT = {"sampling": {"temperature": 0.5, "seeded": True}}


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def policies(evaluated):
    return [policy for _, policy in evaluated]


def commit(world, *versions, incarnation=0):
    for version in versions:
        world.trainer.commit(version, incarnation)
    return weights_manifest(step_dir(world.weights, versions[-1])) if versions else None


def report(world):
    """The table without its padding, and what `report.json` says of each environment and policy."""
    path = world.directory / "out" / "evals" / "report.json"
    return re.sub(" +", " ", report_table(path)), json.loads(path.read_text())["results"]


async def interrupted(world, number, **settings):
    """Run, and interrupt it during the attempt of this number."""

    def before(env, task, count):
        if count == number:
            command.cancel()

    world.pool.before = before
    command = asyncio.create_task(world.run(max_concurrent=1, **settings))
    await asyncio.wait([command], timeout=60)
    assert command.cancelled()
    world.pool.before = lambda *_: None


async def test_environments_run_at_once_within_one_bound(world):
    """Contract: their own numbers and sampling; none waits for another's end; at most max_concurrent in all."""
    table = await world.run(environments=TWO, rollouts_per_example=2, max_concurrent=3)
    assert [(key, list(map(len, tasks))) for key, tasks in table.items()] == [
        (("one", "step_0"), [2, 2, 2, 2]),
        (("two", "step_0"), [3, 3]),
    ]
    assert world.pool.most == 3
    order = [env for env, *_ in world.pool.made]
    assert order.index("two") < 3
    asked = {(env, one["temperature"], "seed" in one) for env, one in zip(order, world.pool.sampling, strict=True)}
    assert asked == {("one", 1.0, True), ("two", 0.5, True)}, "an override changes what it names alone"


async def test_a_directory_in_one_go_equals_each_version_alone(world):
    """Contract: seeds follow from what an attempt is; nothing of one version is left when the next is evaluated. The
    base is what the server was started with; it is served again at the end."""
    await world.server.update(commit(world, 10, 20))
    together = await world.run(weights_dir=world.weights, rollouts_per_example=3)
    assert list(together) == [("env", "step_0"), ("env", "step_10"), ("env", "step_20")]
    assert len({json.dumps(rewards) for rewards in together.values()}) == 3  # they do differ
    for version in (10, 20):
        settings = {"steps": [version], "eval_base": False, "output_dir": world.directory / str(version)}
        alone = await world.run(weights_dir=world.weights, rollouts_per_example=3, **settings)
        assert alone == {("env", f"step_{version}"): together["env", f"step_{version}"]}
    assert {made[2] for made in world.pool.made} == {0, 10, 20}
    assert [update[0] for update in world.server.updates] == [20, 10, 20, 10, 20]  # never version 0
    assert (world.server.now.version, world.server.reloads) == (0, 4)


async def test_the_adapter_that_a_run_began_with_is_its_version_0(world):
    """Contract: then version 0 is no base, and loaded as any other in place of what the server was started with."""
    commit(world, 10, 0)
    await world.run(weights_dir=world.weights)
    assert [update[0] for update in world.server.updates] == [0, 10]


async def test_what_is_finished_is_not_made_again(world):
    """Contract: an interrupted evaluation, whose report says so, goes on; more attempts go on from those that are
    there; failed ones are made again. Other settings are refused, unless it begins anew."""
    await interrupted(world, 3)
    text, (entry,) = report(world)
    assert "env step_0 4 (incomplete) 1 " in text
    assert entry["complete"] is False
    world.pool.before = lambda env, task, number: Outcome.ERRORED if number == 4 else None
    with pytest.raises(UserError, match="1 of 4 attempts of env on version 0 failed"):
        await world.run()
    assert len(world.pool.made) == 4
    first = await world.run()
    assert len(world.pool.made) == 5
    assert "env step_0 4 1 " in report(world)[0]
    assert first == await world.run()
    assert len(world.pool.made) == 5
    more = await world.run(rollouts_per_example=3)
    assert len(world.pool.made) == 5 + 8
    assert [attempts[:1] for attempts in more["env", "step_0"]] == first["env", "step_0"]
    with pytest.raises(UserError, match=r"sampling.temperature = 1.0, and now it is 0.5"):
        await world.run(**HOT)
    assert len(world.pool.made) == 13
    await world.run(**HOT, clean=True)
    assert len(world.pool.made) == 17


async def test_what_a_restarted_server_sampled_is_made_again(world):
    """Contract: a server that was started again serves its base: what it sampled then counts for nothing. The command
    ends with one line, and the same one goes on; without a directory only with the version that was evaluated."""
    commit(world, 0, 3)
    settings = {"weights_dir": world.weights, "rollouts_per_example": 4, "steps": [3], "eval_base": False}
    world.pool.before = lambda env, task, number: world.server.base() if number == 5 else None
    with pytest.raises(UserError, match=r"no longer serve step_3: .* scored attempts are kept"):
        await world.run(**settings, max_concurrent=2)
    assert read_status(world.directory / "out")["eval"].outcome.startswith("failed: http://engine no longer serve")
    world.pool.before = lambda *_: None
    disturbed = await world.run(**settings)
    assert 0 in {made[2] for made in world.pool.made}
    lines = (world.directory / "out" / "evals" / "env" / "step_3" / "results.jsonl").read_text().splitlines()
    assert (len(lines), {json.loads(line)["version"] for line in lines}) == (16, {3})
    assert disturbed == await world.run(**settings, output_dir=world.directory / "calm")


async def test_several_servers_all_load_and_what_one_that_is_lost_sampled_is_made_by_the_other(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, ("http://a", "http://b"))
    await world.servers["http://a"].update(commit(world, 0, 5))  # left by a killed evaluation: they differ
    world.pool.before = lambda env, task, number: world.servers["http://b"].base() if number == 9 else None
    settings = {"weights_dir": world.weights, "rollouts_per_example": 8, "steps": [5], "eval_base": False}
    assert list(await world.run(**settings, max_concurrent=4)) == [("env", "step_5")]
    assert [server.now.version for server in world.servers.values()] == [0, 0]
    assert len(world.servers["http://b"].updates) == 1


@pytest.mark.parametrize("sick", [1, 3])
async def test_what_one_server_fails_is_made_by_another(tmp_path, monkeypatch, sick):
    """Contract: only what all of them fail, again and again, is a failure."""
    world = World(tmp_path, monkeypatch, ("http://a", "http://b", "http://c"))
    world.pool.sick = list(world.servers)[:sick]
    with nullcontext() if sick < 3 else pytest.raises(UserError, match="12 of 12 attempts .* failed"):
        assert None not in itertools.chain(*(await world.run(rollouts_per_example=3))["env", "step_0"])


@pytest.mark.parametrize(
    ("second", "problem", "names"),
    [
        ({"version": 3, "hash": "f" * 32}, "do not serve the same weights: .*//a version 0 .*, http://b version 3", 2),
        ({"models": ("other", "more")}, "the server at http://b serves other, more, not m: .* --model.name other", 2),
        ({"models": ("other", "m")}, None, 2),
        (None, None, 1),  # it does not answer
    ],
)  # fmt: skip
async def test_which_servers_evaluate(tmp_path, monkeypatch, second, problem, names):
    """Contract: one line at once, not requests that are all refused, where weights differ or one has another model."""
    world = World(tmp_path, monkeypatch, ("http://a", "http://b"))
    two = world.servers["http://b"]
    two.now = replace(two.now, **(second or {}))
    fleet = ReplicaPool(world.servers.values())
    fleet.wait_ready = lambda on_wait: asyncio.sleep(0, fleet.replicas[: 1 if second is None else 2])
    evaluation = Evaluation(world.config(model={"name": "m"}), world.pool, None, Status(tmp_path, "eval"))
    with nullcontext() if problem is None else pytest.raises(UserError, match=problem):
        assert (await evaluation.serve(fleet, None))[0] == 0
        assert len(fleet.ready) == names


async def test_a_model_of_another_name_is_found_before_an_environment_starts(world):
    """Contract: one line at once; a worker would look for that name's tokenizer, for minutes without a network."""
    world.server.now = replace(world.server.now, models=("other",))
    world.pool.start = lambda timeout: pytest.fail("an environment was started")
    with pytest.raises(UserError, match=r"serves other, not m: .* --model.name other"):
        await world.run(model={"name": "m"})


async def test_reports_and_metrics(world):
    """Contract: a row per environment and policy, all tokens, metrics by version; too many errors fail after that."""
    commit(world, 0, 2)
    world.pool.before = lambda env, task, number: Outcome.PROMPT_TOO_LONG if task == 0 else None
    settings = {"weights_dir": world.weights, "rollouts_per_example": 2}
    with pytest.raises(UserError, match=r"2 of 8 attempts of env on version 0 failed \(max_error_rate 0.2\)"):
        await world.run(**settings, max_error_rate=0.2)
    world.pool.before = lambda env, task, number: Outcome.PROMPT_TOO_LONG
    table = await world.run(**settings, max_error_rate=0.25)
    assert table["env", "step_2"][0] == [None, None]
    text, (base, second) = report(world)
    assert (base["policy"], second["policy"], second["version"]) == ("step_0", "step_2", 2)
    assert second["errors"] == {"prompt_too_long": 2}
    assert (second["input_tokens"], second["output_tokens"]) == (30, 18)
    assert "env step_2 4 2 " in text
    rows = read_metrics(world.directory / "out" / "metrics" / "eval.jsonl")
    assert [row["eval/env/policy_version"] for row in rows] == [0, 2]
    assert rows[-1]["eval/env/pass@2"] == second["metrics"]["pass@2"]


@pytest.mark.parametrize("follow", [False, True], ids=["for its server", "for a version"])
async def test_nothing_is_left_of_a_command_that_is_interrupted_while_it_waits(world, follow):
    """Contract: its status says that it was stopped, so that a later `rl` in this directory shows no wait."""
    commit(world, 0)
    nobody = {"client": {"base_url": "http://127.0.0.1:9/v1", "ready_timeout": 60}}
    settings = {"weights_dir": world.weights, "follow": True} if follow else nobody
    command = asyncio.create_task(world.run(**settings))
    out = world.directory / "out"
    async with asyncio.timeout(10):
        while (status := read_status(out).get("eval")) is None or status.waiting is None:
            await asyncio.sleep(0.01)
    command.cancel()
    with suppress(asyncio.CancelledError):
        await command
    assert (read_status(out)["eval"].outcome, read_status(out)["eval"].waiting) == ("stopped", None)


async def test_a_second_evaluation_of_a_directory_is_refused(world, monkeypatch):
    monkeypatch.setattr("prime_rl.evals.run.running_processes", lambda directory: {"eval"})
    with pytest.raises(UserError, match="another eval is running in .*: wait for it"):
        await world.run()


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
        assert policies(await world.run(**config)) == expected


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


def test_without_environments_an_error_lists_what_is_installed():
    with pytest.raises(UserError, match="no environment: give --environment-ids") as error:
        command.run(EvalConfig())
    listed = str(error.value).rpartition("installed are ")[2].split(", ")
    assert {"reverse-text", "math500", "wordle"} <= set(listed)
    assert not {"prime-rl", "benchmark-tasks", "verifiers"} & set(listed)


async def followed(world, **settings):
    """The policies of a command that follows, and ends in time."""
    return policies(await asyncio.wait_for(world.run(weights_dir=world.weights, follow=True, **settings), 30))


async def test_a_version_that_cannot_be_loaded_is_skipped_and_reported(world):
    """Contract: one that was removed or never written is no error of the others; the report names it and why. It is a
    failure if it was named, or no other is there."""
    commit(world, 0, 5, 10)
    world.trainer.commit(8, publisher=PUBLISHER)
    world.pool.before = lambda env, task, number: shutil.rmtree(world.weights / "step_5", ignore_errors=True)
    assert policies(await world.run(weights_dir=world.weights)) == ["step_0", "step_10"]
    for version, why in ((5, "it was removed before"), (8, ".* never written")):
        assert re.search(f"version {version}: {why}", report(world)[0])
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
    assert "step_37" in report(world)[0]


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
    world.pool.before = lambda env, task, number: follower.cancel() and None if number == 11 else None
    follower = asyncio.create_task(followed(world, max_concurrent=1))
    with suppress(asyncio.CancelledError):
        await follower
    for version in (5, 10):
        shutil.rmtree(world.weights / f"step_{version}")
    commit(world, 15)
    run.done("finished")
    world.pool.before = lambda *_: None
    assert await followed(world) == ["step_0", "step_15"]
    assert [line.split()[1] for line in report(world)[0].splitlines()[1:]] == ["step_0", "step_5", "step_10", "step_15"]
    assert len(world.pool.made) == 11 + 4  # the third of version 10, and version 15
    assert re.search(r"step_10 +4 \(incomplete\)", report(world)[0])


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
