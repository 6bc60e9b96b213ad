"""A stand-in for the inference server, for `rollout.py --only stand-in`: every answer is there at once, in vLLM's own shape.

python benchmarks/rollout_stand_in.py --port 8430 --model DIR --vocabulary 151936 --reply 512
"""

import argparse
import json
import random

from aiohttp import web

ROUTES = ("/v1/sample", "/inference/v1/generate")


def answer(vocabulary: int, reply: int, full: bool) -> bytes:
    """One response: of our route for rollouts, or (`full`) of the token route as vLLM writes it, with `bytes` and the likeliest tokens."""
    rng = random.Random(0)
    ids = [rng.randrange(300 if vocabulary > 1000 else 0, vocabulary if vocabulary > 1000 else 256) for _ in range(reply)]  # fmt: skip
    content: list[dict[str, object]] = [{"token": f"token_id:{token}", "logprob": -rng.random() * 10} for token in ids]
    if full:
        content = [{**one, "bytes": None, "top_logprobs": [{**one, "bytes": None}]} for one in content]
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
    bodies = {path: answer(given.vocabulary, given.reply, "v1/generate" in path) for path in ROUTES}
    card = {"id": given.model, "object": "model", "max_model_len": 1 << 20}
    sampled = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal sampled
        await request.read()
        sampled += given.reply
        return web.Response(body=bodies[request.path], content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [card]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:generation_tokens_total {sampled}\n")

    app = web.Application()
    for path in ROUTES:
        app.router.add_post(path, generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    web.run_app(app, host="127.0.0.1", port=given.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
