"""Router replay: the experts that an engine chose are those that the trainer computes with, token by token. From a real
engine, over turns and a branch: tests/integration/test_router_replay.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from prime_rl.errors import UserError
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import Document, MicroBatch, collate, to_device
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.rl.data import document
from prime_rl.trainer.router_replay import Routers, chosen_experts, set_up
from prime_rl.transport.rollouts import write_batch
from support import trainer as support

CPU = torch.device("cpu")
LAYERS, EXPERTS, K = 2, 5, 2
ROUTERS = Routers(LAYERS, (0, 1), K, EXPERTS)
LENGTHS = (17, 2, 40, 1, 9)


@contextmanager
def routed(model: Any, choose: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Run transformers' own model with the experts [T, K] that `choose` gives for a layer's probabilities [T, E]."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.T
        probabilities = logits.softmax(-1, dtype=torch.float)
        chosen = choose(next(layer), probabilities)
        weights = probabilities.gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, chosen

    layer = iter(range(LAYERS))
    own, Qwen3MoeTopKRouter.forward = Qwen3MoeTopKRouter.forward, forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Qwen3MoeTopKRouter.forward = own  # type: ignore[method-assign]


def theirs(directory: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model


def random_choice(seed: int, tokens: int) -> np.ndarray:
    """[M, N, K] distinct experts, at random."""
    draw = np.random.default_rng(seed)
    return draw.permuted(np.tile(np.arange(EXPERTS, dtype=np.int16), (LAYERS, tokens, 1)), axis=-1)[..., :K]


def logprobs(policy: Policy, batch: MicroBatch) -> Tensor:
    with torch.no_grad():
        values = policy(to_device(batch, CPU))[0]
    for unit in policy.units:  # its masters again, whose gradients are cleared
        unit.reshard()
    return values


def gradients(policy: Policy, batches: list[MicroBatch]) -> dict[str, Tensor]:
    policy.zero_grad()
    for batch in batches:
        policy(to_device(batch, CPU), cross_entropy)[0].backward()
    return {name: parameter.grad.full_tensor().clone() for name, parameter in named_parameters(policy)}


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("level", ["none", "pointwise", "wide", "attention", "full"])
def test_other_experts_are_computed_with(level, reshard, moe_model, make_policy):
    """Contract: log-probabilities and all gradients, routers' too, are transformers' with the same experts; whatever
    is packed, also for tokens without any; whatever is recomputed in backward. A batch without experts after one
    that has some is computed as before."""
    policy = make_policy(moe_model, activation_checkpointing=level, reshard_after_forward=reshard)
    assert set_up(policy.lm.model.layers, "m") == ROUTERS
    model, plain = theirs(moe_model), collate(support.random_documents(LENGTHS), 1)
    before = logprobs(policy, plain)
    documents = [
        replace(each, experts=None if number == 2 else random_choice(number, each.input_ids.size - number % 2))
        for number, each in enumerate(support.random_documents(LENGTHS))
    ]
    loss, found = torch.zeros(()), []
    for each in documents:
        choice = None if each.experts is None else torch.from_numpy(each.experts.astype(np.int64))

        def choose(layer: int, probabilities: Tensor, choice: Tensor | None = choice) -> Tensor:
            own = probabilities.topk(K).indices
            return own if choice is None else torch.cat([choice[layer], own[choice.shape[1] :]])

        with routed(model, choose):
            logits = model(torch.from_numpy(each.input_ids)[None]).logits[0] / each.temperature
        trained = torch.from_numpy(each.loss_mask).clone()
        trained[0] = False
        labels = trained.nonzero()[:, 0]
        of_labels = logits.log_softmax(-1)[labels - 1, torch.from_numpy(each.input_ids)[labels]]
        found.append(of_labels.detach())
        loss = loss - (of_labels * torch.from_numpy(each.streams[0])[labels]).sum()
    loss.backward()
    batches = [collate(documents[:3], 1, routers=ROUTERS), collate(documents[3:], 1, routers=ROUTERS)]
    torch.testing.assert_close(
        torch.cat([logprobs(policy, batch) for batch in batches]), torch.cat(found), atol=1e-5, rtol=0
    )
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    got = gradients(policy, batches)
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], atol=1e-5, rtol=1e-4, msg=name)
    assert torch.equal(logprobs(policy, plain), before)


@pytest.mark.usefixtures("quick_compiler")
def test_compiled(moe_model, make_policy):
    """Contract: compiled, checkpointed blocks compute with the experts of eager ones, up to bfloat16 rounding."""
    settings = {"dtype": "bfloat16", "activation_checkpointing": "attention"}
    documents = [
        replace(each, experts=random_choice(number, each.input_ids.size))
        for number, each in enumerate(support.random_documents(LENGTHS))
    ]
    batches, found = [collate(documents, 1, routers=ROUTERS), collate(documents, 1)], []
    for compiled in (False, True):
        policy = make_policy(moe_model, compile=compiled, **settings)
        set_up(policy.lm.model.layers, "m")
        found.append([gradients(policy, [batch]) for batch in batches])
    for name, want in found[0][0].items():
        error, effect = (found[1][0][name] - want).norm() / want.norm(), (found[0][1][name] - want).norm() / want.norm()
        assert error < 0.05, f"{name}: {error:.1e}"
        assert effect > 4 * error, name


def test_packed():
    """Contract: each document's experts lie where its tokens do; padding and tokens beyond them have none."""
    documents = [
        Document(np.arange(n), np.ones(n, dtype=bool), 1.0, np.zeros((1, n), dtype=np.float32), experts)
        for n, experts in ((4, random_choice(0, 3)), (2, None), (3, random_choice(1, 3)))
    ]
    chosen = collate(documents, 1, 8, ROUTERS).experts
    assert chosen is not None
    assert (chosen.dtype, chosen.shape) == (torch.int16, (LAYERS, 16, K))
    want = np.full((LAYERS, 16, K), -1)
    want[:, :3], want[:, 6:9] = random_choice(0, 3), random_choice(1, 3)
    assert chosen.numpy().tolist() == want.tolist()
    assert collate(documents, 1).experts is None
    nothing = collate([], 1, 2, ROUTERS).experts
    assert nothing is not None
    assert (nothing == -1).all()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (np.array([[0, 1, 2, 3, 4, 0]], dtype=np.uint8), "6 experts a token, the trainer's model 2 layers with 2 each"),
        (np.array([[0, 1, 2, 5]], dtype=np.uint8), "expert 5, the trainer's model has 5"),
        (np.array([[0, 1, 2, 3], [0, 1, 0, 0]], dtype=np.uint16), "the same expert twice"),
    ],
)
def test_what_no_router_of_the_model_chose_is_refused(rows, says):
    with pytest.raises(UserError, match=f"sample s has .*{says}"):
        chosen_experts(rows, ROUTERS, "s")


