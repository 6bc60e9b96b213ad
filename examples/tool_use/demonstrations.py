"""Problems solved with the tool, to imitate: messages with a tool call, and the tool's definition, one problem a line.

uv run python examples/tool_use/demonstrations.py [--problems 2000] [--seed 0] [--output OUTPUT.jsonl]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from calculator.arithmetic import calculate
from calculator.data import CLOSE_TAG, OPEN_TAG, SYSTEM_PROMPT, Problem, problems

# As the environment's tool server defines it: a test compares.
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate, e.g. 2*(3+4)",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "title": "calculateArguments",
        },
    },
}


def solution(problem: Problem) -> dict[str, Any]:
    """The conversation that solves a problem."""
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": problem.expression}}}
    return {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": problem.text},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": calculate(problem.expression)},
            {"role": "assistant", "content": f"{OPEN_TAG}{problem.answer}{CLOSE_TAG}"},
        ],
        "tools": [TOOL],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/tool-use-sft/demonstrations.jsonl"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [solution(problem) for problem in problems("train", options.problems, options.seed)]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.problems} problems in {options.output}")


if __name__ == "__main__":
    main()
