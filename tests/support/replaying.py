"""Router replay against a real engine: conversations with the experts it chose, and the trainer's error on them."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import torch

from conftest import InferenceServer
from prime_rl.envs.conversation import experts_of
from prime_rl.envs.convert import Turn, samples_of
from prime_rl.orchestrator.samples import expert_rows
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import Document, collate, to_device
from prime_rl.trainer.router_replay import Routers, chosen_experts


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


def converse(server: InferenceServer, prompts: list[list[int]], reply: int, interrupted: int) -> list[list[Turn]]:
    """Of each prompt a turn, a second one, and a branch; and a reply of `interrupted` tokens that an update interrupts,
    which loads the base again, in a pause that keeps requests and clears the cache."""

    def turns(prompt: list[int]) -> list[Turn]:
        one = ask(server, prompt, reply)
        two = ask(server, [*one.ids, 5, 6, 7], reply, one)
        return [one, two, ask(server, [*one.ids, 8], reply, one)]

    with ThreadPoolExecutor(len(prompts)) as threads:
        conversations = list(threads.map(turns, prompts))
        replies = [threads.submit(ask, server, prompt, interrupted) for prompt in prompts]
        time.sleep(0.3)
        server.reset()
        longest = [each.result(timeout=120) for each in replies]
    assert all(len(turn.completion_ids) == interrupted for turn in longest)
    return [*conversations, *([turn] for turn in longest)]


def documents_of(conversations: list[list[Turn]], routers: Routers) -> list[Document]:
    return [
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


@torch.no_grad()
def errors(
    policy: Policy, documents: list[Document], routers: Routers | None, device: torch.device
) -> tuple[float, float, float]:
    """Return mean and largest |Δ| of the trainer's log-probabilities from the engine's, and KL; None: no replay."""
    ratios = []
    for start in range(0, len(documents), 8):
        batch = to_device(collate(documents[start : start + 8], 1, 128, routers), device)
        ratios.append(policy(batch)[0] - batch.streams[0])
    ratio = torch.cat(ratios)
    return ratio.abs().mean().item(), ratio.abs().max().item(), (ratio.exp() - ratio - 1).mean().item()
