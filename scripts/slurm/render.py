"""Render the batch scripts beside this file, which name files of examples/: `python scripts/slurm/render.py`."""

from pathlib import Path

from prime_rl.config import BaseConfig, RLConfig, SFTConfig, parse
from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.launcher.slurm import render

EXAMPLE = "examples/reverse_text"
KINDS: dict[str, type[BaseConfig]] = {"rl": RLConfig, "sft": SFTConfig, "inference": InferenceCommandConfig}


def rendered() -> dict[str, str]:
    """Return the text of each script by its name."""
    files = {"rl": f"{EXAMPLE}/rl.toml", "sft": f"{EXAMPLE}/sft.toml", "inference": f"{EXAMPLE}/rl/infer.toml"}
    texts = {}
    for command, kind in KINDS.items():
        for nodes, gpus in ((1, 2 if command == "rl" else 1), (2, 8)):
            options = [f"--slurm.nodes={nodes}", f"--slurm.gpus-per-node={gpus}", "--slurm.time=12:00:00"]
            config = parse(kind, ["@", files[command], *options], {})
            name = f"{command}_{'one_node' if nodes == 1 else 'nodes'}.sbatch"
            texts[name] = render(config, command, files[command], [config.output_dir])  # type: ignore[arg-type]
    return texts


if __name__ == "__main__":
    for name, text in rendered().items():
        Path(__file__).with_name(name).write_text(text)
