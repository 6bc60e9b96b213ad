"""Teachers: servers of other models that score what the policy samples, or sample in its place.

A score is the log-probability that a model gives to each token of a sequence, at temperature 1. Every vLLM tells it (`prompt_logprobs`), and so do
servers that can `echo` a prompt with its log-probabilities. What the policy's own server is asked for (self-distillation) goes the same way.
"""

import asyncio
import math
import os
import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx

from prime_rl.config.algorithms import OPSD, SFT, Distillation, TeacherConfig
from prime_rl.config.shared import api_root
from prime_rl.envs.pool import Demonstration, Sampler
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError
from prime_rl.monitor import log

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

logger = log.get("orchestrator")

_POLL_SECONDS = 1.0
_BACKOFF_SECONDS = 0.5
_FORBIDDEN, _BUSY = (401, 403), (408, 429)
OnWait = Callable[[str, str, float], None]


class TeacherTrouble(Exception):
    """The server does not answer, or failed, though it was asked several times."""


class Refused(Exception):
    """The server refuses this very request: another attempt gives the same."""


class Teacher:
    """A client of one teacher's server. Use it as an asynchronous context manager.

    Args:
        key: The setting that names it, for errors.
    """

    def __init__(self, config: TeacherConfig, key: str) -> None:
        self.config, self._key, self.root = config, key, api_root(config.base_url)
        self.model = config.model
        self._echo = False  # whether scores come by `echo`
        self.api_key = os.environ.get(config.api_key_var, "")
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._http = httpx.AsyncClient(
            base_url=self.root,
            timeout=config.timeout,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            trust_env=False,
            limits=httpx.Limits(max_connections=config.max_concurrent, keepalive_expiry=1.0),
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def start(self, ready_timeout: float, on_wait: OnWait, *, scores: bool = True) -> None:
        """Wait until the server answers, and find out its model's name and how it tells scores.

        Raises:
            UserError: it did not come up in time, refuses the key, lists no model of that name, or cannot tell scores.
        """
        models = await self._models(ready_timeout, on_wait)
        if self.model and self.model not in models:
            raise UserError(f"{self._key}: the server at {self.root} serves {', '.join(models)}, not {self.model}")
        self.model = self.model or models[0]
        if scores:
            await self._choose()
        logger.info("teacher at %s: %s%s", self.root, self.model, " (scores by echo)" if self._echo else "")

    async def score(self, tokens: Sequence[int], hint: Sequence[int] = ()) -> "array[float]":
        """The log-probability of each of T tokens given those before it, (T,); 0 for the first, which nothing predicts unless there is a hint.

        Args:
            hint: Tokens that are read before.

        Raises:
            TeacherTrouble: the server does not answer, after `max_attempts` tries.
            Refused: it refuses the request, or its answer holds no such numbers.
            UserError: it does not take the key.
        """
        whole = [*hint, *tokens]
        async with self._slots:  # bounded: requests have timeouts, and a few attempts
            found = await self._ask(whole)
        scores = array("f", found[len(hint) :])
        if not all(map(math.isfinite, scores)) or len(scores) != len(tokens):
            raise Refused(f"{self.root} gives no finite log-probability for each of {len(tokens)} tokens")
        return scores

    async def _choose(self) -> None:
        """Which of the two ways the server knows."""
        refusals = []
        for self._echo in (False, True):
            try:
                await self.score([1, 2, 3])
                return
            except Refused as error:
                refusals.append(str(error))
            except TeacherTrouble as error:
                raise UserError(f"{self._key}: {error}") from error
        raise UserError(
            f"{self._key}: the server at {self.root} does not tell the log-probabilities of a prompt, neither by prompt_logprobs, as vLLM does "
            f"({refusals[0]}), nor by echo with logprobs ({refusals[1]}): it cannot be a teacher"
        )

    async def _ask(self, tokens: list[int]) -> list[float]:
        way = {"echo": True, "logprobs": 1} if self._echo else {"prompt_logprobs": 0}
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, **way}
        answer = await self._post("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            if self._echo:
                entries = choice["logprobs"]["token_logprobs"][1 : len(tokens)]
            else:
                rest = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
                entries = [entry[str(token)]["logprob"] for token, entry in rest]
            return [0.0, *(math.nan if entry is None else float(entry) for entry in entries)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(f"its answer has none: {error!r}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(self.config.max_attempts):
            if attempt:
                await asyncio.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                response = await self._http.post(path, json=body)
            except httpx.TransportError as error:
                trouble = f"{self.root} did not answer: {error!r}"
                continue
            if response.is_success:
                return self._json(response)
            trouble = f"{self.root} answers HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code in _FORBIDDEN:
                raise UserError(self._no_key())
            if response.status_code < 500 and response.status_code not in _BUSY:
                raise Refused(trouble)
        raise TeacherTrouble(f"{trouble} ({self.config.max_attempts} attempts)")

    async def _models(self, ready_timeout: float, on_wait: OnWait) -> list[str]:
        began = time.monotonic()
        trouble = ""
        while time.monotonic() - began < ready_timeout:  # bounded: by the deadline in its head
            try:
                response = await self._http.get("/v1/models")
                if response.status_code in _FORBIDDEN:
                    raise UserError(self._no_key())
                if response.is_success and (names := [str(one["id"]) for one in self._json(response)["data"]]):
                    return names
                trouble = f"GET /v1/models gives HTTP {response.status_code}"
            except (httpx.TransportError, Refused, KeyError, TypeError) as error:
                trouble = repr(error)
            on_wait(f"the server at {self.root}", "teacher", ready_timeout)
            await asyncio.sleep(_POLL_SECONDS)
        raise UserError(f"{self._key}: the server at {self.root} was not ready after {ready_timeout:.0f} s: {trouble}")

    def _no_key(self) -> str:
        return f"{self._key}: the server at {self.root} does not take the key in ${self.config.api_key_var}"

    @staticmethod
    def _json(response: httpx.Response) -> dict[str, Any]:
        try:
            found = response.json()
        except ValueError as error:
            raise Refused(f"it answers something else than JSON: {response.text[:100]!r}") from error
        if not isinstance(found, dict):
            raise Refused(f"it answers something else than a table: {response.text[:100]!r}")
        return found


class Teachers:
    """All that a run learns from, beside its rewards."""

    def __init__(self, config: "OrchestratorConfig") -> None:
        self._config = config
        self._by_env: dict[str, Teacher] = {}  # who scores its episodes
        self._samplers: dict[str, Teacher] = {}
        self._self: dict[str, Teacher] = {}  # the policy's own servers, by address
        known: dict[tuple[str, str, str], Teacher] = {}

        def teacher(found: TeacherConfig, key: str) -> Teacher:
            return known.setdefault((api_root(found.base_url), found.model, found.api_key_var), Teacher(found, key))

        for env in config.environments:
            algorithm = config.algorithm_of(env.name)
            if isinstance(algorithm, SFT):
                assert algorithm.teacher is not None
                self._samplers[env.name] = teacher(algorithm.teacher, "algorithm.teacher")
            elif isinstance(algorithm, Distillation):
                assert algorithm.teacher is not None
                self._by_env[env.name] = teacher(algorithm.teacher, "algorithm.teacher")
            elif algorithm.component == "rl" and config.reference is not None:
                self._by_env[env.name] = teacher(config.reference, "reference")

    async def start(self, on_wait: OnWait) -> None:
        """Wait for all of them. See `Teacher.start`."""
        for teacher in {id(one): one for one in [*self._by_env.values(), *self._samplers.values()]}.values():
            scores = teacher in self._by_env.values()
            await teacher.start(self._config.client.ready_timeout, on_wait, scores=scores)

    async def close(self) -> None:
        """Close all connections."""
        for teacher in [*self._by_env.values(), *self._samplers.values(), *self._self.values()]:
            await teacher.close()

    def sampler_of(self, env: str) -> Sampler | None:
        """Who samples the environment's episodes, where it is not the policy."""
        teacher = self._samplers.get(env)
        return None if teacher is None else Sampler(teacher.root, teacher.model, teacher.api_key)

    def demonstration_of(self, env: str) -> Demonstration | None:
        """What the environment's workers show to who scores its episodes."""
        algorithm = self._config.algorithm_of(env)
        return Demonstration(algorithm.demonstration, algorithm.template) if isinstance(algorithm, OPSD) else None

    async def score(self, env: str, result: EpisodeResult, server: str) -> None:
        """Give the samples of an episode their `ref_logprobs`, where somebody scores them. Without them it is no result any more.

        Args:
            server: The policy's server that sampled it.

        Raises:
            UserError: a server does not take the key.
        """
        teacher = self._by_env.get(env)
        if isinstance(self._config.algorithm_of(env), OPSD):
            teacher = self._own(server)
        if teacher is None or not result.ok:
            return
        try:
            for sample in result.samples:
                sample.ref_logprobs = await teacher.score(sample.input_ids, sample.hint or ())
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
