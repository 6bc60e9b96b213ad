"""Sending versions to servers that ask for them, out of the memory that the weights are copied into (`staging.Staging`).

A process of its own does it, which has no state but what it is told: a communicator that hangs is killed with it, and another one takes its place
at the same address. The trainer never waits for a server, but for a moment where it is about to write over what one is reading.
"""

import json
import mmap
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.lifeline import wake_without_parent
from prime_rl.transport.line import BLOCK_BYTES, Line, PairError, welcome
from prime_rl.transport.shared import BACKEND as SHARED
from prime_rl.transport.shared import CUDA_IPC, Lender, describe
from prime_rl.transport.weights import SenderAddress

if TYPE_CHECKING:
    from prime_rl.transport.pairs import Pair  # torch: only who sends through a group needs it

GRACE_SECONDS = 1.0  # that a transfer may go on when its memory is wanted for a newer version
_ANSWER_SECONDS = 2.0  # … and for the process to say that none goes on any more
_PATIENCE = 5.0  # seconds for a killed process to end
_MOST_ENDS = 3  # of the process, between two versions: then something is wrong with this host
_BACKLOG = 64
_PAUSE_SECONDS = 1.0  # where no descriptor is free
_NEWS_SECONDS = 2.0  # at most, for the process to read what it was told; who asks for it may be there sooner


@dataclass(frozen=True)
class Offer:
    """A version that can be asked for: `size` bytes of the memory, from `start` on."""

    version: int
    life: int
    hash: str
    start: int
    size: int


# ---- the trainer's side


