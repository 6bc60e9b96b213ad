"""Layers that carry a state from token to token, or convolve over them: a packed row's documents do not see each other.

Whatever the family (gated delta rules, selective scans, short convolutions), transformers' module is called once per
document, so that no state can reach the next one; all else computes the whole row. On a GPU in 16 bits it is called
once per row, and compiled with the layer, if a trial shows that its kernels take several documents at once and give
what torch gives for each. T tokens, D documents, N chunks.
"""

import sys
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import cache, partial
from inspect import signature
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from prime_rl.errors import one_line
from prime_rl.trainer.parallel import World, on_main
from prime_rl.trainer.recurrent_kernels import AT_ONCE, CHUNK

_ATTENTION = ("cu_seqlens", "max_seqlen")  # arguments of our attention, which some modules would take for their own
_TRIAL = (70, 1, 64, 1961, 2000)  # tokens of the documents that kernels are tried with, and tuned for
_LOUD, _NEAR = 64.0, 0.03  # times a document's values, for others to see; how far from float32, in root mean squares


def split_documents(lm: PreTrainedModel, dtype: torch.dtype, world: World) -> tuple[set[nn.Module], Callable[..., Any]]:
    """Let the mixers of every layer keep the documents of a row apart, and say how. Returns them, and what gives the
    arguments that every layer needs: `on_device` if they take all documents at once."""
    kinds = {type(mixer): mixer for mixer in mixers(lm.model.layers)}
    if not kinds:
        return set(), lambda boundaries, cu_seqlens: {}
    width = lm.config.get_text_config().hidden_size
    trials = (why_one_by_one(mixer, width, dtype, world.device) for mixer in kinds.values())
    reason = on_main(world, lambda: next(filter(None, trials), None))
    for layer in lm.model.layers:
        lengths: list[int] = []  # of the documents that the layer computes now; none: the row is one document
        if reason and mixers(layer):
            # Also in recomputation during backward, which passes that micro-batch's arguments.
            layer.register_forward_pre_hook(partial(_take_lengths, lengths), with_kwargs=True)
        for mixer in mixers(layer):
            if reason:
                mixer.forward = partial(_one_by_one, mixer.forward, lengths)
            else:
                mixer.__class__ = _packed(type(mixer))  # type: ignore[arg-type]
    if world.is_main:
        way = f"one document of a row at a time: {reason}" if reason else "all documents of a row at once"
        logger.info("recurrent layers: {} compute {}", ", ".join(sorted(kind.__name__ for kind in kinds)), way)
    return {*mixers(lm.model.layers)}, on_host if reason else on_device


def mixers(layer: nn.Module) -> list[nn.Module]:
    """Return a layer's outermost modules that have a Conv1d or whose `layer_type` is linear attention."""
    outermost: list[nn.Module] = []
    for child in layer.children():
        convolves = any(isinstance(part, nn.Conv1d) for part in child.children())
        if convolves or getattr(child, "layer_type", None) == "linear_attention":
            outermost.append(child)
        else:
            outermost += mixers(child)
    return outermost


def projected_width(layer: nn.Module) -> int:
    """Sum the output widths of all linear layers in a layer's mixers; 0 without mixers."""
    parts = [part for mixer in mixers(layer) for part in mixer.modules()]
    return sum(part.out_features for part in parts if isinstance(part, nn.Linear))


def kept_floats(layer: nn.Module) -> int:
    """What the mixers keep of a token beside that, in float32: measured if compiled, else guessed from the formulas."""
    width = projected_width(layer)
    return width // 4 if any("at_once" in vars(type(mixer)) for mixer in mixers(layer)) else width * 8


def without(module: nn.Module, mixers: Collection[nn.Module]) -> list[nn.Module]:
    """Return the largest submodules that hold matrices but no mixer: the module itself, if it has none."""
    if module in mixers:
        return []
    if not any(part in mixers for part in module.modules()):
        return [module] if any(parameter.ndim > 1 for parameter in module.parameters()) else []
    return [part for child in module.children() for part in without(child, mixers)]


def on_host(boundaries: npt.NDArray[np.int32], _: Tensor) -> dict[str, Tensor]:
    """Return the layers' argument with documents' offsets [D + 1] on the host, read without a sync."""
    offsets = torch.from_numpy(boundaries)
    torch._dynamo.maybe_mark_dynamic(offsets, 0)
    return {"boundaries": offsets}


