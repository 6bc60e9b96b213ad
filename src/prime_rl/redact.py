"""Which names are those of secrets, and tables without the values under such names. Standard library only."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(withheld)"
_SECRET_NAME = re.compile(
    r"(^|[_.-])(API_?KEYS?|KEYS?|TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIES?|PRIVATE)"
    r"([_.-]|$)|(APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|_PWD)$",
    re.IGNORECASE,
)
_KEY_NAME = re.compile(
    r"(api|access|private|secret)_?key|(api|access|auth|hf)_?token|password|passwd|passphrase|client_?secret|^secret$",
    re.IGNORECASE,
)
_KEY = re.compile(r"(sk|hf|gh[a-z]|xox[a-z])[-_].+|(?=.*\d)[\w-]{20,}")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
_USER = re.compile(r"(\w+://)?.+@", re.DOTALL)


def is_secret(name: str, value: object = "") -> bool:
    """Return whether a variable or setting of this name (`HF_TOKEN`), or a URL with a password as value, is secret."""
    # A proxy's password is needed to get anywhere; it opens nothing else.
    in_url = isinstance(value, str) and not name.lower().endswith("_proxy") and _URL_WITH_PASSWORD.search(value)
    return bool(in_url or _SECRET_NAME.search(name))


def passed_on(own: Mapping[str, str], promised: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of `own` that a worker gets, and the names of the withheld: secrets not `promised`."""
    withheld = sorted(name for name, value in own.items() if is_secret(name, value) and name not in promised)
    return {name: value for name, value in own.items() if name not in withheld}, withheld


def key_in(table: Mapping[str, Any], place: str = "") -> str | None:
    """Return the dotted name of a setting that surely holds a key (`judge_api_key = "sk-…"`) or a URL with a password,
    or None. `answer_key` and `stop_token` hold keys only by their looks, and the name of a variable is no key."""
    return next((here for name, value in table.items() if (here := _key_in(str(name), value, f"{place}{name}"))), None)


def _key_in(name: str, value: Any, here: str) -> str | None:
    if isinstance(value, Mapping):
        return key_in(value, f"{here}.")
    if isinstance(value, list | tuple):
        return next((at for n, item in enumerate(value) if (at := _key_in(name, item, f"{here}.{n}"))), None)
    if not isinstance(value, str) or not value or _VARIABLE.fullmatch(value):
        return None
    is_key = _KEY_NAME.search(name) or is_secret("", value) or (is_secret(name) and _KEY.fullmatch(value))
    return here if is_key else None


def without_password(url: str) -> str:
    """A URL, with or without a scheme, cut before its last `@`, where a password may be: for what others get to see."""
    return _USER.sub(r"\1", url)


def redacted(table: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a nested table in which text under the names of secrets is replaced: for what others get to see."""

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: shown(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [shown(name, item) for item in value]
        is_hidden = isinstance(value, str) and value and not name.endswith("_var") and is_secret(name, value)
        return HIDDEN if is_hidden else value

    return shown("", table)  # type: ignore[no-any-return]
