"""Worker side of a weight update: `--worker-extension-cls prime_rl.inference.worker.WeightsExtension`.

vLLM mixes the class into its worker, so no name here may exist there already (all begin with `prime_`). Every rank runs
the same call; the server (`service.py`) pauses generation from the load until every rank has committed or restored.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from prime_rl import faults
from prime_rl.inference import compat
from prime_rl.inference.copy_plan import CopyPlan
from prime_rl.inference.staging import Staging
from prime_rl.lifeline import follow
from prime_rl.transport.commit import CommitError
from prime_rl.transport.exchange import Subscriber
from prime_rl.transport.weights import never_written, weights_manifest

AT_ONCE_SECONDS = 5e-3  # a small model is staged by then; another call would cost the engine a step, which is longer
STAGE_SECONDS = 600.0  # to wait for staging in a load; the server has asked before, so that nothing is under way

Identity = dict[str, Any]  # {"version", "hash", "weight_dir"}: what the server calls these weights
Tensors = Iterable[tuple[str, torch.Tensor]]


class WeightsExtension:
    """Loads committed weights: in place if the model allows it, else through vLLM's own reload."""

    # Provided by vLLM's worker, which this class is mixed into.
    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any
    rank: int

    prime_identity: Identity | None = None
    prime_directory: str | None = None
    prime_next: tuple[str, Identity] | None = None
    prime_previous: tuple[str | None, Identity | None] = None, None
    prime_staging: Staging | None = None
    prime_subscriber: Subscriber | None = None
    prime_copies: CopyPlan | None = None
    prime_plain: bool | None = None  # whether the model computes with weights as they are loaded; None: not known yet
    prime_whole = True  # every reload of vLLM's has finished: only another reload repairs one that has not

    def prime_stage(
        self, directory: str, digest: str, keep: bool, servers_on_host: int = 1, on_device: bool = True
    ) -> dict[str, Any]:
        """Begin to stage a committed version with this hash (see `Staging`), and return the progress soon after.

        `servers_on_host`: engines that do so at the same time; those of a dense model do not know of each other.
        """
        self.prime_unstage()
        self.prime_subscriber = self.prime_subscriber or Subscriber()
        sharing = servers_on_host * self.vllm_config.parallel_config.world_size
        self.prime_staging = Staging(
            Path(directory), digest, self.device, self.prime_subscriber,
            keep=keep, on_device=on_device, verify=self.rank == 0, sharing=sharing,
        )  # fmt: skip
        # Beside a GPU a step is short, and a model never is staged that fast.
        return self.prime_staging.answer(AT_ONCE_SECONDS if self.device.type == "cpu" else 0.0)

    def prime_staged(self) -> dict[str, Any]:
        """The progress of staging: see `Staging.answer`."""
        if self.prime_staging is None:
            return {"state": "failed", "why": "nothing is staged", "retry": False}
        return self.prime_staging.answer()

    def prime_unstage(self) -> None:
        """Drop the staged version."""
        if self.prime_staging is not None:
            self.prime_staging.drop()
            self.prime_staging = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # for other processes

    def prime_load(self, directory: str, identity: Identity, base: str) -> None:
        """Load the staged version, or the base model's files if none is staged.

        A failure leaves the model unusable: `prime_restore` must follow. `base` is the directory of the weights that
        this worker was started with, which vLLM knows by a name only.
        """
        self.prime_directory = self.prime_directory or base
        self.prime_next = (directory, identity)
        staging = self.prime_staging
        if staging is None:
            self.prime_reload(Path(directory))
            return
        if (str(staging.directory), staging.digest) != (directory, identity["hash"]):
            raise RuntimeError(f"{staging.directory} was staged, not {directory}")
        staging.wait(STAGE_SECONDS)
        if staging.place == "nowhere":
            self.prime_reload(weights_manifest(staging.directory).files)
            return
        try:
            self.prime_reload(self.prime_tensors(staging, identity))
        finally:  # the staged memory is freed next
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def prime_commit(self) -> None:
        """Serve the loaded version, since every rank has loaded it."""
        if self.prime_next is None:
            raise RuntimeError("nothing was loaded that could be committed")
        self.prime_previous = self.prime_directory, self.prime_identity
        self.prime_directory, self.prime_identity = self.prime_next
        self.prime_next = None
        self.prime_unstage()

    def prime_restore(self, identity: Identity) -> None:
        """Go back to the weights before the load of `identity`, since some rank failed to load or to commit it.

        Raises RuntimeError if no file holds them. The next load that succeeds makes the model usable again.
        """
        self.prime_next = None
        self.prime_unstage()
        if self.prime_identity == identity:  # this rank had committed it
            self.prime_directory, self.prime_identity = self.prime_previous
        if self.prime_directory is not None:
            self.prime_reload(files_of(Path(self.prime_directory), self.prime_identity))

    def prime_is_plain(self) -> bool:
        """Whether tensors may be loaded without vLLM's reload, which never changes."""
        if self.prime_plain is None:
            config = self.vllm_config
            # Layers with adapters have other names; scales of a quantized cache are made anew by a reload.
            known = config.lora_config is None and "fp8" not in str(config.cache_config.cache_dtype)
            known &= config.offload_config.prefetch.offload_group_size == 0  # else each forward fills parameters anew
            model = self.model_runner.get_model()
            self.prime_plain = self.device.type == "cuda" and known and compat.keeps_as_loaded(model)
        return self.prime_plain

    def prime_served(self) -> Identity | None:
        """The weights that this rank serves; None for those it was started with."""
        return self.prime_identity

    def prime_follow(self, server: int) -> bool:
        """End with the server process, even if that is killed. The first call that a worker gets."""
        faults.arm("inference")  # the server arms its own process
        return follow(server)

    def prime_tensors(self, staging: Staging, identity: Identity) -> Tensors:
        """The staged tensors."""
        for name, tensor in staging.tensors:
            yield name, tensor
            # Where vLLM reloads: in the middle of a layer, which it assembles from several tensors.
            within = name.endswith("layers.0.self_attn.k_proj.weight")
            if within and faults.point(f"loading:v{identity['version']}") == "error":
                raise RuntimeError("fault injection")

    def prime_reload(self, source: Path | Tensors) -> None:
        """Load tensors, or a directory's files: into the parameters as they are, or through vLLM's own reload."""
        from vllm.config import set_current_vllm_config

        model = self.model_runner.get_model()
        # 0.26's own `reload_weights` does not set the config that its layers look up.
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            if self.device.type == "cpu":
                compat.forget_packed_experts(model)
            if not self.prime_whole:
                # Else the next reload would take half a layer of the last one for its own.
                compat.settle_reload(model, self.model_config)
            elif not isinstance(source, Path) and self.prime_is_plain():
                tensors = list(source)
                if self.prime_copies is not None and self.prime_copies.matches(model, tensors):
                    self.prime_copies.load(tensors)
                else:
                    self.prime_copies = CopyPlan(model, tensors)
                compat.finish_load(model, self.model_config)
                return
            self.prime_whole = False
            with compat.without_false_alarms(model):
                if isinstance(source, Path):
                    self.model_runner.reload_weights(weights_path=str(source))
                else:
                    self.model_runner.reload_weights(weights_iterator=source)
            self.prime_whole = True
            if self.device.type == "cpu":
                compat.repack_tied_heads(model)


def files_of(directory: Path, identity: Identity | None) -> Path:
    """The directory of the files of weights that were loaded from `directory`, which is no committed version for 0.

    Raises RuntimeError if there are none any more.
    """
    if identity is None or identity["version"] == 0:
        return directory
    try:
        manifest = weights_manifest(directory)
    except CommitError as error:
        raise RuntimeError(f"{directory} is gone: load a version again") from error
    if manifest.hash != identity["hash"]:
        raise RuntimeError(f"{directory} was committed anew: load a version again")
    if manifest.publisher is not None:
        raise RuntimeError(f"{never_written(directory)}: load a version again")
    return manifest.files