def on_device(boundaries: npt.NDArray[np.int32], cu_seqlens: Tensor) -> dict[str, Tensor]:
    """Return the same on the device, and each token's document [1, T], both by transformers' names, and each chunk's
    document and its number in it [N, 2]. They are computed there: a copy would make the host wait for the stream."""
    tokens = torch.arange(int(boundaries[-1]), device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens, tokens, right=True, out_int32=True)[None]
    at = torch.arange(int((-(-np.diff(boundaries) // CHUNK)).sum()), device=cu_seqlens.device)
    counts = -(-cu_seqlens.diff() // CHUNK)
    totals = counts.cumsum(0)
    document = torch.searchsorted(totals, at, right=True)
    chunks = torch.stack([document, at - (totals - counts)[document]], 1).int()
    arguments = {"cu_seq_lens_q": cu_seqlens.clone(), "chunk_indices": chunks, "seq_idx": documents}
    for tensor in arguments.values():
        torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 1 if tensor is documents else 0)
    return arguments


def _take_lengths(lengths: list[int], layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    boundaries = kwargs.pop("boundaries", None)
    lengths[:] = [] if boundaries is None else boundaries.diff().tolist()
    return args, kwargs


def _one_by_one(forward: Callable[..., Any], lengths: list[int], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` once per document. Arguments [1, T, …] are split and such results joined; other arguments go to
    every call, other results become None: layers use none."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _ATTENTION}
    if len(lengths) < 2:
        return forward(*args, **kwargs)

    def has_tokens(leaf: Any, tokens: int) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == tokens

    leaves, structure = tree_flatten((args, kwargs))
    split = [leaf.split(lengths, 1) if has_tokens(leaf, sum(lengths)) else [leaf] * len(lengths) for leaf in leaves]
    results = []
    for document in zip(*split, strict=True):
        document_args, document_kwargs = tree_unflatten(list(document), structure)
        leaves, out_structure = tree_flatten(forward(*document_args, **document_kwargs))
        results.append(leaves)
    joined = [
        torch.cat(parts, dim=1) if all(map(has_tokens, parts, lengths)) else None
        for parts in zip(*results, strict=True)
    ]
    return tree_unflatten(joined, out_structure)


@cache  # with a forward of each mixer's own, layers would not share a graph
def _packed(kind: Any) -> Any:
    """The class of mixers that take all documents at once. In the file of `kind` the functions that compute along a row
    are replaced by ours, which trace without a graph break; without documents (`seq_idx`) they call the original."""
    names, taken = vars(sys.modules[kind.__module__]), signature(kind.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for name in AT_ONCE.keys() & names.keys():
        if not isinstance(names[name], partial):
            names[name] = partial(AT_ONCE[name], names[name])

    def forward(mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Without documents, one is computed as the model does, and compared (`policy_check.py`).
        assert kwargs.get("seq_idx") is not None or not torch.is_grad_enabled(), "the layer did not hand on documents"
        named = {name: x for name, x in kwargs.items() if name not in _ATTENTION and (takes_all or name in taken)}
        return kind.forward(mixer, *args, **named)

    return type(kind.__name__, (kind,), {"forward": forward, "at_once": True})


def why_one_by_one(mixer: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """None if `mixer` takes several documents at once, else why not."""
    if device.type != "cuda" or dtype.itemsize > 2:
        return "kernels for several need a GPU and 16 bits"
    logger.info("recurrent layers: kernels of {} are tried; they are tuned once for each GPU", type(mixer).__name__)
    return try_at_once(mixer, width, dtype, device)


def try_at_once(mixer: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Try a copy of `mixer` (on the meta device, not changed yet) with random weights. None: of several documents at
    once it computes, forward and backward, what torch's own operations compute of each in float32, whatever the others
    are. Else why not."""
    draw = torch.Generator(device).manual_seed(0)
    trial = deepcopy(mixer).to_empty(device=device).to(dtype).train()
    for tensor in filter(Tensor.is_floating_point, (*trial.parameters(), *trial.buffers())):
        # Vectors (norms, biases, logarithms of decays) lie around -3, so that states outlive chunks.
        tensor.detach().normal_(-3.0 if tensor.ndim == 1 else 0.0, width**-0.5, generator=draw)
    exact, first = deepcopy(trial).float(), _TRIAL[0]
    trial.__class__ = _packed(type(trial))  # type: ignore[arg-type]
    bounds = np.cumsum((0, *_TRIAL), dtype=np.int32)
    documents: dict[str, Any] = on_device(bounds, torch.from_numpy(bounds).to(device))
    plain_1TH = torch.randn(1, sum(_TRIAL), width, generator=draw, device=device, dtype=dtype)
    loud_1TH = torch.cat([_LOUD * plain_1TH[:, :first], plain_1TH[:, first:]], dim=1)

    def compute(way: Callable[..., Any], module: nn.Module, row_1TH: Tensor) -> list[Tensor]:
        """Outputs of all documents but the first, and all gradients of the sum of their squares."""
        wanted = row_1TH.requires_grad_(), *module.parameters()
        out = tree_leaves(way(module.forward, row_1TH))[0][:, first:].float()
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted, materialize_grads=True)]

    try:
        # Torch's own operations, but for what is below: other libraries' kernels may not compile with the layer.
        with patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True):
            want = compute(lambda forward, row: _one_by_one(forward, [*_TRIAL], row), exact, plain_1TH.float())
            at_once = lambda forward, row: forward(row, **documents)  # noqa: E731
            got, beside_loud = (compute(at_once, trial, row_1TH) for row_1TH in (plain_1TH, loud_1TH))
    except Exception as error:  # noqa: BLE001 libraries' kernels, on GPUs new to them; modules with other arguments
        return f"it cannot compute several at once: {type(error).__name__}: {one_line(error)}"
    if got[1][:, :first].any() or not all(map(torch.equal, got[:2], beside_loud)):
        return "its kernels do not keep documents apart"
    gaps = [((ours.float() - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(got, want, strict=True)]
    return None if all(gap <= _NEAR for gap in gaps) else f"its kernels for several are off by {max(gaps):.2%}"
