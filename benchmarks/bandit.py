"""Does it learn? Every algorithm and loss on a problem small enough to be solved exactly, and effects of stale samples.

    python benchmarks/bandit.py            measures (two and a half minutes of one core), then writes tables and figures
    python benchmarks/bandit.py --table    tables and figures alone, from results/bandit.json

The problem: a reply has up to four tokens, digits and a stop. Each task wants three digits said, and a stop. There are
781 replies, so the expected reward of a policy is a sum over all of them, not an estimate from samples. Learning is
from samples, by the real code: `advantages`, `streams_of`, `document`, `collate`, `normalize` and `make_loss`. Only the
model is another one, a table of logits.
"""

import argparse
import json
import re
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from bandit_page import write_page
from machine import describe_machine
from pydantic import TypeAdapter
from torch import Tensor

from prime_rl.config.orchestrator import AlgorithmConfig
from prime_rl.config.trainer import LossConfig
from prime_rl.envs.protocol import SampleTokens
from prime_rl.orchestrator.algorithms import Trajectory, advantages
from prime_rl.orchestrator.samples import streams_of
from prime_rl.trainer.loss import STREAMS, SequenceLoss, make_loss
from prime_rl.trainer.packing import MicroBatch, StepData, collate, to_device
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.rl.data import document, normalize
from prime_rl.transport.rollouts import Sample

RESULTS = Path(__file__).parent / "results" / "bandit.json"

DIGITS, LONGEST = 5, 4
STOP = DIGITS  # ends a reply, so that it never is the token before: as that it stands for the prompt
WANTED = ((0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 0))  # of each task
ATTEMPTS = 8  # of each task in each step
WEIGHTS = {"found": 0.75, "stops": 0.25}
SEEDS = 5
SETTLED = 40  # last steps, whose mean tells how a run ends
POINTS = 41  # of a curve that is kept
TAUGHT = 150  # steps of the teacher along the exact gradient: well above what it teaches, and below the best

Optimizer = Literal["SGD", "Adam"]


@dataclass(frozen=True)
class Setting:
    """How a policy is trained.

    Args:
        memory: Whether the policy's logits depend on the position and on the token before, or on the task alone.
        level: Step n is trained on samples of version max(0, n - level): as old as this async level allows.
    """

    memory: bool
    optimizer: Optimizer
    lr: float
    level: int
    steps: int


LEARNING = Setting(memory=True, optimizer="Adam", lr=0.2, level=1, steps=60)
STALE = {
    f"{optimizer} {lr:g}": Setting(memory=False, optimizer=cast(Optimizer, optimizer), lr=lr, level=2, steps=100)
    for optimizer, lr in (("SGD", 150.0), ("Adam", 0.4))
}
SWEPT = ("none", "default", "truncate, sequence")
SWEEP = tuple(Setting(False, "SGD", lr, level, 100) for lr, level in ((150.0, 1), (150.0, 4), (80.0, 2), (40.0, 2)))

ALGORITHMS: dict[str, AlgorithmConfig] = {
    name: TypeAdapter(AlgorithmConfig).validate_python(values)
    for name, values in {
        "grpo": {"type": "grpo"},
        "grpo, std_normalize": {"type": "grpo", "std_normalize": True},
        "rloo": {"type": "rloo"},
        "opo": {"type": "opo"},
        "max_rl": {"type": "max_rl"},
        "reinforce_pp": {"type": "reinforce_pp"},
        "reinforce_pp, group_baseline": {"type": "reinforce_pp", "group_baseline": True},
        "rae": {"type": "rae"},
        "gdpo": {"type": "gdpo", "weights": WEIGHTS},
        "opd": {"type": "opd", "teacher": {"base_url": "http://not-asked"}},
        "sft": {"type": "sft", "teacher": {"base_url": "http://not-asked"}},
    }.items()
}
LOSSES: dict[str, LossConfig] = {
    name: TypeAdapter(LossConfig).validate_python(values)
    for name, values in {
        "default": {"type": "default"},
        "default, masks 0.05": {"type": "default", "mask_low": 0.05, "mask_high": 0.05},
        "ipo": {"type": "ipo"},
        "ipo, threshold 0.05": {"type": "ipo", "threshold": 0.05},
        "grpo": {"type": "grpo"},
        "dapo": {"type": "grpo", "clip_high": 0.28, "normalization": "group"},
        "dr_grpo": {"type": "grpo", "normalization": "fixed", "fixed_length": LONGEST},
        "ppo_clip": {"type": "ppo_clip"},
        "gspo": {"type": "gspo"},
        "cispo": {"type": "cispo"},
        "none": {"type": "reinforce", "importance": "none"},
        **{
            f"{importance}, {level}": {"type": "reinforce", "importance": importance, "level": level}
            for importance in ("truncate", "mask")
            for level in ("token", "sequence", "geometric")
        },
    }.items()
}


# -- the problem -------------------------------------------------------------------------------------------------------


