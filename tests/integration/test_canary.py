"""Mutations of the weights on their way into a real engine, and which check finds each: the hash of what is read, or the canary of what is computed.

A mutation of the loader is made in two ways. Where only its result matters, a version is committed whose hashes are those of wrong tensors and
whose canary is that of the right ones, as the trainer would have scored it: hashes have nothing to find. Where the loader's own code matters,
a server runs without it.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import InferenceServer, LaunchServer, make_tiny_model
from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError
from prime_rl.orchestrator.canary import LEAST_MEAN, LEAST_MOST, Canaries, CanaryFailed, Difference, compare
from prime_rl.orchestrator.engine import Engine
from prime_rl.trainer.canary import CanaryScorer
from prime_rl.trainer.model import Policy
from prime_rl.trainer.parallel import World
from prime_rl.transport.canary import Canary
from prime_rl.transport.commit import stage
from prime_rl.transport.weights import (
    WeightsManifest,
    hash_directory,
    manifest_extra,
    version_dir,
    weights_manifest,
    write_base_version,
)
from support import trainer as support
from support.mutated_server import SKIP

world, make_policy = support.world, support.make_policy
Tensors = dict[str, torch.Tensor]
DRIFTED, STEPPED = 0.1, 1e-4  # relative changes of the weights: far from the base, and as after one step of RL


class Run:
    """Versions of a model, committed as the trainer does, and the client that has a server load them."""

    def __init__(self, server: InferenceServer, make_policy: Callable[..., Policy], world: World) -> None:
        self.server, self.make_policy, self.world = server, make_policy, world
        self.root = Path(tempfile.mkdtemp(prefix="run-", dir=server.weights_root))
        self.canaries = Canaries()
        self.base = write_base_version(self.root, server.model, self.score(server.model))
        self.version = 0

    def score(self, model: Path) -> Canary:
        policy = self.make_policy(model)
        vocabulary = policy.lm.config.vocab_size
        scorer = CanaryScorer(policy, self.world, vocabulary, torch.float32, torch.float32)
        return scorer.score().read()

    def changed(self, by: float, seed: int = 1) -> Tensors:
        """The base's tensors with noise of so much of their spread."""
        generator = torch.Generator().manual_seed(seed)
        tensors: Tensors = {}
        for file in sorted(self.server.model.glob("*.safetensors")):
            tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
        for tensor in tensors.values():
            tensor += torch.randn(tensor.shape, generator=generator) * (tensor.std() if tensor.numel() > 1 else 1) * by
        return tensors

    def write(self, tensors: Tensors, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_bytes((self.server.model / "config.json").read_bytes())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")

    def commit(self, tensors: Tensors, loaded: Tensors | None = None) -> WeightsManifest:
        """The next version. `loaded`: what a faulty loader makes of it."""
        self.version += 1
        right, final = self.root / f"right_{self.version}", version_dir(self.root, self.version)
        self.write(tensors, right)
        canary = self.score(right)
        extra: dict[str, object] = {}
        with stage(final, step=self.version, producer="trainer", extra=extra) as directory:
            self.write(tensors if loaded is None else loaded, directory)
            extra |= manifest_extra(self.version, 0, hash_directory(directory), canary=canary)
        return weights_manifest(final)

    async def load(self, version: WeightsManifest) -> Difference:
        """As an orchestrator does.

        Returns:
            How far off the canary was.
        """
        config = ClientConfig(base_url=self.server.base_url)
        async with Engine(config, canaries=self.canaries) as engine:
            await engine.update(version)
            return await self.difference(version)

    async def difference(self, version: WeightsManifest) -> Difference:
        assert version.canary is not None
        async with Engine(ClientConfig(base_url=self.server.base_url)) as engine:
            return compare(await engine.score(version.canary.tokens), version.canary.logprobs)

    @property
    def hides(self) -> Callable[[Difference], bool]:
        band = self.canaries.band(self.server.root)
        assert band is not None
        return band.holds


@pytest.fixture
def run(inference_server: InferenceServer, make_policy: Callable[..., Policy], world: World) -> Iterator[Run]:
    inference_server.reset()
    yield Run(inference_server, make_policy, world)
    inference_server.reset()


async def test_right_weights_are_in_a_narrow_band(run: Run) -> None:
    """Contract: float32 servers compute the trainer's numbers to 1e-4 nats, on the base and on weights far from it; also one that serves
    something else when it is first met, and a prompt that was asked before is computed anew."""
    assert (await run.load(run.base)).most < 1e-4
    drifted = run.commit(run.changed(DRIFTED))
    for version in (drifted, run.base, drifted):
        assert (await run.load(version)).most < 1e-4
    band = run.canaries.band(run.server.root)
    assert band is not None
    assert (band.mean, band.most) == (LEAST_MEAN, LEAST_MOST)

    run.canaries = Canaries()  # another orchestrator goes on: the server serves the drifted weights
    assert (await run.load(drifted)).most < 1e-4
    assert run.canaries.band(run.server.root) == band


def skip_a_tensor(base: Tensors, new: Tensors) -> Tensors:
    name = "model.layers.1.mlp.down_proj.weight"
    return {**new, name: base[name]}


def skip_a_norm(base: Tensors, new: Tensors) -> Tensors:
    name = "model.layers.0.input_layernorm.weight"
    return {**new, name: base[name]}


def swap_layers(base: Tensors, new: Tensors) -> Tensors:
    def other(name: str) -> str:
        return (
            name.replace("layers.0.", "layers.X.").replace("layers.1.", "layers.0.").replace("layers.X.", "layers.1.")
        )

    return {other(name): tensor for name, tensor in new.items()}


def stay(base: Tensors, new: Tensors) -> Tensors:
    return base


def flip(bit: int) -> Callable[[Tensors, Tensors], Tensors]:
    def flip_bit(base: Tensors, new: Tensors) -> Tensors:
        name = "model.layers.0.self_attn.o_proj.weight"
        changed = new[name].clone()
        changed.view(torch.int32)[3, 5] ^= 1 << bit
        return {**new, name: changed}

    return flip_bit


CAUGHT = [skip_a_tensor, swap_layers, stay, flip(30)]


@pytest.mark.parametrize("mutate", CAUGHT, ids=["skipped", "swapped", "stale", "exponent bit"])
async def test_the_canary_finds_what_a_loader_did_wrong(
    run: Run, mutate: Callable[[Tensors, Tensors], Tensors]
) -> None:
    """Contract: where the policy is far from the base, one tensor that was not loaded, two layers in each other's place, weights that stayed
    what they were, and one flipped bit of an exponent are found, though the server says, by its hash, that it serves the version."""
    await run.load(run.base)
    new = run.changed(DRIFTED)
    version = run.commit(new, mutate(run.changed(0.0), new))
    with pytest.raises(CanaryFailed, match="does not"):
        await run.load(version)
    async with Engine(ClientConfig(base_url=run.server.base_url)) as engine:
        assert (await engine.served()).holds(version)
    run.server.reset()


HIDDEN = [(skip_a_tensor, STEPPED), (skip_a_norm, DRIFTED), (flip(0), DRIFTED)]


@pytest.mark.parametrize(("mutate", "by"), HIDDEN, ids=["skipped", "skipped norm", "last bit"])
async def test_the_band_hides_what_changes_less_than_noise_may(
    run: Run, mutate: Callable[[Tensors, Tensors], Tensors], by: float
) -> None:
    """What the canary does not see, and why: a step's change of one tensor is smaller than what servers may be off by, and so are a norm's drift, whose
    weights hardly differ from each other, and a weight's last bit.
    Without the floor of the band even these would show: float32 is off by less."""
    noise = await run.load(run.base)
    new = run.changed(by)
    version = run.commit(new, mutate(run.changed(0.0), new))
    found = await run.load(version)
    assert run.hides(found)
    assert found.most > 0
    if by == STEPPED:
        assert found.mean > noise.mean


async def test_the_canary_finds_weights_that_stay_what_they_were_though_the_band_hides_it(run: Run) -> None:
    """Contract: a step away from what it was given before, a server that keeps that is in the band, but its numbers are the very same."""
    await run.load(run.base)
    version = run.commit(run.changed(STEPPED), run.changed(0.0))
    with pytest.raises(CanaryFailed, match="the very same as before"):
        await run.load(version)
    assert run.hides(await run.difference(version))


def stale_file(run: Run, version: WeightsManifest) -> None:
    """Old weights under the new name."""
    run.write(run.changed(0.0), version.directory)


def flipped_bit(run: Run, version: WeightsManifest) -> None:
    file = version.directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [stale_file, flipped_bit])
