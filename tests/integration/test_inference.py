"""The real server: what it serves, how that changes, and that nothing bad gets in."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import InferenceServer, LaunchServer, failing_loads, make_tiny_model
from prime_rl import faults
from prime_rl.inference.engine_watch import ASK_SECONDS
from prime_rl.monitor.status import ProcessStatus, read_status
from prime_rl.processes import table
from prime_rl.transport.weights import hash_directory, version_hash, weights_manifest
from support import doors
from support.processes import until
from support.publishing import PublishingTrainer
from support.serving import (
    TOLERANCE,
    commit,
    difference,
    identity,
    parse,
    perturbed,
    reference,
    request,
    sample,
    served,
    update,
)


@pytest.fixture
def server(inference_server: InferenceServer) -> Iterator[InferenceServer]:
    inference_server.reset()
    yield inference_server
    inference_server.reset()


def check_base_update_reload(server: InferenceServer, prompt: list[int]) -> None:
    assert difference(server, prompt, server.model) <= TOLERANCE
    before = sample(server, prompt, temperature=0.0)
    directory = commit(server.weights_root, 11, server.model, perturbed(server.model))

    before_update = served(server)
    response = update(server, directory, 11)
    assert response.status_code == 200, response.text
    manifest = weights_manifest(directory)
    assert identity(response) == {"version": 11, "hash": manifest.hash}
    assert served(server) == {
        "boot": before_update["boot"],
        "loads": before_update["loads"] + 1,
        "engines": before_update["engines"],
        "leaving": False,
        "models": [str(server.model)],
        "version": 11,
        "hash": manifest.hash,
        "base": str(server.model.resolve()),
        "weight_dir": str(directory),
    }
    assert difference(server, prompt, directory) <= TOLERANCE
    assert sample(server, prompt, temperature=0.0).tokens != before.tokens

    server.reset()
    assert sample(server, prompt, temperature=0.0) == before
    base = served(server)
    assert (base["version"], base["hash"]) == (0, version_hash(hash_directory(server.model)))


def test_logprobs_equal_transformers_and_follow_updates(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: the engine computes what the trainer does, before and after an update of a model with a tied head (CPU
    packs that head separately); an update changes what is served; a reload restores it to the bit."""
    check_base_update_reload(server, chat_prompt)
    status = read_status(server.output_dir)["inference"]
    assert (status.phase, status.pid) == ("serving", server.pid)
    assert [entry["id"] for entry in server.get("/v1/models").json()["data"]] == [str(server.model)]
    # Without a key, too, whoever reaches the server neither scales it nor reads how it is built.
    assert {server.post(path, {"new_data_parallel_size": 2}).status_code for path in doors.ADMINISTRATIVE} == {404}


