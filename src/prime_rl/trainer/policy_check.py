"""Before training: the policy's log-probabilities of two short documents against those of the model's own forward.

The policy packs both and uses our attention, experts and head; the model's own forward takes one document at a time,
with its own attention and experts ("eager"), and its logits. Whatever we leave out of a model that nobody has tried is
a difference.
"""

import time

import numpy as np
import torch
from loguru import logger

from prime_rl.errors import UserError
from prime_rl.trainer import attention
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import Document, collate, pads_to, to_device
from prime_rl.trainer.parallel import World, agree
from prime_rl.trainer.source import one_line
from prime_rl.transport.weights import REFERENCE_TOKENS, reference_tokens

FIRST_TOKENS = 48  # of the fixed prompt's 64; the others are a second document, which must not see them
TEMPERATURES = 1.0, 0.7

EXACT_LIMIT = 1e-4
"""Of any token, in float32: right kernels differ by up to 9e-6."""

ROUNDED_LIMIT = 0.05
"""Of a document's median token, in bfloat16, by the standard deviation of the tokens' log-probabilities, to which
rounding is proportional: right kernels differ by up to 0.02 of it. A document that leaks into the next one makes a
difference of 0.12 in a trained model and more in random ones, a missing scale of 8 one of 4. The median, because a
token whose expert is another one after rounding may be off by 1 nat."""


@torch.no_grad()
def check_policy(policy: Policy, name: str, world: World, computed: torch.dtype) -> None:
    """Compare the policy with the model's own forward and log the difference. Every rank calls it.

    Args:
        name: The model, for messages.
        computed: The dtype that the policy computes in.

    Raises:
        UserError: they differ by more than two right computations do, or one of them fails.
    """
    started, lm, sizes = time.perf_counter(), policy.lm, (FIRST_TOKENS, REFERENCE_TOKENS - FIRST_TOKENS)
    tokens = np.array(reference_tokens(lm.config.get_text_config().vocab_size))
    documents = [
        Document(ids, np.ones(len(ids), dtype=np.bool_), temperature, np.zeros((1, len(ids)), dtype=np.float32))
        for ids, temperature in zip(np.split(tokens, [FIRST_TOKENS]), TEMPERATURES, strict=True)
    ]
    batch = to_device(collate(documents, 1, pads_to(world.device)), world.device)
    experts = lm.get_experts_implementation()
    with torch.compiler.set_stance("force_eager"):
        try:
            ours_L = policy(batch)[0].float()
            lm.set_attn_implementation("eager")
            lm.set_experts_implementation("eager")
            alone = batch.input_ids[:REFERENCE_TOKENS].split(sizes)
            logits_LV = torch.cat([policy.own_logits(ids_T)[:-1].float() for ids_T in alone])
        except UserError:
            raise
        except Exception as error:  # whatever the model's code raises
            reason = f"the forward of {type(lm).__name__} fails on packed documents or alone: {one_line(error)}"
            raise UserError(f"model {name} cannot be trained: {reason}") from error
        finally:
            lm.set_attn_implementation(attention.NAME)
            lm.set_experts_implementation(experts)
            # Without a backward pass the gathered weights would stay, and the next forward would use them.
            for unit in policy.units:
                unit.reshard()
    theirs_L = torch.log_softmax(logits_LV * batch.inv_temperature[:, None], -1).gather(1, batch.labels[:, None])[:, 0]
    gap_L, limit = (ours_L - theirs_L).abs(), EXACT_LIMIT
    gap, family = gap_L.max().item(), type(lm).__name__
    if computed != torch.float32:
        gap = max(part.median().item() for part in gap_L.split([size - 1 for size in sizes]))
        limit = ROUNDED_LIMIT * theirs_L.std().item()

    def judge() -> None:
        if not (gap <= limit and gap_L.isfinite().all()):
            raise UserError(
                f"model {name} cannot be trained: log-probabilities of packed documents differ from those of "
                f"{family}'s own forward by {gap:.3g} (at most {limit:.2g} is accepted)"
            )

    agree(world, judge)
    if world.is_main:
        seconds = time.perf_counter() - started
        logger.info("log-probabilities are {:.2g} off those of {}'s own forward ({:.1f} s)", gap, family, seconds)
