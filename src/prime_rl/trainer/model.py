"""The policy: a Hugging Face causal language model under FSDP2 or, on one rank, a SingleRankUnit, with our attention
and head.

Order of construction: meta device → adapters → activation checkpointing → per-block compile → fully_shard → allocation
→ each rank loads its rows. Master weights are float32; frozen ones, under adapters, are of the type that is computed
in: `auto` is bfloat16 on CUDA, float32 on CPU. One rank that need not reshard goes without FSDP, whose per-layer hooks
and copies would delay the host.
"""

import math
from collections.abc import Callable, Collection, Sequence
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
from transformers.modeling_outputs import MoeModelOutputWithPast

from prime_rl.errors import UserError, one_line, user_errors
from prime_rl.trainer import attention, moe, recurrent, recurrent_kernels, routing
from prime_rl.trainer import lora as adapters
from prime_rl.trainer.activations import checkpoint_layers, offload_layers, wide_products
from prime_rl.trainer.attention_needs import examine
from prime_rl.trainer.lm_head import HeadForm, TokenLoss, fused_token_loss, logprob_entropy
from prime_rl.trainer.loss import SequenceLoss
from prime_rl.trainer.memory import MemoryPlan, plan_memory, use_expandable_segments
from prime_rl.trainer.packing import MicroBatch, concatenate
from prime_rl.trainer.parallel import SingleRankReduction, World, agree, local_part
from prime_rl.trainer.parameters import initialize_buffers, load_weights, randomize
from prime_rl.trainer.source import Source, without_dropout

if TYPE_CHECKING:
    from prime_rl.config.trainer import LoRAConfig, OptimConfig, TrainerModel


