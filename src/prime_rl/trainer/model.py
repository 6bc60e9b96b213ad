"""The policy: a Hugging Face causal language model under FSDP2 or, on a single rank, a SingleRankUnit, with our attention
and head.

Order of construction: meta device → activation checkpointing → per-block compile → fully_shard → memory → each rank loads
its own rows. Masters are float32; the compute dtype is bfloat16 on CUDA and float32 on CPU. A single rank keeps its
weights gathered, without FSDP, whose hooks and copies at every layer would hold up the host.
"""

from collections.abc import Callable, Collection
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl.errors import UserError
from prime_rl.trainer import attention, moe
from prime_rl.trainer.activations import checkpoint_layers, offload_layers, wide_products
from prime_rl.trainer.lm_head import TokenLoss, fused_token_loss, logprob_entropy
from prime_rl.trainer.loss import SequenceLoss
from prime_rl.trainer.memory import MemoryPlan, plan_memory, use_expandable_segments
from prime_rl.trainer.packing import MicroBatch
from prime_rl.trainer.parallel import SingleRankReduction, World, agree, local_part
from prime_rl.trainer.parameters import initialize_buffers, load_weights, randomize
from prime_rl.trainer.source import Source, one_line

if TYPE_CHECKING:
    from prime_rl.config.trainer import OptimConfig, TrainerModel


class SingleRankUnit:
    """All parameters of `model`, with the methods of an FSDP unit that the trainer calls, and the same bits as with FSDP.

    Masters are float32 DTensors, as FSDP has them, for optimizers, checkpoints and exports. While gathered the modules
    hold copies in the compute dtype instead. As soon as backward has a copy's gradient, it is added to the master's.

    Args:
        model: On the meta device; its parameters become the masters.
        dtype: The compute dtype.
        exact: Parameters that are computed in float32, whatever the dtype.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, exact: Collection[nn.Parameter]) -> None:
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in masters:  # tied ones come twice
                    rows = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
                    masters[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
                setattr(module, name, masters[parameter])
        self._model, self._dtype, self._exact = model, dtype, {masters[parameter] for parameter in exact}
        self._computed_copies: list[
            tuple[nn.Module, str, nn.Parameter, nn.Parameter]
        ] = []  # module, name, master, copy
        self._rows: list[Tensor] = []  # of the masters that are copied, and their copies
        self._copies: list[Tensor] = []
        self._gathered = self._in_backward = False
        self._reshard_after_backward = True

    @torch.no_grad()
    def unshard(self) -> None:
        """Give the modules weights to compute with."""
        if self._gathered:
            return
        if not self._computed_copies:
            self._make_copies()
        if self._copies:
            torch._foreach_copy_(self._copies, self._rows)
        for module, name, _, copy in self._computed_copies:
            module._parameters[name] = copy
        self._gathered = True

    def reshard(self) -> None:
        """Give the modules their masters again. The copies keep their memory."""
        for module, name, master, _ in self._computed_copies:
            module._parameters[name] = master
        self._gathered = False

    def set_reshard_after_backward(self, reshard: bool, *, recurse: bool = True) -> None:
        """Whether the next backward pass is the last one for these weights."""
        self._reshard_after_backward = reshard

    def set_requires_all_reduce(self, required: bool, *, recurse: bool = True) -> None:
        """There are no replicas."""

    def _make_copies(self) -> None:
        """Once the masters have their memory. Those that are computed as they are share it."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, master in module.named_parameters(recurse=False):
                if master not in copies:
                    rows = local_part(master)
                    dtype = rows.dtype if master in self._exact else self._dtype
                    copies[master] = copy = nn.Parameter(rows.to(dtype), requires_grad=master.requires_grad)
                    if copy.dtype != rows.dtype:
                        self._rows.append(rows)
                        self._copies.append(copy)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(partial(self._add, master))
                self._computed_copies.append((module, name, master, copies[master]))

    def _add(self, master: nn.Parameter, copy: Tensor) -> None:
        grad, copy.grad = copy.grad, None
        assert grad is not None
        assert isinstance(master, DTensor)
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if master.grad is None:
            # What `DTensor.from_local` does, without its checks: they would take longer than the addition.
            master.grad = DTensor(grad.float(), master._spec, requires_grad=False)
        else:
            local_part(master.grad).add_(grad)

    def _end_backward(self) -> None:
        self._in_backward = False
        if self._reshard_after_backward:
            self.reshard()


Unit = FSDPModule | SingleRankUnit


