"""The trainer's reference for the logprob check: it is what a version's files compute; scoring leaves no trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import make_tiny_model
from prime_rl.config import TrainerConfig
from prime_rl.config.trainer import DefaultLoss
from prime_rl.errors import UserError
from prime_rl.trainer.loss import STREAMS, make_loss
from prime_rl.trainer.packing import collate
from prime_rl.trainer.parallel import ToHost, local_part
from prime_rl.trainer.reference_scorer import ReferenceScorer, finite_reference
from prime_rl.trainer.training_loop import forward_backward
from prime_rl.transport.weights import REFERENCE_TOKENS, LogprobReference, reference_tokens, weights_manifest
from support import trainer as support
from support.architectures import build_reference, tiny_config

Run = Callable[[TrainerConfig], None]


def reference(directory: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """What transformers computes in float32 with the files in `directory`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def check(directory: Path) -> None:
    manifest = weights_manifest(directory)
    scored = manifest.reference
    assert scored is not None
    assert scored.tokens == tuple(reference_tokens(support.VOCABULARY))
    assert len(scored.tokens) == REFERENCE_TOKENS
    expected = reference(manifest.files, scored.tokens)
    assert torch.allclose(torch.tensor(scored.logprobs), expected, atol=2e-5), torch.tensor(scored.logprobs) - expected


@pytest.mark.parametrize(
    ("which", "dtype"),
    [("tied", "float32"), ("untied", "bfloat16"), ("experts", "bfloat16"), ("granite", "float32"), ("phi", "bfloat16")],
)
def test_every_version_says_what_its_files_compute(which, dtype, run_training, tied_model, tmp_path):
    """Contract: base, trained and resumed versions alike, also where they are rounded for the export: the prompt's
    log-probabilities are those of the files, to float32's accuracy."""
    if which in ("granite", "phi"):  # a scale, a bias
        model = tmp_path / "model"
        build_reference(tiny_config(which, vocab_size=support.VOCABULARY, tie_word_embeddings=False), model)
        AutoTokenizer.from_pretrained(tied_model).save_pretrained(model)
    else:
        model = make_tiny_model(tmp_path / "model", tied=which == "tied", experts=4 if which == "experts" else 0)
    support.write_rollouts(tmp_path, 4)
    weights = {"dtype": dtype, "keep": 10}
    run_training(support.make_config(tmp_path, model, max_steps=2, weights=weights, ckpt={"interval": 2}))
    resumed = {"interval": 2, "resume_step": 2}
    run_training(support.make_config(tmp_path, model, max_steps=4, weights=weights, ckpt=resumed))
    for version in range(5):
        check(tmp_path / "weights" / f"step_{version}")
    scored = [weights_manifest(tmp_path / "weights" / f"step_{version}").reference for version in range(5)]
    assert len({each.logprobs for each in scored if each}) == 5


@pytest.mark.parametrize("exported", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts", [0, 4])
def test_scoring_leaves_no_trace(experts, exported, world, make_policy, tmp_path):
    """Contract: between two steps it changes no weights or gradients, even rounded; the next forward gathers anew."""
    model = make_tiny_model(tmp_path / "model", experts=experts)
    documents = support.random_documents((20, 30), len(STREAMS))
    loss = make_loss(DefaultLoss())
    found = []
    for scores in (False, True):
        policy = make_policy(model)
        scorer = ReferenceScorer(policy, world, support.VOCABULARY, torch.float32, exported)
        if scores:
            base = scorer.score(as_exported=False)()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.001)  # no longer what bfloat16 can hold
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        if scores:
            first, again = scorer.score(), scorer.score(compiled=True)
            assert first() == again() != base
        assert all(map(torch.equal, policy.parameters(), before))
        sums = forward_backward(policy, [collate(documents, len(STREAMS))], loss, world)
        found.append([sums, *(local_part(p.grad) for p in policy.parameters() if p.grad is not None)])
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.001)
        if scores:
            assert scorer.score(compiled=True)() != first(), "scored with weights of an earlier step"
    assert len(found[0]) > 3
    assert all(map(torch.equal, *found))


def test_weights_that_compute_no_numbers_are_not_committed():
    """Contract: what a step made is not served when it computes no numbers, however finite its gradient was."""
    assert finite_reference((1, 2), ToHost(torch.tensor([-0.5]))) == LogprobReference((1, 2), (-0.5,))
    for bad in (torch.nan, -torch.inf):
        with pytest.raises(UserError, match="fixed prompt"):
            finite_reference((1, 2, 3), ToHost(torch.tensor([-0.5, bad])))