def test_logprobs_are_those_of_the_sampling_distribution(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: with a temperature, logprobs are those of the tempered distribution (importance ratios need them)."""
    got = sample(server, chat_prompt, temperature=0.5, max_tokens=1)
    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([chat_prompt])).logits[0, -1].float()
    assert got.logprobs[0] == pytest.approx(float((logits / 0.5).log_softmax(-1)[got.tokens[0]]), abs=TOLERANCE)


async def test_requests_in_flight_survive_an_update(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: requests in flight finish; tokens before the switch have the old weights' logprobs, later ones those of
    the new weights over the whole context (the cache is rebuilt). Half of the requests carry a seed."""
    count, length = 8, 256
    directory = commit(server.weights_root, 12, server.model, perturbed(server.model, seed=2))
    async with httpx.AsyncClient(base_url=server.root, timeout=120) as client:
        params = [{"max_tokens": length} | ({"seed": i} if i % 2 else {}) for i in range(count)]
        requests = [
            asyncio.create_task(client.post("/v1/generate", json=request(server, chat_prompt, **p))) for p in params
        ]
        await until_running(client, count)
        response = await client.post("/update_weights", json={"weight_dir": str(directory), "version": 12})
        assert response.status_code == 200, response.text
        unfinished = sum(not task.done() for task in requests)
        results = [parse(await task) for task in requests]
    assert unfinished > 0, "every request had finished before the update: the test shows nothing"
    switched = 0
    for result in results:
        assert (result.finish_reason, len(result.tokens)) == ("length", length)
        got = torch.tensor(result.logprobs)
        old = (got - reference(server.model, chat_prompt, result.tokens)).abs() <= TOLERANCE
        new = (got - reference(directory, chat_prompt, result.tokens)).abs() <= TOLERANCE
        switch = int(old.int().cumprod(0).sum())
        assert new[switch:].all(), f"tokens after {switch} fit neither weights"
        switched += 0 < switch < length
    assert switched > 0


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def until_running(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(60):
        while await metric(client, "num_requests_running") != count:
            await asyncio.sleep(0.05)


async def test_a_client_that_goes_away_ends_its_request(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: what nobody waits for any more is not sampled to its end."""
    length = 256
    async with httpx.AsyncClient(base_url=server.root, timeout=120) as client:
        before = await metric(client, "generation_tokens_total")
        body = request(server, chat_prompt, max_tokens=length, ignore_eos=True)
        reply = asyncio.create_task(client.post("/v1/sample", json=body))
        await until_running(client, 1)
        reply.cancel()
        await until_running(client, 0)
        assert await metric(client, "generation_tokens_total") - before < length


async def test_a_pause_outlasts_an_update(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: while a client has paused the server requests wait, also across a weight update, until it resumes."""
    directory = commit(server.weights_root, 13, server.model, perturbed(server.model, seed=3))
    async with httpx.AsyncClient(base_url=server.root, timeout=120) as client:
        assert (await client.post("/pause")).json() == {"paused": True}
        task = asyncio.create_task(client.post("/v1/generate", json=request(server, chat_prompt, temperature=0.0)))
        update_response = await client.post("/update_weights", json={"weight_dir": str(directory), "version": 13})
        assert update_response.status_code == 200, update_response.text
        await asyncio.sleep(0.3)
        assert not task.done()
        assert (await client.post("/resume")).json() == {"paused": False}
        got = parse(await task)
    expected = reference(directory, chat_prompt, got.tokens)
    assert float((torch.tensor(got.logprobs) - expected).abs().max()) <= TOLERANCE


async def test_seeds_are_safe_and_repeatable(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: concurrent long prompts with seeds do not kill a CPU engine; a seed alone decides what is sampled."""
    longest = server.get("/v1/models").json()["data"][0]["max_model_len"] - 16
    prompts = [(chat_prompt * 400)[: longest - i] for i in range(48)]  # far more tokens together than one batch holds
    async with httpx.AsyncClient(base_url=server.root, timeout=120) as client:
        bodies = [request(server, p, seed=7 + i, max_tokens=16) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*(client.post("/v1/generate", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    once, twice = (sample(server, prompts[0], seed=5) for _ in range(2))
    assert once.tokens == twice.tokens
    assert sample(server, prompts[0], seed=6).tokens != once.tokens


def _flipped_bit(server: InferenceServer) -> Path:
    directory = commit(server.weights_root, 22, server.model, perturbed(server.model))
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return directory


def test_bad_weights_are_refused(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: a bad directory is refused with a reason; what was served goes on, to the bit. (What is bad: unit.)"""
    good = commit(server.weights_root, 20, server.model, perturbed(server.model, seed=20))
    assert update(server, good, 20).status_code == 200
    check_undone(server, chat_prompt, _flipped_bit(server), 22, "tensor")
    tensors = perturbed(server.model)
    tensors.pop("model.norm.weight")
    missing = commit(server.weights_root, 23, server.model, tensors)
    check_undone(server, chat_prompt, missing, 23, "model.norm.weight is missing")
    elsewhere = commit(server.output_dir / "elsewhere", 27, server.model, perturbed(server.model))
    check_undone(server, chat_prompt, elsewhere, 27, "outside", 403)


SERVERS: dict[str, tuple[int, dict[str, Any], str]] = {
    "experts": (8, {}, "host"),
    "no memory for a second copy": (0, {"servers_on_host": 1 << 40}, "nowhere"),
    "two ranks": (0, {"tensor_parallel_size": 2}, "host"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "settings", "place"), SERVERS.values(), ids=SERVERS)
def test_other_servers_follow_updates(
    start_server: LaunchServer,
    tmp_path: Path,
    chat_prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
    experts: int,
    settings: dict[str, Any],
    place: str,
) -> None:
    """Contract: the same for experts, which vLLM packs on CPU at the first load only; for a server that loads from the
    directory; and for two ranks that share a layer, each taking its part. A load that fails (also on every rank)
    leaves it with nothing until the next; a version with a wrong byte changes nothing."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # one NUMA node has both ranks
    model = make_tiny_model(tmp_path / "model", experts=experts)
    server = start_server(model, settings, environment=failing_loads(tmp_path))
    check_base_update_reload(server, chat_prompt)
    good = commit(server.weights_root, 20, model, perturbed(model, seed=20))
    assert update(server, good, 20).json()["place"] == place
    check_undone(server, chat_prompt, _flipped_bit(server), 22, "tensor")
    if place == "host":
        check_failing_load(server, chat_prompt)


def test_a_load_that_fails_is_mended_by_the_next(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: after a load that failed half-way the server serves nothing; the next attempt loads the version."""
    check_failing_load(server, chat_prompt)


def check_failing_load(server: InferenceServer, prompt: list[int]) -> None:
    bad = commit(server.weights_root, 925, server.model, perturbed(server.model))
    failed = update(server, bad, 925)
    assert (failed.status_code, "could not be loaded" in failed.text) == (500, True), failed.text
    assert server.get("/weights").status_code == 500
    assert update(server, bad, 925).status_code == 200
    assert difference(server, prompt, bad) <= TOLERANCE


def test_versions_from_the_trainers_memory(server: InferenceServer, tmp_path: Path, chat_prompt: list[int]) -> None:
    """Contract: a version is served as published, also after missed ones; a missing or wrong one changes nothing."""
    config = server.model / "config.json"
    with closing(PublishingTrainer(server.weights_root, 8 << 20, 60.0)) as trainer:
        tensors = perturbed(server.model, seed=20)
        good = trainer.publish(920, tensors, config=config)
        response = update(server, good, 920)
        assert response.status_code == 200, response.text
        assert response.json()["place"] == "host"
        same = commit(tmp_path, 920, server.model, tensors)
        assert difference(server, chat_prompt, same) <= TOLERANCE

        was = served(server)
        wrong = update(server, trainer.publish(921, tensors, config=config, spoil=True), 921)
        assert (wrong.status_code, "the previous weights go on" in wrong.text) == (424, True), wrong.text
        address = trainer.publisher.address()
        stranger = replace(address, token="0" * 32)
        response = update(server, trainer.publish(923, tensors, config=config, address=stranger), 923)
        assert (response.status_code, served(server)) == (424, was)
        message = response.json()["error"]["message"]
        assert "does not know this token" in message
        assert f"from the trainer at 127.0.0.1:{address.port}" in message
        assert difference(server, chat_prompt, same) <= TOLERANCE


def check_undone(
    server: InferenceServer, prompt: list[int], directory: Path, version: int, says: str, status: int = 400
) -> None:
    """An update is refused with a reason, and what was served goes on, to the bit."""
    before, was = sample(server, prompt, temperature=0.0), served(server)
    response = update(server, directory, version)
    assert response.status_code == status, response.text
    assert says in response.json()["error"]["message"]
    assert served(server) == was
    assert sample(server, prompt, temperature=0.0) == before


@pytest.mark.parametrize(
    "body",
    [
        {}, {"weight_dir": "x"}, {"weight_dir": "x", "version": -1}, {"weight_dir": "a\0b", "version": 1},
        {"weight_dir": "a" * 256, "version": 1}, {"weight_dir": "a/" * 2049, "version": 1},
        {"weight_dir": "a" * (10 << 20), "version": 1},
        {"weight_dir": "x", "version": "9" * (10 << 20)},
    ],
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_malformed_requests_are_refused(server: InferenceServer, body: dict[str, Any]) -> None:
    """Contract: a malformed request gets a 4xx in the usual shape; neither it nor the log repeats what is long."""
    log = server.log.stat().st_size
    response = server.post("/update_weights", body)
    assert 400 <= response.status_code < 500
    assert 0 < len(response.json()["error"]["message"]) < 10_000
    assert server.log.stat().st_size - log < 10_000


def test_rollouts_are_sampled_as_by_the_token_route(server: InferenceServer, chat_prompt: list[int]) -> None:
    """Contract: /v1/sample and its alias /v1/generate give the token route's tokens, log-probabilities, finish reason;
    a stop string is found, a request that it does not do or that vLLM refuses is a 400 that says what is wrong."""
    assert sample(server, chat_prompt, "/v1/generate", temperature=0.0) == sample(server, chat_prompt, temperature=0.0)
    seeded = {"temperature": 0.7, "top_k": 5, "seed": 3}
    for params in ({"temperature": 0.0}, seeded, {"temperature": 0.0, "ignore_eos": False}):
        assert sample(server, chat_prompt, "/v1/sample", **params) == sample(server, chat_prompt, **params)
    whole = sample(server, chat_prompt, "/v1/sample", temperature=0.0)
    text = server.post("/detokenize", {"model": str(server.model), "tokens": whole.tokens}).json()["prompt"]
    stopped = sample(server, chat_prompt, "/v1/sample", temperature=0.0, stop=[text[8]])
    assert (stopped.finish_reason, len(stopped.tokens) < len(whole.tokens)) == ("stop", True)
    for wrong, said in (
        ({"n": 2}, "n"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": "x"}, "sampling_params"),
    ):
        refused = server.post("/v1/sample", request(server, chat_prompt, **wrong))
        assert refused.status_code == 400, refused.text
        assert said in refused.json()["error"]["message"]
    long = server.post("/v1/sample", request(server, chat_prompt * 200))
    assert (long.status_code, "maximum model length" in long.text) == (400, True), long.text


@pytest.mark.slow
def test_a_halted_engine_shows_and_a_dead_one_ends_the_server(start_server: LaunchServer, tiny_model: Path) -> None:
    """Contract: while the engine is stopped the server answers (heartbeat) without progress, and goes on when it does;
    a killed engine ends the server, as a failure, where vLLM alone would go on or end with status 0."""
    server = start_server(tiny_model)
    (engine,) = engines(server.pid)

    def status() -> ProcessStatus:
        return read_status(server.output_dir)["inference"]

    until(lambda: status().progress > (status().ready or 0.0), "the engine's pulse")
    os.kill(engine, signal.SIGSTOP)
    halted = time.time() + ASK_SECONDS
    until(lambda: status().heartbeat > halted + 3 * ASK_SECONDS, "a heartbeat of the server")
    assert status().progress <= halted
    assert (status().phase, status().waiting) == ("serving", None)
    os.kill(engine, signal.SIGCONT)
    until(lambda: status().progress > halted + 3 * ASK_SECONDS, "progress after the halt")
    os.kill(engine, signal.SIGKILL)
    assert exit_status(server.pid) == 1
    assert status().outcome == "failed: the engine died"


@pytest.mark.slow
def test_a_key_guards_the_server_and_appears_nowhere(
    start_server: LaunchServer,
    tiny_model: Path,
    chat_prompt: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contract: with a key (here by environment) all routes of the application but two ask for it; it is in no file,
    log or command line. A fault of sampling is answered 500, as often as planned. A requested stop is a success, even
    if a read hangs."""
    key, plan = "a-key-nobody-may-see", tmp_path / "faults.json"
    refuse = {"point": "generate", "process": "inference", "do": "error", "times": 2}
    hang = {"point": "update-read:v99", "process": "inference", "do": "delay", "seconds": 3600}
    plan.write_text(json.dumps([refuse, hang]))
    monkeypatch.setenv("VLLM_API_KEY", key)
    monkeypatch.setenv(faults.ENV, str(plan))
    monkeypatch.setenv(doors.ROUTES, str(tmp_path / "routes.json"))
    server = start_server(tiny_model, {"weights_root": "None"}, module="support.doors")
    bearer = {"headers": {"Authorization": f"Bearer {key}"}}
    doors.check_doors(server, tmp_path / "routes.json", key)
    of_a_run = commit(tmp_path / "somewhere" / "weights", 1, tiny_model, perturbed(tiny_model))
    unseen = {"weight_dir": str(tmp_path / "elsewhere" / "weights" / "step_1"), "version": 1}
    refused = server.post("/update_weights", unseen, **bearer)
    assert (refused.status_code, "need one file system" in refused.text) == (400, True)
    assert server.post("/update_weights", {"weight_dir": str(of_a_run), "version": 1}, **bearer).status_code == 200
    assert server.get("/weights", **bearer).json()["weight_dir"] == str(of_a_run)
    assert "Failed to load weights" not in server.log.read_text()
    body = request(server, chat_prompt)
    answers = [server.post("/v1/sample", body, **bearer).status_code for _ in range(3)]
    assert answers == [500, 500, 200]
    assert server.post("/leave", {}, **bearer).json() == {"leaving": True}
    assert server.get("/weights", **bearer).json()["leaving"] is True
    for pid in (server.pid, *engines(server.pid)):
        assert key.encode() not in cmdline(pid)
    hanging = Thread(
        target=lambda: server.post("/update_weights", {"weight_dir": str(of_a_run), "version": 99}, **bearer)
    )
    hanging.start()
    until(lambda: list(tmp_path.glob("faults.json.inference.1.seen")), "read that hangs")
    os.kill(server.pid, signal.SIGTERM)
    assert exit_status(server.pid) == 0
    hanging.join(60)
    assert read_status(server.output_dir)["inference"].outcome == "stopped"
    for file in server.output_dir.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file


def engines(server: int) -> list[int]:
    below = [process.id.pid for process in table().values() if process.parent == server]
    return [pid for pid in below if b"multiprocessing.resource_tracker" not in cmdline(pid)]


def exit_status(pid: int) -> int:
    """Of a child of this process, which stays to be waited for."""
    until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG), "end of the server")
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    assert status is not None
    return int(status.si_status)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
