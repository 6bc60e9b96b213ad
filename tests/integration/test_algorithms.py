"""Algorithms end to end, real vLLM included: all kinds mixed in one run, and every example as it is shipped."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from conftest import REPOSITORY
from prime_rl.monitor import read_metrics
from prime_rl.transport.commit import list_steps
from prime_rl.transport.rollouts import open_batch
from support.processes import Command

TIMEOUT = 400.0
EXAMPLES = sorted((REPOSITORY / "examples" / "algorithms").glob("*.toml"))


def test_all_kinds_in_one_run(inference_server, tmp_path):
    """Environments by reward, from a teacher, from oneself and from a frozen model feed their parts of one batch; a
    loss of sequences with a reference model trains on it. One server is all models here: the way is what is tested."""
    inference_server.reset()
    run = Path(tempfile.mkdtemp(prefix="run-", dir=inference_server.weights_root))
    url = inference_server.base_url
    teacher = f'teacher = {{ base_url = "{url}" }}'
    kinds = {"reward": 'type = "rloo"', "opd": f'type = "opd"\n{teacher}', "sft": f'type = "sft"\n{teacher}'}
    kinds |= {"opsd": 'type = "opsd"', "echo": 'type = "echo"\nweights = { assistant = 0.5 }'}
    environments = "".join(
        f'[[environments]]\nid = "reverse-text"\nname = "{name}"\n[environments.algorithm]\n{kind}\n'
        for name, kind in kinds.items()
    )
    (tmp_path / "orch.toml").write_text(
        "batch_size = 32\nrollouts_per_example = 2\nseq_len = 256\nfilter_zero_advantage = false\n"
        f'[sampling]\nmax_tokens = 16\n[client]\nbase_url = "{url}"\n[reference]\nbase_url = "{url}"\n{environments}'
    )
    (tmp_path / "train.toml").write_text(
        'seq_len = 256\ndevice = "cpu"\n[loss]\ntype = "gspo"\nkl_coef = 0.1\nentropy_coef = 0.01\n'
    )
    command = [
        "--trainer", "@", tmp_path / "train.toml", "--orchestrator", "@", tmp_path / "orch.toml",
        "--model.name", inference_server.model, "--max-steps", 2, "--output-dir", run,
    ]  # fmt: skip
    with Command("rl", *command, log=tmp_path / "rl.log") as rl:
        rl.succeed(TIMEOUT)
    seen: Counter[str] = Counter()
    for step in range(2):
        batch = open_batch(run / "rollouts" / f"step_{step}")
        for row in batch.rows(range(len(batch))):
            seen[row.env] += 1
            components = {
                "ce": row.ce_weight is not None and bool(row.ce_weight.any()),
                "ref_kl": row.ref_kl_weight is not None and bool(row.ref_kl_weight.any()),
                "rl": bool(row.loss_mask.any()) and (row.rl_weight is None or bool(row.rl_weight.any())),
            }
            wanted = {"opd": {"ref_kl"}, "opsd": {"ref_kl"}, "sft": {"ce"}}.get(row.env, {"rl"})
            assert {name for name, there in components.items() if there} == wanted, row.env
            if row.env == "opd":  # it is scored by who sampled it, with the same weights in the first step
                gap = abs(row.ref_logprobs - row.logprobs)[row.loss_mask]
                assert gap.max() < (0.05 if step == 0 else 5.0)
            if wanted != {"ce"}:
                assert row.ref_logprobs is not None
    assert seen.keys() == kinds.keys()
    rows = read_metrics(run / "metrics" / "trainer.jsonl")
    assert [row["step"] for row in rows] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_runs(example, inference_server, tmp_path):
    """Contract: the configs of examples/algorithms run on a CPU as shipped, but for addresses and size; one server."""
    inference_server.reset()
    run = Path(tempfile.mkdtemp(prefix=f"{example.stem}-", dir=inference_server.weights_root))
    base = tmp_path / "base.toml"
    base.write_text(
        f'seq_len = 256\nmax_steps = 2\ndevice = "cpu"\n[model]\nname = "{inference_server.model}"\n'
        '[trainer.weights]\ndtype = "float32"\n[orchestrator]\nbatch_size = 32\nrollouts_per_example = 8\n'
        f'[orchestrator.sampling]\nmax_tokens = 32\n[orchestrator.client]\nbase_url = "{inference_server.base_url}"\n'
        '[orchestrator.environment]\nid = "reverse-text"\n'
    )
    text = example.read_text().replace("http://localhost:8101", inference_server.base_url)
    (tmp_path / "example.toml").write_text(text)
    command = ["@", base, "@", tmp_path / "example.toml", "--output-dir", run]
    with Command("rl", *command, log=tmp_path / "rl.log") as rl:
        rl.succeed(TIMEOUT)
    assert list_steps(run / "rollouts") == [0, 1]
    assert len(read_metrics(run / "metrics" / "trainer.jsonl")) == 2
