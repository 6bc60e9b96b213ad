"""Find what attention a model needs by its forward on the meta device; refuse what we cannot compute exactly.

transformers' models look up their attention function in one registry and their mask function in another. For one pass
both are ours: no list of families is needed, and a model that bypasses them is detected.
"""

import inspect
import math
from collections.abc import Collection
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.integrations import hub_kernels
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prime_rl.errors import UserError, user_errors

_NAME = "prime_rl_examined"
# Arguments of attention that are ours or change nothing
_KNOWN = {"scaling", "cu_seqlens", "max_seqlen", "position_ids", "use_cache", "output_attentions", "is_causal"}
_POINTWISE = {"mlp", "moe"}  # transformers' names for layers that mix no tokens


class Needs(NamedTuple):
    head_dim: int  # the larger one of keys and values
    softcap: bool = False
    sinks: bool = False


class _Mask(NamedTuple):
    """A mask that a model asks for: (batch, head, query, key) -> bool, and its window or chunk size."""

    function: Any
    size: int | None


ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda **asked: _Mask(asked["mask_function"], asked.get("local_size")))


def examine(lm: PreTrainedModel, name: str, tokens: int | None = None, mixers: Collection[nn.Module] = ()) -> Needs:
    """Return what attention `lm`, on the meta device, needs.

    `tokens`: maximum per micro-batch; `mixers`: modules that mix tokens in other ways and keep documents apart
    themselves. Raises UserError if we cannot compute the attention, or a document would depend on others in its row.
    """
    calls, apart = list[Needs](), {part for module in mixers for part in module.modules()}

    def refused(reason: str) -> UserError:
        return UserError(f"model {name} cannot be trained: its {reason}")

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> Any:
        window, softcap, sinks = (named.pop(argument, None) for argument in ("sliding_window", "softcap", "s_aux"))
        unknown = ", ".join(key for key, x in named.items() if key not in _KNOWN and (isinstance(x, Tensor) or x))
        computed = _is_computed(attention_mask, window, tokens)
        reasons = {
            "is not passed the boundaries of documents": named.get("cu_seqlens") is None,
            f"depends on {unknown}, which the trainer does not compute": bool(unknown),
            "has not one key and value a token": query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3],
            f"has a mask that is neither causal nor its window in rows of {tokens or 'any'} tokens": not computed,
        }
        if reason := next((text for text, holds in reasons.items() if holds), None):
            raise refused(f"{type(module).__name__} {reason}")
        calls.append(Needs(max(query.shape[-1], value.shape[-1]), softcap is not None, sinks is not None))
        apart.add(module)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    row, overlay = torch.zeros(1, 256, dtype=torch.long, device="meta"), masking_utils.chunked_overlay
    boundaries = {"cu_seqlens": torch.tensor([0, 256], dtype=torch.int32), "max_seqlen": torch.tensor(256)}
    # Replace what reads data: document detection, chunked masks, grouped float32 products, rotary frequencies
    patches: list[tuple[Any, str, Any]] = [
        (masking_utils, "find_packed_sequence_indices", lambda _: None),
        (masking_utils, "chunked_overlay", lambda size, _: overlay(size, torch.zeros(1, dtype=torch.long))),
        (hub_kernels, "is_torchdynamo_exporting", lambda: True),  # kernels for GPUs: torch's own operations instead
        (F, "grouped_mm", lambda rows, weight, **_: rows.new_empty(rows.shape[0], weight.shape[-1])),
    ]
    for module in (module for module in lm.modules() if getattr(module, "rope_type", None)):
        patches.append((module, "forward", inspect.unwrap(type(module).forward).__get__(module)))
    failed = str(refused("forward pass uses masks or data so that it cannot be examined"))
    with user_errors(failed, Exception), ExitStack() as stack, torch.no_grad():  # Exception: code of any model
        for owner, attribute, function in patches:
            stack.enter_context(patch.object(owner, attribute, function))
        lm.set_attn_implementation(_NAME)
        lm.model(input_ids=row, position_ids=row, use_cache=False, **boundaries)
    kinds = getattr(lm.config.get_text_config(), "layer_types", None) or []
    for layer, kind in zip_longest(lm.model.layers, kinds[: len(lm.model.layers)]):
        if kind not in _POINTWISE and apart.isdisjoint(layer.modules()):
            raise refused(f"{type(layer).__name__} computes no attention by transformers' interface for it")
    part: Any
    for part in lm.modules():  # RoPE by the longest document, or scales by positions in the row
        rope, limit = str(getattr(part, "rope_type", "")), tokens or 0
        if "longrope" in rope:
            limit = part.config.rope_parameters.get("original_max_position_embeddings", 0)
        elif "dynamic" in rope:
            limit = part.config.max_position_embeddings
        elif getattr(part, "attn_temperature_tuning", False) and not part.use_rope:  # Llama 4
            limit = part.floor_scale - 1
        if tokens is not None and tokens > limit:
            raise refused(f"{type(part).__name__} depends on the pack in rows of over {limit} tokens; lower seq_len")
    return Needs(*(max(needs) for needs in zip(*calls, strict=True))) if calls else Needs(0)


def _is_computed(mask: object, window: int | None, tokens: int | None) -> bool:
    """Test at sampled positions whether a mask is causal, within `window`, up to `tokens` (None: any number)."""
    if not isinstance(mask, _Mask):
        return False
    sizes = [size for size in (window, mask.size) if size] + [1 << exponent for exponent in range(5, 21)]
    points = {*range(32), *(n * size + offset for size in sizes for n in (1, 2, 3) for offset in (-2, -1, 0, 1))}
    at = torch.tensor([point for point in sorted(points) if 0 <= point < (tokens or math.inf)])
    query, key, zero = at[:, None], at[None], torch.zeros((), dtype=torch.long)
    seen = (key <= query) if window is None else (key <= query) & (query - key < window)
    return torch.equal(mask.function(zero, zero, query, key).expand_as(seen), seen)
