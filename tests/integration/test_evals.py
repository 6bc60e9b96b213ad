"""`eval`: real environment workers against a scripted engine, a scripted API, and real vLLM; killed and resumed."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import free_port
from prime_rl.monitor import read_status
from prime_rl.transport.weights import write_base_version
from support.chat_api import ChatApi, refusal
from support.processes import Command, until
from support.serving import commit, perturbed

SUPPORT = Path(__file__).parents[1] / "support"
TIMEOUT = 240
PLAIN = "reverse-plain"  # its workers start in a second


@pytest.fixture(autouse=True)
def _environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT / "envs"), prepend=os.pathsep)


def call(name: str, *arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    command, env = [sys.executable, "-m", f"prime_rl.entrypoints.{name}", *map(str, arguments)], os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=env)


evaluate = partial(call, "eval")


def attempts(directory: Path, target: str, env: str = PLAIN) -> list[dict[str, Any]]:
    path = directory / "evals" / env / target / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(rows, key=lambda row: (row["task_id"], row["attempt"]))


def scores(directory: Path, target: str) -> list[tuple[str, float, str]]:
    return [(row["task_id"], row["reward"], row["completion"]) for row in attempts(directory, target)]


@contextmanager
def scripted_engine(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of an engine of the bundled model, which may not listen yet."""
    port, env = free_port(), {"PYTHONPATH": str(SUPPORT.parent)}
    arguments = ("--port", port, "--model", model, "--policy", *options)
    with Command("engine", *arguments, log=log, env=env, module="support.fake_engine"):
        yield f"http://127.0.0.1:{port}/v1"


def test_a_command_that_is_interrupted_goes_on_where_it_was(tiny_model, tmp_path):
    """Contract: no finished attempt is made again, none is lost; Ctrl-C ends with 130."""
    with scripted_engine(tiny_model, tmp_path / "engine.log", "--delay", "0.5") as url:
        arguments = [
            "--model.name", tiny_model, "--client.base-url", url, "--environment-ids", PLAIN, "--num-examples", 20,
            "--rollouts-per-example", 2, "--output-dir", tmp_path,
        ]  # fmt: skip
        with Command("eval", *arguments, "--max-concurrent", 2, log=tmp_path / "log") as command:
            until(lambda: len(attempts(tmp_path, "step_0")) >= 4, "four attempts", command)
            command.process.send_signal(signal.SIGINT)
            assert command.wait(60) == 130, command.tail()
        before = attempts(tmp_path, "step_0")
        assert 4 <= len(before) < 40
        done = evaluate(*arguments, "--max-concurrent", 40)
    assert done.returncode == 0, done.stdout + done.stderr
    after = attempts(tmp_path, "step_0")
    assert len({(row["task_id"], row["attempt"]) for row in after}) == len(after) == 40
    assert [row for row in after if row in before] == before
    assert f"step_0: {len(before)} of 40 attempts are there already" in done.stdout


async def test_an_api_is_asked_by_its_chat_route_without_a_tokenizer(tmp_path):
    """Contract: a key that is refused ends the command in one line, and what is scored is kept. The
    key travels, and only what an API knows is sent; what may pass is asked again; tokens and cost are reported."""
    revoked = [True]

    def script(number: int, body: dict[str, Any]) -> Any:
        if revoked[0] and number > 4:
            return refusal(401, "This key has been revoked")
        return refusal(503, **{"Retry-After": "0"}) if number == 3 else None

    def reply(body: dict[str, Any]) -> str:
        return f"<reversed_text>{body['messages'][-1]['content'][::-1]}</reversed_text>"

    async with ChatApi(script=script, key="sk-test", reply=reply) as api:
        arguments = [
            "--model.name", "some/model-that-nobody-has", "--client.base-url", api.base_url,
            "--client.api-key-var", "MY_API_KEY", "--environment-ids", "reverse-text", "--num-examples", 8,
            "--max-concurrent", 1, "--sampling.max-tokens", 30, "--output-dir", tmp_path,
        ]  # fmt: skip
        command = partial(evaluate, *arguments, MY_API_KEY="sk-test")
        stopped = await asyncio.to_thread(command)
        assert stopped.returncode == 1
        assert "refused the key in $MY_API_KEY" in stopped.stderr
        assert "This key has been revoked" in stopped.stderr
        assert "3 scored attempts are kept" in stopped.stderr
        assert len(api.bodies) == 5
        revoked[0] = False
        done = await asyncio.to_thread(command)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = attempts(tmp_path, "api", "reverse-text")  # the refused attempt is recorded, too
    scored = [(row["reward"], row["input_tokens"], row["output_tokens"]) for row in rows if row["reward"] is not None]
    assert scored == [(1.0, 7, 3)] * 8
    assert len(api.bodies) == 5 + 5
    assert {key for body in api.bodies for key in body} == {"model", "messages", "temperature", "top_p", "max_tokens"}
    assert {body["model"] for body in api.bodies} == {"some/model-that-nobody-has"}
    (found,) = json.loads((tmp_path / "evals" / "report.json").read_text())["results"]
    assert (found["policy"], found["input_tokens"]) == ("api", 8 * 7)
    assert "sk-test" not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


