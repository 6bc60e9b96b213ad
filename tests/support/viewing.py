"""A small run for `rl view`: files as the processes write them."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from prime_rl.transport.rollouts import Sample, write_batch
from prime_rl.transport.token_stats import write_token_stats
from support.ledgers import ScriptedLedger, finish_group

MODEL = Path(__file__).parents[2] / "assets" / "tiny-reverse"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def metric_lines(steps: range, **values: float) -> str:
    return "".join(json.dumps({"step": step, "time": 1e9 + step, **values}) + "\n" for step in steps)


def chat_sample(number: int, reply: str, reward: float, env: str = "reverse-text") -> Sample:
    """A sample of a system prompt, a question and a reply, of which only the reply is trained."""
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nword &lt;<|im_end|>\n<|im_start|>assistant\n"
    before, own = (TOKENIZER.encode(text).ids for text in (prompt, f"{reply}<|im_end|>"))
    mask = np.array([False] * len(before) + [True] * len(own))
    return Sample(
        sample_id=f"{number}.0.0.0",
        group_id=str(number),
        task_id=f"task-{number}" if env == "reverse-text" else "c0ffee01" * 8,
        env=env,
        policy_versions=[2, 3],
        input_ids=[*before, *own],
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0),
        advantages=np.where(mask, reward - 0.5, 0.0),
        temperature=1.0,
        reward=reward,
        is_truncated=reward == 0,
    )


def make_run(path: Path, steps: int = 4) -> Path:
    """Write metrics of `steps` steps, samples of the last two, of which only the first is trained, a ledger, a config,
    logs."""
    for name in ("metrics", "configs", "logs", "incarnations", "evals"):
        (path / name).mkdir(parents=True)
    rewards = [json.dumps({"step": step, "time": 1e9 + step, "reward/mean": step / steps}) for step in range(steps)]
    evaluated = [json.dumps({"step": step, "time": 1e9, "eval/e/avg@1": 0.5}) for step in (0, steps)]
    (path / "metrics" / "orchestrator.jsonl").write_text("\n".join([*rewards, *evaluated]) + "\n")
    (path / "metrics" / "trainer.jsonl").write_text(metric_lines(range(steps), **{"loss/mean": 0.25, "time/step": 2.0}))
    (path / "configs" / "rl.toml").write_text(f'max_steps = {steps}\n[model]\nname = "{MODEL}"\n')
    (path / "logs" / "trainer.log").write_text("2026-11-30 10:00:00 WARNING the disk is nearly full\n")
    (path / "incarnations" / "0.json").write_text('{"step": 0}')
    call = '<tool_call>{"name": "look"}</tool_call>'
    for step in range(steps - 2, steps):
        samples = [chat_sample(step * 10 + number, f"{call}äöü <b>{number}", number / 20) for number in range(20)]
        samples.append(chat_sample(step * 10 + 99, "other", 1.0, "wordle"))
        groups = [[int(one.group_id), one.env, 7, one.task_id] for one in samples]
        write_batch(path / "rollouts", step, samples, extra={"ledger": {"groups": groups}})
        if step < steps - 1:  # the last one is not trained yet
            tokens = [int(np.sum(sample.loss_mask)) for sample in samples]
            stats = np.tile(np.linspace(-0.25, 0.5, sum(tokens)), (2, 1))
            write_token_stats(path, step, 0, [sample.sample_id for sample in samples], tokens, stats)
    ledger = ScriptedLedger(path / "ledger.sqlite")
    trained = finish_group(ledger, 0)
    finish_group(ledger, 1, size=1)
    ledger.dropped("1.0.0", "stale")
    ledger.batched(steps - 1, trained, [], [0])
    ledger.flush()
    ledger.close()
    return path
