"""A scripted engine that speaks vLLM 0.31's token routes, and a small ChatML tokenizer for it.

It samples nothing: it answers with the tokens of `reply(prompt text)`, and remembers every exchange, so that tests can
compare what comes out of an environment with what the engine really got and gave.

    python tests/support/fake_engine.py --port 5100 --model DIR           # for benchmarks: a process of its own
    python tests/support/fake_engine.py --port 5100 --model DIR --policy  # with versions of weights: see `PolicyEngine`
"""

import argparse
import asyncio
import json
import secrets
from array import array
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import xxhash
from aiohttp import web

from prime_rl import faults, processes
from prime_rl.transport.commit import CommitError, step_dir
from prime_rl.transport.weights import WeightsManifest, hash_directory, verify_weights, version_hash, weights_manifest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Of the bundled model: with tools.
TEMPLATE = (Path(__file__).parents[2] / "assets" / "tiny-reverse" / "chat_template.jinja").read_text()

QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def make_tokenizer(directory: Path, template: str | None = CHATML, tags: bool = False, **config: Any) -> Path:
    """A directory with a byte-level BPE tokenizer (a few merges, so that borders matter) and a config.json. `tags`:
    those of Qwen3 are tokens of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
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
    if tags:
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in QWEN_TAGS])
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


def assert_exact(sample: Any, exchanges: "list[Exchange]") -> None:
    """Assert that the sample is the last exchange and trains on what all sampled, with log-probabilities there only."""
    assert list(sample.input_ids) == exchanges[-1].prompt + exchanges[-1].completion
    trained = [token for token, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on]
    assert trained == [token for exchange in exchanges for token in exchange.completion]
    logprobs = array("f", [value for value, on in zip(sample.logprobs, sample.loss_mask, strict=True) if on])
    assert logprobs == array("f", [value for exchange in exchanges for value in exchange.logprobs])
    assert not any(value for value, on in zip(sample.logprobs, sample.loss_mask, strict=True) if not on)


class LoopbackServer:
    """`async with` it: its routes are served on loopback, on `port` or a free one, until the block ends."""

    port: int

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes(self.routes())
        # A client that goes away cancels its request, as vLLM aborts it.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=4096).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@dataclass
class FakeEngine(LoopbackServer):
    model: Path
    max_model_len: int = 512
    delay: float = 0.0
    status: int = 200  # anything else is answered with an error
    malformed: bool = False
    replays: bool = False  # says which experts it "chose", where it is asked: the token's place, in each of two layers
    port: int = 0
    reply: Callable[[str], str] = lambda prompt: "<reversed_text>abc</reversed_text>"
    exchanges: list[Exchange] = field(default_factory=list)
    running: int = 0
    started: int = 0

    def routes(self) -> list[web.RouteDef]:
        self.tokenizer = self._load_tokenizer()
        sampling = [web.post(path, self._generate) for path in ("/inference/v1/generate", "/v1/sample")]
        return [web.get("/v1/models", self._models), *sampling]

    def reset(self) -> None:
        """Forget what was asked, and answer again at once and well."""
        self.exchanges.clear()
        self.delay, self.status, self.malformed = 0.0, 200, False

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model)

    def _noise(self) -> float:
        return 1e-9 * len(self.exchanges)  # no two exchanges are alike

    def _reply(self, body: dict[str, Any]) -> str:
        return self.reply(self.tokenizer.decode(body["token_ids"]))

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
        text = self._reply(body)
        full = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = full[:room]
        logprobs = [-0.1 - 0.001 * i - self._noise() for i in range(len(ids))]
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
        first = body["sampling_params"].get("routed_experts_prompt_start")
        if self.replays and first is not None:
            places = range(first, len(body["token_ids"]) + len(ids) - 1)
            data = b64encode(array("H", [place for place in places for _ in range(2)]).tobytes()).decode()
            shape = [len(places), 2, 1]
            choice["routed_experts"] = {"data": data, "dtype": "uint16", "shape": shape, "start": first}
        return web.json_response({"request_id": f"generate-tokens-{self.started}", "choices": [choice]})


class Tokens:
    """The few methods of a tokenizer that are needed here, in 0.1 s rather than the 3 s of importing transformers."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.eos_token_id = int(json.loads((model / "config.json").read_text())["eos_token_id"])

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


