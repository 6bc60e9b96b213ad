"""Our routes, as a vLLM endpoint plugin: vLLM's own server loads it in the process that answers HTTP.

    POST /update_weights {"weight_dir", "version"} -> {"seconds", "place"} and what GET /weights would say, as the
        workers report it after the load; POST /reload_weights too
    GET /weights -> {"version", "hash", "base", "weight_dir", "boot", "loads", "engines", "leaving"}, and of a tenant
        {"engine_share", "waiting"}: its part of the engine over the last minutes, and its requests that wait for it
    POST /pause -> {"paused"}, POST /resume likewise: requests in flight are kept; an update pauses by itself
    POST /leave -> {"leaving"}: orchestrators give this server no new episodes, and let it go once those in flight ended
    POST /v1/generate, an alias of /inference/v1/generate (in `middleware`)
    POST /v1/sample {"token_ids", "sampling_params", "cache_salt", "model"} -> vLLM's answer of /inference/v1/generate

Errors: `{"error": {"message", "code"}}`. A 4xx means that nothing changed. `middleware` asks for the API key.

Rollouts are sampled by /v1/sample: tokens in, tokens out, and no more. vLLM's own token route can do more, and
pays for it with every token (0.26 makes an output for each of them, both releases detokenize and build two objects a
log-probability). Here one output is made, when the last token is there; no text is made, unless stop strings need it;
and the answer holds the sampled ids and their log-probabilities under the distribution that was sampled from; where
`sampling_params.routed_experts_prompt_start` asks for them, the experts of every token from there on, too.
"""

import argparse
import asyncio
import base64
import faulthandler
import json
import math
import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field

from prime_rl import faults
from prime_rl.inference import compat, middleware
from prime_rl.inference.checks import model_directory
from prime_rl.inference.engine_watch import watch_engine
from prime_rl.inference.fair_share import FairShare
from prime_rl.inference.middleware import error_answer
from prime_rl.inference.server import plugin_config
from prime_rl.inference.service import Adapters, Rejected, ServedBase, WeightService
from prime_rl.inference.tenancy import CURRENT_TENANT, Tenancy
from prime_rl.monitor import Status
from prime_rl.transport.tenants import tenant_dir

SAMPLE_ROUTE = "/v1/sample"
FOLLOW_SECONDS = 60.0
STOP_SECONDS = 20.0  # from a signal to the end, at most; vLLM's own time for requests in flight comes on top
_SAMPLING_PARAMETERS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("logprobs", "skip_special_tokens", "detokenize", "routed_experts_prompt_start"),
}  # fmt: skip


BODY_BYTES = 64 << 10  # of a request to a weight route: a path of the greatest length, in escapes


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class UpdateBody(_Body):
    weight_dir: str
    version: int = Field(ge=0)


class SampleBody(_Body):
    """`sampling_params` are vLLM's, of which `_SAMPLING_PARAMETERS` are taken."""

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    sampling_params: dict[str, Any]
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    model: str | None = None


async def limit_body(request: Request) -> None:
    """What a request says may be repeated in answers and logs; this runs before it is looked at."""
    if len(await request.body()) > BODY_BYTES:
        raise Rejected(413, f"the request is longer than {BODY_BYTES >> 10} KiB")


async def _service(request: Request) -> WeightService:
    """That of the tenant that asks, if one does."""
    state, name = request.app.state, CURRENT_TENANT.get()  # bounded: ContextVar.get does not block
    return state.prime_service if name is None else await state.prime_tenancy.service(name)


Service = Annotated[WeightService, Depends(_service)]
router = APIRouter(dependencies=[Depends(limit_body)])


@router.post("/update_weights")
async def update_weights(request: Request, service: Service, body: UpdateBody) -> dict[str, Any]:
    change = await service.update(body.weight_dir, body.version)
    faults.point(f"update-answered:v{body.version}")
    return _answer(request, service, change.served, seconds=change.seconds, place=change.place)


@router.post("/reload_weights")
async def reload_weights(request: Request, service: Service) -> dict[str, Any]:
    change = await service.reload()
    return _answer(request, service, change.served, seconds=change.seconds, place=change.place)


@router.get("/weights")
async def weights(request: Request, service: Service) -> dict[str, Any]:
    return _answer(request, service, await service.served())


def _answer(request: Request, service: WeightService, served: dict[str, Any], **more: Any) -> dict[str, Any]:
    state, name = request.app.state, CURRENT_TENANT.get()  # bounded: ContextVar.get does not block
    more |= {"engines": service.engines, "leaving": state.prime_leaving, "models": state.prime_models}
    return served | more | ({} if name is None else state.prime_tenancy.usage(name))


