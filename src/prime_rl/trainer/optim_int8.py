"""AdamW whose running means are kept in 8 bits: blocks of 256 numbers share a scale (Dettmers et al. 2022), quantized as torchao does it."""

from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn

from prime_rl.errors import UserError
from prime_rl.trainer.optim_states import Chunk, StateSpec
from prime_rl.trainer.sharded_optimizer import Settings, Steps, has_grad

BLOCK = 256
_FEWEST = 4096  # elements of a parameter that is worth it
STATES = tuple(
    spec
    for name in ("exp_avg", "exp_avg_sq")
    for spec in (StateSpec(f"{name}_codes", torch.uint8), StateSpec(f"{name}_scale", block=BLOCK))
)


def quantizable(parameter: nn.Parameter) -> bool:
    """Whether a parameter's states are kept in 8 bits. Blocks lie within rows, so that any number of ranks cuts between them."""
    return parameter.ndim > 1 and parameter.shape[-1] % BLOCK == 0 and parameter.numel() >= _FEWEST


def check_installed() -> None:
    """Raise UserError where torchao is missing."""
    _torchao()


def adamw_int8(settings: Settings, chunks: Iterable[Chunk], steps: Steps) -> None:
    """AdamW on the states of `STATES`. The update itself uses the means before they are rounded."""
    device = next(iter(steps.values())).device
    lr = torch.full((), settings["lr"], device=device)  # a number would be compiled in
    update = _update_on(device, *settings["betas"], settings["weight_decay"], settings["eps"])
    for chunk in chunks:
        for piece, states in chunk:
            if not has_grad(piece.parameter):
                continue
            value, grad = piece.value(), piece.grad()
            shaped = [_blocks(tensor, value.numel() // BLOCK) for tensor in (value, grad, *states)]
            update(*shaped, steps[piece.parameter], lr)


def _blocks(tensor: Tensor, count: int) -> Tensor:
    """[count, …], to the compiler a tensor of its own (no view of a larger one) that may have any number of rows."""
    blocks = tensor.view(count, -1).detach()
    torch._dynamo.maybe_mark_dynamic(blocks, 0)
    return blocks


@cache
def _update_on(
    device: torch.device, beta1: float, beta2: float, weight_decay: float, eps: float
) -> Callable[..., None]:
    """One kernel for any number of blocks on CUDA, step by step on a CPU."""
    ao = _torchao()
    levels = [torch.tensor(ao.create_dynamic_map(signed), device=device) for signed in (True, False)]

    def update(
        value_BK: Tensor,
        grad_BK: Tensor,
        mean_codes_BK: Tensor,
        mean_scale_B1: Tensor,
        square_codes_BK: Tensor,
        square_scale_B1: Tensor,
        step: Tensor,
        lr: Tensor,
    ) -> None:
        mean_BK = ao.dequant_with_qmap(mean_codes_BK, levels[0], mean_scale_B1).lerp(grad_BK, 1 - beta1)
        square_BK = ao.dequant_with_qmap(square_codes_BK, levels[1], square_scale_B1).lerp(grad_BK.square(), 1 - beta2)
        quantize(mean_BK, mean_codes_BK, mean_scale_B1, levels[0])
        quantize(square_BK, square_codes_BK, square_scale_B1, levels[1])
        root_BK = square_BK.sqrt() / (1 - beta2**step).sqrt() + eps
        value_BK.copy_(value_BK - lr * weight_decay * value_BK - lr * (mean_BK / (1 - beta1**step)) / root_BK)

    def quantize(exact_BK: Tensor, codes_BK: Tensor, scale_B1: Tensor, numbers: Tensor) -> None:
        scaled_BK, scale_B = ao.scale_tensor(exact_BK, BLOCK)
        codes_BK.copy_(ao.quantize_8bit_with_qmap(scaled_BK, numbers))
        scale_B1.copy_(scale_B[:, None])

    return torch.compile(update, fullgraph=True) if device.type == "cuda" else update


def _torchao() -> ModuleType:
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise UserError(
            f'optim.state = "int8" needs torchao ({error}): install it with `uv pip install torchao` (the extra `torchao`)'
        ) from error
    return quant_utils
