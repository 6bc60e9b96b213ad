"""Settings that the processes of a run must agree on.

Each process commits its own as `settings/<process>.json`, and refuses to start if a running partner's differ.
"""

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from prime_rl.config.base import BaseConfig
from prime_rl.errors import UserError
from prime_rl.monitor.status import ProcessStatus, new_status, read_record, read_status
from prime_rl.processes import is_alive, this_host
from prime_rl.transport.commit import write_atomically

LEDGER = "ledger.sqlite"  # of the orchestrator, in the run directory
Party = Literal["trainer", "orchestrator", "inference"]

_SLOTS = "tenants.slots"  # of a deployment's trainer alone
# Dotted keys, compared if both sides have them.
_SAME = (
    "model.name", "async_level", "max_steps", "seed", "ckpt.interval", "ckpt.keep", "ckpt.keep_interval",
    "ckpt.output_dir", "router_replay", _SLOTS,
)  # fmt: skip
_SEQ_LEN = "seq_len"  # need not be equal: the orchestrator's samples must fit the trainer's micro-batches
_DATA = "data"  # between trainer and orchestrator; compared with partners that are gone, too: what they committed stays
_BATCHES, _FAKE, _UNTRAINED = "rollouts", "random samples (data.fake)", "rollouts for no trainer (trainer = false)"
_ALONE = {
    _FAKE: f"the trainer trains on {_FAKE}, not on what the orchestrator makes: leave data.fake out (--no-data.fake)",
    _UNTRAINED: f"the orchestrator makes {_UNTRAINED}: give it --trainer",
}
_FRESH_SECONDS = 30.0  # of a heartbeat, on another host
_START_SECONDS = 300.0  # from these settings to the first status, on another host


@dataclass(frozen=True)
class ProcessSettings:
    """What one process of a run committed: its settings by dotted key, and its status then, which says who it is."""

    process: Party
    status: ProcessStatus
    settings: dict[str, Any]


def check_and_commit(config: BaseConfig, process: Party) -> None:
    """Commit the settings of this process. Raises UserError as `compare` does; what was committed before stays."""
    mine = compare(config, process)
    path = config.output_dir / "settings" / f"{process}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(mine), indent=1).encode())


def compare(config: BaseConfig, process: Party, *, gone: bool = True) -> ProcessSettings:
    """Return the settings of this process, compared with those of its partners, with `gone` also of former ones.

    Raises UserError if one differs, naming the key and both values, or if another trainer, or orchestrator, is running
    in this run.
    """
    mine, output_dir = _own(config, process), config.output_dir
    settings = mine.settings
    for partner, running in _committed(output_dir):
        where = f"(pid {partner.status.pid} on {partner.status.host})"
        if not (running or gone):
            continue
        if partner.process == process:
            if process != "inference" and running:  # servers have addresses of their own
                other = "--output-dir" if getattr(config, "tenant", None) is None else "--tenant.name"
                ways = f"stop that one, or choose another {other}"
                raise UserError(f"another {process} {where} is running in {output_dir}: {ways}")
            continue
        data = [settings[_DATA], partner.settings[_DATA]] if _DATA in settings and _DATA in partner.settings else []
        for alone in (_ALONE[each] for each in data if each != _BATCHES):
            raise UserError(f"in {output_dir} {alone}, start over with --clean, or choose another --output-dir")
        shared = running and process == "orchestrator" and _SLOTS in partner.settings
        if shared and attrgetter("tenant")(config) is None:
            joins = f"--tenant.join {output_dir} --tenant.name NAME joins it"
            raise UserError(f"the trainer {where} that runs in {output_dir} trains tenants: {joins}")
        if running:
            _compare(mine, partner, settings.keys() & partner.settings.keys() - {_DATA})
    return mine


def _compare(mine: ProcessSettings, partner: ProcessSettings, keys: Iterable[str]) -> None:
    for key in keys:
        ours, theirs = mine.settings[key], partner.settings[key]
        if key == _SEQ_LEN:
            made, room = (ours, theirs) if mine.process == "orchestrator" else (theirs, ours)
            if made > room:
                lengths = f"seq_len is {made} in the orchestrator, but {room} in the trainer"
                raise UserError(f"{lengths}: samples would not fit a micro-batch")
        elif ours != theirs:
            where = f"(pid {partner.status.pid} on {partner.status.host})"
            running_there = f"in the {partner.process} that it runs with {where}"
            raise UserError(f"{key} is {ours} here, but {theirs} {running_there}: give both the same value")


