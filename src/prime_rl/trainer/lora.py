"""LoRA (Hu et al. 2021): the model's weights W are frozen; low-rank updates B·A of them are trained.

A layer with an adapter computes y = x Wᵀ + (alpha / rank) (x Aᵀ) Bᵀ. A is random and B zero at first, so that training
begins with the model itself. W is stored in the compute dtype; the masters of A and B are float32. Files are PEFT's.
Each tenant's adapter has a slot of its own. Letters: S rows, I input and O output width of a layer, R rank, N slots,
E experts.
"""

import difflib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from prime_rl.errors import UserError, user_errors
from prime_rl.trainer import moe
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import StoredTensor, is_adapter, named_parameters, stored_tensors
from prime_rl.transport.weights import ADAPTER_FILE

if TYPE_CHECKING:
    from prime_rl.config.trainer import LoRAConfig

_PREFIX = "base_model.model."  # of names in PEFT's files
GROUPED_RANKS = 8  # grouped matrix products on a GPU read rows in units of 16 bytes

Gather = Callable[[Tensor], Tensor]
"""Gathers a parameter from all ranks."""


@dataclass
class Slots:
    """Assignment of rows to the adapters of a layer. Not grouped: the adapter in slot `active` computes all rows.
    Grouped (GPU, several slots): rows are sorted by slot, and slot n computes rows [end_N[n - 1], end_N[n])."""

    count: int = 1
    grouped: bool = False
    active: int = 0
    end_N: Tensor | None = None  # int32
    assigned: tuple[int, ...] = ()  # the slots in the last call of `assign`

    def assign(self, rows: Mapping[int, int], device: torch.device) -> None:
        """Assign the rows of the next forward. `rows`: row count by slot; if not grouped, of one slot."""
        self.assigned = tuple(rows)
        if not self.grouped:
            (self.active,) = rows
            return
        self.end_N = torch.zeros(self.count, dtype=torch.int32, device=device)
        for slot, count in rows.items():  # by the device alone, so that a CUDA graph may contain it
            self.end_N[slot:] += count