def _replies() -> list[tuple[int, ...]]:
    """All that can be said: fewer than `LONGEST` digits and a stop, or `LONGEST` digits."""
    stopped = [(*digits, STOP) for length in range(LONGEST) for digits in product(range(DIGITS), repeat=length)]
    return stopped + list(product(range(DIGITS), repeat=LONGEST))


def rewards(reply: Sequence[int], task: int) -> dict[str, float]:
    """Of each reward function: the share of the wanted digits that were said, and whether the reply stops by itself."""
    wanted = WANTED[task]
    return {"found": len(set(reply) & set(wanted)) / len(wanted), "stops": float(reply[-1] == STOP)}


def reward(reply: Sequence[int], task: int) -> float:
    """Their weighted sum, at most 1."""
    return sum(WEIGHTS[name] * value for name, value in rewards(reply, task).items())


REPLIES = _replies()
REWARDS = torch.tensor([[reward(reply, task) for reply in REPLIES] for task in range(len(WANTED))]).double()
_TOKENS = torch.tensor([[*reply, *[0] * (LONGEST - len(reply))] for reply in REPLIES])
_BEFORE = torch.cat([torch.full((len(REPLIES), 1), STOP), _TOKENS[:, :-1]], dim=1)
_SAID = torch.tensor([[place < len(reply) for place in range(LONGEST)] for reply in REPLIES])


def fresh_policy(memory: bool) -> Tensor:
    """Return logits of the uniform policy, [tasks, positions, tokens before, tokens] in float64; without memory both in
    the middle are 1."""
    return torch.zeros(len(WANTED), *((LONGEST, STOP + 1) if memory else (1, 1)), STOP + 1, dtype=torch.float64)


def distributions(logits: Tensor) -> Tensor:
    """Log-probabilities [tasks, positions, tokens before, tokens], with memory or without."""
    return logits.log_softmax(-1).expand(len(WANTED), LONGEST, STOP + 1, STOP + 1)


def reply_logprobs(logits: Tensor) -> Tensor:
    """[tasks, replies, LONGEST]: of each token of every reply, 0 beyond its end."""
    return distributions(logits)[:, torch.arange(LONGEST), _BEFORE, _TOKENS] * _SAID


def expected_reward(logits: Tensor) -> Tensor:
    """The exact one, mean over tasks: the sum over all replies of probability times reward."""
    return (reply_logprobs(logits).sum(-1).exp() * REWARDS).sum(-1).mean()


def ascend(memory: bool, steps: int) -> Tensor:
    """The policy after `steps` along the exact gradient."""
    logits = fresh_policy(memory).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-expected_reward(logits)).backward()
        optimizer.step()
    return logits.detach()


def best_reward(memory: bool) -> float:
    """What a policy can reach. Without memory one distribution serves all positions of a reply."""
    return expected_reward(ascend(memory, 1000)).item()


@cache
def teacher() -> Tensor:
    """Who scores for `opd`, and samples for `sft`: a policy with memory."""
    return ascend(True, TAUGHT)


# -- learning ----------------------------------------------------------------------------------------------------------


def sample_batch(
    logits: Tensor, algorithm: AlgorithmConfig, state: Mapping[str, Any], draw: np.random.Generator
) -> tuple[list[Sample], dict[str, Any]]:
    """Sample one group for each task from the policy `logits` or the teacher; return the algorithm's state, too."""
    logprobs = reply_logprobs(teacher() if algorithm.component == "ce" else logits)
    shares, sampled = logprobs.sum(-1).exp().numpy(), logprobs.numpy()
    scores = reply_logprobs(teacher()).numpy() if algorithm.component == "ref_kl" else None
    drawn = [draw.choice(len(REPLIES), ATTEMPTS, p=share / share.sum()) for share in shares]
    groups = [[_trajectory(REPLIES[place], task) for place in places] for task, places in enumerate(drawn)]
    values, after = advantages(algorithm, groups, state)
    samples = []
    for task, places in enumerate(drawn):
        for place, value in zip(places, values[task], strict=True):
            scored = None if scores is None else scores[task, place]
            samples.append(_sample(task, REPLIES[place], sampled[task, place], scored, algorithm, value))
    return [sample for sample in samples if sample is not None], after


def _trajectory(reply: tuple[int, ...], task: int) -> Trajectory:
    tokens, parts = len(reply), rewards(reply, task)
    return Trajectory(reward(reply, task), output_tokens=tokens, total_tokens=tokens + 1, rewards=parts)


def _sample(
    task: int,
    reply: tuple[int, ...],
    logprobs: np.ndarray,
    scores: np.ndarray | None,
    algorithm: AlgorithmConfig,
    advantage: float,
) -> Sample | None:
    """Make what the orchestrator makes of a reply, None without signal. The prompt is one token, which names the task;
    nothing predicts it."""
    ids, mask = [STOP + 1 + task, *reply], np.arange(len(reply) + 1) > 0
    sequence = SampleTokens(
        array("i", ids), bytes(mask), array("f", [0.0, *logprobs[: len(reply)]]), 1, reward(reply, task)
    )
    if scores is not None:
        sequence.ref_logprobs = array("f", [0.0, *scores[: len(reply)]])
    old = np.asarray(sequence.logprobs, dtype=np.float32)
    streams = streams_of(algorithm, sequence, mask, old, advantage, keep_zero=False)
    if streams is None:
        return None
    return Sample("", "", str(task), "digits", [0], ids, temperature=1.0, reward=sequence.reward, **streams)


