"""The inference server as the orchestrator sees it: is it up, what does it serve, serve this instead."""

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
from loguru import logger
from pydantic import TypeAdapter, ValidationError

from prime_rl.config.shared import how_to_start
from prime_rl.errors import UserError
from prime_rl.transport.weights import WeightsManifest

if TYPE_CHECKING:
    from prime_rl.config.shared import ClientConfig
    from prime_rl.fleet.logprob_check import LogprobCheck

_POLL_SECONDS = 0.25
_PROBE_TIMEOUT_SECONDS = 10.0
_VERIFY_TIMEOUT_SECONDS = 60.0  # for a server that is busy; one that takes longer is not verified
_SAY_WAIT_AFTER_SECONDS = 0.5
_HEALTH = "/health"
_TROUBLE = (500, 502, 503, 504)
_BUSY = 409  # another weight change goes on, perhaps one whose answer was lost
_UNSENT = 424  # `inference.service.EXCHANGE_FAILED`


class ServerError(UserError):
    """The server did not answer, or answered that something went wrong on its side: worth another attempt."""


class VersionNotSent(ServerError):
    """The trainer's publisher did not give the server this version: it is superseded, or the trainer is away.

    The server goes on as before.
    """


@dataclass(frozen=True)
class Served:
    """What a server says it serves.

    `boot` names the server process and `loads` counts its loads of weights, where it gives them. `seconds`: of each
    phase of the update that it answered (`inference.service.WeightUpdate`, and `verify`, its logprob check).
    `models`: the names that requests may give.
    """

    version: int
    hash: str
    boot: str = ""
    leaving: bool = field(default=False, compare=False)  # it was asked to leave; that changes nothing in what it serves
    engines: int = field(default=1, compare=False)  # that data parallelism has behind the server
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    models: tuple[str, ...] | None = field(default=None, compare=False)  # None: it does not say
    loads: int | str = ""
    engine_share: float | None = field(default=None, compare=False)  # of the engine's time that a tenant had
    waiting: float | None = field(default=None, compare=False)  # its requests that wait for their turn

    def check_name(self, root: str, model: str) -> None:
        """Raise UserError where the server at `root` says that it serves other models.

        It would refuse every request, and may have another tokenizer.
        """
        if self.models is not None and model not in self.models:
            served = ", ".join(self.models) or "models without a common name"
            here = f" (here --model.name {self.models[0]})" if self.models else ""
            raise UserError(f"the server at {root} serves {served}, not {model}: give both the same model.name{here}")

    def holds(self, weights: WeightsManifest) -> bool:
        return (self.version, self.hash) == (weights.version, weights.hash)


_SERVED = TypeAdapter(Served)


