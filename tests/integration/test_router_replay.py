"""Router replay with a real engine on a CPU: the trainer goes through the experts that the engine says it chose."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from conftest import launch_server, make_tiny_model
from prime_rl.config import parse
from prime_rl.config.rl import ParityConfig
from prime_rl.config.trainer import TrainerModel
from prime_rl.launcher import one_server
from prime_rl.trainer import parity_scorer
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import close_world, init_world
from prime_rl.trainer.router_replay import set_up
from prime_rl.trainer.source import find_model
from support.replaying import converse, documents_of, errors

EXPERTS, TOLERANCE = 8, 1e-4  # nats, in float32


@pytest.fixture(scope="module")
def moe_server(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    model = make_tiny_model(root / "model", experts=EXPERTS)
    with launch_server(root / "server", model, {"device": "cpu", "router_replay": True}) as server:
        yield server


def test_the_trainer_computes_with_the_engines_experts(moe_server):
    """Contract: over turns, a branch, requests that run together and an update in flight the choices that come back are
    those of the engine: replayed they give its log-probabilities, others do not."""
    prompts = np.random.default_rng(0).integers(0, 256, (4, 20)).tolist()
    conversations = converse(moe_server, prompts, 16, 120)
    world = init_world("cpu", 60)
    policy = build_policy(find_model(str(moe_server.model)), TrainerModel(), world)
    routers = set_up(policy.lm.model.layers, "m")
    documents = documents_of(conversations, routers)
    assert len(documents) == 3 * len(prompts)
    assert errors(policy, documents, routers, world.device)[1] < TOLERANCE
    wrong = [replace(each, experts=(each.experts + 1) % EXPERTS) for each in documents if each.experts is not None]
    assert errors(policy, wrong, routers, world.device)[0] > 100 * TOLERANCE
    close_world()


def test_parity_with_replay(moe_server, tmp_path):
    """Contract: `rl parity` replays what the server says, and is not sound where that is wrong for one token."""
    words = ["--model.name", str(moe_server.model), "--device", "cpu", "--router-replay", "--replies", "4"]
    config = parse(ParityConfig, [*words, "--client.base-url", moe_server.base_url], {})
    asyncio.run(one_server.sample(config, tmp_path))
    assert parity_scorer.score(config, tmp_path)
    gaps = json.loads((tmp_path / "parity.json").read_text())["gaps"]
    assert all(gap["largest"] < TOLERANCE for gap in gaps.values())
    assert parity_scorer.OWN_CHOICE in gaps
