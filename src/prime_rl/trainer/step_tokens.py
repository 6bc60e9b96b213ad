"""What the trainer computes of each sampled token, for people and trackers; nothing in training reads it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from loguru import logger
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.monitor import Extras
from prime_rl.trainer.parallel import ToHost
from prime_rl.transport.token_stats import write_token_stats


class StepTokens:
    """The N sampled tokens of this rank's samples of a step, in the order of its micro-batches.

    The forward of each micro-batch writes log-probability and entropy of its loss tokens into its `room`; `send` has
    them copied to the host. Then any thread may ask for them, which waits for the device.
    """

    def __init__(self, counts: Mapping[str, int], mask: npt.NDArray[np.bool_], logprobs: npt.NDArray[Any]) -> None:
        """`counts`: sampled tokens by sample; `mask` [L]: which of the step's loss tokens were sampled; `logprobs` [N]:
        the sampler's of these."""
        self._counts, self._mask, self._logprobs = counts, mask, logprobs
        self._parts: list[Tensor] = []

    def room(self, tokens: int, device: torch.device) -> Tensor:
        self._parts.append(torch.empty(2, tokens, dtype=torch.float32, device=device))
        return self._parts[-1]

    def send(self) -> None:
        self._sent = ToHost(torch.cat(self._parts, 1))
        self._parts.clear()

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """Log ratio to the sampler and entropy, [2, N]."""
        values = self._sent.read().numpy()[:, self._mask]
        values[0] -= self._logprobs
        return values

    def write(self, run: Path, step: int, rank: int) -> None:
        """Commit them. What fails is only missing from what people see."""
        try:
            write_token_stats(run, step, rank, [*self._counts], [*self._counts.values()], self.values)
        except (UserError, OSError) as error:
            logger.warning("token_stats/step_{}: {}", step, error)

    def extras(self, lengths: Sequence[float]) -> Extras:
        """Return what trackers may show: tokens of this rank, and the lengths of every rank's samples."""
        finite = self.values[:, np.isfinite(self.values).all(0)]
        return Extras(distributions={"num_tokens": lengths, "log_ratio": finite[0], "entropy": finite[1]})
