"""On GPUs: several ranks train as one does; grouped experts equal a float32 loop over them, without a wait."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from conftest import make_tiny_model
from prime_rl.monitor import read_metrics
from prime_rl.monitor.monitor import metrics_path
from prime_rl.trainer import moe
from support import trainer as support
from support.forking import on_ranks
from support.processes import REPOSITORY, Command

GPU = torch.device("cuda", 0)
TRAIN = REPOSITORY / "src" / "prime_rl" / "trainer" / "rl" / "train.py"
SECONDS = 300.0


def make_config(experts: int) -> PretrainedConfig:
    """Two layers that every attention backend can compute; the vocabulary is that of the tests' documents, or more."""
    shape = {
        "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 1024, "vocab_size": 2048, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if not experts:
        return Qwen3Config(**shape)
    return Qwen3MoeConfig(**shape, num_experts=experts, num_experts_per_tok=4, moe_intermediate_size=256)


def train(directory: Path, model: Path, ranks: int, replicas: int = 1) -> list[dict[str, float]]:
    """The metrics of three steps on as many GPUs, from the same random weights and samples."""
    settings = {
        "output-dir": directory, "model.name": model, "model.dp-replicate": replicas, "max-steps": 3, "seq-len": 2048,
        "data.fake.batch-size": 64, "data.fake.seq-len": 250, "optim.lr": 1e-3, "dist-timeout": 120,
    }  # fmt: skip
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    command = ("--nproc-per-node", ranks, *rendezvous, TRAIN, "--bench", *arguments)
    # A lent machine may lack what NCCL's multicast needs.
    env = {"NCCL_NVLS_ENABLE": "0"}
    with Command("torchrun", *command, log=directory / "log", module="torch.distributed.run", env=env) as running:
        running.succeed(SECONDS)
    return read_metrics(metrics_path(directory / "bench", "trainer"))


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("kind", ["filesystem", "memory"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO)])
def test_versions_are_what_the_ranks_trained(ranks, kind, tmp_path):
    """As `tests/unit/trainer/test_versions.py`, from pinned buffers: a version is the weights when they were copied."""
    model = make_tiny_model(tmp_path / "model", experts=3)
    run = {"ranks": ranks, "kind": kind, "model": str(model), "root": str(tmp_path), "replicas": 1, "device": "cuda"}
    on_ranks("support.versions:rank", [run], tmp_path / "log", NCCL_NVLS_ENABLE="0")


@TWO
@pytest.mark.parametrize("experts", [0, 16], ids=["dense", "experts"])
def test_two_gpus_equal_one(experts, tmp_path):
    """Three steps of two sharded ranks, and of two replicas, give one rank's losses and gradient norms to a few
    roundings of bfloat16: the ranks pack other micro-batches, so sums are rounded elsewhere."""
    make_config(experts).save_pretrained(tmp_path / "model")
    one, *others = (
        train(tmp_path / f"{ranks}-{replicas}", tmp_path / "model", ranks, replicas)
        for ranks, replicas in ((1, 1), (2, 1), (2, 2))
    )
    for rows in others:
        assert len(rows) == len(one) >= 3
        for row, want in zip(rows, one, strict=True):
            assert row["optim/grad_norm"] == pytest.approx(want["optim/grad_norm"], rel=1e-2)
            assert row["entropy/mean"] == pytest.approx(want["entropy/mean"], rel=1e-3)
            assert row["mismatch_kl/mean"] == pytest.approx(want["mismatch_kl/mean"], rel=2e-2)
            assert row["loss/mean"] == pytest.approx(want["loss/mean"], abs=1e-2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_experts_in_groups(compiled):
    """At the shapes of Qwen3-30B-A3B: grouped products in bfloat16 give the float32 loop's outputs and gradients to a
    few roundings (2^-8 each), the same bits every time, and the host never waits."""
    torch.manual_seed(0)
    shape = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    config = Qwen3MoeConfig(**shape, norm_topk_prob=True, num_hidden_layers=1, vocab_size=64, num_attention_heads=16)
    lm = Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in lm.model.layers[0].mlp.parameters():
            parameter.normal_(0, 0.02)
            parameter.copy_(parameter.bfloat16())  # the same weights in both
    reference, own = lm.to(GPU).model.layers[0].mlp, copy.deepcopy(lm)
    moe.set_up(own, "")
    ours = own.model.layers[0].mlp
    ours.experts.to(torch.bfloat16)
    if compiled:
        ours.compile(fullgraph=True, dynamic=True)
    hidden = torch.randn(1, 3000, 2048, device=GPU).bfloat16()
    support.block_gradients(ours, hidden[:, :1000])
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = support.block_gradients(ours, hidden)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = support.block_gradients(reference, hidden.float())
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        error = float((got[name].float() - tensor).norm() / tensor.norm())
        assert error < 1e-2, f"{name}: {error:.1e}"
    again = support.block_gradients(ours, hidden)
    for name, tensor in got.items():
        assert torch.equal(again[name], tensor), name
