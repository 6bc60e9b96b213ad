"""Settings that the processes of a run have in common: given once, filled into every section.

The same setting in several places (at the top, in sections) has the value of the strongest source, as the same key has:
options over files over variables. Equally strong sources that differ are refused. Works on the table before validation:
only there is it visible what was given and what is a default.
"""

from typing import Any
from urllib.parse import urlsplit

from prime_rl.config.base import Problem, check
from prime_rl.config.layers import ABSENT, SECTIONS_OF_RL, LayeredTable, spell
from prime_rl.config.shared import CkptConfig

ALL = SECTIONS_OF_RL
PAIR = ("trainer", "orchestrator")

# The same in every process, wherever it is given: at the top, or in a section, whose value then reaches the others.
COMMON: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("output_dir", "seed", "log.level", "model.name", "model.trust_remote_code"), ALL),
    **dict.fromkeys(("max_steps", "async_level", "bench", "clean", "ckpt"), PAIR),
    **dict.fromkeys((f"ckpt.{name}" for name in CkptConfig.model_fields), PAIR),
    "device": ("trainer", "inference"),
}
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", None})
DEFAULT_PORT = 8000


def share(table: LayeredTable) -> None:
    """Fill shared settings of an RLConfig into every section. Raises Problems.

    Where nothing has an origin, all sources are equally strong.
    """
    run = _Sharing(table)
    if run.get("trainer") is ABSENT:
        run.set("trainer", {})
    present = [name for name in ALL if isinstance(run.get(name), dict)]
    pair = [section for section in PAIR if section in present]
    check(
        *(
            run.unify([key, *(f"{section}.{key}" for section in sections if section in present)])
            for key, sections in COMMON.items()
        ),
        *run.seq_len([f"{section}.seq_len" for section in pair]),
        *run.wandb(pair),
        run.address("orchestrator.client") if {"inference", "orchestrator"} <= set(present) else None,
    )
    run.fake_data()


def share_eval_server(table: LayeredTable) -> None:
    """Copy the model of an SFTConfig to the server, and the server's address to `eval.client`. Raises Problems."""
    run = _Sharing(table)
    if isinstance(run.get("inference"), dict) and isinstance(run.get("eval"), dict):
        check(run.unify(["model.name", "inference.model.name"]), run.address("eval.client"))


def _same(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)  # A path may be given as Path or as text.


def _value_or_on(value: Any) -> Any:
    return "on" if isinstance(value, dict) else value


