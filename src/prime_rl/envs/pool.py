"""Episodes on environment workers: what is sent to a worker, its deadline, and whether what comes back can be its result."""

import asyncio
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.config.shared import EnvConfig
from prime_rl.envs.convert import LARGEST_REWARD, TEXT_LIMIT
from prime_rl.envs.protocol import (
    Cancel,
    EndlessTasks,
    EpisodeResult,
    Outcome,
    Part,
    Run,
    SampleTokens,
    Setup,
    TaskInfo,
)
from prime_rl.envs.worker_pool import WorkerGone, WorkerPool, WorkerSet, worker_range
from prime_rl.envs.worker_process import Log, passed_on, worker_variables
from prime_rl.errors import UserError

GRACE_SECONDS = 5.0  # a worker enforces the deadline itself; this much later it is taken to be blocked
_MESSAGE_LIMIT = 2000  # characters
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampler:
    """What samples an environment's episodes, where it is not the policy."""

    base_url: str
    model: str
    api_key: str


@dataclass(frozen=True)
class Demonstration:
    """What a teacher is shown of a task: a field, and the text around it."""

    field: str
    template: str


class EnvPool(WorkerPool):
    """Workers for several environments, and the episodes that they run. Environments that differ in their names alone share workers.

    pool = EnvPool(envs, model=…, base_url=…, api_key=…, renderer="auto", output_dir=…)
    await pool.start(timeout=300)                 # UserError when an environment cannot be loaded
    result = await pool.run(env="reverse-text", task_index=0, sampling={…}, policy_version=0,
                            episode_id="…", deadline=time.monotonic() + 300)
    await pool.close()
    """

    def __init__(
        self,
        envs: Sequence[EnvConfig],
        *,
        model: str,
        base_url: str | Sequence[str],
        api_key: str | None,
        renderer: str = "auto",
        output_dir: Path,
        log_level: str = "info",
        hang_timeout: float = 120.0,
        samplers: Mapping[str, Sampler] | None = None,
        demonstrations: Mapping[str, Demonstration] | None = None,
        chat_timeout: float | None = None,
    ) -> None:
        """Check what can be checked before a worker starts.

        Args:
            model: Hub name or directory, also the name under which the engine serves it.
            base_url: With or without /v1; the first of several is asked where `run` names none.
            hang_timeout: Seconds that environment code may block a worker's loop before it is interrupted, and if that fails, its worker killed.
            samplers, demonstrations: Of the environments that have one.
            chat_timeout: Seconds without a byte of an answer, of an API that is asked by its chat route (None: by tokens).

        Raises:
            UserError: two environments of one name; a variable in `secrets` that is not set.
        """
        self._base_urls = [_v1(url) for url in ([base_url] if isinstance(base_url, str) else base_url)]
        self._samplers, self._tokens = samplers or {}, chat_timeout is None
        names, token = [config.name for config in envs], secrets.token_urlsafe(16)
        self._sets: dict[str, WorkerSet] = {}  # by the name of each environment, those that share one too
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"two environments are named {sorted(twice)[0]!r}: give each a `name` of its own")
        for config in envs:
            for name in config.secrets:
                if name not in os.environ:
                    raise UserError(f"environment {config.name!r} is to get the variable {name} (its `secrets`), which is not set")  # fmt: skip
            sampler, shown = self._samplers.get(config.name), (demonstrations or {}).get(config.name)
            passed, withheld = passed_on(os.environ, config.secrets)
            # Others' servers are reached as the user's proxy has it.
            own_servers = [_v1(sampler.base_url)] if sampler else self._base_urls if chat_timeout is None else []
            variables = worker_variables(
                passed, token=token, base_urls=own_servers, api_key=sampler.api_key if sampler else api_key
            )
            setup = Setup(
                name=config.name,
                env_id=config.id,
                args=config.args,
                model=model,
                renderer=renderer,
                max_concurrent=config.max_concurrent,
                log_level=log_level,
                sampled_by=sampler.model if sampler else "",
                demonstration=shown.field if shown else "",
                template=shown.template if shown else "",
                adapter=config.adapter,
                max_turns=config.max_turns or 0,
                turn_timeout=config.turn_timeout or 0.0,
                overflow=config.overflow,
                trajectories=config.trajectories,
                chat=chat_timeout is not None,
                request_timeout=chat_timeout or 0.0,
            )
            log = Log(Path(output_dir) / "logs" / "envs" / f"{config.name.replace('/', '--')}.log")
            least, most = worker_range(config.workers, config.max_workers, len(envs))
            own = WorkerSet(config, setup, variables, withheld, log, least, most)
            self._sets[config.name] = next((other for other in self._sets.values() if _alike(own, other)), own)
        super().__init__(list(dict.fromkeys(self._sets.values())), token, hang_timeout)

    def tasks(self, env: str) -> list[TaskInfo] | EndlessTasks:
        """The tasks of an environment, in its own order."""
        return self._sets[env].tasks

    @property
    def busiest(self) -> float:
        """What the busiest worker uses of a core, over its last heartbeats."""
        return max((worker.use for worker in self.workers.values()), default=0.0)

    async def run(
        self,
        *,
        env: str,
        task_index: int,
        sampling: dict[str, Any],
        policy_version: int,
        episode_id: str,
        deadline: float,
        server: str | None = None,
    ) -> EpisodeResult:
        """Run one episode; always returns a result by `deadline` (a `time.monotonic()` value) plus a short grace, and the wait for a worker: while
        others' episodes end, it takes none of this one's time. Cancelling the call cancels the episode and its engine requests.

        Args:
            sampling: temperature, top_p, top_k, min_p, max_tokens, min_tokens, seed …; None values are left out.
            server: Address of the one that samples it, with or without /v1.

        Raises:
            UserError: the pool has failed.
        """
        own = self._sets[env]
        task = own.tasks[task_index]

        def failed(outcome: Outcome, message: str) -> EpisodeResult:
            return EpisodeResult(episode_id, env, task.task_id, outcome, message)

        timeout = max(0.0, deadline - time.monotonic())
        if (slot := await self.place(own, timeout)) is None:
            if any(worker.serves for worker in self.of(own)):
                message = f"all workers of {env!r} were full for {timeout:.0f} s, and no episode ended"
                return failed(Outcome.TIMEOUT, message)
            return failed(Outcome.WORKER_DIED, f"no worker of {env!r} became ready before the deadline")
        worker, request = slot
        sampler = self._samplers.get(env)
        base_url = _v1(sampler.base_url) if sampler else self._base_urls[0] if server is None else _v1(server)
        run = Run(request, episode_id, task_index, task.task_id, sampling, policy_version, base_url, timeout)
        try:
            async with asyncio.timeout(timeout + GRACE_SECONDS):
                await self._send(worker, run)
                result = await worker.pending[request]  # owed by the worker; failed when that is gone
            asked = {"episode_id": episode_id, "env": own.config.name, "task_id": task.task_id}
            return replace(vetted(result, **asked, tokens=self._tokens), env=env)
        except WorkerGone as gone:
            return failed(gone.outcome, str(gone))
        except TimeoutError:
            await self._send(worker, Cancel(request))
            if worker.stuck and worker.offending_request() != request:
                return failed(Outcome.WORKER_DIED, "its worker is stuck, and not in this episode's code")
            return failed(Outcome.TIMEOUT, f"no answer from the worker {GRACE_SECONDS:.0f} s after the deadline")
        except asyncio.CancelledError:
            await self._send(worker, Cancel(request))
            raise
        finally:
            self.leave(worker, request)


