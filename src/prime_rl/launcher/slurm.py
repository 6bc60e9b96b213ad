"""`rl --slurm.nodes N`: write a batch script that makes the run on the nodes of one SLURM job, and submit it."""

import shlex
import subprocess
from pathlib import Path

from prime_rl.config import RLConfig, write_toml
from prime_rl.config.base import BaseConfig
from prime_rl.errors import UserError
from prime_rl.launcher.plan import config_path

_RENDEZVOUS_PORT = 29500

_HEAD = """\
#!/usr/bin/env bash
#SBATCH --job-name=prime-rl
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --output={logs}/slurm-%j.log
{more}set -euo pipefail
cd {cwd}
"""

# Servers run until trainer and orchestrator have ended well, or a step has failed: the trap ends what is left.
_SEVERAL_NODES = """\
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
servers=("${{nodes[@]:0:{inference_nodes}}}")
trainers=("${{nodes[@]:{inference_nodes}}}")
comma() {{ local IFS=,; echo "$*"; }}
export VLLM_API_KEY="${{VLLM_API_KEY:-$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n')}}"
export {key_variable}="$VLLM_API_KEY"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{serve}srun --nodes={trainer_nodes} --ntasks={trainer_nodes} --nodelist="$(comma "${{trainers[@]}}")" \\
  --kill-on-bad-exit=1 uv run torchrun --nnodes={trainer_nodes} --nproc-per-node={gpus} --rdzv-backend=c10d \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${{trainers[0]}}:{port}" -m prime_rl.trainer.rl.train @ {trainer}{flags} &
srun --nodes=1 --ntasks=1 --overlap --gpus=0 --nodelist="${{trainers[0]}}" \\
  uv run orchestrator @ {orchestrator}{flags}{address} &
jobs=2
while ((jobs)); do
  wait -n -p ended
  if [[ " ${{served:-}} " == *" $ended "* ]]; then echo "error: the inference servers have ended" >&2; exit 1; fi
  jobs=$((jobs - 1))
done
"""

_SERVE = """\
srun --nodes={inference_nodes} --ntasks={inference_nodes} --nodelist="$(comma "${{servers[@]}}")" \\
  --kill-on-bad-exit=1 bash -c 'exec uv run inference @ {inference} --server.host 0.0.0.0 --replica "$SLURM_PROCID"' &
served=$!
"""


def submit(config: RLConfig) -> int:
    """Write the configs and the script, and hand it to `sbatch`; with `dry_run` print the script instead.
    Raises UserError: the nodes cannot be laid out, or `sbatch` is missing or refuses the script."""
    text, sections = render(config)
    for path, section in sections.items():
        write_toml(section, path)
    if config.dry_run:
        print(text, end="")
        return 0
    script = config.output_dir / "configs" / "rl.sbatch"
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
    print(done.stdout.strip())
    return 0


def render(config: RLConfig) -> tuple[str, dict[Path, BaseConfig]]:
    """Return the batch script of a run, and the configuration files that it names.
    Raises UserError: the nodes cannot be laid out.

    On one node the job is `rl` itself. On several the first `slurm.inference_nodes` serve, one server a node that fills
    its GPUs by data parallelism; the others train, and the orchestrator runs beside rank 0. Nothing is restarted there:
    requeue the job with `--recover`.
    """
    slurm, inference = config.slurm, config.inference
    assert slurm is not None
    sections: dict[str, BaseConfig] = {"rl": config}
    values = {"cwd": shlex.quote(str(Path.cwd())), "port": _RENDEZVOUS_PORT, "gpus": slurm.gpus_per_node}
    wishes = {name: getattr(slurm, name) for name in ("partition", "account", "time")}
    more = "".join(f"#SBATCH --{name}={value}\n" for name, value in wishes.items() if value)
    head = _HEAD.format(nodes=slurm.nodes, logs=(config.output_dir / "logs").absolute(), more=more, **values)
    flags = "".join(f" --{name}" for name in ("clean", "recover") if getattr(config, name))
    if slurm.nodes == 1:
        path = config_path(config, "rl")
        return f"{head}exec uv run rl @ {shlex.quote(str(path))}{flags}\n", {path: config}
    sections |= {"trainer": config.trainer, "orchestrator": config.orchestrator}
    inference_nodes = 0 if inference is None else slurm.inference_nodes
    trainer_nodes = slurm.nodes - inference_nodes
    if trainer_nodes < 1:
        raise UserError(f"slurm.inference_nodes {inference_nodes} leaves none of {slurm.nodes} nodes to train on")
    serve = address = ""
    if inference is not None:
        size = inference.tensor_parallel_size * inference.pipeline_parallel_size
        if slurm.gpus_per_node % size:
            raise UserError(f"slurm.gpus_per_node {slurm.gpus_per_node} is no multiple of the {size} GPUs of a replica")
        parallel = {"data_parallel_size": slurm.gpus_per_node // size, "api_key": None}
        weights_root = inference.weights_root or config.output_dir / "weights"
        sections["inference"] = inference.model_copy(update={**parallel, "weights_root": weights_root})
        served = shlex.quote(str(config_path(config, "inference")))
        serve = _SERVE.format(inference_nodes=inference_nodes, inference=served)
        address = f' --client.base-url $(printf "http://%s:{inference.server.port} " "${{servers[@]}}")'
    paths = {name: config_path(config, name) for name in sections}
    values |= {"inference_nodes": inference_nodes, "trainer_nodes": trainer_nodes}
    values |= {"key_variable": config.orchestrator.client.api_key_var, "serve": serve, "address": address}
    values |= {name: shlex.quote(str(paths[name])) for name in ("trainer", "orchestrator")}
    script = _SEVERAL_NODES.format(flags=flags, **values)
    return head + script, {paths[name]: section for name, section in sections.items()}
