"""Settings that the processes of a run have in common: given once, filled into every section.

The same setting in several places (at the top, in sections) has the value of the strongest source, as the same key has:
options over files over variables. Equally strong sources that differ are refused. Works on the table before validation:
only there is it visible what was given and what is a default.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from prime_rl.config.base import Problem, check, is_index
from prime_rl.config.loader import ABSENT, SECTIONS_OF_RL, Entry, Table, in_section, spell
from prime_rl.config.shared import CkptConfig, MonitorConfig, host_in_url, same_server

ALL = SECTIONS_OF_RL
PAIR = ("trainer", "orchestrator")

# The same in every process, wherever it is given: at the top, or in a section, whose value then reaches the others.
COMMON: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("output_dir", "seed", "log.level", "model.name", "model.trust_remote_code"), ALL),
    **dict.fromkeys(("max_steps", "async_level", "bench", "clean", "ckpt"), PAIR),
    **dict.fromkeys((f"ckpt.{name}" for name in CkptConfig.model_fields), PAIR),
    "device": ("trainer", "inference"),
    "router_replay": ALL,
}
TRACKERS = tuple(MonitorConfig.model_fields)
DEFAULT_PORT = 8000


def share(table: Table) -> None:
    """Fill shared settings of an RLConfig into every section. Raises Problems."""
    if table.entry("trainer").value is ABSENT:
        table.set("trainer", Entry({}))
    sections = [name for name in ALL if isinstance(table.entry(name).value, dict)]
    pair = [name for name in PAIR if name in sections]
    common = [(key, [name for name in whom if name in sections]) for key, whom in COMMON.items()]
    check(
        *(unify(table, [key, *(f"{name}.{key}" for name in whom)]) for key, whom in common),
        *share_seq_len(table, [f"{name}.seq_len" for name in pair]),
        *(problem for key in TRACKERS for name in pair for problem in share_tracker(table, key, name)),
        agree_on_address(table, "orchestrator.client") if {"inference", "orchestrator"} <= {*sections} else None,
    )
    for key in TRACKERS:
        if table.entry(key).value is not ABSENT:
            table.set(key, Entry(None))
    choose_data(table)


def share_eval_server(table: Table) -> None:
    """Copy the model of an SFTConfig to the server, and the server's address to `eval.client`. Raises Problems."""
    if all(isinstance(table.entry(name).value, dict) for name in ("inference", "eval")):
        check(unify(table, ["model.name", "inference.model.name"]), agree_on_address(table, "eval.client"))


def _precedence(table: Table, *keys: str) -> int:
    return max((table.entry(key).precedence for key in keys), default=-1)


def same(one: Any, other: Any) -> bool:
    """Whether values are equal. A path may be given as Path or as text; sections are on or off."""
    return one == other or str(one) == str(other)


def contradiction(table: Table, one: str, other: str) -> Problem:
    values = ["on" if isinstance(value := table.entry(key).value, dict) else value for key in (one, other)]
    source, top = table.entry(one), in_section(tuple(one.split(".")))
    advice = f", or decide by {spell(top, 'option')}" if source.name and source.kind != "option" else ""
    message = f"{other} is {values[1]} but {one} is {values[0]}: both are the same setting, give it once{advice}"
    return Problem(message, one, other)


def unify(table: Table, keys: list[str]) -> Problem | None:
    """Give all `keys` the value that the strongest source gave one of them; return the Problem if it gave several.

    Of a section it is whether it is on: its settings are unified one by one.
    """
    entries = {key: entry for key in keys if (entry := table.entry(key)).value is not ABSENT}
    strongest = [key for key in entries if entries[key].precedence == _precedence(table, *entries)]
    for key in strongest[1:]:
        if not same(entries[strongest[0]].value, entries[key].value):
            return contradiction(table, strongest[0], key)
    for key in keys if strongest else ():
        if key not in entries or not same(entries[strongest[0]].value, entries[key].value):
            table.set(key, entries[strongest[0]])
    return None


