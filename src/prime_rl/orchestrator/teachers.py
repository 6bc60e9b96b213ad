"""Teachers: servers of other models that score what the policy samples, or sample in its place.

A score is the log-probability that a model gives to each token of a sequence, at temperature 1 (vLLM's `prompt_logprobs`). The policy's own servers
score the same way (self-distillation).
"""

import asyncio
import math
import os
import random
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

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
_LOOK_SECONDS = 30.0  # for an answer to what a server does not compute for
_BACKOFF_SECONDS = 0.5
_FORBIDDEN, _BUSY = (401, 403), (408, 429)
_LARGER = "give it a larger --max-model-len"
OnWait = Callable[[str, str, float], None]
Ask = Callable[[], Awaitable[Any]]  # a request by openai's client, whose raw answer it gives


class TeacherTrouble(Exception):
    """The server does not answer, or failed, though it was asked several times."""


class Refused(Exception):
    """The server refuses this very request: another attempt gives the same."""


class ModelServer:
    """A client of one teacher's server.

    Args:
        key: The setting that names it, for errors.
    """

    def __init__(self, config: TeacherServer, key: str) -> None:
        import openai  # takes half a second: only for runs with teachers

        self.config: TeacherServer = config
        self._key, self.root = key, api_root(config.base_url)
        self.model = config.model
        self.api_key = os.environ.get(config.api_key_var, "")
        self.slots = asyncio.Semaphore(config.max_concurrent)
        limits = httpx.Limits(max_connections=config.max_concurrent, keepalive_expiry=1.0)
        self._api = openai.AsyncOpenAI(
            base_url=f"{self.root}/v1",
            api_key=self.api_key or "EMPTY",  # without one it would send what OPENAI_API_KEY holds
            max_retries=0,  # it would bound the pauses within an answer, not an attempt
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, limits=limits, follow_redirects=False),
        )
        self._api.organization = self._api.project = None  # of OPENAI_ORG_ID and OPENAI_PROJECT_ID: not for any server

    async def close(self) -> None:
        """Close its connections."""
        await self._api.close()

    async def start(self, ready_timeout: float, on_wait: OnWait) -> None:
        """Wait until the server answers, and find out its model's name.

        Raises:
            UserError: it did not come up in time, refuses the key, or lists no model of that name.
        """
        models = await self._models(ready_timeout, on_wait)
        if self.model and self.model not in models:
            raise UserError(f"{self._key}: the server at {self.root} serves {', '.join(models)}, not {self.model}")
        self.model = self.model or next(iter(models))
        self._learn(models)
        logger.info("teacher at {}: {}", self.root, self.model)

    def _learn(self, models: dict[str, dict[str, Any]]) -> None:
        """What the server tells of its models, by their names."""

    async def _models(self, ready_timeout: float, on_wait: OnWait) -> dict[str, dict[str, Any]]:
        began = time.monotonic()
        trouble = ""
        while time.monotonic() - began < ready_timeout:  # bounded: by the deadline in its head
            try:
                if models := _listed(await self._once(self._api.models.with_raw_response.list, _LOOK_SECONDS)):
                    return models
                trouble = "it lists no model"
            except (TeacherTrouble, Refused) as error:
                trouble = str(error)
            on_wait(f"the server at {self.root}", "teacher", ready_timeout)
            await asyncio.sleep(_POLL_SECONDS)
        raise UserError(f"{self._key}: the server at {self.root} was not ready after {ready_timeout:.0f} s: {trouble}")

    async def _once(self, ask: Ask, seconds: float) -> dict[str, Any]:
        """One request.

        Raises:
            TeacherTrouble: there was no answer, or it says that something is wrong on the server's side.
            Refused: the server refuses the request, or answers with something else than a JSON object.
            UserError: it does not take the key.
        """
        from openai import APIConnectionError, APIStatusError

        try:
            async with asyncio.timeout(seconds):
                response = await ask()
        except (APIConnectionError, TimeoutError) as error:
            raise TeacherTrouble(f"{self.root} did not answer: {error.__cause__ or error!r}") from error
        except APIStatusError as error:
            trouble = f"{self.root} answers HTTP {error.status_code}: {error.response.text[:200]}"
            if error.status_code in _FORBIDDEN:
                said = f"the server at {self.root} does not take the key in ${self.config.api_key_var}"
                raise UserError(f"{self._key}: {said}") from error
            if error.status_code < 500 and error.status_code not in _BUSY:
                raise Refused(trouble) from error
            raise TeacherTrouble(trouble) from error
        return _json(response.http_response)


