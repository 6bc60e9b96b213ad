"""The trainer's atomic steps: each durable thing it does is one. `ACTIONS` says what it may do next, and by which fields of the directory."""

from collections.abc import Callable

from prime_rl.transport import protocol
from prime_rl.transport.protocol import valid

from .state import FRESH, NOTHING, RECOVER, Bounds, Dir, Successors, Trainer, Violation


def dead(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    if d.done != NOTHING:
        return []
    step = t.mode
    if t.mode == FRESH:
        step = 0
    elif t.mode == RECOVER:
        step = newest_state(d)
    elif step not in dict(d.parts):
        raise Violation(f"the trainer cannot resume: checkpoints/step_{step}/trainer is gone")
    phase = "found" if bounds.bug != "aside-before-incarnation" else "aside"
    return [(f"trainer starts and reads the state of step {step}", d, Trainer(phase, t.mode, step))]


def found(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    if t.step and t.step not in {*dict(d.parts), *dict(d.recovery)}:
        raise Violation(f"the state of step {t.step} was removed while the trainer read it")
    words = f"trainer opens incarnation {len(d.incarnations)} at step {t.step}"
    opened = d._replace(incarnations=(*d.incarnations, t.step))
    if bounds.bug != "aside-before-incarnation":
        return [(words, opened, t._replace(phase="aside"))]
    weights = d.weights if d.weights[t.step] != NOTHING else _with(d.weights, t.step, len(d.incarnations))
    return [(words, opened._replace(weights=weights), t._replace(phase="run", mode=RECOVER))]


def aside(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    """One thing of the given-up incarnations after the other is set aside, then the start version is committed."""
    incarnations = d.history if bounds.bug != "aside-before-incarnation" else d.history | {len(d.incarnations): t.step}
    for version in protocol.superseded_versions(d.versions, incarnations):
        left = d._replace(weights=_with(d.weights, version, NOTHING))
        return [(f"trainer sets weights/step_{version} aside", left, t)]
    for step, _ in d.parts:
        if step > t.step:
            return [(f"trainer sets checkpoints/step_{step} aside", without_checkpoint(d, step), t)]
    for step, incarnation in d.recovery:
        if step > t.step:
            kept = tuple(entry for entry in d.recovery if entry != (step, incarnation))
            return [(f"trainer removes recovery/step_{step} of a given-up incarnation", d._replace(recovery=kept), t)]
    if bounds.bug == "aside-before-incarnation":
        return found(d, t, bounds)
    ready = t._replace(phase="run", mode=RECOVER)
    if d.weights[t.step] == NOTHING:
        words = f"trainer commits weights/step_{t.step}, its start"
        return [(words, d._replace(weights=_with(d.weights, t.step, len(d.incarnations) - 1)), ready)]
    return [("trainer is ready", d, ready)]


def run(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    if t.step >= bounds.steps:
        return [("trainer has made its last step", d, t._replace(phase="end"))]
    found: Successors = []
    if d.stop:
        found.append(("trainer hears the request to stop", d, t._replace(phase="end")))
    if d.batches > t.step:
        version, incarnation = t.step + 1, len(d.incarnations) - 1
        if d.weights[version] != NOTHING:
            raise Violation(f"weights/step_{version} is committed already")
        words = f"trainer trains rollouts/step_{t.step} and commits weights/step_{version}"
        made = d._replace(weights=_with(d.weights, version, incarnation))
        found.append((words, made, t._replace(phase="committed", step=version)))
    return found


def committed(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    """What to prune is decided once, by the lease of this moment; then one version after the other goes."""
    saving = [t.saving] if t.saving > 0 and bounds.bug != "saving-not-kept" else []
    todo = protocol.prunable(
        d.versions, d.history, lease=d.lease, async_level=bounds.async_level, keep=bounds.keep,
        checkpoints=[*dict(d.parts), *saving],
    )  # fmt: skip
    after = t._replace(phase="prune" if todo else "save", todo=tuple(todo))
    return [(f"trainer looks what to prune: {todo or 'nothing'}", d, after)]


def prune(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    version, *rest = t.todo
    for step in [*joint_steps(d), *([t.saving] if t.saving > 0 else [])]:
        if step - bounds.async_level <= version <= step:
            raise Violation(f"weights/step_{version} is pruned, which checkpoints/step_{step} needs")
    after = t._replace(phase="prune" if rest else "save", todo=tuple(rest))
    return [(f"trainer prunes weights/step_{version}", d._replace(weights=_with(d.weights, version, NOTHING)), after)]


def save(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    """A save copies the state and is written in the background; the next one waits for it."""
    kind = 1 if t.step % bounds.interval == 0 else -1 if t.step % bounds.recovery_interval == 0 else 0
    if kind and t.saving:
        return []
    name = {1: f"checkpoints/step_{t.step}", -1: f"recovery/step_{t.step}"}
    words = f"trainer copies the state for {name[kind]}" if kind else "trainer goes on"
    removed = d
    if kind < 0 and bounds.bug == "recovery-removed-first":
        removed = kept_newest(d, d._replace(recovery=()))
    return [(words, removed, t._replace(phase="run", saving=kind * t.step))]


def end(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    if t.saving:
        return []
    stands = t.step in dict(d.parts)
    if bounds.bug == "part-missing-at-end":
        stands = stands or t.step == d.incarnations[-1]
    if t.step and not stands:
        return [(f"trainer copies the state for checkpoints/step_{t.step}", d, t._replace(saving=t.step))]
    return [(f"trainer is done after {t.step} updates", d._replace(done=t.step), t._replace(phase="done"))]


def background(d: Dir, t: Trainer, bounds: Bounds) -> Successors:
    """The writer of saved states, beside the loop."""
    incarnation = len(d.incarnations) - 1
    if t.saving > 0:
        if t.saving in dict(d.parts):
            raise Violation(f"checkpoints/step_{t.saving}/trainer is committed already")
        parts = tuple(sorted([*d.parts, (t.saving, incarnation)]))
        return [(f"trainer commits checkpoints/step_{t.saving}/trainer", d._replace(parts=parts), t._replace(saving=0))]
    if t.saving < 0:
        if -t.saving in dict(d.recovery):
            raise Violation(f"recovery/step_{-t.saving} is committed already")
        recovery = tuple(sorted([*d.recovery, (-t.saving, incarnation)]))
        return [(f"trainer commits recovery/step_{-t.saving}", d._replace(recovery=recovery), t._replace(saving=0))]
    if len(d.recovery) > 1 and t.phase not in ("dead", "found", "aside", "done"):
        removed = kept_newest(d, d._replace(recovery=d.recovery[1:]))
        return [(f"trainer removes recovery/step_{d.recovery[0][0]}", removed, t)]
    return []


def killed(t: Trainer) -> Trainer:
    """What is left of a trainer that is killed: how its supervisor starts it again. `--recover` follows once it had been ready."""
    return Trainer(mode=t.mode)


def joint_steps(d: Dir) -> list[int]:
    """Checkpoints that can be resumed."""
    parts = dict(d.parts)
    return [step for step in d.joint if step in parts and valid(step, parts[step], d.history)]


def without_checkpoint(d: Dir, step: int) -> Dir:
    """`checkpoints/step_N` is renamed or removed with everything in it."""
    return d._replace(
        parts=tuple(entry for entry in d.parts if entry[0] != step),
        orch=tuple(other for other in d.orch if other != step),
        joint=tuple(other for other in d.joint if other != step),
    )


def kept_newest(before: Dir, after: Dir) -> Dir:
    """`after`, from which something was removed: never the newest state from which the trainer could be started again."""
    if newest_state(after) < (step := newest_state(before)):
        raise Violation(f"the newest saved state, of step {step}, is removed before a newer one is committed")
    return after


def newest_state(d: Dir) -> int:
    return max(
        (step for step, incarnation in (*d.parts, *d.recovery) if valid(step, incarnation, d.history)), default=0
    )


def _with(weights: tuple[int, ...], version: int, incarnation: int) -> tuple[int, ...]:
    return (*weights[:version], incarnation, *weights[version + 1 :])


_STATES = ("parts", "recovery", "incarnations")
_BACKGROUND = (background, _STATES)
ACTIONS: dict[str, list[tuple[Callable[..., Successors], tuple[str, ...]]]] = {
    "dead": [(dead, (*_STATES, "done"))],
    "found": [(found, (*_STATES, "weights"))],
    "aside": [(aside, (*_STATES, "weights", "orch", "joint"))],
    "run": [(run, ("weights", "incarnations", "batches", "stop")), _BACKGROUND],
    "committed": [(committed, ("weights", "incarnations", "lease", "parts")), _BACKGROUND],
    "prune": [(prune, ("weights", "incarnations", "parts", "joint")), _BACKGROUND],
    "save": [(save, _STATES), _BACKGROUND],
    "end": [(end, ("parts", "incarnations", "done")), _BACKGROUND],
    "done": [],
}
