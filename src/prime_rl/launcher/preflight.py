"""Refuse what can be known to fail before anything is started. Cheap: imports no torch, no vLLM, no environment."""

import difflib
import importlib.util
import math
import os
import shutil
from pathlib import Path

from prime_rl.config import RLConfig
from prime_rl.config.shared import ClientConfig, EnvConfig
from prime_rl.config.trainer import LoRAConfig, TrainingConfig
from prime_rl.envs import ids
from prime_rl.errors import UserError
from prime_rl.importing import look_here
from prime_rl.inference import checks
from prime_rl.transport.commit import MANIFEST
from prime_rl.transport.weights import hash_directory, read_adapter_config, version_hash, weights_manifest

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


def check_lora(config: LoRAConfig | None, model: str, *, resumes: bool = False) -> None:
    """Raise UserError for layers that the model has not, and for an adapter to start from that does not fit.

    `resumes`: the run may go on from a state of its own, for which nobody reads that adapter.
    """
    if config is None:
        return
    directory, shapes = checks.model_directory(model), checks.tensor_shapes(model)
    if shapes and config.experts and not any(".experts." in name for name in shapes):
        raise UserError(f"lora.experts: model {model} has no experts")
    targets = [] if config.target_modules == "all-linear" else config.target_modules
    layers = checks.adapted_modules(model, experts=False)
    modules = sorted({name.split(".")[-2] for name in shapes} | {"lm_head"})
    for option, names, known in (
        ("target_modules", targets, layers if directory is not None else []),
        ("modules_to_save", config.modules_to_save, modules if shapes else []),
    ):
        for name in names if known else ():
            if name.rpartition(".")[2] not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise UserError(f"lora.{option}: {model} has no layer {name}; {hint}")
    if resumes or (adapter := config.adapter) is None:
        return
    described = read_adapter_config(adapter)
    for option, key in (("rank", "r"), ("alpha", "lora_alpha")):
        if described.get(key) != (ours := getattr(config, option)):
            differs = f"{adapter} has {option} {described.get(key)}, not {ours:g}"
            raise UserError(f"lora.adapter: {differs}: give lora.{option}")
    ours = weights_manifest(adapter).adapter if (adapter / MANIFEST).is_file() else None
    if ours is not None and directory is not None and ours.base != version_hash(hash_directory(directory)):
        raise UserError(f"lora.adapter: {adapter} is an adapter of another base model than {model}")


def state_memory(config: TrainingConfig, ranks: int | None = None, slots: int = 1) -> str:
    """Say what a rank's weights, gradients and optimizer states take; nothing of a model that is not on this host.
    `ranks` (None: those that torchrun starts) share them, or each group of `model.dp_replicate`.

    Bytes of a trained parameter: master 4, gradient 4, optimizer 8 (Muon: 4), and in bfloat16 a gathered copy, layer by
    layer or whole, which is not counted; of a frozen one those of the type that is computed in.
    """
    shapes = checks.tensor_shapes(config.model.name)
    everything = trained = sum(math.prod(shape) for shape in shapes.values())
    states, frozen = 0 if config.optim.offload else 4 if config.optim.type == "muon" else 8, 0
    if (lora := config.lora) is not None:
        all_linear = lora.target_modules == "all-linear"
        layers = checks.adapted_modules(config.model.name, experts=False) if all_linear else lora.target_modules
        adapted = {name.rpartition(".")[2] for name in layers}
        thin = sum(
            lora.rank * sum(shape)
            for name, shape in shapes.items()
            if len(shape) == 2 and (lora.experts if ".experts." in name else name.split(".")[-2] in adapted)
        )
        whole = {name.rpartition(".")[2] for name in lora.modules_to_save}
        trained = slots * thin + sum(math.prod(s) for name, s in shapes.items() if name.split(".")[-2] in whole)
        exact = config.model.dtype == "float32" or (config.model.dtype == "auto" and config.device == "cpu")
        frozen = everything * (4 if exact else 2)
    shards = (ranks or int(os.environ.get("WORLD_SIZE", 1))) // config.model.dp_replicate
    size = (frozen + trained * (8 + states)) / 2**30 / max(shards, 1)
    if not shapes:
        return ""
    of = f"{trained:,} trained{'' if lora is None else f' and {everything:,} frozen'} parameters"
    return f"weights, gradients and optimizer states need {size:.3g} GiB per rank ({of}); activations are extra"


