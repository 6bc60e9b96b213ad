"""Environment variables: PRIME_MODEL__NAME is model.name."""

from collections.abc import Mapping

from prime_rl.config import text
from prime_rl.config.base import Section
from prime_rl.config.origin import PREFIX, Layer, Origin, flatten
from prime_rl.config.schema import Keys, find

# Read by others, although `inference` has an api_key: this one is the key of the user's account.
FOREIGN = "PRIME_API_KEY"


def read(env: Mapping[str, str], section: type[Section]) -> Layer:
    """What the PRIME_ variables assign. One without `__` counts only if it names a setting."""
    layer: Layer = []
    for name in sorted(env):
        keys = _keys(name)
        found = find(section, keys) if keys else None
        if found is not None or len(keys) > 1:
            value = text.value(env[name], found) if found is not None else env[name]
            layer += flatten(keys, value, Origin("variable", name))
    return layer


def child_env(env: Mapping[str, str], section: type[Section]) -> dict[str, str]:
    """`env` without the variables that a process configured by `section` would read as settings.

    For one that gets its complete configuration as a file: what was meant for `rl` may be a mistake there.
    """
    return {name: value for name, value in env.items() if not _names_setting(_keys(name), section)}


def _keys(name: str) -> Keys:
    """The keys that a variable spells, none where it is not ours."""
    if not name.startswith(PREFIX) or name == FOREIGN:
        return ()
    keys = tuple(name.removeprefix(PREFIX).lower().split("__"))
    return ("log", "level") if keys == ("log_level",) else keys


def _names_setting(keys: Keys, section: type[Section]) -> bool:
    return len(keys) > 1 or (len(keys) == 1 and find(section, keys) is not None)