def fine_tune(directory: Path, model: Path, url: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """`sft` of a few steps on one conversation, which evaluates reverse-plain."""
    rows = directory / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "ab", "completion": "ba"}) + "\n")
    return call(
        "sft", "--model.name", model, "--device", "cpu", "--data.name", rows,
        "--data.seq-len", 64, "--data.batch-size", 1, "--max-steps", 5, "--output-dir", directory,
        "--eval.environment.id", PLAIN, "--eval.interval", 2,
        "--eval.num-examples", 3, "--eval.client.base-url", url, "--ckpt.interval", 2, *arguments,
    )  # fmt: skip


def test_fine_tuning_is_evaluated_at_once_or_later_and_again_where_it_is_resumed(tiny_model, tmp_path):
    """Contract: without a server the weights are there, the exit status is 1, and the last line says how to make up for
    what is missing. Evaluated are the base, each version of the interval, and the last, each by the weights of its own.
    The evaluation beside `sft` is supervised as the processes of `rl` are: killed, it is restarted and goes on. Results
    of weights that a resumed run makes again are not taken for those of the same number."""
    done = fine_tune(tmp_path, tiny_model, "http://127.0.0.1:9/v1", "--eval.client.ready-timeout", 1)
    assert done.returncode == 1
    assert "the training is complete, but eval failed with exit status 1" in done.stderr
    assert "no inference server at http://127.0.0.1:9" in done.stderr
    config, report = tmp_path / "configs" / "eval.toml", tmp_path / "evals" / "report.json"
    assert f"what is missing: uv run eval @ {config} (" in done.stderr

    def evaluated() -> list[str]:
        """The hashes of the versions, all of which have all their attempts."""
        found = {result["policy"]: result["hash"] for result in json.loads(report.read_text())["results"]}
        assert list(found) == ["step_0", "step_2", "step_4", "step_5"]
        assert [len(attempts(tmp_path, policy)) for policy in found] == [3, 3, 3, 3]
        return list(found.values())

    def running() -> bool:
        status = read_status(tmp_path).get("eval")
        return status is not None and status.outcome is None

    with scripted_engine(tiny_model, tmp_path / "engine.log") as url:
        later = evaluate("@", config, "--client.base-url", url, "--client.ready-timeout", 60)
        assert later.returncode == 0, later.stdout + later.stderr
        before = evaluated()
        assert len(set(before)) == 4
        with ThreadPoolExecutor(1) as executor:
            resumed = ("--ckpt.resume-step", 2, "--optim.lr", 1e-3)
            tuning = executor.submit(fine_tune, tmp_path, tiny_model, url, *resumed)
            until(running, "first status of the evaluation")
            os.kill(read_status(tmp_path)["eval"].pid, signal.SIGKILL)
            again = tuning.result(TIMEOUT)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("starting it again") == again.stdout.count("eval was killed by SIGKILL: starting") == 1
    assert [old == new for old, new in zip(before, evaluated(), strict=True)] == [True, True, False, False]


def test_versions_on_a_real_server(inference_server, tmp_path):
    """Contract: real vLLM loads and verifies each version and samples it, greedily; it serves its base at the end."""
    inference_server.reset()
    weights = inference_server.weights_root / "evaluated"  # of this test alone
    weights.mkdir()
    write_base_version(weights, inference_server.model)
    for version in (901, 902):
        commit(weights, version, inference_server.model, perturbed(inference_server.model, seed=version))
    try:
        done = evaluate(
            "--model.name", inference_server.model, "--client.base-url", inference_server.base_url,
            "--environment-ids", PLAIN, "--num-examples", 6, "--sampling.max-tokens", 24, "--sampling.temperature", 0,
            "--seq-len", 256, "--weights-dir", weights, "--steps", "901,902", "--output-dir", tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert inference_server.get("/weights").json()["version"] == 0
    finally:
        inference_server.reset()
        shutil.rmtree(weights)
    assert len({json.dumps(scores(tmp_path, f"step_{version}")) for version in (0, 901, 902)}) == 3
