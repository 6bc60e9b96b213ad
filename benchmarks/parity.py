"""Whether vLLM and the trainer compute the same, by `rl parity`, for a tiny random model of each of several families.

    uv run --group cpu python benchmarks/parity.py [--only TYPE]... # a server for each: a minute or two a family
    python benchmarks/parity.py --shape 0.6B --shape 30B-A3B:12,replay # on a GPU: shapes, one's first 12 layers
    uv run --group cpu python benchmarks/parity.py --tables # the tables in docs/guides/parity.md from JSON

Rows that are not measured again stay in `results/parity.json`, those of shapes in `results/parity_h200.json`.
What follows `--` goes to `rl parity`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_gpus, describe_machine, renewed

HERE = Path(__file__).parent
RESULTS, SHAPES = HERE / "results" / "parity.json", HERE / "results" / "parity_h200.json"
MODELS = Path(tempfile.gettempdir()) / "shapes"
PAGE = HERE.parent / "docs" / "guides" / "parity.md"
LOGITS, CHOICES = 4.0, 2.7  # standard deviations of random models of real shapes: replies of about 4 nats a token
TOKENIZER = HERE.parent / "assets" / "tiny-reverse"
SECONDS = 600.0
SPREAD = 0.15  # of weights: those that transformers draws make all tokens equally likely
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

# Tiny shapes; heads of 32, the smallest of vLLM's attention on CPUs, and every scale and soft-cap at work.
SHAPE = {
    "vocab_size": 288, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
WINDOW = {"sliding_window": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 32, "final_logit_softcapping": 8.0, "attn_logit_softcapping": 8.0},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 32},
    "granite": {
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**WINDOW, "logit_scale": 0.25},
    "olmo2": {},
    "olmo3": WINDOW,
    "smollm3": {},
    "glm4": {},
    "exaone4": WINDOW,
    "ernie4_5": {},
    "starcoder2": WINDOW,
    "qwen3_moe": EXPERTS,
    "mixtral": {**EXPERTS, "sliding_window": None},
    "olmoe": EXPERTS,
    "granitemoe": {**EXPERTS, "logits_scaling": 4.0},
    "gpt_oss": {**EXPERTS, **WINDOW},
}


def make_model(model_type: str, directory: Path) -> None:
    """A random model of a family in float32, with the byte tokenizer of the bundled one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **FAMILIES[model_type]}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=SPREAD)
            else:  # norms and biases
                parameter.add_(torch.randn_like(parameter), alpha=SPREAD)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)


def measure(model_type: str, arguments: list[str]) -> dict[str, Any]:
    """The comparison of a family."""
    with tempfile.TemporaryDirectory() as name:
        make_model(model_type, Path(name) / model_type)
        return compare(Path(name) / model_type, Path(name), arguments)


def measure_shape(shape: str, directory: Path, arguments: list[str]) -> dict[str, Any]:
    """The comparison of a published shape, or of its first layers, `30B-A3B:12`; `,replay`: with router replay, too."""
    name, _, replay = shape.partition(",")
    model, _, layers = name.partition(":")
    if not shape_path(name, directory).exists():  # by a process that leaves no GPU memory allocated
        command = [sys.executable, __file__, "--shape", name, "--write", "--models", str(directory)]
        subprocess.run(command, check=True)
    result = compare(
        shape_path(name, directory), directory / f"of {shape}", [*arguments, *(["--router-replay"] if replay else [])]
    )
    row = {"model": model, "layers": layers or None, **result}
    if "gaps" in result:
        samples = json.loads((directory / f"of {shape}" / "parity" / "samples.json").read_text())
        logprobs = [logprob for each in samples for logprob in each[2]]
        row["mean_logprob"] = sum(logprobs) / len(logprobs)
    return row


def shape_path(name: str, directory: Path) -> Path:
    return directory / name.replace(":", "-")


def write_shape(name: str, directory: Path) -> None:
    from steps import write_random_model

    model, _, layers = name.partition(":")
    write_random_model(shape_path(name, directory), model, int(layers) if layers else None, LOGITS, CHOICES)


