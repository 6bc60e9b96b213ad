"""prime-rl where it is on the path but not installed: a GPU host without network."""

from importlib.metadata import entry_points
from pathlib import Path

from prime_rl.inference.compat import PLUGIN

PLUGIN_GROUP = "vllm.endpoint_plugins"


def plugin_path(directory: Path) -> list[str]:
    """Return what PYTHONPATH needs for vLLM to find our routes: package metadata, made here if none is installed."""
    if any(entry.name == PLUGIN for entry in entry_points(group=PLUGIN_GROUP)):
        return []
    print("prime-rl is not installed: making the package metadata by which vLLM finds its routes", flush=True)
    found = directory / "prime_rl-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: prime-rl\nVersion: 0\n")
    (found / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\n{PLUGIN} = prime_rl.inference.routes:PrimeRoutes\n")
    return [str(directory)]
