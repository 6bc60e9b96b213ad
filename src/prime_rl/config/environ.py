"""Environment variables: PRIME_MODEL__NAME is model.name."""

from collections.abc import Mapping

from prime_rl.config import text
from prime_rl.config.base import Section
from prime_rl.config.origin import PREFIX, Layer, Origin, flatten
from prime_rl.config.schema import find

# Names that other programs use. Some would name a setting here: PRIME_API_KEY is the account's key, not the server's.
FOREIGN = frozenset({"PRIME_API_KEY", "PRIME_BASE_URL", "PRIME_CONTEXT", "PRIME_TEAM_ID", "PRIME_USER_ID"})


def read(env: Mapping[str, str], section: type[Section]) -> Layer:
    """What the PRIME_ variables assign. One without `__` counts only if it names a setting."""
    layer: Layer = []
    for name in sorted(env):
        keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if not name.startswith(PREFIX) or name in FOREIGN:
            continue
        if keys == ("log_level",):
            keys = ("log", "level")
        found = find(section, keys)
        if found is not None or len(keys) > 1:
            value = text.value(env[name], found) if found is not None else env[name]
            layer += flatten(keys, value, Origin("variable", name))
    return layer


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables that were read as settings.

    For processes that get their complete configuration as a file: what was meant for `rl` may name nothing there.
    """
    return {name: value for name, value in env.items() if not _is_setting(name)}


def _is_setting(name: str) -> bool:
    return name.startswith(PREFIX) and name not in FOREIGN and ("__" in name or name == "PRIME_LOG_LEVEL")