@router.post("/pause")
@router.post("/resume")
async def pause(request: Request, service: Service) -> dict[str, Any]:
    paused = request.scope["route"].path == "/pause"
    await service.pause(paused)
    return {"paused": paused}


@router.post("/leave")
async def leave(request: Request) -> dict[str, Any]:
    """Ask for no new episodes. Requests are still answered; only a restart takes it back: clients may be gone."""
    state = request.app.state
    if not state.prime_leaving:
        logger.info("asked to leave: no new episodes are wanted; requests are answered until this server is stopped")
    state.prime_leaving = True
    return {"leaving": True}


async def sample(body: SampleBody, raw_request: Request) -> Response:
    """Sample one reply. Rejected (400, 404) for what this route does not do, 500 when the engine fails; vLLM's handler
    makes 400 of its ValueError for a prompt that it does not take."""
    from vllm.inputs import tokens_input

    state = raw_request.app.state
    faults.point("generate")
    if body.model is not None and body.model not in state.prime_models:
        raise Rejected(404, f"the model {body.model!r} is not served; this server has {', '.join(state.prime_models)}")
    params = sampling_params(body.sampling_params, len(body.token_ids), state.engine_client.model_config.max_model_len)
    prompt, name = tokens_input(body.token_ids, cache_salt=body.cache_salt), f"sample-{secrets.token_hex(16)}"
    lora = state.openai_serving_models.lora_requests.get(body.model)
    stream = state.engine_client.generate(prompt, params, name, lora_request=lora)
    outputs = [output async for output in stream]
    output = outputs[-1].outputs[0]  # the only one
    if output.finish_reason == "error":
        raise Rejected(500, "the engine failed while it sampled")
    first = body.sampling_params.get("routed_experts_prompt_start")
    if first is not None and state.prime_keeper is not None:
        data, shape = max(await state.prime_keeper.collective_rpc("prime_choices", args=(name,)))  # one engine had it
        end = len(body.token_ids) + len(output.token_ids) - 1
        output.routed_experts = np.frombuffer(data, np.uint16).reshape(shape)[first:end]
    return Response(sample_answer(body.token_ids, output, first), media_type="application/json")


def sampling_params(requested: dict[str, Any], prompt: int, most: int) -> Any:
    """vLLM's parameters for one output with the log-probabilities of the sampled tokens, in flat lists, without text.

    Rejected (400) for a parameter that this route, or a value that vLLM does not take. `prompt`: tokens of the prompt;
    `most`: of prompt and reply, the reply's bound where none is requested.
    """
    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    if unknown := sorted(requested.keys() - _SAMPLING_PARAMETERS):
        raise Rejected(400, f"sampling_params.{unknown[0]} is not taken by {SAMPLE_ROUTE}")
    if (logprobs := requested.get("logprobs")) not in (None, 0, 1):
        raise Rejected(400, f"{SAMPLE_ROUTE} answers with the log-probability of each token, not with {logprobs}")
    first = requested.get("routed_experts_prompt_start")
    if first is not None and not (isinstance(first, int) and 0 <= first < prompt):  # 0.26 would die of it
        raise Rejected(400, f"sampling_params.routed_experts_prompt_start is {first}, of a prompt of {prompt} tokens")
    chosen = {"max_tokens": max(most - prompt, 1)} | {k: value for k, value in requested.items() if value is not None}
    chosen |= {"logprobs": 0, "flat_logprobs": True, "detokenize": bool(requested.get("stop"))}
    chosen["output_kind"] = RequestOutputKind.FINAL_ONLY.value
    try:
        params = msgspec.convert(chosen, SamplingParams)
        # As it goes to the engine: vLLM would forget to clean up after a number that is too large.
        msgspec.msgpack.encode(params)
    except (msgspec.ValidationError, OverflowError, TypeError, ValueError) as error:
        raise Rejected(400, f"sampling_params: {error}") from error
    return params


