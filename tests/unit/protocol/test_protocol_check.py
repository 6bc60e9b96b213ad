"""The protocol between trainer, orchestrator and engines, in all interleavings within bounds (`docs/concepts/protocol.md`).

The model decides by the functions of `transport/protocol.py`, which the processes call.
"""

import ast
import inspect
from pathlib import Path

import pytest

import prime_rl
from prime_rl.transport import protocol
from unit.protocol import orchestrator, trainer
from unit.protocol.mutants import MUTANTS, mutated
from unit.protocol.search import Search
from unit.protocol.state import Bounds, Dir

WORLDS = {
    "synchronous": Bounds(steps=3, crashes=1, async_level=0),
    "one step ahead": Bounds(steps=3, crashes=1, drain=False),
    "two steps ahead": Bounds(steps=3, crashes=1, async_level=2, max_off_policy=2, drain=False),
    "two kills and a drain": Bounds(steps=2, crashes=2),
    "two engines": Bounds(replicas=2, steps=2, crashes=1),
    "an engine joins late": Bounds(replicas=2, steps=3, crashes=0, interval=3, drain=False),
    "one joins, one leaves": Bounds(steps=2, crashes=1, concurrent=1, joins=1, leaves=1, drain=False, killed="ER"),
    "two leave, one joins": Bounds(replicas=2, steps=2, crashes=0, joins=1, leaves=2, drain=False),
    "three engines": Bounds(replicas=3, steps=2, crashes=1, concurrent=1, drain=False),
}
LARGE = ("two kills and a drain", "three engines")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in WORLDS]
)
def test_every_interleaving_within_the_bounds_keeps_every_property_and_can_end(name):
    """No read of a pruned version, staleness in bounds, exactly once, only the current lineage, no deadlock, a clean end."""
    outcome = Search(WORLDS[name]).run()
    assert outcome.violation is None, "\n".join([*outcome.trace, outcome.violation])
    assert outcome.ends > 0
    assert outcome.states > 10_000  # a model that does nothing keeps every property


@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_bug_is_found(name):
    """The check can fail: each wrong decision or order breaks the property that it endangers."""
    with mutated(name) as bounds:
        outcome = Search(bounds).run(limit=1_000_000)
    assert outcome.violation is not None
    assert MUTANTS[name].breaks in outcome.violation


def test_a_counterexample_is_a_shortest_way_in_the_words_of_the_run():
    """Synchronous training whose plan forgets the groups before: the second episode starts too early, at once."""
    with mutated("plan-off-by-one") as bounds:
        outcome = Search(bounds).run()
    assert outcome.violation == "episode 1 for step 1 starts on version 0, async level 0"
    assert outcome.trace[-2:] == ["orchestrator serves version 0", "episode 0 starts, stamped version 0"]
    assert "trainer opens incarnation 0 at step 0" in outcome.trace


def test_every_step_looks_only_at_the_fields_that_it_names():
    """A step is worked out once for all directories that agree in the named fields: a missing one would hide states."""
    search = Search(Bounds(steps=2))
    states = [search.first()]
    known = set(states)
    for state in states:  # grows meanwhile
        if len(states) < 4_000:
            new = {after for _, after in search.after(state)} - known
            known |= new
            states += sorted(new)
    for _, o, t, d in states[::3]:
        directory = search.dirs.values[d]
        for process, actions in ((search.trainers.values[t], trainer), (search.orchs.values[o], orchestrator)):
            for action, fields in actions.ACTIONS[process.phase]:
                masked = Dir(weights=())._replace(**{name: getattr(directory, name) for name in fields})
                full, narrow = (
                    [
                        (
                            words,
                            after,
                            {name: new for name, new in changed._asdict().items() if new != getattr(view, name)},
                        )
                        for words, changed, after in action(view, process, search.bounds)
                    ]
                    for view in (directory, masked)
                )
                assert full == narrow


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
