#!/usr/bin/env python
"""Draw assets/architecture.png: the processes of a run, and what passes between them.

    uv run scripts/draw_architecture.py

Pillow's own font, so that the picture is the same on every machine.
"""

from itertools import pairwise
from math import atan2, cos, pi, sin
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

TARGET = Path(__file__).parent.parent / "assets" / "architecture.png"
WIDTH, HEIGHT, SCALE = 1500, 900, 3  # drawn larger by SCALE, then reduced: smooth edges
INK, GREY, LINE = "#1f2933", "#52606d", "#3e4c59"
BLUE, GREEN, ORANGE, VIOLET = (
    ("#dcebfa", "#2b6cb0"),
    ("#dff3e4", "#2f855a"),
    ("#fdebd3", "#c05621"),
    ("#ebe4f7", "#6b46c1"),
)

Point = tuple[float, float]
image = Image.new("RGBA", (WIDTH * SCALE, HEIGHT * SCALE), (0, 0, 0, 0))
draw = ImageDraw.Draw(image)


def text(at: Point, words: str, size: int = 21, colour: str = INK, anchor: str = "mm", bold: bool = False) -> None:
    """Write a line; `anchor` as in Pillow: `mm` is centred on `at`."""
    font = ImageFont.load_default(size * SCALE)
    draw.text((at[0] * SCALE, at[1] * SCALE), words, colour, font, anchor, stroke_width=SCALE / 2 if bold else 0)


def box(corners: tuple[float, float, float, float], fill: str, edge: str, radius: int = 16, width: int = 3) -> None:
    draw.rounded_rectangle([value * SCALE for value in corners], radius * SCALE, fill, edge, width * SCALE)


def process(corners: tuple[float, float, float, float], colours: tuple[str, str], name: str, *lines: str) -> None:
    box(corners, *colours)
    left, top, right, _ = corners
    text(((left + right) / 2, top + 40), name, 31, colours[1], bold=True)
    for number, line in enumerate(lines):
        text(((left + right) / 2, top + 84 + 30 * number), line, 20)


def chip(centre: Point, name: str, edge: str, width: int) -> None:
    """A directory of the run."""
    x, y = centre
    box((x - width / 2, y - 27, x + width / 2, y + 27), "#ffffff", edge, 12)
    text(centre, name, 22, INK)


def arrow(points: list[Point], colour: str = LINE, dashed: bool = False) -> None:
    """Lines from point to point, with a head at the last one."""
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        starts = range(0, round(length), 18) if dashed else [0]
        for start in starts:
            end = min(start + 10, length) if dashed else length
            ends = [x0 + (x1 - x0) * start / length, y0 + (y1 - y0) * start / length]
            ends += [x0 + (x1 - x0) * end / length, y0 + (y1 - y0) * end / length]
            draw.line([value * SCALE for value in ends], colour, 4 * SCALE, joint="curve")
    (x0, y0), (x1, y1) = points[-2:]
    angle = atan2(y1 - y0, x1 - x0)
    sides = [(x1 - 17 * cos(angle + turn), y1 - 17 * sin(angle + turn)) for turn in (pi / 7, -pi / 7)]
    draw.polygon([(x * SCALE, y * SCALE) for x, y in [(x1, y1), *sides]], colour)


def main() -> None:
    box((4, 4, WIDTH - 4, HEIGHT - 4), "#ffffff", "#cbd2d9", 24, 2)  # a page of its own: readable on white and on dark

    process((50, 130, 390, 310), GREEN, "Inference", "vLLM, OpenAI-compatible", "one server or many", "GPUs, or a CPU")
    process(
        (580, 130, 920, 310), VIOLET, "Environments", "verifiers, in worker processes", "turns, tools, rewards", "CPU"
    )
    process((1110, 130, 1450, 310), BLUE, "Orchestrator", "schedules episodes", "scores groups, makes batches", "CPU")
    process(
        (560, 690, 940, 860),
        ORANGE,
        "Trainer",
        "FSDP2, packed sequences",
        "one optimizer step per batch",
        "GPUs, or a CPU",
    )

    arrow([(578, 190), (394, 190)])
    text((486, 172), "prompt tokens", 20, GREY)
    arrow([(392, 250), (576, 250)])
    text((486, 270), "sampled tokens,", 20, GREY)
    text((486, 294), "log-probabilities", 20, GREY)
    arrow([(1108, 190), (924, 190)])
    text((1015, 172), "tasks", 20, GREY)
    arrow([(922, 250), (1106, 250)])
    text((1015, 270), "samples, rewards", 20, GREY)

    arrow([(1280, 130), (1280, 70), (220, 70), (220, 126)], dashed=True)
    text((750, 48), "load version n + 1; check its hash and log-probabilities", 20, GREY)

    box((50, 420, 1450, 610), "#f5f7fa", "#9aa5b1", 16, 2)
    text((750, 454), "Run directory on a shared file system", 26, GREY, bold=True)
    text((750, 586), "a directory under its final name is complete: it was committed by a rename", 19, GREY)
    chip((220, 525), "weights/step_{n+1}", GREEN[1], 280)
    chip((1280, 525), "rollouts/step_n", BLUE[1], 280)
    chip((545, 525), "checkpoints/step_N", "#9aa5b1", 250)
    chip((790, 525), "ledger.sqlite", "#9aa5b1", 180)
    chip((1000, 525), "metrics, logs", "#9aa5b1", 180)

    arrow([(1280, 312), (1280, 494)], BLUE[1])
    text((1266, 366), "one batch of samples", 20, GREY, "rm")
    arrow([(1280, 556), (1280, 775), (944, 775)], BLUE[1])
    text((1266, 672), "read by step n", 20, GREY, "rm")
    arrow([(556, 775), (220, 775), (220, 556)], GREEN[1])
    text((234, 672), "version n + 1", 20, GREY, "lm")
    arrow([(220, 494), (220, 314)], GREEN[1])
    text((234, 366), "loaded while requests are in flight", 20, GREY, "lm")
    arrow([(556, 820), (24, 820), (24, 220), (46, 220)], GREEN[1], dashed=True)
    text((290, 842), "or from memory: CUDA IPC, NCCL, gloo", 20, GREY)

    TARGET.parent.mkdir(exist_ok=True)
    image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).quantize(128).save(TARGET, optimize=True)


if __name__ == "__main__":
    main()