class SingleRankUnit:
    """Replacement for FSDP on a single rank: master parameters, float32 if they are trained, and copies in the compute
    dtype that replace them in the modules between `unshard` and `reshard`. Results equal FSDP's bit for bit.

    Masters are DTensors, as FSDP has them, for optimizers, checkpoints and exports. As soon as backward has a copy's
    gradient, it is added to the master's. Grouped adapters of tenants have one copy for all slots: with one each, the
    host would take longer than the GPU.

    Args:
        model: On the meta device; its parameters become the masters.
        dtype: The compute dtype.
        exact: Parameters that are computed in float32, whatever the dtype.
    """

    def __init__(self, model: "Policy", mesh: DeviceMesh, dtype: torch.dtype, exact: Collection[nn.Parameter]) -> None:
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in masters:  # tied ones come twice
                    rows = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
                    masters[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
                setattr(module, name, masters[parameter])
        self._model, self._dtype, self._exact = model, dtype, {masters[parameter] for parameter in exact}
        self._placements: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []  # module, name, master, copy
        self._rows: list[Tensor] = []  # local tensors of the masters whose copies have memory of their own
        self._copies: list[Tensor] = []  # these copies, in the same order
        self._unsharded = self._in_backward = False
        self._reshard_after_backward = True

    @torch.no_grad()
    def unshard(self) -> None:
        """Copy the masters' values, and put the copies into the modules. No-op if they are there already."""
        if self._unsharded:
            return
        if not self._placements:
            self._make_copies()
        if self._copies:
            torch._foreach_copy_(self._copies, self._rows)
        for module, name, _, copy in self._placements:
            module._parameters[name] = copy
        self._unsharded = True

    def reshard(self) -> None:
        """Put the masters back into the modules. The copies keep their memory."""
        for module, name, master, _ in self._placements:
            module._parameters[name] = master
        self._unsharded = False

    def set_reshard_after_backward(self, reshard: bool, *, recurse: bool = True) -> None:
        """Set whether `reshard` is called at the end of each backward. `recurse` of FSDP's signature is ignored."""
        self._reshard_after_backward = reshard

    def set_requires_all_reduce(self, required: bool, *, recurse: bool = True) -> None:
        """No-op: no replicas."""

    def _make_copies(self) -> None:
        """Make the copies, once masters are allocated; equal dtypes share their memory."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():  # an adapter's layer comes before its A and B
            if isinstance(module, adapters.LoRALinear) and module.slots.grouped:
                module.stacked = self._stack(module.lora_A, copies), self._stack(module.lora_B, copies)
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
                self._placements.append((module, name, master, copies[master]))

    def _stack(self, linears: nn.ModuleList, copies: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
        """Return one copy [N, …] of the weights of all slots; set `copies` to its parts, which have no gradient."""
        masters = [linear.get_parameter("weight") for linear in linears]
        rows = [local_part(master) for master in masters]
        stack = nn.Parameter(torch.stack(rows).to(self._dtype))
        for slot, master in enumerate(masters):
            copies[master] = nn.Parameter(stack.detach()[slot], requires_grad=False)
        self._rows += rows
        self._copies += stack.detach().unbind()
        stack.register_post_accumulate_grad_hook(partial(self._add_slots, masters))
        return stack

    def _add(self, master: nn.Parameter, copy: Tensor) -> None:
        self._accumulate(master, self._take_grad(copy))

    def _add_slots(self, masters: list[nn.Parameter], stack: Tensor) -> None:
        grad_N = self._take_grad(stack).float()  # in one operation
        for slot in self._model.slots.assigned:
            self._accumulate(masters[slot], grad_N[slot])

    def _take_grad(self, copy: Tensor) -> Tensor:
        """Return and clear the gradient of a copy. The first of a backward also queues `_end_backward`."""
        grad, copy.grad = copy.grad, None
        assert grad is not None
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        return grad

    def _accumulate(self, master: nn.Parameter, grad: Tensor) -> None:
        assert isinstance(master, DTensor)
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
    """Backbone and head under one root: FSDP sees one forward; only `own_logits` calls the head of `lm`."""

    def __init__(
        self,
        lm: PreTrainedModel,
        memory: MemoryPlan,
        compiled: bool,
        head_form: HeadForm,
        boundaries: Callable[..., Any],
        slots: adapters.Slots,
    ) -> None:
        super().__init__()
        self.slots = slots
        self.lm, self.memory, self.compiled, self.head_form = lm, memory, compiled, head_form
        self.boundaries = boundaries
        self.head_chunk, self.frees_weights = memory.settings.head_chunk, memory.settings.reshard
        self.units: list[Unit] = []
        self.hookless: list[Unit] = []  # those that have to be gathered here
        self.sparse = [block for block in moe.moe_blocks(lm) if not moe.runs_all(block.experts)]

    def forward(self, batch: MicroBatch, loss: TokenLoss | SequenceLoss | None = None) -> tuple[Tensor, Tensor]:
        """Return loss [] and metric sums [M] of `loss` over the loss tokens; without it logprob [L] and entropy [L]."""
        return self._head(self._backbone(batch, loss is None or isinstance(loss, SequenceLoss)), batch, loss)

    def forward_parts(
        self, parts: Sequence[tuple[MicroBatch, TokenLoss | SequenceLoss]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute several micro-batches together; return what `forward` does of each, with its loss."""
        hidden_TH = self._backbone(concatenate([batch for batch, _ in parts]), True)
        hidden = hidden_TH.split([len(batch.input_ids) for batch, _ in parts])
        return [self._head(own_TH, *part) for own_TH, part in zip(hidden, parts, strict=True)]

    def _backbone(self, batch: MicroBatch, in_two_passes: bool) -> Tensor:
        """Return hidden states [T, H]. `in_two_passes`: the head's weights are needed in backward as well."""
        for unit in self.hookless:
            unit.unshard()
        tokens = torch.full((), batch.tokens, device=batch.input_ids.device) if self.sparse else None
        for number, block in enumerate(self.sparse):
            block.router.replayed = None if batch.experts is None else batch.experts[number]
            block.router.tokens = block.experts.tokens = tokens
        if isinstance(self, FSDPModule) and torch.is_grad_enabled():
            # A fused loss forms the head's gradients here; an embedding's need no weight. Holds for the next backward.
            self.set_unshard_in_backward(in_two_passes)
        return self.lm.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            **attention.boundaries(batch.cu_seqlens, batch.max_seqlen),
            **self.boundaries(batch.boundaries, batch.cu_seqlens),
        ).last_hidden_state[0]

    def _head(
        self, hidden_TH: Tensor, batch: MicroBatch, loss: TokenLoss | SequenceLoss | None
    ) -> tuple[Tensor, Tensor]:
        head = hidden_TH.index_select(0, batch.loss_index), self.lm.lm_head.weight, batch.labels, batch.inv_temperature
        del hidden_TH  # nothing else reads it, and the head is where memory peaks
        bias_V, form = self.lm.lm_head.bias, self.head_form
        if loss is None or isinstance(loss, SequenceLoss):
            values = logprob_entropy(*head, self.head_chunk, bias_V=bias_V, form=form)
            if batch.token_stats is not None:
                batch.token_stats.copy_(torch.stack(values).detach())
            return values if loss is None else loss(*values, batch.streams, *batch.documents())
        arguments = batch.streams, loss, self.head_chunk, self.compiled
        return fused_token_loss(*head, *arguments, bias_V=bias_V, form=form, stats_2N=batch.token_stats)

    def own_logits(self, ids_T: Tensor) -> Tensor:
        """Return one document's logits [T, V] by the forward of `lm`, with the attention now set."""
        for unit in self.hookless:
            unit.unshard()
        return self.lm(**_own_inputs(self.lm, ids_T)).logits[0]


