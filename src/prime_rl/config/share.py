"""Settings that the processes of a run have in common: given once, filled into every section.

The same setting in several places (at the top, in sections) has the value of the strongest source, as the same key has:
options over files over variables. Equally strong sources that differ are refused. Works on the table before validation:
only there is it visible what was given and what is a default.
"""

from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

from prime_rl.config.base import Problem, Section, check
from prime_rl.config.loader import SECTIONS_OF_RL, Origins, spell
from prime_rl.config.shared import CkptConfig, WandbConfig

Tree = dict[str, Any]
ALL = SECTIONS_OF_RL
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


def share(tree: Tree, origins: Origins | None = None, hints: list[str] | None = None) -> Tree:
    """`tree` (what the user gave of an RLConfig) with shared settings in every section. Raises Problems.

    Without `origins` all sources are equally strong.
    """
    return _Sharing(tree, origins, hints).run()


def share_eval_server(tree: Tree, origins: Origins | None = None, hints: list[str] | None = None) -> Tree:
    """`tree` (of an SFTConfig) with the model copied to the server, and the server's address to `eval.client`."""
    return _Sharing(tree, origins, hints).evaluations()


def without_copies(table: Tree) -> Tree:
    """The complete table of a run without the values that are filled into its sections."""
    table = deepcopy(table)
    present = [name for name in ALL if isinstance(table.get(name), dict)]
    copies = [(key, f"{section}.{key}") for key, sections in COMMON.items() for section in sections]
    copies += [(key, f"{section}.{key}") for key in ("ckpt", "seq_len") for section in PAIR]
    for top, place in copies:
        given, value = _get(table, top)
        found, copy = _get(table, place)
        if given and found and _same(value, copy):
            _remove(table, place)
    shared = table.get("wandb")
    if isinstance(shared, dict):
        for section in PAIR:
            filled = {key: _named(key, value, section) for key, value in shared.items()}
            if _get(table, f"{section}.monitor.wandb")[1] == filled:
                _remove(table, f"{section}.monitor.wandb")
    if "inference" in present:
        _remove(table, "orchestrator.client.base_url")
    return table


def without_address(table: Tree) -> Tree:
    """The complete table of an SFTConfig without the address that follows from the server's."""
    table = deepcopy(table)
    if isinstance(table.get("inference"), dict):
        _remove(table, "eval.client.base_url")
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


def _named(key: str, value: Any, section: str) -> Any:
    """The value of `wandb.key` in the monitor of `section`: name and id have the name of the process behind them."""
    return f"{value}-{section}" if key in ("name", "id") and value not in (None, "None") else value


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)  # A path may be given as Path or as text.