def share_seq_len(table: Table, keys: list[str]) -> Iterator[Problem | None]:
    """Share as a common setting, unless a section's source is stronger than the top's: micro-batches may be longer."""
    if table.entry("seq_len").value not in (ABSENT, None):
        if _precedence(table, *keys) <= _precedence(table, "seq_len"):
            yield from [unify(table, ["seq_len", key]) for key in keys]
            return
        table.set("seq_len", Entry(None))
    if sum(table.entry(key).value is not ABSENT for key in keys) == 1:
        unify(table, keys)


def share_tracker(table: Table, key: str, section: str) -> Iterator[Problem | None]:
    """Copy a tracker of the top, such as `wandb`, into the monitor of a section, which may differ from it by a stronger
    source."""
    for keys in [keys for keys in table.entries if keys[:1] == (key,) and not is_index(keys[-1])]:
        place = (section, "monitor", *keys)
        top, own = table.entry(keys), table.entry(place)
        is_in_tracker = len(keys) > 1
        if is_in_tracker and not isinstance(table.entry(place[:-1]).value, dict):  # which is off
            continue
        if keys[-1] in ("name", "id") and top.value is not None:
            top = top._replace(value=f"{top.value}-{section}")
        # Off is written at the top of a resolved file, too, beside monitors that are on.
        decided = top.value is not None or top.kind == "option" or is_in_tracker
        if isinstance(top.value, dict) and isinstance(own.value, dict):
            continue  # on in both: what is in them is shared one by one
        if own.value is ABSENT or top.precedence > own.precedence:
            table.set(place, top)
            items = table.items(keys) if isinstance(top.value, list) else []
            for index, item in enumerate(items):
                table.set((*place, str(index)), top._replace(value=item))
        elif top.precedence == own.precedence and decided and not same(own.value, top.value):
            yield contradiction(table, ".".join(keys), ".".join(place))


def agree_on_address(table: Table, client: str) -> Problem | None:
    """Let a client and the inference server agree on host and port."""
    key, router = f"{client}.base_url", f"{client}.admin_base_url"
    host_key, port_key = "inference.server.host", "inference.server.port"
    leave_out = "but [inference] starts its own: leave one of the two out"
    if table.entry(router).value not in (ABSENT, None):
        return Problem(f"{router} names servers behind a router, {leave_out}", router)
    urls = table.items(tuple(key.split("."))) or [table.entry(key).value]
    if len(urls) > 1:
        return Problem(f"{key} names {len(urls)} servers, {leave_out} (`rl` has inference_gpus for several)", key)
    host, port = (table.entry(one).value for one in (host_key, port_key))
    name = host_in_url("localhost" if host in (ABSENT, None) else host)
    own = f"http://{name}:{DEFAULT_PORT if port is ABSENT else port}/v1"
    if urls[0] is not ABSENT:
        address = urlsplit(same_server(urls[0]))
        same_host = address.hostname == urlsplit(own).hostname
        gap = _precedence(table, key) - _precedence(table, port_key, *([] if same_host else [host_key]))
        if same_host and (port is ABSENT or gap > 0 or address.port == port):
            table.set(port_key, Entry(address.port))
            return None
        if gap >= 0:
            message = f"{key} is {urls[0]} but inference.server listens on {urlsplit(own).netloc}: give one of them"
            return Problem(message, key, port_key, host_key)
    table.set(key, Entry(own))
    return None


def choose_data(table: Table) -> None:
    """Give the trainer random samples under bench, as many as the orchestrator would send.

    Without bench drop `trainer.data.fake`, which is meant for a trainer that runs alone.
    """
    key = "trainer.data.fake"
    fake, batch_size = table.entry(key), table.entry("orchestrator.batch_size")
    if table.entry("bench").value is True:
        if fake.value in (ABSENT, None):
            table.set(key, Entry({}))
            table.set(f"{key}.batch_size", batch_size) if batch_size.value is not ABSENT else None
    elif fake.value not in (ABSENT, None):
        where = f" ({fake.place})" if fake.name else ""
        table.hints.append(f"{key}{where} is left out: a run without --bench trains on the orchestrator's rollouts")
        table.set(key, Entry(None))
    if table.entry("orchestrator.trainer").value is False:
        table.hints.append("orchestrator.trainer is left out: `rl` starts a trainer")
        table.set("orchestrator.trainer", Entry(True))