class Sender:
    """A process that sends what it is told to offer. It ends with this one, however this one ends.

    Args:
        memory: A file descriptor of the memory, of `size` bytes.
        host: This host's address to listen at; `port` 0: any.
        backends: What servers may choose from: `shared-memory` on this host, `gloo`, or `nccl` by way of `device`, a GPU; `cuda-ipc` with `lent`.
        lent: What `DeviceCopy.described` says of a GPU's memory that holds what `memory` does (None: there is none).
        timeout: Seconds without progress after which either side gives a transfer up.

    Raises:
        UserError: it cannot listen there.
    """

    def __init__(
        self, memory: int, size: int, *, host: str, port: int, backends: Sequence[str], device: str, timeout: float,
        lent: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self._memory, self._size = memory, size
        self._settings = {"host": host, "backends": [*backends], "device": device, "timeout": timeout, "lent": lent}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # Kept here: a process that takes the place of another one has the same address.
            self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise UserError(
                f"trainer.weights.transport: cannot listen at {host}:{port} ({error.strerror}): choose another host or port"
            ) from error
        port = int(self._listening.getsockname()[1])
        self.address = SenderAddress(host, port, secrets.token_hex(16), timeout)
        self._offers: dict[int, Offer] = {}
        self._lock = threading.Lock()  # bounded: held for a message to a pipe, or the start of a process
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = threading.Condition()  # bounded: held to note an answer
        self._order, self._last_answer = 0, 0
        self._ends: list[str] = []  # how those ended that were not asked to, since the last version
        self._closed = False
        with self._lock:
            self._start()

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def offer(self, offer: Offer) -> None:
        """From now on this version can be asked for.

        Raises:
            UserError: the process ends whenever it is started.
        """
        with self._lock:
            if self._process is None and not self._closed:
                raise UserError(
                    f"the process that sends the weights has ended ({' and '.join(self._ends)}): no server could get version {offer.version}"
                )
            self._ends.clear()
            self._offers[offer.start] = offer
            self._tell({"offer": asdict(offer)})

    def retire(self, start: int) -> None:
        """What lies from `start` on is about to be written over. Who is reading it has a moment to end; a process that does not answer is killed."""
        with self._lock:
            if self._offers.pop(start, None) is None or self._process is None:
                return
            self._order += 1
            order, process = self._order, self._process
            self._tell({"retire": start, "order": order})
        with self._answered:
            answered = self._answered.wait_for(lambda: self._last_answer >= order, GRACE_SECONDS + _ANSWER_SECONDS)
        if not answered:
            logger.warning(
                "the process that sends the weights does not answer: it is killed, another one takes its place"
            )
            process.kill()

    def close(self) -> None:
        """End it, and whoever is being sent to gets no more."""
        with self._lock:
            self._closed = True
            process = self._process
            self._listening.close()
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)

    def _start(self) -> None:
        """With the lock held."""
        answers, answering = os.pipe()  # no standard output: whatever is imported may print there
        listening = self._listening.fileno()
        settings = {**self._settings, "token": self.address.token}
        numbers = [str(number) for number in (self._memory, self._size, listening, answering)]
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *numbers],
                stdin=subprocess.PIPE,
                pass_fds=[self._memory, listening, answering],
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            os.close(answers)
            raise UserError(f"no process that sends the weights can be started ({error.strerror})") from error
        finally:
            os.close(answering)
        self._tell({"settings": settings})  # not on the command line, which everybody may read
        for offer in self._offers.values():
            self._tell({"offer": asdict(offer)})
        listener = threading.Thread(target=self._listen, args=(self._process, os.fdopen(answers, "rb")), name="sender", daemon=True)  # fmt: skip
        listener.start()

    def _tell(self, message: Mapping[str, object]) -> None:
        """One that has just ended is told again when another one takes its place."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self, process: "subprocess.Popen[bytes]", answers: BinaryIO) -> None:
        """In a thread, as long as the process lives: what it says. Then another one takes its place."""
        with answers:
            for line in answers:
                message = json.loads(line)
                if "said" in message:
                    logger.warning("sending weights: {}", message["said"])
                elif "told" in message:
                    logger.info("sending weights: {}", message["told"])
                else:
                    self._note(int(message["order"]))
        with suppress(subprocess.TimeoutExpired):  # it has closed the pipe, so that it is about to end
            process.wait(_PATIENCE)
        self._note(self._order)
        with self._lock:
            if self._closed:
                return
            status = process.poll()
            ended = f"killed by {signal.Signals(-status).name}" if status is not None and status < 0 else f"exit status {status}"  # fmt: skip
            self._ends.append(ended)
            process.kill()
            self._process = None
            if len(self._ends) >= _MOST_ENDS:
                logger.error(
                    "the process that sends the weights ended {} times, the last time: {}", len(self._ends), ended
                )
                return
            logger.warning("the process that sends the weights has ended ({}): another one takes its place", ended)
            self._start()

    def _note(self, order: int) -> None:
        with self._answered:
            self._last_answer = max(self._last_answer, order)
            self._answered.notify_all()


# ---- in the process


class _Offered:
    """What can be asked for, and who is reading it."""

    def __init__(self) -> None:
        self._offers: dict[int, Offer] = {}
        self._readers: dict[Offer, int] = {}
        self._readers_changed = threading.Condition()  # bounded: held for a look at who reads

    def add(self, offer: Offer) -> None:
        with self._readers_changed:
            self._offers[offer.start] = offer
            self._readers_changed.notify_all()

    def retire(self, start: int) -> None:
        """Nobody begins to read it any more. Returns when nobody does, or after `GRACE_SECONDS`: then those who still do are to stop."""
        with self._readers_changed:
            offer = self._offers.pop(start, None)
            if offer is not None:
                self._readers_changed.wait_for(lambda: not self._readers.get(offer), timeout=GRACE_SECONDS)
                self._readers.pop(offer, None)

    @contextmanager
    def reading(self, version: int, life: int, digest: str, seconds: float) -> Iterator[Offer]:
        """Raises `_Refused` where it is not there, and does not come within so many seconds, where it is newer than what is there."""
        with self._readers_changed:
            asked = (version, life, digest)
            self._readers_changed.wait_for(lambda: self._newest() >= (life, version), timeout=seconds)
            found = next((one for one in self._offers.values() if (one.version, one.life, one.hash) == asked), None)
            if found is None:
                there = (
                    ", ".join(str(number) for number in sorted(one.version for one in self._offers.values())) or "none"
                )
                raise _Refused(
                    f"version {version} of life {life} is not there any more: superseded (there is: {there})"
                )
            self._readers[found] = self._readers.get(found, 0) + 1
        try:
            yield found
        finally:
            with self._readers_changed:
                if found in self._readers:
                    self._readers[found] -= 1
                self._readers_changed.notify_all()

    def _newest(self) -> tuple[int, int]:
        return max(((offer.life, offer.version) for offer in self._offers.values()), default=(-1, -1))

    def check(self, offer: Offer) -> None:
        """Raises `_Refused` where one who reads it is to stop."""
        with self._readers_changed:
            if offer not in self._readers:
                raise _Refused(f"version {offer.version} is superseded: its memory is needed for a newer one")


class _Refused(Exception):
    """What was asked for is not given; the message goes to who asked."""


class _Answers:
    """What the process says to the trainer."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "wb")
        self._writing = threading.Lock()  # bounded: held for a message to a pipe that a thread reads

    def tell(self, **message: object) -> None:
        with self._writing:
            self._pipe.write(json.dumps(message).encode() + b"\n")
            self._pipe.flush()


