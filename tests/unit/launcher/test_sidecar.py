"""What runs beside `sft`: how it is configured, and what it must not inherit."""

from pathlib import Path

import pytest

from prime_rl.config import SFTConfig
from prime_rl.errors import UserError
from prime_rl.launcher import sidecar
from prime_rl.launcher.sidecar import EvalSidecar, eval_config, server_config
from support.configs import from_table

EVAL = {"environment": {"id": "reverse-text"}, "interval": 5}


def config(**settings: object) -> SFTConfig:
    return from_table(SFTConfig, {"output_dir": "out", "model": {"name": "m"}, "eval": EVAL, **settings})


def test_evaluation_and_server_are_of_the_run() -> None:
    """Contract: its model, weights, seed and device; its server is asked, at any port."""
    made = config(seed=7, inference={"server": {"port": 8123}}, device="cpu")
    evaluation, server = eval_config(made), server_config(made)
    assert (evaluation.model.name, evaluation.weights_dir, evaluation.interval) == ("m", Path("out/weights"), 5)
    assert (evaluation.seed, evaluation.follow) == (7, True)
    assert [env.name for env in evaluation.environments] == ["reverse-text"]
    assert evaluation.client.base_urls == ["http://localhost:8123/v1"]
    assert server is not None
    assert (server.model.name, server.weights_root, server.device) == ("m", Path("out/weights"), "cpu")
    assert server_config(config()) is None


def test_what_a_server_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: GPUs behind the trainer's; neither torchrun's variables (an engine would wait) nor `sft`'s."""
    monkeypatch.setattr(sidecar, "visible_gpus", lambda environ: ["0", "1", "2"])
    made = config(inference={"tensor_parallel_size": 2})
    variables = EvalSidecar(made, {"LOCAL_WORLD_SIZE": "1"}).variables
    assert variables["inference"]["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert "CUDA_VISIBLE_DEVICES" not in variables["eval"]
    with pytest.raises(UserError, match=r"needs 2 GPU\(s\) beside the 2 that train, and 3 are visible"):
        EvalSidecar(made, {"LOCAL_WORLD_SIZE": "2"})
    environ = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "1", "PATH": "/bin", "PRIME_DATA__SEQ_LEN": "9"}
    assert EvalSidecar(config(), environ).environ == {"PATH": "/bin"}
