"""For trainer tests: a world of one rank, tiny models on disk, rollouts. Take fixtures with `world = support.world`."""

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from conftest import make_tiny_model
from prime_rl import wait
from prime_rl.config import SFTConfig, TrainerConfig
from prime_rl.config.trainer import TrainerModel
from prime_rl.monitor import read_metrics
from prime_rl.monitor.monitor import metrics_path
from prime_rl.trainer import training_loop
from prime_rl.trainer.lm_head import _differentiated
from prime_rl.trainer.loss import cross_entropy
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.packing import Document, collate, to_device
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.parameters import named_parameters
from prime_rl.trainer.rl import train as rl
from prime_rl.trainer.sft import train as sft
from prime_rl.trainer.source import find_model
from prime_rl.transport.commit import list_steps
from prime_rl.transport.rollouts import Sample, write_batch
from prime_rl.transport.token_stats import read_token_stats
from prime_rl.transport.weights import weights_manifest

VOCABULARY = 288


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), experts=5)


@pytest.fixture
def world() -> Iterator[World]:
    torch.set_num_threads(1)
    yield init_world("cpu", 60)
    close_world()


@pytest.fixture
def make_policy(world: World) -> Callable[..., Policy]:
    def make(directory: Path, **settings: object) -> Policy:
        return build_policy(find_model(str(directory)), TrainerModel(**settings), world)

    return make


def gradients(policy: Policy, groups: list[list[Document]]) -> dict[str, torch.Tensor]:
    """Gradients of the cross-entropy over several micro-batches."""
    policy.zero_grad()
    for group in groups:
        policy(to_device(collate(group, 1), torch.device("cpu")), cross_entropy)[0].backward()
    return {name: p.grad.full_tensor().clone() for name, p in named_parameters(policy)}


def block_gradients(block: nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """A block's output and all its gradients, for one and the same gradient of the output."""
    block.zero_grad()
    inputs = hidden.detach().requires_grad_()
    out = block(inputs)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    assert inputs.grad is not None
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "hidden": inputs.grad, **found}


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile up to the code generation, which takes most of the time: what is traced, and when again, is the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    torch._dynamo.reset()
    _differentiated.cache_clear()
    yield
    _differentiated.cache_clear()


@pytest.fixture
def run_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TrainerConfig | SFTConfig], None]]:
    """Return what trains, RL or SFT, in this process; restore signal handlers and process group; poll waits often."""
    monkeypatch.setattr(wait, "LEAST_POLL_SECONDS", 0.01)
    monkeypatch.setitem(wait.wait.__kwdefaults__, "poll", 0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.set_num_threads(1)

    def run(config: TrainerConfig | SFTConfig) -> None:
        try:
            training_loop.run(config, (sft if isinstance(config, SFTConfig) else rl).make_recipe)
        finally:
            close_world()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def metrics(output_dir: Path, process: str = "trainer") -> list[dict[str, float]]:
    return read_metrics(metrics_path(output_dir, process))


def assert_close_metrics(got: Path, want: Path, steps: int, more: Sequence[str], process: str = "trainer") -> None:
    """Of two runs, to float32 rounding; `more`: names beside those that every trainer has."""
    rows = [metrics(directory, process) for directory in (want, got)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] == list(range(steps))
    for a, b in zip(*rows, strict=True):
        for name in ("loss/mean", "entropy/mean", "optim/grad_norm", *more):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name


def assert_close_weights(got: Path, want: Path) -> None:
    first, second = (load_file(directory / "model.safetensors") for directory in (want, got))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


def hashes(output_dir: Path) -> dict[int, str]:
    """Of every committed version."""
    weights = output_dir / "weights"
    return {step: weights_manifest(weights / f"step_{step}").hash for step in list_steps(weights)}


def make_sample(rng: np.random.Generator, name: str, tokens: int, temperature: float = 0.7) -> Sample:
    """A sample of random tokens, the second half of which was sampled by some policy."""
    mask = np.arange(tokens) >= tokens // 2
    return Sample(
        sample_id=name, group_id=f"group-{name}", task_id=f"task-{name}", env="test", policy_versions=[0],
        input_ids=rng.integers(0, VOCABULARY, tokens).tolist(), loss_mask=mask.tolist(),
        logprobs=(mask * -rng.uniform(1, 6, tokens)).tolist(), advantages=(mask * rng.standard_normal()).tolist(),
        temperature=temperature, reward=float(rng.uniform()),
    )  # fmt: skip


def write_rollouts(output_dir: Path, steps: int, samples: tuple[int, ...] = (6,)) -> list[list[Sample]]:
    """Commit batches for steps 0 … steps - 1, of so many samples each (the last number repeats)."""
    rng = np.random.default_rng(7)
    counts = [samples[min(step, len(samples) - 1)] for step in range(steps)]
    batches = [
        [make_sample(rng, f"{step}-{i}", int(rng.integers(5, 60))) for i in range(count)]
        for step, count in enumerate(counts)
    ]
    for step, batch in enumerate(batches):
        write_batch(output_dir / "rollouts", step, batch)
    return batches


def assert_token_stats(run: Path, step: int, weights: Path, samples: list[Sample]) -> None:
    """The files of a step have what transformers computes of each sampled token in float32, to half precision."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    stats = read_token_stats(run, step, pa.array([sample.sample_id for sample in samples])).to_pylist()
    for sample, row in zip(samples, stats, strict=True):
        ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask)[1:]
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / sample.temperature, -1)
        log_ratio = log_p.gather(1, ids[1:, None])[:, 0] - torch.tensor(sample.logprobs)[1:]
        assert row["sample_id"] == sample.sample_id
        assert row["log_ratios"] == pytest.approx(log_ratio[mask].tolist(), rel=1e-3, abs=1e-4)
        assert row["entropies"] == pytest.approx(-(log_p.exp() * log_p).sum(-1)[mask].numpy(), rel=1e-3)


def make_config(output_dir: Path, model: Path, **settings: object) -> TrainerConfig:
    base = {"output_dir": output_dir, "model": {"name": str(model)}, "device": "cpu", "seq_len": 128}
    return TrainerConfig.model_validate({**base, "optim": {"lr": 1e-3}, "rollout_timeout": 5.0, **settings})


def random_documents(lengths: tuple[int, ...], streams: int = 1) -> list[Document]:
    rng = np.random.default_rng(3)
    return [
        Document(
            rng.integers(0, VOCABULARY, n),
            rng.uniform(size=n) < 0.6,
            float(rng.uniform(0.5, 1.5)),
            rng.standard_normal((streams, n)).astype(np.float32),
        )
        for n in lengths
    ]
