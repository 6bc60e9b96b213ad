"""The server's half of `rl parity`: start a server, have it sample, and stop it, so that one GPU is enough."""

import asyncio
import json
import os
from pathlib import Path

from prime_rl.config import InferenceConfig
from prime_rl.config.inference import SERVER, InferenceModel
from prime_rl.config.rl import ParityConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError, say
from prime_rl.fleet.client import InferenceClient
from prime_rl.launcher.one_server import running_server
from prime_rl.launcher.ports import with_ports

_QUESTIONS = ("Why is the sky blue?", "What is 17 * 23?", "Name three rivers.", "Once upon a time")


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
