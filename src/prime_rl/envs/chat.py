"""A model behind the chat route of any OpenAI-compatible API: verifiers' own client, made patient.

What may pass (too many requests, a server's own trouble, a lost connection) is asked again after growing pauses, at
least as long as the API says.
"""

import asyncio
import random
import re
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.errors import ProviderError

from prime_rl.envs.protocol import API_KEY_VAR

TRIES = 8
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
LONGEST_REST_SECONDS = 120.0  # an API that asks for more is not waited for
_MAY_PASS = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_SPENT = re.compile(
    r"insufficient_quota|billing_hard_limit|credit balance", re.IGNORECASE
)  # some say it as "too many requests"


def chat_config(request_timeout: float) -> vf.EvalClientConfig:
    """verifiers' settings of such a client. `request_timeout`: seconds without a byte of an answer."""
    timeout = {"connect": 30.0, "read": request_timeout, "write": request_timeout}
    return vf.EvalClientConfig.model_validate({"api_key_var": API_KEY_VAR, "timeout": timeout})


class PatientClient(EvalClient):
    """Needs a running event loop. An error that stays is verifiers' `ProviderError` with the API's status; a budget
    that is spent is a 402."""

    _limit_name = "max_tokens"

    async def _request(
        self, url: str, body: dict[str, Any], headers: httpx.Headers, *, stream: bool = False
    ) -> httpx.Response:
        failures = 0
        while True:  # bounded: by TRIES
            if "max_tokens" in body:
                body[self._limit_name] = body.pop("max_tokens")
            try:
                return await super()._request(url, body, headers, stream=stream)
            except ProviderError as error:
                if error.status_code == 400 and "max_tokens" in body and "max_completion_tokens" in str(error):
                    self._limit_name = "max_completion_tokens"  # OpenAI's newer name
                    continue
                if error.status_code == 429 and _SPENT.search(str(error)):
                    raise ProviderError(str(error), status_code=402) from error
                failures += 1
                cause = error.__cause__
                said = cause.response.headers.get("retry-after", "") if isinstance(cause, httpx.HTTPStatusError) else ""
                rest = float(said) if re.fullmatch(r"\d+(\.\d+)?", said) else 0.0  # it does not say, or says a date
                if error.status_code not in _MAY_PASS or failures >= TRIES or rest > LONGEST_REST_SECONDS:
                    raise
            # Not the same for all that failed together.
            longest = min(FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1), LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(max(rest, random.uniform(longest / 2, longest)))