@pytest.mark.parametrize(("count", "refused"), [(8, True), (9, False), (11, False)])
def test_a_sample_without_the_experts_of_a_sampled_token_is_refused(count, refused):
    """Contract: nothing trains through experts that the engine did not choose: it computed all up to a sample."""
    sample, mask = support.make_sample(np.random.default_rng(0), "s", 12, 1.0), np.arange(12) == 9
    rows = np.tile(np.arange(LAYERS * K, dtype=np.uint8) % K, (count, 1))
    sample = replace(sample, loss_mask=mask, routed_experts=rows)
    with pytest.raises(UserError, match="sample s has the experts of 8 of 9 computed") if refused else nullcontext():
        document(sample, routers=ROUTERS)


def test_layers_without_experts_are_left_out():
    """Contract: an engine has zeros for them."""
    rows = np.array([[0, 0, 1, 2, 0, 0, 4, 3]] * 2, dtype=np.uint16)
    chosen = chosen_experts(rows, Routers(4, (1, 3), 2, 5), "s")
    assert chosen.tolist() == [[[1, 2]] * 2, [[4, 3]] * 2]


def test_a_run(moe_model, tied_model, tmp_path, run_training):
    """Contract: `router_replay` changes training, even if few samples have experts. A dense model is refused."""
    batches = support.write_rollouts(tmp_path / "replayed", 1)
    norms = []
    for number, sample in enumerate(batches[0]):
        chosen = random_choice(number, len(sample.input_ids) - 1)
        rows = chosen.swapaxes(0, 1).reshape(-1, LAYERS * K).astype(np.uint8)
        batches[0][number] = replace(sample, routed_experts=rows if number else None)
    for name in ("plain", "again"):
        write_batch(tmp_path / name / "rollouts", 0, batches[0])
    for name, replays in (("plain", False), ("again", True)):
        run_training(support.make_config(tmp_path / name, moe_model, max_steps=1, router_replay=replays))
        norms.append(support.metrics(tmp_path / name)[0]["mismatch_kl/all/mean"])
    assert norms[0] != norms[1]
    with pytest.raises(UserError, match="no experts to choose"):
        run_training(support.make_config(tmp_path / "replayed", tied_model, max_steps=1, router_replay=True))
