"""Render the batch scripts beside this file, which name files of examples/: `python scripts/slurm/render.py`."""

from pathlib import Path

from prime_rl.config import BaseConfig, RLConfig, SFTConfig, parse
from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.launcher.slurm import render

EXAMPLE = "examples/reverse_text"
PARTS = {"trainer": "train", "orchestrator": "orch", "inference": "infer"}
KINDS: dict[str, type[BaseConfig]] = {"rl": RLConfig, "sft": SFTConfig, "inference": InferenceCommandConfig}


def rendered() -> dict[str, str]:
    """Return the text of each script by its name."""
    files = {"rl": f"{EXAMPLE}/rl.toml", "sft": f"{EXAMPLE}/sft.toml", "inference": f"{EXAMPLE}/rl/infer.toml"}
    parts = {name: f"{EXAMPLE}/rl/{part}.toml" for name, part in PARTS.items()}
    texts = {}
    for command, kind in KINDS.items():
        for nodes, gpus in ((1, 2 if command == "rl" else 1), (2, 8)):
            several = command == "rl" and nodes > 1
            named = parts if several else {command: files[command]}
            words = [word for name, file in named.items() for word in ([f"--{name}"] if several else []) + ["@", file]]
            options = [f"--slurm.nodes={nodes}", f"--slurm.gpus-per-node={gpus}", "--slurm.time=12:00:00"]
            config = parse(kind, [*words, *options], {})
            name = f"{command}_{'one_node' if nodes == 1 else 'nodes'}.sbatch"
            texts[name] = render(config, command, named, [config.output_dir])  # type: ignore[arg-type]
    return texts


if __name__ == "__main__":
    for name, text in rendered().items():
        Path(__file__).with_name(name).write_text(text)
