"""Adapters: PEFT and transformers compute the same, alone and merged, and nothing else is trained."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prime_rl.config.commands import MergeConfig
from prime_rl.config.trainer import AdamW, LoRAConfig, TrainerModel
from prime_rl.entrypoints.merge import described
from prime_rl.errors import UserError
from prime_rl.launcher.preflight import check_lora, state_memory
from prime_rl.trainer.lora import load_adapter
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.memory import Shape
from prime_rl.trainer.merge import merge
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.packing import collate
from prime_rl.trainer.parallel import World, close_world
from prime_rl.trainer.parameters import is_adapter, named_parameters
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import find_model
from prime_rl.trainer.training_loop import optimizer_step
from prime_rl.trainer.training_state import training_state
from prime_rl.trainer.weight_copy import WeightCopy
from support import architectures
from support import trainer as support

world, tied_model, moe_model = support.world, support.tied_model, support.moe_model
run_training, Make = support.run_training, Callable[..., Policy]
DOCUMENTS = architectures.random_documents([20, 30])


@pytest.fixture
def make(world: World) -> Make:
    """Return what builds a policy, whose adapters are not zero if `trained`."""

    def build(directory: Path, lora: LoRAConfig, *, trained: bool = True, **settings: object) -> Policy:
        policy = build_policy(find_model(str(directory)), TrainerModel(**settings), world, lora=lora)
        with torch.no_grad():
            for name, parameter in named_parameters(policy):
                if trained and is_adapter(name):
                    torch.nn.init.normal_(parameter.to_local(), std=0.1)
        return policy

    return build


def write(policy: Policy, world: World, model: Path, directory: Path, lora: LoRAConfig) -> Path:
    """Write the files of a version."""
    copies = WeightCopy(policy, world, torch.float32, lora=lora)
    copies.copy()
    directory.mkdir()
    copies.write_files(copies.to_host(), find_model(str(model)), directory)
    return directory


def outcome(policy: Policy) -> architectures.Outcome:
    """Of both documents, packed."""
    policy.zero_grad()
    batch = collate(DOCUMENTS, 1)
    with torch.no_grad():
        logprob = policy(batch)[0]
    policy(batch, cross_entropy)[0].backward()
    return architectures.Outcome(logprob, {n: p.grad for n, p in named_parameters(policy) if p.grad is not None})


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_peft_computes_the_same(make: Make, world: World, tied_model: Path, tmp_path: Path, checkpointing: str) -> None:
    """Contract: PEFT loads our files and computes the same, gradients included; only adapters have any."""
    lora = LoRAConfig(rank=4, alpha=12, target_modules=["q_proj", "o_proj", "mlp.down_proj"])
    policy = make(tied_model, lora, activation_checkpointing=checkpointing)
    directory = write(policy, world, tied_model, tmp_path / "adapter", lora)
    ours, theirs = outcome(policy), architectures.transformers_outcome(tied_model, DOCUMENTS, adapter=directory)
    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-5, rtol=0)
    peft = {name.replace(".default", "").removeprefix("base_model.model."): g for name, g in theirs.gradients.items()}
    assert ours.gradients.keys() == peft.keys()
    assert len(peft) == 3 * 2 * len(policy.lm.model.layers)
    for name, gradient in peft.items():
        torch.testing.assert_close(ours.gradients[name].full_tensor(), gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_training_starts_from_an_adapter_of_pefts(make: Make, world: World, tied_model: Path, tmp_path: Path) -> None:
    """Contract: what PEFT saves is what training starts from; all-linear means the same modules."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tied_model), config)
    theirs.save_pretrained(tmp_path)
    lora = LoRAConfig(rank=4, alpha=8, adapter=tmp_path)
    policy = make(tied_model, lora, trained=False)
    load_adapter(policy, tmp_path, world)
    want = architectures.transformers_outcome(tied_model, DOCUMENTS, adapter=tmp_path).logprob
    torch.testing.assert_close(outcome(policy).logprob, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("which", "more"), [("tied_model", {}), ("moe_model", {"experts": True})])
def test_merged_weights_compute_the_same(
    make: Make, world: World, request: pytest.FixtureRequest, tmp_path: Path, which: str, more: dict[str, bool]
) -> None:
    """Contract: the sums that are exported give the log-probabilities of the adapters; so does the scorer of them."""
    model: Path = request.getfixturevalue(which)
    lora = LoRAConfig(rank=8, alpha=16, serve="merged", **more)
    policy = make(model, lora)
    directory = write(policy, world, model, tmp_path / "merged", lora)
    theirs = architectures.transformers_outcome(directory, DOCUMENTS).logprob
    torch.testing.assert_close(outcome(policy).logprob, theirs, atol=1e-5, rtol=0)
    plain = architectures.transformers_outcome(model, DOCUMENTS).logprob
    assert (plain - theirs).abs().max() > 1e-2
    score = ReferenceScorer(policy, world, support.VOCABULARY, torch.float32, torch.bfloat16, "merged").score
    exact = ReferenceScorer(policy, world, support.VOCABULARY, torch.float32, torch.float32, "merged").score
    sums, alone, rounded = (torch.tensor(one().logprobs) for one in (exact(), exact(as_exported=False), score()))
    torch.testing.assert_close(sums, alone, atol=1e-5, rtol=0)
    assert not torch.allclose(rounded, alone, atol=1e-5)


