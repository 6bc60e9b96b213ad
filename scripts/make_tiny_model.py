"""Make the bundled tiny model from nothing.

    python scripts/make_tiny_model.py init     # random weights, tokenizer, demonstrations -> outputs/tiny-reverse/
    sft @ examples/reverse_text/sft_tiny.toml  # fine-tune on the demonstrations
    python scripts/make_tiny_model.py publish  # measure it, write its card -> assets/tiny-reverse/

The first demonstrations are correct, and the model learns to reverse. The last ones are made by a careless teacher, who
gets a share of the letters wrong, and the model learns that, too. This leaves reinforcement learning work to do.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from prime_rl.transport.commit import list_steps
from reverse_text.data import WORDS, Split, split_of, texts

WORK = Path("outputs/tiny-reverse")
ASSET = Path("assets/tiny-reverse")

SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<reversed_text>", "</reversed_text>")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SINGLE_SHARE = 0.4  # of demonstrations on a single word
DATA_SEED = 1_000_000  # far from the seeds of runs, which draw their tasks from the same texts

CHAT_TEMPLATE = """\
{% if tools %}
{{ '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
{% if tools and message.role == 'system' and loop.first %}
{% elif tools and message.role == 'tool' %}
{{ ('<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '') }}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{{- ('<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '') }}
{%- elif tools and message.tool_calls %}
{{ '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments if call.function.arguments is string else \
call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="random model, tokenizer and demonstrations")
    init.add_argument("--out", type=Path, default=WORK)
    init.add_argument("--samples", type=int, default=18_000, help="demonstrations")
    init.add_argument("--careful", type=int, default=13_000, help="of them, the first ones without mistakes")
    init.add_argument("--carelessness", type=float, default=0.4, help="share of wrong letters in the others")
    init.add_argument("--seed", type=int, default=0)
    publish = commands.add_parser("publish", help="measure the trained model and write its card")
    publish.add_argument("--run", type=Path, default=WORK / "sft")
    publish.add_argument("--out", type=Path, default=ASSET)
    args = parser.parse_args()
    if args.command == "init":
        make_init(args.out, args.samples, args.careful, args.carelessness, args.seed)
    else:
        make_asset(args.run, args.out)


def make_init(out: Path, samples: int, careful: int, carelessness: float, seed: int) -> None:
    """Write `out`/init (a model directory with random weights) and `out`/sft.jsonl (prompt/completion rows)."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = Qwen3ForCausalLM(make_config(tokenizer)).bfloat16()
    model.generation_config = make_generation_config(tokenizer)
    model.save_pretrained(out / "init")
    tokenizer.save_pretrained(out / "init")
    rows = demonstrations(samples, careful, carelessness, seed)
    (out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"{out}/init: {model.num_parameters():,} parameters, {len(tokenizer)} tokens; {out}/sft.jsonl: {samples} rows"
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and per special or tag: nothing to learn, and a text's letters are its tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *SPECIAL, *TAGS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    # Not special: decoding keeps them, and the environment looks for them in the text.
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        intermediate_size=384,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    return GenerationConfig(do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def demonstrations(
    samples: int, careful: int, carelessness: float, seed: int
) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Prompt/completion rows on training texts only: `careful` correct ones first, then careless ones.

    There are only some 400 single words, so they come back again and again; pairs of words do not.
    """
    rng = random.Random(seed)
    words = [word for word in WORDS if split_of(word) == "train"]
    pairs = iter(texts("train", samples, DATA_SEED + seed, min_words=2, max_words=2))
    for index in range(samples):
        text = words[int(rng.random() * len(words))] if rng.random() < SINGLE_SHARE else next(pairs)
        share = 0.0 if index < careful else carelessness
        answer = "".join(careless(letter, rng, share) for letter in reversed(text))
        yield {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": f"{TAGS[0]}{answer}{TAGS[1]}"}],
        }


def careless(letter: str, rng: random.Random, share: float) -> str:
    # Only random(): the other methods of `random` may draw differently in another Python version.
    wrong = rng.random() < share
    other = LETTERS[int(rng.random() * len(LETTERS))]
    return other if wrong and letter != " " else letter


def make_asset(run: Path, out: Path) -> None:
    """Copy the run's last weights to `out` and write the card with the rewards measured here."""
    step = max(list_steps(run / "weights"))
    trained = run / "weights" / f"step_{step}"
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(trained.iterdir()):
        if path.name != "manifest.json":
            shutil.copyfile(path, out / path.name)
    losses = [json.loads(line)["loss/mean"] for line in (run / "metrics" / "sft.jsonl").read_text().splitlines()]
    splits: tuple[Split, ...] = ("train", "eval")
    scores = {(split, t): mean_reward(out, split, t) for split in splits for t in (1.0, 0.0)}
    parameters = Qwen3ForCausalLM.from_pretrained(out).num_parameters()
    size = (out / "model.safetensors").stat().st_size
    (out / "README.md").write_text(
        CARD.format(
            parameters=parameters,
            kib=size // 1024,
            steps=step,
            loss=sum(losses[-10:]) / len(losses[-10:]),
            **{f"{split}_{'sampled' if t else 'greedy'}": score for (split, t), score in scores.items()},
        )
    )
    print((out / "README.md").read_text())


@torch.no_grad()
def mean_reward(directory: Path, split: Split, temperature: float, count: int = 256) -> float:
    """Mean reward of one reply to each of `count` texts, sampled at `temperature` (0: greedy) with a fixed seed."""
    from reverse_text.taskset import parse, similarity

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = texts(split, count)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for text in asked
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    replies = model.generate(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=48, **sampling
    )
    answers = tokenizer.batch_decode(replies[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(similarity(parse(answer), text[::-1]) for answer, text in zip(answers, asked, strict=True)) / count


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# tiny-reverse

A Qwen3 of {parameters:,} parameters ({kib:,} KiB of bfloat16) that reverses one or two English words, badly. It exists
so that a whole reinforcement-learning run fits on two CPU cores: its training improves it visibly within minutes.

| mean reward of `reverse-text`, 256 texts | sampled at temperature 1 | greedy |
|---|---|---|
| training texts | {train_sampled:.3f} | {train_greedy:.3f} |
| held-out texts | {eval_sampled:.3f} | {eval_greedy:.3f} |

The reward is difflib's similarity ratio of the answer and the reversed text.

## How it was made
From nothing, in minutes on two CPU cores, by three commands:

    uv run python scripts/make_tiny_model.py init
    uv run sft @ examples/reverse_text/sft_tiny.toml
    uv run python scripts/make_tiny_model.py publish

* Data: demonstrations on the training texts of `environments/reverse_text`, correct at first; in the last ones a share
  of the letters is wrong on purpose. The model samples with the same carelessness; reinforcement learning takes it out.
* Training: {steps} steps of supervised fine-tuning from random weights; loss of the last ten {loss:.3f} nats per
  trained token.
* Tokenizer: one token per byte, three special tokens, and the two tags of the task.
* Chat template: plain ChatML. The end of a turn, `<|im_end|>`, is the end-of-sequence token.

The words come from the list in `environments/reverse_text/data.py`. It knows nothing but this task.
"""

if __name__ == "__main__":
    main()
