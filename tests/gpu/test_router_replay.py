"""Router replay against a real engine: what vLLM says that it chose is what it computed with, over turns, cached prefixes and an
update in flight. One server (60 to 130 s on an H100). Needs vLLM's CUDA build."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from conftest import InferenceServer, launch_server, make_tiny_model
from prime_rl.config.trainer import TrainerModel
from prime_rl.envs.conversation import experts_of
from prime_rl.envs.convert import Turn, samples_of
from prime_rl.inference import compat
from prime_rl.orchestrator.samples import expert_rows
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.packing import Document, collate, to_device
from prime_rl.trainer.parallel import World
from prime_rl.trainer.router_replay import chosen_experts, set_up
from prime_rl.trainer.source import find_model

ENGINE = compat.installed_engine()
if not torch.cuda.is_available() or ENGINE is None or ENGINE.device != "cuda":
    pytest.skip("no GPU, or no vLLM for it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("vllm_environment")

CONVERSATIONS, PROMPT, REPLY = 24, 40, 80
NOISE_MEAN, NOISE_MOST = 0.03, 0.5  # nats: kernels of two programs in bfloat16, on the same experts


def make_model(directory: Path) -> Path:
    """A random Qwen3-MoE in bfloat16, 4 layers with 32 experts, 4 of them for each token."""
    make_tiny_model(directory, experts=32)
    shape: Any = Qwen3MoeConfig.from_pretrained(directory)
    shape.update({"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 128})
    shape.update({"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.06})
    shape.update({"moe_intermediate_size": 256, "num_experts_per_tok": 4, "norm_topk_prob": True})
    shape.layer_types = ["full_attention"] * 4
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(shape).to(torch.bfloat16).save_pretrained(directory)
    return directory


def ask(server: InferenceServer, prompt: list[int], tokens: int, extended: Turn | None = None) -> Turn:
    first = 0 if extended is None else len(extended.ids) - 1
    params = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "routed_experts_prompt_start": first}
    body = {"model": str(server.model), "token_ids": prompt, "sampling_params": params, "cache_salt": "v0"}
    answer = httpx.post(f"{server.root}/v1/sample", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    experts = experts_of(choice["routed_experts"])
    return Turn(prompt, choice["token_ids"], logprobs, bytes(len(prompt)), experts=experts, extended=extended)


def test_the_trainer_computes_with_the_engines_experts(tmp_path: Path, world: World) -> None:
    """Contract: with replay the trainer's log-probabilities are the engine's up to the noise of kernels, in a second turn and a
    branch, too; without, a token that noise sends to another expert is further off. A request that an update interrupts has
    the experts of all its tokens."""
    model, draw = make_model(tmp_path / "model"), np.random.default_rng(0)
    settings = {
        "gpu_memory_utilization": 0.4, "max_model_len": 512, "router_replay": True,
        "vllm": {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 32},
    }  # fmt: skip

    def converse(prompt: list[int]) -> list[Turn]:
        one = ask(server, prompt, REPLY)
        two = ask(server, [*one.ids, 5, 6, 7], REPLY, one)
        return [one, two, ask(server, [*one.ids, 8], REPLY, one)]

    with launch_server(tmp_path / "server", model, settings) as server:
        prompts = draw.integers(0, 256, (CONVERSATIONS, PROMPT)).tolist()
        with ThreadPoolExecutor(CONVERSATIONS) as threads:
            conversations = list(threads.map(converse, prompts))
            interrupted = [threads.submit(ask, server, prompt, 400) for prompt in prompts]
            time.sleep(0.3)
            server.reset()  # loads the base again, in a pause that keeps requests and clears the cache
            for each in interrupted:
                assert len(each.result(timeout=120).completion_ids) == 400

    policy = build_policy(find_model(str(model)), TrainerModel(compile=False), world)
    routers = set_up(policy.lm.model.layers, "m")
    documents = [
        Document(
            np.asarray(sample.input_ids, dtype=np.int64),
            np.frombuffer(sample.loss_mask, dtype=np.uint8) != 0,
            1.0,
            np.asarray(sample.logprobs, dtype=np.float32)[None],
            chosen_experts(expert_rows(sample.experts), routers, f"{number}"),
        )
        for number, turns in enumerate(conversations)
        for sample in samples_of(turns)
        if sample.experts is not None
    ]
    assert len(documents) == 2 * CONVERSATIONS
    rows = []
    for replayed in (routers, None):
        errors, divergences = [], []
        for start in range(0, len(documents), 8):
            batch = to_device(collate(documents[start : start + 8], 1, 128, replayed), world.device)
            with torch.no_grad():
                ratio = policy(batch)[0] - batch.streams[0]
            errors.append(ratio.abs())
            divergences.append(ratio.exp() - ratio - 1)
        error, divergence = torch.cat(errors), torch.cat(divergences)
        rows.append((error.mean().item(), error.max().item(), divergence.mean().item()))
        print(
            f"replay {replayed is not None}: |Δ logprob| mean {rows[-1][0]:.2e} max {rows[-1][1]:.2e}, KL {rows[-1][2]:.2e}"
        )
    (mean, most, divergence), (plain_mean, _, plain_divergence) = rows
    assert mean <= NOISE_MEAN
    assert most <= NOISE_MOST
    assert mean < plain_mean
    assert divergence < plain_divergence
