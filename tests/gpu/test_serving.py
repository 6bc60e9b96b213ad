"""Forms of serving that only GPUs show: quantized engines follow bfloat16 versions; ranks that share a model agree.

Each test starts two servers at once (60 to 90 s on an H200). Needs vLLM's CUDA build; PYTHONPATH is enough for us.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import InferenceServer, launch_server
from prime_rl.inference import compat
from support import serving

ENGINE = compat.installed_engine()
if not torch.cuda.is_available() or ENGINE is None or ENGINE.device != "cuda":
    pytest.skip("no GPU, or no vLLM for it", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("vllm_environment")

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPT = [(37 * place + 11) % 256 for place in range(96)]
SAME = 1e-3  # nats at most: the same numbers by the same kernels
NOISE_MEAN, NOISE_MOST = 0.03, 0.3  # nats: bfloat16 against float32, or another order of summation
QUANTIZED_MEAN = 0.25  # nats: 8-bit floats against float32 on a random model
EXPERTS_MEAN, EXPERTS_MOST = 0.1, 2.0  # nats: a token here and there that noise sends to another expert
OTHER_MEAN = 0.5  # nats, at least: another random model


def commit(server: InferenceServer, version: int, model: Path) -> Path:
    """The tensors of `model` as a version that a trainer has committed."""
    return serving.commit(server.weights_root, version, model, load_file(model / "model.safetensors"))


def update(server: InferenceServer, version: int, model: Path) -> None:
    body = {"weight_dir": str(commit(server, version, model)), "version": version}
    answer = server.post("/update_weights", body)
    assert answer.status_code == 200, answer.text


def score(server: InferenceServer, engine: int | None = None) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens but the first."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    body = {"model": str(server.model), "token_ids": PROMPT, "sampling_params": params}
    headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
    answer = httpx.post(f"{server.root}/inference/v1/generate", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    entries = answer.json()["prompt_logprobs"][1:]
    return torch.tensor([entry[str(token)]["logprob"] for token, entry in zip(PROMPT[1:], entries, strict=True)])


def reference(model: Path) -> torch.Tensor:
    """The same by transformers, in float32."""
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = policy(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Any]:
    """Starts servers at the same time: `servers((model, settings), …)`. They share the GPUs."""
    common = {
        "gpu_memory_utilization": 0.25, "enforce_eager": True, "max_model_len": 256,
        "vllm": {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 16},
    }  # fmt: skip
    with ExitStack() as stack:

        def start(*wanted: tuple[Path, dict[str, Any]]) -> Sequence[InferenceServer]:
            def one(number: int) -> InferenceServer:
                model, settings = wanted[number]
                vllm = {**common["vllm"], **settings.get("vllm", {})}  # type: ignore[dict-item]
                settings = {**common, **settings, "vllm": vllm}
                return stack.enter_context(launch_server(tmp_path / f"server-{number}", model, settings))

            with ThreadPoolExecutor(len(wanted)) as threads:
                return list(threads.map(one, range(len(wanted))))

        yield start


def check_close(one: torch.Tensor, other: torch.Tensor, mean: float, most: float) -> None:
    difference = (one - other).abs()
    assert difference.mean() <= mean, difference
    assert difference.max() <= most, difference


@pytest.mark.parametrize("experts", [0, 8])
def test_a_quantized_server_follows_versions_in_bfloat16(tmp_path: Path, servers: Any, experts: int) -> None:
    """Contract: vLLM quantizes every load as at the start: updated from a directory in bfloat16 a server computes
    what one started on these weights does, near the unquantized numbers; given the base again, what it did at first."""
    base, other = (
        serving.make_wide_model(tmp_path / name, seed, experts) for seed, name in enumerate(("base", "other"))
    )
    updated, fresh = servers((base, {"quantization": "fp8"}), (other, {"quantization": "fp8"}))
    before, expected = score(updated), reference(other)
    check_close(before, reference(base), QUANTIZED_MEAN, 10 * QUANTIZED_MEAN)
    assert (before - expected).abs().mean() >= OTHER_MEAN
    update(updated, 1, other)
    check_close(score(updated), score(fresh), SAME, SAME)
    check_close(score(updated), expected, QUANTIZED_MEAN, 10 * QUANTIZED_MEAN)
    updated.reset()
    check_close(score(updated), before, SAME, SAME)


@two_gpus
def test_two_ranks_compute_what_one_does(tmp_path: Path, servers: Any) -> None:
    """Contract: where two GPUs share each layer, each takes its part of a version: both servers agree within noise:
    before, after the first version, which vLLM's loaders load, and after the next one, which recorded copies load."""
    base, *others = (serving.make_wide_model(tmp_path / f"model-{seed}", seed) for seed in range(3))
    one, two = servers((base, {}), (base, {"tensor_parallel_size": 2}))
    check_close(score(two), score(one), NOISE_MEAN, NOISE_MOST)
    for version, other in enumerate(others, 1):
        for server in (one, two):
            update(server, version, other)
        check_close(score(two), score(one), NOISE_MEAN, NOISE_MOST)
        check_close(score(two), reference(other), NOISE_MEAN, NOISE_MOST)
