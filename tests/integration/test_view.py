"""`rl view` in a real browser: a run that is being written, by keyboard, in a narrow window, and in one file."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prime_rl.transport.rollouts import open_batch
from prime_rl.transport.token_stats import write_token_stats
from support.browser import CHROMIUM, Page, browser
from support.viewing import make_run, metric_lines

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
COMMAND = [sys.executable, "-m", "prime_rl.entrypoints.rl", "view"]
MAIN = "document.getElementById('main').innerText"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def url(run: Path) -> Iterator[str]:
    """The address that the command prints."""
    with subprocess.Popen([*COMMAND, str(run)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield re.findall(r"http://\S+", server.stdout.readline())[0]
        server.kill()


async def shows(page: Page, *texts: str) -> None:
    for text in texts:
        await page.until(f"{MAIN}.includes({json.dumps(text)})")


async def test_every_view(url: str, run: Path, tmp_path: Path) -> None:
    """Contract: each view shows what the files say, those that grow included, without an error of a script."""
    async with browser(tmp_path) as page:
        await page.open(url)
        await shows(page, "Reward", "Loss")
        await page.until("document.querySelectorAll('svg path').length >= 3")
        evaluated = (
            "document.querySelector('[aria-label=\"Evaluation e over steps\"]').querySelectorAll('circle').length"
        )
        assert await page.evaluate(evaluated) == 2
        with (run / "metrics" / "trainer.jsonl").open("a") as file:
            file.write(metric_lines(range(4, 6), **{"loss/mean": 0.5, "entropy/all/mean": 1.0}) + '{"step": 6, "lo')
        await page.until("document.getElementById('runs').innerText.includes('step 5')")
        await shows(page, "Entropy")
        assert await page.evaluate("document.getElementById('live').textContent") == ""  # it answers, and nobody runs
        await page.evaluate("tip.hidden = false")  # nothing is drawn under a tooltip
        with (run / "metrics" / "trainer.jsonl").open("a") as file:
            file.write('ss/mean": 0.5}\n')
        await page.until("runs[0].last_step === 6")
        await page.evaluate("tip.hidden = true")
        await page.until("document.getElementById('runs').innerText.includes('step 6')")
        await page.open(f"{url}#rollouts?step=3&row=4")
        await shows(page, "äöü <b>4", "tool call", '"name": "look"', "2 to 3")
        assert await page.evaluate("document.querySelectorAll('.message b').length") == 1  # of the call, not the reply
        await page.open(f"{url}#rollouts?step=3&row=4&show=tokens&by=advantages")
        await page.until(
            "[...document.querySelectorAll('.tokens span')].filter((one) => one.style.background).length > 5"
        )
        await page.open(f"{url}#rollouts?step=3&row=4&show=tokens&by=log_ratios")
        await page.until("!!document.querySelector('.tokens span')")
        assert "mismatch" not in await page.evaluate(MAIN)
        (sample,) = open_batch(run / "rollouts" / "step_3").rows([4])
        count = int(np.sum(sample.loss_mask))
        write_token_stats(run, 3, 0, [sample.sample_id], [count], np.linspace([-0.5, 0], [0.4, 1], count).T)
        await shows(page, "mismatch to the sampler", "\u22120.5")
        colors = "[...document.querySelectorAll('.tokens span')].map((one) => one.style.background).filter(Boolean)"
        await page.until(f"{colors}.length === {count}")
        shades = await page.evaluate(colors)
        assert ("--neg" in shades[0], "--pos" in shades[-1]) == (True, True)
        await page.open(f"{url}#rollouts?step=3&env=wordle")
        await shows(page, "task 7, c0ffee01")
        assert await page.evaluate("document.querySelector('.list a span').innerText") == "task 7"
        await page.open(f"{url}#rollouts?step=0")
        await shows(page, "step 0 was removed: samples are kept of 2 steps, 2 to 3")
        await page.open(f"{url}#rollouts?list=episodes")
        await shows(page, "stale", "trained, step 3")
        await page.open(f"{url}#time")
        await shows(
            page, "no process of a run has reported here", "Trainer, seconds of a step", "the disk is nearly full"
        )
        await page.open(f"{url}#ledger")
        await shows(page, "dropped: stale", "issued = trained")
        await page.open(f"{url}#config")
        await shows(page, "max_steps")
        assert page.errors == []


async def test_by_keyboard_and_in_a_narrow_window(url: str, tmp_path: Path) -> None:
    """Contract: Tab reaches everything in order, with a visible focus; arrows choose samples and read curves; nothing
    is wider than a telephone."""
    async with browser(tmp_path) as page:
        await page.open(f"{url}#rollouts?step=3")
        await shows(page, "task-30")
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "Curves"
        assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        await page.evaluate("document.querySelector('.list a').focus()")
        await page.press("ArrowDown")
        await page.until("location.hash.includes('row=1')")
        await shows(page, "31.0.0.0")
        await page.until("document.activeElement.dataset.key === '1'")  # the focus outlives the drawing
        await page.open(f"{url}#rollouts?step=3&row=4&show=tokens")
        await page.until("!!document.querySelector('.tokens span')")
        await page.evaluate("document.querySelector('.tokens').focus()")
        await page.press("ArrowRight")
        await page.until("tip.style.left.endsWith('px') && tip.innerText.includes('log-probability')")
        await page.resize(400, 800)
        for view in ("curves", "rollouts?step=3", "time", "ledger", "evals", "config"):
            await page.open(f"{url}#{view}")
            await page.until("document.getElementById('main').dataset.view")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 400, view
        await page.open(f"{url}#curves")
        await page.until("!!document.querySelector('.chart')")
        await page.evaluate("document.querySelector('.chart').focus()")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            await page.press(key)
        await page.until("location.hash.startsWith('#rollouts') && location.hash.includes('step=1')")
        assert page.errors == []


async def test_one_file(run: Path, tmp_path: Path) -> None:
    """Contract: an exported page opens by itself, with curves and samples."""
    path = tmp_path / "page.html"
    subprocess.run([*COMMAND, "--export", str(path), str(run)], check=True)
    async with browser(tmp_path) as page:
        await page.open(f"{path.as_uri()}#rollouts")
        await shows(page, "task-30", "äöü <b>0")
        await page.open(f"{path.as_uri()}#curves?low=1&high=2")
        await page.until("document.querySelectorAll('svg path').length >= 3")
        await page.open(f"{path.as_uri()}#rollouts?step=2&row=0&show=tokens&by=log_ratios")
        await shows(page, "mismatch to the sampler", "äöü", "\u22120.25")
        for view, text in (
            ("time", "Trainer, seconds"),
            ("ledger", "dropped: stale"),
            ("config", "max_steps"),
            ("evals", "avg@1"),
        ):
            await page.open(f"{path.as_uri()}#{view}")
            await shows(page, text)
        assert "does not have it" not in await page.evaluate(MAIN)  # there is no evals/report.json
        assert page.errors == []
