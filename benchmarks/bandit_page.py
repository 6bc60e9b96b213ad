"""Tables and figures of `bandit.py` in `docs/reference/bandit.md`, written from the JSON file alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from charts import Line, Panel, write_chart
from machine import renewed
from tables import markdown

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "reference" / "bandit.md"
FIGURES = DOCS / "figures"

Found = Mapping[str, Any]

OF_TOKENS = ("default", "default, masks 0.05", "ipo", "ipo, threshold 0.05", "grpo", "dapo", "dr_grpo", "ppo_clip")
WEIGHTED = ("gspo", "cispo", "none", "truncate, sequence", "truncate, geometric", "mask, sequence", "mask, geometric")
WEIGHTED_BY_TOKEN = ("truncate, token", "mask, token")
DRAWN_STALE = (
    "none",
    "truncate, token",
    "cispo",
    "truncate, sequence",
    "default",
    "default, masks 0.05",
    "grpo",
    "gspo",
)


def write_page(found: Found) -> None:
    """Figures, and the page."""
    for name, panels in figures(found).items():
        write_chart(FIGURES / f"bandit_{name}.svg", panels, "step", "expected reward")
    PAGE.write_text(page(found))


def page(found: Found) -> str:
    """`bandit.md` with the part between the markers written again."""
    return renewed(PAGE, "bandit", f"\n{_text(found)}\n")


def _text(found: Found) -> str:
    learning, best, machine = found["learning"], found["best"], found["machine"]
    start = learning["algorithms"]["grpo"]["before"]
    on = f"{machine['date']}, {machine['cores']} cores of an {machine['cpu']}, torch {machine['packages']['torch']}"
    return "\n\n".join(
        [
            f"{found['tasks']} tasks, {found['replies']} replies, {found['attempts']} attempts at each task a step, "
            f"{found['seeds']} seeds. The uniform policy, which all start from, has {start:.3f}; the best possible is "
            f"{best['with memory']:.3f} with memory and {best['without memory']:.3f} without; the teacher of `opd` and "
            f"`sft` has {found['teacher']:.3f}. Measured: {on}.",
            f"**Learning**: {_setting(learning['setting'])}. Expected reward after the last step: mean over seeds, and "
            "the worst of them.",
            markdown(_learning_table("algorithm (default loss)", learning["algorithms"])),
            "![expected reward by step, for each algorithm](../figures/bandit_algorithms.svg)",
            markdown(_learning_table("loss (grpo advantages)", learning["losses"])),
            "![expected reward by step, for each loss](../figures/bandit_losses.svg)",
            f"**Stale samples**: {'; or '.join(_setting(one['setting']) for one in found['stale'].values())}. Mean "
            f"expected reward of the last {found['settled steps']} versions: mean over seeds (worst – best). Bold: "
            "every seed ends above every seed of the uncorrected loss.",
            markdown(_stale_table(found["stale"])),
            "![expected reward by step with stale samples](../figures/bandit_stale.svg)",
            "The same for other async levels and learning rates, SGD:",
            markdown(_swept_table(found["swept"])),
        ]
    )


def _setting(setting: Found) -> str:
    memory = "with" if setting["memory"] else "without"
    return (
        f"a policy {memory} memory, async level {setting['level']}, {setting['optimizer']} at learning rate "
        f"{setting['lr']:g}, {setting['steps']} steps"
    )


def _learning_table(title: str, rows: Mapping[str, Found]) -> list[list[str]]:
    cells = [[f"`{name}`", f"{fmean(row['after']):.3f}", f"{min(row['after']):.3f}"] for name, row in rows.items()]
    return [[title, "mean", "worst seed"], *cells]


def _stale_table(stale: Mapping[str, Found]) -> list[list[str]]:
    names = list(next(iter(stale.values()))["rows"])
    fresh = ["`none`, async level 0", *(_spread(one["fresh"]["settled"]) for one in stale.values())]
    lines = [[f"`{name}`", *(_beside_none(name, one["rows"]) for one in stale.values())] for name in names]
    return [["loss", *stale], fresh, *lines]


def _beside_none(name: str, rows: Mapping[str, Found]) -> str:
    ends, uncorrected = rows[name]["settled"], rows["none"]["settled"]
    return f"**{_spread(ends)}**" if min(ends) > max(uncorrected) else _spread(ends)


def _swept_table(swept: Sequence[Found]) -> list[list[str]]:
    lines = [
        [f"{one['setting']['lr']:g}", str(one["setting"]["level"]), *map(_spread, one["settled"].values())]
        for one in swept
    ]
    return [["learning rate", "async level", *(f"`{name}`" for name in swept[0]["settled"])], *lines]


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ({min(values):.3f} – {max(values):.3f})"


def figures(found: Found) -> dict[str, list[Panel]]:
    """The panels of each figure, by its name. The mean over seeds in a band from the worst to the best of each step."""
    algorithms, losses = found["learning"]["algorithms"], found["learning"]["losses"]
    scale = (0.4, 1.0, 0.1)
    return {
        "algorithms": [Panel("algorithms, default loss", _lines(algorithms, algorithms), scale)],
        "losses": [
            Panel("bounded ratios of tokens", _lines(losses, OF_TOKENS), scale),
            Panel("weights, and ratios of sequences", _lines(losses, WEIGHTED + WEIGHTED_BY_TOKEN), scale),
        ],
        "stale": [_stale_panel(name, one) for name, one in found["stale"].items()],
    }


def _lines(rows: Mapping[str, Found], names: Sequence[str] | Mapping[str, Found]) -> list[Line]:
    return [_line(name, rows[name]) for name in names]


def _stale_panel(name: str, one: Found) -> Panel:
    fresh = _line("none, async level 0", one["fresh"], dashed=True)
    title = f"async level {one['setting']['level']}, {name}, no memory"
    return Panel(title, [fresh, *_lines(one["rows"], DRAWN_STALE)], (0.2, 0.6, 0.1))


def _line(label: str, row: Found, dashed: bool = False) -> Line:
    curve = row["curve"]
    return Line(label, curve["step"], curve["mean"], curve["low"], curve["high"], dashed)
