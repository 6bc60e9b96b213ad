"""What an id says: the module, the version that must be the installed one, and what the package is written for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.config import EvalConfig, OrchestratorConfig, parse
from prime_rl.envs.adapter import load
from prime_rl.envs.ids import LoadError, check_version, find, kind_of, module_name, unique
from prime_rl.envs.protocol import Setup


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Stands in for the hub: a distribution whose name, version and module are on the path, as an installer leaves them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, version: str, source: str = "") -> None:
        module = module_name(name)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{module}.py,,\n")

    return write


@pytest.mark.parametrize(
    ("name", "module"),
    [("a-b", "a_b"), ("o/a-b@1.0", "a_b"), ("o/pkg.a-b@1.0", "pkg.a_b"), ("Wiki-Search", "wiki_search")],
)
def test_module_names(name: str, module: str) -> None:
    """Ids become module names as verifiers makes them."""
    assert module_name(name) == module


@pytest.mark.parametrize("version", ["", "@1.2.0", "@1.2", "@v1.2.0", "@latest"])
def test_installed_version(version: str, install: Callable[..., None]) -> None:
    """The installed version, however it is written, or none in particular."""
    install("hub-env", "1.2.0")
    check_version(f"owner/hub-env{version}")


def test_another_version(install: Callable[..., None]) -> None:
    """The error names both versions and what installs the one that was asked for."""
    install("hub-env", "1.2.0")
    with pytest.raises(LoadError, match=r"asks for version 1\.3\.0, and 1\.2\.0 is installed.*prime env install owner/hub-env@1\.3\.0"):  # fmt: skip
        check_version("owner/hub-env@1.3.0")


def test_version_in_the_worker(install: Callable[..., None]) -> None:
    """A worker, whose Python environment may be another, refuses it too."""
    install("hub-env", "1.2.0", "tasks = [{'prompt': 'a'}]\nasync def rollout(task, chat): pass")
    with pytest.raises(LoadError, match=r"asks for version 2, and 1\.2\.0 is installed"):
        load(Setup("hub-env", "owner/hub-env@2", {}, "model", "auto", 1, "info"))


def test_version_of_what_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that no package brought has no version: asking for one is an error, not ignored."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loose_env.py").touch()
    check_version("loose-env")
    with pytest.raises(LoadError, match="no installed package says which version"):
        check_version("loose-env@1.0")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("tasks = []\nasync def rollout(task, chat): pass", "python"),
        ("from x import tasks, rollout", "python"),
        ("class Environment: pass", "python"),
        ("def load_environment(): pass", "classic"),
        ("from x.y import load_environment\n__all__ = ['load_environment']", "classic"),
        ("import surely_not_there as vf\ndef load_environment(): pass", "classic"),
        ("from x import T\n__all__ = ['T']", "verifiers"),
        ("from x import T\n__all__ = ['T']\ndef load_environment(config): pass", "verifiers"),
        ("from x import T\n__all__: list[str] = ['T']\ntasks = 1\nrollout = 2", "verifiers"),
        ("def broken(", "verifiers"),
        ("", "verifiers"),
    ],
)
def test_kinds(source: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told from the source alone: a package for another verifiers cannot be imported here."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_kind.py").write_text(source)
    assert kind_of("owner/some-kind@1.0") == kind


@given(st.lists(st.sampled_from(["a", "a#2", "a#3", "b", "a#2#2"])))
def test_ids_name_one_task_each(keys: list[str]) -> None:
    """However often a key comes, and also where one looks like a repeated one; a key that comes once stays as it is."""
    ids = unique(keys)
    assert len(set(ids)) == len(keys)
    for key in set(keys):
        assert ids[keys.index(key)] == key


def test_dotted_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> None:
    """A module within a package is found without running the package, and its version is the package's."""
    install("gyms", "1.2.0", "raise RuntimeError('it was imported')")
    (tmp_path / "gyms").mkdir()
    (tmp_path / "gyms.py").rename(tmp_path / "gyms" / "__init__.py")
    (tmp_path / "gyms" / "envs").mkdir()
    (tmp_path / "gyms" / "envs" / "old_gym.py").write_text("def load_environment(): pass")
    assert kind_of("owner/gyms.envs.old-gym@1.2") == "classic"
    assert find("gyms.envs.none") is None
    with pytest.raises(LoadError, match=r"asks for version 2, and 1\.2\.0 is installed"):
        check_version("gyms.envs.old_gym@2")


def test_what_is_not_installed_is_left_to_verifiers() -> None:
    assert kind_of("surely-not-there") == "verifiers"


def test_classic_without_its_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside verifiers 0.4 a classic environment is refused with what it needs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "old_env.py").write_text("import verifiers as vf\ndef load_environment(): return vf.SingleTurnEnv()")
    for adapter in ("auto", "classic"):
        with pytest.raises(LoadError, match="classic verifiers API .*requirements"):
            load(Setup("old-env", "old-env", {}, "model", "auto", 1, "info", adapter=adapter))


def test_v1_beside_an_older_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in one line with the versions that would do, before anything of it is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "new_env.py").write_text("import surely_not_there\n__all__ = ['T']")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.1")
    with pytest.raises(
        LoadError, match=r"'new-env' is written for verifiers\.v1: .* has verifiers 0\.3\.1; .*v1 with 0\.4\.0 alone"
    ):
        load(Setup("new-env", "new-env", {}, "model", "auto", 1, "info"))


@pytest.mark.parametrize("listed", [["a,owner/b@1.0"], ["a", "owner/b@1.0"], ["a,", "owner/b@1.0"]])
def test_ids_on_the_command_line(listed: list[str]) -> None:
    """Lists with commas or blanks; an `@` within an id is not a config file's."""
    config = parse(EvalConfig, ["--environment-ids", *listed], {})
    assert [env.id for env in config.environments] == ["a", "owner/b@1.0"]
    orchestrator = parse(OrchestratorConfig, ["--environment.id", "owner/b@1.0"], {})
    assert orchestrator.environments[0].id == "owner/b@1.0"
