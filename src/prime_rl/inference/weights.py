"""Worker side of a weight update: `--worker-extension-cls prime_rl.inference.weights.WeightsExtension`.

vLLM mixes the class into its worker, so no name here may exist there already (all begin with `prime_`). Every rank runs the
same call; the server (`service.py`) keeps generation paused from the load until every rank has committed or gone back.
"""

from typing import Any

import torch

from prime_rl.inference.orphans import follow

Identity = dict[str, Any]  # {"version", "hash", "weight_dir"}: what the server calls these weights


class WeightsExtension:
    """Loads committed weights through vLLM's own reload, which keeps parameters in place and re-runs their processing."""

    # Given by vLLM's worker, which this class is mixed into.
    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any

    prime_identity: Identity | None = None
    prime_directory: str | None = None
    prime_next: tuple[str, Identity] | None = None

    def prime_load(self, directory: str, identity: Identity) -> None:
        """Load the tensors in `directory`. A failure leaves the model unusable: `prime_restore` must follow.

        Raises:
            Exception: whatever vLLM's loader raises for a directory that does not fit.
        """
        if self.prime_directory is None:
            self.prime_directory = self.model_config.model  # a reload overwrites it
        self.prime_next = (directory, identity)
        self.prime_reload(directory)

    def prime_commit(self) -> None:
        """Every rank has loaded: from now on this is what is served."""
        if self.prime_next is None:
            raise RuntimeError("nothing was loaded that could be committed")
        self.prime_directory, self.prime_identity = self.prime_next
        self.prime_next = None

    def prime_restore(self) -> None:
        """Some rank failed: go back to what was served before the load, here too."""
        self.prime_next = None
        if self.prime_directory is not None:
            self.prime_reload(self.prime_directory)

    def prime_served(self) -> Identity | None:
        """What this rank serves; None for the weights it was started with."""
        return self.prime_identity

    def prime_follow(self, server: int) -> bool:
        """End with the server, process id `server`, even if that is killed."""
        return follow(server)

    def prime_reload(self, directory: str) -> None:
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        # 0.26's own `reload_weights` does not set the config that its layers look up.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                forget_packed_experts(model)
            self.model_runner.reload_weights(weights_path=directory)
            if self.device.type == "cpu":
                repack_tied_heads(model)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """CPU: make the reload pack the experts again.

    vLLM packs them only while their method has no kernel, that is at the first load; later ones would leave the old experts
    in use, silently (0.24 nats on a small Qwen3-MoE).
    """
    for module in model.modules():
        # vLLM's layers carry their method as an attribute; most modules have none.
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def repack_tied_heads(model: torch.nn.Module) -> None:
    """CPU: pack again every linear layer that kept its plain weight beside a packed copy.

    That is the output head of a model with tied embeddings: no tensor of the checkpoint is loaded into it, so the reload
    leaves it with a copy packed from the old embedding, silently (0.20 nats on a small Qwen3).
    """
    for module in model.modules():
        weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
        packed = "cpu_linear" in vars(module)
        if packed and method is not None and isinstance(weight, torch.Tensor) and weight.numel():
            method.process_weights_after_loading(module)
