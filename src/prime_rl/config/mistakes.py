"""Every mistake as a readable line: the key, what is wrong with it, where it came from, the nearest setting."""

import difflib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.base import Problem, Problems, Section
from prime_rl.config.layers import SECTIONS_OF_RL, Keys, LayeredTable, Origin, spell
from prime_rl.config.schema import find, has_mark, nearest, types_with
from prime_rl.redact import without_password

_SHAPES = {"model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "list_type": "a list", "path_type": "a path"}  # fmt: skip
# Settings of earlier releases: what to do instead and, of those that changed what a run computes, the one value that
# means what is always done today.
_ANY: Any = object()
REMOVED: dict[str, tuple[str, Any]] = {
    "adamw_lr_ratio": ("AdamW updates its part at lr", 1.0),
    "advertise": ("clients list their servers, in client.base_url", _ANY),
    "batch_normalize": ("the sum is always normalized over the batch", True),
    "checkpointed_layers": ("a level holds for every layer; auto mixes two as memory asks", _ANY),
    "client.discover": ("servers are listed: give their addresses in base_url", None),
    "filters.off_policy": ("max_off_policy_steps bounds the age of every sample", None),
    "from_baseline": ("others are always compared with an episode that is left out", False),
    "log_samples_interval": ("a rollout is logged every 10 steps", _ANY),
    "match_rms": ("updates always have the size of AdamW's", True),
    "no_canary": ("write --no-logprob-check", _ANY),
    "no_stage_weights": ("new weights are staged wherever there is memory for them", _ANY),
    "recycle_episodes": ("where memory runs out the kernel ends workers first, and their episodes run again", _ANY),
    "recycle_mib": ("where memory runs out the kernel ends workers first, and their episodes run again", _ANY),
    "normal_weight": ("give easy_weight and hard_weight relative to 1", 1.0),
    "gibberish.max_tokens": ("one such token leaves an episode out", 0),
    "optim.betas1": ("AdamW beside Muon has 0.9", 0.9),
    "optim.betas2": ("AdamW beside Muon has 0.95", 0.95),
    "optim.nesterov": ("the look-ahead is always on", True),
    "optim.state": ("running means are float32; offload keeps them in host memory", "float32"),
    "per_token": ("each episode counts once", False),
    "prices": ("report.json counts the tokens, by which prices can be multiplied", _ANY),
    "register_dir": ("clients list their servers, in client.base_url", _ANY),
    "restart_backoff": ("the first restart comes after a second, each further one after twice as long", _ANY),
    "stage_weights": ("new weights are staged wherever there is memory for them", _ANY),
    "weights.canary": ("the fixed prompt is always scored; the orchestrator's logprob_check can be off", _ANY),
    "canary": ("it is logprob_check", True),
}
# Kinds of errors whose message says all there is to say about the value.
_SELF_EVIDENT = ("missing", "union_tag_invalid", "literal_error")


def validation_lines(error: ValidationError, cls: type[Section], table: LayeredTable, shared: bool) -> list[str]:
    """Return a line for each mistake that pydantic found; one that was copied into several sections counts once.

    `shared`: whether sections have what they share, so that contradictions and what is missing can be told.
    """
    tree, reported, lines = table.tree, set[Keys](), dict[tuple[Keys, str], str]()
    details_by_keys = [(_keys_of_error(details, tree), details) for details in error.errors(include_url=False)]
    for keys, details in sorted(details_by_keys, key=lambda one: table.rank(one[0]) < 0):
        cause = details.get("ctx", {}).get("error")
        local = keys[1:] if keys[:1] and keys[0] in SECTIONS_OF_RL else keys
        if not shared and (details["type"] == "missing" or isinstance(cause, Problems)):
            continue
        if isinstance(cause, Problems):
            for problem in cause.problems:
                lines.setdefault((local, problem.message), problem_line(problem, keys, table))
        elif any(keys[:length] in reported for length in range(len(keys) + 1)):
            continue  # one line, whatever number of types was tried
        elif details["type"] == "extra_forbidden":
            if not _left_out(table, keys):
                lines[keys, ""] = _unknown(cls, table, keys)
        else:
            lines.setdefault((local, _message(details)), _line(details, cls, keys, table))
        reported.add(keys)
    return list(lines.values())


def problem_line(problem: Problem, prefix: Keys, table: LayeredTable) -> str:
    """Return the message of a contradiction, with where each of its keys came from."""
    full = {key: (*prefix, *key.split(".")) for key in problem.keys}
    sources = {key: origin.text for key in problem.keys if (origin := table.exact(full[key])) is not None}
    own = not sources or any(table.rank(full[key]) >= 0 for key in sources)
    within = f"{'.'.join(prefix)}: " if prefix and own else ""
    named = ", ".join(f"{key}: {text}" for key, text in sources.items())
    return f"{within}{problem.message}{f' ({named})' if named else ''}"


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


def _left_out(table: LayeredTable, keys: Keys) -> bool:
    """Take out, with a hint, a setting that an earlier release wrote into the configs/ of a run, which is to be resumed."""
    origin, (instead, as_today) = table.origin(keys), _removed(keys)
    if not instead or origin is None or as_today not in (_ANY, table.get(keys)):
        return False
    folder = Path(origin.text).parent
    if origin.kind != "file" or folder.name != "configs" or not (folder.parent / "status").is_dir():
        return False
    table.remove(keys)
    table.hints.append(f"{'.'.join(keys)} of an earlier release is left out: {instead}{_where(origin)}")
    return True


def _removed(keys: Keys) -> tuple[str, Any]:
    """Return what `REMOVED` says of a setting of earlier releases; "" of any other."""
    return next((said for name, said in REMOVED.items() if f".{'.'.join(keys)}".endswith(f".{name}")), ("", _ANY))


def _unknown(cls: type[Section], table: LayeredTable, keys: Keys) -> str:
    """Return a line about `keys`, the last of which names nothing in its section."""
    instead, _ = _removed(keys)
    types = [f"'{tag}'" for tag in types_with(cls, keys)]
    value = table.get(keys)
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        keys = (*keys, key)
    origin = table.origin(keys)
    kind = origin.kind if origin is not None else "file"
    unknown = f"unknown key {'.'.join(keys)}{_where(origin)}"
    if origin is not None and kind != "file":
        unknown = f"{origin.text} names no setting"
    if keys[0] in SECTIONS_OF_RL and find(cls, keys[:1]) is None:
        its = spell(keys[1:], kind)
        return f"{unknown}: only `rl` has a section `{keys[0]}`; give {its} to the command `{keys[0]}`"
    if types:
        return f"{unknown} of this type; it belongs to type {', '.join(types)}"
    if instead:
        return f"{unknown} any more: {instead}"
    near = nearest(cls, keys)
    return unknown if near is None else f"{unknown}; did you mean {spell(near, kind)}?"


def _line(details: Any, cls: type[Section], keys: Keys, table: LayeredTable) -> str:
    origin, setting = table.origin(keys), find(cls, keys) if keys else None
    secret = setting is not None and has_mark(setting.field, "secret")
    shown = "" if origin is None or secret or details["type"] in _SELF_EVIDENT else got(details["input"])
    return f"{'.'.join(keys)}: {_message(details)}{shown}{_where(origin)}"


def got(value: Any) -> str:
    """Return what was given, but not where a table or a list was meant, which may hold a secret."""
    if str(value).lstrip().startswith(("{", "[") if isinstance(value, str) else "[{"):
        return ", and what was given is malformed"
    return f", got {_short(value)}"


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
    text = repr(_without_passwords(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _without_passwords(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_passwords(item) for item in value]
    return without_password(value) if isinstance(value, str) else value


def _where(origin: Origin | None) -> str:
    return f" ({origin.text})" if origin is not None else ""
