"""The RL trainer's loop on a GPU: no waits of the host, no recompiles, right versions, a resumed run that goes on."""

import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from conftest import make_tiny_model
from prime_rl.config import TrainerConfig
from prime_rl.config.trainer import AdamW, TrainerModel
from prime_rl.monitor import Status
from prime_rl.trainer import training_loop as loop
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import World, close_world, local_part
from prime_rl.trainer.parameters import stored_tensors
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.report import Report
from prime_rl.trainer.rl.train import make_recipe
from prime_rl.trainer.shared_training import SharedTrainer
from prime_rl.trainer.source import find_model
from prime_rl.trainer.training_state import HostCopy, State
from prime_rl.transport import tenants
from prime_rl.transport.commit import list_steps
from prime_rl.transport.rollouts import write_batch
from prime_rl.transport.weights import verify_weights
from support import trainer as support
from support.versions import assert_equal, tensors_of

DEVICE = "cuda"
run_training = support.run_training
Run = Callable[[TrainerConfig], None]
SEQ_LEN, STEPS, LR = 2048, 6, 1e-4
# Tokens of every sample of a step. Several micro-batches, of many documents or of a single one, full or nearly empty.
LENGTHS = [
    [300, 1500, 700, 40, 900, 1200, 333],
    [800, 17, 1900, 650, 64, 64],
    [1024, 1000, 5, 2040],
    [2048, 700],
    [64] * 40,
    [9, 30],
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers as wide as Qwen3-0.6B's, with the bytes as vocabulary, in float32."""
    directory = make_tiny_model(tmp_path_factory.mktemp("model"))
    shape = Qwen3Config.from_pretrained(directory)
    shape.update({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "head_dim": 128})
    shape.update({"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096})
    shape.layer_types = ["full_attention"] * 4
    shape.initializer_range = 0.02
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def compile_anew() -> None:
    torch._dynamo.reset()
    counters.clear()


def write_rollouts(output_dir: Path, steps: int = STEPS) -> None:
    rng = np.random.default_rng(1)
    for step, lengths in enumerate(LENGTHS[:steps]):
        samples = [support.make_sample(rng, f"{step}-{i}", tokens) for i, tokens in enumerate(lengths)]
        write_batch(output_dir / "rollouts", step, samples)


def config(output_dir: Path, directory: Path, **settings: Any) -> TrainerConfig:
    base = {"device": DEVICE, "seq_len": SEQ_LEN, "max_steps": STEPS, "async_level": STEPS, "optim": {"lr": LR}}
    model = {"name": str(directory), **settings.pop("model", {})}
    rest = {"output_dir": output_dir, "weights": {"keep": None, "transport": "filesystem"}, "rollout_timeout": 5.0}
    return TrainerConfig.model_validate({**base, **rest, "model": model, **settings})


def version(output_dir: Path, number: int) -> dict[str, Tensor]:
    return tensors_of(output_dir / "weights" / f"step_{number}")


class Watch:
    """What a run does: graphs compiled and waits for the device until each step begins, and the weights after each
    update, cloned on the device without waiting for it."""

    def __init__(self, patch: pytest.MonkeyPatch, caught: list[warnings.WarningMessage]) -> None:
        self.graphs: list[int] = []
        self.waits: list[int] = []
        self.weights: list[dict[str, Tensor]] = []
        step, update = Status.step, loop.optimizer_step

        def begin(status: Status, number: int) -> None:
            self.graphs.append(counters["stats"]["unique_graphs"])
            self.waits.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in caught))
            step(status, number)

        def change(policy: torch.nn.Module, *rest: Any) -> Tensor:
            norm = update(policy, *rest)
            with torch.no_grad():
                self.weights.append({t.name: t.parameter.to_local().clone() for t in stored_tensors(policy)})
            return norm

        patch.setattr(Status, "step", begin)
        patch.setattr(loop, "optimizer_step", change)


@pytest.fixture(scope="session")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watch]:
    """A run of six steps, watched."""
    output_dir = tmp_path_factory.mktemp("whole")
    write_rollouts(output_dir)
    torch._dynamo.reset()
    counters.clear()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch = Watch(patch, caught)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loop.run(config(output_dir, model), make_recipe)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return output_dir, watch


def test_the_host_does_not_wait(whole):
    """Once it is warm, no step waits for the device, as far as torch notices: it does not notice the wait for the event
    by which the outcome of the step before is read."""
    assert len(set(whole[1].waits[2:])) == 1


def test_nothing_is_compiled_again(whole):
    """All is compiled before the first step: one document, forty, a few tokens, a full micro-batch."""
    graphs = whole[1].graphs
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs == [graphs[0]] * STEPS


