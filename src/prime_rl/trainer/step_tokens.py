"""What the trainer computes of each sampled token, for people and trackers; nothing in training reads it."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from loguru import logger
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.monitor import Extras
from prime_rl.trainer.parallel import ToHost
from prime_rl.transport.token_stats import write_token_stats

_SAMPLES_SHOWN = 32  # of a step


class SampleRow(NamedTuple):
    """A sample that is trained, with the number of its sampled tokens and the mean of their advantages."""

    sample_id: str
    env: str
    tokens: int
    reward: float
    advantage: float


COLUMNS = (*SampleRow._fields, "logprob", "log_ratio", "mismatch_kl", "entropy")


class StepTokens:
    """The N sampled tokens of this rank's samples of a step, in the order of its micro-batches.

    The forward of each micro-batch writes log-probability and entropy of its loss tokens into its `room`; `send` has
    them copied to the host. Then any thread may ask for them, which waits for the device.
    """

    def __init__(self, rows: Sequence[SampleRow], mask: npt.NDArray[np.bool_], logprobs: npt.NDArray[Any]) -> None:
        """`mask` [L]: which of the step's loss tokens were sampled; `logprobs` [N]: the sampler's of these."""
        self.rows, self._mask, self._logprobs = rows, mask, logprobs
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
        ids, tokens = [row.sample_id for row in self.rows], [row.tokens for row in self.rows]
        try:
            write_token_stats(run, step, rank, ids, tokens, self.values)
        except (UserError, OSError) as error:
            logger.warning("token_stats/step_{}: {}", step, error)

    def extras(self, lengths: Sequence[float]) -> Extras:
        """Return what trackers may show: samples and tokens of this rank, and the lengths of every rank's samples."""
        (log_ratio, entropy), table = self.values, []
        stops = np.cumsum([row.tokens for row in self.rows], dtype=np.int64)
        for number in range(0, len(self.rows), -(-len(self.rows) // _SAMPLES_SHOWN) or 1):
            if (tokens := self.rows[number].tokens) > 0:
                own = slice(stops[number] - tokens, stops[number])
                ratio = log_ratio[own].clip(-22, 22)  # as in `loss.token_sums`
                each = self._logprobs[own] + ratio, ratio, np.expm1(ratio) - ratio, entropy[own]
                table.append((*self.rows[number], *(float(f"{one.mean():.4g}") for one in each)))
        finite = self.values[:, np.isfinite(self.values).all(0)]
        return Extras(table, {"num_tokens": lengths, "log_ratio": finite[0], "entropy": finite[1]}, COLUMNS)
