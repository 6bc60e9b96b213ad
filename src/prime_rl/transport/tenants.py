"""Tenants: orchestrators that share one trainer and its servers, each with an adapter and a run directory of its own.

A *deployment* is the run of such a trainer. A tenant's run directory, `tenants/NAME` of the deployment's, is like any
other run's, with three more files:

    key           the tenant's key, unless it is given by a variable; only its user may read it
    tenant.json   whose it is: the hash of the key that the first orchestrator of this name joined with
    join.json     the tenant is, or asks to be, a member: what it wants to be trained with. The orchestrator commits it
                  to join and removes it to leave; the trainer removes it where membership ends

The trainer answers in the tenant's `status/trainer.json`: without an outcome the tenant is a member, "failed: …" says
why it is none. The servers know tenants by their keys: a request with one means this tenant's adapter and no other.
Where they are is in the deployment's `servers.json`.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.errors import UserError
from prime_rl.monitor.status import read_record
from prime_rl.transport.commit import write_atomically

# What a tenant may choose, by the keys of a TrainerConfig.
SETTINGS = "model", "max_steps", "async_level", "seed", "seq_len", "ckpt", "optim", "scheduler", "loss", "monitor"
_Record = TypeVar("_Record")
_OWNER, _JOIN, _SERVERS = "tenant.json", "join.json", "servers.json"
_TAKEN = "the tenant name {} is taken, by another key: choose another tenant.name, or give the key it joined with"


@dataclass(frozen=True)
class TenantKey:
    """Whose the tenant is: SHA-256 of its key, in hexadecimal digits."""

    key_hash: str


@dataclass(frozen=True)
class Join:
    """A request to be a member, named by `nonce`: `settings` for the trainer, by their keys in TrainerConfig."""

    nonce: str
    settings: dict[str, Any]


def tenant_dir(deployment: Path, name: str) -> Path:
    return deployment / "tenants" / name


def publish_servers(deployment: Path, urls: list[str]) -> None:
    """Commit where the servers that `rl tenants` has started are: `client.base_url` of a tenant on this host."""
    write_atomically(deployment / _SERVERS, json.dumps(urls).encode())


def server_urls(deployment: Path) -> list[str]:
    """Return where the servers are; none are known if they were started by hand."""
    return read_record(list[str], deployment / _SERVERS) or []


def key_hash(name: str, key: str) -> str:
    """Return the hash by which the tenant of this name is known: a copy of its file makes nobody else the tenant."""
    return hashlib.sha256(f"{name}:{key}".encode()).hexdigest()


def own_key(directory: Path) -> str:
    """Return the key of the tenant in `directory`; one that has none yet gets it. Only the user may read the file."""
    path = directory / "key"
    try:
        return path.read_text()
    except PermissionError:
        raise UserError(_TAKEN.format(directory.name)) from None
    except FileNotFoundError:
        pass
    directory.mkdir(parents=True, exist_ok=True)
    key, temporary = secrets.token_urlsafe(32), directory / f".key.tmp-{secrets.token_hex(4)}"
    temporary.touch(mode=0o600)
    temporary.write_text(key)
    temporary.rename(path)
    return key


def claim_name(directory: Path, key: str) -> None:
    """Make the tenant in `directory` the key's. Raises UserError if it is another key's."""
    known = read_record(TenantKey, directory / _OWNER)
    if known is None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / _OWNER, json.dumps(asdict(TenantKey(key_hash(directory.name, key)))).encode())
    elif known.key_hash != key_hash(directory.name, key):
        raise UserError(_TAKEN.format(directory.name))


def ask_to_join(directory: Path, settings: dict[str, Any]) -> None:
    """Commit a request to be a member."""
    join = Join(secrets.token_hex(8), settings)
    write_atomically(directory / _JOIN, json.dumps(asdict(join)).encode())


def leave(directory: Path) -> None:
    """End the membership, or take back the request."""
    (directory / _JOIN).unlink(missing_ok=True)


def has_joined(directory: Path) -> bool:
    """Whether a tenant is a member or asks to be, readable or not. Raises OSError if that cannot be seen."""
    return (directory / _JOIN).exists()


def joins(deployment: Path) -> dict[str, Join]:
    """Return the tenants that are members or ask to be, by name."""
    return dict(_records(deployment, Join, _JOIN))


def key_hashes(deployment: Path) -> dict[str, str]:
    """Return the `key_hash` of every tenant, member or not, by name."""
    return {name: entry.key_hash for name, entry in _records(deployment, TenantKey, _OWNER)}


def owner(key: str, hashes: Mapping[str, str]) -> str | None:
    """Return the tenant that a key is of, among the `key_hashes`."""
    return next((name for name, known in hashes.items() if known == key_hash(name, key)), None)


def _records(deployment: Path, kind: type[_Record], file: str) -> Iterator[tuple[str, _Record]]:
    """Yield the tenants that have this file, with what it says; others are passed over, as damaged files are."""
    for path in sorted((deployment / "tenants").glob(f"*/{file}")):
        if (record := read_record(kind, path)) is not None:
            yield path.parent.name, record
