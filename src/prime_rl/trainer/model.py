"""The policy: a Hugging Face causal language model under FSDP2, with our attention and our head.

Order of construction: meta device → activation checkpointing → per-block compile → fully_shard → memory → each rank loads its own rows.
Masters are float32; the compute dtype is bfloat16 on CUDA and float32 on CPU.
"""

import copy
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.trainer import attention
from prime_rl.trainer.lm_head import TokenLoss, fused_token_loss, logprob_entropy
from prime_rl.trainer.packing import HostBatch
from prime_rl.trainer.parallel import World, rows_of_rank
from prime_rl.trainer.source import Source, one_line

if TYPE_CHECKING:
    from prime_rl.config.trainer import TrainerModel

_WRAPPED = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class MicroBatch:
    """`HostBatch` on the device; see there for the shapes."""

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_index: Tensor
    labels: Tensor
    inv_temperature: Tensor
    streams: Tensor


class Policy(nn.Module):
    """Backbone and head under one root, so that FSDP sees a single forward. `lm` is the transformers model; its own head is never called."""

    def __init__(self, lm: PreTrainedModel, head_chunk: int, compiled: bool, frees_weights: bool) -> None:
        super().__init__()
        self.lm, self.head_chunk, self.compiled, self.frees_weights = lm, head_chunk, compiled, frees_weights

    def forward(self, batch: MicroBatch, token_loss: TokenLoss | None = None) -> tuple[Tensor, Tensor]:
        """The loss [] and metric sums [M] of `token_loss` over the loss tokens, or without one their logprob [L] and entropy [L]."""
        hidden_TH = self.lm.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        ).last_hidden_state[0]
        head = hidden_TH.index_select(0, batch.loss_index), self.lm.lm_head.weight, batch.labels, batch.inv_temperature
        if token_loss is None:
            return logprob_entropy(*head, self.head_chunk, self.compiled)
        return fused_token_loss(*head, batch.streams, token_loss, self.head_chunk, self.compiled)


