"""Layers that carry a state from token to token, or convolve over them: a packed row's documents go through one by one.

transformers' own modules are called once a document, so that no state can reach the next document, whatever the family:
gated delta rules, selective scans, short convolutions. All else (attention, feed-forward layers, norms) computes the
whole row. Kernels that are installed (flash-linear-attention, causal-conv1d, mamba-ssm) are used by these modules as
transformers sees fit, each time for one document. T tokens, D documents.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from prime_rl.trainer.parallel import World

_ATTENTION = ("cu_seqlens", "max_seqlen")  # arguments of our attention, which some modules would take for their own


def split_documents(lm: PreTrainedModel, world: World) -> set[nn.Module]:
    """Let the mixers of every layer take one document at a time. Returns the mixers."""
    kinds: dict[nn.Module, str] = {}
    for layer in lm.model.layers:
        if not (parts := mixers(layer)):
            continue
        lengths: list[int] = []  # of the documents that the layer computes now; none: the row is one document
        # In backward, too, where the layer is computed again: it is called with that micro-batch's arguments.
        layer.register_forward_pre_hook(partial(_take_lengths, lengths), with_kwargs=True)
        for mixer in parts:
            mixer.forward = partial(_one_by_one, mixer.forward, lengths)
            kinds[mixer] = type(mixer).__name__
    if kinds and world.is_main:
        logger.info(
            "recurrent layers: {} compute one document of a row at a time", ", ".join(sorted(set(kinds.values())))
        )
    return set(kinds)


def mixers(layer: nn.Module) -> list[nn.Module]:
    """Return a layer's outermost modules that have a causal convolution or call themselves linear attention."""
    outermost: list[nn.Module] = []
    for child in layer.children():
        convolves = any(isinstance(part, nn.Conv1d) for part in child.children())
        if convolves or getattr(child, "layer_type", None) == "linear_attention":
            outermost.append(child)
        else:
            outermost += mixers(child)
    return outermost


def projected_width(layer: nn.Module) -> int:
    """What the linear layers of a layer's mixers give for a token, in elements; 0 without mixers."""
    parts = [part for mixer in mixers(layer) for part in mixer.modules()]
    return sum(part.out_features for part in parts if isinstance(part, nn.Linear))


def without(module: nn.Module, mixers: Collection[nn.Module]) -> list[nn.Module]:
    """The module, if it has no mixers, else those of its parts that have none but matrices, as large as they can be."""
    if module in mixers:
        return []
    if not any(part in mixers for part in module.modules()):
        return [module] if any(parameter.ndim > 1 for parameter in module.parameters()) else []
    return [part for child in module.children() for part in without(child, mixers)]


def boundaries(cu_seqlens: npt.NDArray[np.int32]) -> dict[str, Tensor]:
    """The argument of every layer that says where documents begin without asking the device for it, [D + 1]."""
    on_host = torch.from_numpy(cu_seqlens)
    torch._dynamo.maybe_mark_dynamic(on_host, 0)
    return {"boundaries": on_host}


def _take_lengths(lengths: list[int], layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    on_host = kwargs.pop("boundaries", None)
    lengths[:] = [] if on_host is None else on_host.diff().tolist()
    return args, kwargs


def _one_by_one(forward: Callable[..., Any], lengths: list[int], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` once a document. Arguments and results [1, T, …] are split and joined; any other argument goes to
    every call, any other result is dropped: the layers hand on none."""
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
