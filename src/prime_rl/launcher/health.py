"""Whether the inference server serves: until it does, and for one of our own as long as it shall."""

import http.client
import urllib.request
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from prime_rl.launcher.clock import Policy
from prime_rl.launcher.plan import Server

_START_SECONDS = 0.5  # between two looks while it starts
_SERVING_SECONDS = 5.0  # … and once it serves
_ANSWER_SECONDS = 2.0


class Health(Enum):
    """What a look at the server found out."""

    READY = "ready"  # for the first time in this life
    NEVER = "never"  # not within ready_timeout
    GONE = "gone"  # it has served, and does not any more


@dataclass
class ServerWatch:
    """Asks the server's health route now and then. Times by the launcher's clock, in seconds.

    A server that somebody else runs may vanish and come back, which is between it and the orchestrator: only its first answer is awaited.
    """

    server: Server
    policy: Policy
    began: float = 0.0
    ready: bool = False
    answered: float = 0.0
    due: float = 0.0
    looks: int = 0

    @property
    def own(self) -> bool:
        return self.server.port is not None

    def begin(self, now: float) -> None:
        """A new life of the server."""
        self.began, self.ready, self.due = now, False, now

    def forgive(self, now: float) -> None:
        """The launcher was away: silence meanwhile is nobody's fault."""
        self.answered = now

    def is_due(self, now: float) -> bool:
        """Whether there is anything to look at now."""
        return now >= self.due and (self.own or not self.ready)

    def look(self, now: float) -> Health | None:
        """None: nothing new."""
        if not self.is_due(now):
            return None
        self.due = now + (_SERVING_SECONDS if self.ready else _START_SECONDS)
        urls = (self.server.health, *self.server.others)
        self.looks += 1
        # One a look, as each that is unreachable takes its time. The first that answers is enough to begin with.
        if healthy(urls[self.looks % len(urls)]):
            news = None if self.ready else Health.READY
            self.ready, self.answered = True, now
            return news
        if self.ready:
            return Health.GONE if now - self.answered > self.policy.heartbeat_timeout else None
        return Health.NEVER if now - self.began > self.server.ready_timeout else None


def healthy(url: str) -> bool:
    """Whether the server answers 200 within two seconds. A proxy is never asked for this host's own servers."""
    local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
    try:
        with opener.open(url, timeout=_ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # URLError is an OSError
        return False
