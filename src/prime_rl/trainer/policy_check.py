"""Before training: the policy's log-probabilities of two short documents against those of the model's own forward.

The policy packs both and uses our attention, experts and head; the model's own forward takes one document at a time,
with its own attention and experts ("eager"), and its logits. What we leave out of a model that nobody has tried, in
attention, experts, recurrent layers, head or the bounds of documents, shows here. Routers are called alike by both.
"""

import time
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prime_rl.errors import UserError, user_errors
from prime_rl.trainer import attention
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import Document, collate, pads_to, to_device
from prime_rl.trainer.parallel import World, agree
from prime_rl.transport.weights import REFERENCE_TOKENS, reference_tokens

FIRST_TOKENS = 48  # of the fixed prompt's 64; the others are a second document, which must not see them
TEMPERATURES = 1.0, 0.7

EXACT_LIMIT = 1e-4
"""For any token, in float32: correct kernels differ by ≤ 9e-6."""

ROUNDED_LIMIT = 4.0
"""For a document's median token, in bfloat16, in units of what one more rounding of embeddings, layer outputs and
logits changes in the model's own forward. In random models of all types correct kernels reach 2, a document that sees
the one before it 16 or more, a logit scale that is 10 % off 5 or more. All use the same experts, since a different
one after rounding may change a token by 1 nat."""
ROUNDING = 2.0**-9  # standard deviation of bfloat16's relative error


@torch.no_grad()
def check_policy(policy: Policy, name: str, world: World, computed: torch.dtype) -> None:
    """Compare the policy, which computes in dtype `computed`, with the model's own forward, and log the difference.
    Every rank calls it. Raises UserError if it is larger than with correct kernels, or one of them fails."""
    started, lm, sizes = time.perf_counter(), policy.lm, (FIRST_TOKENS, REFERENCE_TOKENS - FIRST_TOKENS)
    tokens = np.array(reference_tokens(lm.config.get_text_config().vocab_size))
    documents = [*map(Document.of, np.split(tokens, [FIRST_TOKENS]), TEMPERATURES)]
    batch = to_device(collate(documents, 1, pads_to(world.device)), world.device)
    alone, is_exact = batch.input_ids[:REFERENCE_TOKENS].split(sizes), computed == torch.float32
    implementation, hooks, chosen = lm.get_experts_implementation(), list[RemovableHandle](), list[Tensor]()
    draw = torch.Generator(world.device).manual_seed(0)

    def round_again(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.mul_(1 + torch.randn(hidden.shape, generator=draw, device=hidden.device) * ROUNDING)

    def own_logprobs() -> Tensor:
        logits = []
        for number, ids_T in enumerate(alone):
            for block, choice_TK in zip(policy.sparse, chosen, strict=False):
                block.router.replayed = choice_TK[:REFERENCE_TOKENS].split(sizes)[number]
            logits.append(policy.own_logits(ids_T)[:-1].float())
        logprobs_LV = torch.log_softmax(torch.cat(logits) * batch.inv_temperature[:, None], -1)
        return logprobs_LV.gather(1, batch.labels[:, None])[:, 0]

    failed = f"model {name} cannot be trained: the forward of {type(lm).__name__} fails on packed documents or alone"
    # Exception: whatever the model's code raises
    with torch.compiler.set_stance("force_eager"), user_errors(failed, Exception):
        try:
            for block in () if is_exact else policy.sparse:
                hooks.append(block.experts.register_forward_pre_hook(lambda _, inputs: chosen.extend(inputs[1:2])))
            ours_L = policy(batch)[0].float()
            lm.set_attn_implementation("eager")
            lm.set_experts_implementation("eager")
            theirs_L = again_L = own_logprobs()
            if not is_exact:
                parts = (lm.get_input_embeddings(), *lm.model.layers, lm.lm_head)
                hooks += [part.register_forward_hook(round_again) for part in parts]
                again_L = own_logprobs()
        finally:
            lm.set_attn_implementation(attention.NAME)
            lm.set_experts_implementation(implementation)
            for hook in hooks:
                hook.remove()
            # Without a backward pass the gathered weights would stay, and the next forward would use them.
            for unit in policy.units:
                unit.reshard()
    gap_L, family, limit = (ours_L - theirs_L).abs(), type(lm).__name__, EXACT_LIMIT
    gap = gap_L.max().item()
    if not is_exact:
        both = torch.stack([gap_L, (again_L - theirs_L).abs()]).split([size - 1 for size in sizes], 1)
        gaps, roundings = torch.stack([part.median(1).values for part in both], 1).tolist()
        gap, limit = max(gaps), ROUNDED_LIMIT * sum(roundings) / len(roundings)

    def judge() -> None:
        if not (gap <= limit and gap_L.isfinite().all()):
            raise UserError(
                f"model {name} cannot be trained: log-probabilities of packed documents differ from those of "
                f"{family}'s own forward by {gap:.3g} (at most {limit:.2g} is accepted)"
            )

    agree(world, judge)
    if world.is_main:
        seconds = time.perf_counter() - started
        logger.info("log-probabilities differ by {:.2g} from {}'s forward ({:.1f} s)", gap, family, seconds)
