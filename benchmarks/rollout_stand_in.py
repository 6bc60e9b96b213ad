"""A stand-in for the inference server, for `rollout.py --only stand-in`: every answer is there at once, in vLLM's own shape.

python benchmarks/rollout_stand_in.py --port 8430 --model DIR --vocabulary 151936 --reply 512
"""

import argparse
import json
import random

from aiohttp import web


def answer(vocabulary: int, reply: int) -> bytes:
    """One response of the token route, as vLLM writes it: with its names of tokens, `bytes` and the likeliest token."""
    rng = random.Random(0)
    ids = [rng.randrange(300 if vocabulary > 1000 else 0, vocabulary if vocabulary > 1000 else 256) for _ in range(reply)]  # fmt: skip
    content = []
    for token in ids:
        one = {"token": f"token_id:{token}", "logprob": -rng.random() * 10, "bytes": None}
        content.append({**one, "top_logprobs": [one]})
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": ids}
    body = {"request_id": "generate-tokens-0", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}
    return json.dumps(body, separators=(",", ":")).encode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--reply", type=int, required=True)
    given = parser.parse_args()
    body = answer(given.vocabulary, given.reply)
    card = {"id": given.model, "object": "model", "max_model_len": 1 << 20}
    sampled = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal sampled
        await request.read()
        sampled += given.reply
        return web.Response(body=body, content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [card]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:generation_tokens_total {sampled}\n")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    web.run_app(app, host="127.0.0.1", port=given.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
