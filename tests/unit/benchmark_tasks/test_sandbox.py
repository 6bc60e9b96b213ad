"""The sandbox: what a hostile program can do is end badly."""

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmark_tasks import jail, sandbox
from benchmark_tasks.sandbox import Ended, Limits, Run, SandboxError
from prime_rl.wait import wait

pytestmark = pytest.mark.usefixtures("isolation")
LIMITS = Limits(seconds=20.0, memory_mib=512, output_mib=1, directory_mib=4)


def run(program: str, given: str = "", limits: Limits = LIMITS) -> Run:
    return sandbox.run(program, given, limits)


def test_a_program_runs() -> None:
    """Contract: standard input and output, threads, deep recursion, asyncio and the standard library are there."""
    program = (
        "import sys, threading, asyncio\nsys.setrecursionlimit(10**6)\n"
        "def f(n): return n and 1 + f(n - 1)\n"
        "async def g(): return 1\n"
        "t = threading.Thread(target=print, args=(input(),)); t.start(); t.join()\n"
        "print(f(20000), asyncio.run(g()), __name__)"
    )
    assert run(program, "héllo\nrest") == Run(Ended.OK, "héllo\n20000 1 __main__\n", "")


REFUSED = [
    "import socket\nsocket.socket()",
    "import os\nwhile True: os.fork()",
    "import subprocess\nsubprocess.Popen(['sleep', '600'])",
    "import os\nos.posix_spawn('/bin/sleep', ['sleep', '600'], {})",
    "import os\nos.kill(os.getppid(), 9)",
]


def test_no_network_and_no_other_processes() -> None:
    """Contract: a program has no sockets. It starts no processes, so that none can stay behind, and ends none."""
    for program in REFUSED:
        ran = run(program)
        assert ran.ended is Ended.FAILED
        assert "Operation not permitted" in ran.message


LIBC = "import ctypes, os, resource\nlibc = ctypes.CDLL(None, use_errno=True)\n"


ATTACKS = [
    "print(libc.sigqueue({victim}, 9, ctypes.c_void_p()), ctypes.get_errno())",
    "resource.prlimit({victim}, resource.RLIMIT_CPU, (0, 0))",
    "os.sched_setaffinity({victim}, [0])",
    "os.setpriority(os.PRIO_PROCESS, {victim}, 19)",
    "import fcntl\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {victim})",
    "import fcntl\nfcntl.fcntl(os.pipe()[0], 10, 9)",
    "import fcntl\nfcntl.ioctl(os.pipe()[0], 0x8901, ctypes.c_int({victim}))",
]


def test_other_processes_are_left_alone() -> None:
    """Contract: numbers of processes can be guessed; whoever they are, nothing can be done to them."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        priority = os.getpriority(os.PRIO_PROCESS, victim.pid)
        for attack in ATTACKS:
            ran = run(LIBC + attack.format(victim=victim.pid))
            refused = ("Operation not permitted", "PermissionError")
            assert ran.output == "-1 1\n" or any(words in ran.message for words in refused), attack
        assert (victim.poll(), os.getpriority(os.PRIO_PROCESS, victim.pid)) == (None, priority)
        victim.communicate(b"\n")
        assert victim.returncode == 0


def test_it_cannot_outlive_who_started_it() -> None:
    """Contract: nor ask not to die with it; its own limits are still to be read, and files to be locked."""
    assert (
        run(f"{LIBC}print(libc.prctl(1, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CPU)[0])").output == "-1 20\n"
    )
    assert run("import fcntl\nwith open('x', 'w') as f: print(fcntl.fcntl(f, fcntl.F_GETFD))").output == "1\n"


def test_memory() -> None:
    """Contract: more than the limit is the program's own error."""
    assert "MemoryError" in run("x = bytearray(1 << 30)").message
    assert run("x = []\nwhile True: x.append('y' * 1000000)").ended is Ended.FAILED


def test_an_endless_loop() -> None:
    """Contract: it ends at its time, also when it catches everything and sleeps."""
    quick = Limits(seconds=0.5)
    assert run("while True: pass", limits=quick).ended is Ended.TIMEOUT
    stubborn = (
        "import signal, time\nfor n in range(1, 32):\n"
        "  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
        "while True:\n  try: time.sleep(100)\n  except BaseException: pass"
    )
    assert run(stubborn, limits=quick).ended is Ended.TIMEOUT


def test_output_is_bounded() -> None:
    """Contract: of standard output and of standard error."""
    assert run("while True: print('x' * 100000)").ended is Ended.OUTPUT
    ran = run("import sys\nwhile True: sys.stderr.write('x' * 100000)")
    assert ran.ended is Ended.FAILED
    assert len(ran.message) <= sandbox.MESSAGE


def test_files_are_bounded_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: large files and many files fail; nothing outside its directory can be written; nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "File too large" in run("open('big', 'wb').write(b'x' * (2 << 20))").message
    assert "No space left" in run("for i in range(99): open(str(i), 'wb').write(b'x' * (1 << 19))").message
    assert "Read-only file system" in run("import os; open(os.__file__, 'a')").message
    assert run("open('a', 'w').write('1'); print(open('a').read())").output == "1\n"
    assert not list(tmp_path.iterdir())