def _alike(one: WorkerSet, other: WorkerSet) -> bool:
    """Whether the workers of two environments do the same: a training environment that is evaluated as well is loaded once."""
    settings = [
        (replace(own.setup, name=""), own.variables, own.config.python, own.config.recycle_episodes, own.config.recycle_mib, own.least, own.most)
        for own in (one, other)
    ]  # fmt: skip
    return settings[0] == settings[1]


def _v1(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def vetted(result: EpisodeResult, *, episode_id: str, env: str, task_id: str, tokens: bool) -> EpisodeResult:
    """Return a worker's result itself, or an `invalid` one that says what is wrong with it. Metrics that are no finite number are left out.

    `protocol.decode` has checked the fields and their types; this checks what is in them.

    Args:
        tokens: The model was asked by tokens, so there must be something to train on.
    """
    got, asked = (result.episode_id, result.env, result.task_id), (episode_id, env, task_id)
    fault = None if got == asked else f"it is of {_named(got)}, asked was {_named(asked)}"
    fault = fault or next(_faults(result, tokens), None)
    if fault is not None and (result.ok or got != asked):
        return EpisodeResult(*asked, Outcome.INVALID, f"the worker's result is unusable: {fault}")
    if fault is not None:
        return EpisodeResult(*asked, result.outcome, result.message[:_MESSAGE_LIMIT])
    for table in (result.metrics, result.timing, *(part.metrics for part in result.parts)):
        for name in [name for name, value in table.items() if not math.isfinite(value)]:
            del table[name]
    if not result.ok:
        result.samples = []
    result.message = result.message[:_MESSAGE_LIMIT]
    result.prompt, result.completion = result.prompt[: 2 * TEXT_LIMIT], result.completion[: 2 * TEXT_LIMIT]
    return result


def _named(ids: tuple[str, str, str]) -> str:
    episode, env, task = ids
    return f"episode {episode[:100]!r} of {env[:100]!r}, task {task[:100]!r}"


def _faults(result: EpisodeResult, tokens: bool) -> Iterator[str]:
    if result.ok and tokens and not result.samples:
        yield "it has no samples"
    if result.filtered:
        yield "it claims to be left out by a filter"
    for name in ("num_turns", "input_tokens", "output_tokens"):
        if not 0 <= getattr(result, name) < 1 << 62:
            yield f"{name} is {getattr(result, name)}"
    yield from _table_faults("timing", result.timing)
    scored: list[tuple[str, EpisodeResult | Part]] = [("", result), *(("a part's ", part) for part in result.parts)]
    for whose, each in scored:
        yield from _number_faults(f"{whose}reward", each.reward, LARGEST_REWARD)
        yield from _table_faults(f"{whose}rewards", each.rewards, LARGEST_REWARD, finite=True)
        yield from _table_faults(f"{whose}metrics", each.metrics)
    for sample in result.samples if result.ok else ():
        yield from _number_faults("a sample's reward", sample.reward)
        yield from _sample_faults(sample)


def _table_faults(name: str, table: dict[Any, Any], most: float = _LARGEST, finite: bool = False) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(key, str):
            yield f"{name} has a name that is a {type(key).__name__}"
        else:
            yield from _number_faults(f"{name}[{key[:100]!r}]", value, most, finite)


def _number_faults(name: str, value: Any, most: float = _LARGEST, finite: bool = True) -> Iterator[str]:
    """Say what is wrong with a number. `most`: largest magnitude."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{name} is a {type(value).__name__}"
    elif finite and not math.isfinite(value):
        yield f"{name} is {value}"
    elif math.isfinite(value) and abs(value) > most:
        yield f"{name} is beyond 32 bits" if abs(value) > _LARGEST else f"{name} is {value}: beyond {most:g}"


def _sample_faults(sample: SampleTokens) -> Iterator[str]:
    ids, mask = np.frombuffer(sample.input_ids, np.int32), np.frombuffer(sample.loss_mask, np.bool_)
    logprobs = np.frombuffer(sample.logprobs, np.float32)
    if not 0 <= sample.prompt_len <= len(ids):
        yield f"a sample of {len(ids)} tokens has a prompt of {sample.prompt_len}"
    if len(ids) and ids.min() < 0:
        yield f"a sample holds token {ids.min()}"
    if not np.isfinite(logprobs).all() or (logprobs > 0.0).any():
        yield "a sampled token has a log-probability that is none"
    if logprobs[~mask].any():
        yield "a token that was not sampled has a log-probability"
    if sample.hint is not None and min(sample.hint, default=0) < 0:
        yield "a sample's hint holds a token below 0"
    if sample.ref_logprobs is not None and not np.isfinite(np.frombuffer(sample.ref_logprobs, np.float32)).all():
        yield "a sample has a teacher's log-probability that is none"
