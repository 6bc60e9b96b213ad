"""Fixtures that several rooms share: a tiny model, and one real inference server for the whole session."""

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import tomli_w
from loguru import logger
from xdist.scheduler import LoadFileScheduling

from prime_rl import faults
from prime_rl.monitor import log, status

# No test asserts a duration.
hypothesis.settings.register_profile("prime-rl", deadline=None, max_examples=50)
hypothesis.settings.load_profile("prime-rl")

# The processes of a test import torch, vLLM and verifiers, which takes twice the time where no bytecode may be kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tiny tensors gain nothing from threads; each worker of the suite and each process of a test would start one a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.dont_write_bytecode = False

READY_SECONDS = 300.0
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REPOSITORY = Path(__file__).parent.parent
# Of the integration tests, those that start real servers.
WITH_SERVERS = (
    "test_algorithms", "test_api", "test_wrong_weights", "test_commands_run", "test_data_parallel", "test_evals",
    "test_examples", "test_inference", "test_loop", "test_parity", "test_rl",
)  # fmt: skip


def _names_tests(config: pytest.Config) -> bool:
    """Whether the command line names files or tests, rather than nothing or directories."""
    return any(Path(argument.partition("::")[0]).suffix for argument in config.option.file_or_dir)


def pytest_configure(config: pytest.Config) -> None:
    """Leave out slow tests, unless the command line chooses tests itself (`-m`, `-k`, a file)."""
    if importlib.util.find_spec("reverse_text") is None:  # an install from before they moved to `environments/`
        pytest.exit("the bundled environments are not installed: `uv sync --group cpu`", returncode=4)
    if not (_names_tests(config) or config.option.keyword or config.option.markexpr):
        config.option.markexpr = "not slow"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers for directories, none for files and tests that are named, nor on GPUs, which they would share."""
    chosen = _names_tests(config) or config.option.keyword or config.option.markexpr == "gpu"
    return 0 if chosen else min(2, os.cpu_count() or 1)


class ByPlace(LoadFileScheduling):
    """What one worker runs, one after the other: a file, and all that start real servers, which share one and want a
    core each. In the order of the folders: what forks this process comes before what runs torch in it, whose threads a
    fork does not survive."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith("tests/integration/"):
            return file
        return "servers" if Path(file).stem in WITH_SERVERS else "launcher" if "/test_launcher" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPlace:
    """(Marks of groups, which xdist has for this, are not heard under pytest 9.2.)"""
    return ByPlace(config, log)


def make_tiny_model(directory: Path, *, experts: int = 0, tied: bool = True, seed: int = 0) -> Path:
    """Save a random Qwen3 (`experts`: Qwen3-MoE) of some 100 k parameters with a byte tokenizer and ChatML."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bytes_only = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate([*alphabet, *special])}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        additional_special_tokens=special,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    shape: dict[str, Any] = {
        "vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "initializer_range": 0.2, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(seed)
    model: Any
    if experts:
        moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **moe))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class InferenceServer:
    """A running server. `weights_root` is where updates may come from; requests carry `key`, if there is one."""

    base_url: str
    model: Path
    weights_root: Path
    output_dir: Path
    log: Path
    pid: int
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def root(self) -> str:
        """`base_url` without /v1: where /health and the weight routes are."""
        return self.base_url.removesuffix("/v1")

    def reset(self) -> None:
        """Serve the base weights again."""
        httpx.post(f"{self.root}/reload_weights", timeout=60).raise_for_status()

    def post(self, path: str, body: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.root}{path}", json=body, timeout=120, **{"headers": self.headers} | kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(f"{self.root}{path}", timeout=60, **{"headers": self.headers} | kwargs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def launch_server(
    directory: Path,
    model: Path,
    settings: dict[str, Any] | None = None,
    module: str = "prime_rl.entrypoints.inference",
    environment: Mapping[str, str] | None = None,
) -> Iterator[InferenceServer]:
    """Run `inference @ file` in a process group that dies with this process. `module` may replace it; `environment`
    adds to, or replaces, this process's variables."""
    from support.processes import Command  # is not there where conftest.py stands alone (test_pytest_lines.py)

    directory.mkdir(parents=True, exist_ok=True)
    weights_root = directory / "weights"
    weights_root.mkdir()
    port = free_port()
    config = {
        "output_dir": str(directory),
        "weights_root": str(weights_root),
        "model": {"name": str(model)},
        "fork_engine": True,
        **(settings or {}),
        "server": {"port": port, **(settings or {}).get("server", {})},
    }
    file = directory / "inference.toml"
    file.write_text(tomli_w.dumps(config))
    path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, **(environment or {})}
    with Command("inference", "@", file, log=directory / "inference.log", env=env, module=module) as command:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(url, command.process, command.log)
        yield InferenceServer(f"{url}/v1", model, weights_root, directory, command.log, command.process.pid)
        command.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(30)


def wait_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    pytest.fail(f"the inference server did not become ready (exit status {process.poll()}):\n{tail}")


@pytest.fixture(autouse=True)
def loguru_in_caplog(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Log to `caplog`: warnings, or what `caplog.set_level` asks for. A set-up that the test made ends with it, and the
    heartbeats of statuses that it left, which would log their waits in later tests."""

    def wanted(record: Any) -> bool:
        return record["level"].no >= (caplog.handler.level or logging.WARNING)

    logger.add(caplog.handler, format="{message}", filter=wanted)
    yield
    logger.remove()
    log._sinks.clear()
    for left in status._writers.values():
        left.close()


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What this package logs, from info on."""
    caplog.set_level(logging.INFO, "prime_rl")
    return caplog


@pytest.fixture
def isolation() -> None:
    """Skips what runs programs in the sandbox, where the system does not let it isolate them."""
    from benchmark_tasks import sandbox

    try:
        sandbox.check()
    except sandbox.SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The bundled model."""
    return REPOSITORY / "assets" / "tiny-reverse"


@pytest.fixture(scope="session")
def inference_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    """Start one real vLLM server for the session: float32, seeds allowed. Call `.reset()` to rely on its weights."""
    directory = tmp_path_factory.mktemp("server")
    with launch_server(directory / "server", tiny_model, environment=failing_loads(directory)) as server:
        yield server


def failing_loads(directory: Path) -> dict[str, str]:
    """Variables of a server whose first load of version 925 fails."""
    plan = directory / "faults.json"
    plan.write_text(json.dumps([{"point": "loading:v925", "process": "inference", "do": "error"}]))
    return {faults.ENV: str(plan)}


LaunchServer = Callable[..., InferenceServer]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[LaunchServer]:
    """Start further servers, with settings of their own, that end with the test (12 s each: mark such tests slow)."""
    with ExitStack() as stack:

        def start(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> InferenceServer:
            directory = tmp_path / f"server-{free_port()}"
            return stack.enter_context(launch_server(directory, model, settings, **options))

        yield start


@pytest.fixture(scope="session")
def chat_prompt(tiny_model: Path) -> list[int]:
    """Token ids of a short prompt of the tiny model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return list(tokenizer("The quick brown fox jumps over the lazy dog")["input_ids"])
