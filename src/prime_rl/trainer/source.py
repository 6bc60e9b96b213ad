"""Where a run's first weights come from: a local directory, the hub, or nowhere (random); and their tokenizer."""

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from loguru import logger
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError, user_errors
from prime_rl.trainer.parallel import World, agree, on_main
from prime_rl.transport.weights import TensorEntry, hash_directory, no_tensors_message

# Shapes that fake data can use without a download: values of `_SHAPE`, experts. Head size 128, vocabulary 151,936.
_SHAPE = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "tie_word_embeddings"),
)
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_KNOWN: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ((1024, 28, 16, 8, 3072, True), {}),
    "Qwen/Qwen3-1.7B": ((2048, 28, 16, 8, 6144, True), {}),
    "Qwen/Qwen3-4B": ((2560, 36, 32, 8, 9728, True), {}),
    "Qwen/Qwen3-8B": ((4096, 36, 32, 8, 12288, False), {}),
    "Qwen/Qwen3-32B": ((5120, 64, 64, 8, 25600, False), {}),
    "Qwen/Qwen3-30B-A3B": ((2048, 48, 32, 4, 6144, False), _EXPERTS),
}
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True)
class Source:
    """Where a run's first weights come from. `directory` None: random weights of `config`'s shape."""

    name: str
    config: PretrainedConfig
    directory: Path | None
    trust_remote_code: bool = False

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """The tensors of the files with their hashes; read once, which takes seconds. Raises CommitError."""
        assert self.directory is not None
        return hash_directory(self.directory)


def locate_model(config: TrainerModel, world: World, *, random_weights: bool) -> Source:
    """`find_model` on every rank, rank 0 first: it downloads what is missing."""
    find = partial(find_model, config.name, config.trust_remote_code, random_weights)
    on_main(world, lambda: find().name)
    return agree(world, find)


def find_model(name: str, trust_remote_code: bool = False, random_weights: bool = False) -> Source:
    """Locate a model: a local directory, or a hub name (downloaded into the hub's cache).

    With `random_weights` (fake data) weights may be missing: a directory's own are used, nothing is downloaded. Raises
    UserError if it is not found or no model directory.
    """
    directory = Path(name).expanduser()
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"model {name} is a file; a directory with config.json and *.safetensors is needed")
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"model directory {name} does not exist")
        if random_weights:
            return Source(name, _known_config(name), None)
        directory = _download(name)
    if not (directory / "config.json").is_file():
        raise UserError(f"model directory {directory} has no config.json")
    with user_errors(f"{directory}/config.json cannot be used", OSError, ValueError, KeyError):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    has_weights = any(directory.glob("*.safetensors"))
    if not has_weights and not random_weights:
        raise UserError(f"model directory {no_tensors_message(directory)}")
    return Source(name, config, directory if has_weights else None, trust_remote_code)


def _known_config(name: str) -> PretrainedConfig:
    if name not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise UserError(f"fake data needs the shape of {name}: give a local model directory, or one of {known}")
    values, experts = _KNOWN[name]
    return AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        vocab_size=151_936,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        architectures=["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],  # engines choose their model by it
        **dict(zip(_SHAPE, values, strict=True)),
        **experts,
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    problem = f"model {name} is no local directory, and the hub did not give it"
    with user_errors(problem, HfHubHTTPError, HFValidationError, OSError):
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))


def attention_heads(config: PretrainedConfig) -> tuple[int, int, int]:
    """Query heads, key/value heads, and the size of one; of the last layer where layers differ, as in Gemma 4."""
    text = config.get_text_config().per_layer_config[-1]
    heads = text.num_attention_heads
    key_value = getattr(text, "num_key_value_heads", None) or heads
    return heads, key_value, getattr(text, "head_dim", None) or text.hidden_size // heads


def without_dropout(source: Source, world: World) -> PretrainedConfig:
    """A copy of the model's config without dropout, as engines sample; recomputed blocks would draw it anew, too."""
    config = deepcopy(source.config)
    text = config.get_text_config()
    for key, value in vars(text).items():
        if "drop" in key and isinstance(value, float) and value:
            setattr(text, key, 0.0)
            if world.is_main:
                logger.info("{} {:g} in the config of {} is not applied", key, value, source.name)
    return config


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UserError when there is none that works."""
    problem = f"the tokenizer in {source.directory} cannot be loaded"
    with user_errors(problem, OSError, ValueError, KeyError, ImportError):
        return AutoTokenizer.from_pretrained(source.directory, trust_remote_code=source.trust_remote_code)


def stop_ids(source: Source) -> list[int]:
    """The tokens at which a server ends a reply (`generation_config.json`). Raises UserError if that is unreadable."""
    path = None if source.directory is None else source.directory / "generation_config.json"
    if path is None or not path.is_file():
        return []
    with user_errors(f"{path} cannot be read", OSError, ValueError, AttributeError):
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