def compute_dtype(config_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of activations: `auto` is bfloat16 on CUDA and float32 on CPU, where it is as fast and exact."""
    if config_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config_dtype)


def build_policy(source: Source, config: "TrainerModel", world: World, seed: int = 0) -> Policy:
    """Build the sharded policy and give every parameter its value.

    Raises:
        UserError: the backend is absent, the architecture is not one we can train, or the files do not fit the config.
    """
    backend = attention.choose(config.attention, world.device.type)
    kept = attention.register(backend)
    compiled = world.device.type == "cuda" if config.compile is None else config.compile
    with torch.device("meta"):
        try:
            # A copy: transformers writes the dtype into the config it is given, and exports ask for the checkpoint's.
            lm = AutoModelForCausalLM.from_config(
                copy.deepcopy(source.config), dtype=torch.float32, trust_remote_code=source.trust_remote_code
            )
        except ValueError as error:
            raise UserError(f"model {source.name} is not a causal language model: {one_line(error)}") from error
    _check_architecture(lm, source.name)
    lm.set_attn_implementation(attention.NAME)
    lm.train()
    layers = lm.model.layers
    for i, layer in enumerate(layers):
        layers[i] = _checkpointed(layer, config.activation_checkpointing, kept)
        if compiled:
            layers[i].compile(fullgraph=True)
    policy = Policy(lm, config.head_chunk, compiled, config.reshard_after_forward)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config.dtype, world.device),
        reduce_dtype=torch.float32,
        # The default would cast every float32 input to bfloat16: a temperature of 0.7 would arrive as 0.69921875.
        cast_forward_inputs=False,
    )
    for layer in layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=precision, reshard_after_forward=config.reshard_after_forward)
    # Embedding, final norm and head stay in the root unit: tied weights are gathered once, and the head reads its weight inside our forward.
    fully_shard(policy, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the global token count, so gradients are summed, not averaged. Gloo knows no pre-multiplied sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.to_empty(device=world.device)
    lm.tie_weights()
    _initialize_buffers(lm, source.name)
    if source.directory is None:
        _randomize(policy, world, seed)
    else:
        load_weights(policy, source.directory, world)
    return policy


def _check_architecture(lm: PreTrainedModel, name: str) -> None:
    parts = dict(lm.named_children())
    inner = dict(parts["model"].named_children()) if "model" in parts else {}
    head = parts.get("lm_head")
    if not isinstance(inner.get("layers"), nn.ModuleList) or not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"model {name} ({type(lm).__name__}) has not the form `.model.layers` + bias-free `.lm_head` that the trainer needs"
        )


def _checkpointed(layer: nn.Module, level: str, kept: set[Any]) -> nn.Module:
    """`none` | `full` (recompute the block) | `attention` (recompute all of it but the attention kernel)."""
    if level == "none":
        return layer
    if level == "full":
        return checkpoint_wrapper(layer, preserve_rng_state=False)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=contexts)


def named_parameters(policy: Policy) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under their Hugging Face names; a tied head appears once, as the embedding."""
    for name, parameter in policy.lm.named_parameters():
        yield name.replace(_WRAPPED, ""), parameter


def local_rows(parameter: Tensor, world: World) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, and the index of their first row."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    return parameter.to_local().detach(), rows_of_rank(parameter.shape[0], world)[0]


def _initialize_buffers(lm: PreTrainedModel, name: str) -> None:
    """Recompute buffers that no checkpoint carries (rotary frequencies); allocation left them undefined."""
    for buffer in lm.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module in lm.modules():
        if next(module.buffers(recurse=False), None) is not None:
            lm._init_weights(module)
    for key, buffer in lm.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise UserError(f"model {name}: the value of its buffer {key} is not known to transformers")


@torch.no_grad()
def _randomize(policy: Policy, world: World, seed: int) -> None:
    """Random matrices (normal, 0.02), unit norms, zero biases: the same on any number of ranks."""
    for name, parameter in named_parameters(policy):
        local, start = local_rows(parameter, world)
        if parameter.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(world.device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        full = torch.randn(parameter.shape, device=world.device, generator=generator)
        local.copy_(full[start : start + local.shape[0]] * 0.02)


@torch.no_grad()
def load_weights(policy: Policy, directory: Path, world: World) -> None:
    """Read every parameter's rows of this rank from a model directory's safetensors files.

    Raises:
        UserError: a tensor is missing or has another shape, or a file is damaged.
    """
    files = _tensor_files(directory)
    find = _name_finder(files, directory)
    wanted: dict[Path, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters(policy):
        stored = find(name)
        wanted.setdefault(files[stored], []).append((stored, parameter))
    for path, parameters in wanted.items():
        try:
            with safe_open(path, "pt") as file:
                for stored, parameter in parameters:
                    rows = file.get_slice(stored)
                    if list(rows.get_shape()) != list(parameter.shape):
                        raise UserError(
                            f"{path}: {stored} has shape {list(rows.get_shape())}, config.json says {list(parameter.shape)}"
                        )
                    local, start = local_rows(parameter, world)
                    if local.numel():
                        local.copy_(rows[start : start + local.shape[0]])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or unreadable: {one_line(error)}") from error


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor in a model directory."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        found: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"the weights in {directory} are damaged or unreadable: {one_line(error)}") from error


def _name_finder(files: dict[str, Path], directory: Path) -> Callable[[str], str]:
    def find(name: str) -> str:
        # A checkpoint of the backbone alone lacks the "model." prefix; one of a tied model may hold the shared matrix as its head.
        for candidate in (name, name.removeprefix("model.")):
            if candidate in files:
                return candidate
        raise UserError(f"model directory {directory} has no tensor {name}, which its config.json needs")

    return find


def to_device(batch: HostBatch, device: torch.device) -> MicroBatch:
    """Copy a micro-batch to the device. On CUDA through pinned memory, without waiting."""

    def move(array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return MicroBatch(
        move(batch.input_ids),
        move(batch.position_ids),
        move(batch.cu_seqlens),
        batch.max_seqlen,
        move(batch.loss_index),
        move(batch.labels),
        move(batch.inv_temperature),
        move(batch.streams),
    )
