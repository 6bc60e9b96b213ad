"""Where a run's first weights come from: a local directory, the hub, or nowhere (random weights of a known shape), and their tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen3Config

from prime_rl.errors import UserError
from prime_rl.trainer.parallel import World, agree, on_main

if TYPE_CHECKING:
    from prime_rl.config.shared import ModelConfig

# Shapes that fake data can use without a download: hidden, layers, heads, key/value heads, feed-forward. Head size 128, vocabulary 151,936.
_KNOWN = {
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B": (2048, 28, 16, 8, 6144, True),
    "Qwen/Qwen3-4B": (2560, 36, 32, 8, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 8, 12288, False),
}
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True)
class Source:
    """Where a run's first weights come from. `directory` None: random weights of `config`'s shape."""

    name: str
    config: PretrainedConfig
    directory: Path | None
    trust_remote_code: bool = False


def locate_model(config: "ModelConfig", world: World, *, random_weights: bool) -> Source:
    """`find_model` on every rank, rank 0 first: it downloads what is missing.

    Raises:
        UserError: as `find_model`, on every rank.
    """

    def find() -> Source:
        return find_model(config.name, trust_remote_code=config.trust_remote_code, random_weights=random_weights)

    on_main(world, lambda: find().name)
    return agree(world, find)


def find_model(name: str, *, trust_remote_code: bool = False, random_weights: bool = False) -> Source:
    """Locate a model: a local directory, or a hub name (downloaded into the hub's cache).

    Args:
        random_weights: The weights may be missing (fake data). A directory's are used when they are there; nothing is downloaded.

    Raises:
        UserError: not found, or not a model directory.
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
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory}/config.json cannot be used: {one_line(error)}") from error
    has_weights = any(directory.glob("*.safetensors"))
    if not has_weights and not random_weights:
        raise UserError(f"model directory {directory} has no *.safetensors (older formats must be converted first)")
    return Source(name, config, directory if has_weights else None, trust_remote_code)


def _known_config(name: str) -> PretrainedConfig:
    if name not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise UserError(f"fake data needs the shape of {name}: give a local model directory, or one of {known}")
    hidden, layers, heads, kv_heads, feed_forward, tied = _KNOWN[name]
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=feed_forward,
        tie_word_embeddings=tied,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model {name} is no local directory, and the hub did not give it: {one_line(error)}"
        ) from error


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises UserError when there is none that works."""
    try:
        return AutoTokenizer.from_pretrained(source.directory, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer in {source.directory} cannot be loaded: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's message on one line, cut to 300 characters."""
    return " ".join(str(error).split())[:300]