def _own_inputs(lm: PreTrainedModel, ids_T: Tensor) -> dict[str, Any]:
    """Return `lm`'s arguments for one document's logits."""
    # With router logits, a model would compute an auxiliary loss.
    routers = {"output_router_logits": False} if getattr(lm.config, "output_router_logits", False) else {}
    return {"input_ids": ids_T[None], "use_cache": False, **routers}


class _HiddenStates(MoeModelOutputWithPast):
    """A backbone's output; what only some families' heads read is None."""

    def __getattr__(self, name: str) -> None:
        return None


HEAD_CHECK_TOKENS, HEAD_CHECK_ROWS, HEAD_CHECK_LIMIT = 32, 512, 1e-5


@torch.no_grad()
def infer_head(lm: PreTrainedModel, name: str) -> HeadForm:
    """Find how the model's own forward scales and caps its logits, by running it on random hidden states, weight and
    bias in float64 on the CPU, without the backbone. `lm` may be on the meta device.

    Tiny logits give the scale, since a soft-cap does not change them, huge ones the cap; the form is then tested.

    Raises:
        UserError: the model's forward does something else to its logits.
    """
    tokens, head = HEAD_CHECK_TOKENS, lm.lm_head
    draw = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, head.in_features, generator=draw, dtype=torch.float64)
    weight_VH = torch.randn(HEAD_CHECK_ROWS, head.in_features, generator=draw).double() / head.in_features**0.5
    bias_V = None if head.bias is None else torch.randn(HEAD_CHECK_ROWS, generator=draw).double()
    labels_T = torch.randint(HEAD_CHECK_ROWS, (tokens,), generator=draw)
    others = [each for each in lm.named_parameters() if not each[0].startswith(("model.", "lm_head."))]
    values = {key: torch.randn(each.shape, generator=draw).double() for key, each in others}

    def own_logits(size: float, bias_size: float = 0.0) -> Tensor:
        values["lm_head.weight"] = weight_VH * size
        if bias_V is not None:
            values["lm_head.bias"] = bias_V * bias_size
        return functional_call(lm, values, (), _own_inputs(lm, labels_T), tie_weights=False).logits[0].double()

    lm.model.forward = lambda *args, **kwargs: _HiddenStates(last_hidden_state=hidden_TH[None])
    try:
        plain_TV = hidden_TH @ weight_VH.t()
        scale = float((own_logits(1e-6) * plain_TV).sum() / (1e-6 * plain_TV.square().sum()))
        scale = float(f"{scale:.8g}") if math.isfinite(scale) and scale > 0 else 1.0
        largest, uncapped = own_logits(1e6 / scale).abs().max().item(), 1e6 * plain_TV.abs().max().item()
        form = HeadForm(scale, float(f"{largest:.8g}") if 0 < largest < 0.9 * uncapped else None)
        size = 4 / scale  # logits of up to about 16
        theirs_TV = own_logits(size, size)
    except Exception as error:  # whatever the model's code raises
        reason = f"{type(lm).__name__} does not compute logits from random hidden states: {one_line(error)}"
        raise UserError(f"model {name} cannot be trained: {reason}") from error
    finally:
        del lm.model.forward
    theirs_T = torch.log_softmax(theirs_TV, -1).gather(1, labels_T[:, None]).squeeze(1)
    bias_V = None if bias_V is None else bias_V * size
    ones_T = torch.ones(tokens, dtype=torch.float64)
    ours_T, _ = logprob_entropy(hidden_TH, weight_VH * size, labels_T, ones_T, tokens, bias_V=bias_V, form=form)
    gap = (ours_T - theirs_T).abs().max().item()
    if not gap <= HEAD_CHECK_LIMIT:  # NaN is refused as well
        raise UserError(
            f"model {name} cannot be trained: the forward of {type(lm).__name__} changes its logits by more than a "
            f"scale, a soft-cap and a bias, and log-probabilities are off by {gap:.3g} (at most {HEAD_CHECK_LIMIT:g} "
            "is accepted)"
        )
    return form


