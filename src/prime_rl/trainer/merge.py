"""Merge an adapter into its model's weights, and check that both compute the same."""

import torch

from prime_rl.config.commands import MergeConfig
from prime_rl.config.trainer import LoRAConfig, TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.lora import load_adapter
from prime_rl.trainer.model import build_policy
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.reference_scorer import ReferenceScorer
from prime_rl.trainer.source import Source, find_model
from prime_rl.trainer.weight_copy import WeightCopy
from prime_rl.trainer.weight_publisher import export_dtype
from prime_rl.transport.commit import Stage
from prime_rl.transport.weights import file_hashes, manifest_extra

LIMIT = 1e-4  # nats: in float32 sums compute what adapters compute to 1e-5


def merge(config: MergeConfig, lora: LoRAConfig) -> str:
    """Write the merged model and say how far its log-probabilities of a fixed prompt are from those of the adapter.

    What is written is read again and computed in float32. Raises UserError, and leaves nothing, if it is off.
    """
    world = init_world(config.device, 600.0)
    try:
        source = find_model(config.model.name, config.model.trust_remote_code)
        dtype = export_dtype(config.weights.dtype, source)
        assert lora.adapter is not None
        policy = build_policy(source, TrainerModel(dtype="float32"), world, lora=lora)
        load_adapter(policy, lora.adapter, world)
        scorer = ReferenceScorer(policy, world, source.vocabulary, torch.float32, dtype, "merged")
        copies = WeightCopy(policy, world, dtype, lora=lora)
        copies.copy()
        rounded, exact = (torch.tensor(scorer.score(as_exported=each)().logprobs) for each in (True, False))
        with Stage(config.output_dir) as stage:
            tensors = copies.write_files(copies.buffer.cpu(), source, stage.path)
            written = _score(find_model(str(stage.path), config.model.trust_remote_code), world)
            gap, rounding = (written - rounded).abs().max().item(), (written - exact).abs().max().item()
            if not gap <= LIMIT:
                raise UserError(f"the merged weights do not compute what the adapter does: off by {gap:.2g} nats")
            if config.output_dir.is_dir():
                config.output_dir.rmdir()  # empty
            extra = manifest_extra(0, 0, tensors)
            stage.commit(step=0, producer="merge", extra=extra, hashes=file_hashes(tensors))
    finally:
        close_world()
    kind = str(dtype).removeprefix("torch.")
    return f"{config.output_dir}: log-probabilities are off by {rounding:.2g} nats at most, in {kind}"


def _score(source: Source, world: World) -> torch.Tensor:
    policy = build_policy(source, TrainerModel(dtype="float32"), world)
    scorer = ReferenceScorer(policy, world, source.vocabulary, torch.float32, torch.float32)
    return torch.tensor(scorer.score(as_exported=False)().logprobs)