class _Sharing:
    """The table of a run, in which shared settings are filled into the sections."""

    def __init__(self, tree: Tree, origins: Origins | None, hints: list[str] | None) -> None:
        self._tree = {key: _as_table(value) for key, value in tree.items()}
        self._origins = Origins() if origins is None else origins
        self._hints: list[str] = [] if hints is None else hints

    def run(self) -> Tree:
        self._tree.setdefault("trainer", {})
        present = tuple(name for name in ALL if isinstance(self._tree.get(name), dict))
        pair = [section for section in PAIR if section in present]
        problems = [
            self._unify([key, *(f"{section}.{key}" for section in sections if section in present)])
            for key, sections in COMMON.items()
        ]
        problems += self._ckpt(["ckpt", *(f"{section}.ckpt" for section in pair)])
        problems += self._seq_len([f"{section}.seq_len" for section in pair])
        problems += self._wandb(pair)
        problems += [
            Problem(f"{section}.clean is for a {section} started by hand: give `rl` --clean", f"{section}.clean")
            for section in pair
            if self._get(f"{section}.clean")[1]
        ]
        if "inference" in present and "orchestrator" in present:
            problems.append(self._address("orchestrator.client"))
        check(*problems)
        self._fake_data()
        return self._tree

    def evaluations(self) -> Tree:
        if isinstance(self._tree.get("inference"), dict) and isinstance(self._tree.get("eval"), dict):
            check(self._unify(["model.name", "inference.model.name"]), self._address("eval.client"))
        return self._tree

    def _get(self, key: str) -> tuple[bool, Any]:
        return _get(self._tree, key)

    def _strength(self, key: str) -> int:
        return self._origins.rank(tuple(key.split(".")))

    def _is_option(self, key: str) -> bool:
        origin = self._origins.exact(tuple(key.split(".")))
        return origin is not None and origin.kind == "option"

    def _set(self, key: str, value: Any) -> None:
        """Set a value that was missing or came from a weaker source, and forget that origin."""
        self._origins.forget(tuple(key.split(".")))
        *tables, last = key.split(".")
        here = self._tree
        for part in tables:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                return  # A wrong type, which validation reports.
        here[last] = value

    def _contradiction(self, one: str, value: Any, other: str, different: Any) -> Problem:
        origin = self._origins.exact(tuple(one.split(".")))
        section, _, within = one.partition(".")
        top = within if section in ALL else one
        advice = (
            ""
            if origin is None or origin.kind == "option"
            else f", or decide by {spell(tuple(top.split('.')), 'option')}"
        )
        return Problem(
            f"{other} is {different} but {one} is {value}: both are the same setting, give it once{advice}", one, other
        )

    def _unify(self, places: list[str]) -> Problem | None:
        """Give all `places` the value that the strongest source gave one of them; the Problem if it gave several."""
        given = [place for place in places if self._get(place)[0]]
        if not given:
            return None
        strongest = max(self._strength(place) for place in given)
        first, *others = [place for place in given if self._strength(place) == strongest]
        value = self._get(first)[1]
        for place in others:
            if not _same(value, other := self._get(place)[1]):
                return self._contradiction(first, value, place, other)
        for place in places:
            if place not in (first, *others):
                self._set(place, value)
        return None

    def _ckpt(self, places: list[str]) -> list[Problem | None]:
        given = [place for place in places if self._get(place)[0]]
        if not given:
            return []
        on = [place for place in given if self._get(place)[1] is not None]
        off = [place for place in given if place not in on]
        gap = max(map(self._strength, on), default=-2) - max(map(self._strength, off), default=-2)  # -2: there is none
        if gap == 0:
            return [Problem(f"{on[0]} is on but {off[0]} is off: processes checkpoint together", on[0], off[0])]
        for place in places:
            if place not in (on if gap > 0 else off):
                self._set(place, {} if gap > 0 else None)
        if gap < 0:
            return []
        return [self._unify([f"{place}.{name}" for place in places]) for name in CkptConfig.model_fields]

    def _seq_len(self, places: list[str]) -> list[Problem | None]:
        """Share `seq_len` as a common setting, unless a section's source is stronger than the top's: micro-batches may be longer."""
        if self._get("seq_len")[1] is not None:
            if all(self._strength(place) <= self._strength("seq_len") for place in places):
                return [self._unify(["seq_len", place]) for place in places]
            self._set("seq_len", None)
        if sum(self._get(place)[0] for place in places) == 1:
            self._unify(places)
        return []

    def _wandb(self, sections: list[str]) -> list[Problem | None]:
        """Fill `wandb` into the monitors of `sections`. Where a stronger source makes one differ, the shared table is dropped."""
        given, shared = self._get("wandb")
        problems: list[Problem | None] = []
        differs = False
        for section, place in [(section, f"{section}.monitor.wandb") for section in sections]:
            found, own = self._get(place)
            gap = self._strength("wandb") - self._strength(place)
            if given and shared is None and own is not None and gap == 0 and self._is_option("wandb"):
                problems.append(Problem(f"wandb is off but {place} is on", "wandb", place))
            elif given and shared is None and own is not None and gap > 0:
                self._set(place, None)
            if not isinstance(shared, dict):
                continue
            if found and own is None and gap <= 0:
                differs = True
                problems.append(Problem(f"wandb is on but {place} is off", "wandb", place) if gap == 0 else None)
                continue
            if own is None:
                self._set(place, {})
            for top, key, value in [
                (f"wandb.{name}", f"{place}.{name}", shared.get(name)) for name in WandbConfig.model_fields
            ]:
                found, own = self._get(key)
                named = _named(top.removeprefix("wandb."), value, section)
                gap = self._strength(top) - self._strength(key)
                if value is None or (found and _same(own, named)):
                    continue
                if not found or gap > 0:
                    self._set(key, named)
                elif gap == 0:
                    problems.append(self._contradiction(top, value, key, own))
                else:
                    differs = True
        if differs:
            self._tree["wandb"] = None
        return problems

    def _address(self, client: str) -> Problem | None:
        """Let a client and the inference server agree on host and port."""
        key, router, discover = f"{client}.base_url", f"{client}.admin_base_url", f"{client}.discover"
        host_key, port_key = "inference.server.host", "inference.server.port"
        leave_out = "but [inference] starts its own: leave one of the two out"
        if self._get(router)[1] is not None:
            return Problem(f"{router} names servers behind a router, {leave_out}", router)
        if self._get(discover)[1] is not None:
            # The server that is started registers beside the others. A base_url beside it is refused by the client's section.
            return self._unify([discover, "inference.server.register_dir"])
        host, (port_given, port), url = self._get(host_key)[1], self._get(port_key), self._get(key)[1]
        if isinstance(url, list) and len(url) > 1:
            return Problem(f"{key} names {len(url)} servers, {leave_out} (`rl` has inference_servers for several)", key)
        url = url[0] if isinstance(url, list) and url else url
        if url:
            address = urlsplit(url)
            url_port = address.port or {"http": 80, "https": 443}.get(address.scheme)
            same_host = address.hostname == host or {address.hostname, host} <= LOCAL_HOSTS
            of_server = [port_key] if same_host else [port_key, host_key]
            gap = self._strength(key) - max(map(self._strength, of_server))
            if same_host and (not port_given or gap > 0 or str(url_port) == str(port)):
                self._set(port_key, url_port)
                return None
            if gap >= 0:
                listens = f"{host or 'localhost'}:{port if port_given else DEFAULT_PORT}"
                message = f"{key} is {url} but inference.server listens on {listens}: give one of them"
                return Problem(message, key, port_key, host_key)
        name = "localhost" if host in LOCAL_HOSTS else f"[{host}]" if ":" in str(host) else host
        self._set(key, f"http://{name}:{port if port_given else DEFAULT_PORT}/v1")
        return None

    def _fake_data(self) -> None:
        """Give the trainer random samples under bench, as many as the orchestrator would send. Without bench drop
        `trainer.data.fake`, which is meant for a trainer that runs alone."""
        key = "trainer.data.fake"
        given, fake = self._get(key)
        if self._tree.get("bench") is True and not given:
            found, batch_size = self._get("orchestrator.batch_size")
            self._set(key, {"batch_size": batch_size} if found else {})
        elif self._tree.get("bench") is not True and fake is not None:
            origin = self._origins.of(tuple(key.split(".")))
            where = f" ({origin.text})" if origin is not None else ""
            self._hints.append(f"{key}{where} is left out: a run without --bench trains on the orchestrator's rollouts")
            self._set(key, None)
        if self._get("orchestrator.trainer")[1] is False:
            self._hints.append("orchestrator.trainer is left out: `rl` starts a trainer")
        _remove(self._tree, "orchestrator.trainer")  # meant for an orchestrator that runs alone
