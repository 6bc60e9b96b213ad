"""A run's own resolved configuration is a good start for the next one; mistakes are answered as the docs show."""

import runpy
from pathlib import Path

from prime_rl.config import RLConfig, parse, write_toml

REPOSITORY = Path(__file__).resolve().parents[3]
GIVEN = ["--orchestrator.environment.id", "reverse-text", "--inference.server.port", "8123", "--model.name", "some/model", "--max-steps", "30",
         "--seed", "4", "--ckpt.interval", "5", "--seq-len", "512"]  # fmt: skip


def test_a_shared_setting_given_beside_the_resolved_file_reaches_every_section(tmp_path: Path) -> None:
    """`rl @ outputs/configs/rl.toml --max-steps 60`: shared values stand in the file once, so that one option changes them all."""
    first = parse(RLConfig, GIVEN, {})
    file = tmp_path / "rl.toml"
    write_toml(first, file)
    assert parse(RLConfig, ["@", str(file)], {}) == first
    options = [
        "--max-steps",
        "60",
        "--output-dir",
        "elsewhere",
        "--ckpt.interval",
        "7",
        "--inference.server.port",
        "8124",
    ]
    longer = parse(RLConfig, ["@", str(file), *options], {})
    assert longer.trainer.max_steps == longer.orchestrator.max_steps == 60
    assert {longer.trainer.output_dir, longer.orchestrator.output_dir} == {Path("elsewhere")}
    assert longer.trainer.ckpt is not None
    assert longer.trainer.ckpt.interval == 7
    assert longer.orchestrator.client.base_url == "http://localhost:8124/v1"
    assert longer.trainer.seed == 4


def test_the_page_of_mistakes_is_what_is_printed() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "config_errors.py"))
    assert (REPOSITORY / "docs" / "reference" / "config-errors.md").read_text() == script["page"]()
