"""Teachers: servers of other models that score what the policy samples, or sample in its place.

A score is the log-probability that a model gives to each token of a sequence, at temperature 1 (vLLM's
`prompt_logprobs`). The policy's own servers score the same way (self-distillation).
"""

import asyncio
import math
import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import httpx
from loguru import logger

from prime_rl.config.orchestrator import OPD, OPSD, SFT, TeacherConfig, TeacherServer
from prime_rl.config.shared import api_root
from prime_rl.envs.pool import Demonstration, Sampler
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

_POLL_SECONDS = 1.0
_LIST_SECONDS = 30.0  # for an answer that a server does not compute
_BACKOFF_SECONDS = 0.5
_LARGER = "give it a larger --max-model-len"
OnWait = Callable[[str, str, float], None]


class TeacherTrouble(Exception):
    """The server does not answer, or failed, though it was asked several times."""


class Refused(Exception):
    """The server refuses this very request: another attempt gives the same."""


class Teacher:
    """A client of one server. One with a `TeacherConfig` scores, another one only samples.

    Args:
        key: The setting that names it, for errors.
    """

    def __init__(self, config: TeacherServer, key: str) -> None:
        self.config, self.root, self.model = config, api_root(config.base_url), config.model
        self._key = key
        # Tokens of a prompt and its reply that the model takes, where the server says so; `_listed`: it was asked.
        self.context: int | None = None
        self._listed = False
        self.api_key = os.environ.get(config.api_key_var, "")
        self.slots = asyncio.Semaphore(config.max_concurrent)  # bounded: requests have timeouts, and a few attempts
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            limits=httpx.Limits(max_connections=config.max_concurrent, keepalive_expiry=1.0),
            timeout=_LIST_SECONDS,  # of a part of an answer; `_once` bounds all of it
            trust_env=False,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def start(self, ready_timeout: float, on_wait: OnWait) -> None:
        """Wait until the server answers, find out its model's name, and check that it scores if it is to.

        Raises:
            UserError: it did not come up in time, refuses the key, lists no model of that name, or cannot score.
        """
        began, trouble, models = time.monotonic(), "", list[str]()
        while not models and time.monotonic() - began < ready_timeout:  # bounded: by the deadline in its head
            try:
                models = self._note_models(await self._once("models", None, _LIST_SECONDS))
                trouble = "it lists no model"
            except (TeacherTrouble, Refused) as error:
                trouble = str(error)
            if not models:
                on_wait(f"the server at {self.root}", "teacher", ready_timeout)
                await asyncio.sleep(_POLL_SECONDS)
        server = f"{self._key}: the server at {self.root}"
        if not models:
            raise UserError(f"{server} was not ready after {ready_timeout:.0f} s: {trouble}")
        if self.model not in models:
            raise UserError(f"{server} serves {', '.join(models)}, not {self.model}")
        logger.info("teacher at {}: {}", self.root, self.model)
        if isinstance(self.config, TeacherConfig):
            try:
                await self.score([1, 2, 3])
            except Refused as error:
                lacking = f"does not give prompt_logprobs, as vLLM does ({error})"
                raise UserError(f"{server} {lacking}: it cannot be a teacher") from error
            except TeacherTrouble as error:
                raise UserError(f"{self._key}: {error}") from error

    def _note_models(self, answer: dict[str, Any]) -> list[str]:
        """Take the model's name and context from a server's list. Returns all names. An adapter has its base's context.

        Raises:
            Refused: it is no list of models.
        """
        try:
            models = {str(row["id"]): dict(row) for row in answer["data"]}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"it lists no models: {error!r}") from error
        self.model, self._listed = self.model or next(iter(models), ""), True
        model = models.get(self.model, {})
        length = model.get("max_model_len") or models.get(str(model.get("parent")), {}).get("max_model_len")
        self.context = length if isinstance(length, int) and length > 0 else None
        return list(models)

    async def score(self, tokens: Sequence[int], hint: Sequence[int] = ()) -> "array[float]":
        """Return the log-probability of each of T tokens given those before it, (T,).

        The first one's is 0 unless there is a hint: nothing predicts it. If the server reports its context length, only
        the leading tokens that fit are scored; one position is reserved for the sampled token.

        Args:
            hint: Tokens that are read before.

        Raises:
            TeacherTrouble: the server does not answer, after `max_attempts` tries.
            Refused: it refuses the request, its answer holds no such numbers, or not even one token fits.
            UserError: it does not take the key.
        """
        async with self.slots:
            if not self._listed:  # one of the policy's servers, which nobody has waited for
                with suppress(Refused):  # it does not list its models
                    self._note_models(await self._request("models", None))
                self._listed = True
            if self.context is not None and self.context - 1 - len(hint) < 1:
                behind = f" behind a hint of {len(hint)}" if hint else ""
                raise Refused(f"{self.root} takes {self.context} tokens, which leaves no room{behind}; {_LARGER}")
            prompt = [*hint, *tokens][: None if self.context is None else self.context - 1]
            options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            answer = await self._request("completions", {"model": self.model, "prompt": prompt, **options})
        try:
            rest = zip(prompt[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
            logprobs = [0.0, *(float(entry[str(token)]["logprob"]) for token, entry in rest)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(f"its answer has none: {error!r}") from error
        scores = array("f", logprobs[len(hint) :])
        if not all(map(math.isfinite, scores)):
            raise Refused(f"{self.root} gives no finite log-probability for each of {len(scores)} tokens")
        return scores

    @property
    def max_request_seconds(self) -> float:
        """Upper bound on the seconds of one scoring request, retries included."""
        if not isinstance(self.config, TeacherConfig):
            return 0.0
        pauses = sum(_BACKOFF_SECONDS * 2**attempt * 1.5 for attempt in range(self.config.max_attempts - 1))
        return self.config.max_attempts * self.config.timeout + pauses

    async def _request(self, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send a request of a teacher that scores, up to `max_attempts` times. Raises as `_once` does."""
        assert isinstance(self.config, TeacherConfig)
        for attempt in range(self.config.max_attempts):
            if attempt:
                await asyncio.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                return await self._once(route, body, self.config.timeout)
            except TeacherTrouble as error:
                trouble = error
        raise TeacherTrouble(f"{trouble} ({self.config.max_attempts} attempts)")

    async def _once(self, route: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Send one request.

        Raises:
            TeacherTrouble: there was no answer, or it reports a fault of the server's side.
            Refused: the server refuses the request, or answers with something else than a JSON object.
            UserError: it does not take the key.
        """
        try:
            async with asyncio.timeout(seconds):
                method = "GET" if body is None else "POST"
                response = await self._http.request(method, f"{self.root}/v1/{route}", json=body, timeout=seconds)
        except (httpx.HTTPError, TimeoutError) as error:
            raise TeacherTrouble(f"{self.root} did not answer: {error!r}") from error
        status = response.status_code
        if status in (401, 403):
            refused = f"the server at {self.root} does not take the key in ${self.config.api_key_var}"
            raise UserError(f"{self._key}: {refused}")
        if not response.is_success:
            trouble = f"{self.root} answers HTTP {status}: {response.text[:200]}"
            raise TeacherTrouble(trouble) if status >= 500 or status in (408, 429) else Refused(trouble)
        try:
            return dict(response.json())
        except (TypeError, ValueError) as error:
            raise Refused(f"it answers something else than a JSON object: {response.text[:100]!r}") from error


class Teachers:
    """All that a run learns from, beside its rewards."""

    def __init__(self, config: "OrchestratorConfig") -> None:
        self._config = config
        self._servers: list[Teacher] = []  # each once; the policy's own are not among them
        self._scorers: dict[str, Teacher] = {}  # by environment
        self._samplers: dict[str, Teacher] = {}  # by environment
        self._own: dict[str, Teacher] = {}  # the policy's own servers, by address
        for env in config.environments:
            algorithm = config.algorithm_of(env.name)
            key = f"environments.{env.name}.algorithm.teacher" if env.algorithm else "algorithm.teacher"
            if isinstance(algorithm, SFT):
                assert algorithm.teacher is not None
                self._samplers[env.name] = self._client(algorithm.teacher, key)
            elif isinstance(algorithm, OPD):
                assert algorithm.teacher is not None
                self._scorers[env.name] = self._client(algorithm.teacher, key)
            elif algorithm.component == "rl" and config.reference is not None:
                self._scorers[env.name] = self._client(config.reference, "reference")

    def _client(self, config: TeacherServer, key: str) -> Teacher:
        """Find the client that was made for the very same settings, or make it."""
        for server in self._servers:
            if server.config == config:
                return server
        self._servers.append(made := Teacher(config, key))
        return made

    async def start(self, on_wait: OnWait) -> None:
        """Wait for all of them. See `Teacher.start`."""
        for server in self._servers:
            await server.start(self._config.client.ready_timeout, on_wait)
            scores = isinstance(server.config, TeacherConfig)
            if scores and server.context is not None and server.context <= self._config.seq_len:
                logger.warning(
                    "the teacher at {} takes {} tokens: of longer sequences only as many are scored and learned; {}",
                    server.root, server.context, _LARGER,
                )  # fmt: skip

    async def close(self) -> None:
        """Close all connections."""
        for server in [*self._servers, *self._own.values()]:
            await server.close()

    @property
    def names(self) -> list[str]:
        """For people, each once."""
        return list(dict.fromkeys(f"the teacher at {server.root}" for server in self._servers))

    @property
    def max_request_seconds(self) -> float:
        """Upper bound on the seconds of one request to any of the servers, retries included."""
        return max((one.max_request_seconds for one in [*self._servers, *self._own.values()]), default=0.0)

    def sampler_slot(self, env: str) -> AbstractAsyncContextManager[None]:
        """Wait until the environment's sampler takes one more episode. The policy's own servers take any."""
        return self._samplers[env].slots if env in self._samplers else nullcontext()

    def sampler_of(self, env: str) -> Sampler | None:
        """Return the server that samples the environment's episodes, where it is not the policy's."""
        teacher = self._samplers.get(env)
        return None if teacher is None else Sampler(teacher.root, teacher.model, teacher.api_key)

    def demonstration_of(self, env: str) -> Demonstration | None:
        """Return the demonstration that workers add to the scoring prompt (OPSD), or None."""
        algorithm = self._config.algorithm_of(env)
        return Demonstration(algorithm.demonstration, algorithm.template) if isinstance(algorithm, OPSD) else None

    async def score(
        self, env: str, result: EpisodeResult, server: str, on_scored: Callable[[], None] = lambda: None
    ) -> None:
        """Give the samples of an episode their `ref_logprobs`, where a teacher scores them.

        An episode that cannot be scored has failed. Queueing has no deadline; each request has its own.

        Args:
            server: The policy's server that sampled it.
            on_scored: Called for every sample.

        Raises:
            UserError: a server does not take the key.
        """
        own = isinstance(self._config.algorithm_of(env), OPSD)
        teacher = self._policy_server(server) if own else self._scorers.get(env)
        if not result.ok or teacher is None:
            return
        try:
            for sample in result.samples:
                tokens = sample.input_ids[: self._config.seq_len]  # no others are trained
                sample.ref_logprobs = await teacher.score(tokens, sample.hint or ())
                on_scored()
        except TeacherTrouble as error:
            result.outcome, result.message = Outcome.TEACHER_UNAVAILABLE, str(error)
        except Refused as error:
            result.outcome, result.message = Outcome.INVALID, f"its teacher: {error}"

    def _policy_server(self, server: str) -> Teacher:
        if server not in self._own:
            client, model = self._config.client, self._config.model.name
            config = TeacherConfig(base_url=server, model=model, api_key_var=client.api_key_var, timeout=client.timeout)
            self._own[server] = Teacher(config, "client")
        return self._own[server]
