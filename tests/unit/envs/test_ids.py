"""What an id says: the module, the version that must be the installed one, and what the package is written for."""

import pytest

from prime_rl.envs.ids import LoadError, check_version, find, kind_of, module_name, unique
from prime_rl.envs.protocol import Setup
from prime_rl.envs.worker import load


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Stands in for the hub: a distribution whose name, version and module are on the path, as if installed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, version: str, source: str = "") -> None:
        module = module_name(name)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{module}.py,,\n")

    return write


def test_versions(install, tmp_path):
    """The installed version, however it is written, or none in particular. Another one, or one where no package says
    any, is an error that names both and what installs the one asked for; a worker, whose Python environment may be
    another, refuses it too."""
    install("hub-env", "1.2.0", "tasks = [{'prompt': 'a'}]\nasync def rollout(task, chat): pass")
    (tmp_path / "loose_env.py").touch()
    for env_id in ("owner/hub-env", *(f"hub-env@{one}" for one in ("1.2.0", "1.2", "v1.2.0", "latest")), "loose-env"):
        check_version(env_id)
    wrong = r"asks for version 1\.3\.0, and 1\.2\.0 is installed.*prime env install owner/hub-env@1\.3\.0"
    with pytest.raises(LoadError, match=wrong):
        check_version("owner/hub-env@1.3.0")
    with pytest.raises(LoadError, match=wrong):
        load(Setup("hub-env", "owner/hub-env@1.3.0", {}, "model", "auto", "info"))
    with pytest.raises(LoadError, match="no package of its name is installed"):
        check_version("loose-env@1.0")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("tasks = []\nasync def rollout(task, chat): pass", "python"),
        ("from x import tasks, rollout", "python"),
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
def test_kinds(source, kind, tmp_path, monkeypatch):
    """Told from the source alone: a package for another verifiers cannot be imported here."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_kind.py").write_text(source)
    assert kind_of("owner/some-kind@1.0") == kind


def test_ids_name_one_task_each():
    """However often a key comes; where that would give two tasks one id they are refused."""
    assert unique(["a", "b", "a", "a"]) == ["a", "b", "a#2", "a#3"]
    with pytest.raises(LoadError, match="two tasks have the id 'a#2'"):
        unique(["a", "a#2", "a"])


def test_dotted_ids(tmp_path, monkeypatch, install):
    """A module within a package is found without running the package, and its version is the package's."""
    install("dojos", "1.2.0", "raise RuntimeError('it was imported')")
    (tmp_path / "dojos").mkdir()
    (tmp_path / "dojos.py").rename(tmp_path / "dojos" / "__init__.py")
    (tmp_path / "dojos" / "envs").mkdir()
    (tmp_path / "dojos" / "envs" / "old_dojo.py").write_text("def load_environment(): pass")
    assert kind_of("owner/dojos.envs.old-dojo@1.2") == "classic"
    assert find("dojos.envs.none") is None
    assert kind_of("surely-not-there") == "verifiers"  # which says so
    with pytest.raises(LoadError, match=r"asks for version 2, and 1\.2\.0 is installed"):
        check_version("dojos.envs.old_dojo@2")


def test_kinds_that_are_not_for_the_installed_verifiers(tmp_path, monkeypatch):
    """Refused in one line with what would do, before anything of it is imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "old_env.py").write_text("import surely_not_there\ndef load_environment(): pass")
    (tmp_path / "new_env.py").write_text("import surely_not_there\n__all__ = ['T']")
    for adapter in ("auto", "classic"):
        with pytest.raises(LoadError, match="classic verifiers API .*`python`"):
            load(Setup("old-env", "old-env", {}, "model", "auto", "info", adapter=adapter))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.1")
    wrong = r"'new-env': it is written for verifiers\.v1: .* has verifiers 0\.3\.1; .*v1 with 0\.4\.0 alone"
    with pytest.raises(LoadError, match=wrong):
        load(Setup("new-env", "new-env", {}, "model", "auto", "info"))
