"""Settings and files of earlier releases, and what they are today."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _port_of(address: Any) -> Any:
    """Return the port of an address like http://localhost:8001; any other value, or one with another host, as it is."""
    local = re.fullmatch(r"https?://(?:localhost|127\.0\.0\.1):(\d{1,5})/*", str(address))
    return int(local[1]) if local else address


# Older spellings: the present key in the same table, and how to convert the value. They apply to sections of `rl`, too.
OLDER: dict[tuple[str, ...], tuple[str, Callable[[Any], Any]]] = {
    ("exp_id",): ("output_dir", lambda name: f"outputs/{name}"),
    ("ckpt", "path"): ("output_dir", lambda path: path),
    ("client", "port"): ("base_url", lambda port: f"http://localhost:{port}/v1"),
    ("benchmarks",): ("environment_ids", lambda names: str(names).replace(",", " ").split()),
    ("server", "port"): ("port", _port_of),
}
# Options, or tables of them, that are refused, and what became of them; docs/migration.md has all.
GONE = {
    "model.attn": "renamed to model.attention",
    "ac_offloading": "renamed to model.activation_offload",
    "trajectory_strategy": "renamed to trajectories of an environment",
    "weights.canary": "removed: the fixed prompt of every version is scored",
    "canary": "renamed to logprob_check",
    "filters.overlong": "removed: filters.truncated leaves out what was cut at sampling.max_tokens",
    "filters.off_policy": "removed: max_off_policy_steps bounds the age of every sample",
    "gibberish.max_tokens": "removed: one such token leaves an episode out",
    "from_baseline": "removed: others are always compared with an episode that is left out",
    "normal_weight": "removed: easy_weight and hard_weight are relative to 1",
    "batch_normalize": "removed: gdpo always normalizes over the batch",
    "scheduler.shape": "removed: linear falls in a straight line over decay_steps, cosine is a type of its own",
    **dict.fromkeys(("model.ac", "checkpointed_layers"), "replaced by one level, model.activation_checkpointing"),
    "model.layers": "removed: --bench takes the directory of a config.json with fewer layers",
    "log_samples_interval": "removed: all rollouts are in rollouts/",
    "restart_backoff": "removed: it is a second, doubled with each further restart",
    "stage_weights": "removed: a version is staged wherever there is memory for it",
    "prices": "removed: report.json has the tokens of all attempts",
    "requirements": "removed: name an interpreter that has them in python",
    "overflow": "removed: a conversation that fills the context ends and is judged",
    **dict.fromkeys(("optim_cpu_offload", "optim.state"), "removed: optim.offload keeps running means in host memory"),
    **dict.fromkeys(("match_rms", "adamw_lr_ratio", "nesterov"), "removed: updates of muon have AdamW's size and lr"),
    **dict.fromkeys(("turn_timeout", "tool_timeout"), "removed: rollout_timeout bounds an episode and its replies"),
    **dict.fromkeys(("recycle_episodes", "recycle_mib"), "removed: the kernel ends workers where memory runs out"),
    **dict.fromkeys(("weights.tmpfs", "weights_tmpfs"), 'removed: weights.transport = "memory" is faster'),
    **dict.fromkeys(("api_servers", "discover", "register_dir", "advertise"), "removed: client.base_url lists servers"),
}
# configs/trainer/NAME.toml, or configs/trainer/NAME/1b.toml, is configs/NAME/train.toml.
OLDER_FOLDERS = {"trainer": "train", "training": "train", "orchestrator": "orch", "inference": "infer"}


def current_file(path: Path) -> Path | None:
    """Return what a file of an earlier release is called today, None where there is no such file."""
    for position, folder in enumerate(path.parts[:-1]):
        name = path.with_suffix("").parts[position + 1]
        today = Path(*path.parts[:position], name, f"{OLDER_FOLDERS.get(folder)}.toml")
        if today.is_file():
            return today
    return None