def test_versions_are_what_was_trained(whole):
    """Every version holds the bytes of the weights after its step, copied while the next step was under way."""
    output_dir, watch = whole
    assert list_steps(output_dir / "weights") == list(range(STEPS + 1))
    for step, weights in enumerate(watch.weights):
        verify_weights(output_dir / "weights" / f"step_{step + 1}")
        assert_equal(version(output_dir, step + 1), {name: tensor.cpu() for name, tensor in weights.items()})
    assert not torch.equal(*(version(output_dir, number)["model.embed_tokens.weight"] for number in (1, 2)))


def test_a_saved_state_is_that_of_its_step(run_training, model, tmp_path, monkeypatch):
    """What is copied for a checkpoint beside the next step is copied before that step changes it, however slowly."""
    take = HostCopy.take

    def slow(copies: HostCopy, state: State) -> State:
        with torch.cuda.stream(copies._stream):
            torch.cuda._sleep(1_000_000_000)  # cycles: some 0.5 s
        return take(copies, state)

    monkeypatch.setattr(HostCopy, "take", slow)
    write_rollouts(tmp_path)
    run_training(config(tmp_path, model, max_steps=4, recovery_interval=3, model={"compile": False}))
    weights = version(tmp_path, 3)
    name = "model.embed_tokens.weight"
    state = load_file(tmp_path / "recovery" / "step_3" / "state" / "rank_0.safetensors")
    assert torch.equal(state[f"model.lm.{name}"], weights[name])
    assert not torch.equal(weights[name], version(tmp_path, 4)[name])


def test_the_logprob_check_follows_the_weights(model: Path, world: World) -> None:
    """From the third version on a CUDA graph computes the reference: the same numbers, of the weights as they are. A
    model that waits for the device is scored without one."""
    policy = build_policy(find_model(str(model)), TrainerModel(), world, tokens=SEQ_LEN, optim=AdamW())
    vocabulary, boundaries = policy.lm.config.vocab_size, policy.boundaries

    def scorer() -> ReferenceScorer:
        return ReferenceScorer(policy, world, vocabulary, torch.bfloat16, torch.bfloat16)

    def wait(*arguments: Any) -> Any:
        torch.ones(1, device=world.device).item()
        return boundaries(*arguments)

    replaying, plain, waiting = scorer(), scorer(), scorer()
    plain._replays = False
    torch.manual_seed(0)
    for parameter in policy.parameters():
        torch.nn.init.normal_(local_part(parameter), std=0.02)
    seen = set()
    for _ in range(4):
        want = plain.score(compiled=True)().logprobs
        assert replaying.score(compiled=True)().logprobs == pytest.approx(want, abs=1e-3)
        policy.boundaries = wait
        assert waiting.score(compiled=True)().logprobs == pytest.approx(want, abs=1e-3)
        policy.boundaries = boundaries
        seen.add(want)
        with torch.no_grad():
            for parameter in policy.parameters():
                local_part(parameter).mul_(1.1)
    assert len(seen) == 4
    assert replaying._graph is not None
    assert waiting._graph is None


def test_tenants_are_trained_together(
    run_training: Run, world: World, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of several tenants in one product give each the adapter that it gets alone, to rounding, and
    nothing is compiled for another mixture of them."""
    every: dict[str, Any] = {"lora": {"rank": 16}, "seq_len": 2 * SEQ_LEN}
    settings: list[dict[str, Any]] = [{"seed": seed, "seq_len": SEQ_LEN, "max_steps": STEPS} for seed in (1, 2)]
    shared = tmp_path / "shared"
    deployment = config(shared, model, **every, tenants={"slots": 4}, max_steps=None, recovery_interval=1)
    gradients, mixtures, graphs = SharedTrainer._gradients, [], []

    def compute(trainer: SharedTrainer, parts: Any) -> Any:
        graphs.append(counters["stats"]["unique_graphs"])
        mixtures.append([tenant.name for tenant, _ in parts])
        return gradients(trainer, parts)

    monkeypatch.setattr(SharedTrainer, "_gradients", compute)
    report = Report(deployment, "trainer", world, recover=True)
    trainer = SharedTrainer(deployment, world, report)
    for own in settings:
        directory = tenants.tenant_dir(shared, f"t{own['seed']}")
        write_rollouts(directory)
        tenants.ask_to_join(directory, own | {"optim": {"lr": LR}, "async_level": STEPS})
    trainer.run(lambda: not tenants.joins(shared))
    report.status.close()
    assert max(map(len, mixtures)) > 1
    assert graphs == [graphs[0]] * len(graphs)
    close_world()
    for own in settings:
        alone = tmp_path / f"alone-{own['seed']}"
        write_rollouts(alone)
        run_training(config(alone, model, **every | own))
        want, got = (
            load_file(root / "weights" / f"step_{STEPS}" / "adapter_model.safetensors")
            for root in (alone, tenants.tenant_dir(shared, f"t{own['seed']}"))
        )
        for name, tensor in want.items():
            off = (got[name].float() - tensor.float()).norm() / tensor.float().norm()
            assert off < 0.1, f"{name}: {off}"
