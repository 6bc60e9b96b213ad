"""Evaluations count what failed, average what did not, and order results by task."""

import asyncio
import socket
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from prime_rl.config.shared import SamplingConfig
from prime_rl.envs.protocol import EpisodeResult, FirstTasks, Outcome, TaskInfo
from prime_rl.errors import UserError
from prime_rl.evals import runner
from prime_rl.evals.runner import EvalPlan, EvalRunner, new_job, tasks_of, wire_sampling
from prime_rl.orchestrator.evaluation import Evaluations


class SlowPool:
    """A pool whose later attempts finish first."""

    def __init__(self):
        self.running = self.most = 0

    def tasks(self, env):
        return [TaskInfo(f"t{i}", i) for i in range(4)]

    async def run(self, *, env, task_index, sampling, policy_version, episode_id, deadline):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01 * (4 - task_index))
        self.running -= 1
        return EpisodeResult("e", "env", "t", Outcome.OK, reward=float(task_index))


async def test_results_are_ordered_by_task_and_concurrency_is_bounded():
    """Whatever finishes first: results are listed by task; environments that are evaluated at once share one bound."""
    pool, kept = SlowPool(), []
    jobs = [new_job(pool, EvalPlan(name, name, SamplingConfig(), 3, 2, 100), 0) for name in ("one", "other")]
    await EvalRunner(pool, jobs, 0, seed=0, max_concurrent=3, timeout=1, on_result=kept.append).run()
    for job in jobs:
        assert [[r.reward for r in attempts] for attempts in job.results.by_task] == [
            [0.0, 0.0],
            [1.0, 1.0],
            [2.0, 2.0],
        ]
    assert pool.most == 3
    assert len(kept) == 12


async def test_voids_count_in_a_row(monkeypatch):
    """Contract: servers that are restarted now and then during a long evaluation do not end it."""
    monkeypatch.setattr(runner, "VERIFY_SECONDS", 0.005)
    pool, kept, voids = SlowPool(), [], [0]

    async def verify() -> bool:
        if len(kept) == voids[-1] or len(voids) > 7:
            return True
        voids.append(len(kept))
        return False

    job = new_job(pool, EvalPlan("one", "one", SamplingConfig(), 4, 6, 100), 0)
    await EvalRunner(pool, [job], 0, seed=0, max_concurrent=1, timeout=1, verify=verify, on_result=kept.append).run()
    assert len(voids) > 7
    assert len(kept) == 24


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


@pytest.mark.parametrize("then", ["lost", "superseded", "must_go_back", "another is served"])
async def test_an_evaluation_of_a_version_that_no_longer_counts_is_given_up(monkeypatch, then):
    """Contract: only a version that is still to be served ends the run when its server was lost again and again."""
    made = []

    class LosingPool:
        turned_away = True

        def __init__(self, *_):
            pass

        async def unverified(self):
            return []

    class WeightSync:
        recovering, superseded, fleet = False, False, None
        scheduler = SimpleNamespace(version=3, must_go_back=False)
        lock, shipping = asyncio.Lock(), asyncio.Lock()

        def notice_incarnation(self):
            self.recovering = len(made) == 3

        async def wait_recovered(self):
            self.recovering, self.superseded = False, then == "superseded"
            version = 4 if then == "another is served" else 3
            self.scheduler = SimpleNamespace(version=version, must_go_back=then == "must_go_back")

    async def run_plans(pool, version):
        made.append(version)

    monkeypatch.setattr("prime_rl.orchestrator.evaluation.RoutedEnvPool", LosingPool)
    evaluations = Evaluations.__new__(Evaluations)
    evaluations._weight_sync, evaluations._pool, evaluations._run_plans = WeightSync(), None, run_plans
    with pytest.raises(UserError, match="lost during 3 evaluations") if then == "lost" else nullcontext():
        await evaluations._evaluate()
    assert made == [3, 3, 3]


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
