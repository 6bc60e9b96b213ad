"""Correct answers to reverse-text, to imitate: `python examples/reverse_text/demonstrations.py`."""

import json
from pathlib import Path

from reverse_text.data import texts

OUTPUT = Path("outputs/reverse-text-sft/demonstrations.jsonl")
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."

rows = [
    {
        "messages": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"<reversed_text>{text[::-1]}</reversed_text>"},
        ]
    }
    for text in texts("train", 1000)
]
OUTPUT.parent.mkdir(parents=True, exist_ok=True)
OUTPUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
print(f"{len(rows)} demonstrations in {OUTPUT}")