def predict(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """What a model is to the trainer: log-probability and entropy of each loss token, [L]."""
    owner, _ = batch.documents()
    task = batch.input_ids[batch.cu_seqlens[owner]] - (STOP + 1)
    before = batch.input_ids[batch.loss_index].clamp(max=STOP)
    every = distributions(logits)[task, batch.position_ids[batch.loss_index], before]
    return every.gather(-1, batch.labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


def step_loss(logits: Tensor, samples: Sequence[Sample], config: LossConfig, world: World) -> Tensor:
    """The trainer's loss of a step, all samples in one micro-batch."""
    host = collate([document(sample) for sample in samples], len(STREAMS))
    by_group = config.normalization == "group"
    groups = np.array([int(sample.task_id) if by_group else i for i, sample in enumerate(samples)])
    count = len(WANTED) if by_group else len(samples)
    normalize(StepData([host], [], groups=[groups], group_count=count), world, config)
    batch, loss_of = to_device(host, world.device), make_loss(config)
    more = batch.documents() if isinstance(loss_of, SequenceLoss) else ()
    return loss_of(*predict(logits, batch), batch.streams.double(), *more)[0]


def learn(setting: Setting, algorithm: AlgorithmConfig, loss: LossConfig, seed: int, world: World) -> list[float]:
    """The exact expected reward of every version, the uniform policy's first."""
    draw = np.random.default_rng(seed)
    state: dict[str, Any] = {}
    logits = fresh_policy(setting.memory).requires_grad_()
    optimizer = getattr(torch.optim, setting.optimizer)([logits], lr=setting.lr)
    versions = [logits.detach().clone()]
    for step in range(setting.steps):
        samples: list[Sample] = []
        while not samples:  # as the orchestrator does, which collects another batch
            samples, state = sample_batch(versions[max(0, step - setting.level)], algorithm, state, draw)
        optimizer.zero_grad()
        step_loss(logits, samples, loss, world).backward()
        optimizer.step()
        versions.append(logits.detach().clone())
    return [expected_reward(version).item() for version in versions]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(setting: Setting, algorithm: AlgorithmConfig, loss: LossConfig, world: World) -> dict[str, Any]:
    """All seeds: where each ends, and the curve of their mean and extremes."""
    curves = np.array([learn(setting, algorithm, loss, seed, world) for seed in range(SEEDS)])
    kept = np.unique(np.linspace(0, setting.steps, POINTS).round().astype(int))
    thinned = curves[:, kept]
    parts = {"mean": thinned.mean(0), "low": thinned.min(0), "high": thinned.max(0)}
    return {
        "before": round(float(curves[0, 0]), 4),
        "after": [round(float(curve[-1]), 4) for curve in curves],
        "settled": [round(statistics.fmean(curve[-SETTLED:]), 4) for curve in curves],
        "curve": {"step": kept.tolist(), **{name: np.round(part, 4).tolist() for name, part in parts.items()}},
    }


def measure_all(world: World) -> dict[str, Any]:
    """Everything that the page shows."""
    advantage = ALGORITHMS["grpo"]
    stale = {}
    for name, setting in STALE.items():
        print(f"stale samples, {name}", flush=True)
        fresh = measure(Setting(**{**asdict(setting), "level": 0}), advantage, LOSSES["none"], world)
        rows = {loss: measure(setting, advantage, config, world) for loss, config in LOSSES.items()}
        stale[name] = {"setting": asdict(setting), "fresh": fresh, "rows": rows}
    print("levels and learning rates", flush=True)
    swept = [
        {
            "setting": asdict(setting),
            "settled": {name: measure(setting, advantage, LOSSES[name], world)["settled"] for name in SWEPT},
        }
        for setting in SWEEP
    ]
    print("algorithms and losses", flush=True)
    return {
        "machine": describe_machine(),
        "replies": len(REPLIES),
        "tasks": len(WANTED),
        "attempts": ATTEMPTS,
        "seeds": SEEDS,
        "settled steps": SETTLED,
        "best": {"with memory": best_reward(True), "without memory": best_reward(False)},
        "teacher": expected_reward(teacher()).item(),
        "learning": {
            "setting": asdict(LEARNING),
            "algorithms": {
                name: measure(LEARNING, config, LOSSES["default"], world) for name, config in ALGORITHMS.items()
            },
            "losses": {name: measure(LEARNING, advantage, config, world) for name, config in LOSSES.items()},
        },
        "stale": stale,
        "swept": swept,
    }


def as_json(found: Mapping[str, Any]) -> str:
    """With a line for each list of numbers."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="do not measure: write tables and figures from the JSON")
    args = parser.parse_args()
    if not args.table:
        torch.set_num_threads(1)
        world = init_world("cpu", 60)
        try:
            RESULTS.write_text(as_json(measure_all(world)))
        finally:
            close_world()
    write_page(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
