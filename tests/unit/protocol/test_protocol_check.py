"""The protocol of trainer, orchestrator and servers, in all interleavings within bounds (`docs/concepts/protocol.md`).

The model decides by the functions of `transport/protocol.py`, which the processes call.
"""

import ast
import inspect
from pathlib import Path

import pytest

import prime_rl
from prime_rl.transport import protocol
from unit.protocol.model import Bounds, search
from unit.protocol.mutants import MUTANTS, mutated

WORLDS = {
    "synchronous": Bounds(steps=3, async_level=0, concurrent=1, drain=False),
    "one step ahead": Bounds(steps=2),
    "two steps ahead": Bounds(steps=3, crashes=0, async_level=2, max_off_policy=2),
    "two servers": Bounds(replicas=2, steps=2, concurrent=1, drain=False),
    "three steps, one kill": Bounds(steps=3),
    "two kills and a drain": Bounds(steps=2, crashes=2),
    "three servers": Bounds(replicas=3, steps=2, concurrent=1, drain=False),
}
LARGE = ("three steps, one kill", "two kills and a drain", "three servers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in WORLDS]
)
def test_every_interleaving_within_the_bounds_keeps_every_property_and_can_end(name):
    """No read of a pruned version, staleness in bounds, only the current lineage, no deadlock, a clean end."""
    outcome = search(WORLDS[name])
    assert outcome.violation is None, "\n".join([*outcome.trace, outcome.violation])
    assert outcome.ends > 0
    assert outcome.states > 5_000  # a model that does nothing keeps every property


@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_bug_is_found(name):
    """The check can fail: each wrong decision or order breaks the property that it endangers."""
    with mutated(name) as bounds:
        outcome = search(bounds)
    assert outcome.violation is not None
    assert MUTANTS[name].breaks in outcome.violation


def test_every_decision_of_the_protocol_is_called_by_a_process():
    """What is checked is what runs: a function that only the model calls would prove nothing."""
    called = set()
    for path in Path(prime_rl.__file__).parent.rglob("*.py"):
        if path.name != "protocol.py":
            called |= {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    functions = inspect.getmembers(protocol, inspect.isfunction)
    decisions = {name for name, function in functions if function.__module__ == protocol.__name__}
    internal = {"valid_versions", "current_incarnation", "valid", "oldest_start_version"}  # called by the others
    assert decisions - internal <= called
