#!/usr/bin/env python3
"""Write locks/*.txt, which the images are built from: versions of the resolution (uv.lock) with hashes of the files for
one platform. `uv run --group cpu scripts/export_locks.py`; with --check only say what differs, by names and versions.

No addresses are written: pip and uv take the files from the index that they are configured for, if the hashes agree.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
TARGETS = {"cpu": ["--group", "cpu"], "cuda": ["--all-extras"]}
BUILD = "hatchling\nuv\n"  # what the images are built by
PYTHON, GLIBC = (3, 12), 36  # of the images
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.12",
    "python_version": "3.12",
    "sys_platform": "linux",
}
HEAD = "# Written by scripts/export_locks.py, for {} on Linux x86_64 with Python 3.12.\n"


def exported(arguments: list[str]) -> list[Requirement]:
    """Return the pinned packages of a target for the images' platform."""
    command = ["uv", "export", "--quiet", "--frozen", "--no-default-groups", "--no-emit-project", "--no-hashes"]
    command += ["--no-annotate", "--no-header", *arguments]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    pins = [Requirement(line) for line in text.splitlines()]
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate(dict(ENVIRONMENT))]


def name_and_version(pin: Requirement) -> str:
    return f"{canonicalize_name(pin.name)}{pin.specifier}"


def hashes() -> dict[str, list[str]]:
    """Return, by name and version, the hashes of the wheels for the platform; of the source where there is none."""
    tags: set[Tag] = {*cpython_tags(PYTHON, platforms=PLATFORMS), *compatible_tags(PYTHON, "cp312", PLATFORMS)}
    found = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        wheels = [
            wheel["hash"]
            for wheel in package.get("wheels", [])
            if parse_wheel_filename(wheel["url"].rpartition("/")[2].replace("%2B", "+"))[3] & tags
        ]
        source = [package["sdist"]["hash"]] if "hash" in package.get("sdist", {}) else []
        found[f"{package['name']}=={package.get('version')}"] = sorted(wheels) or source
    return found


def build_lock() -> str:
    """Resolve what the images are built by, as of the date that freezes the project's resolution."""
    frozen = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", "--no-config"]
    command += [
        "--exclude-newer",
        frozen,
        "--python-version",
        "3.12",
        "--python-platform",
        "x86_64-manylinux_2_28",
        "-",
    ]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, input=BUILD).stdout


def pins_in(text: str) -> set[str]:
    return set(re.findall(r"^\S+==\S+", text, re.MULTILINE))


def main() -> None:
    check = "--check" in sys.argv[1:]
    if not check:
        subprocess.run(["uv", "lock", "--quiet"], cwd=ROOT, check=True)
        LOCKS.mkdir(exist_ok=True)
        (LOCKS / "build.txt").write_text(HEAD.format("building") + build_lock())
    of = {} if check else hashes()
    for target, arguments in TARGETS.items():
        path, pins = LOCKS / f"{target}.txt", sorted(map(name_and_version, exported(arguments)))
        if check:
            if differing := pins_in(path.read_text()) ^ set(pins):
                sys.exit(
                    f"{path.relative_to(ROOT)} differs from uv.lock: {', '.join(sorted(differing))}; run {__file__}"
                )
            continue
        lines = [" \\\n    ".join([pin, *(f"--hash={each}" for each in of[pin])]) for pin in pins]
        path.write_text(HEAD.format(target) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
