"""A server without a run around it, for `rl chat`, `prime_rl.serve` and `rl parity`, which has it sample, and stops it
to score: one GPU is enough."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from prime_rl.config import EvalConfig, InferenceConfig, write_toml
from prime_rl.config.inference import SERVER, InferenceModel
from prime_rl.config.rl import ParityConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError, say
from prime_rl.fleet.client import InferenceClient
from prime_rl.launcher.plan import ProcessSpec, ServerSpec
from prime_rl.launcher.ports import with_ports
from prime_rl.launcher.rundir import forget_status
from prime_rl.launcher.supervise import SupervisedChild
from prime_rl.monitor import read_status
from prime_rl.wait import wait

_QUESTIONS = ("Why is the sky blue?", "What is 17 * 23?", "Name three rivers.", "Once upon a time")
_PROBE_SECONDS = 5.0


def process_of(
    name: str, config: InferenceConfig | EvalConfig, env: Mapping[str, str], server: ServerSpec | None = None
) -> ProcessSpec:
    """Write the configuration of a process of `output_dir`, forget its earlier status, and return what starts it."""
    path = config.output_dir / "configs" / f"{name}.toml"
    write_toml(config, path)
    argv = (sys.executable, "-m", f"prime_rl.entrypoints.{name}", "@", str(path))
    log = config.output_dir / "logs" / f"{name}.log"
    forget_status(config.output_dir, name)
    defaults = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if isinstance(config, InferenceConfig) and config.api_key:
        defaults["VLLM_API_KEY"] = config.api_key
    return ProcessSpec(name, argv, log, {**defaults, **env}, server=server)


@contextmanager
def running_server(config: InferenceConfig, seconds: float) -> Iterator[None]:
    """Run a server with these settings during a `with` block. Raises UserError if it exits or is not ready in time."""
    child = SupervisedChild(process_of(SERVER, config, {}, ServerSpec(config.server.url, seconds)))

    def has_started() -> bool:
        status = read_status(config.output_dir).get(SERVER)
        if child.process.status is not None or status is None or status.ready is None:
            return child.process.status is not None
        with suppress(httpx.HTTPError):  # it is ready a moment before it listens
            return httpx.get(f"{config.server.url}/health", timeout=_PROBE_SECONDS, trust_env=False).is_success
        return False

    child.start(os.environ)
    try:
        wait(has_started, subject=f"server of {config.model.name}", owner="vLLM", seconds=seconds)
        if child.process.status is not None:
            reason = "\n".join(child.last_words("failed"))
            raise UserError(f"the server of {config.model.name} has ended: {reason}")
        yield
    finally:
        child.process.reap()


def serve_and_sample(config: ParityConfig, directory: Path) -> None:
    """Leave `samples.json` in the directory, by a server of the run's settings. Raises UserError: it does not serve."""
    model = config.model.model_dump()
    server = config.inference or InferenceConfig(model=InferenceModel(**model), device=config.device, seed=config.seed)
    changes = {"output_dir": directory, "weights_root": directory / "weights", "router_replay": config.router_replay}
    server = server.model_copy(update=changes)
    server = with_ports(config.model_copy(update={"inference": server}), "orchestrator.client").inference or server
    most = min(config.reply_tokens, (server.max_model_len or 2**20) // 2)  # the rest is for the prompt
    client = ClientConfig(base_url=server.server.url)
    if server.api_key:
        os.environ[client.api_key_var] = server.api_key
    say(f"starting {SERVER}, for {config.replies} replies; logs in {directory / 'logs'}")
    with running_server(server, config.ready_timeout):
        asyncio.run(sample(config.with_values({"client": client, "reply_tokens": most}), directory))


async def sample(config: ParityConfig, directory: Path) -> None:
    """Write `samples.json`: prompts, replies, and the server's log-probabilities of the replies' tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.name, trust_remote_code=config.model.trust_remote_code)
    prompts = [tokenizer(_QUESTIONS[number % len(_QUESTIONS)])["input_ids"] for number in range(config.replies)]
    async with InferenceClient(config.client or ClientConfig()) as server:
        await server.wait_ready(lambda *wait: None)
        if (served := await server.served()).version:
            raise UserError(f"the server at {server.root} serves version {served.version}, not the model's own weights")
        await server.reload()  # a run updates them: of some families vLLM cannot
        most, experts = config.reply_tokens, config.router_replay
        asked = (server.sample(prompt, most, seed, experts) for seed, prompt in enumerate(prompts, config.seed))
        replies = await asyncio.gather(*asked)  # bounded: by client.timeout; all at once, as in a run
    samples = [(prompt, *reply) for prompt, reply in zip(prompts, replies, strict=True)]
    (directory / "samples.json").write_text(json.dumps(samples))