class Policy(nn.Module):
    """Backbone and head under one root, so that FSDP sees a single forward; the head of `lm` (transformers) is not called."""

    def __init__(self, lm: PreTrainedModel, memory: MemoryPlan, compiled: bool) -> None:
        super().__init__()
        self.lm, self.memory, self.compiled = lm, memory, compiled
        self.head_chunk, self.frees_weights = memory.settings.head_chunk, memory.settings.reshard
        self.units: list[Unit] = []
        self.hookless: list[Unit] = []  # those that have to be gathered here

    def forward(self, batch: MicroBatch, loss: TokenLoss | SequenceLoss | None = None) -> tuple[Tensor, Tensor]:
        """The loss [] and metric sums [M] of `loss` over the loss tokens, or without one their logprob [L] and entropy [L]."""
        in_two_passes = loss is None or isinstance(loss, SequenceLoss)
        for unit in self.hookless:
            unit.unshard()
        if isinstance(self, FSDPModule) and torch.is_grad_enabled():
            # One pass forms the head's gradients here, and an embedding's need no weight. Holds for the next backward.
            self.set_unshard_in_backward(in_two_passes)
        hidden_TH = self.lm.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            **attention.boundaries(batch.cu_seqlens, batch.max_seqlen),
        ).last_hidden_state[0]
        head = hidden_TH.index_select(0, batch.loss_index), self.lm.lm_head.weight, batch.labels, batch.inv_temperature
        del hidden_TH  # nothing else reads it, and the head is where memory peaks
        if loss is None:
            return logprob_entropy(*head, self.head_chunk)
        if isinstance(loss, SequenceLoss):
            return loss(*logprob_entropy(*head, self.head_chunk), batch.streams, *batch.documents())
        return fused_token_loss(*head, batch.streams, loss, self.head_chunk, self.compiled)

    @torch.no_grad()
    def head_error(self, input_ids_T: Tensor) -> Tensor:
        """The largest difference [] between our head's and the model's own log-probabilities, over a document of T tokens.

        Both heads start from the same hidden states, in float32, and see the same rows of the vocabulary: what is compared
        is what the model's own forward does to its logits, which is the same for every row.
        """
        for unit in self.hookless:
            unit.unshard()
        hidden_1TH = torch.empty(0)

        def enlarge(_: nn.Module, __: Any, output: Any) -> Any:
            """To float32, and to logits of up to 16 whatever the weights are: small ones would hide a soft-cap."""
            nonlocal hidden_1TH
            hidden = output.last_hidden_state.float()
            hidden_1TH = output.last_hidden_state = hidden * (16 / (hidden @ weight_VH.T).abs().max().clamp(min=1e-6))
            return output

        tokens = len(input_ids_T)
        positions = torch.arange(tokens, device=input_ids_T.device)
        boundaries = attention.boundaries(positions.new_tensor([0, tokens], dtype=torch.int32), tokens)
        weight_VH = self.lm.lm_head.weight[:HEAD_CHECK_ROWS].float()
        hook = self.lm.model.register_forward_hook(enlarge)
        try:
            inputs = {"input_ids": input_ids_T[None], "position_ids": positions[None], "use_cache": False, **boundaries}
            if getattr(self.lm.config, "output_router_logits", False):
                inputs["output_router_logits"] = (
                    False  # else it computes a loss of the routers, which ours do not record
                )
            logits_TV = functional_call(self.lm, {"lm_head.weight": weight_VH}, (), inputs, tie_weights=False).logits[0]
        finally:
            hook.remove()
        labels_T = input_ids_T % len(weight_VH)
        theirs = torch.log_softmax(logits_TV.float(), -1).gather(1, labels_T[:, None]).squeeze(1)
        ones = torch.ones(tokens, device=input_ids_T.device)
        ours, _ = logprob_entropy(hidden_1TH[0], weight_VH, labels_T, ones, self.head_chunk)
        return (ours - theirs).abs().max()


HEAD_CHECK_TOKENS, HEAD_CHECK_ROWS, HEAD_CHECK_LIMIT = 64, 4096, 1e-3


def check_head(policy: Policy, source: Source, world: World) -> None:
    """Compare our head with the model's own on a short random document, eagerly: nothing is compiled for it.

    Raises:
        UserError: the model's forward does something to its logits that our head does not (a scale, a soft-cap).
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = source.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (HEAD_CHECK_TOKENS,), generator=generator).to(world.device)
    with torch.compiler.set_stance("force_eager"):
        error = policy.head_error(ids).item()
    for unit in policy.units:
        unit.reshard()  # checkpoints and exports read sharded parameters

    def refuse() -> None:
        if not error <= HEAD_CHECK_LIMIT:  # NaN is refused as well
            raise UserError(
                f"model {source.name} cannot be trained: the forward of {type(policy.lm).__name__} changes its logits after the head, "
                f"and log-probabilities without that are off by {error:.3g} (at most {HEAD_CHECK_LIMIT:g} is accepted)"
            )

    agree(world, refuse)


def compute_dtype(config_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of activations: `auto` is bfloat16 on CUDA and float32 on CPU, where it is as fast and exact."""
    if config_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, config_dtype)