def test_adapters_of_experts_have_a_tensor_for_each(make: Make, world: World, moe_model: Path, tmp_path: Path) -> None:
    """Contract: names and shapes are those of adapters of separate experts; a rank's file starts training again."""
    lora = LoRAConfig(rank=8, alpha=16, experts=True, target_modules=["q_proj"])
    policy = make(moe_model, lora)
    directory = write(policy, world, moe_model, tmp_path / "adapter", lora)
    tensors = load_file(directory / "adapter_model.safetensors")
    experts, sizes = policy.lm.model.layers[0].mlp.experts, policy.lm.config
    for projection, widths in {"gate": (0, 1), "up": (0, 1), "down": (1, 0)}.items():
        both = sizes.hidden_size, sizes.moe_intermediate_size
        for letter, shape in {"A": [8, both[widths[0]]], "B": [both[widths[1]], 8]}.items():
            key = f"base_model.model.model.layers.0.mlp.experts.{{}}.{projection}_proj.lora_{letter}.weight"
            assert [list(tensors[key.format(e)].shape) for e in range(experts.num_experts)] == [shape] * 5
    again = LoRAConfig(**lora.model_dump() | {"adapter": directory})
    other = make(moe_model, again, trained=False)
    load_adapter(other, directory, world)
    assert torch.equal(outcome(policy).logprob, outcome(other).logprob)


def test_only_adapters_are_trained_and_saved(make: Make, tied_model: Path) -> None:
    """Contract: a step changes no weight of the model; neither optimizer nor checkpoint hold anything of it."""
    policy = make(tied_model, LoRAConfig(rank=4), trained=False, dtype="bfloat16")
    plain = {name: p.full_tensor().clone() for name, p in named_parameters(policy)}
    optimizer = build_optimizer(policy, AdamW(lr=0.1))
    outcome(policy)
    optimizer_step(policy, optimizer, 0.1, 1.0)
    for name, parameter in named_parameters(policy):
        assert torch.equal(parameter.full_tensor(), plain[name]) is not is_adapter(name), name
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)
    assert all(is_adapter(name) for name in training_state(policy, optimizer))
    shape = Shape.of(policy.lm)
    assert shape.trained == sum(p.numel() for name, p in named_parameters(policy) if is_adapter(name))
    dry = support.make_config(tied_model, tied_model, lora={"rank": 4})
    assert f"({shape.trained:,} trained and {shape.parameters - shape.trained:,} frozen parameters)" in state_memory(
        dry
    )


def test_dropout_is_the_same_when_a_block_is_computed_again(make: Make, tied_model: Path) -> None:
    """Contract: dropout is drawn in steps alone, and once for a step."""
    found = []
    for level in ("none", "full", "wide"):
        torch.manual_seed(0)
        policy = make(tied_model, LoRAConfig(rank=4, dropout=0.5), activation_checkpointing=level)
        torch.manual_seed(1)
        found.append(outcome(policy))
    for other in found[1:]:
        assert torch.equal(other.logprob, found[0].logprob)
        for name, gradient in other.gradients.items():
            assert torch.equal(gradient.full_tensor(), found[0].gradients[name].full_tensor()), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_porj"]}, "no module q_porj that can be named there; did you mean q_proj?"),
        ({"target_modules": ["lm_head"]}, "no module lm_head"),
        ({"experts": True}, "has no experts"),
        ({"modules_to_save": ["lm_haed"], "serve": "merged"}, "did you mean lm_head?"),
    ],
)
def test_modules_that_cannot_have_adapters_are_named(
    make: Make, tied_model: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        make(tied_model, LoRAConfig(**settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, "has rank 8, not 4: give lora.rank"),
        ({"use_dora": True}, "use_dora = True, which is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = pissa_niter_4, which is not supported"),
        ({"tensor": "x"}, "has a tensor x"),
        ({"missing": True}, "is no directory of an adapter"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    make: Make, world: World, tied_model: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    lora = LoRAConfig(rank=4, adapter=tmp_path / "adapter")
    policy = make(tied_model, lora)
    directory = write(policy, world, tied_model, tmp_path / "adapter", LoRAConfig(rank=4))
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    if "tensor" in change:
        path = directory / "adapter_model.safetensors"
        save_file({**load_file(path), "x": torch.zeros(1)}, path)
    if "missing" in change:
        config.unlink()

    def load() -> None:
        check_lora(lora, str(tied_model))
        load_adapter(policy, directory, world)

    with pytest.raises(UserError, match=message):
        load()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_directory_is_checked(
    make: Make, world: World, moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Contract: `prime-merge` writes what transformers loads, and leaves nothing where it computes something else."""
    lora = LoRAConfig(rank=8, experts=True)
    policy = make(moe_model, lora)
    adapter = write(policy, world, moe_model, tmp_path / "adapter", lora)
    config = MergeConfig(adapter=adapter, output_dir=tmp_path / "out", model={"name": str(moe_model)})
    config.weights.dtype = dtype
    want = outcome(policy).logprob
    close_world()
    assert dtype in merge(config, described(config))
    got = architectures.transformers_outcome(config.output_dir, DOCUMENTS).logprob
    torch.testing.assert_close(got, want, atol=1e-5 if dtype == "float32" else 0.2, rtol=0)
    monkeypatch.setattr(WeightCopy, "_whole", lambda copies, parameter: torch.zeros(parameter.shape))
    config.output_dir = tmp_path / "wrong"
    with pytest.raises(UserError, match="do not compute what the adapter does"):
        merge(config, described(config))
    assert not config.output_dir.exists()
