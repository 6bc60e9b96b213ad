"""Settings that the processes of a run have in common: given once, filled into every section, contradictions refused.

Works on the table as it was given, before validation: only there is it visible what was given and what is a default.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

from prime_rl.config.base import Problem, Section, check
from prime_rl.config.shared import CkptConfig, WandbConfig

Tree = dict[str, Any]
ALL = ("trainer", "orchestrator", "inference")
PAIR = ("trainer", "orchestrator")

# The same in every process, wherever it is given: at the top, or in a section, whose value then reaches the others.
COMMON: dict[str, tuple[str, ...]] = {
    "output_dir": ALL,
    "seed": ALL,
    "log.level": ALL,
    "device": ("trainer", "inference"),
    "model.name": ALL,
    "model.trust_remote_code": ALL,
    "max_steps": PAIR,
    "async_level": PAIR,
    "bench": PAIR,
}
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", None})
DEFAULT_PORT = 8000


def share(given: Tree) -> Tree:
    """`given` (what the user gave of an RLConfig) with shared settings in every section. Raises Problems."""
    tree = {key: _as_table(value) for key, value in given.items()}
    tree.setdefault("trainer", {})
    present = tuple(name for name in ALL if isinstance(tree.get(name), dict))
    problems = []
    for key, sections in COMMON.items():
        places = [key, *(f"{section}.{key}" for section in sections if section in present)]
        problems.append(_unify(tree, places))
    pair = [section for section in PAIR if section in present]
    problems += _share_ckpt(tree, ["ckpt", *(f"{section}.ckpt" for section in pair)])
    problems += _share_seq_len(tree, pair)
    for section in pair:
        problems += _share_wandb(tree, section)
    if "inference" in present and "orchestrator" in present:
        problems.append(_share_address(tree))
    check(*problems)
    _fill_bench_data(tree)
    return tree


def without_copies(table: Tree) -> Tree:
    """The complete table of a run without the values that `share` fills into its sections from the top."""
    table = deepcopy(table)
    present = [name for name in ALL if isinstance(table.get(name), dict)]
    copies = [(key, f"{section}.{key}") for key, sections in COMMON.items() for section in sections]
    copies += [(key, f"{section}.{key}") for key in ("ckpt", "seq_len") for section in PAIR]
    for top, place in copies:
        given, value = _get(table, top)
        found, copy = _get(table, place)
        if given and found and _same(value, copy):
            _remove(table, place)
    if isinstance(table.get("wandb"), dict):
        for section in PAIR:
            _remove(table, f"{section}.monitor.wandb")
    if "inference" in present:
        _remove(table, "orchestrator.client.base_url")
    return table


def _remove(tree: Tree, key: str) -> None:
    *tables, last = key.split(".")
    here: Any = tree
    for part in tables:
        here = here.get(part, {}) if isinstance(here, dict) else {}
    if isinstance(here, dict):
        here.pop(last, None)


def _as_table(value: Any) -> Any:
    """A section made in Python counts with what was set in it, not with its defaults."""
    return value.model_dump(exclude_unset=True) if isinstance(value, Section) else deepcopy(value)


def _get(tree: Tree, key: str) -> tuple[bool, Any]:
    """Whether a dotted key was given, and its value."""
    here: Any = tree
    for part in key.split("."):
        if not isinstance(here, dict) or part not in here:
            return False, None
        here = here[part]
    return True, here


def _set(tree: Tree, key: str, value: Any) -> None:
    *tables, last = key.split(".")
    here = tree
    for part in tables:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            return  # A wrong type, which validation reports.
    here[last] = value


def _contradiction(one: str, value: Any, other: str, different: Any) -> Problem:
    return Problem(f"{other} is {different} but {one} is {value}: both are the same setting, give it once", one, other)


def _unify(tree: Tree, places: list[str]) -> Problem | None:
    """Give all `places` the one value that some of them have; the Problem if they have several."""
    given = [(place, value) for place in places for found, value in [_get(tree, place)] if found]
    if not given:
        return None
    first, value = given[0]
    for place, other in given[1:]:
        if not _same(value, other):
            return _contradiction(first, value, place, other)
    for place in places:
        _set(tree, place, value)
    return None


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)  # A path may be given as Path or as text.


def _share_ckpt(tree: Tree, places: list[str]) -> list[Problem | None]:
    given = [(place, value) for place in places for found, value in [_get(tree, place)] if found]
    if not given:
        return []
    off = [place for place, value in given if value is None]
    on = [place for place, value in given if value is not None]
    if off and on:
        return [Problem(f"{on[0]} is on but {off[0]} is off: processes checkpoint together", on[0], off[0])]
    for place in places:
        if off:
            _set(tree, place, None)
        elif not _get(tree, place)[0]:
            _set(tree, place, {})
    return [] if off else [_unify(tree, [f"{place}.{name}" for place in places]) for name in CkptConfig.model_fields]


def _share_seq_len(tree: Tree, sections: list[str]) -> list[Problem | None]:
    """As the common settings, except that sections may differ if the top says nothing: micro-batches may be longer."""
    places = [f"{section}.seq_len" for section in sections]
    top = tree.get("seq_len")
    values = [value for place in places for found, value in [_get(tree, place)] if found]
    if top is not None:
        return [_unify(tree, ["seq_len", place]) for place in places]
    if len(values) == 1:
        _unify(tree, places)
    return []


def _share_wandb(tree: Tree, section: str) -> list[Problem | None]:
    """Fill `wandb` into the monitor of `section`, name and id with the name of the process behind them."""
    shared, place = tree.get("wandb"), f"{section}.monitor.wandb"
    if not isinstance(shared, dict):
        return []
    found, own = _get(tree, place)
    if found and own is None:
        return [Problem(f"wandb is on but {place} is off", "wandb", place)]
    if not found:
        _set(tree, place, {})
    rename: dict[str, Callable[[Any], Any]] = dict.fromkeys(("name", "id"), lambda text: f"{text}-{section}")
    problems = []
    for name in WandbConfig.model_fields:
        value = shared.get(name)
        if value is None:
            continue
        value = rename.get(name, lambda same: same)(value)
        found, own = _get(tree, f"{place}.{name}")
        if not found:
            _set(tree, f"{place}.{name}", value)
        elif not _same(own, value):
            problems.append(_contradiction(f"wandb.{name}", shared[name], f"{place}.{name}", own))
    return list(problems)


def _share_address(tree: Tree) -> Problem | None:
    """Let the orchestrator's client and the inference server agree on host and port."""
    found, url = _get(tree, "orchestrator.client.base_url")
    if _get(tree, "orchestrator.client.admin_base_url")[1] not in (None, "None"):
        key = "orchestrator.client.admin_base_url"
        return Problem(
            f"{key} names servers behind a router, but [inference] starts its own: leave one of the two out", key
        )
    discover = _get(tree, "orchestrator.client.discover")[1]
    if discover not in (None, "None"):
        # The server that is started registers beside the others. A base_url beside it is refused by the client's section.
        return _unify(tree, ["orchestrator.client.discover", "inference.server.register_dir"])
    host, (port_given, port) = _get(tree, "inference.server.host")[1], _get(tree, "inference.server.port")
    if not found or url is None:
        if found or port_given or host is not None:
            name = "localhost" if host in LOCAL_HOSTS else f"[{host}]" if ":" in str(host) else host
            _set(tree, "orchestrator.client.base_url", f"http://{name}:{port if port_given else DEFAULT_PORT}/v1")
        return None
    if isinstance(url, list) and len(url) > 1:
        return Problem(
            f"orchestrator.client.base_url names {len(url)} servers, but [inference] starts its own: leave one of the two out (inference_servers starts several)",
            "orchestrator.client.base_url",
        )
    url = url[0] if isinstance(url, list) and url else url
    try:
        address = urlsplit(str(url))
        url_port = address.port or {"http": 80, "https": 443}.get(address.scheme)
    except ValueError:
        return None  # Not an address: validation reports it.
    same_host = address.hostname == host or {address.hostname, host} <= LOCAL_HOSTS
    if same_host and not port_given:
        _set(tree, "inference.server.port", url_port)
    elif not same_host or str(url_port) != str(port):
        server = f"{host or 'localhost'}:{port if port_given else DEFAULT_PORT}"
        return Problem(
            f"orchestrator.client.base_url is {url} but inference.server listens on {server}: give one of them",
            "orchestrator.client.base_url",
            "inference.server.port",
            "inference.server.host",
        )
    return None


def _fill_bench_data(tree: Tree) -> None:
    """Under bench the trainer is measured by itself: on random samples, as many as the orchestrator would send."""
    if tree.get("bench") is not True or _get(tree, "trainer.data.fake")[0]:
        return
    found, batch_size = _get(tree, "orchestrator.batch_size")
    _set(tree, "trainer.data.fake", {"batch_size": batch_size} if found else {})
