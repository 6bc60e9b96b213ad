"""What tests ask of a real server: to serve a committed version, and to say what it samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import InferenceServer, make_tiny_model
from support.committing import commit_weights

TOLERANCE = 1e-4  # float32 on both sides; another order of summation is all that may differ
TOKENS = 48


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


def perturbed(model: Path, seed: int = 1, by: float = 0.1) -> dict[str, torch.Tensor]:
    """The model's tensors in float32 with noise of so much of their spread: other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, x in tensors.items():
        noise = torch.randn(x.shape, generator=generator) * (x.float().std() if x.numel() > 1 else 1.0) * by
        tensors[name] = (x.float() + noise).contiguous()
    return tensors


def make_wide_model(directory: Path, seed: int, experts: int = 0, **settings: Any) -> Path:
    """A random Qwen3 (`experts`: Qwen3-MoE) of four layers in bfloat16, heads of 128; `seed` chooses its weights."""
    shape: Any = AutoConfig.from_pretrained(make_tiny_model(directory, experts=experts))
    shape.update({"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 128})
    shape.update({"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.06})
    shape.update({**({"moe_intermediate_size": 256} if experts else {}), **settings})
    shape.layer_types = ["full_attention"] * 4
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(shape).to(torch.bfloat16).save_pretrained(directory)
    return directory


def commit(root: Path, version: int, model: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Commit `tensors` as a trainer does."""

    def write(directory: Path) -> None:
        (directory / "config.json").write_bytes((model / "config.json").read_bytes())
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    return commit_weights(root, version, write)


def update(server: InferenceServer, directory: Path, version: int) -> httpx.Response:
    return server.post("/update_weights", {"weight_dir": str(directory), "version": version})


def identity(response: httpx.Response) -> dict[str, Any]:
    return {key: response.json()[key] for key in ("version", "hash")}


def sample(server: InferenceServer, prompt: list[int], path: str = "/inference/v1/generate", **params: Any) -> Sampled:
    return parse(server.post(path, request(server, prompt, **params)))


def request(server: InferenceServer, prompt: list[int], **params: Any) -> dict[str, Any]:
    defaults = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    return {"model": str(server.model), "token_ids": prompt, "sampling_params": defaults | params}


def parse(response: httpx.Response) -> Sampled:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return Sampled(choice["token_ids"], [t["logprob"] for t in choice["logprobs"]["content"]], choice["finish_reason"])


def reference(model: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of `tokens` after `prompt` under the weights in `model`, by transformers in float32."""
    reference_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def difference(server: InferenceServer, prompt: list[int], weights: Path) -> float:
    got = sample(server, prompt, temperature=0.0)
    expected = reference(weights, prompt, got.tokens)
    return float((torch.tensor(got.logprobs) - expected).abs().max())


def served(server: InferenceServer) -> dict[str, Any]:
    response = server.get("/weights")
    assert response.status_code == 200, response.text
    return dict(response.json())