def step_estimate(config: RLConfig, servers: int, trainers: int) -> str:
    """Say what a step takes at most on H100s, of which `servers` serve and `trainers` train; nothing of a model that is
    not on this host, nor on a CPU.

    6 FLOP a parameter and token, of a frozen base 4, at 40 % of the peak. A server's step samples a token of each
    reply, reads the weights at 60 % of the bandwidth, and takes 5 ms at least. A token uses some of the experts.
    """
    directory, orchestrator = checks.model_directory(config.model.name), config.orchestrator
    if directory is None or not (shapes := checks.tensor_shapes(config.model.name)) or not servers or not trainers:
        return ""
    settings = checks.read_json(directory / "config.json")
    experts = next(
        (settings[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in settings), 1
    )
    used = settings.get("num_experts_per_tok", experts) / experts
    parameters = sum(math.prod(shape) * (used if ".experts." in name else 1) for name, shape in shapes.items())
    samples, reply = orchestrator.batch_size, orchestrator.sampling.max_tokens or orchestrator.seq_len
    tokens = samples * orchestrator.seq_len
    training = (6 if config.trainer.lora is None else 4) * parameters * tokens / (0.4 * 989e12 * trainers)
    sampling = max(2 * parameters / (0.6 * 3.35e12), 0.005) * reply / servers
    step = max(training, sampling) if config.async_level else training + sampling
    gpus = servers if config.share_gpus else servers + trainers
    run = f", {config.max_steps} steps {step * gpus * config.max_steps / 3600:.2g}" if config.max_steps else ""
    return (
        f"a step of {samples} samples, at most {tokens:,} tokens, takes about {training:.2g} s to train and "
        f"{sampling:.2g} to sample on H100s: {tokens / step:,.0f} tokens/s, {step * gpus / 3600:.2g} GPU-hours{run} "
        "(estimated: docs/guides/nodes.md)"
    )


def check_dataset(name: str) -> None:
    """Raises UserError for a local path that does not exist. Hub names are looked up when the data is loaded."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(_DATA_SUFFIXES)
    if is_path and not Path(name).expanduser().exists():
        raise UserError(f"data.name: {name} does not exist")


def check_environment(environment: EnvConfig) -> None:
    """Raises UserError when an environment or its Python is not installed, or not in the version that its id names."""
    if environment.python is not None:  # installed elsewhere: its worker reports it
        if shutil.which(environment.python) is None:
            raise UserError(f"environment {environment.name}: no Python interpreter at {environment.python}")
        return
    look_here()
    module = ids.module_name(environment.id)
    package = importlib.util.find_spec("verifiers")  # to import it takes seconds
    roots = [] if package is None else package.submodule_search_locations or []
    built_in = {path.stem for root in roots for path in Path(root, "v1", "tasksets").glob("*")}
    if ids.find(environment.id) is None and module not in built_in:
        near = difflib.get_close_matches(environment.id, ids.installed(), 1)
        raise UserError(
            f"environment {environment.id} is not installed (no module {module}, nor a {module}.py here): "
            f"`uv run prime env install {environment.id}`, `uv add` its package, or name a Python that has it in "
            "`python`" + (f"; did you mean {near[0]}?" if near else "")
        )
    kind = ids.kind_of(environment.id) if environment.adapter == "auto" else environment.adapter
    if kind == "classic":
        raise UserError(f"environment {environment.id}: {ids.CLASSIC}")
    ids.check_version(environment.id)


def check_key(client: ClientConfig) -> None:
    """Raises UserError when the variable that was named for the key is not set."""
    default = ClientConfig.model_fields["api_key_var"].default
    if client.api_key_var != default and not os.environ.get(client.api_key_var):
        raise UserError(f"client.api_key_var: the variable {client.api_key_var} is not set")
