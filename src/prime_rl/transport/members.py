"""Servers that make themselves known: a directory that all hosts see, with one small file in it for each server, replaced atomically.

A file says where its server is reached, which incarnation of it wrote the file, and a number that the server keeps raising. No clock is in it: hosts
disagree about the time. Who reads judges by how long the number has not changed before its own eyes (`fleet/membership.py`).
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.monitor.record import as_table, build
from prime_rl.redact import has_password
from prime_rl.transport.commit import write_atomically

BEAT_SECONDS = 5.0  # between two renewals
_MOST_BYTES = 65_536


@dataclass(frozen=True)
class Member:
    """A server as it makes itself known.

    Attributes:
        address: Where others reach it, without /v1 and without a slash at the end.
        boot: The incarnation of the server: that of `GET /weights`.
        model: The name that it serves its model under.
        host: The name of its host, by which a loopback address is understood.
        beat: Raised with every renewal.
        leaving: Whether it is to get no new work.
    """

    address: str
    boot: str
    model: str
    host: str
    beat: int
    leaving: bool = False


def member_path(directory: Path, address: str) -> Path:
    """One file for each address: a server that is started again takes the place of the one before."""
    parts = urlsplit(address)
    return directory / (re.sub(r"[^A-Za-z0-9.-]+", "_", f"{parts.netloc}{parts.path}").strip("_") + ".json")


def publish(directory: Path, member: Member) -> None:
    """Write a server's file, or renew it.

    Raises:
        UserError, OSError: it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(member_path(directory, member.address), json.dumps(asdict(member)).encode())


def withdraw(directory: Path, address: str, boot: str) -> None:
    """Remove a server's file, unless a later incarnation of it has written that.

    Raises:
        OSError: it cannot be removed.
    """
    path = member_path(directory, address)
    try:
        if _read(path).boot == boot:
            path.unlink(missing_ok=True)
    except (FileNotFoundError, ValueError):
        return  # somebody has cleaned up, or it is not ours


def read_members(directory: Path) -> tuple[list[Member], Mapping[str, str]]:
    """Who is registered, in the order of the files' names, and what could not be read: why, by file name ("" is the directory itself).

    What is not there yet, or not there any more, is no trouble. The directory is listed: a network file system may remember that a name
    did not exist.
    """
    members, troubles = [], {}
    try:
        names = sorted(os.listdir(directory))
        if directory.stat().st_mode & stat.S_IWOTH:
            troubles[""] = "everybody may write there, and whoever registers gets prompts and the key"
    except FileNotFoundError:
        return [], {}
    except OSError as error:
        return [], {"": f"cannot be listed: {error.strerror}"}
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            members.append(_read(directory / name))
        except FileNotFoundError:
            continue  # removed, or not visible here yet
        except OSError as error:
            troubles[name] = f"cannot be read: {error.strerror}"
        except ValueError as error:
            troubles[name] = str(error)
    return members, troubles


def _read(path: Path) -> Member:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # what is not a file does not keep us
        text = file.read(_MOST_BYTES)
    try:
        member = build(Member, as_table(json.loads(text)))
    except (ValueError, RecursionError):
        member = None
    if member is None:
        raise ValueError("is no registration of a server, or only half of one")
    if not member.address.startswith(("http://", "https://")) or has_password(member.address):
        raise ValueError("names no address")
    return member
