"""What the trainer computes of each sampled token: for people and trackers; training itself never reads it."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from loguru import logger
from torch import Tensor

from prime_rl.errors import UserError
from prime_rl.monitor import Extras
from prime_rl.trainer.parallel import ToHost, World
from prime_rl.transport.token_stats import write_token_stats
from prime_rl.wait import TaskThread

COLUMNS = ("sample_id", "env", "tokens", "reward", "advantage", "logprob", "log_ratio", "mismatch_kl", "entropy")
_SAMPLES_SHOWN = 32  # in a table of a step
_MOST_UNWRITTEN = 8  # steps that a slow disk may be behind
_MOST = 22.0  # as in `loss.token_sums`

Floats = npt.NDArray[np.float32]


class SampleRow(NamedTuple):
    """A sample that is trained, with the number of its sampled tokens and the mean of their advantages."""

    sample_id: str
    env: str
    tokens: int
    reward: float
    advantage: float


class StepTokens:
    """The N sampled tokens of a step's samples on this rank, in the order in which micro-batches have them.

    The forward of each micro-batch writes log-probability and entropy of its loss tokens into its `room`; `send` has
    all of them copied to the host, where `values` waits for them.
    """

    def __init__(self, rows: Sequence[SampleRow], sampled: npt.NDArray[np.bool_], logprobs: Floats) -> None:
        """`sampled` [L]: which of the step's loss tokens the sampler chose; `logprobs` [N]: its own of these."""
        self.rows, self._sampled, self._logprobs = rows, sampled, logprobs
        self._parts: list[Tensor] = []
        self._sent: ToHost | None = None

    def room(self, tokens: int, device: torch.device) -> Tensor:
        """Make room for what the next micro-batch's loss tokens get, [2, tokens]."""
        self._parts.append(torch.empty(2, tokens, dtype=torch.float32, device=device))
        return self._parts[-1]

    def send(self) -> None:
        """Copy everything to the host. Nothing waits for the device."""
        self._sent = ToHost(torch.cat(self._parts, 1))
        self._parts.clear()

    @cached_property
    def values(self) -> Floats:
        """Log ratio to the sampler and entropy of the sampled tokens, [2, N]. Any thread may ask."""
        assert self._sent is not None
        values = self._sent.read().numpy()[:, self._sampled]
        values[0] -= self._logprobs
        return values

    def extras(self, lengths: Sequence[float]) -> Extras:
        """Return what trackers may show of the step: some of this rank's samples, and distributions. `lengths`: tokens
        of every rank's samples."""
        (log_ratio, entropy), table = self.values, []
        ends = np.cumsum([row.tokens for row in self.rows], dtype=np.int64)
        for number in range(0, len(self.rows), -(-len(self.rows) // _SAMPLES_SHOWN) or 1):
            if (tokens := self.rows[number].tokens) > 0:
                own = slice(ends[number] - tokens, ends[number])
                ratio = log_ratio[own].clip(-_MOST, _MOST)
                each = self._logprobs[own] + ratio, ratio, np.expm1(ratio) - ratio, entropy[own]
                table.append((*self.rows[number], *(float(f"{one.mean():.4g}") for one in each)))
        finite = self.values[:, np.isfinite(self.values).all(0)]
        return Extras(table, {"num_tokens": lengths, "log_ratio": finite[0], "entropy": finite[1]}, COLUMNS)


class TokenStatsFiles:
    """Writes the tokens of steps in a thread. What fails is warned about, and only missing from what people see."""

    def __init__(self, run: Path, world: World, seconds: float) -> None:
        self._run, self._rank = run, world.rank
        self._thread = TaskThread("token-stats", "the disk", seconds)

    def put(self, step: int, tokens: StepTokens) -> None:
        """Have the file of a step written, unless the disk is far behind."""
        self._thread.results(wait=False)
        if len(self._thread.tasks) < _MOST_UNWRITTEN:
            self._thread.submit(f"token_stats/step_{step}", lambda: self._write(step, tokens))
        else:
            logger.warning("token_stats/step_{} is left out: the disk is {} steps behind", step, _MOST_UNWRITTEN)

    def _write(self, step: int, tokens: StepTokens) -> None:
        ids, counts = [row.sample_id for row in tokens.rows], [row.tokens for row in tokens.rows]
        try:
            write_token_stats(self._run, step, self._rank, ids, counts, tokens.values)
        except (UserError, OSError) as error:
            logger.warning("token_stats/step_{} is left out: {}", step, error)

    def close(self) -> None:
        for failure in self._thread.close():
            logger.warning(failure)
