"""Who gets which GPUs: how many servers there are, what the trainer gets, and why a layout cannot be. Pure: the machine is an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_rl.config import InferenceConfig, RLConfig
from prime_rl.errors import UserError

SERVING_SHARE = 0.35  # of a GPU's memory, where it is shared and nothing is said
_BESIDE_GIB = 5.0  # CUDA contexts of two processes, NCCL, and what vLLM takes beyond its share


@dataclass(frozen=True)
class Machine:
    """What the plan depends on besides the configuration. `gpu_gib` is the memory of the smallest GPU, None where nobody can say."""

    gpus: Sequence[str]
    cores: int
    environ: Mapping[str, str]
    gpu_gib: float | None = None


@dataclass(frozen=True)
class Split:
    """How the memory of GPUs that train and serve is split: the server's share, and what the trainer may take, in GiB."""

    serving: float
    training_gib: float


@dataclass(frozen=True)
class Layout:
    """The GPUs of each server that is started (none on a CPU), those of the trainer, and how both share them, if they do."""

    servers: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]
    split: Split | None = None


def lay_out(config: RLConfig, machine: Machine) -> Layout:
    """The servers get the first GPUs, the trainer the next ones, or the same.

    Raises:
        UserError: it cannot be, with the arithmetic.
    """
    _check_servers(config)
    serving = config.inference is not None and _on_cuda(config.inference.device, machine)
    training = config.trainer_gpus if _on_cuda(config.trainer.device, machine) else 0
    counts = _servers(config) if serving else [0] * ((config.inference_servers or 1) if config.inference else 0)
    if not training and config.trainer_gpus > 1:
        raise UserError(
            f"trainer_gpus {config.trainer_gpus}: the trainer does not use GPUs here (see --device); processes on a CPU are --trainer-ranks"
        )
    if config.inference_gpus is not None and config.inference is not None and not serving:
        raise UserError(
            f"inference_gpus {config.inference_gpus}: the servers do not use GPUs here (see --device); several on a CPU are --inference-servers"
        )
    if training and config.trainer_ranks not in (None, training):
        raise UserError(f"trainer_ranks {config.trainer_ranks} must equal trainer_gpus {training}: one GPU a rank")
    if config.share_gpus:
        _check_shared(config, sum(counts), training)
    _check_enough({"inference": sum(counts), "trainer": training}, config.share_gpus, machine)
    left = list(machine.gpus)
    servers = tuple(tuple(left.pop(0) for _ in range(count)) for count in counts)
    if config.share_gpus:
        return Layout(servers, tuple(machine.gpus[:training]), _split(config, machine))
    return Layout(servers, tuple(left[:training]))


def gpus_of_a_server(inference: InferenceConfig) -> int:
    """How many GPUs one server of this configuration uses on this node."""
    replicas = inference.data_parallel_size_local or inference.data_parallel_size
    return inference.tensor_parallel_size * inference.pipeline_parallel_size * replicas


def _servers(config: RLConfig) -> list[int]:
    """GPUs of each server."""
    assert config.inference is not None
    each = gpus_of_a_server(config.inference)
    wanted, total = config.inference_servers, config.inference_gpus
    count = wanted or (1 if total is None else total // each)
    if total is not None and total != count * each:
        parts = [
            f"{name} {size}"
            for name, size in (
                ("tensor_parallel_size", config.inference.tensor_parallel_size),
                ("pipeline_parallel_size", config.inference.pipeline_parallel_size),
                ("data_parallel_size", each // config.inference.tensor_parallel_size // config.inference.pipeline_parallel_size),
            )
            if size > 1
        ]  # fmt: skip
        why = f" ({' x '.join(parts)})" if parts else ""
        asked = f"{wanted} servers use {wanted * each}" if wanted else f"{total} is no multiple of that"
        raise UserError(f"inference_gpus {total} cannot be laid out: a server uses {each}{why}, {asked}")
    return [each] * count


def _check_servers(config: RLConfig) -> None:
    inference, several = config.inference, (config.inference_servers or 1) > 1
    if inference is None:
        if config.inference_servers or config.inference_gpus:
            raise UserError(
                "inference_servers and inference_gpus are for servers that `rl` starts: there is no [inference]"
            )
        return
    if inference.headless:
        raise UserError("inference.headless: another node serves its requests; start it by itself, with `inference`")
    if several and inference.data_parallel_size_local not in (None, inference.data_parallel_size):
        raise UserError(
            "inference_servers: servers whose replicas are spread over nodes (data_parallel_size_local) are started by themselves"
        )


def _check_shared(config: RLConfig, serving: int, training: int) -> None:
    if config.inference is None:
        raise UserError("share_gpus splits GPUs between trainer and server, but there is no [inference]")
    if not serving or not training:
        raise UserError("share_gpus splits GPUs between trainer and server: here both do not use GPUs (see --device)")
    if serving != training:
        raise UserError(f"share_gpus needs as many GPUs that train as serve, not {training} and {serving}")


def _check_enough(wants: Mapping[str, int], shared: bool, machine: Machine) -> None:
    total = max(wants.values()) if shared else sum(wants.values())
    if total <= len(machine.gpus):
        return
    parts = " + ".join(f"{count} for {name}" for name, count in wants.items() if count)
    limit = machine.environ.get("CUDA_VISIBLE_DEVICES")
    source = "no GPU was found" if limit is None else f"CUDA_VISIBLE_DEVICES is '{limit}'"
    have = source if not machine.gpus else f"{len(machine.gpus)} visible ({', '.join(machine.gpus)})"
    hint = "; one GPU can do both: --share-gpus" if not shared and 2 * len(machine.gpus) == total else ""
    raise UserError(
        f"the run needs {total} GPUs ({parts}), but {have}: see --trainer-gpus, --inference-gpus, --device{hint}"
    )


def _split(config: RLConfig, machine: Machine) -> Split:
    assert config.inference is not None
    share, limit = config.inference.gpu_memory_utilization or SERVING_SHARE, config.trainer.model.memory_limit
    total = machine.gpu_gib
    if total is None:
        if limit is None:
            raise UserError(
                "share_gpus: nvidia-smi does not say how much memory there is; give trainer.model.memory_limit"
            )
        return Split(share, limit)
    room = (1 - share) * total - _BESIDE_GIB
    if (limit or 0.0) > room or room <= 0:
        raise UserError(
            f"share_gpus: of {total:.1f} GiB the server takes {share:.0%} = {share * total:.1f} (inference.gpu_memory_utilization), "
            f"contexts {_BESIDE_GIB:.0f}, which leaves {max(room, 0):.1f} for the trainer"
            + (f", not {limit:.1f} (trainer.model.memory_limit)" if limit else "")
        )
    return Split(share, limit or round(room, 1))


def _on_cuda(device: str, machine: Machine) -> bool:
    return device == "cuda" or (device == "auto" and len(machine.gpus) > 0)
