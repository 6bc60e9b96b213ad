"""`--slurm.nodes N`: render the batch script that does a command's work as a job of SLURM, and submit it."""

import itertools
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from prime_rl.config import EvalConfig, InferenceConfig, RLConfig, SFTConfig, write_toml
from prime_rl.config.base import BaseConfig
from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.config.loader import ConfigError, parse
from prime_rl.errors import UserError
from prime_rl.launcher.plan import gpus_of_a_server

TEMPLATE = Path(__file__).with_name("slurm.sh.j2")
SlurmRun = RLConfig | SFTConfig | EvalConfig | InferenceCommandConfig


def submit(config: SlurmRun, command: str) -> None:
    """Write the configs and the script, and hand it to `sbatch`; with `dry_run` print the script instead.
    Raises UserError: the nodes cannot be laid out, or `sbatch` is missing or refuses the script."""
    place = Path("configs") / ("slurm-dry-run" if config.dry_run else "slurm")
    base = config.output_dir / place / f"{command}.toml"
    write_toml(config, base)
    runs = variants(config, base) or [config]
    sections = [_sections(run, command) for run in runs]
    for run, parts in zip(runs, sections, strict=True):
        for name, section in parts.items():
            write_toml(section, run.output_dir / place / f"{name}.toml")
    files = {name: f'"$RUN_DIR/{place}/{name}.toml"' for name in sections[0]}
    text = render(config, command, files, [run.output_dir for run in runs])
    if config.dry_run:
        return print(text, end="")
    script = base.with_suffix(".sbatch")
    (config.output_dir / "logs").mkdir(parents=True, exist_ok=True)  # SLURM does not make it
    script.write_text(text)
    try:
        done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"there is no sbatch here: submit {script} on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not answer within 60 s: submit {script} again") from None
    if done.returncode:
        raise UserError(f"sbatch refused {script}: {done.stderr.strip()}")
    print(f"{done.stdout.strip()} ({script})")


def variants(config: SlurmRun, base: Path) -> list[SlurmRun]:
    """Return the runs of `slurm.sweep`, each in a directory of its own that is named after its values; none without.
    Raises UserError: one of them is no valid configuration. `base` is the written `config`."""
    assert config.slurm is not None
    sweep, made = config.slurm.sweep, list[SlurmRun]()
    for values in itertools.product(*sweep.values()) if sweep else ():
        words = [f"{key}={value}" for key, value in zip(sweep, values, strict=True)]
        directory = config.output_dir / ",".join(words).replace("/", "_")
        try:
            options = [f"--{word}" for word in [*words, f"output-dir={directory}"]]
            run = parse(type(config), ["@", str(base), *options], {})
        except ConfigError as error:
            raise UserError(f"slurm.sweep, {', '.join(words)}: {'; '.join(error.problems)}") from None
        made.append(run.model_copy(update={"slurm": config.slurm}))
    return made


def _sections(config: SlurmRun, command: str) -> dict[str, BaseConfig]:
    """Return the configuration of each process that the script starts, by name."""
    assert config.slurm is not None
    if not isinstance(config, RLConfig) or config.slurm.nodes == 1:
        return {command: config}
    parts = {"trainer": config.trainer, "orchestrator": config.orchestrator, "inference": config.inference}
    return {name: section for name, section in parts.items() if section is not None}


def render(config: SlurmRun, command: str, files: Mapping[str, str], runs: Sequence[Path]) -> str:
    """Return the batch script. `files` are the processes' configurations as words of the shell, in which RUN_DIR is the
    output directory of the run, one of `runs`. Raises UserError: the nodes cannot be laid out, or the template fails.

    On one node the job of `rl` is the command itself. On several the first `slurm.inference_nodes` serve, one server a
    node that fills its GPUs by data parallelism; the others train, and the orchestrator runs beside rank 0.
    """
    slurm = config.slurm
    assert slurm is not None
    inference = config if isinstance(config, InferenceConfig) else getattr(config, "inference", None)
    devices = [getattr(part, "device", "cpu") for part in (config, inference) if part is not None]
    gpus = 0 if {*devices} == {"cpu"} else slurm.gpus_per_node
    values = {"command": command, "slurm": slurm, "gpus": gpus, "files": files, "runs": [str(run) for run in runs]}
    values |= {"logs": config.output_dir / "logs", "port": inference.server.port if inference else None}
    values["flags"] = " ".join(f"--{name}" for name in ("clean", "recover") if getattr(config, name, False))
    resumes = isinstance(config, RLConfig) and config.ckpt is not None and config.ckpt.resume_step is not None
    values["flags_again"] = "--recover --ckpt.resume-step None" if resumes else "--recover"
    if isinstance(config, RLConfig) and slurm.nodes > 1:
        served = 0 if inference is None else slurm.inference_nodes
        if slurm.nodes - served < 1:
            raise UserError(f"slurm.inference_nodes {served} leaves none of {slurm.nodes} nodes to train on")
        size = 1 if inference is None else inference.tensor_parallel_size * inference.pipeline_parallel_size
        if gpus % size:
            raise UserError(f"slurm.gpus_per_node {gpus} is no multiple of the {size} GPUs of a replica")
        values |= {"inference_nodes": served, "trainer_nodes": slurm.nodes - served}
        values |= {"ranks": gpus or config.trainer_ranks or 1, "data_parallel_size": gpus // size or 1}
        values |= {"weights_root": inference is not None and inference.weights_root is None}
        values |= {"recovery_interval": config.trainer.recovery_interval or config.recovery_interval}
        values |= {"api_key_var": config.orchestrator.client.api_key_var}
    elif isinstance(config, SFTConfig):
        values["ranks"] = max(1, gpus - (gpus_of_a_server(inference) if inference else 0))
    path = slurm.template or TEMPLATE
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.comment_start_string = "{%#"  # `{#` is of bash: ${#array[@]}
    environment.filters["quote"] = shlex.quote
    try:
        return environment.from_string(path.read_text()).render(values) + "\n"
    except (OSError, jinja2.TemplateError) as error:
        raise UserError(f"slurm.template {path}: {error}") from error
