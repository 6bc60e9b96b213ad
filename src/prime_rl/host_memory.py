"""How much memory the host has left: what the kernel calls available, or less where a cgroup has a limit."""

import os
from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process and its siblings could still take. `root` stands for `/` (in tests)."""
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    return max(min([available, *_left_in_cgroups(root)]), 0)


def local_ranks() -> int:
    """Ranks of this trainer that share the host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left in our cgroup, of version 2, and in those around it, where these have limits. Cached files that are
    not in use count as free."""
    mount = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            # Within a container the path may be the host's, which is not mounted: then the container's group is.
            own = Path(line.removeprefix("0::").lstrip("/"))
            for group in (mount / each for each in (own, *own.parents) if (mount / each / "memory.max").exists()):
                if (limit := (group / "memory.max").read_text().strip()) != "max":
                    cached = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                    used = int((group / "memory.current").read_text()) - int(cached.get("inactive_file", 0))
                    yield int(limit) - used