def sample_answer(prompt: Sequence[int], output: Any, first: int | None = None) -> bytes:
    """Return the JSON of vLLM's token route for a finished output with flat log-probabilities, as far as rollouts read
    it. Rejected (500) if the log-probabilities are not those of the sampled tokens, or as `routed_experts`.

    `first`: the token from which on the answer has the experts (None: without).
    """
    ids, logprobs = list(output.token_ids), output.logprobs
    if logprobs is None or list(logprobs.token_ids) != ids:
        raise Rejected(500, "the engine gave log-probabilities of other tokens than it sampled")
    pairs = zip(ids, logprobs.logprobs, strict=True)
    content = {"content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]}
    choice = {"index": 0, "finish_reason": output.finish_reason or "stop", "token_ids": ids, "logprobs": content}
    if first is not None:
        choice["routed_experts"] = routed_experts(output.routed_experts, first, len(prompt) + len(ids) - 1)
    lengths = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    return json.dumps({"request_id": "", "choices": [choice], "usage": lengths}, separators=(",", ":")).encode()


def routed_experts(choices: Any, first: int, end: int) -> dict[str, Any]:
    """Return the experts of tokens [first, end) as verifiers and renderers read them: rows of layers × k ids in base64.
    The last sampled token was not computed, and has none.

    Rejected (409) by a server that does not return them, (422) if they cannot be true.
    """
    if choices is None:
        raise Rejected(409, "this server does not return the experts that it chose: start it with router_replay = true")
    if len(choices) != end - first:
        raise Rejected(422, f"the engine gave the experts of {len(choices)} tokens where it computed {end - first}")
    if not choices.any():  # what a kernel that they are not read from leaves
        raise Rejected(422, "the engine gave no experts but the first one: its kernels do not say what they choose")
    data = base64.b64encode(choices.tobytes()).decode()
    return {"data": data, "dtype": choices.dtype.name, "shape": list(choices.shape), "start": first}


async def answer_rejected(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Rejected)
    return error_answer(error.status, error.message)


class PrimeRoutes:
    """vLLM's EndpointPlugin protocol: routes first, then what they need, once the engine is there."""

    name = compat.PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from vllm.entrypoints.serve.utils.api_utils import with_cancellation

        app.include_router(router)
        # It ends when its client goes away: vLLM drops a request whose generator is cancelled.
        app.add_api_route(SAMPLE_ROUTE, with_cancellation(sample), methods=["POST"])
        app.add_exception_handler(Rejected, answer_rejected)
        self._app = app
        self._config = plugin_config()  # None without a server: when vLLM writes its API's description

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        app, keys = self._app, [key for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
        state.prime_models = args.served_model_name or [args.model]
        config = self._config
        assert config is not None, "the engine was started by our server"
        sys.setswitchinterval(compat.SWITCH_SECONDS)
        model_config, engines = engine_client.model_config, args.data_parallel_size
        directory = model_directory(model_config.model, model_config.revision)
        assert directory is not None, "vLLM has loaded it"
        status = Status(config.output_dir, config.process)
        state.prime_leaving = False
        lora, tenants = config.lora, None if config.lora is None else config.lora.tenants
        engine = compat.AllEngines(engine_client)
        make_service = partial(
            WeightService,
            engine,
            ServedBase(directory, bool(model_config.hf_text_config.tie_word_embeddings)),
            adapters=None if lora is None else Adapters(lora.max_rank, args.lora_target_modules),
            on_device=config.stage_on_device,
            servers_on_host=config.servers_on_host * engines,
            engines=engines,
        )

        state.prime_service = service = make_service(config.weights_root, status=status)
        state.prime_tenancy = tenancy = None
        if lora is not None and tenants is not None:

            def start(name: str, number: int) -> WeightService:
                return make_service(tenant_dir(config.output_dir, name) / "weights", number=number)

            most = engine_client.vllm_config.scheduler_config.max_num_seqs * engines
            share = FairShare[Any](most, tenants.weights, tenants.limits, lora.resident or math.inf)
            state.prime_tenancy = tenancy = Tenancy(config.output_dir, tenants.slots, share, start)
        if lora is not None:
            find = service.adapter if tenancy is None else tenancy.adapter
            state.openai_serving_models.lora_requests = compat.AdapterNames(state.prime_models, find)
        # Outermost: vLLM has added its middleware, and a host may have built the stack, which ends `add_middleware`.
        app.middleware_stack = middleware.Guard(app.middleware_stack or app.build_middleware_stack(), keys, tenancy)
        async with asyncio.timeout(FOLLOW_SECONDS):
            await engine_client.collective_rpc("prime_follow", args=(os.getpid(),))
            state.prime_keeper = engine if config.router_replay and not args.enable_return_routed_experts else None
            if state.prime_keeper is not None:
                await engine.collective_rpc("prime_choices", args=("none yet",))
        status.phase("serving")
        status.ready()
        loop = asyncio.get_running_loop()

        def end_soon() -> None:
            """End the process in time after a signal, and say where if it hangs; waiting requests do not hold it up."""
            seconds = STOP_SECONDS + args.shutdown_timeout
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            for each in [service, *(() if tenancy is None else tenancy.services.values())]:
                loop.call_soon_threadsafe(each.stop)

        state.prime_watch = asyncio.create_task(watch_engine(engine_client, status, on_stop=end_soon))
        logger.info("serving {} on port {}", args.model, args.port)
