"""A scripted engine that speaks vLLM 0.31's token routes, and a small ChatML tokenizer for it.

It samples nothing: it answers with the tokens of `reply(prompt text)`, and remembers every exchange, so that tests can
compare what comes out of an environment with what the engine really got and gave.

    python tests/support/fake_engine.py --port 5100 --model DIR      # for benchmarks: a process of its own
"""

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(directory: Path, template: str | None = CHATML, **config: Any) -> Path:
    """A directory with a byte-level BPE tokenizer (a few merges, so that borders matter) and a config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["user\n\n assistant\nsystem\nReverse the text <reversed_text></reversed_text>\n\na b c"] * 3
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return directory


@dataclass
class Exchange:
    """One request: what was sent, what was sampled."""

    body: dict[str, Any]
    completion: list[int]
    logprobs: list[float]

    @property
    def prompt(self) -> list[int]:
        return self.body["token_ids"]


@dataclass
class FakeEngine:
    """`async with FakeEngine(model) as engine:` serves on a free port of loopback until the block ends."""

    model: Path
    max_model_len: int = 512
    delay: float = 0.0
    status: int = 200  # anything else is answered with an error
    malformed: bool = False
    port: int = 0
    reply: Callable[[str], str] = lambda prompt: "<reversed_text>abc</reversed_text>"
    exchanges: list[Exchange] = field(default_factory=list)
    running: int = 0
    started: int = 0

    async def __aenter__(self) -> Self:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        # A client that goes away cancels its request, as vLLM aborts it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": str(self.model), "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.started += 1
        self.running += 1
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
        finally:
            self.running -= 1
        if self.status != 200:
            return web.json_response({"error": {"message": "scripted failure"}}, status=self.status)
        room = min(body["sampling_params"].get("max_tokens", 10**9), self.max_model_len - len(body["token_ids"]))
        if room <= 0:
            message = f"The decoder prompt is longer than the maximum model length of {self.max_model_len}."
            return web.json_response({"error": {"message": message}}, status=400)
        text = self.reply(self.tokenizer.decode(body["token_ids"]))
        full = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = full[:room]
        logprobs = [-0.1 - 0.001 * i - 1e-9 * len(self.exchanges) for i in range(len(ids))]
        self.exchanges.append(Exchange(body, ids, logprobs))
        content = [{"token": f"token_id:{t}", "logprob": lp} for t, lp in zip(ids, logprobs, strict=True)]
        if self.malformed:
            content.pop()
        choice = {
            "index": 0,
            "finish_reason": "stop" if len(ids) == len(full) else "length",
            "token_ids": ids,
            "logprobs": {"content": content},
        }
        return web.json_response({"request_id": f"generate-tokens-{self.started}", "choices": [choice]})


async def _serve(model: Path, port: int, delay: float) -> None:
    async with FakeEngine(model, port=port, delay=delay) as engine:
        print(engine.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(_serve(options.model, options.port, options.delay))
