"""What both sides of `rollout.py` share: model, prompts, processes, and the rate between two points of a counter."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from machine import cpu_seconds, descendants
from package import plugin_path

REPOSITORY = Path(__file__).parents[1]
TINY = REPOSITORY / "assets" / "tiny-reverse"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Load:
    """What is sampled, on both sides.

    Args:
        model: A directory.
        prompt, reply: Tokens.
        flight: Requests in flight.
        group: Requests in a row with the same prompt.
    """

    model: Path
    prompt: int
    reply: int
    flight: int
    group: int

    @property
    def length(self) -> int:
        """Most tokens of a sequence; one is left over, since a reply must leave room within `seq_len`."""
        return self.prompt + self.reply + 1

    def engine_flags(self, cpu: bool) -> dict[str, object]:
        """vLLM's options that decide its speed, alike on both sides; as attributes are spelled."""
        flags: dict[str, object] = {"max_num_seqs": self.flight, "max_num_batched_tokens": 8192, "seed": 0}
        flags |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
        if cpu:
            flags |= {"enforce_eager": True, "dtype": "float32", "enable_chunked_prefill": False}
        return flags


def make_model(name: str, directory: Path) -> Path:
    """The bundled tiny model, or random weights of a known shape, with names for all ids of the vocabulary."""
    if name == "tiny":
        return TINY
    from steps import write_random_model

    write_random_model(directory, name)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    known = {token["id"] for token in tokenizer["added_tokens"]} | set(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"] |= {f"Ġw{i}": i for i in range(config["vocab_size"]) if i not in known}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def make_prompts(load: Load, count: int) -> tuple[list[str], list[list[int]]]:
    """`count` different messages that make prompts of exactly `load.prompt` tokens, and these tokens.

    Raises:
        SystemExit: a message of one letter is longer already.
    """
    from prime_rl.envs.renderer import choose

    renderer = choose(str(load.model), "auto")

    def tokens(text: str) -> list[int]:
        return list(renderer.render([{"role": "user", "content": text}], add_generation_prompt=True).token_ids)

    rng = random.Random(0)
    room = load.prompt - len(tokens("a")) + 1
    if room < 4:
        sys.exit(f"a prompt of {load.prompt} tokens has no room for {count} different messages")
    texts, prompts = [], []
    for _ in range(count):
        text = "".join(rng.choices(LETTERS, k=room - 2))
        texts.append(f"a{text}z")  # no blank at an edge: templates strip
        prompts.append(tokens(texts[-1]))
        assert len(prompts[-1]) == load.prompt, "the bundled tokenizer has one token a letter"
    return texts, prompts


def environment(directory: Path, cpu: bool) -> dict[str, str]:
    """Variables of all processes that are started."""
    path = [*plugin_path(directory / "metadata"), str(REPOSITORY / "src"), str(REPOSITORY / "benchmarks")]
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    values = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if cpu:
        values |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        values |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    else:
        values.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return values


@contextmanager
def running(
    name: str, command: Sequence[object], env: dict[str, str], log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process in a group of its own, which is ended with all that it has started."""
    print(f"starting {name} (log: {log})", flush=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command], env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"{name} did not end: killing it", flush=True)
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_SECONDS)


def await_true(
    what: str, seconds: float, look: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path
) -> None:
    """Look twice a second.

    Raises:
        SystemExit: with the end of the log, when the process has ended or the time is up.
    """
    began = time.monotonic()
    while not look():
        over = "took too long" if time.monotonic() - began > seconds else None
        if process.poll() is not None:
            over = f"ended with status {process.returncode}"
        if over:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            sys.exit(f"{tail}\n{what}: it {over} (log: {log})")
        time.sleep(0.5)


def fetch(url: str) -> str | None:
    """The body, or None when there is no good answer."""
    try:
        key = os.environ.get("VLLM_API_KEY")  # the server asks for it, too
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def gauge(metrics: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@dataclass
class Watch:
    """Samples of a server's counters and of what processes use, taken in a thread until the block ends."""

    metrics_url: str
    roots: dict[str, int]  # processes by name; each with all its descendants
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)

    def __enter__(self) -> "Watch":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(15)

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            if (text := fetch(self.metrics_url)) is None:
                continue
            self.seconds.append(time.monotonic())
            self.tokens.append(gauge(text, "vllm:generation_tokens_total"))
            self.running.append(gauge(text, "vllm:num_requests_running"))
            self.waiting.append(gauge(text, "vllm:num_requests_waiting"))
            self.preempted.append(gauge(text, "vllm:num_preemptions_total"))
            self.cpu.append(process_seconds(self.roots))

    def rates(self, total: float, first: float = 0.25, last: float = 0.75) -> dict[str, float]:
        """Return tokens a second from `first` to `last` of all `total` sampled tokens, and what was used meanwhile."""
        base = self.tokens[0]
        begin, end = (self._when(base + share * total) for share in (first, last))
        inside = [i for i, moment in enumerate(self.seconds) if begin <= moment <= end]
        rates = {"tokens_per_second": (last - first) * total / (end - begin), "seconds": end - begin}
        if len(inside) > 1:
            i, j = inside[0], inside[-1]
            span = self.seconds[j] - self.seconds[i]
            rates |= {
                "running": sum(self.running[k] for k in inside) / len(inside),
                "waiting": sum(self.waiting[k] for k in inside) / len(inside),
                "preemptions": self.preempted[j] - self.preempted[i],
            }
            rates |= {f"cores {name}": (self.cpu[j][name] - self.cpu[i].get(name, 0.0)) / span for name in self.cpu[j]}
        return rates

    def _when(self, tokens: float) -> float:
        """The moment at which the counter passed `tokens`, between two looks linearly."""
        pairs = zip(self.seconds, self.tokens, strict=True)
        before = (self.seconds[0], self.tokens[0])
        for moment, count in pairs:
            if count >= tokens:
                share = 1.0 if count == before[1] else (tokens - before[1]) / (count - before[1])
                return before[0] + share * (moment - before[0])
            before = (moment, count)
        return before[0]


def process_seconds(roots: dict[str, int]) -> dict[str, float]:
    """Return processor seconds so far by process: `orchestrator`, its `workers`, a server's processes by title."""
    used: dict[str, float] = {}
    for name, root in roots.items():
        for pid in descendants(root):
            try:
                title = _title(name, root, pid)
                used[title] = used.get(title, 0.0) + cpu_seconds(pid)
            except (OSError, IndexError):  # it has ended meanwhile
                continue
    return used


def _title(name: str, root: int, pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    if command.startswith("VLLM::"):  # vLLM names its processes
        return f"{name} {command.split()[0].removeprefix('VLLM::')}"
    if name == "orchestrator" and pid != root:
        return "workers"
    return name


def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="prime-rl-rollout-"))