@dataclass
class PolicyEngine(FakeEngine):
    """A fake engine that serves versions of weights as `inference` does: the same routes, the same proof by hash.

    What it samples depends on prompt, seed and version (without a seed, on how many requests came before): a run
    that is cut off gives the same tokens as one that is not, and one served a wrong version does not. Rewards of
    reverse-text differ in a group. It has the real server's fault points (process `inference`), and `generate` and
    `logprob_check`; `error` at the first is a 500.
    """

    weights: Path | None = None  # where versions are, for their fixed prompts
    _subscriber: Any = None

    def _load_tokenizer(self) -> Any:
        return Tokens(self.model)

    def routes(self) -> list[web.RouteDef]:
        base = hash_directory(self.model)
        self._base = {
            "version": 0,
            "hash": version_hash(base),
            "base": str(self.model.resolve()),
            "weight_dir": None,
            "boot": secrets.token_hex(8),  # tells a server that was started again from the one before
        }
        self._served = dict(self._base)
        more = [web.get("/health", self._health), web.get("/weights", self._weights)]
        more += [web.post("/update_weights", self._update), web.post("/reload_weights", self._reload)]
        return [*super().routes(), *more]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _weights(self, request: web.Request) -> web.Response:
        return web.json_response(self._served)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        directory, version = Path(body["weight_dir"]), int(body["version"])
        if faults.point(f"update-received:v{version}") == "error":
            return _error(500, "scripted failure")
        try:
            manifest = weights_manifest(directory)
            if manifest.version != version:
                return _error(400, f"{directory} holds version {manifest.version}, not {version}")
            if manifest.base is not None and manifest.hash != self._base["hash"]:
                return _error(400, f"{directory} describes another base model")
            if manifest.publisher is not None:
                if (trouble := await asyncio.to_thread(self._receive, manifest)) is not None:
                    return _error(424, trouble)
            elif manifest.base is None:
                verify_weights(directory)
        except (CommitError, OSError) as error:
            return _error(400, str(error))
        self._served |= {"version": version, "hash": manifest.hash, "weight_dir": str(directory)}
        if faults.point(f"update-loaded:v{version}") == "error":
            return _error(500, "scripted failure")
        if faults.point(f"update-answered:v{version}") == "error":
            return _error(500, "scripted failure")
        return web.json_response(self._served)

    def _receive(self, manifest: WeightsManifest) -> str | None:
        """As the real one does. Returns why it was not given, if it was not."""
        import torch  # takes a second, which only this needs

        from prime_rl.inference.staging import Staging
        from prime_rl.transport.exchange import Subscriber

        self._subscriber = self._subscriber or Subscriber()
        staging = Staging(manifest.directory, manifest.hash, torch.device("cpu"), self._subscriber)
        answer = staging.answer(60.0)
        staging.drop()
        return answer.get("why")

    async def _reload(self, request: web.Request) -> web.Response:
        self._served = dict(self._base)
        return web.json_response(self._served)

    async def _generate(self, request: web.Request) -> web.Response:
        if "prompt_logprobs" in (await request.json())["sampling_params"]:
            return self._score((await request.json())["token_ids"])
        if faults.point("generate") == "error":
            return _error(500, "scripted failure")
        return await super()._generate(request)

    def _score(self, tokens: list[int]) -> web.Response:
        """The log-probabilities of the trainer's reference for the version that is served: nothing is computed."""
        faults.point("logprob_check")
        served = int(str(self._served["version"]))
        reference = None if self.weights is None else weights_manifest(step_dir(self.weights, served)).reference
        if reference is None or list(reference.tokens) != tokens:
            return _error(400, "a scripted engine scores references alone")
        entries = [
            {str(token): {"logprob": value}} for token, value in zip(tokens[1:], reference.logprobs, strict=True)
        ]
        return web.json_response({"prompt_logprobs": [None, *entries]})

    def _noise(self) -> float:
        return 0.0

    def _reply(self, body: dict[str, Any]) -> str:
        """The reversed text, cut where chance says."""
        seed = body["sampling_params"].get("seed", self.started)
        ids = body["token_ids"]
        asked = self.tokenizer.decode(ids).rpartition("user\n")[2].partition("<|im_end|>")[0]
        chance = xxhash.xxh3_64_intdigest(f"{ids}/{seed}/{self._served['version']}".encode())
        return f"<reversed_text>{asked[::-1][: 1 + chance % len(asked)]}</reversed_text>"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _serve(engine: FakeEngine) -> None:
    async with engine:
        print(engine.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--policy", action="store_true")
    parser.add_argument("--weights", type=Path, help="directory of versions, whose fixed prompts it is to score")
    options = parser.parse_args()
    processes.watch()
    faults.arm("inference")
    more = {"port": options.port, "delay": options.delay}
    more |= {"weights": options.weights} if options.policy else {}
    engine = (PolicyEngine if options.policy else FakeEngine)(options.model, **more)
    asyncio.run(_serve(engine))
