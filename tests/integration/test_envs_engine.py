"""A real environment worker against the real engine: what it brings back is what the engine scores."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from environments import environment

from prime_rl.envs.pool import EnvPool


async def test_tokens_and_logprobs_against_the_engine(inference_server: Any, tmp_path: Path) -> None:
    """Episodes on vLLM are trainable; scoring their ids again gives their logprobs; one seed gives one answer."""
    inference_server.reset()
    pool = EnvPool(
        [environment("reverse-text", {"num_tasks": 4}, max_concurrent=8)],
        model=str(inference_server.model),
        base_url=inference_server.base_url,
        api_key=None,
        output_dir=tmp_path,
    )
    try:
        await pool.start(300)
        results = [
            await pool.run(
                env="reverse-text",
                task_index=task,
                sampling={"temperature": 1.0, "max_tokens": 24, "seed": seed},
                policy_version=0,
                episode_id=f"{task}.{seed}",
                deadline=time.monotonic() + 120,
            )
            for task, seed in ((0, 1), (0, 1), (0, 2), (1, 1))
        ]
    finally:
        await pool.close()
    assert [result.message for result in results] == [""] * 4
    samples = [result.samples[0] for result in results]
    assert samples[0].input_ids == samples[1].input_ids
    assert len({tuple(sample.input_ids) for sample in samples}) > 1
    for sample in samples:
        scored = _score(inference_server, list(sample.input_ids))
        for position in range(sample.prompt_len, len(sample.input_ids)):
            assert math.isclose(sample.logprobs[position], scored[position], abs_tol=1e-3)


def _score(server: Any, ids: list[int]) -> list[float]:
    """The engine's logprob of every token given those before it (the first has none)."""
    body = {
        "model": str(server.model),
        "token_ids": ids,
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
    }
    response = httpx.post(f"{server.root}/inference/v1/generate", json=body, timeout=60)
    response.raise_for_status()
    entries = response.json()["prompt_logprobs"]
    return [0.0] + [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries[1:], strict=True)]
