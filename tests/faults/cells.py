"""The matrix: every fault at every point of every process, with what each is expected to leave equal."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from faults.harness import Cell, Settings
from prime_rl.faults import Fault, Kind

FAULTS: tuple[Kind, ...] = ("kill", "stop", "enospc", "tear", "delay", "drop", "duplicate", "error")

# What can go wrong at a boundary: a disk is full where something is written, a message is lost where one is sent.
APPLICABLE: dict[str, tuple[Kind, ...]] = {
    "write": ("kill", "stop", "enospc", "tear"),
    "fsync": ("kill", "stop", "enospc"),
    "manifest": ("kill", "stop", "enospc", "tear"),
    "rename": ("kill", "stop", "enospc", "delay"),
    "renamed": ("kill", "stop", "delay"),
    "prune": ("kill", "stop", "delay"),
    "pruned": ("kill", "stop"),
    "incarnation": ("kill", "stop"),
    "make-durable": ("kill", "stop", "enospc"),
    "made-durable": ("kill", "stop"),
    "saved-copy": ("kill", "stop"),
    "join": ("kill", "stop", "enospc"),
    "joined": ("kill", "stop"),
    "ledger": ("kill", "stop", "enospc"),
    "update": ("kill", "stop"),
    "updated": ("kill", "stop"),
    "update-received": ("kill", "stop", "error"),
    "update-loaded": ("kill", "stop", "error"),
    "update-answered": ("kill", "stop", "error"),
    "generate": ("kill", "stop", "error"),
    "run": ("kill", "stop"),
    "result": ("kill", "stop", "drop", "duplicate", "error"),
}
COMMIT = ("write", "fsync", "manifest", "rename", "renamed")
STOPPED: Settings = {"heartbeat_timeout": 8.0}
DELAY_SECONDS = 3.0


@dataclass(frozen=True)
class Point:
    """A named place in a process. `nth`: the fault fires at the n-th passage of those that `name` matches."""

    process: str
    name: str
    nth: int = 1
    settings: Settings = field(default_factory=dict)

    @property
    def boundary(self) -> str:
        return self.name.partition(":")[0]


def points() -> list[Point]:
    """Every point of every process, each at one telling place of the run of four steps."""
    keeps_one: Settings = {"ckpt": {"keep": 1}}
    asynchronous: Settings = {"ckpt": {"save_async": True}}
    in_memory: Settings = {
        "recovery_interval": 2,
        "trainer": {"weights": {"keep": 2, "transport": "memory", "host": "127.0.0.1", "save_interval": 3}},
    }
    return [
        Point("trainer", "incarnation:*"),
        *(Point("trainer", f"{boundary}:incarnations/0.json") for boundary in ("rename", "renamed")),
        *(Point("trainer", f"{boundary}:weights/step_0") for boundary in COMMIT),
        *(Point("trainer", f"{boundary}:weights/step_2") for boundary in COMMIT),
        *(Point("trainer", f"{boundary}:weights/step_1") for boundary in ("prune", "pruned")),
        *(
            Point("trainer", f"{boundary}:weights/step_3", settings=in_memory)
            for boundary in ("make-durable", "made-durable")
        ),
        *(Point("trainer", f"{boundary}:checkpoints/step_2/trainer") for boundary in COMMIT),
        Point("trainer", "saved-copy:step_2", settings=asynchronous),
        *(Point("trainer", f"{boundary}:recovery/step_1") for boundary in COMMIT),
        *(Point("trainer", f"{boundary}:recovery/step_1") for boundary in ("prune", "pruned")),
        *(Point("orchestrator", f"{boundary}:rollouts/step_1") for boundary in COMMIT),
        *(Point("orchestrator", f"ledger:{place}", nth=4) for place in ("begin", "commit", "committed")),
        *(Point("orchestrator", f"{boundary}:checkpoints/step_2/orchestrator") for boundary in COMMIT),
        *(Point("orchestrator", f"{boundary}:checkpoints/step_2") for boundary in ("join", "joined")),
        *(Point("orchestrator", f"{boundary}:checkpoints/step_2/manifest.json") for boundary in ("rename", "renamed")),
        *(Point("orchestrator", f"{b}:checkpoints/step_2", settings=keeps_one) for b in ("prune", "pruned")),
        *(Point("orchestrator", f"{boundary}:leases/orchestrator.json", nth=2) for boundary in ("rename", "renamed")),
        Point("orchestrator", "update:v2"),
        Point("orchestrator", "updated:v2"),
        Point("environment", "run:*", nth=6),
        Point("environment", "result:*", nth=6),
        *(Point("inference", f"{boundary}:v2") for boundary in ("update-received", "update-loaded", "update-answered")),
        Point("inference", "generate", nth=6),
    ]


def matrix() -> list[Cell]:
    """Every cell, in the order in which the table shows them."""
    return [
        *(cell(do, point) for do in FAULTS for point in points() if do in _applicable(point)),
        *_ahead(),
        *_replicas(),
        *_persistent(),
        *_resumed(),
        *_launcher(),
        *_adapters(),
        *_tenants(),
        *_real_engine(),
    ]


def cell(do: Kind, point: Point) -> Cell:
    """One fault at one point of a synchronous run that is compared with the undisturbed one."""
    settings = {**point.settings, **(STOPPED if do == "stop" else {})}
    fault = Fault(point.name, point.process, do, nth=point.nth, seconds=DELAY_SECONDS if do == "delay" else 0.0)
    # What fails in an environment or an engine is attempted again, and the ledger says so; so it is with a full disk.
    repeated = point.process in ("environment", "inference") or do == "enospc"
    # A message that says that the environment failed ends its episode for good: another group takes its place.
    replaced = point.process == "environment" and do == "error"
    return Cell(
        do, point.process, point.name, (fault,),
        exact="nothing" if replaced else "training" if repeated else "all",
        ends="may end" if do == "enospc" else "goes on",
        settings=settings,
    )  # fmt: skip


def _applicable(point: Point) -> tuple[Kind, ...]:
    kinds = APPLICABLE[point.boundary]
    if point.name.endswith(".json") and point.boundary == "rename":
        return (*kinds, "tear")  # one small file: written, torn, never renamed
    if point.name == "ledger:committed":
        return ("kill", "stop")
    if point.name.startswith("write:weights/step_0"):
        return tuple(kind for kind in kinds if kind != "tear")  # the base model is not copied
    return kinds


def _ahead() -> Iterator[Cell]:
    """Sampling runs ahead of training: order depends on time; nothing is compared, but samples are trained once."""
    for process, name, nth in (
        ("trainer", "renamed:weights/step_2", 1),
        ("trainer", "write:recovery/step_1", 1),
        ("orchestrator", "rename:rollouts/step_2", 1),
        ("orchestrator", "renamed:rollouts/step_2", 1),
        ("orchestrator", "ledger:committed", 3),
        ("orchestrator", "update:v2", 1),
        ("environment", "result:*", 6),
        ("inference", "update-loaded:v2", 1),
        ("inference", "generate", 6),
    ):
        yield Cell(
            "kill, async", process, name, (Fault(name, process, "kill", nth=nth),), exact="nothing",
            settings={"orchestrator": {"max_concurrent": 4}},
        )  # fmt: skip
    both = (Fault("renamed:weights/step_2", "trainer", "kill"), Fault("update:v2", "orchestrator", "kill"))
    yield Cell("kill, async", "both", "renamed:weights/step_2 + update:v2", both, exact="nothing")


def _replicas() -> Iterator[Cell]:
    """One of several servers dies in an update, at the logprob check after it, or in a batch, and comes back."""
    for engines in (2, 3):
        for name, nth in (
            ("update-received:v2", 1),
            ("update-loaded:v2", 1),
            ("update-answered:v2", 1),
            ("logprob_check", 2 * engines + 1),  # the base's and version 1's come first
            ("generate", 9),
        ):
            yield Cell(
                f"kill, {engines} servers", "inference", name, (Fault(name, "inference", "kill", nth=nth),),
                exact="nothing", engines=engines, settings={"orchestrator": {"max_concurrent": 8}},
            )  # fmt: skip


def _persistent() -> Iterator[Cell]:
    """The disk stays full: the run ends, says so, and goes on once there is room."""
    for process, name in (
        ("trainer", "write:weights/step_2"),
        ("trainer", "write:recovery/step_1"),
        ("orchestrator", "write:rollouts/step_1"),
        ("orchestrator", "ledger:begin"),
    ):
        fault = Fault(name, process, "enospc", nth=4 if name == "ledger:begin" else 1, times=10**6)
        yield Cell(
            "enospc, persistent", process, name, (fault,), exact="training", ends="ends", settings={"max_restarts": 2}
        )


def _launcher() -> Iterator[Cell]:
    """The launcher itself dies, and everything with it; `rl --recover` goes on."""
    for place in ("incarnations/0.json", "rollouts/step_0", "weights/step_1", "checkpoints/step_2/manifest.json"):
        yield Cell("kill", "launcher", place, exact="all", ends="ends")


def _resumed() -> Iterator[Cell]:
    """A finished run is resumed from an earlier checkpoint, superseding later ones. It must end the same again."""
    for process, name in (
        ("trainer", "incarnation:*"),
        ("trainer", "renamed:incarnations/1.json"),
        ("trainer", "prune:weights/step_4"),
        ("trainer", "pruned:weights/step_4"),
        ("trainer", "set-aside:checkpoints/step_4"),
        ("trainer", "rename:checkpoints/step_4/trainer"),
        ("orchestrator", "rename:leases/orchestrator.json"),
        ("orchestrator", "join:checkpoints/step_4"),
    ):
        fault = Fault(name, process, "kill")
        yield Cell("kill, resumed", process, name, (fault,), exact="all", ends="may end", resume=2)


def _adapters() -> Iterator[Cell]:
    """Versions are adapters: a kill at every point, and in a load of the real server."""
    yield from (replace(cell("kill", point), do="kill, LoRA", lora=True) for point in points())
    for boundary in ("update-read", "update-loaded"):
        fault = Fault(f"{boundary}:v2", "inference", "kill")
        yield Cell("kill, LoRA", "inference (vLLM)", fault.point, (fault,), exact="training", engine="vllm", lora=True)


def _tenants() -> Iterator[Cell]:
    """Two tenants share a trainer; it, or one of their orchestrators, is killed. Both end as a run alone."""
    for point in points():
        if point.process in ("trainer", "orchestrator"):
            yield replace(cell("kill", point), do="kill, tenants", lora=True, tenants=True)


def _real_engine() -> Iterator[Cell]:
    """The points inside of the real server, with the real vLLM."""
    for boundary in ("update-received", "update-read", "loading", "update-loaded", "update-answered"):
        fault = Fault(f"{boundary}:v2", "inference", "kill")
        yield Cell("kill", "inference (vLLM)", fault.point, (fault,), exact="training", engine="vllm")
    stop = Fault("update-received:v2", "inference", "stop")
    yield Cell("stop", "inference (vLLM)", stop.point, (stop,), exact="training", engine="vllm", settings=STOPPED)
