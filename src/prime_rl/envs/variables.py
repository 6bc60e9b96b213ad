"""What an environment worker finds in its process environment: what programs need, and no secret that it was not promised."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.envs.protocol import API_KEY_VAR, TOKEN_VAR
from prime_rl.errors import UserError
from prime_rl.redact import is_secret


def passed_on(own: Mapping[str, str], promised: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables of `own` that a worker gets, and the names of those withheld from it: secrets that are not `promised`."""
    withheld = sorted(name for name, value in own.items() if is_secret(name, value) and name not in promised)
    return {name: value for name, value in own.items() if name not in withheld}, withheld


def check_promised(env: str, promised: Sequence[str]) -> None:
    """Every variable in the environment's `secrets` is there.

    Raises:
        UserError: naming the first that is not.
    """
    for name in promised:
        if name not in os.environ:
            raise UserError(f"environment {env!r} is to get the variable {name} (its `secrets`), which is not set")


def worker_variables(
    passed: dict[str, str],
    *,
    token: str,
    base_urls: Sequence[str],
    api_key: str | None,
    path: Path | None,
) -> dict[str, str]:
    """`passed`, and what a worker needs from us: its token, the engine's key, a `path` of its own if it has its own Python."""
    # A proxy of the user's must not get the requests to our own servers.
    local = dict.fromkeys(["127.0.0.1", "localhost", *(urlsplit(url).hostname or "" for url in base_urls)])
    no_proxy = ",".join([os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), *local]).strip(",")
    variables = {
        **passed,
        TOKEN_VAR: token,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if api_key:
        variables[API_KEY_VAR] = api_key
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    return variables