def compute_dtype(config_dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations; `auto`: bfloat16 on CUDA, float32 on CPU (as fast there, and exact)."""
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
    lora: "LoRAConfig | None" = None,
    slots: int = 1,
) -> Policy:
    """Build the sharded policy and give every parameter its value.

    Args:
        tokens: Maximum per micro-batch, for which GPU memory is planned (None: nothing is planned).
        optim: The optimizer that will be built, whose states are counted (None: AdamW).
        published: Bytes per parameter of weights published from this GPU (`weight_publisher.published_bytes`).
        lora: The adapters that are trained in place of the weights. They are new: `lora.load_adapter` comes later.
        slots: Adapters beside each other, one a tenant.

    Raises:
        UserError: the backend is absent, the architecture or its head is not one we can train, or the files do not fit
            the config.
    """
    compiled = world.device.type == "cuda" if config.compile is None else config.compile
    if world.device.type == "cuda":
        use_expandable_segments()
    with torch.device("meta"), user_errors(f"model {source.name} is not a causal language model", ValueError):
        # A copy: transformers writes the dtype into the config it is given, and exports ask for the checkpoint's.
        lm = AutoModelForCausalLM.from_config(
            without_dropout(source, world), dtype=torch.float32, trust_remote_code=source.trust_remote_code
        )
    _check_architecture(lm, source.name)
    head_form = infer_head(lm.eval(), source.name)
    dtype = compute_dtype(config.dtype, world.device)
    if dtype != torch.bfloat16 and moe.moe_blocks(lm):  # the compiler knows grouped products in bfloat16 only
        if config.compile:
            raise UserError(f"model.compile: {source.name} has experts, which compile in bfloat16 only (model.dtype)")
        compiled = False
    mixers, boundaries = recurrent.split_documents(lm, dtype, world)
    for tensor in (tensor for mixer in mixers for tensor in mixer.state_dict(keep_vars=True).values()):
        if not tensor.requires_grad:  # decays: in the type of their layer, as transformers loads them
            tensor.data = tensor.data.to(dtype)
    lm.train()
    moe.set_up(lm, source.name)
    kept = attention.set_up(config.attention, examine(lm, source.name, tokens, mixers), dtype, world)
    lm.set_attn_implementation(attention.NAME)
    beside = adapters.Slots(slots, grouped=slots > 1 and world.device.type == "cuda")
    if lora is not None:
        adapters.add_adapters(lm, lora, source.name, dtype, beside)
    routing.set_up_balance(lm, moe.moe_blocks(lm), config, world.device)
    memory = plan_memory(config, lm, world, itemsize=dtype.itemsize, tokens=tokens, optim=optim, published=published)
    settings = memory.settings
    kept |= routing.KEPT | recurrent_kernels.KEPT
    draws = lora is not None and lora.dropout > 0
    wide = wide_products(source.config)
    blocks = checkpoint_layers(lm.model.layers, settings.levels, kept, wide, draws=draws)
    apart = lm.model.layers, lm.get_input_embeddings()  # the rest is the norm before the head
    others = [each for each in lm.model.children() if each not in apart and any(True for _ in each.parameters())]
    # Mixers that take one document at a time are no graphs; what multiplies by matrices around them is, part by part.
    eager = mixers if boundaries is recurrent.on_host else set()
    graphs = [part for block in blocks for part in recurrent.without(block, eager)] + others
    for module in graphs if compiled else ():
        module.compile(fullgraph=True)
    if settings.offloaded:
        blocks = offload_layers(blocks, world.device, settings.offloaded)
    lm.model.layers = nn.ModuleList(blocks)
    policy = Policy(lm, memory, compiled, head_form, boundaries, beside)
    if world.size == 1 and not settings.reshard:
        policy.units = policy.hookless = [SingleRankUnit(policy, world.mesh, dtype, moe.router_parameters(policy))]
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
    adapters.initialize(policy, world, seed)  # of several slots the first; the others are zero until they are taken
    return policy


def _shard(policy: Policy, others: list[nn.Module], dtype: torch.dtype, world: World) -> None:
    """Make FSDP units: all routers, each layer, each of `others`, embedding with head."""
    settings, mesh = policy.memory.settings, world.mesh
    precision = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        # The default would cast every float32 input to bfloat16: a temperature of 0.7 would arrive as 0.69921875.
        cast_forward_inputs=False,
    )
    policy.hookless += routing.shard_routers([block.router for block in moe.moe_blocks(policy.lm)], mesh)
    for layer in policy.lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=settings.reshard)
    for module in others:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    # Embedding and head stay in the root unit: tied weights are gathered once; the head reads its own in our forward.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=settings.reshard)
    for method in ("own_logits", "forward_parts"):
        register_fsdp_forward_method(policy, method)
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
    parts, reason = dict(lm.named_children()), None
    inner = dict(parts["model"].named_children()) if "model" in parts else {}
    if not isinstance(inner.get("layers"), nn.ModuleList) or not isinstance(parts.get("lm_head"), nn.Linear):
        reason = "has not the form `.model.layers` + `.lm_head` that the trainer needs"
    elif isinstance(getattr(lm.config.get_text_config(), "intermediate_size", 0), list):
        reason = "has a width of its own in every layer, by which the trainer cannot plan"
    elif len([*lm.model.layers.parameters()]) < sum(len([*layer.parameters()]) for layer in lm.model.layers):
        reason = "shares weights between its layers, which are sharded one by one"
    if reason is not None:
        raise UserError(f"model {name} ({type(lm).__name__}) {reason}")