def slots_for(config: BaseConfig, deployment: Path) -> int | None:
    """Return how many tenants the trainer of `deployment` takes; None where none for tenants runs there.
    Raises UserError if a tenant with this configuration would not fit it."""
    for partner, running in _committed(deployment):
        if running and partner.process == "trainer" and _SLOTS in partner.settings:
            _compare(_own(config, "orchestrator"), partner, ("model.name", _SEQ_LEN))
            return int(partner.settings[_SLOTS])
    return None


def _own(config: BaseConfig, process: Party) -> ProcessSettings:
    return ProcessSettings(process, new_status(process), _shared(config, process))


def _shared(config: BaseConfig, process: Party) -> dict[str, Any]:
    """Return the settings that matter to partners."""
    settings: dict[str, Any] = {}
    for key in ("model.name", "router_replay") if process == "inference" else (*_SAME, _SEQ_LEN):
        with suppress(AttributeError):  # an option that it does not have, or in a section that is off
            value = attrgetter(key)(config)
            settings[key] = str(value) if isinstance(value, Path) else value
    if getattr(config, "bench", False):
        return settings  # trainer and orchestrator are measured each by itself
    if process == "orchestrator":
        settings[_DATA] = _BATCHES if attrgetter("trainer")(config) else _UNTRAINED
    elif process == "trainer":
        settings[_DATA] = _BATCHES if attrgetter("data.fake")(config) is None else _FAKE
    return settings


def _committed(output_dir: Path) -> Iterator[tuple[ProcessSettings, bool]]:
    """Yield what each process committed, and whether it is still running."""
    for path in sorted((output_dir / "settings").glob("*.json")):
        if (record := read_record(ProcessSettings, path)) is not None:
            status = read_status(output_dir).get(record.process)
            if status is not None and (status.id, status.host) == (record.status.id, record.status.host):
                yield record, _is_live(status)
            else:
                yield record, _is_live(record.status, _START_SECONDS)


def dry_path(output_dir: Path, name: str) -> Path:
    """Return where a dry run writes the configuration of process `name`: never over that of a run in the directory."""
    held = any((output_dir / part).is_dir() for part in ("settings", "weights", "rollouts", "checkpoints", "evals"))
    return output_dir / "configs" / ("dry-run" if held else "") / f"{name}.toml"


def suggestions(output_dir: Path, *, saved: bool, recover: bool = True) -> str:
    """Say what to do about an earlier run in `output_dir`, for the end of an error message.

    `saved`: whether a checkpoint is there; `recover`: whether the command has --recover.
    """
    if recover and running_processes(output_dir) & {"trainer", "orchestrator"}:
        return "the other processes of that run are running: go on with them by --recover, or stop them first"
    ways = ["remove it with --clean", f"give --output-dir {other_directory(output_dir)}"]
    ways += ["go on from a checkpoint with --ckpt.resume-step -1"] * saved
    ways += ["go on from whatever was committed with --recover"] * recover
    return ", or ".join([", ".join(ways[:-1]), ways[-1]])


def other_directory(output_dir: Path) -> Path:
    """Return a directory for another run that does not exist yet: within `outputs`, beside `outputs/NAME`."""
    parent = output_dir if output_dir.parent == Path() else output_dir.parent
    return next(path for number in itertools.count(2) if not (path := parent / f"run-{number}").exists())


def running_processes(output_dir: Path) -> set[str]:
    """Return the names of the other processes that are running in a run directory."""
    statuses = read_status(output_dir).items()
    names: set[str] = {record.process for record, running in _committed(output_dir) if running}
    return names | {name.partition(".")[0] for name, status in statuses if _is_live(status)}


def _is_live(status: ProcessStatus, fresh_seconds: float = _FRESH_SECONDS) -> bool:
    """Whether another process is alive; one on another host is, for so long after its heartbeat."""
    if status.outcome is not None:
        return False
    if status.host == this_host():
        return status.pid != os.getpid() and is_alive(status.id)
    return time.time() < status.heartbeat + fresh_seconds