def build_policy(
    source: Source,
    config: "TrainerModel",
    world: World,
    seed: int = 0,
    *,
    tokens: int | None = None,
    optim: "OptimConfig | None" = None,
    published: Callable[[int], float] | None = None,
) -> Policy:
    """Build the sharded policy and give every parameter its value.

    Args:
        tokens: Most tokens of a micro-batch, by which memory is planned on a GPU (None: nothing is planned).
        optim: The optimizer that will be built, whose states are counted (None: AdamW).
        published: Bytes per parameter of weights published from this GPU (`weight_publisher.published_bytes`).

    Raises:
        UserError: the backend is absent, the architecture is not one we can train, or the files do not fit the config.
    """
    compiled = world.device.type == "cuda" if config.compile is None else config.compile
    if world.device.type == "cuda":
        use_expandable_segments()
    with torch.device("meta"):
        try:
            # A copy: transformers writes the dtype into the config it is given, and exports ask for the checkpoint's.
            lm = AutoModelForCausalLM.from_config(
                deepcopy(source.config), dtype=torch.float32, trust_remote_code=source.trust_remote_code
            )
        except ValueError as error:
            raise UserError(f"model {source.name} is not a causal language model: {one_line(error)}") from error
    _check_architecture(lm, source.name)
    moe.replace_blocks(lm, source.name)
    dtype = compute_dtype(config.dtype, world.device)
    if dtype != torch.bfloat16 and moe.sparse_blocks(lm):  # the compiler knows grouped products in bfloat16 only
        if config.compile:
            raise UserError(f"model.compile: {source.name} has experts, which compile in bfloat16 only (model.dtype)")
        compiled = False
    kept = attention.set_up(config.attention, source.config, dtype, world)
    lm.set_attn_implementation(attention.NAME)
    lm.train()
    itemsize = dtype.itemsize
    memory = plan_memory(
        config, lm, world, compiled=compiled, itemsize=itemsize, tokens=tokens, optim=optim, published=published
    )
    settings = memory.settings
    blocks = checkpoint_layers(lm.model.layers, settings.levels, kept | moe.KEPT, wide_products(source.config))
    others = _other_modules(lm)
    for module in [*blocks, *others] if compiled else ():
        module.compile(fullgraph=True)
    if settings.offloaded:
        blocks = offload_layers(blocks, world.device, settings.offloaded)
    lm.model.layers = nn.ModuleList(blocks)
    policy = Policy(lm, memory, compiled)
    if world.size == 1 and not settings.reshard:
        routers = [block.gate.weight for block in moe.sparse_blocks(policy)]
        policy.units = policy.hookless = [SingleRankUnit(policy, world.mesh, dtype, routers)]
    else:
        _shard(policy, others, dtype, world)
    policy.to_empty(device=world.device)
    lm.tie_weights()
    initialize_buffers(lm, source.name)
    if source.directory is None:
        randomize(policy, world, seed)
    else:
        directory = source.directory
        agree(world, lambda: load_weights(policy, directory, world))
    return policy


def _other_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """What has parameters beside layers, embedding and head: the norm before the head."""
    return [
        module
        for module in lm.model.children()
        if module not in (lm.model.layers, lm.get_input_embeddings()) and any(True for _ in module.parameters())
    ]


def _shard(policy: Policy, others: list[nn.Module], dtype: torch.dtype, world: World) -> None:
    """Make FSDP units of the routers, each layer, each of `others`, and embedding and head."""
    settings, mesh = policy.memory.settings, world.mesh
    precision = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        # The default would cast every float32 input to bfloat16: a temperature of 0.7 would arrive as 0.69921875.
        cast_forward_inputs=False,
    )
    policy.hookless += moe.shard_routers(policy.lm, mesh)  # blocks read them without calling their modules
    for layer in policy.lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=settings.reshard)
    for module in others:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    # Embedding and head stay in the root unit: tied weights are gathered once, and the head reads its own in our forward.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=settings.reshard)
    register_fsdp_forward_method(policy, "head_error")
    reduction: Any = SingleRankReduction()
    for unit in (module for module in policy.modules() if isinstance(module, FSDPModule)):
        policy.units.append(unit)
        if world.size == 1:  # sums nothing, but would divide by 1 all the same
            unit.set_custom_reduce_scatter(reduction)
            continue
        # The loss is already divided by the global token count: gradients are summed. Gloo knows no pre-multiplied sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _check_architecture(lm: PreTrainedModel, name: str) -> None:
    parts = dict(lm.named_children())
    inner = dict(parts["model"].named_children()) if "model" in parts else {}
    head = parts.get("lm_head")
    if not isinstance(inner.get("layers"), nn.ModuleList) or not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"model {name} ({type(lm).__name__}) has not the form `.model.layers` + bias-free `.lm_head` that the trainer needs"
        )
