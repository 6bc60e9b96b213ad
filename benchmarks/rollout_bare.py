"""vLLM alone, its offline engine, for `rollout.py`: how fast it samples the same prompts. Runs in a process of its own.

    python benchmarks/rollout_bare.py LOAD.json RESULT.json

Runs several times as many requests as may be in flight, and as many: their difference is free of beginning and end.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

WAVES = 4


def main() -> None:
    work, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import vllm

    began = time.monotonic()
    engine = vllm.LLM(model=work["model"], max_model_len=work["length"], **work["flags"])
    ready = time.monotonic() - began
    flight, reply, group = work["flight"], work["reply"], work["group"]
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"] for _ in range(group)]
    assert len(prompts) >= (1 + WAVES) * flight
    results: dict[str, Any] = {"vllm": vllm.__version__, "ready_seconds": ready}
    for name, logprobs in (("warm-up", 0), ("with logprobs", 0), ("without logprobs", None)):
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=reply, ignore_eos=True, logprobs=logprobs, detokenize=False
        )
        one = _timed(engine, prompts[:flight], params, reply)
        if name == "warm-up":
            continue
        several = _timed(engine, prompts[flight : (1 + WAVES) * flight], params, reply)
        results[name] = {
            "tokens_per_second": (WAVES - 1) * flight * reply / (several - one),
            "whole_run_tokens_per_second": WAVES * flight * reply / several,
            "seconds": [one, several],
        }
        print(name, results[name], flush=True)
        result.write_text(json.dumps(results))


def _timed(engine: Any, prompts: list[dict[str, list[int]]], params: Any, reply: int) -> float:
    engine.reset_prefix_cache()  # each run computes its prompts
    began = time.monotonic()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - began
    assert all(len(output.outputs[0].token_ids) == reply for output in outputs)
    return seconds


if __name__ == "__main__":
    main()
