"""An environment in plain Python for measuring: one turn, a reward by chance. Used by `orchestrator_load.py`."""

import zlib
from typing import Any

tasks = [{"id": f"plain-reply/{number}", "prompt": f"Say the word number {number}."} for number in range(4096)]


async def rollout(task: dict[str, Any], chat: Any) -> float:
    reply = await chat()
    return zlib.crc32(f"{task['id']} {reply.text}".encode()) % 100 / 100