def _keys(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


class _Sharing:
    """The table of a run by dotted keys, in which shared settings are filled into the sections."""

    def __init__(self, table: LayeredTable) -> None:
        self.table = table

    def get(self, key: str) -> Any:
        return self.table.get(_keys(key))

    def set(self, key: str, value: Any) -> None:
        """Set a value that was missing or came from a weaker source, and forget that origin."""
        self.table.fill(_keys(key), value)

    def _rank(self, *keys: str) -> int:
        """Rank of the strongest source of any of the keys; below that of a default for none."""
        return max((self.table.rank(_keys(key)) for key in keys), default=-2)

    def _contradiction(self, one: str, value: Any, other: str, different: Any) -> Problem:
        origin = self.table.exact(_keys(one))
        section, _, within = one.partition(".")
        top = within if section in ALL else one
        by_option = origin is None or origin.kind == "option"
        advice = "" if by_option else f", or decide by {spell(_keys(top), 'option')}"
        message = f"{other} is {different} but {one} is {value}: both are the same setting, give it once{advice}"
        return Problem(message, one, other)

    def unify(self, keys: list[str]) -> Problem | None:
        """Give all `keys` the value that the strongest source gave one of them; the Problem if it gave several.

        Of a section it is whether it is on: its settings are unified one by one.
        """
        values = {key: _value_or_on(self.get(key)) for key in keys if self.get(key) is not ABSENT}
        if not values:
            return None
        strongest = self._rank(*values)
        first, *others = [key for key in values if self._rank(key) == strongest]
        for key in others:
            if not _same(values[first], values[key]):
                return self._contradiction(first, values[first], key, values[key])
        for key in keys:
            if key not in values or not _same(values[first], values[key]):
                self.set(key, {} if isinstance(self.get(first), dict) else values[first])
        return None

    def seq_len(self, keys: list[str]) -> list[Problem | None]:
        """Share as a common setting, unless a section's source is stronger than the top's: micro-batches may be longer."""
        if self.get("seq_len") not in (ABSENT, None):
            if self._rank(*keys) <= self._rank("seq_len"):
                return [self.unify(["seq_len", key]) for key in keys]
            self.set("seq_len", None)
        if sum(self.get(key) is not ABSENT for key in keys) == 1:
            self.unify(keys)
        return []

    def wandb(self, sections: list[str]) -> list[Problem | None]:
        """Move `wandb` into the monitors of `sections`, which may differ from it by a stronger source."""
        shared, origin = self.get("wandb"), self.table.exact(("wandb",))
        # Off is written at the top of a resolved file, too, beside monitors that are on.
        decided = shared is not None or (origin is not None and origin.kind == "option")
        problems: list[Problem | None] = []
        for section in sections if shared is not ABSENT else []:
            place = f"{section}.monitor.wandb"
            own, gap = self.get(place), self._rank("wandb") - self._rank(place)
            if own is not ABSENT and gap == 0 and decided and (own is None) != (shared is None):
                states = ("off", "on") if shared is None else ("on", "off")
                problems.append(Problem(f"wandb is {states[0]} but {place} is {states[1]}", "wandb", place))
            if own is ABSENT or (gap > 0 and None in (own, shared)):
                self.set(place, None if shared is None else {})
            for name, value in (shared or {}).items() if self.get(place) is not None else ():
                top, key = f"wandb.{name}", f"{place}.{name}"
                named = f"{value}-{section}" if name in ("name", "id") and value is not None else value
                own, gap = self.get(key), self._rank(top) - self._rank(key)
                if own is ABSENT or gap > 0:
                    self.set(key, named)
                elif gap == 0 and not _same(own, named):
                    problems.append(self._contradiction(top, value, key, own))
        if shared is not ABSENT:
            self.set("wandb", None)
        return problems

    def address(self, client: str) -> Problem | None:
        """Let a client and the inference server agree on host and port."""
        key, router = f"{client}.base_url", f"{client}.admin_base_url"
        host_key, port_key = "inference.server.host", "inference.server.port"
        leave_out = "but [inference] starts its own: leave one of the two out"
        if self.get(router) not in (ABSENT, None):
            return Problem(f"{router} names servers behind a router, {leave_out}", router)
        host, port, url = (None if (value := self.get(one)) is ABSENT else value for one in (host_key, port_key, key))
        if isinstance(url, list) and len(url) > 1:
            return Problem(f"{key} names {len(url)} servers, {leave_out} (`rl` has inference_servers for several)", key)
        url = url[0] if isinstance(url, list) and url else url
        if url:
            address = urlsplit(url)
            url_port = address.port or {"http": 80, "https": 443}.get(address.scheme)
            same_host = address.hostname == host or {address.hostname, host} <= LOCAL_HOSTS
            gap = self._rank(key) - self._rank(port_key, *([] if same_host else [host_key]))
            if same_host and (port is None or gap > 0 or str(url_port) == str(port)):
                self.set(port_key, url_port)
                return None
            if gap >= 0:
                listens = f"{host or 'localhost'}:{port or DEFAULT_PORT}"
                message = f"{key} is {url} but inference.server listens on {listens}: give one of them"
                return Problem(message, key, port_key, host_key)
        name = "localhost" if host in LOCAL_HOSTS else f"[{host}]" if ":" in str(host) else host
        self.set(key, f"http://{name}:{port or DEFAULT_PORT}/v1")
        return None

    def fake_data(self) -> None:
        """Give the trainer random samples under bench, as many as the orchestrator would send.

        Without bench drop `trainer.data.fake`, which is meant for a trainer that runs alone.
        """
        key = "trainer.data.fake"
        fake, bench, batch_size = self.get(key), self.get("bench") is True, self.get("orchestrator.batch_size")
        if bench and fake in (ABSENT, None):
            self.set(key, {} if batch_size is ABSENT else {"batch_size": batch_size})
        elif not bench and fake not in (ABSENT, None):
            origin = self.table.origin(_keys(key))
            where = f" ({origin.text})" if origin is not None else ""
            self.table.hints.append(
                f"{key}{where} is left out: a run without --bench trains on the orchestrator's rollouts"
            )
            self.set(key, None)
        if self.get("orchestrator.trainer") is False:
            self.table.hints.append("orchestrator.trainer is left out: `rl` starts a trainer")
        self.table.remove(_keys("orchestrator.trainer"))  # meant for an orchestrator that runs alone
