"""Values written as text, on the command line or in an environment variable."""

import ast
import json
import warnings
from typing import Any

from prime_rl.config.schema import Found, Setting

WORDS = {"true": True, "false": False, "1": True, "0": False}


def value(text: str, found: Found) -> Any:
    """`text` as the type of the setting has it. What does not fit stays text, which validation then refuses."""
    setting = found.setting
    if text == "None":
        return None
    if found.rest or setting.is_dict:
        return literal(text)
    if setting.item is not None:
        return items([text], setting)
    if setting.sections:
        return table(text, setting)
    if setting.is_bool:
        return WORDS.get(text.lower(), text)
    if setting.is_number:
        return number(text)
    return text


def items(texts: list[str], setting: Setting) -> Any:
    """A list: separate texts, commas, or one JSON list."""
    if texts == ["None"]:
        return None
    if len(texts) == 1 and texts[0].lstrip().startswith("["):
        return literal(texts[0])
    if setting.item_section is not None:
        return [literal(text) for text in texts]
    parts = [part.strip() for text in texts for part in text.split(",")]
    return [part for part in parts if part]


def table(text: str, setting: Setting) -> Any:
    """A section: a table as JSON or Python literal, or whether an optional one is on."""
    if setting.nullable and text.lower() in WORDS:
        return {} if WORDS[text.lower()] else None
    return literal(text)


def number(text: str) -> int | float | str:
    """An int where it is one, else a float; text that is no number is left alone."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def literal(text: str) -> Any:
    """JSON, else a Python literal, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that a string may have
            parsed = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return _as_toml(parsed) if _fits_toml(parsed) else text


def _fits_toml(parsed: Any) -> bool:
    if isinstance(parsed, dict):
        return all(_fits_toml(item) for item in parsed.values())
    if isinstance(parsed, list | tuple):
        return all(_fits_toml(item) for item in parsed)
    return parsed is None or isinstance(parsed, bool | int | float | str)


def _as_toml(parsed: Any) -> Any:
    """As TOML would give it back: tuples are lists, keys are text."""
    if isinstance(parsed, dict):
        return {str(key): _as_toml(item) for key, item in parsed.items()}
    return [_as_toml(item) for item in parsed] if isinstance(parsed, list | tuple) else parsed
