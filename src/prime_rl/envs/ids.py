"""What an environment's id says: its module, its version, and, by a look at its source, what it is written for.

Standard library only. `kind_of` imports nothing of the package: what is written for another verifiers fails at that.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import symtable
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import prime_rl
from prime_rl.errors import UserError

Kind = Literal["verifiers", "classic", "python"]
CLASSIC = (
    'it is written for the classic verifiers API (load_environment): give it `adapter = "classic"` and in `python` an '
    "interpreter with verifiers 0.3.1 (docs/guides/environments.md: A Python environment of its own)"
)
_REPORTED: set[str] = set()


class LoadError(UserError):
    """The environment cannot be loaded. The message is one line that says why; `worker.load` names the environment."""


class Broken(Exception):
    """The environment cannot run another episode in this process: the worker ends, and the pool starts another one."""


def module_name(environment_id: str) -> str:
    """`owner/my-env@1.0` → `my_env`, `package.envs.Guess` → `package.envs.guess`, as verifiers finds it."""
    return environment_id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def find(environment_id: str) -> ModuleSpec | None:
    """Find the module of an environment; None if it is not installed. Runs no code of its packages; importlib would."""
    package, *parts = module_name(environment_id).split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a name that cannot be one
        return None
    for part in parts:
        spec = None if spec is None else PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    return spec


def installed() -> list[str]:
    """Ids of the environments that are installed: the bundled ones, and packages that depend on verifiers."""
    checkout = Path(prime_rl.__file__).parents[2] / "environments"
    bundled = checkout if checkout.is_dir() else Path(prime_rl.__file__).parents[1]  # where the wheel was installed
    exports = {path.parent.name: _names(path)[1] for path in bundled.glob("*/__init__.py")}
    names = {package for package, exported in exports.items() if any(each.endswith("Taskset") for each in exported)}
    for package in importlib.metadata.distributions():
        if package.name != "prime-rl" and any(re.match(r"verifiers\b", need) for need in package.requires or ()):
            names.add(package.name)
    return sorted(name.replace("_", "-") for name in names)


def check_version(environment_id: str) -> None:
    """The version after the `@` of an id, if there is one, is the installed one. `latest` is any.
    Raises LoadError, which names both: it is not, or no package says which one is."""
    _, at_sign, wanted = environment_id.rpartition("/")[2].partition("@")
    if not at_sign or wanted == "latest":
        return
    try:
        present = importlib.metadata.version(module_name(environment_id).partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        present = "no package of its name"
    # Versions as people write them: `v1.0` is `1.0.0` (PEP 440).
    if re.sub(r"(\.0)+$", "", present) != re.sub(r"(\.0)+$", "", wanted.removeprefix("v")):
        raise LoadError(
            f"environment {environment_id} asks for version {wanted}, and {present} is installed: "
            f"`uv run prime env install {environment_id}`, or leave the version out"
        )


def kind_of(environment_id: str) -> Kind:
    """What a package is written for, by the top-level names of its module.

    A plain Python environment has `rollout`, a classic one `load_environment`. Either exports nothing else. All
    others, and what is not found here, are verifiers'.
    """
    spec = find(environment_id)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return "verifiers"
    names, exported = _names(Path(spec.origin))
    if "rollout" in names and exported <= {"tasks", "rollout", "tools"}:
        return "python"
    return "classic" if "load_environment" in names and exported <= {"load_environment"} else "verifiers"


def _names(source: Path) -> tuple[set[str], set[str]]:
    """What a module defines or imports, and what is in its `__all__`; nothing of one that cannot be read."""
    try:
        text = source.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(source), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError):
        return set(), set()
    exported = re.search(r"^__all__\b[^=]*=\s*[\[(](.*?)[\])]", text, re.MULTILINE | re.DOTALL)
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    return names, set(re.findall(r"""["'](\w+)["']""", exported[1] if exported else ""))


def unique(keys: Iterable[str]) -> list[str]:
    """Number repeated keys, so that an id names one task. Raises LoadError where that gives an id that is taken."""
    seen: Counter[str] = Counter()
    ids = []
    for key in keys:
        seen[key] += 1
        ids.append(key if seen[key] == 1 else f"{key}#{seen[key]}")
    if len(set(ids)) < len(ids):
        raise LoadError(f"two tasks have the id {Counter(ids).most_common(1)[0][0]!r}")
    return ids


def describe(error: BaseException) -> str:
    """`Type: message at file:line` of the code that raised, on one line."""
    message = " ".join(str(error).split())[:500]
    frames = list(traceback.walk_tb(error.__traceback__))
    where = f" ({frames[-1][0].f_code.co_filename}:{frames[-1][1]})" if frames else ""
    return f"{type(error).__name__}: {message}{where}" if message else f"{type(error).__name__}{where}"


def report(error: BaseException) -> str:
    """Describe why an episode failed, and print the traceback to the worker's log the first time it fails so."""
    description = describe(error)
    if description not in _REPORTED and len(_REPORTED) < 100:
        _REPORTED.add(description)
        traceback.print_exception(error)
    return description


def import_module(env_id: str) -> ModuleType:
    """The module of an environment. Raises LoadError where there is none."""
    if find(env_id) is None:
        raise LoadError(f"not found: there is no Python module {module_name(env_id)!r}")
    return importlib.import_module(module_name(env_id))


def check_arguments(names: Iterable[str], taken: Callable[..., Any] | Iterable[str]) -> None:
    """Raises LoadError for an argument that an environment does not take: `taken` is its function, or the names."""
    if callable(taken):
        parameters = inspect.signature(taken).parameters.values()
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            return
        taken = [one.name for one in parameters]
    accepted = sorted(taken)
    for name in names:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name == "split":
                hint = (
                    ", by which evaluations ask for their tasks: name others in [[eval.environments]], or none "
                    "(`--no-eval`, under `rl` `--orchestrator.no-eval`)"
                )
            listed = ", ".join(accepted) or "none"
            raise LoadError(f"there is no argument {name!r}{hint} (arguments: {listed})")