class InferenceClient:
    """A client of one inference server. Use it as an asynchronous context manager.

    Args:
        logprob_check: Check what the server computes, not only what it says that it serves (None: do not).
        proxies: Go through those that the environment names.
    """

    def __init__(
        self,
        config: "ClientConfig",
        root: str | None = None,
        logprob_check: "LogprobCheck | None" = None,
        proxies: bool = False,
    ) -> None:
        self.root = root or config.api_roots[0]
        self._config, self._logprob_check = config, logprob_check
        key = os.environ.get(config.api_key_var, "")
        self._http = httpx.AsyncClient(
            base_url=self.root,
            timeout=httpx.Timeout(config.timeout, connect=_PROBE_TIMEOUT_SECONDS),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=proxies,
            # Shorter than any server's: reusing a connection just when the server closes it would fail the request.
            limits=httpx.Limits(keepalive_expiry=1.0),
        )

    async def __aenter__(self) -> "InferenceClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def wait_ready(self, on_wait: Callable[[str, str, float], None], path: str = _HEALTH) -> None:
        """Wait until the server answers, at most `client.ready_timeout` seconds. A wait that is noticed is logged.

        Args:
            on_wait: Called with subject, owner and deadline in seconds before every pause.
            path: Path to probe. `/health` must succeed; any other path only must not return 500, 502, 503 or 504.

        Raises:
            UserError: it did not come up in time.
        """
        start, most, said, hint = time.monotonic(), self._config.ready_timeout, False, how_to_start(self.root)
        while trouble := await self._trouble(path):  # bounded: by the deadline below
            if (waited := time.monotonic() - start) > most:
                where = f"{self.root} after {most:.0f} s (client.base_url, client.ready_timeout)"
                raise UserError(f"no inference server at {where}: {trouble}; {hint}")
            if not said and waited > _SAY_WAIT_AFTER_SECONDS:
                said = True
                logger.info("waiting for an inference server at {} (at most {:.0f} s); {}", self.root, most, hint)
            on_wait("a healthy server", f"inference at {self.root}", most)
            await asyncio.sleep(_POLL_SECONDS)
        if said:
            logger.info("the inference server at {} answers after {:.0f} s", self.root, time.monotonic() - start)

    async def answers(self) -> bool:
        """Whether the server is healthy now; takes at most a few seconds."""
        return await self._trouble(_HEALTH) is None

    async def served(self) -> Served:
        """Ask what is served.

        Raises:
            ServerError: it does not answer, or a load that failed has left it without weights.
            UserError: the server is not ours (it has no such route), or refuses the key.
        """
        return await self._ask("GET", "/weights", timeout=min(_VERIFY_TIMEOUT_SECONDS, self._config.timeout))

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, **options: Any) -> Served:
        """Call one of the routes that answer with what is served. Raises as `served`."""
        answer = await self._call(method, path, body, **options)
        try:
            return _SERVED.validate_python(answer)
        except ValidationError as error:
            hint = "is this server started with `inference`?"
            raise UserError(f"{self.root}{path} does not say what is served: {hint}") from error

    async def update(self, weights: WeightsManifest) -> Served:
        """Have the server load a committed version and verify it: by what it reports to serve, and by what it computes.

        Raises:
            ServerError: it failed, its answer was lost, or it computes something else.
            UserError: it refused, or says afterwards that it serves something else.
        """
        if self._logprob_check is None:
            return await self.load_weights(weights)
        await self._logprob_check.prepare(self, weights)
        served = await self.load_weights(weights)
        began = time.monotonic()
        await self._logprob_check.check(self, weights, served)
        return replace(served, seconds={**served.seconds, "verify": time.monotonic() - began})

    async def load_weights(self, weights: WeightsManifest) -> Served:
        """Have the server load a committed version and say what it serves. Raises as `update`, without its check."""
        body = {"weight_dir": str(weights.directory.resolve()), "version": weights.version}
        served = await self._ask("POST", "/update_weights", body)
        if not served.holds(weights):
            raise UserError(
                f"the server at {self.root} was given version {weights.version} ({weights.hash[:12]}) and says it "
                f"serves version {served.version} ({served.hash[:12]}); of a router, client.admin_base_url names the "
                "servers"
            )
        return served

    async def reload(self) -> Served:
        """Have the server load its base weights again and say so. Raises as `load_weights`."""
        served = await self._ask("POST", "/reload_weights")
        if served.version != 0:
            raise UserError(f"{self.root} was to load its base weights, and says it serves version {served.version}")
        return served

    async def score(self, tokens: Sequence[int], engine: int | None = None) -> list[float]:
        """Ask vLLM's own route for the log-probabilities of a prompt's tokens, all but the first.

        They are computed anew, at temperature 1.

        Args:
            engine: Which one is to answer, of a server that has several (None: any).

        Raises:
            ServerError: it did not answer, failed, or answered without them.
            UserError: it refused.
        """
        body = {
            "token_ids": list(tokens),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
            # vLLM reads no cached prefix for such a request; another server might.
            "cache_salt": f"logprob-check-{secrets.token_hex(8)}",
            # Right after an update all requests in flight are computed anew; a server with priorities does this first.
            "priority": -1,
        }
        which = {} if engine is None else {"X-data-parallel-rank": str(engine)}  # vLLM's own header
        answer = await self._call("POST", "/inference/v1/generate", body, headers=which)
        try:
            entries = answer["prompt_logprobs"][1:]
            logprobs = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries, strict=True)]
            return [math.nan if logprob is None else float(logprob) for logprob in logprobs]  # JSON has no NaN
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"{self.root} answers without log-probabilities of the prompt ({error!r})") from error

    async def sample(self, tokens: Sequence[int], most: int, seed: int, experts: bool = False) -> list[Any]:
        """Continue a prompt at temperature 1; return the tokens, their log-probabilities and, if asked for, `experts`
        of all that was computed, as the route has them. Raises as `score`."""
        params = {"max_tokens": most, "temperature": 1.0, "seed": seed, "logprobs": 0}
        params |= {"routed_experts_prompt_start": 0} if experts else {}
        body = {"token_ids": list(tokens), "sampling_params": params}
        (choice,) = (await self._call("POST", "/v1/sample", body))["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return [choice["token_ids"], logprobs, *([choice["routed_experts"]] if experts else [])]

    async def _trouble(self, path: str) -> str | None:
        """Why the server does not answer well; None if it does."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_SECONDS):  # httpx's own is for each read
                response = await self._http.get(path, timeout=_PROBE_TIMEOUT_SECONDS)
        except (TimeoutError, httpx.TimeoutException):
            return "it does not answer"
        except httpx.TransportError as error:
            return str(error) or type(error).__name__
        status = response.status_code
        well = response.is_success if path == _HEALTH else status not in _TROUBLE
        return None if well else f"GET {path} gives HTTP {status}"

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        limit = httpx.Timeout(timeout or self._config.timeout, connect=_PROBE_TIMEOUT_SECONDS)
        server, url = f"the inference server at {self.root}", f"{self.root}{path}"
        try:
            request = partial(self._http.request, method, path, json=body, timeout=limit, headers=headers)
            try:
                response = await request()
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # A connection that broke says nothing about the server; every call may be repeated.
                response = await request()
        except httpx.TransportError as error:
            raise ServerError(f"{server} did not answer {method} {path}: {error!r}") from error
        status, message = response.status_code, error_message(response)
        if status == 401:
            raise UserError(f"{server} refused the key in ${self._config.api_key_var}")
        if status == 404:
            raise UserError(f"{url} does not exist: is this server started with `inference`?")
        if status == _UNSENT:
            raise VersionNotSent(f"{server}: {message}")
        if status == _BUSY or status >= 500:
            raise ServerError(f"{server} failed {method} {path}: {message}")
        if not response.is_success:
            raise UserError(f"{server} refused {method} {path}: {message}")
        try:
            return dict(response.json())
        except (TypeError, ValueError) as error:
            problem = "does not answer with an object: is this server started with `inference`?"
            raise UserError(f"{url} {problem}") from error


def error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code} {response.text[:300]}"
