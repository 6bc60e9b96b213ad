"""Worker side of a weight update: `--worker-extension-cls prime_rl.inference.weights.WeightsExtension`.

vLLM mixes the class into its worker, so no name here may exist there already (all begin with `prime_`). Every rank runs the
same call; the server (`service.py`) keeps generation paused from the load until every rank has committed or gone back.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from prime_rl import faults
from prime_rl.inference import compat
from prime_rl.inference.orphans import follow
from prime_rl.inference.receiving import Receiver
from prime_rl.inference.staging import Held, Staging, tensors_of
from prime_rl.transport.commit import CommitError
from prime_rl.transport.weights import weights_manifest

# A small model is read by then; asking for it would take another of the engine's steps, which takes longer.
AT_ONCE_SECONDS = 5e-3
STAGE_SECONDS = 600.0  # to wait in a load for what is still being read; the server has asked before, so that nothing is

Identity = dict[str, Any]  # {"version", "hash", "weight_dir"}: what the server calls these weights


class WeightsExtension:
    """Loads committed weights through vLLM's own reload, which keeps parameters in place and re-runs their processing; without it where there is none."""

    # Given by vLLM's worker, which this class is mixed into.
    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any
    rank: int

    prime_identity: Identity | None = None
    prime_directory: str | None = None
    prime_next: tuple[str, Identity] | None = None
    prime_staging: Staging | None = None
    prime_held: Held | None = None  # of the version that was read last, where the next may tell its changes
    prime_receiver: Receiver | None = None
    prime_received = False  # what is served is in no file
    prime_plain: bool | None = None  # whether the model computes with what is loaded as it is; None: not looked at yet
    prime_whole = True  # no reload of vLLM's has ended before its end: only another one mends what it leaves behind

    def prime_stage(self, directory: str, digest: str, keep: bool, servers_on_host: int = 1, on_device: bool = True) -> dict[str, Any]:  # fmt: skip
        """Begin to read a committed version that must have this hash, in a thread, beside generation. Returns how far it is, as `prime_staged` does, after a
        moment that is shorter than a step.

        Args:
            keep: Keep it in memory, where there is room.
            on_device: Of the device rather than the host.
            servers_on_host: How many engines do so at the same time: vLLM tells those of a dense model nothing of each other.
        """
        self.prime_unstage()
        if self.prime_receiver is None:
            self.prime_receiver = Receiver(self.device)
        self.prime_staging = Staging(
            Path(directory),
            digest,
            self.device,
            keep=keep,
            on_device=on_device,
            verify=self.rank == 0,
            sharing=servers_on_host * self.vllm_config.parallel_config.world_size,
            held=self.prime_held,
            receiver=self.prime_receiver,
        )
        self.prime_held = None  # until it is read: it is being changed
        return self.prime_staging.answer(AT_ONCE_SECONDS)

    def prime_staged(self) -> dict[str, Any]:
        """How far reading is: see `Staging.answer`."""
        return (
            {"state": "failed", "why": "nothing is read", "unsent": False}
            if self.prime_staging is None
            else self.prime_staging.answer()
        )

    def prime_unstage(self) -> None:
        """What is or was read is not wanted any more."""
        if self.prime_staging is not None:
            self.prime_staging.drop()
            self.prime_held = self.prime_staging.held
            self.prime_staging = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what it held is others' again

    def prime_load(self, directory: str, identity: Identity, base: str) -> None:
        """Load what was staged, or the tensors in `directory` where nothing was. A failure leaves the model unusable: `prime_restore` must follow.

        Args:
            base: Where the weights lie that this worker was started with: vLLM itself knows them by a name, and does not look for its revision again.

        Raises:
            Exception: what reading it failed with, or whatever vLLM's loader raises for weights that do not fit.
        """
        if self.prime_directory is None:
            self.prime_directory = base
        self.prime_next = (directory, identity)
        staging = self.prime_staging
        if staging is None:
            self.prime_reload(directory)
            return
        if (str(staging.directory), staging.digest) != (directory, identity["hash"]):
            raise RuntimeError(f"{staging.directory} was read, not {directory}")
        staging.wait(STAGE_SECONDS)
        try:
            self.prime_reload(directory, None if staging.place == "nowhere" else self.prime_tensors(staging, identity))
        finally:  # before the memory of what was copied is given back
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def prime_commit(self) -> None:
        """Every rank has loaded: from now on this is what is served."""
        if self.prime_next is None:
            raise RuntimeError("nothing was loaded that could be committed")
        self.prime_directory, self.prime_identity = self.prime_next
        self.prime_received = self.prime_staging is not None and self.prime_staging.received
        self.prime_next = None
        self.prime_unstage()

    def prime_restore(self) -> None:
        """Some rank failed: go back to what was served before the load, here too.

        Raises:
            RuntimeError: that was received, so that no file holds it, or something else stands there now: the next load that succeeds makes the
                model usable again.
        """
        self.prime_next = None
        self.prime_unstage()
        if self.prime_directory is not None:
            if self.prime_received:
                raise RuntimeError(f"{self.prime_directory} was received and is in no file: load a version again")
            if self.prime_identity is not None and not _may_hold(self.prime_directory, self.prime_identity):
                raise RuntimeError(f"{self.prime_directory} is gone, or was committed anew: load a version again")
            self.prime_reload(self.prime_directory)

    def prime_is_plain(self) -> bool:
        """Whether tensors may be loaded without vLLM's reload. Looked at once: nothing changes it."""
        if self.prime_plain is None:
            config = self.vllm_config
            # Layers with adapters go by other names; scales of a quantized cache are made anew by a reload.
            known = config.lora_config is None and "fp8" not in str(config.cache_config.cache_dtype)
            model = self.model_runner.get_model()
            self.prime_plain = self.device.type == "cuda" and known and compat.keeps_as_loaded(model)
        return self.prime_plain

    def prime_served(self) -> Identity | None:
        """What this rank serves; None for the weights it was started with."""
        return self.prime_identity

    def prime_follow(self, server: int) -> bool:
        """End with the server, process id `server`, even if that is killed. The first call that a worker gets."""
        faults.arm("inference")  # the server's process is armed by itself
        return follow(server)

    def prime_tensors(self, staging: Staging, identity: Identity) -> Iterable[tuple[str, torch.Tensor]]:
        """What was staged, one tensor after the other."""
        for name, tensor in staging.tensors():
            yield name, tensor
            # vLLM has some of the tensors of a layer that it makes of several now.
            within = name.endswith("layers.0.self_attn.k_proj.weight")
            if within and faults.point(f"loading:v{identity['version']}") == "error":
                raise RuntimeError("fault injection")

    def prime_reload(self, directory: str, tensors: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """From `tensors`, or from what the version in `directory` consists of: into the parameters as they are, or through vLLM's own reload."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        # 0.26's own `reload_weights` does not set the config that its layers look up.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                forget_packed_experts(model)
            source, tensors = (None, tensors) if tensors is not None else source_of(Path(directory))
            if not self.prime_whole:
                # Also where going back has failed, too: the next reload would take half a layer of the last one for its own.
                compat.settle_reload(model, self.model_config)
            elif tensors is not None and self.prime_is_plain():
                compat.load_in_place(model, tensors, self.model_config)
                return
            self.prime_whole = False
            with compat.without_false_alarms(model):
                if tensors is not None:
                    self.model_runner.reload_weights(weights_iterator=tensors)
                else:
                    self.model_runner.reload_weights(weights_path=str(source))
            self.prime_whole = True
            if self.device.type == "cpu":
                repack_tied_heads(model)


def _may_hold(directory: str, identity: Identity) -> bool:
    """Whether a version that stands there is this one. The base model's directory is none."""
    try:
        return weights_manifest(Path(directory)).hash == identity["hash"]
    except CommitError:
        return identity["version"] == 0


def source_of(directory: Path) -> tuple[Path, Iterable[tuple[str, torch.Tensor]] | None]:
    """Where the tensors of a committed version lie, and themselves where it only tells changes. The base model's directory is none: it holds its own."""
    try:
        manifest = weights_manifest(directory)
    except CommitError:
        return directory, None
    return manifest.files, None if manifest.builds_on is None else tensors_of(directory)


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
