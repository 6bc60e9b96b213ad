"""A cluster of two nodes on this machine: Debian's munged, slurmctld, and a slurmd for each node."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

NODES = ("127.0.0.1", "127.0.0.2")  # names that are addresses: nothing has to resolve them
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=60
NodeName={nodes[0]} NodeHostname=localhost NodeAddr={nodes[0]} Port={ports[0]} CPUs=1 State=UNKNOWN
NodeName={nodes[1]} NodeHostname=localhost NodeAddr={nodes[1]} Port={ports[1]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no cluster can be started here; empty where it can."""
    tools = ("munged", "slurmctld", "slurmd", "sbatch")
    if absent := [tool for tool in tools if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"no {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "slurmctld and slurmd need root"


class SlurmCluster:
    """`env` is that of its commands; `root` holds its logs."""

    def __init__(self, root: Path, free_port: Callable[[], int]) -> None:
        self.root = root
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.env = {**os.environ, "SLURM_CONF": str(root / "slurm.conf"), "PATH": path}
        ports = [free_port() for _ in NODES]
        host = os.uname().nodename
        text = CONFIG.format(root=root, host=host, port=free_port(), ports=ports, nodes=NODES)
        (root / "slurm.conf").write_text(text)
        (root / "state").mkdir()
        (root / "munge.key").write_bytes(os.urandom(1024))
        (root / "munge.key").chmod(0o400)

    def start(self) -> None:
        root = self.root
        files = [f"--{name}={root}/munge.{name.removesuffix('-file')}" for name in ("key-file", "pid-file", "log-file")]
        self.run("munged", "--force", *files, f"--seed-file={root}/munge.seed", f"--socket={root}/munge.socket")
        self.run("slurmctld")
        for node in NODES:
            self.start_node(node)

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL all that runs on a node, as if its power had failed."""
        self._kill("slurmd", node)
        mark = f"SLURMD_NODENAME={node}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)

    def state(self, job: str) -> str:
        """State and restarts of a job, such as "RUNNING 0"."""
        words = dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", "-o", job).split())
        return f"{words['JobState']} {words['Restarts']}"

    def stop(self) -> None:
        for node in NODES:
            self.kill_node(node)
        self._kill("slurmctld")
        self._kill("munge")

    def _kill(self, name: str, node: str = "") -> None:
        with suppress(OSError, ValueError):
            os.kill(int((self.root / f"{name}{f'-{node}' if node else ''}.pid").read_text()), signal.SIGKILL)


@contextmanager
def slurm_cluster(free_port: Callable[[], int]) -> Iterator[SlurmCluster]:
    with TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:  # short: a socket's path has 107 characters at most
        Path(name).chmod(0o755)
        cluster = SlurmCluster(Path(name), free_port)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
