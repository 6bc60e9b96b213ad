"""Episodes on environment workers: what is sent to a worker, and the deadline of its answer."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prime_rl.config.shared import EnvConfig
from prime_rl.envs.protocol import (
    Cancel,
    EpisodeResult,
    Outcome,
    Run,
    Setup,
    TaskInfo,
)
from prime_rl.envs.worker_pool import WorkerGone, WorkerPool, WorkerSet, worker_range
from prime_rl.envs.worker_process import passed_on, worker_variables
from prime_rl.errors import UserError

GRACE_SECONDS = 5.0  # a worker enforces the deadline itself; this much later it is taken to be blocked


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
        self._samplers = samplers or {}
        names = [config.name for config in envs]
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
            variables = worker_variables(passed, base_urls=own_servers, api_key=sampler.api_key if sampler else api_key)
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
            log = Path(output_dir) / "logs" / "envs" / f"{config.name.replace('/', '--')}.log"
            least, most = worker_range(config.workers, config.max_workers, len(envs))
            own = WorkerSet(config, setup, variables, withheld, log, least, most)
            self._sets[config.name] = next((other for other in self._sets.values() if _alike(own, other)), own)
        super().__init__(list(dict.fromkeys(self._sets.values())), hang_timeout)

    def tasks(self, env: str) -> list[TaskInfo]:
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
            return replace(result, env=env)
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
        (replace(own.setup, name=""), own.variables, own.config.python, own.least, own.most)
        for own in (one, other)
    ]  # fmt: skip
    return settings[0] == settings[1]


def _v1(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"
