"""Settings of earlier releases that are still taken, and what they are today."""

from collections.abc import Callable
from typing import Any

# The present key in the same table, and how to convert the value. They apply to sections of `rl`, too.
OLDER: dict[tuple[str, ...], tuple[str, Callable[[Any], Any]]] = {
    ("exp_id",): ("output_dir", lambda name: f"outputs/{name}"),
    ("ckpt", "path"): ("output_dir", lambda path: path),
    ("client", "port"): ("base_url", lambda port: f"http://localhost:{port}/v1"),
    ("benchmarks",): ("environment_ids", lambda names: str(names).replace(",", " ").split()),
}
