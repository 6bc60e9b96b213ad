"""How long `vllm serve` alone takes to answer: what a run of `rl` on the same model is compared with.

    python benchmarks/peers/vllm_serve.py --model-dir /tmp/model --json results.json   # a GPU and vLLM

The same model, length limit and share of the GPU as one of `rl`'s servers has in case `shared-128`; run it beside
`end_to_end.py`. Every cache (torch.compile, Triton, vLLM) is an empty directory, so the start is a cold one.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from end_to_end import store
from machine import describe_gpus, describe_machine

CACHES = (
    "XDG_CACHE_HOME",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="what `end_to_end.py --model-dir` wrote")
    parser.add_argument("--gpu-memory", type=float, default=0.25, help="vLLM's share")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="prime-rl-vllm-serve-") as caches:
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(options.model_dir),
            "--port",
            str(port),
        ]
        command += ["--max-model-len", "1024", "--gpu-memory-utilization", str(options.gpu_memory)]
        environment = {**os.environ, **{name: f"{caches}/{name.lower()}" for name in CACHES}}
        began = time.monotonic()
        server = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            while not answers(port):
                if server.poll() is not None or time.monotonic() > began + options.timeout:
                    sys.exit(f"vllm serve did not answer (exit status {server.returncode})")
                time.sleep(0.2)
            seconds = time.monotonic() - began
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, 9)
            server.wait()
    row = {
        "bare_server_of": "shared-128",
        "until_ready": seconds,
        "machine": describe_machine() | {"gpus": describe_gpus()},
    }
    print(json.dumps(row))
    if options.json:
        store(options.json, {"shared-128, vllm serve": row})


def answers(port: int) -> bool:
    """Whether the server's health route says it is ready."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


if __name__ == "__main__":
    main()
