"""A tokenizer from its files alone: tokenizer.json and a chat template.

transformers' loader imports torch, which costs every worker 600 MB and several seconds for nothing. Renderers need
only what is here; a model whose files this cannot read goes through transformers instead.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from huggingface_hub import hf_hub_download

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class FileTokenizer:
    """The part of a transformers tokenizer that renderers use, with the same results."""

    def __init__(self, name_or_path: str, backend: tokenizers.Tokenizer, config: dict[str, Any], template: str) -> None:
        """Raises jinja2.TemplateError when the template is not plain Jinja."""
        self.name_or_path = name_or_path
        self.chat_template = template
        self._backend = backend
        self._special = {name: token for name in SPECIAL_TOKENS if (token := _content(config.get(name)))}
        self._template = _environment().from_string(template)
        self.eos_token_id = self._id("eos_token")
        self.unk_token_id = self._id("unk_token")

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            number = self._backend.token_to_id(tokens)
            return self.unk_token_id if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = False, tokenize: bool = True, **kwargs: Any
    ) -> Any:
        """The rendered text, or its ids. Raises jinja2.TemplateError when the template refuses the messages."""
        kwargs.pop("return_dict", None)
        variables = {"tools": None, "documents": None, **self._special, **kwargs}
        text = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._backend.token_to_id(token)


def from_files(model: str) -> FileTokenizer | None:
    """The tokenizer of a local directory or hub model; None when its files do not suffice."""
    paths = {name: _file(model, name) for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}
    tokenizer_path, config_path, template_path = paths.values()
    if tokenizer_path is None or config_path is None:
        return None
    config = json.loads(config_path.read_text())
    template = template_path.read_text() if template_path is not None else config.get("chat_template")
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    # Where a tokenizer was saved after a call with truncation or padding, the file has both; transformers sets them anew for every call.
    backend.no_truncation()
    backend.no_padding()
    several = any((tokenizer_path.parent / "additional_chat_templates").glob("*.jinja"))
    if not isinstance(template, str) or several or not _has_all_tokens(backend, config):
        return None
    try:
        return FileTokenizer(model, backend, config, template)
    except jinja2.TemplateError:  # an extension that only transformers has
        return None


def _has_all_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> bool:
    """Whether tokenizer.json has, just so, every added and special token that tokenizer_config.json names: transformers adds the others."""
    known = backend.get_added_tokens_decoder().values()
    added = [tokenizers.AddedToken(**fields) for fields in (config.get("added_tokens_decoder") or {}).values()]
    more = [config.get(name) or () for name in ("additional_special_tokens", "extra_special_tokens")]
    special = [config.get(name) for name in SPECIAL_TOKENS]
    for tokens in more:
        special += tokens.values() if isinstance(tokens, dict) else tokens
    names = {token.content for token in known}
    described = {repr(token) for token in known}
    return all(repr(token) in described for token in added) and {_content(token) for token in special} - {""} <= names


def _file(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(model, name))
    except (OSError, ValueError):  # no such file, no such model, no network: the caller's fallback says which
        return None


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _environment() -> jinja2.Environment:
    """As chat templates expect it (transformers' documentation of chat templates)."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment
