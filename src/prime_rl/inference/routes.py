"""The weight routes, as a vLLM endpoint plugin: vLLM's own server loads it in the process that answers HTTP.

    POST /update_weights {"weight_dir", "version"} -> {"version", "hash", "seconds", "place"}, POST /reload_weights likewise
    GET /weights -> {"version", "hash", "base", "weight_dir", "boot", "engines", "leaving"}      POST /pause {"mode", "clear_cache"}, POST /resume
    POST /leave -> {"leaving"}: orchestrators are to give this server no new episodes, and let it go once those in flight have ended
    POST /v1/generate, an alias of /inference/v1/generate                     POST /v1/sample: rollouts, see `sample`

Errors: `{"error": {"message", "code"}}`. A 4xx means that nothing changed. `middleware` asks for the API key.
"""

import argparse
import asyncio
import faulthandler
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from prime_rl import faults
from prime_rl.errors import UserError
from prime_rl.inference import compat
from prime_rl.inference.checks import local_model
from prime_rl.inference.engine_watch import EngineWatch
from prime_rl.inference.middleware import BODY_BYTES, TOO_LONG, ForwardToLeader, Guard, lead, listen, route_path
from prime_rl.inference.sample import SAMPLE_ROUTE
from prime_rl.inference.sample import router as sample_router
from prime_rl.inference.server import PluginContext, plugin_context
from prime_rl.inference.service import PauseMode, WeightService
from prime_rl.inference.version_files import AllowedRoots, Rejected
from prime_rl.lifeline import follow
from prime_rl.monitor import Status
from prime_rl.processes import identify

TOKEN_ROUTE, TOKEN_ALIAS = "/inference/v1/generate", "/v1/generate"
FOLLOW_SECONDS = 60.0
STOP_SECONDS = 20.0  # from a signal to the end, at most; vLLM's own time for requests in flight comes on top
EXPERTS_MOVE = (
    "with enable_eplb vLLM moves experts between GPUs, and its reload would put new ones where they were at first"
)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class UpdateBody(_Body):
    weight_dir: str
    version: int = Field(ge=0)


class PauseBody(_Body):
    mode: PauseMode = "keep"
    clear_cache: bool = False


async def limit_body(request: Request) -> None:
    """What a request says may be repeated in answers and logs; this runs before it is looked at."""
    if len(await request.body()) > BODY_BYTES:
        raise Rejected(413, TOO_LONG)


def _service(request: Request) -> WeightService:
    return request.app.state.prime_service


Service = Annotated[WeightService, Depends(_service)]
router = APIRouter(dependencies=[Depends(limit_body)])


@router.post("/update_weights")
async def update_weights(service: Service, body: UpdateBody) -> dict[str, Any]:
    answer = asdict(await service.update(body.weight_dir, body.version))
    if faults.point(f"update-answered:v{body.version}") == "error":
        raise Rejected(500, "fault injection")
    return answer


@router.post("/reload_weights")
async def reload_weights(service: Service) -> dict[str, Any]:
    return asdict(await service.reload())


@router.get("/weights")
async def weights(request: Request, service: Service) -> dict[str, Any]:
    state = request.app.state
    models = [*state.prime_models, *compat.adapters(state)]
    more = {"engines": service.engines, "leaving": state.prime_leaving, "models": models}
    return asdict(await service.served()) | more


@router.post("/leave")
async def leave(request: Request) -> dict[str, Any]:
    """Ask for no new episodes. Requests are answered on; only a restart takes it back, as clients may have removed the server already."""
    state = request.app.state
    if not state.prime_leaving:
        logger.info("asked to leave: no new episodes are wanted; requests are answered until this server is stopped")
    state.prime_leaving = True
    return {"leaving": True}


@router.post("/pause")
async def pause(service: Service, body: PauseBody | None = None) -> dict[str, Any]:
    body = body or PauseBody()
    await service.pause(body.mode, body.clear_cache)
    return {"paused": True}


@router.post("/resume")
async def resume(service: Service) -> dict[str, Any]:
    await service.resume()
    return {"paused": False}


