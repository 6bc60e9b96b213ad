"""An engine process must not outlive its server, whatever way the server dies. Standard library only."""

import os
import select
import signal
import threading
from pathlib import Path

from prime_rl import lifeline


def follow(pid: int) -> bool:
    """SIGKILL this process once process `pid`, one of its ancestors, is gone.

    Returns:
        Whether `pid` is followed: not on another host, where the number means something else.
    """
    if pid not in ancestors():
        return False
    watched = os.pidfd_open(pid)
    lifeline.wake_without_parent()
    threading.Thread(target=_await_exit, args=(watched,), name="follow", daemon=True).start()
    return True


def ancestors() -> list[int]:
    """Process ids from this process's parent up to the first."""
    found = [os.getppid()]
    while found[-1] > 1:
        # The name, in brackets, may hold spaces; the parent's id is the second field after it.
        fields = Path(f"/proc/{found[-1]}/stat").read_text().rpartition(")")[2].split()
        found.append(int(fields[1]))
    return found


def _await_exit(watched: int) -> None:
    # Readable once the process is gone.
    select.select([watched], [], [])  # bounded: a daemon thread, it ends with the process
    os.kill(os.getpid(), signal.SIGKILL)
