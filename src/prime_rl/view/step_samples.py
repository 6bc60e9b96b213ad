"""Read the samples of a step as text. Only rows that are shown are read; they are decoded without torch."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer

from prime_rl.errors import UserError
from prime_rl.monitor.run_directory import RunDirectory
from prime_rl.transport.commit import list_steps, step_dir
from prime_rl.transport.rollouts import Sample, open_batch
from prime_rl.transport.token_stats import STATS, read_token_stats

PAGE = 50  # rows of a page
ROUNDING = 5e-4  # filters are rewards as the page shows them, rounded to three digits
_SCALARS = ("sample_id", "group_id", "task_id", "env", "reward", "is_truncated", "policy_versions")
_STREAMS = ("logprobs", "advantages", "ref_logprobs", "rl_weight", "ce_weight", "ref_kl_weight")
_PREVIEW = 200  # characters
_VERSIONS = 20  # newest versions searched for a tokenizer: those in memory alone have none
_ROLES = ("system", "developer", "user", "assistant", "tool", "observation")
# Parts of the special tokens of chat templates: before the name of a role, after it, and after a message.
_OPENS = ("im_start", "start_header_id", "start_of_turn", "<|start|>", "<|turn>", "start_of_role", "header_start")
_NAME_ENDS = ("end_header_id", "<|message|>", "end_of_role", "header_end", "im_middle")
_CLOSES = ("im_end", "eot", "end_of_turn", "<|end|>", "<turn|>", "eom_id", "endoftext", "end_of_text", "</s>", "<eos>")


class Decoder:
    """A tokenizer, of the tokenizer.json at `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self._tokenizer = path, Tokenizer.from_file(str(path))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {number: token.content for number, token in added.items() if token.special}

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. A character of several tokens is at the first one; the others are empty."""
        texts: list[str] = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        start = None
        for place, text in enumerate([*texts, ""]):
            if "\ufffd" in text:
                start = place if start is None else start
            elif start is not None:
                texts[start:place] = [self.text(ids[start:place]), *[""] * (place - start - 1)]
                start = None
        return texts


def find_decoder(run: Path, model: str) -> Decoder | None:
    """Return the tokenizer of the newest version, or of the base model; None if no readable one is on this host.
    Nothing is downloaded."""
    versions = list_steps(run / "weights")[: -_VERSIONS - 1 : -1]
    paths = [step_dir(run / "weights", version) / "tokenizer.json" for version in versions]
    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:  # a directory
        cached = None
    for path in [*paths, Path(model) / "tokenizer.json", *([Path(cached)] if isinstance(cached, str) else [])]:
        if path.is_file() and (decoder := _decoder(path, path.stat().st_mtime_ns)) is not None:
            return decoder
    return None


@lru_cache(maxsize=8)
def _decoder(path: Path, modified: int) -> Decoder | None:  # `modified` is a cache key: reload a replaced file
    try:
        return Decoder(path)
    except Exception:  # noqa: BLE001  the library raises no narrower kind, whatever is wrong with the file
        return None


def messages(
    texts: Sequence[str], ids: Sequence[int], mask: Sequence[bool], special: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Split a sample's tokens into messages, at the special tokens of its chat template or, if it has none, where the
    loss mask begins and ends. A message has tokens `start` to `end` - 1; `sampled`: the policy wrote some of them."""
    split: list[dict[str, Any]] = []
    role, start, naming = "", 0, False

    def text_of(end: int, special_text: str = "") -> str:
        return "".join(special_text if ids[index] in special else texts[index] for index in range(start, end))

    def close(end: int) -> None:
        if (text := text_of(end)).strip():
            sampled = any(mask[start:end])
            name = role or ("assistant" if sampled else "prompt")
            split.append({"role": name, "text": text.strip("\n"), "start": start, "end": end, "sampled": sampled})

    for place, token in enumerate(ids):
        name = special.get(token, "")
        own_role = next((known for known in _ROLES if known in name.lower()), "")
        if any(mark in name for mark in _NAME_ENDS) or (naming and "\n" in texts[place]):
            role, start, naming = text_of(place + 1, " ").strip() or role, place + 1, False
        elif own_role or any(mark in name for mark in (*_OPENS, *_CLOSES)):
            close(place)
            role, start, naming = own_role, place + 1, any(mark in name for mark in _OPENS)
        elif not (role or naming) and place > start and mask[place] != mask[place - 1]:
            close(place)
            start = place
    close(len(ids))
    return split


class StepSamples:
    """The samples of one step. `columns` has the scalars of all of them; streams are read for the rows asked for."""

    def __init__(self, run: Path, step: int) -> None:
        """Raises UserError: the step is not committed yet, or was removed. Raises CommitError: it is damaged."""
        self._run, directory = run, step_dir(run / "rollouts", step)
        if not directory.exists():
            raise UserError(RunDirectory(run).missing_reason(step))
        self._batch = open_batch(directory, check_bytes=False)
        self.columns = self._batch.columns(*_SCALARS)
        groups = self._batch.manifest.extra.get("ledger", {}).get("groups", ())
        self._task_indices = {str(number): index for number, _, index, _ in groups}

    def rows(self, params: Mapping[str, str], decoder: Decoder | None) -> list[int]:
        """Return the rows that match `params`: env, group, low and high (of the reward), cut ("1": only replies that
        were cut off), text (part of the reply). `sort`: "reward" or "length", ascending; descending after "-".
        Raises UserError: `text` without a tokenizer. Raises ValueError: low or high is no number."""
        reward = np.array(self.columns["reward"], dtype=float)
        low, high = (float(params.get(name) or sign * np.inf) for name, sign in (("low", -1), ("high", 1)))
        keep = (reward >= low - ROUNDING) & (reward <= high + ROUNDING)
        for name, column in (("env", "env"), ("group", "group_id")):
            if value := params.get(name):
                keep &= np.array([entry == value for entry in self.columns[column]], dtype=bool)
        if params.get("cut"):
            keep &= np.array(self.columns["is_truncated"], dtype=bool)
        rows, sort = np.flatnonzero(keep), params.get("sort") or ""
        if text := params.get("text", ""):
            if decoder is None:
                raise UserError("no tokenizer.json of this model is on this host: replies cannot be searched")
            samples = self._batch.rows(rows.tolist())
            rows = rows[[text in decoder.text(_sampled(sample, sample.input_ids).tolist()) for sample in samples]]
        if sort:
            values = self._batch.lengths if sort.endswith("length") else reward
            rows = rows[np.argsort(values[rows] * (-1 if sort.startswith("-") else 1), kind="stable")]
        return [int(row) for row in rows]

    def lines(self, rows: Sequence[int], decoder: Decoder | None) -> list[dict[str, Any]]:
        """Return what the list of samples shows of these rows."""
        lines = []
        for row, sample in zip(rows, self._batch.rows(rows), strict=True):
            reply = _sampled(sample, sample.input_ids)
            text = decoder.text(reply[:_PREVIEW].tolist())[:_PREVIEW] if decoder is not None else ""
            lines.append(self._facts(row, sample) | {"sampled": len(reply), "preview": text})
        return lines

    def sample(self, row: int, decoder: Decoder | None) -> dict[str, Any]:
        """Return all of one sample; streams have one entry per token. Raises UserError: there is no such row."""
        if not 0 <= row < len(self._batch):
            raise UserError(f"step {self._batch.step} has {len(self._batch)} samples: there is no row {row}")
        sample = self._batch.rows([row])[0]
        ids, mask = np.asarray(sample.input_ids).tolist(), np.asarray(sample.loss_mask).tolist()
        texts = [f"{token} " for token in ids] if decoder is None else decoder.texts(ids)
        streams = {name: np.asarray(stream) for name in _STREAMS if (stream := getattr(sample, name)) is not None}
        if "ref_logprobs" in streams:
            streams["ref_log_ratio"] = np.where(mask, streams["ref_logprobs"] - streams["logprobs"], 0.0)
        stats = read_token_stats(self._run, self._batch.step, [sample.sample_id])
        trained = np.flatnonzero(mask[1:]) + 1
        for name in STATS:
            values = stats[name][0].values
            if values is not None and len(values) == len(trained):
                streams[name] = np.zeros(len(ids))
                streams[name][trained] = np.nan_to_num(values.to_numpy())
        return self._facts(row, sample) | {
            "step": self._batch.step,
            "temperature": round(float(sample.temperature), 4),
            "ids": ids,
            "texts": texts,
            "mask": [int(entry) for entry in mask],
            "streams": {name: [float(f"{value:.4g}") for value in stream] for name, stream in streams.items()},
            "messages": messages(texts, ids, mask, {} if decoder is None else decoder.special),
            "tokenizer": None if decoder is None else str(decoder.path),
        }

    def _facts(self, row: int, sample: Sample) -> dict[str, Any]:
        advantages = _sampled(sample, sample.advantages)
        facts = {name: self.columns[name][row] for name in _SCALARS}
        facts |= {"row": row, "task_index": self._task_indices.get(facts["group_id"])}
        return facts | {"advantage": round(float(advantages.sum()) / max(len(advantages), 1), 6)}


def _sampled(sample: Sample, stream: Any) -> np.ndarray[Any, Any]:
    """Return a stream's entries at the tokens with `loss_mask` set."""
    return np.asarray(stream)[np.asarray(sample.loss_mask)]
