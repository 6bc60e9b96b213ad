"""Teachers: servers of other models that score what the policy samples, or sample in its place.

A score is the log-probability that a model gives to each token of a sequence, at temperature 1 (vLLM's
`prompt_logprobs`). The policy's own servers score the same way (self-distillation).
"""

import asyncio
import math
import os
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import httpx
from loguru import logger

from prime_rl.config.orchestrator import OPD, OPSD, SFT, TeacherConfig, TeacherServer
from prime_rl.config.shared import api_root
from prime_rl.envs.protocol import EpisodeResult, Outcome
from prime_rl.errors import UserError

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig

_POLL_SECONDS = 1.0
_LIST_SECONDS = 30.0  # for a request that needs no forward pass, such as the list of models
OnWait = Callable[[str, str, float], None]


class TeacherError(Exception):
    """A server did not answer in time, refused a request, or gave an invalid answer."""


class Teacher:
    """A client of one server, which the setting `key` names. One with a `TeacherConfig` scores, others only sample."""

    def __init__(self, config: TeacherServer, key: str) -> None:
        self.config, self.root, self.model = config, api_root(config.base_url), config.model
        self._key = key
        self.api_key = os.environ.get(config.api_key_var, "")
        self.timeout = config.timeout if isinstance(config, TeacherConfig) else _LIST_SECONDS
        self.slots = asyncio.Semaphore(config.max_concurrent)  # bounded: requests have timeouts
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            limits=httpx.Limits(max_connections=config.max_concurrent, keepalive_expiry=1.0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def start(self, ready_timeout: float, on_wait: OnWait) -> None:
        """Wait until the server answers, find out its model's name, and check that it scores if it is to.
        Raises UserError: it did not come up in time, refuses the key, lists no model of that name, or cannot score."""
        began, trouble, models = time.monotonic(), "it lists no model", list[str]()
        while not models and time.monotonic() - began < ready_timeout:  # bounded: by the deadline in its head
            try:
                answer = await self._request("models", None, _LIST_SECONDS)
                models = [str(row["id"]) for row in answer["data"]]
            except (TeacherError, KeyError, TypeError) as error:
                trouble = str(error)
            if not models:
                on_wait(f"the server at {self.root}", "teacher", ready_timeout)
                await asyncio.sleep(_POLL_SECONDS)
        server = f"{self._key}: the server at {self.root}"
        if not models:
            raise UserError(f"{server} was not ready after {ready_timeout:.0f} s: {trouble}")
        self.model = self.model or models[0]
        if self.model not in models:
            raise UserError(f"{server} serves {', '.join(models)}, not {self.model}")
        logger.info("teacher at {}: {}", self.root, self.model)
        if isinstance(self.config, TeacherConfig):
            try:
                await self.score([1, 2, 3])
            except TeacherError as error:
                raise UserError(
                    f"{server} cannot be a teacher, which gives prompt_logprobs as vLLM does: {error}"
                ) from error

    async def score(self, tokens: Sequence[int], hint: Sequence[int] = ()) -> "array[float]":
        """Return the log-probability of each of T tokens given the `hint` and those before it, (T,).

        The first one's is 0 unless there is a hint: nothing predicts it. Raises TeacherError; and UserError if the
        server does not take the key.
        """
        prompt = [*hint, *tokens]
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        async with self.slots:
            answer = await self._request("completions", body, self.timeout)
        try:
            rest = zip(prompt[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
            logprobs = [0.0, *(float(entry[str(token)]["logprob"]) for token, entry in rest)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TeacherError(f"its answer has no prompt_logprobs: {error!r}") from error
        if not all(map(math.isfinite, logprobs)):
            raise TeacherError(f"{self.root} gives log-probabilities that are not finite")
        return array("f", logprobs[len(hint) :])

    async def _request(self, route: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Send one request, and return the JSON object that it is answered with. Raises as `score`."""
        try:
            async with asyncio.timeout(seconds):
                method = "GET" if body is None else "POST"
                response = await self._http.request(method, f"{self.root}/v1/{route}", json=body, timeout=seconds)
        except (httpx.HTTPError, TimeoutError) as error:
            raise TeacherError(f"{self.root} did not answer: {error!r}") from error
        status = response.status_code
        if status in (401, 403):
            refused = f"the server at {self.root} does not take the key in ${self.config.api_key_var}"
            raise UserError(f"{self._key}: {refused}")
        if not response.is_success:
            raise TeacherError(f"{self.root} answers HTTP {status}: {response.text[:200]}")
        try:
            return dict(response.json())
        except (TypeError, ValueError) as error:
            raise TeacherError(f"{self.root} answers something else: {response.text[:100]!r}") from error


class Teachers:
    """The run's teacher and reference servers: of each environment the one that scores, or samples, its episodes."""

    def __init__(self, config: "OrchestratorConfig") -> None:
        self._config = config
        self._servers: dict[str, Teacher] = {}  # by their settings
        self._scorers: dict[str, Teacher] = {}  # by environment
        self.samplers: dict[str, Teacher] = {}  # by environment, where it is not the policy
        for env in config.environments:
            algorithm = config.algorithm_of(env.name)
            key = f"environments.{env.name}.algorithm.teacher" if env.algorithm else "algorithm.teacher"
            if isinstance(algorithm, SFT):
                assert algorithm.teacher is not None
                self.samplers[env.name] = self._client(algorithm.teacher, key)
            elif isinstance(algorithm, OPD):
                assert algorithm.teacher is not None
                self._scorers[env.name] = self._client(algorithm.teacher, key)
            elif algorithm.component == "rl" and config.reference is not None:
                self._scorers[env.name] = self._client(config.reference, "reference")

    def _client(self, config: TeacherServer, key: str) -> Teacher:
        """Find the client that was made for the same settings, or make it."""
        settings = config.model_dump_json()
        if settings not in self._servers:
            self._servers[settings] = Teacher(config, key)
        return self._servers[settings]

    async def start(self, on_wait: OnWait) -> None:
        """Wait for all of them. See `Teacher.start`."""
        for server in self._servers.values():
            await server.start(self._config.client.ready_timeout, on_wait)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    async def score(self, env: str, result: EpisodeResult, server: str) -> None:
        """Give the samples of an episode their `ref_logprobs`, where a teacher scores them.

        `server` is the policy's that sampled it, which is its teacher with `opsd`. An episode that cannot be scored has
        failed. Queueing has no deadline; each request has its own. Raises UserError: a server does not take the key.
        """
        teacher = self._scorers.get(env)
        if isinstance(self._config.algorithm_of(env), OPSD):
            client, name = self._config.client, self._config.model.name
            key, seconds = client.api_key_var, client.timeout
            own = TeacherConfig(base_url=server, model=name, api_key_var=key, timeout=seconds)
            teacher = self._client(own, "client")
        if not result.ok or teacher is None:
            return
        try:
            for sample in result.samples:
                tokens = sample.input_ids[: self._config.seq_len]  # no others are trained
                sample.ref_logprobs = await teacher.score(tokens, sample.hint or ())
        except TeacherError as error:
            result.outcome, result.message = Outcome.TEACHER_UNAVAILABLE, f"its teacher: {error}"
