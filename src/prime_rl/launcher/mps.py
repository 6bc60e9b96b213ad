"""NVIDIA's Multi-Process Service (MPS): lets processes on one GPU compute concurrently in place of time-slicing.

As a program: the daemon, for as long as its launcher runs. CUDA finds it by two environment variables.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from prime_rl.errors import UserError
from prime_rl.processes import Child, watch
from prime_rl.wait import wait

_CONTROL, _PIPES, _LOGS = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_SECONDS = 20.0
_ANSWER_SECONDS = 10.0


@contextmanager
def mps_daemon(output_dir: Path) -> Iterator[dict[str, str]]:
    """Run a daemon; yield the environment variables of its clients. One that the user has started is used instead.

    Raises UserError: there is no such program, or it does not start.
    """
    if _PIPES in os.environ:
        yield {}
        return
    if shutil.which(_CONTROL) is None:
        raise UserError(f"mps: there is no {_CONTROL} on the PATH, which comes with NVIDIA's driver: leave mps out")
    log = output_dir / "logs" / "mps" / "mps.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # The path of a socket may have 107 characters, which run directories exceed.
    with TemporaryDirectory(prefix="prime-rl-mps-") as directory, log.open("ab") as output:
        variables = {_PIPES: directory, _LOGS: str(log.parent)}
        # Unset CUDA_VISIBLE_DEVICES: otherwise clients' device indices are relative to the daemon's.
        env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | variables
        daemon = Child([sys.executable, "-m", "prime_rl.launcher.mps"], env, output)
        try:
            subject = f"start of mps (see {log})"
            wait(lambda: daemon.status is not None or _ask("get_server_list", env), subject=subject, owner=_CONTROL,
                 seconds=_START_SECONDS)  # fmt: skip
            if daemon.status is not None:
                raise UserError(f"mps: {_CONTROL} does not start, see {log}: leave mps out")
            yield variables
        finally:
            _ask("quit", env)
            daemon.reap()


def _ask(command: str, env: dict[str, str]) -> bool:
    """Whether the daemon answers."""
    with suppress(subprocess.TimeoutExpired):
        answer = subprocess.run(
            [_CONTROL], input=command.encode(), env=env, capture_output=True, timeout=_ANSWER_SECONDS
        )
        return answer.returncode == 0
    return False


if __name__ == "__main__":
    watch()
    sys.exit(subprocess.call([_CONTROL, "-f"]))  # bounded: `watch` ends it with its launcher