async def test_the_hash_finds_what_happened_to_a_file(run: Run, damage: Callable[[Run, WeightsManifest], None]) -> None:
    """Contract: what is read is what was committed, to the bit, however little it changes what is computed: the hash refuses, not the canary."""
    await run.load(run.base)
    version = run.commit(run.changed(STEPPED))
    damage(run, version)
    with pytest.raises(UserError, match=r"tensor .* is not the one|bytes") as caught:
        await run.load(version)
    assert not isinstance(caught.value, CanaryFailed)
    assert run.hides(await run.difference(run.base))  # which goes on


async def test_the_hash_finds_a_replica_that_stayed_behind(run: Run) -> None:
    """Contract: a server that serves an older version is found by what it says of itself, at once, though one step's change is within the band."""
    older, newer = run.commit(run.changed(STEPPED)), run.commit(run.changed(2 * STEPPED))
    await run.load(older)
    async with Engine(ClientConfig(base_url=run.server.base_url)) as engine:
        assert not (await engine.served()).holds(newer)
    assert run.hides(await run.difference(newer))


@pytest.mark.slow
async def test_the_canary_finds_the_traps_of_a_reload_on_cpu(
    start_server: LaunchServer,
    make_policy: Callable[..., Policy],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contract: a head that shares the embedding, and experts, are packed again by every reload; where that is left out the engine says that it
    serves the version and computes something else, and the canary finds it; also when the base is given back."""
    skip = tmp_path / "skip"
    skip.write_text("")
    monkeypatch.setenv(SKIP, str(skip))
    server = start_server(make_tiny_model(tmp_path / "moe", experts=8), module="support.mutated_server")
    run = Run(server, make_policy, world)
    await run.load(run.base)
    version = run.commit(run.changed(DRIFTED))
    for function in ("repack_tied_heads", "forget_packed_experts"):
        for there, back in ((version, run.base), (run.base, version)):
            skip.write_text(function)
            with pytest.raises(CanaryFailed, match="does not compute it"):
                await run.load(there)
            skip.write_text("")
            assert (await run.load(there)).most < 1e-3
            assert run.hides(await run.difference(there))
            await run.load(back)
            await run.load(there)
