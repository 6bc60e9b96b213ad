"""The trainer's half of the logprob check: score the fixed prompt with every version that it commits.

Between two steps this must be short. A forward pass of so few tokens costs the host much more than the GPU (70 ms of
each step of a shared trainer's tenant, Qwen3-0.6B on an H200), so one GPU replays it as a CUDA graph. Nothing waits for
the device before the result of `ReferenceScorer.score` is called, by the thread that commits the version.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

from prime_rl.errors import UserError, one_line
from prime_rl.trainer import lora, moe
from prime_rl.trainer.model import Policy, SingleRankUnit
from prime_rl.trainer.packing import Document, collate, pads_to, pinned, to_device
from prime_rl.trainer.parallel import ToHost, World, local_part
from prime_rl.trainer.parameters import is_adapter
from prime_rl.transport.weights import LogprobReference, reference_tokens


class ReferenceScorer:
    """Score the fixed prompt with the policy as it is exported. Every rank calls it, at the same point of the run.

    `computed` is the dtype that the policy computes in, `exported` that of exported weights, `serve` how adapters are
    served (None: there are none).
    """

    def __init__(
        self,
        policy: Policy,
        world: World,
        vocabulary: int,
        computed: torch.dtype,
        exported: torch.dtype,
        serve: Literal["adapter", "merged"] | None = None,
    ) -> None:
        self._policy, self._exported, self._merged = policy, exported, serve == "merged"
        self._tokens = tuple(reference_tokens(vocabulary))
        batch = collate([Document.of(np.array(self._tokens))], 1, pads_to(world.device))
        self._batch = to_device(pinned([batch], world.device)[0], world.device)
        routers = set(moe.router_parameters(policy))  # always computed in float32
        # Of weights that are merged, the sum is rounded.
        summed = {weight for each in lora.adapters(policy) for weight, _ in each.weights()} if self._merged else set()
        self._rounded = [
            parameter
            for name, parameter in policy.named_parameters()
            if (serve is None or is_adapter(name) == (serve == "adapter")) and parameter not in summed
            if (torch.float32 if parameter in routers else computed).itemsize > exported.itemsize
        ]
        alone = world.device.type == "cuda" and all(isinstance(unit, SingleRankUnit) for unit in policy.units)
        # The copies that rounding and merging make would keep their memory as long as the graph.
        self._replays = alone and not (self._rounded or self._merged)
        self._compiled = False  # whether the blocks have been compiled for the prompt's length
        self._graph: torch.cuda.CUDAGraph | None = None
        self._replayed: Tensor | None = None  # logprobs [L] of the graph's last replay

    @torch.no_grad()
    def score(self, *, as_exported: bool = True, compiled: bool = False) -> Callable[[], LogprobReference]:
        """Enqueue a forward pass of the weights as they are now; return what waits for its result.

        Args:
            as_exported: Round the weights to the exported dtype meanwhile. The base model is not exported.
            compiled: Blocks may be compiled for this, too: there has been a step.
        """
        replays = self._replays and self._compiled and as_exported
        self._compiled |= compiled
        if replays and self._graph is None:
            self._capture()
        if self._graph is not None and as_exported:
            self._graph.replay()
            assert self._replayed is not None
            return partial(finite_reference, self._tokens, ToHost(self._replayed))
        return partial(finite_reference, self._tokens, ToHost(self._forward(as_exported, compiled)))

    def _forward(self, as_exported: bool, compiled: bool) -> Tensor:
        """Return the fixed prompt's logprobs [L], on the device."""
        try:
            merge = lora.merged(self._policy, self._exported if self._merged and as_exported else None)
            with _blocks(compiled), merge, self._rounding(self._rounded if as_exported else []):
                logprobs, _ = self._policy(self._batch)
        finally:
            # Without a backward pass the gathered weights would stay, and the next forward would use them.
            for unit in self._policy.units:
                unit.reshard()
        return logprobs

    def _capture(self) -> None:
        """Capture a forward pass of compiled blocks. A replay reads the trained parameters, which are never moved."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                # Other threads write versions and checkpoints meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._replayed = self._forward(True, True)
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # the model's forward waits for the device, which a graph cannot
            self._replays = False
            logger.info("the logprob check's forward pass cannot be a CUDA graph: {}", one_line(error))
        else:
            self._graph = graph

    @contextmanager
    def _rounding(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Round parameters meanwhile. Their copies take the memory that gradients take in a step."""
        rows = [local_part(parameter).detach() for parameter in parameters]
        originals = [each.clone() for each in rows]
        try:
            for each in rows:
                each.copy_(each.to(self._exported))
            yield
        finally:
            for each, original in zip(rows, originals, strict=True):
                each.copy_(original)


def finite_reference(tokens: tuple[int, ...], logprobs: ToHost) -> LogprobReference:
    """Wait for log-probabilities. Raises UserError if one is not finite: such weights must not be committed."""
    values = tuple(logprobs.read().tolist())
    if not all(map(math.isfinite, values)):
        raise UserError("the new weights give the fixed prompt of the logprob check non-finite log-probabilities")
    return LogprobReference(tokens, values)


def _blocks(compiled: bool) -> AbstractContextManager[object]:
    """How blocks that were compiled for training run here: eagerly, or as one more graph of each kind of block.

    That graph, for this number of tokens, must not be the first: the second number of tokens that a block sees makes it
    a variable of what is compiled then, and training is faster with a number.
    """
    if not compiled:
        return torch.compiler.set_stance("force_eager")
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)
