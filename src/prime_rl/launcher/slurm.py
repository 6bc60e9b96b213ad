"""`--slurm.nodes N`: render the batch script that does a command's work as a job of SLURM, and submit it."""

import itertools
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jinja2

from prime_rl.config import EvalConfig, InferenceConfig, RLConfig, SFTConfig, write_toml
from prime_rl.config.inference import InferenceCommandConfig
from prime_rl.config.loader import ConfigError, parse
from prime_rl.errors import UserError, user_errors
from prime_rl.launcher.plan import gpus_of_a_server

TEMPLATE = Path(__file__).with_name("slurm.sh.j2")
SlurmRun = RLConfig | SFTConfig | EvalConfig | InferenceCommandConfig


def submit(config: SlurmRun, command: str) -> None:
    """Write the configs and the script, and hand it to `sbatch`; with `dry_run` print the script instead.
    Raises UserError: the nodes cannot be laid out, a key would be lost, or `sbatch` is missing or refuses."""
    inference = config if isinstance(config, InferenceConfig) else getattr(config, "inference", None)
    if inference is not None and inference.api_key:
        raise UserError("inference.api_key is not written into files of a job: set VLLM_API_KEY before you submit")
    place = Path("configs") / ("slurm-dry-run" if config.dry_run else "slurm")
    base = config.output_dir / place / f"{command}.toml"
    write_toml(config, base)
    runs = variants(config, base) or [config]
    for run in runs:
        write_toml(run, run.output_dir / place / f"{command}.toml")
    text = render(config, command, f'"$RUN_DIR/{place}/{command}.toml"', [run.output_dir for run in runs])
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
    Raises UserError: one is no valid configuration, or two have the same directory. `base` is the written `config`."""
    assert config.slurm is not None
    sweep, made, directories = config.slurm.sweep, list[SlurmRun](), set[Path | None]()
    for values in itertools.product(*sweep.values()) if sweep else ():
        words = [f"{key}={value}" for key, value in zip(sweep, values, strict=True)]
        directory = config.output_dir / ",".join(words).replace("/", "_")
        try:
            options = [f"--{word}" for word in [*words, f"output-dir={directory}"]]
            run = parse(type(config), ["@", str(base), *options], {})
        except ConfigError as error:
            raise UserError(f"slurm.sweep, {', '.join(words)}: {'; '.join(error.problems)}") from None
        if directory in {one.output_dir for one in made}:
            raise UserError(f"slurm.sweep: two combinations of values have the directory {directory}")
        saves = run.ckpt.output_dir if isinstance(run, RLConfig | SFTConfig) and run.ckpt else None
        if saves is not None and saves in directories:
            raise UserError("slurm.sweep: several runs would save in ckpt.output_dir: leave it out")
        directories.add(saves)
        made.append(run.model_copy(update={"slurm": config.slurm}))
    return made


def render(config: SlurmRun, command: str, file: str, runs: Sequence[Path]) -> str:
    """Return the batch script. `file` is the configuration as a word of the shell, in which RUN_DIR is the output
    directory of the run, one of `runs`. Raises UserError: the nodes cannot be laid out, or the template fails.

    On several nodes `rl` starts on each, with its rank. Those that serve fill their GPUs by data parallelism.
    """
    slurm = config.slurm
    assert slurm is not None
    inference = config if isinstance(config, InferenceConfig) else getattr(config, "inference", None)
    devices = [getattr(part, "device", "cpu") for part in (config, inference) if part is not None]
    gpus = 0 if {*devices} == {"cpu"} else slurm.gpus_per_node
    values = {"command": command, "slurm": slurm, "gpus": gpus, "file": file, "runs": [str(run) for run in runs]}
    values |= {"logs": f"{config.output_dir / 'logs'}", "port": inference.server.port if inference else None}
    ckpt = getattr(config, "ckpt", None)
    values["checkpoints"] = f"{ckpt.output_dir / 'checkpoints'}" if ckpt and ckpt.output_dir else ""
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
        placement = {"trainer-gpus": gpus} if gpus else {}
        if inference is not None:
            placement |= {"inference-nodes": served, "inference.data-parallel-size": gpus // size or 1}
        values["placement"] = " ".join(f"--{name} {value}" for name, value in placement.items())
        values |= {"inference_nodes": served, "api_key_var": config.orchestrator.client.api_key_var}
    elif isinstance(config, SFTConfig):
        values["ranks"] = max(1, gpus - (gpus_of_a_server(inference) if inference else 0))
    path = slurm.template or TEMPLATE
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.comment_start_string = "{%#"  # `{#` is of bash: ${#array[@]}
    environment.filters["quote"] = shlex.quote
    with user_errors(f"slurm.template {path}", OSError, jinja2.TemplateError):
        return environment.from_string(path.read_text()).render(values) + "\n"
