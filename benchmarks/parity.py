"""Whether vLLM and the trainer compute the same, by `rl parity`, for a tiny random model of each of several families.

    uv run --group cpu python benchmarks/parity.py [--only TYPE]...    # a server for each: a minute or two a family
    uv run --group cpu python benchmarks/parity.py --tables            # the table in docs/guides/parity.md from JSON

Rows of families that are not measured again stay in `results/parity.json`.
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
RESULTS = HERE / "results" / "parity.json"
PAGE = HERE.parent / "docs" / "guides" / "parity.md"
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
    """What `rl parity` finds, or the last line of why there is no verdict."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_model(model_type, directory / model_type)
        command = [
            sys.executable,
            "-m",
            "prime_rl.entrypoints.rl",
            "parity",
            "--model.name",
            str(directory / model_type),
        ]
        command += ["--output-dir", str(directory), "--inference.max-model-len", "512", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        result = directory / "parity" / "parity.json"
        if result.exists():
            return json.loads(result.read_text().replace(f"{directory}/", ""))
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return {
            "refused": (errors or lines or ["it ended without a word"])[-1]
            .removeprefix("error: ")
            .replace(f"{directory}/", "")
        }


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


def write_page(results: dict[str, Any]) -> None:
    machine = results["machine"]
    on = f"{machine['cpu']}, {machine['date']}; " + ", ".join(f"{k} {v}" for k, v in machine["packages"].items())
    body = "\n".join([*table(results["rows"]), "", f"On {', '.join(results['gpus']) or on}."])
    PAGE.write_text(renewed(PAGE, "parity", body))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=FAMILIES, help="a family, or several")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options, arguments = parser.parse_known_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for name in [] if options.tables else options.only or FAMILIES:
        row = measure(name, arguments)
        results = {"machine": describe_machine(), "gpus": describe_gpus(), "rows": {**results["rows"], name: row}}
        results["rows"] = {each: results["rows"][each] for each in FAMILIES if each in results["rows"]}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(*table({name: row})[2:], flush=True)
    write_page(results)


if __name__ == "__main__":
    main()
