"""Contract: the lines that commands.md says run, run to their end when pasted: on a CPU, small model, small numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from conftest import InferenceServer, free_port, wait_healthy
from prime_rl.transport.commit import list_steps
from support.commands import fork_line, make_checkout, parse_line, read_rows, run_line
from support.processes import Command, wait_for_all

SECONDS = 400.0
MODEL = ["--model.name", "assets/tiny-reverse"]
TRAINER = [*MODEL, "--device", "cpu", "--max-steps", 2, "--seq-len", 256]
ORCHESTRATOR = [
    *MODEL, "--max-steps", 2, "--seq-len", 256, "--batch-size", 8, "--rollouts-per-example", 4,
    "--sampling.max-tokens", 24, "--no-filter-zero-advantage", "--eval.num-examples", 4,
]  # fmt: skip
SERVER = [*MODEL, "--device", "cpu", "--max-model-len", 256, "--fork-engine"]
RL = [
    *MODEL, "--device", "cpu", "--seq-len", 256,
    *(f"--orchestrator.{word[2:]}" if str(word).startswith("--") else word for word in ORCHESTRATOR[6:]),
]  # fmt: skip
DATA = ["--data.name", "rows.jsonl", "--data.seq-len", 256, "--data.batch-size", 4]

# Lines that need no server, with what makes them small.
ALONE: dict[str, list[object]] = {
    "uv run python -V": [],
    "uv run rl --help": [],
    "uv run sft --help": [],
    "uv run eval --help": [],
    "uv run sft @ examples/debug/sft.toml": [],
    "uv run trainer @ examples/debug/rl/train.toml": [],
    "uv run sft @ examples/reverse_text/sft.toml": [*MODEL, "--device", "cpu", "--max-steps", 2, *DATA],
    "uv run sft --bench --data.fake.type fixed --data.micro-batch-size 8 --data.batch-size 8 --data.seq-len 128": MODEL,
    "uv run trainer @ configs/reverse_text/train.toml --bench --data.fake.micro_batch_size 8 "
    "--data.fake.batch_size 128 --data.fake.seq_len 128": [*MODEL, "--data.fake.batch-size", 16],
}
WHOLE = (
    "uv run rl --trainer @ examples/reverse_text/rl/train.toml --orchestrator @ examples/reverse_text/rl/orch.toml "
    "--inference @ examples/reverse_text/rl/infer.toml"
)
DEBUG_SERVER = "uv run inference @ examples/debug/rl/infer.toml"
DEBUG_ORCHESTRATOR = "uv run orchestrator @ examples/debug/rl/orch.toml"
DEBUG_EVAL = "uv run eval @ examples/debug/eval.toml"
OWN_SERVER = "uv run inference @ examples/reverse_text/rl/infer.toml"
WITH_OWN_SERVER = (
    "uv run rl --trainer @ examples/reverse_text/rl/train.toml --orchestrator @ examples/reverse_text/rl/orch.toml"
)
BY_HAND = (
    "uv run orchestrator @ examples/reverse_text/rl/orch.toml",
    "uv run trainer @ examples/reverse_text/rl/train.toml",
)
EVAL_VERSIONS = "uv run eval --model.name Qwen/Qwen3-0.6B --weights-dir outputs/weights"
RESUME = (
    "uv run rl --trainer @ configs/reverse_text/train.toml --orchestrator @ configs/reverse_text/orch.toml "
    "--ckpt.resume-step 10 --trainer.monitor.wandb.id trainer-run-id "
    "--orchestrator.monitor.wandb.id orchestrator-run-id"
)
BENCH = "uv run orchestrator @ configs/reverse_text/orch.toml --bench"
SERVED = {
    WHOLE, DEBUG_SERVER, DEBUG_ORCHESTRATOR, DEBUG_EVAL, OWN_SERVER, WITH_OWN_SERVER, *BY_HAND, EVAL_VERSIONS, RESUME,
    BENCH,
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = make_checkout(tmp_path / "prime-rl")
    rows = ('{"prompt": "ab", "completion": "ba"}', '{"prompt": "abc", "completion": "cba"}')
    (directory / "rows.jsonl").write_text("\n".join(rows * 8) + "\n")
    return directory


def test_every_line_that_should_run_is_run_here() -> None:
    assert {row.line for row in read_rows() if row.kind == "runs"} == ALONE.keys() | SERVED


@pytest.mark.parametrize("line", ALONE)
def test_alone(line: str, checkout: Path) -> None:
    run = fork_line if "--help" in line else run_line
    status, output = run(line, checkout, *ALONE[line], seconds=SECONDS)
    assert status == 0, output
    assert "Traceback" not in output


@pytest.mark.slow  # test_rl.py has one of one file
def test_one_command_for_everything(checkout: Path) -> None:
    """Three files, one command: two steps are trained, each process has its log, a model is left."""
    server = ["--max-model-len", 256, "--fork-engine", "--server.port", free_port()]
    inference = [f"--inference.{word[2:]}" if str(word).startswith("--") else word for word in server]
    status, output = run_line(WHOLE, checkout, *RL, "--max-steps", 2, *inference, seconds=SECONDS)
    assert status == 0, output
    assert list_steps(checkout / "outputs" / "rollouts") == [0, 1]
    assert 2 in list_steps(checkout / "outputs" / "weights")
    logs = {path.name for path in (checkout / "outputs" / "logs").iterdir()}
    assert {"trainer.log", "orchestrator.log", "inference.log"} <= logs


@contextmanager
def served(line: str, checkout: Path, *more: object) -> Iterator[str]:
    """The address of the server that a pasted line starts, until the end of the block."""
    port = free_port()
    with start(line, checkout, *SERVER, "--server.port", port, *more) as server:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(url, server.process, server.log)
        yield url


def start(line: str, checkout: Path, *more: object) -> Command:
    environment, (program, *words) = parse_line(line)
    log = checkout.parent / f"{program}-{free_port()}.log"
    return Command(program, *words, *more, cwd=checkout, env=environment, log=log)


@pytest.mark.parametrize("line", [DEBUG_ORCHESTRATOR, DEBUG_EVAL])
def test_validating_an_installation(line: str, checkout: Path, inference_server: InferenceServer) -> None:
    """Orchestrator and eval, each alone against a server: nobody trains, and the orchestrator ends all the same."""
    inference_server.reset()
    more = ["--model.name", inference_server.model, "--client.base-url", inference_server.root]
    status, output = fork_line(line, checkout, *more, seconds=SECONDS)
    assert status == 0, output


@pytest.mark.slow
def test_the_debug_server(checkout: Path) -> None:
    with served(DEBUG_SERVER, checkout):
        pass


@pytest.mark.slow
def test_a_server_of_ones_own(checkout: Path) -> None:
    """One server for a run, the same resumed, its evaluation, a benchmark, and the three processes by hand."""
    weights = checkout / "outputs" / "weights"
    with served(OWN_SERVER, checkout) as url:
        rl, client = [*RL, "--orchestrator.client.base-url", url], ["--client.base-url", url]

        def run(line: str, *more: object) -> str:
            status, output = run_line(line, checkout, *more, environment={"WANDB_MODE": "offline"}, seconds=SECONDS)
            assert status == 0, output
            return output

        run(WITH_OWN_SERVER, *rl, "--max-steps", 10, "--ckpt.interval", 10)
        assert "Step 10 [11/11]" in run(RESUME, *rl, "--max-steps", 11)
        assert 11 in list_steps(weights)
        assert "reverse-text" in run(EVAL_VERSIONS, *MODEL, *client, "--num-examples", 4)
        run(BENCH, *ORCHESTRATOR, *client)
        orchestrator, trainer = BY_HAND
        with (
            start(orchestrator, checkout, *ORCHESTRATOR, "--clean", *client) as first,
            start(trainer, checkout, *TRAINER, "--clean") as second,
        ):
            wait_for_all([first, second], SECONDS)
        assert 2 in list_steps(weights)
        assert (checkout / "outputs" / "logs" / "trainer.log").stat().st_size > 0
        assert httpx.get(f"{url}/health", timeout=30).is_success, "the server is left running"