def test_keys_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: neither inherited, nor read from processes around it, nor from files: there are none but Python's."""
    monkeypatch.setenv("SECRET_API_KEY", "sk-123")
    assert "SECRET" not in run("import os; print(dict(os.environ))").output
    secret = tmp_path / "token"
    secret.write_text("sk-123")
    for path in (secret, f"/proc/{os.getpid()}/environ", "/proc/self/environ", "/etc/passwd", Path(__file__)):
        assert "No such file" in run(f"open({str(path)!r})").message
    listed = run("import os; print(*os.listdir('/etc'))").output.split()
    assert set(listed) <= {"ld.so.cache", "alternatives", "localtime"}


def test_it_has_no_capabilities() -> None:
    """Contract: the namespace of users makes it nobody."""
    asks = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nheader = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "data = (ctypes.c_uint32 * 6)(*[9] * 6)\n"
        "print(os.getuid(), libc.capget(header, data), *data)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'none', b'/', b'tmpfs', 0, None), libc.chroot(b'/usr'))"
    )
    # Of both words: effective, permitted, inheritable.
    assert run(asks).output == "65534 0 0 0 0 0 0 0\n-1 -1 -1\n"


def test_it_dies_with_who_started_it() -> None:
    """Contract: nothing runs on when the worker is killed."""
    code = "from benchmark_tasks.sandbox import *\nrun('import time; time.sleep(600)', '', Limits(seconds=600))"
    outer = subprocess.Popen([sys.executable, "-c", code])

    def children() -> list[str]:
        tasks = Path(f"/proc/{outer.pid}/task").iterdir()
        return [child for task in tasks for child in (task / "children").read_text().split()]

    inner = wait(children, subject="program", owner="sandbox", seconds=30.0)
    outer.kill()
    outer.wait(timeout=30)
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inner), subject="end", owner="it", seconds=30.0)


def test_without_isolation_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Contract: without namespaces one line says so and what to do; `unsafe` runs without them, still limited."""
    denied = tmp_path / "jail.py"
    fails = 'raise OSError(1, "unshare: Operation not permitted") or call("unshare", '
    denied.write_text(Path(jail.__file__).read_text().replace('call("unshare", ', fails))
    monkeypatch.setattr(sandbox, "JAIL", denied)
    sandbox.check.cache_clear()
    try:
        with pytest.raises(SandboxError, match="unshare: Operation not permitted.*unsafe = true") as caught:
            sandbox.check()
        assert "\n" not in str(caught.value)
        ran = sandbox.run("print(1)", "", LIMITS, unsafe=True)
        assert ran == Run(Ended.OK, "1\n", "")
        assert "MemoryError" in sandbox.run("x = bytearray(1 << 30)", "", LIMITS, unsafe=True).message
    finally:
        sandbox.check.cache_clear()


@pytest.mark.parametrize("machine", sorted(jail.CALLS))
def test_the_filter_of_calls(machine: str) -> None:
    """Contract: run by hand, by architecture: threads are allowed; processes, sockets and foreign calls are not."""
    calls, architecture = jail.CALLS[machine], jail.ARCHITECTURES[machine]
    code = jail.program(machine)
    assert _verdict(code, architecture, calls["clone"], jail.CLONE_THREAD | 0x100) == jail.ALLOW
    assert _verdict(code, architecture, calls["clone"], 0x11) & 0x7FFF0000 == jail.REFUSE
    assert _verdict(code, architecture, calls["clone3"], 0) == jail.REFUSE | 38
    assert _verdict(code, architecture + 1, 0, 0) & 0x7FFF0000 == jail.REFUSE
    assert _verdict(code, architecture, 0x40000001, 0) & 0x7FFF0000 == jail.REFUSE
    for name, (place, refused, values) in jail.BY_ARGUMENT.items():
        for argument in (*values, 0x7777):
            denied = (argument in values) == refused
            expected = jail.REFUSE | 1 if denied else jail.ALLOW
            assert _verdict(code, architecture, calls[name], argument, place) == expected
    for name, number in calls.items():
        if name not in ("clone", "clone3", *jail.BY_ARGUMENT):
            assert _verdict(code, architecture, number, 0) == jail.REFUSE | 1, name
    for number in set(range(500)) - set(calls.values()):
        assert _verdict(code, architecture, number, 0) == jail.ALLOW


def _verdict(code: bytes, architecture: int, number: int, argument: int, at: int = 0) -> int:
    """What the kernel's machine makes of a call."""
    words = {0: number, 4: architecture, 16 + 8 * at: argument}
    instructions = list(struct.iter_unpack("HBBI", code))
    place, value = 0, 0
    while True:
        kind, yes, no, constant = instructions[place]
        place += 1
        if kind == jail.LOAD:
            value = words[constant]
        elif kind == jail.RETURN:
            return constant
        else:
            equal, greater, shared = value == constant, value > constant, bool(value & constant)
            tests = {jail.JUMP_EQUAL: equal, jail.JUMP_GREATER: greater, jail.JUMP_SET: shared}
            place += yes if tests[kind] else no