def compare(model: Path, directory: Path, arguments: list[str]) -> dict[str, Any]:
    """What `rl parity` finds, or the last line of why there is no verdict."""
    command = [sys.executable, "-m", "prime_rl.entrypoints.rl", "parity", "--model.name", str(model)]
    command += ["--output-dir", str(directory), "--inference.max-model-len", "512", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout, done.stderr, flush=True)
    result = directory / "parity" / "parity.json"
    if result.exists():
        return json.loads(result.read_text().replace(f"{model.parent}/", ""))
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or lines or ["it ended without a word"])[-1]
    return {"refused": last.removeprefix("error: ").replace(f"{model.parent}/", "")}


def table(rows: dict[str, Any]) -> list[str]:
    lines = ["| family | tokens | mean \\|Δ\\| | max \\|Δ\\| | KL k3 | |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        if "gaps" in row:
            gap, verdict = row["gaps"]["server - trainer"], "sound" if row["sound"] else "**not sound**"
            numbers = f"{row['tokens']} | {gap['mean']:.1e} | {gap['largest']:.1e} | {gap['k3']:.1e} | {verdict}"
        else:
            numbers = f" | | | | {row['refused'].replace('|', ' ')}"
        lines.append(f"| {name} | {numbers} |")
    return lines


def shape_table(rows: dict[str, Any]) -> list[str]:
    """Two rows of a model whose experts are replayed: with and without."""
    lines = ["| shape | tokens | mean logprob | mean \\|Δ\\| | p99 | max | KL k3 | rounding alone: mean, max | |"]
    lines.append("|" + "---|" * 9)
    for row in rows.values():
        name = f"Qwen3-{row['model']}" + (f", its first {row['layers']} layers" if row["layers"] else "")
        if "gaps" not in row:
            lines.append(f"| {name} | | | | | | | | {row['refused'].replace('|', ' ')} |")
            continue
        gaps, verdict = row["gaps"], "sound" if row["sound"] else "**not sound**"
        rounding, alone = gaps["transformers rounded - float32"], gaps.get("server - trainer, no replay")
        for gap, kind in ((alone, ", its own choice"), (gaps["server - trainer"], ", replayed" if alone else "")):
            if gap is not None:
                numbers = " | ".join(f"{gap[key]:.1e}" for key in ("mean", "p99", "largest", "k3"))
                noise = f"{rounding['mean']:.1e}, {rounding['largest']:.1e}"
                said = "" if gap is alone else verdict
                lines.append(
                    f"| {name}{kind} | {row['tokens']} | {row['mean_logprob']:.1f} | {numbers} | {noise} | {said} |"
                )
    return lines


def write_page() -> None:
    for path, mark, lines_of in ((RESULTS, "parity", table), (SHAPES, "shapes", shape_table)):
        if not path.exists():
            continue
        results = json.loads(path.read_text())
        machine, gpus = results["machine"], results["gpus"]
        packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        on = f"{', '.join(gpus[:1]) or machine['cpu']}, {machine['date']}; {packages}"
        PAGE.write_text(renewed(PAGE, mark, "\n".join([*lines_of(results["rows"]), "", f"On {on}."])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=FAMILIES, help="a family, or several")
    parser.add_argument("--shape", action="append", help="0.6B, 4B, 30B-A3B: instead of families")
    parser.add_argument("--models", type=Path, default=MODELS, help="where shapes are written")
    parser.add_argument("--write", action="store_true", help="only write the shapes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    own, arguments = (sys.argv[1:], [])
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    path = options.json or (SHAPES if options.shape else RESULTS)
    names = [] if options.tables else options.shape or options.only or list(FAMILIES)
    for name in names:
        if options.write:
            write_shape(name.partition(",")[0], options.models)
            continue
        row = measure_shape(name, options.models, arguments) if options.shape else measure(name, arguments)
        results = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        rows = {**results["rows"], name: row}
        order = FAMILIES if not options.shape else sorted(rows)
        rows = {each: rows[each] for each in order if each in rows}
        results = {"machine": describe_machine(), "gpus": describe_gpus(), "rows": rows}
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(*(shape_table if options.shape else table)({name: row})[2:], sep="\n", flush=True)
    if options.json is None and not options.write:
        write_page()


if __name__ == "__main__":
    main()
