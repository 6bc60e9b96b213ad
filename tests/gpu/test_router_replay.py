"""Router replay against a real engine: what vLLM says it chose is what it computed with, over turns, cached prefixes
and an update in flight. One server (60 to 130 s on an H100). Needs vLLM's CUDA build."""

import numpy as np
import pytest
import torch

from conftest import launch_server
from prime_rl.config.trainer import TrainerModel
from prime_rl.inference import compat
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.router_replay import set_up
from prime_rl.trainer.source import find_model
from support.replaying import converse, documents_of, errors
from support.serving import make_wide_model

ENGINE = compat.installed_engine()
if not torch.cuda.is_available() or ENGINE is None or ENGINE.device != "cuda":
    pytest.skip("no GPU, or no vLLM for it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("vllm_environment")

CONVERSATIONS, PROMPT, REPLY = 24, 40, 80
NOISE_MEAN, NOISE_MOST = 0.03, 0.5  # nats: kernels of two programs in bfloat16, on the same experts


def test_the_trainer_computes_with_the_engines_experts(tmp_path, world):
    """Contract: with replay the trainer's log-probabilities are the engine's up to kernels' noise, in a second turn and
    a branch, too; without, a token that noise sends to another expert is further off. A request that an update
    interrupts has the experts of all its tokens."""
    model = make_wide_model(tmp_path / "model", 0, experts=32, num_experts_per_tok=4, norm_topk_prob=True)
    draw = np.random.default_rng(0)
    settings = {
        "gpu_memory_utilization": 0.4, "max_model_len": 512, "router_replay": True,
        "vllm": {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 32},
    }  # fmt: skip

    with launch_server(tmp_path / "server", model, settings) as server:
        prompts = draw.integers(0, 256, (CONVERSATIONS, PROMPT)).tolist()
        conversations = converse(server, prompts, REPLY, 400)[:CONVERSATIONS]

    policy = build_policy(find_model(str(model)), TrainerModel(compile=False), world)
    routers = set_up(policy.lm.model.layers, "m")
    documents = documents_of(conversations, routers)
    assert len(documents) == 2 * CONVERSATIONS
    rows = [errors(policy, documents, replayed, world.device) for replayed in (routers, None)]
    for name, row in zip(("replay", "own choice"), rows, strict=True):
        print(f"{name}: |Δ logprob| mean {row[0]:.2e} max {row[1]:.2e}, KL {row[2]:.2e}")
    (mean, most, divergence), (plain_mean, _, plain_divergence) = rows
    assert mean <= NOISE_MEAN
    assert most <= NOISE_MOST
    assert mean < plain_mean
    assert divergence < plain_divergence