class Teacher(ModelServer):
    """A client of a server that scores."""

    config: TeacherConfig

    def __init__(self, config: TeacherConfig, key: str) -> None:
        super().__init__(config, key)
        self._learned = False
        self.context: int | None = None  # tokens of a prompt and its reply that the model takes; None: it does not tell

    async def start(self, ready_timeout: float, on_wait: OnWait) -> None:
        """Wait until the server answers, find out its model's name, and check that it scores.

        Raises:
            UserError: it did not come up in time, refuses the key, lists no model of that name, or cannot score.
        """
        await super().start(ready_timeout, on_wait)
        try:
            await self.score([1, 2, 3])
        except Refused as error:
            raise UserError(
                f"{self._key}: the server at {self.root} does not give prompt_logprobs, as vLLM does ({error}): it cannot be a teacher"
            ) from error
        except TeacherTrouble as error:
            raise UserError(f"{self._key}: {error}") from error

    async def score(self, tokens: Sequence[int], hint: Sequence[int] = ()) -> "array[float]":
        """The log-probability of each of T tokens given those before it, (T,); 0 for the first, which nothing predicts unless there is a hint.

        Of as many leading tokens as the model's context holds, where the server tells how many those are.

        Args:
            hint: Tokens that are read before.

        Raises:
            TeacherTrouble: the server does not answer, after `max_attempts` tries.
            Refused: it refuses the request, its answer holds no such numbers, or not even one token fits.
            UserError: it does not take the key.
        """
        async with self.slots:  # bounded: requests have timeouts, and a few attempts
            kept = tokens[: await self._room(len(hint))]
            logprobs = await self._ask([*hint, *kept])
        scores = array("f", logprobs[len(hint) :])
        if not all(map(math.isfinite, scores)) or len(scores) != len(kept):
            raise Refused(f"{self.root} gives no finite log-probability for each of {len(kept)} tokens")
        return scores

    @property
    def patience(self) -> float:
        """Seconds after which a request that has begun is over, whatever the server does."""
        pauses = sum(_BACKOFF_SECONDS * 2**attempt * 1.5 for attempt in range(self.config.max_attempts - 1))
        return self.config.max_attempts * self.config.timeout + pauses

    async def _room(self, before: int) -> int | None:
        """How many tokens fit behind `before` others, and in front of the one that each request samples. None: any number, as far as is known."""
        if not self._learned:  # one of the policy's servers: nobody has waited for it
            await self._ask_for_models()
        if self.context is None:
            return None
        if (room := self.context - 1 - before) < 1:
            hint = f" behind a hint of {before}" if before else ""
            raise Refused(f"{self.root} takes {self.context} tokens, which leaves no room{hint}; {_LARGER}")
        return room

    async def _ask_for_models(self) -> None:
        try:
            self._learn(_listed(await self._request(self._api.models.with_raw_response.list)))
        except Refused:  # it does not tell
            self._learn({})

    def _learn(self, models: dict[str, dict[str, Any]]) -> None:
        model = models.get(self.model, {})
        length = model.get("max_model_len") or models.get(str(model.get("parent")), {}).get("max_model_len")
        self.context = length if isinstance(length, int) and length > 0 else None
        self._learned = True

    async def _ask(self, tokens: list[int]) -> list[float]:
        complete = self._api.completions.with_raw_response.create
        scored = {"prompt_logprobs": 0}
        answer = await self._request(
            partial(complete, model=self.model, prompt=tokens, max_tokens=1, temperature=1.0, extra_body=scored)
        )
        try:
            rest = zip(tokens[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
            entries = [entry[str(token)]["logprob"] for token, entry in rest]
            return [0.0, *(math.nan if entry is None else float(entry) for entry in entries)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(f"its answer has none: {error!r}") from error

    async def _request(self, ask: Ask) -> dict[str, Any]:
        for attempt in range(self.config.max_attempts):
            if attempt:
                await asyncio.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                return await self._once(ask, self.config.timeout)
            except TeacherTrouble as error:
                trouble = error
        raise TeacherTrouble(f"{trouble} ({self.config.max_attempts} attempts)")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError as error:
        raise Refused(f"it answers something else than JSON: {response.text[:100]!r}") from error
    if not isinstance(answer, dict):
        raise Refused(f"it answers something else than a table: {response.text[:100]!r}")
    return answer


def _listed(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a server tells of its models, by their names."""
    try:
        return {str(row["id"]): dict(row) for row in answer["data"]}
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"it lists no models: {error!r}") from error


class Teachers:
    """All that a run learns from, beside its rewards."""

    def __init__(self, config: "OrchestratorConfig") -> None:
        self._config = config
        self._by_env: dict[str, Teacher] = {}  # who scores its episodes
        self._samplers: dict[str, ModelServer] = {}  # who samples them
        self._self: dict[str, Teacher] = {}  # the policy's own servers, by address
        for env in config.environments:
            algorithm, key = config.algorithm_of(env.name), f"{config.algorithm_key(env.name)}.teacher"
            if isinstance(algorithm, SFT):
                assert algorithm.teacher is not None
                self._samplers[env.name] = _same(self._samplers, algorithm.teacher) or ModelServer(
                    algorithm.teacher, key
                )
            elif isinstance(algorithm, OPD):
                assert algorithm.teacher is not None
                self._by_env[env.name] = _same(self._by_env, algorithm.teacher) or Teacher(algorithm.teacher, key)
            elif algorithm.component == "rl" and config.reference is not None:
                self._by_env[env.name] = _same(self._by_env, config.reference) or Teacher(config.reference, "reference")

    async def start(self, on_wait: OnWait) -> None:
        """Wait for all of them. See `Teacher.start`."""
        for server in self._servers():
            await server.start(self._config.client.ready_timeout, on_wait)
            if isinstance(server, Teacher) and server.context is not None and server.context <= self._config.seq_len:
                logger.warning(
                    "the teacher at {} takes {} tokens: of longer sequences only as many are scored and learned; {}",
                    server.root, server.context, _LARGER,
                )  # fmt: skip

    async def close(self) -> None:
        """Close all connections."""
        for server in [*self._servers(), *self._self.values()]:
            await server.close()

    def _servers(self) -> list[ModelServer]:
        """Each once, the policy's own not among them."""
        return list(dict.fromkeys([*self._by_env.values(), *self._samplers.values()]))

    @property
    def names(self) -> list[str]:
        """For people, each once."""
        return list(dict.fromkeys(f"the teacher at {server.root}" for server in self._servers()))

    @property
    def patience(self) -> float:
        """Seconds within which a request that has begun is over, whoever it asks."""
        return max((one.patience for one in [*self._by_env.values(), *self._self.values()]), default=0.0)

    @asynccontextmanager
    async def turn(self, env: str) -> AsyncIterator[None]:
        """Wait until who samples the environment's episodes takes one more. The policy's own servers take any."""
        sampler = self._samplers.get(env)
        if sampler is None:
            yield
            return
        async with sampler.slots:  # bounded: every episode that holds one has a deadline
            yield

    def sampler_of(self, env: str) -> Sampler | None:
        """Who samples the environment's episodes, where it is not the policy."""
        teacher = self._samplers.get(env)
        return None if teacher is None else Sampler(teacher.root, teacher.model, teacher.api_key)

    def demonstration_of(self, env: str) -> Demonstration | None:
        """What the environment's workers show to who scores its episodes."""
        algorithm = self._config.algorithm_of(env)
        return Demonstration(algorithm.demonstration, algorithm.template) if isinstance(algorithm, OPSD) else None

    async def score(
        self, env: str, result: EpisodeResult, server: str, on_scored: Callable[[], None] = lambda: None
    ) -> None:
        """Give the samples of an episode their `ref_logprobs`, where somebody scores them. Without them it is no result any more.

        No clock runs over the wait for other episodes' requests: each request has a deadline of its own.

        Args:
            server: The policy's server that sampled it.
            on_scored: Called for every sample.

        Raises:
            UserError: a server does not take the key.
        """
        teacher = self._own(server) if isinstance(self._config.algorithm_of(env), OPSD) else self._by_env.get(env)
        if teacher is None or not result.ok:
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

    def _own(self, server: str) -> Teacher:
        if server not in self._self:
            client = self._config.client
            config = TeacherConfig(
                base_url=server, model=self._config.model.name, api_key_var=client.api_key_var, timeout=client.timeout
            )
            self._self[server] = Teacher(config, "client")
        return self._self[server]


S = TypeVar("S", bound=ModelServer)


def _same(known: Mapping[str, S], config: TeacherServer) -> S | None:
    """The client that was made for the very same settings."""
    return next((server for server in known.values() if server.config == config), None)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)
