"""Attempts are made as often as they have to be, and no longer than their version counts."""

import asyncio
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from prime_rl.config.shared import SamplingConfig
from prime_rl.envs.protocol import EpisodeResult, FirstTasks, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals import runner
from prime_rl.evals.runner import EvalPlan, EvalRunner, new_job, tasks_of, wire_sampling
from prime_rl.fleet.replicas import ReplicaState
from prime_rl.orchestrator import evaluation
from prime_rl.orchestrator.evaluation import Evaluations
from support.fleet import ready_fleet


class Pool:
    """Four tasks, of which servers in `sick` fail every attempt."""

    def __init__(self, *sick: str):
        self.sick = sick

    def tasks(self, env):
        return [TaskInfo(f"t{i}", i) for i in range(4)]

    async def run(self, *, server, **arguments):
        await asyncio.sleep(0)
        return EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE if server in self.sick else Outcome.OK)


@pytest.mark.parametrize("sick", [1, 3])
async def test_what_one_server_fails_is_made_by_another(monkeypatch, sick):
    """Contract: only what all of them fail, again and again, is a failure."""
    monkeypatch.setattr(runner, "FIRST_PAUSE_SECONDS", 0.001)
    fleet = ready_fleet(3, slack=0)
    for replica in fleet.replicas:
        replica.loaded = await replica.engine.served()

    pool = Pool(*(f"http://{number}" for number in range(sick)))
    job = new_job(pool, EvalPlan("one", "one", SamplingConfig(), 4, 8, 100), 0)
    await EvalRunner(pool, [job], 0, seed=0, max_concurrent=30, timeout=1, fleet=fleet).run()
    assert [result.ok for results in job.results.by_task for result in results] == [sick < 3] * 32


async def test_an_evaluation_of_a_version_that_is_superseded_ends():
    """Contract: it waits for no server that will not serve this version again, and the results are not complete."""
    fleet, superseded = ready_fleet(1, slack=0), []
    fleet.move(fleet.replicas[0], ReplicaState.QUARANTINED)
    job = new_job(Pool(), EvalPlan("one", "one", SamplingConfig(), 4, 8, 100), 0)
    run = EvalRunner(
        Pool(), [job], 0, seed=0, max_concurrent=2, timeout=60, fleet=fleet, superseded=lambda: bool(superseded)
    ).run()
    asyncio.get_running_loop().call_later(0.05, superseded.append, True)
    await asyncio.wait_for(run, 30)
    assert not job.results.attempts


async def test_a_version_that_is_to_be_had_again_is_evaluated_whole(monkeypatch):
    """Contract: what was given up while the version seemed superseded is made after all; less than all is never logged."""
    fleet, calls = ready_fleet(1, slack=0), []
    (replica,) = fleet.replicas
    replica.loaded = await replica.engine.served()
    sync = SimpleNamespace(
        lock=asyncio.Lock(), shipping=asyncio.Lock(), fleet=fleet, superseded=False,
        scheduler=SimpleNamespace(version=0, must_go_back=False), notice_incarnation=lambda: vars(sync).update(superseded=False),
    )  # fmt: skip

    class Losing(Pool):
        async def run(self, *, server, **arguments):
            calls.append(server)
            sync.superseded = len(calls) == 3
            return EpisodeResult("", "", "", Outcome.ENGINE_UNAVAILABLE if sync.superseded else Outcome.OK)

    monkeypatch.setattr(evaluation, "concurrent_episodes", lambda config, environments: 1)
    evaluations, logged = Evaluations.__new__(Evaluations), []
    evaluations.config = SimpleNamespace(seed=0, rollout_timeout=60, eval=None)
    evaluations._pool, evaluations._weight_sync = Losing(), sync
    evaluations._status = SimpleNamespace(phase=lambda text: None)
    evaluations._plans, evaluations._logged = [EvalPlan("one", "one", SamplingConfig(), 4, 8, 100)], {}
    evaluations._log = logged.append
    await evaluations._evaluate()
    assert [len(results.scored) for results in logged] == [32]
    assert len(calls) == 33


@pytest.mark.parametrize(
    ("kind", "asked", "given"), [(list, -1, 4), (list, 3, 3), (list, 9, 4), (FirstTasks, 3, 3), (FirstTasks, 9, 4)]
)
def test_as_many_tasks_as_asked_for_or_a_warning(kind, asked, given, caplog):
    """-1: all of them."""
    listed = kind(TaskInfo(f"t{i}", i) for i in range(4))
    tasks = tasks_of(SimpleNamespace(tasks=lambda env: listed), EvalPlan("e", "e", SamplingConfig(), asked, 1, 100))
    assert list(tasks) == listed[:given]
    assert ("e has 4 tasks, not 9" in caplog.text) == (asked == 9)


def test_all_tasks_of_an_endless_environment_are_refused():
    pool = SimpleNamespace(tasks=lambda env: FirstTasks([TaskInfo("t", 0)]))
    with pytest.raises(UserError, match="environment 'e' is endless: set num_examples"):
        tasks_of(pool, EvalPlan("e", "e", SamplingConfig(), -1, 1, 100))


def test_every_sampling_parameter_is_sent_so_that_no_server_default_applies():
    """Train and eval sample as configured; a seed travels only when asked for."""
    wire = wire_sampling(SamplingConfig(temperature=0.5, max_tokens=9), 17, 100)
    assert wire == {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0, "max_tokens": 9}
    assert wire_sampling(SamplingConfig(seeded=True), 17, 100)["seed"] == 17
    assert wire_sampling(SamplingConfig(), 17, 100)["max_tokens"] == 100


async def test_a_stop_does_not_hide_that_the_one_who_evaluates_is_cancelled() -> None:
    """Else its loop goes on, and the end of a stopped run waits for it."""

    async def forever() -> None:
        await asyncio.sleep(60)

    evaluations = Evaluations.__new__(Evaluations)
    evaluations._stopping, evaluations._evaluate = False, forever
    task = asyncio.create_task(evaluations.run())
    await asyncio.sleep(0.01)
    evaluations.stop()
    task.cancel()
    await asyncio.wait([task], timeout=60)
    assert task.cancelled()


def test_an_evaluation_without_a_server_fails(tmp_path):
    """The command itself: an error with address and deadline, and an exit status."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"  # nobody listens there any more
    done = subprocess.run(
        [
            *(sys.executable, "-m", "prime_rl.entrypoints.eval", "--environment-ids", "reverse-text"),
            *("--client.base-url", url, "--client.ready-timeout", "1", "--output-dir", str(tmp_path)),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    start = f"`uv run inference --model.name MODEL --server.port {url.rpartition(':')[2]}` starts one"
    assert done.stderr.rstrip().endswith(start)
    assert done.stderr.startswith(
        f"error: no inference server at {url} after 1 s (client.base_url, client.ready_timeout): "
    )
