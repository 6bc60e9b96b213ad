"""The trainer's side of the canary: its own forward of a fixed prompt, for every version that it commits.

Between two steps it must be short: uncompiled blocks are so many kernels that the GPU would wait for the next step (32 ms of 619: Qwen3-0.6B, one 16k
document a micro-batch, H200). Nothing waits for the device before `Scored.read`, which the thread that commits the version
calls.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.trainer import moe
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packing import Document, collate, pads_to, pinned, to_device
from prime_rl.trainer.parallel import World
from prime_rl.trainer.parameters import local_rows
from prime_rl.transport.weights import LogprobReference, reference_tokens


class Scored:
    """Log-probabilities [T - 1] on their way from the device to the host."""

    def __init__(self, tokens: tuple[int, ...], logprobs: Tensor) -> None:
        self._tokens = tokens
        self._there: torch.cuda.Event | None = None
        self._numbers = logprobs
        if logprobs.is_cuda:
            self._numbers = torch.empty(logprobs.shape, dtype=logprobs.dtype, pin_memory=True)
            self._numbers.copy_(logprobs, non_blocking=True)
            self._there = torch.cuda.Event(blocking=True)
            self._there.record()

    def read(self) -> LogprobReference:
        """Wait for them. Any thread may.

        Raises:
            UserError: one is not a number: weights that compute this must not be committed.
        """
        if self._there is not None:
            self._there.synchronize()
        logprobs = tuple(self._numbers.tolist())
        if not all(map(math.isfinite, logprobs)):
            raise UserError("the new weights give the canary prompt log-probabilities that are no numbers")
        return LogprobReference(self._tokens, logprobs)


class CanaryScorer:
    """Scores the canary prompt with the policy as it is exported. Every rank calls it, at the same point of the run.

    Args:
        vocabulary: Token ids that the model knows.
        computed: The dtype that the policy computes in.
        exported: The dtype of exported weights.
    """

    def __init__(
        self, policy: Policy, world: World, vocabulary: int, computed: torch.dtype, exported: torch.dtype
    ) -> None:
        self._policy, self._world, self._exported = policy, world, exported
        self._tokens = tuple(reference_tokens(vocabulary))
        ids = np.array(self._tokens)
        document = Document(ids, np.ones(len(ids), dtype=np.bool_), 1.0, np.zeros((1, len(ids)), dtype=np.float32))
        batch = collate([document], 1, pads_to(world.device))
        self._batch = to_device(pinned([batch], world.device)[0], world.device)
        routers = {
            block.gate.weight for block in moe.sparse_blocks(policy)
        }  # computed in float32, whatever the rest is
        self._rounded = [
            parameter
            for parameter in policy.parameters()
            if (torch.float32 if parameter in routers else computed).itemsize > exported.itemsize
        ]

    @torch.no_grad()
    def score(self, *, as_exported: bool = True, compiled: bool = False) -> Scored:
        """Enqueue a forward pass of the weights as they are now.

        Args:
            as_exported: Of the weights as they are after rounding to the exported dtype. The base model is not exported.
            compiled: There has been a step: blocks may be compiled for this, too.
        """
        try:
            with _blocks(compiled), self._rounding(self._rounded if as_exported else []):
                logprobs, _ = self._policy(self._batch)
        finally:
            # Without a backward pass what was gathered would stay: the next forward would use it, and whoever asks for the parameters would get it.
            for unit in self._policy.units:
                unit.reshard()
        moe.load_sums(self._policy)  # the experts that it went to are no news of the next step
        return Scored(self._tokens, logprobs)

    @contextmanager
    def _rounding(self, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
        """Parameters that are computed with more digits than are exported lose these meanwhile. Their copies take the room that gradients take in
        a step."""
        rows = [local_rows(parameter, self._world)[0] for parameter in parameters]
        kept = [each.clone() for each in rows]
        try:
            for each in rows:
                each.copy_(each.to(self._exported))
            yield
        finally:
            for each, before in zip(rows, kept, strict=True):
                each.copy_(before)


def _blocks(compiled: bool) -> AbstractContextManager[object]:
    """How blocks run that were compiled for training. What is compiled here is one more graph of each kind of block, without gradients, for this number
    of tokens. It must not be the first: the second number of tokens that a block sees makes it a variable of what is compiled then, and training
    is faster with a number."""
    if not compiled:
        return torch.compiler.set_stance("force_eager")
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)
