"""The trainer's part of a checkpoint: model, optimizer, progress and random state in torch's distributed format.

`checkpoints/step_N` holds the state after N updates; the part `trainer` in it is committed by rename. It can be resumed on another number of
ranks. The learning rate is a function of the step, so there is no scheduler state.
"""

import errno
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from prime_rl.errors import UserError
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World, agree, broadcast, on_main
from prime_rl.transport.commit import Stage, disk_errors, list_steps, prune, verify

PART = "trainer"
_STATE = "state"
_NO_ROOM_BYTES = 16 << 20


@dataclass(frozen=True)
class Progress:
    """`step` updates were made, on `tokens` tokens of `samples` samples."""

    step: int = 0
    tokens: int = 0
    samples: int = 0


def saved_steps(root: Path) -> list[int]:
    """Steps with a committed trainer part under the checkpoints root, ascending."""
    return [step for step in list_steps(root) if (root / f"step_{step}" / PART).is_dir()]


def find(root: Path, resume_step: int, max_steps: int | None) -> int:
    """The step to resume from; -1 is the newest.

    Raises:
        UserError: there is none, or it lies beyond `max_steps`.
    """
    steps = saved_steps(root)
    if not steps:
        raise UserError(f"ckpt.resume_step {resume_step}: {root} holds no checkpoint of the trainer")
    step = steps[-1] if resume_step == -1 else resume_step
    if step not in steps:
        raise UserError(f"ckpt.resume_step {step}: not in {root}, which has {', '.join(map(str, steps))}")
    if max_steps is not None and step > max_steps:
        raise UserError(f"max_steps {max_steps} is below the checkpoint's step {step}: nothing to do")
    return step


def refuse_earlier(root: Path) -> None:
    """Raise UserError where a new run would mix its checkpoints with those of an earlier one."""
    if saved := saved_steps(root):
        raise UserError(
            f"{root} holds checkpoints of an earlier run (up to step_{saved[-1]}): go on from one with "
            "--ckpt.resume-step, or choose another --output-dir"
        )


def retire_after(root: Path, step: int) -> None:
    """Remove our part of checkpoints beyond `step`: a run that goes on from there gives them up. Rank 0 only."""
    for later in [saved for saved in saved_steps(root) if saved > step]:
        _prune_part(root / f"step_{later}")


def save(
    root: Path, policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress, world: World, keep: int | None
) -> None:
    """Commit `step_N/trainer` and remove parts beyond the `keep` newest. Every rank calls it.

    Raises:
        UserError: the disk is full, or the step is committed already; nothing half-written stands under the final name.
    """
    final = root / f"step_{progress.step}" / PART
    nonce = broadcast(world, secrets.token_hex(8))
    stage = agree(world, lambda: Stage(final, nonce))
    try:
        state = _state(policy, optimizer) | {"progress": asdict(progress), "rng": {str(world.rank): _rng(world)}}
        _save_distributed(state, stage.path / _STATE)
        extra = {"progress": asdict(progress), "ranks": world.size}
        on_main(world, lambda: stage.commit(step=progress.step, producer="trainer", extra=extra))
    except BaseException:
        stage.abort()
        raise
    if world.is_main and keep is not None:
        for step in saved_steps(root)[:-keep]:
            _prune_part(root / f"step_{step}")


def load(root: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, world: World) -> Progress:
    """Restore the state after `step` updates. Every rank calls it.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    directory = root / f"step_{step}" / PART
    manifest = on_main(world, lambda: verify(directory))
    state = _state(policy, optimizer)
    same_ranks = manifest.extra["ranks"] == world.size
    if same_ranks:  # on another number of ranks there is no state to continue; the seed's own then stands
        state["rng"] = {str(world.rank): _rng(world)}
    try:
        dcp.load(state, checkpoint_id=directory / _STATE)
    except (CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{directory} does not fit this model: {' '.join(str(error).split())[:300]}") from error
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if same_ranks:
        _set_rng(state["rng"][str(world.rank)], world)
    return Progress(**manifest.extra["progress"])


def _state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(policy, optimizer)
    return {"model": model, "optimizer": optim}


def _save_distributed(state: dict[str, Any], directory: Path) -> None:
    try:
        with disk_errors(directory):
            dcp.save(state, checkpoint_id=directory)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        full = any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes)
        # torch's archive writer turns the system's error into one about positions: then ask the file system.
        if full or shutil.disk_usage(directory.parent).free < _NO_ROOM_BYTES:
            raise UserError(f"disk full while writing {directory}: nothing was committed") from error
        raise


def _rng(world: World) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def _set_rng(states: dict[str, torch.Tensor], world: World) -> None:
    torch.set_rng_state(states["cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], world.device)


def _prune_part(step_directory: Path) -> None:
    """Remove our part; the step's directory goes with the last part in it."""
    prune(step_directory / PART)
    try:
        step_directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
