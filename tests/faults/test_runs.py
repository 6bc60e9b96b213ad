"""The fast part of the fault matrix, on every commit: whole runs with several faults each.

The runs go two at a time, which is what two cores can do; a test waits for its own.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from faults.cells import STOPPED
from faults.harness import Cell, Result, run_cell
from prime_rl.faults import Fault, Kind


def on(process: str, *points: str, do: Kind = "kill", nth: int = 1) -> tuple[Fault, ...]:
    return tuple(Fault(point, process, do, nth=nth) for point in points)


# Most versions are in no file; the trainer that dies after it has committed 3 goes on from 2, which it publishes again.
PUBLISHED = {"recovery_interval": 2, "trainer": {"weights": {"transport": "memory", "host": "127.0.0.1"}}}
UNDISTURBED = Cell("none", "-", "-")
CELLS = {
    "trainer and orchestrator killed and stopped": Cell(
        "kill, stop", "trainer, orchestrator", "several",
        on("trainer", "rename:checkpoints/step_2/trainer", "renamed:weights/step_3")
        + on("orchestrator", "renamed:rollouts/step_0", "join:checkpoints/step_2")
        + on("orchestrator", "ledger:commit", do="stop", nth=4),
        settings=STOPPED,
    ),
    "weights from memory": Cell(
        "kill", "trainer, inference", "several",
        on("trainer", "renamed:weights/step_3") + on("inference", "update-loaded:v2"),
        exact="training", settings=PUBLISHED,
    ),
    "disk full": Cell(
        "enospc", "trainer", "write:weights/step_2", (Fault("write:weights/step_2", "trainer", "enospc", times=10**6),),
        exact="training", ends="ends", settings={"max_restarts": 0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The cells of the selected tests, under way."""
    root = tmp_path_factory.mktemp("runs")
    selected = [
        item.callspec.params["name"]
        for item in request.session.items
        if "name" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_cell, UNDISTURBED, root / "undisturbed")

        def run(name: str) -> Result:
            assert first.result().problems == []
            return run_cell(CELLS[name], root / name.replace(" ", "-"), root / "undisturbed" / "run")

        yield {"undisturbed": first, **{name: pool.submit(run, name) for name in CELLS if name in selected}}


def test_an_undisturbed_run_ends_right(runs):
    assert runs["undisturbed"].result().problems == []


@pytest.mark.parametrize("name", CELLS)
def test_a_disturbed_run_ends_right(runs, name):
    """Exit status, exactly-once, conservation, checkpoints, what is served; where order is fixed, the same bits."""
    result = runs[name].result()
    assert not result.problems, "\n".join(result.problems)
    assert result.outcome == ("ended, then recovered" if CELLS[name].ends == "ends" else "went on")
