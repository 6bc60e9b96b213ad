"""The orchestrator's part of a checkpoint: how far it is. Everything else follows from the run directory and the seed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.errors import UserError
from prime_rl.transport.commit import list_steps, prune, read_manifest, stage

if TYPE_CHECKING:
    from prime_rl.config.shared import CkptConfig

_PART = "orchestrator"
_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """`step` is the next step to collect, `groups_opened` the groups drawn from the task stream so far, `version` the weights to start on."""

    step: int = 0
    groups_opened: int = 0
    version: int = 0
    resumed: bool = False


def resume_progress(output_dir: Path, ckpt: "CkptConfig | None") -> Progress:
    """Where to start: step 0, or after what the run directory already holds for the checkpoint that is resumed.

    Batches committed beyond the checkpoint are trained again unchanged, so collecting goes on after them.

    Raises:
        UserError: there is no such checkpoint.
    """
    if ckpt is None or ckpt.resume_step is None:
        return Progress()
    root = (ckpt.output_dir or output_dir) / "checkpoints"
    saved = [step for step in list_steps(root) if (root / f"step_{step}" / _PART).is_dir()]
    if not saved:
        raise UserError(f"nothing to resume: {root} holds no checkpoint of the orchestrator")
    step = saved[-1] if ckpt.resume_step == -1 else ckpt.resume_step
    if step not in saved:
        raise UserError(f"no checkpoint of step {step} in {root}; there are {saved}")
    progress = json.loads((root / f"step_{step}" / _PART / _FILE).read_text())
    following = step
    groups = progress["groups_opened"]
    rollouts = output_dir / "rollouts"
    committed = list_steps(rollouts)
    while following in committed:
        groups = read_manifest(rollouts / f"step_{following}").extra["groups_opened"]
        following += 1
    return Progress(following, groups, step, resumed=True)


def save_progress(output_dir: Path, ckpt: "CkptConfig", progress: Progress) -> None:
    """Commit `checkpoints/step_N/orchestrator`; older ones beyond `keep` are removed."""
    root = (ckpt.output_dir or output_dir) / "checkpoints"
    final = root / f"step_{progress.step}" / _PART
    if final.exists():
        return
    with stage(final, step=progress.step, producer="orchestrator") as path:
        (path / _FILE).write_text(json.dumps({"step": progress.step, "groups_opened": progress.groups_opened}))
    if ckpt.keep is not None:
        for step in [s for s in list_steps(root) if (root / f"step_{s}" / _PART).is_dir()][: -ckpt.keep]:
            prune(root / f"step_{step}" / _PART)
