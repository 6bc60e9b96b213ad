"""Chat templates that installed packages ship, a tokenizer for each, and conversations to ask of them.

`python tests/support/chat_templates.py [DIRECTORY…]` prints the table of docs/reference/chat-templates.md: of the
installed templates, and of `*.jinja` in directories.
"""

import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from prime_rl.config.sft import LossMask
from prime_rl.errors import UserError
from prime_rl.trainer.sft.render import RowRenderer, Tokens

ROOT = Path(__file__).parents[2]
NEVER_SPECIAL = re.compile(r"</?(think|tool_call|tool_response|tools|arg_key|arg_value)>")
_TOKENS = re.compile(
    r"<\|[^|>'\"\s{}]{1,40}\|>|<｜[^｜>'\"\s{}]{1,40}｜>|\[/?[A-Z_]{3,25}\]|</?s>|</?(?:start|end)_of_turn>|<end_of_utterance>"
    r"|</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>|<turn\|>|<\|turn>|<\|channel>|<channel\|>|<SPECIAL_\d+>|\[gMASK\]|<sop>"
)
_ENDS = (  # of turns, the first that a template names
    "<|return|>", "<turn|>", "<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>", "<|eot|>", "<|end|>", "</s>",
)  # fmt: skip
_MORE_STOPS = ("<|call|>", "<|observation|>", "<|user|>")  # by the generation config of gpt-oss and GLM


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def talk(*texts: str, system: bool = False) -> dict[str, Any]:
    """A row of messages of user and assistant, in turns."""
    turns = [(assistant if number % 2 else user)(text) for number, text in enumerate(texts)]
    return {"messages": [SYSTEM, *turns] if system else turns}


def calls(count: int) -> list[dict[str, Any]]:
    function = {"name": "look_up", "arguments": {"word": "sea"}}
    return [{"id": f"call{number:05d}", "type": "function", "function": function} for number in range(count)]


def results(count: int) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": f"water {number}"}
        for number, call in enumerate(calls(count))
    ]


SYSTEM = {"role": "system", "content": "Be brief."}
WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}, "required": ["word"]}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": WORD}}]
SPANISH, AGAIN = ({"reasoning_content": text} for text in ("Spanish", "Again"))
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "turn": talk("one", "uno"),
    "system": talk("one", "uno", system=True),
    "turns": talk("one", "uno", "two", "dos"),
    "long": talk(*(text for i in range(3) for text in (f"say {i}", f"it {i}\n")), system=True),
    "reasoning": {"messages": [user("one"), assistant("uno", **SPANISH)]},
    "inline reasoning": talk("one", "<think>\nSpanish\n</think>\n\nuno"),
    "reasoning turns": {"messages": [user("one"), assistant("uno", **SPANISH), user("two"), assistant("dos", **AGAIN)]},
    "tool": {
        "messages": [user("one"), assistant("", tool_calls=calls(1)), *results(1), assistant("uno")],
        "tools": TOOLS,
    },
    "tools": {
        "messages": [
            *(SYSTEM, user("one"), assistant("Wait.", tool_calls=calls(2)), *results(2)),
            *(assistant("uno"), user("two"), assistant("dos")),
        ],
        "tools": TOOLS,
    },
    "tool reasoning": {
        "messages": [
            *(user("one"), assistant("", reasoning_content="Hm", tool_calls=calls(1)), *results(1)),
            *(assistant("uno", reasoning_content="So"), user("two"), assistant("dos", **AGAIN)),
        ],
        "tools": TOOLS,
    },
    "call": {"messages": [user("one"), assistant("", tool_calls=calls(1))], "tools": TOOLS},
}


@cache
def installed() -> dict[str, str]:
    """Templates by name: ours, vLLM's, the ones that mistral-common generates, and those of TRL where that is
    installed."""
    templates = {"tiny-reverse": (ROOT / "assets" / "tiny-reverse" / "chat_template.jinja").read_text()}
    for package, folder in (("vllm", "transformers_utils/chat_templates"), ("trl", "chat_templates")):
        if (spec := importlib.util.find_spec(package)) is not None and spec.submodule_search_locations:
            templates |= of_directory(Path(spec.submodule_search_locations[0]) / folder, f"{package} ")
    return templates | dict(_mistral())


def of_directory(directory: Path, prefix: str = "") -> dict[str, str]:
    """Those of `*.jinja`, but for the ones of TRL that it has altered for training."""
    paths = sorted(path for path in directory.glob("*.jinja") if not path.stem.endswith("_training"))
    return {prefix + path.stem.removeprefix("template_"): path.read_text() for path in paths}


def _mistral() -> Iterator[tuple[str, str]]:
    if importlib.util.find_spec("mistral_common") is None:
        return
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    for version, thinking in itertools.product(TokenizerVersion, (False, True)):
        efforts = {"reasoning_effort_values": ("none", "high"), "reasoning_effort_default": "none"}
        try:
            template = generate_chat_template(
                spm=version < TokenizerVersion.v11, tokenizer_version=version, image_support=False, audio_support=False,
                thinking_support=thinking, default_system_prompt=None, plain_thinking_support=False, use_special_token_variables=True,
                model_settings_fields=None, **(efforts if version >= TokenizerVersion.v15 else dict.fromkeys(efforts)),
            )  # fmt: skip
        except ValueError:  # no thinking in that version
            continue
        yield f"mistral {version}{' thinking' if thinking else ''}", template


