"""Which GPUs this process may use, without importing torch."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Names as CUDA_VISIBLE_DEVICES wants them: indices, or UUIDs where the variable holds those. Empty without GPUs."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    return _installed() if wanted is None else parse_visible(wanted)


def memory_gib(gpus: Sequence[str]) -> float | None:
    """Memory of the smallest of these GPUs, in GiB; None where nvidia-smi does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        asked = [tool, f"--id={','.join(gpus)}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        lines = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split()
    except subprocess.TimeoutExpired:
        return None
    return min((int(line) for line in lines if line.isdigit()), default=0) / 1024 or None


def parse_visible(value: str) -> list[str]:
    """CUDA reads the list up to the first invalid entry, such as -1."""
    gpus: list[str] = []
    for item in (part.strip() for part in value.split(",")):
        if not item or item.startswith("-"):
            break
        gpus.append(item)
    return gpus


def _installed() -> list[str]:
    # nvidia-smi sees what a container was given; /proc shows the whole host and serves where the tool is missing.
    if tool := shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            return []
        count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    else:
        count = len(list(_PROC_GPUS.iterdir())) if _PROC_GPUS.is_dir() else 0
    return [str(index) for index in range(count)]
