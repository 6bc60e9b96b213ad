"""Threads that work for episodes which have ended."""

import asyncio
import time
from pathlib import Path

import pytest

from prime_rl.envs import threads as threads_module
from prime_rl.envs.attribution import Attribution, Page
from prime_rl.envs.threads import Threads


def _spin(until: list[bool]) -> str:
    while not until:
        try:
            time.sleep(0.005)
        except Exception:  # noqa: BLE001
            continue
    return "done"


def test_who_works_for_nobody_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only they: not threads of episodes that run, nor of no episode."""
    monkeypatch.setattr(threads_module, "LATE_SECONDS", 0.05)
    Page.make(tmp_path / "page")
    release: list[bool] = []

    async def main() -> None:
        threads, attribution = Threads(), Attribution(Page(tmp_path / "page"))
        asyncio.get_running_loop().set_default_executor(threads)

        async def episode(results: list[str]) -> None:
            results.append(await asyncio.to_thread(_spin, release))

        kept: list[str] = []
        over, running = attribution.start(episode([]), 1), attribution.start(episode(kept), 2)
        nobodys = asyncio.create_task(asyncio.to_thread(_spin, release))
        async with asyncio.timeout(60):
            while not over.done():
                threads.interrupt(lambda request: request == 1)
                await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError, match="its episode had ended"):
            await over
        assert not running.done()
        release.append(True)
        await running
        assert (kept, await nobodys) == (["done"], "done")

    asyncio.run(main())
