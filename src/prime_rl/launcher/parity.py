"""The server's half of `rl parity`: start a server, have it sample, and stop it, so that one GPU is enough."""

import asyncio
import json
import sys
from pathlib import Path

from prime_rl.config import InferenceConfig, write_toml
from prime_rl.config.inference import SERVER, InferenceModel
from prime_rl.config.rl import ParityConfig
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError, say
from prime_rl.fleet.client import InferenceClient
from prime_rl.launcher.plan import ProcessSpec, ServerSpec
from prime_rl.launcher.ports import with_ports
from prime_rl.launcher.rundir import forget_status
from prime_rl.launcher.supervise import RunOutcome, Supervisor

SAMPLER = "parity-sampler"
_QUESTIONS = ("Why is the sky blue?", "What is 17 * 23?", "Name three rivers.", "Once upon a time")


def serve_and_sample(config: ParityConfig, directory: Path) -> RunOutcome:
    """Leave `samples.json` in the directory, by a server of the run's settings."""
    model, path, logs = config.model.model_dump(), directory / "configs" / f"{SERVER}.toml", directory / "logs"
    server = config.inference or InferenceConfig(model=InferenceModel(**model), device=config.device, seed=config.seed)
    changes = {"output_dir": directory, "weights_root": directory / "weights", "router_replay": config.router_replay}
    server = server.model_copy(update=changes)
    server = with_ports(config.model_copy(update={"inference": server}), "orchestrator.client").inference or server
    write_toml(server, path)
    url = server.server.url
    most = min(config.reply_tokens, (server.max_model_len or 2**20) // 2)  # the rest is for the prompt
    settings = {"output_dir": directory, "seed": config.seed, "model": model, "client.base_url": url}
    settings |= {"replies": config.replies, "reply_tokens": most, "router_replay": config.router_replay}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    env = {"PYTHONUNBUFFERED": "1", **({"VLLM_API_KEY": server.api_key} if server.api_key else {})}
    serve = (sys.executable, "-m", "prime_rl.entrypoints.inference", "@", str(path))
    ask = (sys.executable, "-m", "prime_rl.entrypoints.rl", SAMPLER, *words)
    processes = [ProcessSpec(SERVER, serve, logs / f"{SERVER}.log", env, server=ServerSpec(url, config.ready_timeout))]
    processes.append(ProcessSpec(SAMPLER, ask, logs / f"{SAMPLER}.log", env, after_ready=(SERVER,)))
    for process in processes:
        forget_status(directory, process.name)
    say(f"starting {SERVER}, then {SAMPLER}, for {config.replies} replies; logs in {logs}")
    return Supervisor(processes, directory, say).run()


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
