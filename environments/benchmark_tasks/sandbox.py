"""Run a program that nobody has read: in a process of its own that sees Python and nothing else; then it is gone.

`jail` isolates the process. Standard library only; safe to call from any thread.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import IO

JAIL = Path(__file__).with_name("jail.py")
PATIENCE = 5
END_SECONDS = 10.0  # for a killed process to be gone
MESSAGE = 2000  # characters of what a program says about its own end


class Ended(StrEnum):
    OK = "ok"
    FAILED = "failed"  # exit status, or a signal of its own doing: an exception, too much memory
    TIMEOUT = "timeout"
    OUTPUT = "output"  # more than the limit


class SandboxError(RuntimeError):
    """This machine cannot run programs in isolation; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """Of one run. Sizes in MiB."""

    seconds: float = (
        6.0  # of processor time, rounded up: how busy the machine is does not decide; PATIENCE times as many in all
    )
    memory_mib: int = 2048
    output_mib: int = 16  # of each file that it writes, too
    directory_mib: int = 64
    files: int = 64
    threads: int = 64  # of everything that this user runs; not for root


@dataclass(frozen=True)
class Run:
    ended: Ended
    output: str
    message: str  # the end of its stderr


def run(program: str, given: str, limits: Limits, unsafe: bool = False) -> Run:
    """Run Python source with `given` as its standard input, until it ends or is ended.

    Args:
        unsafe: Without namespaces: with the network, the files and rights of this user, and other processes' variables.

    Raises:
        SandboxError: the isolation cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as name, tempfile.TemporaryFile() as stdin:
        # Files, not pipes: bounded by the limit of file size, whoever holds them open, and read when all is over.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as reason:
            place = Path(name)
            (place / "source.py").write_text(program, encoding="utf-8", errors="surrogatepass")
            (place / "work").mkdir()
            stdin.write(given.encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            status = _run(place, (stdin, stdout, stderr, reason), limits, unsafe)
            output, message, why = _read(stdout, limits.output_mib << 20), _tail(stderr), _tail(reason)
    if why:
        raise SandboxError(f"programs cannot be run in isolation here: {why}")
    if status is None:
        return Run(Ended.TIMEOUT, "", message)
    if len(output) >= limits.output_mib << 20:
        return Run(Ended.OUTPUT, "", message)
    return Run(Ended.OK if status == 0 else Ended.FAILED, output.decode("utf-8", "replace"), message)


def _run(place: Path, files: tuple[IO[bytes], ...], limits: Limits, unsafe: bool) -> int | None:
    """Its exit status, None where its time was over.

    Args:
        files: Its three standard ones, and one for the reason why there is no jail.
    """
    stdin, stdout, stderr, reason = files
    settings = {
        "parent": os.getpid(),
        "program": str(place / "source.py"),
        "directory": str(place / "work"),
        "directory_mib": limits.directory_mib,
        "unsafe": unsafe,
        "reason": reason.fileno(),
        "python": _python(),
        "environment": {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
        "limits": {
            "RLIMIT_CPU": math.ceil(limits.seconds),
            "RLIMIT_AS": limits.memory_mib << 20,
            "RLIMIT_FSIZE": limits.output_mib << 20,
            "RLIMIT_NOFILE": limits.files,
            "RLIMIT_NPROC": limits.threads,
            "RLIMIT_STACK": min(256, limits.memory_mib // 4) << 20,
        },
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(JAIL), json.dumps(settings)],
        stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[reason.fileno()], env={}, cwd="/", start_new_session=True,
    )  # fmt: skip
    try:
        status = process.wait(timeout=PATIENCE * limits.seconds)
    except subprocess.TimeoutExpired:
        return None
    else:
        return None if status in (-signal.SIGXCPU, -signal.SIGKILL) else status
    finally:
        _end(process)


def _python() -> list[str]:
    """The directories that this Python is made of, by the names it knows them by."""
    places = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])]
    return [place for place in dict.fromkeys(places) if place not in ("/", "/usr")]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Its whole group: what it started, too, where it could start something."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=END_SECONDS)


def _read(file: IO[bytes], most: int) -> bytes:
    file.seek(0)
    return file.read(most)


def _tail(file: IO[bytes]) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - MESSAGE))
    return file.read(MESSAGE).decode("utf-8", "replace").strip()


@cache
def check() -> None:
    """Once a process: that programs can be run in isolation.

    Raises:
        SandboxError: they cannot; it says what to do.
    """
    try:
        ran = run("print(2 + 2)", "", Limits(seconds=60.0))
    except SandboxError as error:
        raise SandboxError(
            f"{error}. It takes Linux 5.12, user namespaces (sysctl user.max_user_namespaces, and in containers a "
            "profile that permits unshare and mount) and seccomp; or run what models write unprotected, with the "
            "argument unsafe = true"
        ) from error
    if ran.output != "4\n":
        raise SandboxError(f"the sandbox does not work: it ended with {ran.ended}, {ran.message or ran.output}")