class _Adapter(nn.Module):
    """What adapters of linear layers and of experts have in common."""

    scale: float
    dropout: float
    merged: torch.dtype | None = None  # if set, use W + scale·B·A rounded to this dtype, as the inference engine does

    def set_up(self, config: "LoRAConfig") -> None:
        self.scale, self.dropout = config.alpha / config.rank, config.dropout

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x

    def merge(self, weight: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Return weight [..., O, I] + scale·B·A in float32."""
        return weight.float() + self.scale * (b.float() @ a.float())

    def weights(self) -> Iterator[tuple[Tensor, Callable[[Tensor, Gather], Tensor]]]:
        """Yield each weight that has an adapter, and a function that merges both, given the gathered weight."""
        raise NotImplementedError

    def merged_weights(self) -> list[Tensor]:
        """Return the merged weights as they are exported, in the dtype of the weights."""
        assert self.merged is not None
        sums = [(weight, merge(weight, lambda parameter: parameter)) for weight, merge in self.weights()]
        return [total.to(self.merged).to(weight.dtype) for weight, total in sums]


class LoRALinear(nn.Linear, _Adapter):
    """A frozen linear layer and its adapter in each slot, on the meta device.

    stacked: A [N, R, I] and B [N, O, R] of all slots in the compute dtype, if they are gathered as one tensor each.
    """

    stacked: tuple[Tensor, Tensor] | None = None

    def __init__(self, linear: nn.Linear, config: "LoRAConfig", slots: Slots) -> None:
        width, out = linear.in_features, linear.out_features
        super().__init__(width, out, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.slots = linear.weight, linear.bias, slots

        def thin(width: int, out: int) -> nn.ModuleList:
            return nn.ModuleList(nn.Linear(width, out, bias=False, device="meta") for _ in range(slots.count))

        self.lora_A, self.lora_B = thin(width, config.rank), thin(config.rank, out)
        self.set_up(config)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is not None:
            (weight_OI,) = self.merged_weights()
            return F.linear(x, weight_OI, self.bias)
        out, rows = F.linear(x, self.weight, self.bias), self.drop(x)
        if (end_N := self.slots.end_N) is not None:
            a_NRI, b_NOR = self.stacked or self.stack()
            low_SR = moe.grouped_linear(rows.flatten(0, -2), a_NRI, end_N, False)
            return out + self.scale * moe.grouped_linear(low_SR, b_NOR, end_N, False).view(out.shape)
        a_RI, b_OR = self.pair(self.slots.active)
        low_SR = F.linear(rows, a_RI).flatten(0, -2)
        return torch.addmm(out.flatten(0, -2), low_SR, b_OR.t(), alpha=self.scale).view(out.shape)

    def pair(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return A [R, I] and B [O, R] of a slot."""
        return cast(nn.Linear, self.lora_A[slot]).weight, cast(nn.Linear, self.lora_B[slot]).weight

    def stack(self) -> tuple[Tensor, Tensor]:
        """Return A [N, R, I] and B [N, O, R] of all slots."""
        pairs = [self.pair(slot) for slot in range(self.slots.count)]
        return torch.stack([a_RI for a_RI, _ in pairs]), torch.stack([b_OR for _, b_OR in pairs])

    def weights(self) -> Iterator[tuple[Tensor, Callable[[Tensor, Gather], Tensor]]]:
        a_RI, b_OR = self.pair(0)
        yield self.weight, lambda weight, gather: self.merge(weight, gather(b_OR), gather(a_RI))


class ExpertsLoRA(_Adapter):
    """The adapters of a block's experts, on the meta device.

    The A of the gate and of the up projection are stacked in one parameter, so that one product computes both.
    """

    lora_A: nn.Parameter  # [E, 2 · R, I]: rows of gate_proj, then of up_proj
    lora_gate_B: nn.Parameter  # [E, O, R]
    lora_up_B: nn.Parameter
    lora_down_A: nn.Parameter  # [E, R, I]
    lora_down_B: nn.Parameter  # [E, O, R]

    def __init__(self, experts: Any, config: "LoRAConfig") -> None:
        super().__init__()
        (count, both, hidden), rank = experts.gate_up_proj.shape, config.rank
        shapes = {
            "lora_A": (2 * rank, hidden),
            "lora_gate_B": (both // 2, rank),
            "lora_up_B": (both // 2, rank),
            "lora_down_A": (rank, both // 2),
            "lora_down_B": (hidden, rank),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(count, *shape, device="meta")))
        self._experts = [experts]  # in a list, so that it is no submodule of its own adapter
        self.set_up(config)

    def gate_up(self, rows_SI: Tensor, end_E: Tensor) -> Tensor:
        """Return what the adapters add to gate and up [S, 2 · O], of rows that are sorted by expert."""
        low_S2R = moe.grouped_linear(self.drop(rows_SI), self.lora_A, end_E, False)
        halves = zip(low_S2R.chunk(2, -1), (self.lora_gate_B, self.lora_up_B), strict=True)
        return self.scale * torch.cat([moe.grouped_linear(low, b, end_E, False) for low, b in halves], -1)

    def down(self, rows_SI: Tensor, end_E: Tensor) -> Tensor:
        """Return what the adapters add to the down projection [S, O]."""
        low_SR = moe.grouped_linear(self.drop(rows_SI), self.lora_down_A, end_E, False)
        return self.scale * moe.grouped_linear(low_SR, self.lora_down_B, end_E, False)

    def weights(self) -> Iterator[tuple[Tensor, Callable[[Tensor, Gather], Tensor]]]:
        (experts,) = self._experts

        def gate_up(weight: Tensor, gather: Gather) -> Tensor:
            both_a, both_b = gather(self.lora_A).chunk(2, 1), (gather(self.lora_gate_B), gather(self.lora_up_B))
            halves = zip(weight.chunk(2, 1), both_b, both_a, strict=True)
            return torch.cat([self.merge(half, b, a) for half, b, a in halves], 1)

        b, a = self.lora_down_B, self.lora_down_A
        yield experts.gate_up_proj, gate_up
        yield experts.down_proj, lambda weight, gather: self.merge(weight, gather(b), gather(a))


# ---- a model's adapters


def add_adapters(lm: PreTrainedModel, config: "LoRAConfig", name: str, dtype: torch.dtype, slots: Slots) -> None:
    """Freeze a model on the meta device, its weights in `dtype` (routers stay float32), and add what is trained.

    Raises UserError if a module does not exist, or cannot have an adapter.
    """
    routers = set(moe.router_parameters(lm))
    for parameter in lm.parameters():
        parameter.requires_grad_(False)
        if parameter not in routers:
            parameter.data = parameter.data.to(dtype)
    linear = {
        path: module
        for path, module in lm.model.layers.named_modules(prefix="model.layers")
        if type(module) is nn.Linear and module.weight not in routers
    }
    targets = (
        linear
        if config.target_modules == "all-linear"
        else _named(linear, config.target_modules, "target_modules", name)
    )
    for path in targets:
        lm.set_submodule(path, LoRALinear(linear[path], config, slots))
    blocks = moe.moe_blocks(lm) if config.experts else []
    for _, _, experts in blocks:
        gated = getattr(experts, "has_gate", False) and type(experts)._apply_gate is _default_apply_gate
        if not gated or experts.is_transposed or experts.has_bias:
            raise UserError(
                f"lora.experts: the experts of model {name} ({type(experts).__name__}) can have no adapters"
            )
        experts.lora = ExpertsLoRA(experts, config)
    if config.experts and (not blocks or config.rank % GROUPED_RANKS):
        why = f"needs a rank that is a multiple of {GROUPED_RANKS}" if blocks else f"model {name} has no experts"
        raise UserError(f"lora.experts: {why}")
    modules = {
        path: module for path, module in lm.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    for path in _named(modules, config.modules_to_save, "modules_to_save", name):
        for parameter in modules[path].parameters(recurse=False):
            parameter.requires_grad_(True)
            parameter.data = parameter.data.float()


def _named(modules: Mapping[str, nn.Module], names: Sequence[str], option: str, model: str) -> list[str]:
    """Return the paths of modules that are named by path or by its last parts. Raises UserError if there is none."""
    chosen: list[str] = []
    for name in names:
        paths = [path for path in modules if path == name or path.endswith(f".{name}")]
        if not paths:
            last = sorted({path.rpartition(".")[2] for path in modules})
            near = difflib.get_close_matches(name, last, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(last)}"
            raise UserError(f"lora.{option}: model {model} has no module {name} that can be named there; {hint}")
        chosen += paths
    return chosen


def adapters(policy: nn.Module) -> list[_Adapter]:
    """Return the adapters of a policy's layers."""
    return [module for module in policy.modules() if isinstance(module, _Adapter)]


@contextmanager
def merged(policy: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Compute meanwhile with merged weights that are rounded to `dtype` (None: with the adapters as they are)."""
    for adapter in adapters(policy):
        adapter.merged = dtype
    try:
        yield
    finally:
        for adapter in adapters(policy):
            adapter.merged = None


# ---- values and files


def adapter_tensors(policy: nn.Module) -> Iterator[StoredTensor]:
    """Yield what PEFT's file holds of a policy: its adapters, an expert's each for itself, and whole modules."""
    for name, parameter in named_parameters(policy):
        if not is_adapter(name):
            continue
        if parameter.ndim == 2:
            yield StoredTensor(_PREFIX + name, list(parameter.shape), parameter)
            continue
        path, _, kind = name.rpartition(".lora.lora_")
        letter, rows = kind[-1], parameter.shape[1]
        parts = {"A": ["gate_proj", "up_proj"]}.get(kind, [f"{kind[:-2]}_proj"])
        for expert in range(len(parameter)):
            for number, part in enumerate(parts):
                rows_of = slice(number * rows // len(parts), (number + 1) * rows // len(parts))
                shape = [rows // len(parts), parameter.shape[2]]
                full = f"{_PREFIX}{path}.{expert}.{part}.lora_{letter}.weight"
                yield StoredTensor(full, shape, parameter, (expert, rows_of))
    if not any(each.requires_grad and not is_adapter(name) for name, each in named_parameters(policy)):
        return
    for tensor in stored_tensors(policy):
        if tensor.parameter.requires_grad:
            yield StoredTensor(_PREFIX + tensor.name, tensor.shape, tensor.parameter, tensor.index)


@torch.no_grad()
def initialize(policy: nn.Module, world: World, seed: int) -> None:
    """Fill A with uniform(-1, 1) / √I, as PEFT does, and B with zeros, alike for any number of ranks and any device."""
    draw = torch.Generator()
    for tensor in adapter_tensors(policy):
        if not is_adapter(tensor.name):
            continue
        local, start = tensor.local(world)
        local.zero_()
        if tensor.name.endswith("lora_A.weight") and local.numel():
            draw.manual_seed((seed * 1_000_003 + zlib.crc32(tensor.name.encode())) % 2**63)
            full = torch.empty(tensor.shape).uniform_(-1, 1, generator=draw) / tensor.shape[-1] ** 0.5
            local.copy_(full[start : start + local.shape[0]])


@torch.no_grad()
def load_adapter(policy: nn.Module, directory: Path, world: World) -> None:
    """Read this rank's rows of an adapter to start from. UserError: it is damaged, or of other modules or shapes."""
    path, tensors = directory / ADAPTER_FILE, {tensor.name: tensor for tensor in adapter_tensors(policy)}
    with user_errors(f"{path} is damaged or unreadable", SafetensorError, OSError), safe_open(path, "pt") as file:
        if different := sorted(tensors.keys() ^ {*file.keys()}):
            what = "has no" if different[0] in tensors else "has a"
            raise UserError(
                f"lora.adapter: {path} {what} tensor {different[0]}: give the lora.target_modules, lora.experts and "
                "lora.modules_to_save that it was made with"
            )
        for tensor in tensors.values():
            tensor.read(path, file, world)


def peft_config(policy: nn.Module, config: "LoRAConfig", model: str) -> dict[str, Any]:
    """Return the adapter_config.json of a policy's adapters beside the model of this name."""
    names = {tensor.name.split(".")[-3] for tensor in adapter_tensors(policy) if is_adapter(tensor.name)}
    targets = sorted(names) if config.target_modules == "all-linear" else config.target_modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted({*names, *targets}) if config.experts else targets,
        "modules_to_save": config.modules_to_save or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
