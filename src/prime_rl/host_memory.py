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
    """Bytes left in each of our cgroups that has a limit, and in those around them."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)  # "0::/job" in version 2, "4:memory:/job" in version 1
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # Within a container the path may be the host's, which is not mounted: then the container's group is.
        group = Path(path.lstrip("/"))
        for inner in (group, *group.parents):
            if (mount / inner / names[0]).exists() and (left := _left(mount / inner, *names)) is not None:
                yield left


def _left(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Bytes left in a cgroup, cached files that are not in use counted as free; None without a limit."""
    most = (group / limit).read_text().strip()
    if most == "max":
        return None
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(most) - int((group / usage).read_text()) + int(statistics.get(cached, 0))
