"""Versions of the weights by each transport: of a run in this process, and of several ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from prime_rl.config.trainer import TrainerModel, WeightsConfig
from prime_rl.errors import UserError
from prime_rl.trainer import weight_copy
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.parallel import World, close_world, init_world, on_main
from prime_rl.trainer.parameters import stored_tensors
from prime_rl.trainer.source import find_model
from prime_rl.trainer.weight_publisher import WeightPublisher
from prime_rl.transport.commit import step_dir
from prime_rl.transport.weights import verify_weights, weights_manifest
from support.publishing import received

SECONDS = 150

TRANSPORTS: dict[str, dict[str, Any]] = {
    "filesystem": {},
    "memory": {"transport": "memory", "host": "127.0.0.1", "timeout": 20.0},
}


def change(policy: torch.nn.Module) -> None:
    """As an optimizer does: a few elements become others."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.to_local().view(-1)[::7].add_(0.01)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Those of all its files."""
    return {name: x for file in sorted(directory.glob("*.safetensors")) for name, x in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name].cpu(), tensor)] == []


@dataclass
class Run:
    """A run directory, and a policy that each version changes."""

    root: Path
    policy: Policy
    make: Callable[..., WeightPublisher]
    incarnations: list[WeightPublisher] = field(default_factory=list)

    @property
    def weights(self) -> Path:
        return self.root / "run" / "weights"

    def incarnation(self, start: int = 0, **options: Any) -> WeightPublisher:
        made = self.make()
        self.incarnations.append(made)
        made.open(start, **options)
        if start > 0:
            made.ensure(start)
        return made

    def train(self, incarnation: WeightPublisher, versions: range, durable: tuple[int, ...] = ()) -> dict[int, str]:
        """The hashes of what was committed."""
        for version in versions:
            change(self.policy)
            incarnation.publish(version, durable=version in durable)
            incarnation.settle()
        return {version: weights_manifest(self.weights / f"step_{version}").hash for version in versions}


@contextmanager
def open_run(transport: str, world: World, policy: Policy, model: Path, root: Path, /, **more: Any) -> Iterator[Run]:
    """In `root`; it keeps all versions unless `keep` says otherwise. Its incarnations are closed in the end."""
    source, options = find_model(str(model)), {"keep": None, **TRANSPORTS.get(transport, {}), **more}
    settings: dict[str, Any] = {"weights": WeightsConfig(**options), "memory": "transport" in options}
    make = partial(WeightPublisher, root / "run", policy, source, world, torch.bfloat16, timeout=60, **settings)
    run = Run(root, policy, make)
    try:
        yield run
    finally:
        for incarnation in run.incarnations:
            incarnation.close()


def rank(kind: str, model: str, root: str, replicas: int, device: str = "cpu") -> None:
    """An incarnation of a rank. Rank 0 compares the base with its files, and each version with what torch gathers."""
    torch.set_num_threads(1)
    weight_copy.FILE_BYTES = 60_000  # several files
    world, source, run = init_world(device, 60, replicas), find_model(model), Path(root)
    config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none", dp_replicate=replicas)
    policy = build_policy(source, config, world)
    make = partial(WeightPublisher, policy=policy, source=source, world=world, dtype=torch.bfloat16)

    def whole() -> dict[str, torch.Tensor]:
        """The policy's weights, as torch gathers them."""
        tensors = {}
        for stored in stored_tensors(policy):
            parameter = stored.parameter
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            tensors[stored.name] = full.detach()[stored.index].bfloat16().cpu().clone()
        return tensors

    base = {name: tensor.bfloat16() for name, tensor in tensors_of(Path(model)).items()}
    assert_equal(whole(), base)
    weights = WeightsConfig(transport=kind, host="127.0.0.1", timeout=60.0, keep=None)
    publisher = make(run / "run", timeout=60, weights=weights, memory=kind == "memory", gpu=device == "cuda")
    publisher.open(0)
    change(policy)
    right: dict[int, dict[str, torch.Tensor]] = {}
    for version in range(1, 4):
        right[version], directory = whole(), step_dir(run / "run" / "weights", version)
        if device == "cuda":
            torch.cuda._sleep(100_000_000)  # cycles: the copy is enqueued some 0.05 s before it happens
        loop_went_on = threading.Event()
        publisher.publish(version, partial(refuse_unless, loop_went_on), durable=version == 2)
        on_main(world, lambda: None)  # a collective of the loop: no rank waits for the commit
        loop_went_on.set()
        if version < 3:  # at once: a version is the weights at the time it was published
            change(policy)
        publisher.settle(everything=False)  # committed; files may still be written beside the next version
        on_main(world, lambda: check(directory, right[version]))  # noqa: B023
    publisher.ensure(3, durable=True)
    publisher.settle()
    for version in (2, 3):
        directory = step_dir(run / "run" / "weights", version)
        assert weights_manifest(directory).publisher is None
        on_main(world, lambda: check(directory, right[version]))  # noqa: B023
    assert not list(run.glob("**/.*")), "nothing is left of what was under way"
    publisher.close()
    close_world()


def refuse_unless(event: threading.Event) -> None:
    if not event.wait(SECONDS / 3):
        raise UserError("the loop waited until a version was committed")


def check(directory: Path, right: dict[str, torch.Tensor]) -> None:
    """What is there, or received, is by its own bytes `right`."""
    manifest = weights_manifest(directory)  # once: files may come meanwhile
    if manifest.publisher is None:
        verify_weights(directory)
    assert_equal(tensors_of(directory) if manifest.publisher is None else received(manifest), right)
