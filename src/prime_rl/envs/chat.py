"""A model behind the chat route of any OpenAI-compatible API: verifiers' own client, made patient.

What may pass (too many requests, a server's own trouble, a lost connection) is asked again after growing pauses, at least as long as the API says;
while it says so, no other request of this worker is sent either. What an API does not know, and says nothing, is left out from then on.
"""

import asyncio
import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.errors import ProviderError

from prime_rl.envs.protocol import API_KEY_VAR

TRIES = 8
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
LONGEST_REST_SECONDS = 120.0  # whoever asks for more is not waited for
_MAY_PASS = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_SPENT = re.compile(
    r"insufficient_quota|billing_hard_limit|credit balance", re.IGNORECASE
)  # some say it as "too many requests"
_NEUTRAL: dict[str, float] = {"temperature": 1.0, "top_p": 1.0}  # what APIs do where nothing is said


def chat_config(request_timeout: float) -> vf.EvalClientConfig:
    """verifiers' settings of such a client. `request_timeout`: seconds without a byte of an answer."""
    timeout = {"connect": 30.0, "read": request_timeout, "write": request_timeout}
    return vf.EvalClientConfig.model_validate({"api_key_var": API_KEY_VAR, "timeout": timeout})


class PatientClient(EvalClient):
    """Needs a running event loop. An error that stays is verifiers' `ProviderError` with the API's status; a budget that is spent is a 402."""

    def __init__(self, config: vf.EvalClientConfig) -> None:
        super().__init__(config)
        self._rest_until = 0.0  # by `time.monotonic()`
        self._left_out: set[str] = set()
        self._newer_name = False  # of `max_tokens`

    async def _request(
        self, url: str, body: dict[str, Any], headers: httpx.Headers, *, stream: bool = False
    ) -> httpx.Response:
        failures = 0
        while True:  # bounded: by TRIES, and by the names that are left out
            await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
            sent = self._adapted(body)
            try:
                return await super()._request(url, sent, headers, stream=stream)
            except ProviderError as error:
                if error.status_code in (400, 422) and self._learn(sent, str(error)):
                    continue
                if error.status_code == 429 and _SPENT.search(str(error)):
                    raise ProviderError(str(error), status_code=402) from error
                failures += 1
                wish = retry_after(_headers(error), time.time())
                if error.status_code not in _MAY_PASS or failures >= TRIES or (wish or 0.0) > LONGEST_REST_SECONDS:
                    raise
            if wish is not None:
                self._rest_until = max(self._rest_until, time.monotonic() + wish)
            await asyncio.sleep(pause_seconds(failures))

    def _adapted(self, body: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in body.items() if name not in self._left_out}
        kept["messages"] = [_said(message) for message in body["messages"]]
        if self._newer_name and "max_tokens" in kept:
            kept["max_completion_tokens"] = kept.pop("max_tokens")
        return kept

    def _learn(self, sent: Mapping[str, Any], refusal: str) -> bool:
        """Whether a refusal names something that can be said otherwise, or need not be said."""
        if "max_tokens" in sent and "max_completion_tokens" in refusal:
            self._newer_name = True
            return True
        named = {name for name, value in _NEUTRAL.items() if sent.get(name) == value and re.search(rf"\b{name}\b", refusal)}  # fmt: skip
        self._left_out |= named
        return bool(named)


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what it leaves open: a reply that is sent back has fields that APIs answer with, and do not all take."""
    return {name: value for name, value in message.items() if name == "content" or value not in (None, [], {})}


def pause_seconds(failures: int) -> float:
    """Before the next try: doubled with each failure, and not the same for all that failed together."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1), LONGEST_PAUSE_SECONDS)
    return random.uniform(longest / 2, longest)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that an answer asks to wait for, by a number or a date (RFC 9110, 10.2.3); None where it does not. `now` is in unix seconds."""
    said = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", said):
        return float(said)
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - now)
    except (TypeError, ValueError):  # nothing, or no date
        return None


def _headers(error: ProviderError) -> Mapping[str, str]:
    cause = error.__cause__
    return cause.response.headers if isinstance(cause, httpx.HTTPStatusError) else {}