class _Groups:
    """What process groups need: torch, which takes seconds to import, the memory as a tensor, and a store.

    Raises:
        PairError: the GPU's memory that is sent from cannot be opened.
    """

    def __init__(self, memory: int, size: int, settings: Mapping[str, Any]) -> None:
        import torch

        from prime_rl.transport.pairs import open_store

        self.device = torch.device(settings["device"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if (lent := settings.get("lent")) is not None:  # the host's may come later, or not at all
            from prime_rl.transport.device_memory import DeviceMemory

            there = DeviceMemory(int(lent["size"]), str(lent["handle"]), self.device)
            if (why := there.open()) is not None:
                raise PairError(f"the trainer's copy of the weights on {self.device} cannot be opened ({why})")
            self.memory = there.tensor
        else:
            self.memory = torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8)
            if self.device.type == "cuda":  # else copying to the GPU waits for a copy on the host
                torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0)
        self.store, self.store_port = open_store(settings["host"], settings["timeout"])


class _Server:
    """Answers those who ask: a thread for each, which ends with the connection."""

    def __init__(self, memory: int, size: int, settings: Mapping[str, Any], offered: _Offered, answers: _Answers) -> None:  # fmt: skip
        self._memory, self._size = memory, size
        self._settings, self._offered, self._answers = settings, offered, answers
        self._seconds = float(settings["timeout"])
        self._groups: _Groups | None = None
        self._begun: set[tuple[str, str]] = set()
        self._making = threading.Lock()  # bounded: held while torch is imported, which waits for nobody
        self._lent = dict(settings.get("lent") or {})
        # Who has it can write there, too, so that it is for those who know the token.
        self._opens = {SHARED: True, CUDA_IPC: self._lent.pop("handle", None)}
        if self._opens.keys().isdisjoint(settings["backends"]):
            self._make_groups()

    def serve(self, listening: socket.socket) -> NoReturn:
        while True:  # bounded: it ends with the process
            try:
                connection, address = listening.accept()  # bounded: as above
            except OSError as error:  # no descriptor is free: those who are connected are served on
                self._answers.tell(said=f"nobody else can connect at the moment ({error.strerror})")
                time.sleep(_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            line = Line(connection)
        except OSError as error:  # it went at once
            connection.close()
            self._answers.tell(said=f"{address}: {error}")
            return
        try:
            pair = self._begin(line)
        except (PairError, OSError) as error:
            line.close()  # with its end announced: else what it had said unread would take the answer from it
            self._answers.tell(said=f"{address}: {error}")
            return
        if (begun := (address, pair.backend)) not in self._begun:
            self._begun.add(begun)
            self._answers.tell(told=f"a worker at {address} gets them by {pair.backend}")
        try:
            while True:  # ends when the other side closes the connection, or is found to be gone
                request = pair.line.hear(None)
                try:
                    self._send(pair, request)
                except _Refused as refusal:
                    pair.flush()
                    pair.line.tell(self._seconds, error=str(refusal))
        except PairError:  # it is gone; it knows why
            pass
        except (OSError, RuntimeError) as error:  # torch's, of a GPU without memory for one: the others are served on
            self._answers.tell(said=f"{address}: {error}")
        finally:
            pair.close()

    def _begin(self, line: Line) -> "Lender | Pair":
        backend = welcome(
            line, token=self._settings["token"], backends=self._settings["backends"],
            memory=describe(self._memory, self._size) if SHARED in self._settings["backends"] else {}, gpu=self._lent,
            seconds=self._seconds,
        )  # fmt: skip
        if backend in self._opens:
            line.tell(self._seconds, welcome=self._opens[backend])
            return Lender(line, self._seconds, backend)
        from prime_rl.transport.pairs import accept

        try:
            groups = self._make_groups()
            return accept(
                line, groups.store, groups.store_port,
                backend="nccl" if backend == "nccl" else "gloo", device=groups.device, seconds=self._seconds,
            )  # fmt: skip
        except PairError:
            raise
        except Exception as error:  # whatever torch raises: others may be served without
            why = f"no {backend} group can be made by the sender: {error}"
            line.tell(self._seconds, error=why)
            raise PairError(why) from error

    def _make_groups(self) -> _Groups:
        with self._making:
            if self._groups is None:
                self._groups = _Groups(self._memory, self._size, self._settings)
            return self._groups

    def _send(self, pair: "Lender | Pair", request: Mapping[str, Any]) -> None:
        try:
            version, life, at, count, block = (
                int(request[key]) for key in ("version", "life", "start", "count", "block")
            )
            digest = str(request["hash"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _Refused(f"that is no question for weights ({error!r})") from error
        patience = min(_NEWS_SECONDS, self._seconds / 2)  # the other side waits for an answer
        with self._offered.reading(version, life, digest, patience) as offer:
            if at < 0 or count < 0 or at + count > offer.size or not 0 < block <= BLOCK_BYTES:
                raise _Refused(
                    f"version {version} has {offer.size} bytes, not {at} to {at + count} in blocks of {block}"
                )
            if isinstance(pair, Lender):
                pair.lend(offer.start + at, count, lambda: self._offered.check(offer))
            else:
                memory = self._make_groups().memory
                for first in range(at, at + count, block):
                    self._offered.check(offer)
                    last = min(first + block, at + count)
                    pair.send(memory[offer.start + first : offer.start + last])
                pair.flush()
            self._offered.check(offer)  # else what has gone may have been written over meanwhile
        pair.line.tell(self._seconds, done=count)


def _serve(memory: int, size: int, listening: int, answering: int) -> None:
    """Do as the trainer says. The process ends as soon as nobody can say anything."""
    wake_without_parent()  # one that is stopped could not see that
    # Ctrl-C reaches all processes: it is the trainer that decides how long there is something to send.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.excepthook = _end
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every worker of every server keeps a few connections
    settings = json.loads(sys.stdin.buffer.readline())["settings"]
    offered, answers = _Offered(), _Answers(answering)

    def serve() -> None:  # it may take seconds to begin with: whatever is offered meanwhile is known by then
        try:
            server = _Server(memory, size, settings, offered, answers)
        except PairError as error:
            answers.tell(said=str(error))
            raise
        server.serve(socket.socket(fileno=listening))

    def retire(start: int, order: int) -> None:
        offered.retire(start)
        answers.tell(order=order)

    threading.Thread(target=serve, daemon=True).start()
    for line in sys.stdin.buffer:
        message = json.loads(line)
        if "offer" in message:
            offered.add(Offer(**message["offer"]))
        else:
            threading.Thread(target=retire, args=(message["retire"], message["order"]), daemon=True).start()
    os._exit(0)


def _end(failure: threading.ExceptHookArgs) -> None:
    """Another process in its place is better than one that has lost a thread."""
    traceback.print_exception(failure.exc_value)
    os._exit(1)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
