"""How long new weights take from the optimizer step until served, in parts, and how long no token is generated then.

    python benchmarks/weight_sync.py --case tiny --case "0.6B layers=1" --json benchmarks/results/weight_sync_cpu.json
    python benchmarks/weight_sync.py --device cuda --case "0.6B on=memory" --case "0.6B on=memory tp=2"    # 1 or 2 GPUs
    python benchmarks/weight_sync.py --device cuda --case "8B on=memory lora=16 in_flight=32 syncs=10"

A real `inference` server generates for 64 requests at a time, of which 4 are watched token by token, while this process
changes a policy's weights, commits them as the trainer does, and has the server load them. Needs vLLM (0.31 or 0.26)
and no network; `prime_rl` may be on PYTHONPATH only.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from machine import describe_gpus, describe_machine
from package import plugin_path
from steps import TOKENIZER, model_source
from tables import sync_lines, text_table
from torch import Tensor

from prime_rl.config.trainer import LoRAConfig, TrainerModel, WeightsConfig
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.parallel import World, close_world, init_world, local_part, seconds
from prime_rl.trainer.source import Source
from prime_rl.trainer.weight_copy import WeightCopy
from prime_rl.trainer.weight_publisher import WeightPublisher, write_version
from prime_rl.transport.commit import prune, step_dir

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from conftest import InferenceServer, launch_server

QUIET_SECONDS = 2.0  # before each version: what generation is like undisturbed
CANARY = {
    "token_ids": [*range(1, 65)],
    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
}
AFTER_SECONDS = 1.0  # after each, in which the first tokens of the new weights arrive


@dataclass(frozen=True)
class Case:
    """One row: `0.6B layers=4 on=disk in_flight=64 syncs=5`. `on`: disk, or memory (from the trainer, not by files)."""

    name: str
    model: str
    layers: int | None = None
    on: str = "disk"
    in_flight: int = 64
    watched: int = 4  # of these, token by token
    tokens: int = 384  # of a request, at most
    syncs: int = 5
    priority: int = 0  # of the prompt that proves what is served (-1: before what waits)
    tp: int = 1  # GPUs that share every layer of the server
    lora: int = 0  # rank of the adapters that are trained and served (0: all weights)


def parse_case(text: str) -> Case:
    """Raises ValueError for what is none."""
    model, *rest = text.split()
    given = dict(part.split("=", 1) for part in rest)
    on = given.pop("on", "disk")
    known = {"layers", "in_flight", "watched", "tokens", "syncs", "priority", "tp", "lora"}
    if on not in ("disk", "memory") or given.keys() - known:
        raise ValueError(f"{text!r}: on is disk or memory; the others are {', '.join(sorted(known))}")
    return Case(
        " ".join(part for part in text.split() if not part.startswith("syncs=")),  # how often is not what
        model,
        on=on,
        **{name: int(value) for name, value in given.items()},
    )


@dataclass(frozen=True)
class Arrivals:
    """When tokens arrived, in order of time; of which stream each is, and how many they were."""

    times: np.ndarray
    streams: np.ndarray
    counts: np.ndarray

    def gap(self, first: float, last: float) -> tuple[float, float]:
        """Return the length and the end of the longest time without a token that overlaps `first` … `last`."""
        ends = np.flatnonzero((self.times[1:] > first) & (self.times[:-1] < last)) + 1
        if not len(ends):
            return float("nan"), float("nan")
        lengths = self.times[ends] - self.times[ends - 1]
        longest = ends[int(np.argmax(lengths))]
        return float(lengths.max()), float(self.times[longest])

    def gap_of_a_stream(self, first: float, last: float) -> float:
        """The same for the stream that waited longest."""
        found = [
            Arrivals(self.times[self.streams == one], self.streams[:0], self.counts[:0]) for one in set(self.streams)
        ]
        return max((gap for one in found if (gap := one.gap(first, last)[0]) == gap), default=float("nan"))

    def rate(self, first: float, last: float) -> float:
        """Tokens a second and request."""
        inside = (self.times >= first) & (self.times < last)
        return float(self.counts[inside].sum() / (last - first) / max(len(set(self.streams)), 1))


class Writer:
    """What the trainer does: a policy, and versions of it."""

    def __init__(self, case: Case, device: str) -> None:
        self.world: World = init_world(device, 600)
        self.source: Source = model_source(case.model, case.layers)
        config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none")
        self._lora = LoRAConfig(rank=case.lora) if case.lora else None
        self.policy: Policy = build_policy(self.source, config, self.world, lora=self._lora)
        self._trained: list[Tensor] = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.source.config.architectures = [type(self.policy.lm).__name__]  # a made-up shape does not say it; vLLM asks
        self._memory = case.on == "memory"
        self._publisher: WeightPublisher | None = None
        self._times: dict[str, float] = {}
        self._factor = 1.03125

    def write_base(self, directory: Path) -> None:
        """The model that the server starts with."""
        copies = WeightCopy(self.policy, self.world, torch.bfloat16)
        seconds(*copies.copy())
        write_version(copies, self.source, directory, version=0, incarnation=0)

    def open(self, root: Path, base: Path) -> None:
        """Publish in `root/weights` from now on. Adapters are beside the model in `base`, not zero."""
        self.bytes = sum(parameter.numel() * 2 for parameter in self._trained)
        if self._lora is not None:
            self.source = replace(self.source, directory=base)
            for parameter in self._trained:
                local_part(parameter).detach().normal_(std=0.01)
        self._publisher = WeightPublisher(
            root, self.policy, self.source, self.world, torch.bfloat16,
            weights=WeightsConfig(transport="memory", host="127.0.0.1"), memory=self._memory, gpu=True,
            lora=self._lora,
            on_committed=lambda version, times: self._times.update(times),
        )  # fmt: skip
        self._publisher.open(0)
        self._publisher.settle()

    def step(self) -> float:
        """Change everything that is trained. Returns when that was done."""
        with torch.no_grad():
            torch._foreach_mul_(self._trained, self._factor)
        self._factor = 1 / self._factor
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.monotonic()

    def publish(self, version: int) -> dict[str, float]:
        """Publish as the trainer does, and wait. Return seconds of its parts: copy, write or checksum, hash, commit."""
        assert self._publisher is not None
        self._publisher.publish(version)
        self._publisher.settle()
        parts = {name.removeprefix("time/export_"): seconds for name, seconds in self._times.items() if "_" in name}
        return {"write": parts.pop("checksum", 0.0), **parts}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        close_world()


def measure_together(cases: Sequence[Case], device: str, scratch: Path) -> Iterator[dict[str, Any]]:
    """The rows of cases that one server can do: those of one model (starting it takes longer than a case)."""
    model = scratch / "model" / "step_0"
    with ExitStack() as stack:
        running: InferenceServer | None = None
        for number, case in enumerate(cases):
            with closing(Writer(case, device)) as writer:
                if running is None:
                    writer.write_base(model)
                    for path in TOKENIZER.glob("tokenizer*"):  # vLLM wants one, although ids go in and out
                        shutil.copy(path, model)
                    running = stack.enter_context(server(case, device, model, scratch))
                yield measure(case, writer, running, scratch, 1 + number * 1000)


def measure(case: Case, writer: Writer, running: InferenceServer, scratch: Path, first: int) -> dict[str, Any]:
    """All of a case: its row. Its versions are numbered from `first` on."""
    root = Path(tempfile.mkdtemp(prefix="weight_sync-", dir=scratch))
    try:
        writer.open(root, running.model)
        with load(case, running, scratch / "arrivals.npz") as arrived:
            with httpx.Client(
                base_url=running.root, timeout=120, trust_env=False
            ) as client:  # made before it is measured
                moments = [
                    sync(case, writer, client, root, version) for version in range(first, first + case.syncs + 1)
                ]
            time.sleep(AFTER_SECONDS)
        arrivals = arrived()
        syncs = [describe(moment, arrivals, case.in_flight) for moment in moments[1:]]  # the first one allocates
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {**asdict(case), "bytes": writer.bytes, "median": medians(syncs), "syncs": syncs}


def sync(case: Case, writer: Writer, client: httpx.Client, root: Path, version: int) -> dict[str, Any]:
    """From a step to what is served."""
    time.sleep(AFTER_SECONDS + QUIET_SECONDS)
    stepped = writer.step()
    directory = step_dir(root / "weights", version)
    parts = writer.publish(version)
    committed = time.monotonic()
    answer = client.post("/update_weights", json={"weight_dir": str(directory), "version": version})
    served = time.monotonic()
    if answer.is_error:
        raise RuntimeError(answer.text)
    client.post("/inference/v1/generate", json=CANARY | {"priority": case.priority}).raise_for_status()
    proven = time.monotonic()
    for old in (root / "weights").glob("step_*"):
        if old not in (directory, step_dir(root / "weights", version - 1), step_dir(root / "weights", 0)):
            prune(old)
    told = answer.json()
    return {
        "stepped": stepped,
        "committed": committed,
        "served": served,
        "prove": proven - served,
        **parts,
        **told["seconds"],
        "place": told["place"],
    }


def describe(moment: dict[str, Any], arrivals: Arrivals, in_flight: int) -> dict[str, Any]:
    """Moments as durations, beside what the requests saw."""
    stepped, committed, served = (moment.pop(name) for name in ("stepped", "committed", "served"))
    paused = served - moment["pause"]  # the answer comes as soon as generation goes on
    gap, ended = arrivals.gap(paused, served)
    return {
        **moment,
        "export": committed - stepped,
        "update": served - committed,
        "rest": served
        - committed
        - sum(moment[part] for part in ("check", "stage", "pause")),  # HTTP, and turns of the server's event loop
        "total": served - stepped,
        "gap": gap,
        "gap_of_a_request": arrivals.gap_of_a_stream(paused, served),
        "first_token": ended - stepped,
        "staging_gap": arrivals.gap(committed, paused)[0],
        "quiet_gap": arrivals.gap(stepped - QUIET_SECONDS, stepped)[0],
        "quiet_tokens_per_second": in_flight * arrivals.rate(stepped - QUIET_SECONDS, stepped),
        "staging_tokens_per_second": in_flight * arrivals.rate(committed, paused),
    }


def medians(syncs: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {name for one in syncs for name, value in one.items() if isinstance(value, float)}
    return {name: statistics.median(one[name] for one in syncs) for name in sorted(numbers)}


@contextmanager
def server(case: Case, device: str, model: Path, scratch: Path) -> Iterator[InferenceServer]:
    """A real one, on the last GPU, or with `tp` on all."""
    settings: dict[str, Any] = {"weights_root": "/", "max_model_len": 512}
    settings["tensor_parallel_size"] = case.tp
    if case.lora:
        settings["lora"] = {"max_rank": case.lora}
    if case.priority:
        settings["vllm"] = {"scheduling_policy": "priority"}
    environment: dict[str, str] = {}
    if device == "cuda":
        gpus = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        settings["gpu_memory_utilization"] = 0.5 if gpus == case.tp else 0.84  # as `rl` leaves room for a 4B model
        environment = {
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": visible.split(",")[-1] if case.tp == 1 else visible,
        }
    path = [*plugin_path(scratch / "site"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    directory = Path(tempfile.mkdtemp(prefix="server-", dir=scratch))
    # Only its own environment: a sender that is started later is not to see the server's GPU.
    with launch_server(directory / "run", model, settings, environment=environment) as running:
        yield running


@contextmanager
def load(case: Case, running: InferenceServer, into: Path) -> Iterator[Any]:
    """Requests all the time, or none. What it gives returns their arrivals, once the block has ended."""
    if not case.in_flight:
        yield lambda: Arrivals(np.empty(0), np.empty(0, int), np.empty(0, int))
        return
    command = [sys.executable, str(Path(__file__).with_name("token_load.py")), running.root, str(running.model)]
    command += ["--in-flight", str(case.in_flight), "--watched", str(case.watched), "--tokens", str(case.tokens)]
    command += ["--into", str(into)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        until_generating(running, case.in_flight)
        yield lambda: read_arrivals(into)
        process.communicate(b"\n", timeout=60)
    finally:
        process.kill()
        process.wait(60)


def until_generating(running: InferenceServer, in_flight: int, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = running.get("/metrics").text.splitlines()
        if any(
            float(line.split()[-1]) >= 0.9 * in_flight for line in lines if line.startswith("vllm:num_requests_running")
        ):
            return
        time.sleep(0.2)
    sys.exit(f"the server does not generate for {in_flight} requests after {seconds:.0f} s")


def read_arrivals(path: Path) -> Arrivals:
    found = np.load(path)
    if found["failed"]:
        print(f"{found['failed']} requests failed", file=sys.stderr)
    return Arrivals(found["times"], found["streams"], found["counts"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case",
        action="append",
        type=parse_case,
        required=True,
        help='e.g. "0.6B on=memory in_flight=64"; may be repeated; neighbours of one model share a server',
    )
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="directory on a disk")
    parser.add_argument("--json", type=Path, help="file for the figures; rows of other cases in it stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended and removed
    rows: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    machine = {**describe_machine(), "gpus": describe_gpus() if options.device == "cuda" else []}
    for _, cases in groupby(
        options.case, key=lambda case: (case.model, case.layers, case.priority, case.tp, case.lora)
    ):
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="weight_sync-") as scratch:
            for row in measure_together([*cases], options.device, Path(scratch)):
                rows[row["name"]] = {**row, "measured": machine}
                print(text_table(sync_lines(rows)), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
