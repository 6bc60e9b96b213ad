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
