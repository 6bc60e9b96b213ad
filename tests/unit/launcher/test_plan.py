"""What `rl` would start: placement, arithmetic, command lines. Pure: no process, no GPU."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import InferenceConfig, RLConfig, to_toml
from prime_rl.config.rl import DeploymentConfig
from prime_rl.errors import UserError
from prime_rl.inference import checks
from prime_rl.inference.checks import visible_gpus
from prime_rl.launcher import plan
from prime_rl.launcher.plan import HostResources, Plan, make_plan
from support.configs import from_table

Settings = dict[str, Any]


def planned(
    gpus: int | list[str] = 0,
    inference: Settings | None = {},  # noqa: B006
    *,
    cores: int = 16,
    gib: float | None = None,
    weights: float | None = None,
    environ: dict[str, str] | None = None,
    **shared: Any,
) -> Plan:
    """The plan of a run on a host; `inference` None: its server runs already."""
    sections = {"orchestrator": {"environments": [{"id": "reverse-text"}]}, "inference": inference, **shared}
    names = [str(index) for index in range(gpus)] if isinstance(gpus, int) else gpus
    return make_plan(from_table(RLConfig, sections), HostResources(names, cores, environ or {}, gib, weights))


def gpus_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {process.name: process.gpus for process in plan.processes}


def env(plan: Plan, name: str) -> dict[str, str]:
    return next(dict(process.env) for process in plan.processes if process.name == name)


def section(plan: Plan, name: str) -> Any:
    return plan.configs[Path(f"outputs/configs/{name}.toml")]


@pytest.mark.parametrize(
    ("gpus", "inference", "given", "placement"),
    [
        # Servers get the first GPUs and the trainer the next; the orchestrator sees none.
        (8, {"tensor_parallel_size": 3, "data_parallel_size": 2}, {"trainer_gpus": 2}, ["012345", "67"]),
        # One server a group of GPUs.
        (5, {"tensor_parallel_size": 2}, {"inference_gpus": 4}, ["01", "23", "4"]),
        (2, {}, {"inference_gpus": 2, "share_gpus": True, "trainer_gpus": 2, "gib": 80.0}, ["0", "1", "01"]),
        # A server that runs already takes none.
        (2, None, {}, ["0"]),
        # `CUDA_VISIBLE_DEVICES=2,3 rl …`: by the names given there.
        (["2", "3"], {}, {"environ": {"CUDA_VISIBLE_DEVICES": "2,3"}}, ["2", "3"]),
    ],
)  # fmt: skip
def test_placement(gpus, inference, given, placement):
    """Contract: which GPUs each server, then the trainer, gets and sees; the orchestrator none."""
    made = planned(gpus, inference, **given)
    servers = ("inference", "inference-1")[: len(placement) - 1]
    names = (*servers, "trainer", "orchestrator")
    assert gpus_of(made) == dict(zip(names, map(tuple, [*placement, ""]), strict=True))
    for name, where in gpus_of(made).items():
        assert env(made, name)["CUDA_VISIBLE_DEVICES"] == ",".join(where)


def test_the_orchestrator_knows_every_server():
    """Each has a port and a configuration of its own; one that runs already is used and not planned."""
    made = planned(5, {"tensor_parallel_size": 2}, inference_gpus=4)
    urls = ["http://localhost:8000", "http://localhost:8001"]
    assert [server.url for server in made.servers] == section(made, "orchestrator").client.api_roots == urls
    second = section(made, "inference-1")
    assert (second.server.port, second.process) == (8001, "inference-1")
    # As it was given: `rl @ configs/rl.toml` plans the same again.
    assert section(made, "rl").orchestrator.client.base_url == "http://localhost:8000/v1"
    assert [(server.url, server.port) for server in planned(2, None).servers] == [("http://localhost:8000/v1", None)]


def test_a_deployment():
    """`rl tenants` starts servers and the trainer. Its file plans the same."""
    lora = {"lora": {"rank": 4}, "tenants": {"slots": 3}}
    given = {"trainer": {**lora, "seq_len": 512}, "inference": {}, "model": {"name": "m"}}
    config = from_table(DeploymentConfig, given)
    made = make_plan(config, HostResources(["0", "1"], 64, {}, 80.0, 1.0))
    assert [process.name for process in made.processes] == ["inference", "inference-1", "trainer"]
    assert section(made, "inference").lora.tenants.slots == section(made, "trainer").tenants.slots == 3
    assert Path("outputs/configs/orchestrator.toml") not in made.configs
    assert "model         m, adapters of rank 4, of 3 tenants at a time" in plan.headlines(config, made)
    assert from_table(DeploymentConfig, tomllib.loads(to_toml(config))) == config


def test_what_is_about_to_run():
    """Model, environments, batch, GPUs and directory, in the words of the configuration."""
    sections = {
        "max_steps": 20,
        "model": {"name": "m"},
        "orchestrator": {"environments": [{"id": "reverse-text"}], "batch_size": 64, "eval": {"num_examples": 8}},
        "inference": {},
    }
    config = from_table(RLConfig, sections)
    assert plan.headlines(config, make_plan(config, HostResources(["0", "1"], 16, {}, None, None))) == [
        "model         m",
        "environments  reverse-text; evaluated on reverse-text (8 tasks)",
        "batch         20 steps of 64 rollouts (4 tasks x 16), async level 1",
        "GPUs          inference on 0; trainer on 1",
        "directory     outputs; logs in outputs/logs",
    ]


def test_one_gpu_trains_and_serves():
    """Its memory is split and neither side takes more than its share.
    Where the size of the model is not known, the trainer starts once the server has measured what is free."""
    shared: Settings = {"inference": {"gpu_memory_utilization": 0.25}, "share_gpus": True, "gib": 80.0}
    made = planned(1, **shared)
    assert section(made, "inference").gpu_memory_utilization == 0.25
    assert section(made, "trainer").model.memory_limit == 55.0
    assert [process.after_ready for process in made.processes] == [(), ("inference",), ()]
    known = planned(1, **shared, weights=8.0)
    assert section(known, "inference").kv_cache_gib == 10.0  # of 20 GiB 8 are for weights and 2 for the engine
    assert not any(process.after_ready for process in known.processes)
    for transport, published in (("auto", True), ("memory", True), ("filesystem", False)):
        made = planned(1, gib=80.0, trainer={"weights": {"transport": transport}}, share_gpus=True)
        # The trainer leaves room for a staged copy only where it publishes on the device.
        assert section(made, "inference").stage_on_device is published
        assert section(made, "trainer").weights.shares_gpu


@pytest.mark.parametrize(("share", "cache", "utilization"), [(True, 11.6, 0.2), (False, 31.6, 0.45)])
def test_two_servers_share_a_gpu(share, cache, utilization):
    """Each gets half of the memory, and all start at once. The second leaves the next ports to others."""
    made = planned(2 - share, gib=80.0, weights=1.2, share_gpus=share)
    trains = ("0",) if share else ("1",)
    assert gpus_of(made) == {"inference": ("0",), "inference-1": ("0",), "trainer": trains, "orchestrator": ()}
    assert [server.url for server in made.servers] == ["http://localhost:8000", "http://localhost:9000"]
    assert not any(process.after_ready for process in made.processes)
    for name in ("inference", "inference-1"):
        assert section(made, name).gpu_memory_utilization == pytest.approx(utilization)
        assert section(made, name).kv_cache_gib == pytest.approx(cache)


@pytest.mark.parametrize(
    "given",
    [
        {"weights": 8.0},
        {"weights": None},
        {"inference": {"model": {"dtype": "float32"}}},
        {"inference": {"vllm": {"kv-cache-memory-bytes": 1}}},
        {"cores": 7},
        {"inference": {"server": {"port": 65000}}},
        {"inference": {"kv_cache_gib": 70.0}},
        {"inference": {"gpu_memory_utilization": 0.1}},
        {"inference": {"vllm": {"max-num-seqs": 64}}},
        {"share_gpus": True, "trainer": {"lora": {}}},
    ],
)
def test_one_server_a_gpu(given):
    """Where another would not fit, nobody knows whether it would, it would gain nothing, or one was asked for."""
    assert len(planned(2, **{"gib": 80.0, "weights": 1.2, **given}).servers) == 1


@pytest.mark.parametrize(
    ("weights", "inference", "share"),
    [
        (7.7, {}, 1 - 12.7 / 80),
        (1.2, {"kv_cache_gib": 1.0}, None),
        (40.0, {}, None),
        (7.7, {"gpu_memory_utilization": 0.9}, 0.9),
    ],
)
def test_a_server_leaves_room_to_stage_a_version(weights, inference, share):
    """On its GPU, if vLLM's own choice would not; unless the user has chosen, or too little would be left to serve."""
    made = planned(2, inference, gib=80.0, weights=weights)
    assert section(made, "inference").gpu_memory_utilization == (None if share is None else pytest.approx(share))


