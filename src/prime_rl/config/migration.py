"""Settings and files of earlier releases: what they are today, or what to do instead. Data alone."""

import re
from collections.abc import Callable
from typing import Any


def _port_of(address: Any) -> Any:
    """Return the port of an address like http://localhost:8001; anything else as it is, also one with a host to lose."""
    local = re.fullmatch(r"https?://(?:localhost|127\.0\.0\.1):(\d{1,5})/*", str(address))
    return int(local[1]) if local else address


# Older spellings: the key of today in the same table, and how its value is written there. The same in a section of `rl`.
OLDER: dict[tuple[str, ...], tuple[str, Callable[[Any], Any]]] = {
    ("exp_id",): ("output_dir", lambda name: f"outputs/{name}"),
    ("ckpt", "path"): ("output_dir", lambda path: path),
    ("client", "port"): ("base_url", lambda port: f"http://localhost:{port}/v1"),
    ("benchmarks",): ("environment_ids", lambda names: str(names).replace(",", " ").split()),
    ("server", "port"): ("port", _port_of),
}
# configs/trainer/NAME.toml, or configs/trainer/NAME/1b.toml, is configs/NAME/train.toml.
OLDER_FOLDERS = {"trainer": "train", "training": "train", "orchestrator": "orch", "inference": "infer"}
# What is gone, and what to do instead.
REMOVED = {
    "adamw_lr_ratio": "AdamW updates its part at lr",
    "advertise": "clients list their servers, in client.base_url",
    "batch_normalize": "the sum is always normalized over the batch",
    "canary": "it is logprob_check",
    "checkpointed_layers": "a level holds for every layer",
    "client.discover": "servers are listed: give their addresses in base_url",
    "filters.off_policy": "max_off_policy_steps bounds the age of every sample",
    "from_baseline": "others are always compared with an episode that is left out",
    "gibberish.max_tokens": "one such token leaves an episode out",
    "hold": "`sft` keeps the versions that it evaluates",
    "log_samples_interval": "all rollouts are in `rollouts/`",
    "max_attempts": "an episode that a teacher did not score is made again",
    "match_rms": "updates always have the size of AdamW's",
    "model.layers": "for fewer layers give the directory of a config.json that says so",
    "no_canary": "write --no-logprob-check",
    "no_stage_weights": "new weights are staged wherever there is memory for them",
    "normal_weight": "give easy_weight and hard_weight relative to 1",
    "optim.betas1": "AdamW beside Muon has 0.9",
    "optim.betas2": "AdamW beside Muon has 0.95",
    "optim.nesterov": "the look-ahead is always on",
    "optim.state": "running means are float32; offload keeps them in host memory",
    "overflow": "a conversation that fills the context ends and is judged",
    "per_token": "each episode counts once",
    "prices": "report.json counts the tokens, by which prices can be multiplied",
    "recycle_episodes": "where memory runs out the kernel ends workers first, and their episodes run again",
    "recycle_mib": "where memory runs out the kernel ends workers first, and their episodes run again",
    "register_dir": "clients list their servers, in client.base_url",
    "requirements": "name an interpreter in `python`; docs/guides/environments.md has three lines that make one",
    "restart_backoff": "the first restart comes after a second, each further one after twice as long",
    "stage_weights": "new weights are staged wherever there is memory for them",
    "turn_timeout": "the time of an episode bounds its replies",
    "weights.canary": "the fixed prompt is always scored; the orchestrator's logprob_check can be off",
}