async def _rejected(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Rejected)
    return JSONResponse({"error": {"message": error.message, "code": error.status}}, status_code=error.status)


class PrimeRoutes:
    """vLLM's EndpointPlugin protocol: routes first, then what they need, once the engine is there."""

    name = compat.PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.include_router(sample_router)
        app.add_exception_handler(Rejected, _rejected)
        add_alias(app, TOKEN_ROUTE, TOKEN_ALIAS)
        self._app = app
        self._context = plugin_context()  # None without a server: when vLLM writes its API's description
        shared = None if self._context is None else self._context.shared
        self._leads = shared is None or lead(shared)
        if shared is not None and not self._leads:
            app.add_middleware(ForwardToLeader, directory=shared)
        if faults.armed():
            app.add_middleware(FaultyGenerate)

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        app, keys = self._app, [key for key in args.api_key or [os.environ.get("VLLM_API_KEY")] if key]
        # Outermost: vLLM has added its middleware by now, and what it hosts may have built the stack, which `add_middleware` would refuse to change.
        app.middleware_stack = Guard(app.middleware_stack or app.build_middleware_stack(), keys)
        state.prime_models = args.served_model_name or [args.model]
        assert self._context is not None, "the engine was started by our server"
        if self._context.shared is not None:
            follow(self._context.server)  # vLLM leaves these processes behind when their server is killed
        if self._leads:
            await self._lead(self._context, engine_client, state, args)

    async def _lead(self, context: PluginContext, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Own the weights."""
        config, engine = context.config, compat.require_engine()
        model_config, engines = engine_client.model_config, args.data_parallel_size
        # Of the server, whichever of its processes answers: the engines are its children, and it is what is signalled.
        status = Status(config.output_dir, config.process, of=identify(context.server))
        state.prime_leaving = False
        state.prime_service = WeightService(
            compat.AllEngines(engine_client, engines),
            base=resolve_base(model_config.model, model_config.revision),
            roots=AllowedRoots(config.weights_root, config.weights_tmpfs),
            label=partial(compat.label_weights, engine, engine_client),
            tied=bool(model_config.hf_text_config.tie_word_embeddings),
            status=status,
            stage=config.stage_weights,
            on_device=config.stage_on_device,
            servers_on_host=config.servers_on_host * engines,
            engines=engines,
            fixed=EXPERTS_MOVE if args.enable_eplb else None,
        )
        async with asyncio.timeout(FOLLOW_SECONDS):
            await engine_client.collective_rpc("prime_follow", args=(context.server,))
        if context.shared is not None:
            state.prime_listener = await listen(self._app, context.shared)
        status.phase("serving")
        status.ready()
        loop, service = asyncio.get_running_loop(), state.prime_service

        def end_soon() -> None:
            """From a signal's handler. The process ends in time whatever hangs, and then says where; waiting requests do not hold it up."""
            seconds = STOP_SECONDS + args.shutdown_timeout
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            loop.call_soon_threadsafe(service.stop)

        state.prime_watch = asyncio.create_task(EngineWatch(engine_client, status, on_stop=end_soon).run())
        logger.info("serving {} on port {}", args.model, args.port)


class FaultyGenerate:
    """Answers 500 at the fault point `generate`. Part of the server only under a plan of faults."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and route_path(scope) in (TOKEN_ROUTE, TOKEN_ALIAS, SAMPLE_ROUTE)
        if asked and faults.point("generate") == "error":
            answer = JSONResponse({"error": {"message": "fault injection", "code": 500}}, status_code=500)
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def add_alias(app: FastAPI, path: str, alias: str) -> None:
    """Answer `alias` as `path` is answered."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path == path:
            app.add_api_route(
                alias,
                route.endpoint,
                methods=sorted(route.methods),
                dependencies=route.dependencies,
                response_model=route.response_model,
            )
            return
    raise UserError(f"this vLLM has no token route {path}")


def resolve_base(model: str, revision: str | None) -> Path:
    """The directory that holds the base model, which vLLM has loaded already: nothing is downloaded."""
    local = local_model(model)
    if local is not None:
        return local.resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))