SPREAD = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_address": "h"}
HALF = {"gpu_memory_utilization": 0.5}


@pytest.mark.parametrize(
    ("gpus", "inference", "given", "message"),
    [
        (8, None, {"inference_gpus": 2}, r"no GPU serves here \(see \[inference\]"),
        (8, {"headless": True, "vllm": {"nnodes": 2}}, {}, "another node serves its requests"),
        (8, SPREAD, {"inference_gpus": 4}, "spread over nodes"),
        (3, {"server": {"port": 65535}}, {"inference_gpus": 2}, "port 65535 leaves no ports for 2 servers"),
        (8, {"tensor_parallel_size": 4}, {"inference_gpus": 6}, r"inference_gpus 6 .* a server uses 4 \(.*\)"),
        (8, {}, {"trainer_ranks": 2}, "trainer_ranks 2, trainer_gpus 1: one GPU a rank"),
        (0, {}, {"trainer_gpus": 2}, "trainer_gpus: no GPU trains here .*--trainer-ranks"),
        (0, {}, {"inference_gpus": 2}, "inference_gpus: no GPU serves here"),
        # Not enough GPUs, with the arithmetic.
        (2, {}, {"inference_gpus": 4}, r"needs 5 GPUs \(4 for inference, 1 for trainer\), but 2 visible \(0, 1\)"),
        (0, {"device": "cuda"}, {}, r"needs 2 GPUs \(1 for inference, 1 for trainer\), but no GPU was found"),
        (0, {"device": "cuda"}, {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES is ''"),
        (1, {}, {}, "one GPU can do both: --share-gpus"),
        # Not enough memory, or nobody knows.
        (1, HALF, {"share_gpus": True, "gib": 8.0}, r"of 8.0 GiB the server takes 50% .* leaves 0.0"),
        (1, {}, {"share_gpus": True}, "give trainer.model.memory_limit"),
        (2, {}, {"share_gpus": True, "trainer_gpus": 2}, "as many GPUs must train as serve, not 2 and 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(gpus, inference, given, message):
    """Contract: one clear line with the numbers; where a setting means nothing here, it says which one does."""
    with pytest.raises(UserError, match=message):
        planned(gpus, inference, **given)


def test_visible_devices_are_read_as_cuda_reads_them(monkeypatch, tmp_path):
    """The list ends at its first invalid entry. Without it the driver is asked; one that hangs is named in time."""
    lists = {"2,3": ["2", "3"], "": [], "-1": [], "0,-1,1": ["0"], " GPU-8a , 1": ["GPU-8a", "1"]}
    assert {value: visible_gpus({"CUDA_VISIBLE_DEVICES": value}) for value in lists} == lists
    uncached = checks.gpu_memory.__wrapped__
    monkeypatch.setattr(checks, "gpu_memory", uncached)
    monkeypatch.setattr(plan, "gpu_memory", uncached)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == [], "no nvidia-smi"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'a warning'; echo '0, 81559'; echo '1, 40960'; echo '2, [N/A]'")
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus({}) == ["0", "1", "2"]
    assert HostResources.of_this_host(InferenceConfig()).gpu_gib == 40.0
    tool.write_text("#!/bin/sh\nexec /bin/sleep 60")
    monkeypatch.setattr(checks, "_DRIVER_SECONDS", 0.2)
    with pytest.raises(UserError, match="nvidia-smi does not answer"):
        visible_gpus({})


def test_command_lines():
    """Never `uv run`; torchrun lets ranks finish; `--recover` is for the jobs."""
    server, single, orchestrator = planned(recover=True).processes
    assert server.argv[1:] == ("-m", "prime_rl.entrypoints.inference", "@", "outputs/configs/inference.toml")
    train = ("@", "outputs/configs/trainer.toml", "--recover")
    assert single.argv[1:] == ("-m", "prime_rl.entrypoints.trainer", *train)
    assert orchestrator.argv[3:] == ("@", "outputs/configs/orchestrator.toml", "--recover")
    several = planned(trainer_ranks=2, recover=True).processes[1]
    assert several.argv[1:5] == ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert several.argv[-5:] == ("-m", "prime_rl.trainer.rl.train", *train)
    assert (single.drain_children, several.drain_children) == (False, True)


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"cores": 2}, ("1", "1")),
        ({"cores": 2, "async_level": 0}, ("1", "2")),
        ({"cores": 8}, ("4", "4")),
        ({"cores": 2, "environ": {"OMP_NUM_THREADS": "3"}}, (None, None)),
    ],
)
def test_threads_fit_the_cores(given, threads):
    """Servers and trainer share the cores when they work at the same time. What the user has set stays."""
    made = planned(**given)
    assert (env(made, "inference").get("OMP_NUM_THREADS"), env(made, "trainer").get("OMP_NUM_THREADS")) == threads


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        ({}, "auto"),
        ({"recovery_interval": 3}, 3),
        ({"bench": True}, None),
        ({"max_restarts": 0, "trainer": {"recovery_interval": 7}}, 7),
    ],
)
def test_recovery_needs_recovery_checkpoints(given, interval):
    """Where processes are started again the trainer keeps a rolling checkpoint; its own setting wins."""
    assert section(planned(**given), "trainer").recovery_interval == interval
