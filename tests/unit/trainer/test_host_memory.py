"""What the host has left for us: the kernel's account, and the cgroups' limits. Files are the kernel's, elsewhere."""

from pathlib import Path

import pytest

from prime_rl.host_memory import available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def meminfo(gib: int) -> str:
    total = "MemTotal:       2097152000 kB"
    return f"{total}\nMemFree:        1000 kB\nMemAvailable:   {gib << 20} kB\nHugePages_Total:       0\n"


def v2(limit: object, used: int, cached: int) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used * GIB}\n",
        "memory.stat": f"anon 123\nactive_file 9999999\ninactive_file {cached * GIB}\n",
    }


def under(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("0::/", {}, 500),  # version 2 has no limits at its root
        ("0::/job", under("job", v2("max", 90, 0)), 500),
        ("0::/job", under("job", v2(100 * GIB, 90, 20)), 30),
        ("0::/job", under("job", v2(900 * GIB, 90, 20)), 500),
        ("0::/job", under("job", v2(100 * GIB, 120, 0)), 0),
        ("0::/job/step", under("job/step", v2("max", 1, 0)) | under("job", v2(64 * GIB, 4, 0)), 60),
        ("0::/host/path/of/a/container", under(".", v2(64 * GIB, 4, 0)), 60),  # not mounted inside of it
        ("4:memory:/job\n0::/job", under("job", v2(64 * GIB, 4, 0)), 60),
    ],
)
def test_the_tightest_limit_counts(cgroup: str, files: dict[str, str], left: int, tmp_path: Path) -> None:
    """Of our own group and those around it; cached files that nobody reads can be taken."""
    write(tmp_path, {"proc/meminfo": meminfo(500), "proc/self/cgroup": cgroup + "\n"} | files)
    assert available_bytes(tmp_path) == left * GIB
