"""Settings of the inference server."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from prime_rl.config.base import BaseConfig, Checks, Section, conflict, option
from prime_rl.config.shared import Device, ModelConfig, SlurmConfig, TenantsConfig, host_in_url

Port = Annotated[int, Field(ge=1, le=65535)]

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
SERVER = "inference"  # the first of a run


def server_name(replica: int) -> str:
    """Of the first server of a run "inference", of the others "inference-1" and so on."""
    return f"{SERVER}-{replica}" if replica else SERVER


class InferenceModel(ModelConfig):
    """The model and how it is served."""

    dtype: str = option("auto", "Type that is computed in (auto: that of the model's own files).")
    chat_template: str | None = option(None, "Chat template, or a file with one (None: the tokenizer's).")


class ServerConfig(Section):
    """Where the server listens."""

    host: str | None = option(None, "Address (None: loopback, or all addresses when there is an API key).")
    port: Port = option(8000, "Port (where none is given, `rl` and `sft` take the next one that is free).")

    @property
    def url(self) -> str:
        """The address for clients on this host, without /v1."""
        return f"http://{host_in_url(self.host or 'localhost')}:{self.port}"


class AdaptersConfig(Section):
    """The adapter (LoRA) that the server holds beside the model, or of tenants one each."""

    max_rank: int = option(16, "Largest rank of an adapter.", ge=1, le=ADAPTER_RANKS[-1])
    tenants: TenantsConfig | None = option(None, "Whose adapters are served (None: those of one run).")
    resident: PositiveInt | None = option(None, "Most tenants' adapters in the engine, by last use (None: all).")


class InferenceConfig(BaseConfig):
    """The inference server: vLLM's OpenAI server plus the weight routes."""

    model: InferenceModel = option(InferenceModel, "The model and how it is served.")
    server: ServerConfig = option(ServerConfig, "Where the server listens.")
    api_key: str | None = option(None, "Key that requests must carry; better given as VLLM_API_KEY.", mark="secret")
    weights_root: Path | None = option(None, "Only directory that weights are loaded from (None: any).")
    stage_on_device: bool = option(True, "Stage new weights in the GPU's memory where they fit (set by `rl`).")
    device: Device = option("auto", "Where to serve (auto: CUDA where there is a GPU).")
    max_model_len: PositiveInt | None = option(None, "Most tokens of prompt and reply (None: the model's own).")
    gpu_memory_utilization: float | None = option(
        None, "Share of a GPU's memory for its servers (None: room for a staged version; 0.4 if shared).", gt=0, le=1
    )
    kv_cache_gib: PositiveFloat | None = option(
        None, "KV cache in GiB per GPU (None: by gpu_memory_utilization), or on CPU, rounded up (None: 1)."
    )
    tensor_parallel_size: PositiveInt = option(1, "GPUs that share one layer.")
    pipeline_parallel_size: PositiveInt = option(1, "Groups of GPUs that share the layers among them.")
    data_parallel_size: PositiveInt = option(1, "Replicas of the model, over all nodes.")
    data_parallel_size_local: PositiveInt | None = option(None, "Replicas on this node (None: all).")
    data_parallel_address: str | None = option(None, "Address of the node that leads the replicas.")
    data_parallel_rpc_port: Port | None = option(None, "Port of the node that leads (None: vLLM's choice).")
    data_parallel_start_rank: int | None = option(None, "Rank of the first replica on this node.", ge=0)
    headless: bool = option(False, "Run engines only: another node serves the requests.")
    enforce_eager: bool | None = option(None, "Neither compile nor capture graphs (None: on CPU only).")
    quantization: str | None = option(None, "Quantization that vLLM applies to the weights, updates included (fp8).")
    lora: AdaptersConfig | None = option(None, "Serve adapters (None: full weights alone; `rl` and `sft` set it).")
    router_replay: bool = option(False, "Return the experts chosen for each token (set by `rl`).")
    replica: NonNegativeInt = option(0, "Number of this server in its run, for log and status (set by `rl`).")
    servers_on_host: PositiveInt = option(1, "Servers that stage weights in this host's memory (set by `rl`).")
    fork_engine: bool = option(False, "On CPU fork the engine's process rather than start it anew: ready sooner.")
    vllm: dict[str, Any] = option(dict, "Any other option of vLLM's server.")

    @property
    def process(self) -> str:
        """The server's name among the processes of a run."""
        return server_name(self.replica)

    def checks(self) -> Checks:
        """Refuse nodes other than one that serves and headless ones that it leads: vLLM would misread or await them."""
        size, local, start = self.data_parallel_size, self.data_parallel_size_local, self.data_parallel_start_rank
        some = f"<data_parallel_size_local> {local} of <data_parallel_size> {size}"
        yield conflict(local is not None and local > size, f"{some}: a node has more replicas than there are")
        spread = local is not None and local < size and self.data_parallel_address is None
        yield conflict(spread, f"{some}: all nodes need data_parallel_address, that of the one that serves")
        first = "<data_parallel_start_rank> is for headless nodes: the node that serves has the first replicas"
        yield conflict(not self.headless and start is not None, first)
        if self.headless and "nnodes" not in self.vllm:  # several nodes may also share one replica, by options of vLLM
            yield conflict(size == 1, "<headless> runs engines for another node: give data_parallel_size")
            valid = local is not None and 0 < (start or 0) <= size - local
            needs = f"<headless> runs some of replicas 1 to {size - 1}: give data_parallel_size_local"
            yield conflict(size > 1 and not valid, f"{needs}, and as data_parallel_start_rank the first of them")


class InferenceCommandConfig(InferenceConfig):
    """The inference server: vLLM's OpenAI server plus the weight routes."""

    slurm: SlurmConfig | None = option(
        None, "Serve in a SLURM job, by each of its nodes (None: here).", mark="one_time"
    )
