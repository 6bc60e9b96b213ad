"""gpqa: graduate-level questions with four options, as a verifiers (v1) environment package.

Idavidrein/gpqa, subsets `gpqa_diamond` (198), `gpqa_main` (448) and `gpqa_extended` (546), split `train`: among many
columns `Record ID, Question, Correct Answer, Incorrect Answer 1` to `3` and `High-level domain`, after its .csv files
(Rein et al., 2023). Its owners ask for consent: the hub wants a token.
"""

import hashlib
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from benchmark_tasks.answers import after_thinking, boxed_answer, plain
from benchmark_tasks.local import LocalEnv
from benchmark_tasks.rows import Row
from benchmark_tasks.taskset import BenchmarkConfig, matches, pick

__all__ = ["GpqaTaskset", "LocalEnv"]

LETTERS = "ABCD"
OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
INSTRUCTIONS = r"Please reason step by step, and put the letter of the right option (A, B, C or D) within \boxed{}."
_LETTER = re.compile(r"\(?([A-Da-d])\)?(?:[.:)].*)?", re.DOTALL)
_LAST_LINE = re.compile(r"\banswer(?: is)?\s*:?\s*\**\(?([A-D])\b\)?\**\.?\s*$", re.IGNORECASE)


class GpqaConfig(BenchmarkConfig):
    data: str = "Idavidrein/gpqa"
    domains: list[str] = Field(default=[], description="Such as Physics (empty: all).")
    instructions: str = Field(default=INSTRUCTIONS, description='System prompt ("": none).')


class GpqaData(vf.TaskData):
    answer: str  # a letter
    options: list[str]


class GpqaTask(vf.Task[GpqaData]):
    @property
    def key(self) -> str:
        return str(self.data.id)  # the default would change with the number of the row

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the reply gives the letter of the right option, or what it says."""
        return float(letter(trace.last_reply, self.data.options) == self.data.answer)

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        return float(letter(trace.last_reply, self.data.options) is not None)


class GpqaTaskset(vf.Taskset[GpqaTask, GpqaConfig]):
    def load(self) -> Iterator[GpqaTask]:
        config = self.config
        column = ["High-level domain"] if config.domains else []
        rows = config.rows("train", ("gpqa_diamond",)).require("Record ID", "Question", *OPTIONS, *column)
        found = list(zip(rows.ids("Record ID"), rows.rows, strict=True))
        kept = [pair for pair in found if matches(pair[1], "High-level domain", config.domains)]
        for id, row in pick(config, kept, lambda pair: pair[0]):
            yield GpqaTask(_data(id, row, config.instructions), config.task)


def _data(id: str, row: Row, instructions: str) -> GpqaData:
    """The options are in an order of the question's own, the same on every machine and in every version."""
    order = sorted(OPTIONS, key=lambda name: hashlib.sha256(f"{id}/{name}".encode()).digest())
    options = [row[name].strip() for name in order]
    listed = "\n".join(f"{one}) {option}" for one, option in zip(LETTERS, options, strict=True))
    prompt = f"{row['Question'].strip()}\n\n{listed}"
    answer = LETTERS[order.index("Correct Answer")]
    return GpqaData(id=f"gpqa/{id}", prompt=prompt, system_prompt=instructions or None, answer=answer, options=options)


def letter(reply: str, options: list[str]) -> str | None:
    """Return the letter that a reply chooses: in its last box, as a letter or as an option's text, else in a last line
    such as "Answer: C"."""
    boxed = boxed_answer(reply)
    if boxed is None:
        last = _LAST_LINE.search(after_thinking(reply).rstrip())
        return last.group(1).upper() if last else None
    said = plain(boxed)
    texts = [plain(option) for option in options]
    if said in texts:
        return LETTERS[texts.index(said)]
    match = _LETTER.fullmatch(said)
    return match.group(1).upper() if match else None
