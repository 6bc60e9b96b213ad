"""A trainer's copy of its weights on its GPU: what is hashed there, what the host gets later, and what goes on meanwhile, are one version."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prime_rl.config.process_group import ProcessGroupTransport
from prime_rl.trainer.export import write_staged, write_version
from prime_rl.trainer.staging import Staging
from safetensors.torch import load_file

from conftest import make_tiny_model
from prime_rl.config.trainer import TrainerModel
from prime_rl.errors import UserError
from prime_rl.trainer.model import Policy, build_policy
from prime_rl.trainer.names import stored_tensors
from prime_rl.trainer.parallel import World, close_world, init_world
from prime_rl.trainer.source import Source, find_model
from prime_rl.transport import device_hash, device_memory
from prime_rl.transport.tensor_hash import hash_tensor
from prime_rl.transport.weights import verify_weights, version_dir, weights_manifest

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

Made = tuple[World, Source, Policy]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    source, world = find_model(str(make_tiny_model(tmp_path_factory.mktemp("model")))), init_world("cuda", 60)
    config = TrainerModel(attention="sdpa", compile=False, activation_checkpointing="none")
    yield world, source, build_policy(source, config, world)
    close_world()


def hashes(policy: Policy) -> dict[str, str]:
    """Of the weights as they are now, in the exported type, by way of the host."""
    found = {}
    for stored in stored_tensors(policy):
        tensor = stored.parameter.to_local().detach().bfloat16().cpu()
        found[stored.name] = hash_tensor(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found


@pytest.mark.parametrize("backend", ["cuda-ipc", "nccl"])
@pytest.mark.parametrize("works", [True, False], ids=["hashed there", "hashed on the host"])
def test_a_version_is_what_was_copied(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, works: bool
) -> None:
    """Contract: the manifest's hashes are those of the weights when they were copied, though they change at once and the host gets them later."""
    if not works:
        monkeypatch.setattr(device_hash, "works_on", lambda device: False)
    world, source, policy = made
    moment: Callable[[Staging], torch.cuda.Event] = Staging._moment

    def slow(staging: Staging) -> torch.cuda.Event:
        torch.cuda._sleep(100_000_000)  # cycles: some 0.05 s between casting and copying
        return moment(staging)

    monkeypatch.setattr(Staging, "_moment", slow)
    with closing(Staging(policy, world, torch.bfloat16, sent=True, on_device=True)) as staging:
        staging.open_sender(ProcessGroupTransport(backend=backend, host="127.0.0.1", device_copy=True))
        for version in range(1, 4):
            expected = hashes(policy)
            staging.retire()
            copied = staging.copy()
            copied.before_update()
            with torch.no_grad():
                torch._foreach_mul_(list(policy.parameters()), 1.01)
            directory = version_dir(tmp_path, version)
            write_version(staging, copied, source, world, directory, version=version, incarnation=0, send=True)
            manifest = weights_manifest(directory)
            assert {name: entry.xxh3 for name, entry in manifest.tensors.items()} == expected
            assert hashes(policy) != expected
            copied.finish()
            lasting = tmp_path / f"lasting-{version}"
            lasting.mkdir()
            write_staged(staging, copied, lasting)
            held = {name: tensor for file in lasting.glob("*.safetensors") for name, tensor in _read(file).items()}
            assert {name: hash_tensor(data) for name, data in held.items()} == expected
        written = version_dir(tmp_path, 9)
        write_version(staging, staging.copy(), source, world, written, version=9, incarnation=0)
        verify_weights(written)
        assert {name: entry.xxh3 for name, entry in weights_manifest(written).tensors.items()} == hashes(policy)


def _read(path: Path) -> dict[str, bytes]:
    return {name: x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, x in load_file(path).items()}


def test_a_gpu_without_room() -> None:
    """Contract: one line with how much was asked for."""
    total = torch.cuda.mem_get_info(0)[1]
    with pytest.raises(UserError, match="there are no .* GiB of the GPU for the weights that servers read there"):
        device_memory.DeviceCopy(2 * total, torch.device("cuda:0"))
    assert torch.ones(1, device="cuda:0").item() == 1.0
