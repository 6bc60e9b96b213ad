"""`rl init`: write a first configuration file, with the meaning of each option beside it."""

import json
import math
import os
import shlex
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from prime_rl.config import InferenceConfig, RLConfig
from prime_rl.config.base import find
from prime_rl.config.commands import StarterConfig
from prime_rl.envs import ids
from prime_rl.errors import UserError, say, user_errors
from prime_rl.inference.checks import check_model, visible_gpus
from prime_rl.launcher.plan import HostResources
from prime_rl.launcher.preflight import check_environment

_STATES = 8  # times the size of 16-bit weights: float32 masters and gradients, and moments of AdamW
_TINY, _SMALL = "assets/tiny-reverse", "Qwen/Qwen3-0.6B"  # the first: already partly trained on reverse-text


def write_starter(config: StarterConfig) -> None:
    """Ask for what is missing, write the file (print it: `dry_run`), and say what comes next.
    Raises UserError: the file exists, or an answer is invalid."""
    if config.file.exists():
        raise UserError(f"{config.file} exists: give another --file")
    environment = config.environment or _answer(f"Environment ({', '.join(ids.installed())})", "reverse-text")
    gpus = _answer("GPUs (0: none)", f"{len(visible_gpus(os.environ))}") if config.gpus is None else f"{config.gpus}"
    if not (gpus.isascii() and gpus.isdecimal()):
        raise UserError(f"{gpus} is no number of GPUs")
    tiny = environment == "reverse-text" and gpus == "0" and Path(_TINY).is_dir()
    model = config.model or _answer("Model (hub name or directory)", _TINY if tiny else _SMALL)
    word = shlex.quote(str(config.file))
    text = starter_text(environment, model, int(gpus), f"uv run rl @ {word}")
    with user_errors("an answer is no text of TOML", ValueError):
        run = RLConfig.from_toml(**tomllib.loads(text))
    check_environment(run.orchestrator.all_environments()[0])
    check_model(model)
    if config.dry_run:
        return say(text.rstrip())
    with user_errors(f"cannot write {config.file}", OSError, UnicodeError):
        config.file.write_text(text, encoding="utf-8")
    say(f"wrote {config.file} for --environment {environment} --gpus {gpus} --model {shlex.quote(model)}")
    say(f"uv run rl plan @ {word}    shows what it starts, and what it needs")
    say(f"uv run rl @ {word}         starts it")


def _answer(question: str, default: str) -> str:
    with suppress(EOFError):
        return (sys.stdin.isatty() and input(f"{question} [{default}]: ").strip()) or default  # bounded: by the user
    return default


def starter_text(environment: str, model: str, gpus: int, command: str) -> str:
    """Return a file for a run on so many GPUs. What many users change next is in it as a comment."""
    cpu, inference_gpus = gpus == 0, gpus - gpus // 2  # as many GPUs serve as train, or one more
    host = HostResources.of_this_host(InferenceConfig.model_validate({"model": {"name": model}}))
    states, memory = (host.weights_gib or 0.0) * _STATES, (host.gpu_gib or math.inf) * max(gpus // 2, 1)
    adapters = not cpu and states > memory
    layout: dict[str, Any] = {"device": "cpu"} if cpu else {"share_gpus": True}
    if gpus > 1:
        layout = {"inference_gpus": inference_gpus, "trainer_gpus": gpus - inference_gpus}
    reply, sample = (128, 512) if cpu else (1024, 2048)
    lora, rate = {"trainer.lora.rank": 16}, 2e-4 if cpu else 1e-5 if adapters else 1e-6
    settings: dict[str, Any] = {
        "max_steps": 100, "async_level": 1, **layout, "model.name": model,
        "trainer.seq_len": sample * (1 if cpu else 8), "trainer.optim.lr": rate,
        **(lora if adapters else {}),
        "orchestrator.batch_size": 64 if cpu else 128, "orchestrator.rollouts_per_example": 8,
        "orchestrator.seq_len": sample, "orchestrator.sampling.max_tokens": reply,
        "orchestrator.environment.id": environment,
        "orchestrator.eval.interval": 20, "orchestrator.eval.num_examples": 64,
        "inference.max_model_len": sample, **({"inference.fork_engine": True} if cpu else {}),
        "ckpt.interval": 50,
    }  # fmt: skip
    commented_settings = {"wandb.project": "prime-rl", **({} if adapters else lora)}
    lines, section = [f"# {command}", "# All options: uv run rl --help=all"], ""
    for name, value in [*settings.items(), *commented_settings.items()]:
        table, _, key = name.rpartition(".")
        mark = "# " if name in commented_settings else ""
        if table != section or mark:
            lines += ["", f"{mark}[{table}]"]
            section = table
        setting = find(RLConfig, tuple(name.split(".")))
        assert setting is not None
        lines.append(
            f"{mark}{key} = {json.dumps(value, ensure_ascii=False)}".ljust(40) + f" # {setting.field.description}"
        )
    return "\n".join([*lines, ""])