@cache
def _byte_pairs() -> str:
    """A byte-level BPE of some merges, blanks and line breaks among them, with the word borders of GPT-4's and
    Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["The user says one, the assistant says  two.\n\n \n\nuno dos :\n"] * 5, trainer)
    return str(tokenizer.to_str())


def make_tokenizer(template: str, name: str) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """A tokenizer with the template, the tokens that it names, and the ids at which inference would stop."""
    tokens = sorted({*_TOKENS.findall(template), "<s>", "<|endoftext|>"})
    end = next((token for token in _ENDS if token in tokens), "</s>" if "[INST]" in template else "<|endoftext|>")
    tokenizer = Tokenizer.from_str(_byte_pairs())
    tokenizer.add_tokens(
        [AddedToken(token, special=not NEVER_SPECIAL.fullmatch(token), normalized=False) for token in {*tokens, end}]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, pad_token="<|endoftext|>", name_or_path=name
    )
    fast.chat_template = template
    stops = [token for token in _MORE_STOPS if token in tokens and ("[gMASK]" in tokens or "<|return|>" in tokens)]
    return fast, [fast.convert_tokens_to_ids(token) for token in (*stops, end)]


def forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The same conversation with tool arguments as objects or JSON, no content as "" or None, reasoning by other
    names."""
    for as_json, none, renamed in itertools.product((False, True), repeat=3):
        formed = json.loads(json.dumps(messages))
        for message in formed:
            if renamed and "reasoning_content" in message:
                message["reasoning"] = message["thinking"] = message["reasoning_content"]
            for one in message.get("tool_calls", ()):
                if as_json:
                    one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
                if none and not message["content"]:
                    message["content"] = None
        yield formed


def contexts(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[set[tuple[int, ...]]]:
    """For every reply the prompts that inference would be given, one a form; empty if the template itself refuses the
    conversation in all forms."""
    found = []
    for form in forms(row["messages"]):
        render = partial(tokenizer.apply_chat_template, tools=row.get("tools"), return_dict=False)
        ends = [index for index, message in enumerate(form) if message["role"] == "assistant"]
        try:
            render(form)
            found.append([tuple(render(form[:end], add_generation_prompt=True)) for end in ends])
        except (jinja2.TemplateError, TypeError, ValueError, KeyError):
            continue
    return [set(prompts) for prompts in zip(*found, strict=True)]


def replies(samples: list[Tokens]) -> list[tuple[list[int], list[int]]]:
    """The tokens before each run of trained tokens, and the run."""
    found = []
    for sample in samples:
        mask = [False, *sample.loss_mask.tolist(), False]
        edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
        ids = sample.input_ids.tolist()
        found += [(ids[:start], ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return found


REASONS = {
    "leaves out the tool calls": "writes no calls",
    "writes nothing": "writes no reply",
    "leaves out the content": "writes no content beside a call",
    "in the context that inference sees": "prompts otherwise",
}


def line(name: str, template: str) -> str:
    """The template's line in the table. Asserts of every conversation that the template accepts:

    * Before a reply stand the tokens of the prompt that the template gives for it.
    * The reply holds the message's content or its calls; its last token is a stop token, and its only one.
    * A refusal is for one of the reasons above.
    """
    tokenizer, stops = make_tokenizer(template, name)
    renderer = RowRenderer(tokenizer, LossMask(), stops)
    counts: dict[str, str] = {}
    ends: set[str] = set()
    refused: dict[str, list[str]] = {}
    for kind, row in CONVERSATIONS.items():
        if not (prompts := contexts(tokenizer, row)):
            counts[kind] = "–"
            continue
        try:
            samples = renderer.samples(row)
        except UserError as error:
            counts[kind] = "✗"
            (reason,) = [reason for part, reason in REASONS.items() if part in str(error)]
            refused.setdefault(reason, []).append(kind)
            continue
        counts[kind] = str(len(samples))
        said = [message for message in row["messages"] if message["role"] == "assistant"]
        for (context, reply), message, expected in zip(replies(samples), said, prompts, strict=True):
            text = tokenizer.decode(reply)
            assert tuple(context) in expected, (kind, tokenizer.decode(context))
            assert [token in stops for token in reply] == [False] * (len(reply) - 1) + [True], (kind, text)
            names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            parts = names or [message["content"].split("</think>")[-1].strip()]
            assert all(part in text for part in parts), (kind, text)
            ends.add(tokenizer.decode(reply[-1]))
    cells = [
        name,
        " ".join(f"`{end}`".replace("|", "\\|") for end in sorted(ends)),
        *(counts[kind] for kind in ("turns", "reasoning turns", "tools")),
        "; ".join(f"{', '.join(kinds)}: {reason}" for reason, kinds in refused.items()),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    templates = installed()
    for path in sys.argv[1:]:
        templates |= of_directory(Path(path), "trl ")
    print("| template | a reply ends with | turns | reasoning turns | tools | refused |\n|---|---|---|---|---|---|")
    print(*(line(name, template) for name, template in sorted(templates.items())), sep="\n")
