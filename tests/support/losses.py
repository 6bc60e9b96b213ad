"""The trainer's loss of a step and its gradient, for given log-probabilities: no model, no processes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from prime_rl.config.trainer import LossConfig
from prime_rl.trainer.loss import STREAMS, SequenceLoss, make_loss
from prime_rl.trainer.packing import StepData, collate, to_device
from prime_rl.trainer.parallel import World
from prime_rl.trainer.rl.data import document, grouped, normalize
from prime_rl.transport.rollouts import Sample

GROUPS, MOST_SAMPLES = "abcdefgh", 16


def step_loss(
    config: LossConfig, samples: Sequence[Sample], new: tuple[dict[str, Tensor], dict[str, Tensor]],
    world: World, packs: Sequence[Sequence[int]] | None = None,
) -> Tensor:  # fmt: skip
    """Samples, of groups named by a letter of `GROUPS`, are packed, weights normalized, micro-batches' losses taken."""
    chosen = [[samples[i] for i in pack] for pack in packs or [range(len(samples))]]
    batches = [collate([document(sample) for sample in pack], len(STREAMS)) for pack in chosen]
    if config.normalization == "group":
        mine, group_of = [[GROUPS.index(sample.group_id) for sample in pack] for pack in chosen], GROUPS
    else:
        mine, group_of = [[int(sample.sample_id) for sample in pack] for pack in chosen], range(MOST_SAMPLES)
    normalize(grouped(StepData(batches, []), group_of, mine), world, config)
    loss_of, total = make_loss(config), torch.zeros((), dtype=torch.float64)
    for pack, host in zip(chosen, batches, strict=True):
        batch = to_device(host, torch.device("cpu"))
        places = batch.loss_index + 1  # of the tokens that are predicted
        logprob, entropy = (torch.cat([torch.zeros(0), *(by[one.sample_id] for one in pack)])[places] for by in new)
        more = batch.documents() if isinstance(loss_of, SequenceLoss) else ()
        total = total + loss_of(logprob, entropy, batch.streams.double(), *more)[0]
    return total


def slopes(loss: Tensor, new: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Tensor:
    """The gradient in all log-probabilities and entropies, flat."""
    given = [*new[0].values(), *new[1].values()]
    found = torch.autograd.grad(loss, given, allow_unused=True)
    return torch.cat([torch.zeros_like(one) if d is None else d for one, d in zip(given, found, strict=True)])
