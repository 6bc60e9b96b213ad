"""Every mistake as a readable line: the key, what is wrong with it, where it came from, the nearest setting."""

import difflib
from typing import Any

from pydantic import ValidationError

from prime_rl.config.assignments import SECTIONS_OF_RL, Assignments, Keys, Origin, spell
from prime_rl.config.base import Problem, Problems, Section
from prime_rl.config.schema import every_setting, find, has_mark, section_for, settings, type_tag
from prime_rl.redact import without_password

MOST_LINES = 50  # mistakes shown at a time
_SHAPES = {"model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "list_type": "a list", "path_type": "a path"}  # fmt: skip
# Settings of earlier releases, and what to do instead.
REMOVED = {
    "adamw_lr_ratio": "AdamW updates its part at lr",
    "advertise": "clients list their servers, in client.base_url",
    "batch_normalize": "the sum is always normalized over the batch",
    "checkpointed_layers": "a level holds for every layer; auto mixes two as memory asks",
    "client.discover": "servers are listed: give their addresses in base_url",
    "filters.off_policy": "max_off_policy_steps bounds the age of every sample",
    "from_baseline": "others are always compared with an episode that is left out",
    "log_samples_interval": "a rollout is logged every 10 steps",
    "match_rms": "updates always have the size of AdamW's",
    "no_canary": "write --no-logprob-check",
    "normal_weight": "give easy_weight and hard_weight relative to 1",
    "optim.nesterov": "the look-ahead is always on",
    "optim.state": "running means are float32; offload keeps them in host memory",
    "per_token": "each episode counts once",
    "prices": "report.json counts the tokens, by which prices can be multiplied",
    "register_dir": "clients list their servers, in client.base_url",
    "restart_backoff": "the first restart comes after a second, each further one after twice as long",
    "weights.canary": "every version's fixed prompt is scored; logprob_check = false of the orchestrator asks no server",
}
# Kinds of errors whose message says all there is to say about the value.
_SELF_EVIDENT = ("missing", "union_tag_invalid", "literal_error")


def validation_lines(
    error: ValidationError,
    cls: type[Section],
    table: Assignments,
    contradictions: bool = True,
    incomplete: bool = False,
) -> list[str]:
    """Return a line for each mistake that pydantic found; for one that was copied into several sections one, where it was given.

    `contradictions`: whether settings that contradict each other count. `incomplete`: part of the input could not be
    read, so missing settings are not reported.
    """
    lines: dict[Keys, list[tuple[str, str]]] = {}
    for details in error.errors(include_url=False):
        keys, cause = _keys_of_error(details, table.get(())), details.get("ctx", {}).get("error")
        known = any(keys[: len(other)] == other for other in lines)  # one line, whatever number of types was tried
        if isinstance(cause, Problem | Problems):
            if contradictions:
                problems = cause.problems if isinstance(cause, Problems) else [cause]
                lines[keys] = [(str(problem), problem_line(problem, keys, table)) for problem in problems]
        elif details["type"] == "extra_forbidden" and not known:
            lines[keys] = [("", _unknown(cls, table, keys, search=len(lines) < MOST_LINES))]
        elif not known and not (incomplete and details["type"] == "missing"):
            lines[keys] = [(_message(details), _line(details, cls, keys, table))]
    own = {keys for keys in lines if table.is_given(keys) and keys not in [(name,) for name in SECTIONS_OF_RL]}
    faults = {fault for keys in own for fault, _ in lines[keys]}
    shown = []
    for keys in lines:
        for fault, line in lines[keys]:
            if keys in own or fault not in faults:
                shown.append(line)
            faults.add(fault)
    return shown


def problem_line(problem: Problem, prefix: Keys, table: Assignments) -> str:
    """Return the message of a contradiction, with where each of its keys came from."""
    full = {key: (*prefix, *key.split(".")) for key in problem.keys}
    sources = {key: origin.text for key in problem.keys if (origin := table.exact(full[key])) is not None}
    own = not sources or any(table.is_given(full[key]) for key in sources)
    within = f"{'.'.join(prefix)}: " if prefix and own else ""
    named = ", ".join(f"{key}: {text}" for key, text in sources.items())
    return f"{within}{problem}{f' ({named})' if named else ''}"


def _keys_of_error(details: Any, tree: Any) -> Keys:
    """Return a location of pydantic as keys: without the names of types that pydantic puts into it."""
    here, keys = tree, []
    for part in details["loc"]:
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = here[part]
            keys.append(str(part))
    if details["type"] == "missing":
        keys.append(str(details["loc"][-1]))
    return (*keys, "type") if details["type"] == "union_tag_invalid" else tuple(keys)


def _unknown(cls: type[Section], table: Assignments, keys: Keys, search: bool) -> str:
    """Return a line about `keys`, the last of which names nothing in its section."""
    section: type[Section] = cls
    rivals: tuple[type[Section], ...] = ()
    for length, key in enumerate(keys[:-1], start=1):
        setting = settings(section).get(key)  # None: the number of an item of a list
        if setting is not None:
            section = section_for(setting, table.get(keys[:length])) or section
            rivals = setting.within if len(setting.within) > 1 else ()
    owners = [type_tag(rival) for rival in rivals if keys[-1] in settings(rival)]
    removed = next((hint for name, hint in REMOVED.items() if f".{'.'.join(keys)}".endswith(f".{name}")), None)
    position, value = len(keys) - 1, table.get(keys)
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        keys = (*keys, key)
    origin = table.origin(keys)
    kind = origin.kind if origin is not None else "file"
    within = f" of type '{type_tag(section)}'" if rivals else ""
    if origin is not None and kind != "file":
        unknown = f"{origin.text} names no setting{within}"
    else:
        unknown = f"unknown key {'.'.join(keys)}{within}{_where(origin)}"
    if removed is not None:
        return f"{unknown} any more: {removed}"
    if keys[0] in SECTIONS_OF_RL and keys[0] not in settings(cls):
        its = spell(keys[1:], kind)
        return f"{unknown}: only `rl` has a section `{keys[0]}`; give {its} to the command `{keys[0]}`"
    if owners:
        *but_last, last = [f"'{owner}'" for owner in owners]
        return f"{unknown}; it belongs to type {', '.join(but_last)}{' or ' if but_last else ''}{last}"
    near = nearest(cls, keys, section, position) if search else None
    return unknown if near is None else f"{unknown}; did you mean {spell(near, kind)}?"


def nearest(root: type[Section], keys: Keys, section: type[Section], position: int) -> Keys | None:
    """The setting that `keys` probably meant; `keys[position]` is the one that `section` does not have.

    In this order: the same name with other dots (--model-name), a neighbour of similar name, the same name elsewhere, a
    similar name with other dots. None where none is likely.
    """
    paths = [path for path, _ in every_setting(root) if "N" not in path]
    unknown = "_".join(keys[position:])
    names = {"_".join(path[position:]): path for path in paths if path[:position] == keys[:position]}
    if unknown in names:
        return names[unknown]
    initials = {name: "".join(part[0] for part in name.split("_")) for name in settings(section)}
    word = keys[position]
    abbreviated = [name for name, letters in initials.items() if len(word) > 1 and letters.startswith(word)]
    for name in [*difflib.get_close_matches(word, initials), *sorted(abbreviated, key=len)]:
        mended = (*keys[:position], name, *keys[position + 1 :])
        if find(root, mended) is not None:
            return mended
    if same := [path for path in paths if path[-1] == keys[-1] and set(keys[position:]) <= set(path)]:
        return min(same, key=lambda path: (-len(set(path) & set(keys)), len(path)))
    close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.8)
    return names[close[0]] if close else None


def _line(details: Any, cls: type[Section], keys: Keys, table: Assignments) -> str:
    origin, setting = table.origin(keys), find(cls, keys) if keys else None
    secret = setting is not None and has_mark(setting.field, "secret")
    got = "" if origin is None or secret or details["type"] in _SELF_EVIDENT else f", got {_short(details['input'])}"
    return f"{'.'.join(keys)}: {_message(details)}{got}{_where(origin)}"


def _message(details: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return "required, but not given"
    if kind == "union_tag_not_found":
        return "needs a `type`"
    if kind in ("union_tag_invalid", "literal_error"):
        expected = context.get("expected_tags") or context["expected"]
        wrong = str(context.get("tag", details["input"]))
        words = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(wrong, words, n=1, cutoff=0.7)
        return f"must be {expected}, got {_short(wrong)}" + (f"; did you mean '{near[0]}'?" if near else "")
    if kind in _SHAPES:
        return f"must be {_SHAPES[kind]}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message.split(", unable to parse")[0]


def _short(value: Any) -> str:
    text = without_password(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _where(origin: Origin | None) -> str:
    return f" ({origin.text})" if origin is not None else ""
