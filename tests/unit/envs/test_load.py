"""Loading an environment: whatever is wrong, one line that names the real cause."""

from pathlib import Path
from typing import Any

import pytest

from prime_rl.envs.ids import LoadError
from prime_rl.envs.protocol import Outcome, Run, Setup
from support.environments import write_environments


@pytest.fixture(autouse=True)
def _environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_environments(tmp_path / "environments")))


def load(env_id: str, model: Path, demonstration: str = "", **args: Any) -> Any:
    from prime_rl.envs import worker

    shown = {"demonstration": demonstration, "template": "Correct is: {demonstration}"}
    return worker.load(Setup(env_id, env_id, args, str(model), "auto", "info", adapter="verifiers", **shown))


@pytest.mark.parametrize(
    ("env_id", "args", "field", "message"),
    [
        ("no-such-env", {}, "", "environment 'no-such-env': not found: there is no Python module 'no_such_env'"),
        ("env-needs-missing", {}, "", "needs the module 'surely_not_installed', which "),
        ("env-raises-on-import", {}, "", "failed to load: ZeroDivisionError: division by zero"),
        ("env-raises-in-load", {}, "", "failed to load: OSError: the data is not there"),
        ("env-empty", {}, "", "it has no tasks"),
        ("gyms.envs.none", {}, "", "not found: there is no Python module 'gyms.envs.none'"),
        ("env-classic", {}, "", "is not usable: "),
        ("env-exports-nothing", {}, "", "exports no Taskset subclass"),
        ("reverse-text", {"num_task": 3}, "", "there is no argument 'num_task'; did you mean 'num_tasks'?"),
        ("reverse-text", {"split": "test"}, "", "argument split"),
        ("reverse-text", {"num_tasks": "many"}, "", "argument num_tasks"),
        ("reverse-text", {"min_words": 3, "max_words": 2}, "", "need 1 <= min_words <= max_words"),
        ("env-answers", {"answers": ["a"]}, "answr", "has nothing in its field 'answr' to show (fields: "),
        ("env-answers", {"answers": [[]]}, "answer", "has nothing in its field 'answer' to show"),
    ],
)
def test_what_is_wrong_is_named(env_id: str, args: dict[str, Any], field: str, message: str, tiny_model: Path) -> None:
    """On one line, with the environment: not found, a missing dependency, an error on import or in load, an old or
    empty package, an argument that is unknown, of the wrong kind or refused, a missing demonstration."""
    with pytest.raises(LoadError) as caught:
        load(env_id, tiny_model, field, **args)
    assert message in str(caught.value)
    assert f"environment '{env_id}'" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_task_that_demonstrates_nothing(tiny_model: Path) -> None:
    """Contract: its episodes are invalid and say why, before anything is sampled; 0 is an answer."""
    env = load("env-answers", tiny_model, "answer", answers=["a", None, "", 0])
    for place in (1, 2):
        result = await env.run(Run(1, "e", place, env.task_ids[place], {}, 0, "http://127.0.0.1:9/v1", 0.0))
        assert result.outcome is Outcome.INVALID
        assert "has nothing in its field 'answer' to show" in result.message
        assert result.task_id == env.task_ids[place]
    assert env._show(env.tasks[3]) != env._show(env.tasks[0])


def test_an_endless_taskset(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first tasks, the same in every worker, though they are drawn at random."""
    from prime_rl.envs import verifiers_v1

    monkeypatch.setattr(verifiers_v1, "ENDLESS_TASKS", 12)
    one, other = load("env-endless", tiny_model), load("env-endless", tiny_model)
    assert len(one.task_ids) == 12
    assert one.task_ids == other.task_ids
    assert not one.bounded


def test_ids(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments reach the taskset, ids are durable and distinct; a module within a package has them, too, and what
    docs/guides/environments.md shows of verifiers 0.4 can be pasted, with a split for evaluations."""
    env = load("reverse-text", tiny_model, split="eval", num_tasks=5)
    assert len(set(env.task_ids)) == 5
    assert all(task_id.startswith("reverse-text/") for task_id in env.task_ids)
    directory = tmp_path / "environments" / "gyms" / "envs"
    directory.mkdir(parents=True)
    (tmp_path / "environments" / "env_good.py").rename(directory / "good_gym.py")
    assert len(load("owner/gyms.envs.good-gym", tiny_model, num_tasks=3).task_ids) == 3
    page = (Path(__file__).parents[3] / "docs" / "guides" / "environments.md").read_text()
    (tmp_path / "environments" / "shout.py").write_text(page.partition("# shout.py")[2].partition("```")[0])
    assert len(load("shout", tiny_model, split="eval", num_tasks=3).task_ids) == 3
