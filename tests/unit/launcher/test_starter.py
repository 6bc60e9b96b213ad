"""`rl init` and `rl plan`: a first configuration file, and what a run on it would cost."""

from io import StringIO
from pathlib import Path

import pytest

from prime_rl.config import RLConfig, parse
from prime_rl.config.commands import StarterConfig
from prime_rl.errors import UserError
from prime_rl.launcher import preflight
from prime_rl.launcher.starter import starter_text, write_starter


def starter(file: Path, **given: object) -> StarterConfig:
    return StarterConfig.model_validate({"environment": "reverse-text", "gpus": 0, "file": file, **given})


@pytest.mark.parametrize(("gpus", "layout"), [(0, (1, None)), (1, (1, None)), (2, (1, 1)), (7, (3, 4))])
def test_the_file_is_a_run(tmp_path: Path, gpus: int, layout: tuple[int, int | None]) -> None:
    file = tmp_path / "rl.toml"
    write_starter(starter(file, gpus=gpus))
    config = parse(RLConfig, ["@", str(file)], {})
    assert (config.trainer_gpus, config.inference_gpus) == layout
    assert config.share_gpus == (gpus == 1)
    assert config.orchestrator.environments[0].id == "reverse-text"
    with pytest.raises(UserError, match=r"rl.toml exists: give another --file"):
        write_starter(starter(file))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_answer_is_the_default(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: Ctrl-D at a question is as Enter, and so is to have no terminal; the answers that count are printed."""
    monkeypatch.setattr("sys.stdin", terminal := StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: is_terminal)
    write_starter(starter(tmp_path / "rl.toml", environment=None))
    assert "for --environment reverse-text --gpus 0 --model " in capsys.readouterr().out
    assert 'id = "reverse-text"' in (tmp_path / "rl.toml").read_text()


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: commands can be pasted; with `dry_run` the file is printed, and not written."""
    file = tmp_path / "my run.toml"
    write_starter(starter(file, dry_run=True))
    assert f"# uv run rl @ '{file}'\n" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []
    write_starter(starter(file))
    assert f"uv run rl plan @ '{file}'" in capsys.readouterr().out
    assert 'id = "🙂"' in starter_text("🙂", "m", 0, "rl")


def test_no_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.launcher.starter._answer", lambda *_: "²")
    with pytest.raises(UserError, match="² is no number"):
        write_starter(starter(tmp_path / "rl.toml", gpus=None))


def test_what_is_a_comment_can_be_made_a_setting(tmp_path: Path) -> None:
    text = starter_text("reverse-text", "m", 2, "rl").partition("\n\n")[2]
    assert "# rank = 16" in text
    file = tmp_path / "rl.toml"
    file.write_text(
        "\n".join(line.removeprefix("# ") if "=" in line or "[" in line else line for line in text.split("\n"))
    )
    assert parse(RLConfig, ["@", str(file)], {}).trainer.lora is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment": "revers-text"}, "did you mean reverse-text"),
        ({"model": "./nowhere"}, "nowhere"),
        ({"file": "nowhere/rl.toml"}, "^cannot write nowhere/rl.toml: .*No such file"),
    ],
)
def test_a_wrong_answer_writes_nothing(tmp_path: Path, given: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_starter(starter(**{"file": tmp_path / "rl.toml", **given}))
    assert list(tmp_path.iterdir()) == []


def test_an_estimate_of_a_step() -> None:
    """By hand: 624,320 parameters, 2 samples of 100 tokens, of which 10 are sampled in 5 ms each."""
    words = [
        "--model.name",
        "assets/tiny-reverse",
        "--orchestrator.environment.id",
        "x",
        "--orchestrator.seq-len",
        "100",
    ]
    words += ["--orchestrator.batch-size", "2", "--orchestrator.rollouts-per-example", "2", "--max-steps", "36"]
    config = parse(RLConfig, [*words, "--orchestrator.sampling.max-tokens", "10"], {})
    text = preflight.step_estimate(config, servers=1, trainers=1)
    assert "2 samples, at most 200 tokens, takes about 1.9e-06 s to train and 0.05 to sample" in text
    assert "4,000 tokens/s, 2.8e-05 GPU-hours, 36 steps 0.001" in text
    assert preflight.step_estimate(config, servers=0, trainers=0) == ""
