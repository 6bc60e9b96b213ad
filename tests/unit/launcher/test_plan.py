"""What `rl` would start: placement, arithmetic, command lines. Pure: no process, no GPU."""

from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import RLConfig
from prime_rl.errors import UserError
from prime_rl.inference.checks import ModelSize
from prime_rl.launcher.plan import HostResources, Plan, describe, make_plan, parse_visible

Settings = dict[str, Any]


def planned(
    gpus: int | list[str] = 0,
    inference: Settings | None = {},  # noqa: B006
    *,
    cores: int = 16,
    gib: float | None = None,
    model: ModelSize | None = None,
    environ: dict[str, str] | None = None,
    **shared: Any,
) -> Plan:
    """The plan of a run on a host; `inference` None: its server runs already."""
    sections = {"orchestrator": {"environments": [{"id": "reverse-text"}]}, "inference": inference, **shared}
    names = [str(index) for index in range(gpus)] if isinstance(gpus, int) else gpus
    return make_plan(RLConfig.model_validate(sections), HostResources(names, cores, environ or {}, gib, model))


def gpus_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {process.name: process.gpus for process in plan.processes}


def env(plan: Plan, name: str) -> dict[str, str]:
    return next(dict(process.env) for process in plan.processes if process.name == name)


def section(plan: Plan, name: str) -> Any:
    return plan.configs[Path(f"outputs/configs/{name}.toml")]


def test_servers_get_the_first_gpus_and_the_trainer_the_next() -> None:
    """COMMANDS: `--trainer-gpus 2 --inference-gpus 6`; the orchestrator sees none."""
    plan = planned(8, {"tensor_parallel_size": 3, "data_parallel_size": 2}, trainer_gpus=2)
    assert gpus_of(plan) == {"inference": ("0", "1", "2", "3", "4", "5"), "trainer": ("6", "7"), "orchestrator": ()}
    assert env(plan, "trainer")["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert env(plan, "orchestrator")["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_that_serve_are_filled_with_servers() -> None:
    """Every GPU that was asked for is used: one server a group of GPUs, each on a port that the orchestrator knows."""
    plan = planned(5, {"tensor_parallel_size": 2}, inference_gpus=4)
    assert gpus_of(plan) == {"inference": ("0", "1"), "inference-1": ("2", "3"), "trainer": ("4",), "orchestrator": ()}
    urls = ["http://localhost:8000", "http://localhost:8001"]
    assert [server.url for server in plan.servers] == section(plan, "orchestrator").client.api_roots == urls
    second = section(plan, "inference-1")
    assert (second.server.port, second.process) == (8001, "inference-1")
    command = ("-m", "prime_rl.entrypoints.inference", "@", "outputs/configs/inference-1.toml")
    assert plan.processes[1].argv[1:] == command
    # As it was given: `rl @ configs/rl.toml` plans the same again.
    assert section(plan, "rl").orchestrator.client.base_url == "http://localhost:8000/v1"


def test_one_gpu_trains_and_serves() -> None:
    """Its memory is split and neither side takes more than its share.

    Where the size of the model is not known, the trainer starts once the server has measured what is free.
    """
    shared: Settings = {"inference": {"gpu_memory_utilization": 0.25}, "share_gpus": True, "gib": 80.0}
    plan = planned(1, **shared)
    assert gpus_of(plan) == {"inference": ("0",), "trainer": ("0",), "orchestrator": ()}
    assert section(plan, "inference").gpu_memory_utilization == 0.25
    assert section(plan, "trainer").model.memory_limit == 55.0
    assert [process.after_ready for process in plan.processes] == [(), ("inference",), ()]
    known = planned(1, **shared, model=ModelSize(8.0))
    assert section(known, "inference").kv_cache_gib == 10.0  # of 20 GiB 8 are for weights and 2 for the engine
    assert not any(process.after_ready for process in known.processes)


@pytest.mark.parametrize(("share", "cache", "utilization"), [(True, 11.6, 0.2), (False, 31.6, 0.45)])
def test_two_servers_share_a_gpu_where_a_model_is_small(share: bool, cache: float, utilization: float) -> None:
    """Each gets half of the memory, and all start at once. The second leaves the ports after the first one's to others."""
    plan = planned(2 - share, gib=80.0, model=ModelSize(1.2, sequence=4.0), share_gpus=share)
    trains = ("0",) if share else ("1",)
    assert gpus_of(plan) == {"inference": ("0",), "inference-1": ("0",), "trainer": trains, "orchestrator": ()}
    assert [server.url for server in plan.servers] == ["http://localhost:8000", "http://localhost:9000"]
    assert not any(process.after_ready for process in plan.processes)
    for name in ("inference", "inference-1"):
        assert section(plan, name).gpu_memory_utilization == pytest.approx(utilization)
        assert section(plan, name).kv_cache_gib == pytest.approx(cache)


@pytest.mark.parametrize(
    "given",
    [
        {"model": ModelSize(8.0)},
        {"model": None},
        {"model": ModelSize(1.2, sequence=40.0)},
        {"cores": 7},
        {"inference": {"model": {"dtype": "float32"}}},
        {"inference": {"server": {"port": 65000}}},
        {"inference": {"quantization": "fp8"}},
        {"inference": {"kv_cache_gib": 70.0}},
        {"inference": {"gpu_memory_utilization": 0.1}},
        {"inference": {"deterministic": True}},
        {"inference": {"vllm": {"kv-cache-memory-bytes": 1}}},
        {"inference": {"vllm": {"max-num-seqs": 64}}},
        {"inference_servers": 1},
    ],
)
def test_one_server_a_gpu(given: Settings) -> None:
    """Where another would not fit, nobody knows whether it would, it would gain nothing, or one was asked for."""
    assert len(planned(2, **{"gib": 80.0, "model": ModelSize(1.2), **given}).servers) == 1


@pytest.mark.parametrize(
    ("weights", "inference", "share"),
    [
        (7.7, {}, 1 - 12.7 / 80),
        (1.2, {"deterministic": True}, None),
        (40.0, {}, None),
        (7.7, {"gpu_memory_utilization": 0.9}, 0.9),
        (7.7, {"vllm": {"gpu-memory-utilization": 0.9}}, None),
    ],
)
def test_a_server_leaves_room_to_stage_a_version(weights: float, inference: Settings, share: float | None) -> None:
    """On its GPU, if vLLM's own choice would not; unless the user has chosen, or too little would be left to serve."""
    plan = planned(2, inference, gib=80.0, model=ModelSize(weights))
    assert section(plan, "inference").gpu_memory_utilization == (None if share is None else pytest.approx(share))


def test_servers_on_a_gpu_by_number() -> None:
    """`--inference-servers 3 --inference-gpus 1`, if it is known how much memory each may use."""
    plan = planned(2, {"kv_cache_gib": 4.0}, inference_servers=3, inference_gpus=1)
    assert [server.port for server in plan.servers] == [8000, 8001, 8002]
    assert [process.gpus for process in plan.processes] == [("0",), ("0",), ("0",), ("1",), ()]
    shared = planned(2, {"kv_cache_gib": 4.0}, gib=80.0, model=ModelSize(1.2), inference_servers=2, share_gpus=True)
    assert gpus_of(shared)["inference-1"] == ("0",)


@pytest.mark.parametrize(("transport", "published"), [("auto", True), ("memory", True), ("filesystem", False)])
def test_on_a_shared_gpu_servers_stage_where_weights_are_published(transport: str, published: bool) -> None:
    """The trainer then leaves room for both copies; else what is free on a shared GPU is its own."""
    plan = planned(1, gib=80.0, trainer={"weights": {"transport": transport}}, share_gpus=True)
    assert section(plan, "inference").stage_on_device is published
    assert section(plan, "trainer").weights.shares_gpu


SPREAD = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_address": "h"}
HALF = {"gpu_memory_utilization": 0.5}
ON_ONE = {"inference_servers": 3, "inference_gpus": 1}


@pytest.mark.parametrize(
    ("gpus", "inference", "given", "message"),
    [
        (8, None, {"inference_servers": 2}, r"there is no \[inference\]"),
        (8, {"headless": True, "vllm": {"nnodes": 2}}, {}, "another node serves its requests"),
        (8, SPREAD, {"inference_servers": 2}, "spread over nodes"),
        (0, {"server": {"port": 65535}}, {"inference_servers": 2}, "port 65535 leaves no ports for 2 servers"),
        (8, {"tensor_parallel_size": 4}, {"inference_gpus": 6}, r"a server uses 4 \(tensor_parallel_size 4\), 6 is no multiple"),
        (8, {}, {"inference_gpus": 3, "inference_servers": 2}, "a server uses 1, 2 servers use 2"),
        (8, {"data_parallel_size": 4}, {"inference_gpus": 2}, r"a server uses 4 \(data_parallel_size 4\), 2 is no multiple"),
        (8, {}, {"trainer_ranks": 2}, "trainer_ranks 2 must equal trainer_gpus 1"),
        (0, {}, {"trainer_gpus": 2}, "trainer_gpus 2: .* does not use GPUs here .*--trainer-ranks"),
        (0, {}, {"inference_gpus": 2}, "inference_gpus 2: .* do not use GPUs here .*--inference-servers"),
        # Not enough GPUs, with the arithmetic.
        (2, {}, {"inference_gpus": 4}, r"needs 5 GPUs \(4 for inference \+ 1 for trainer\), but 2 visible \(0, 1\)"),
        (0, {"device": "cuda"}, {}, r"needs 2 GPUs \(1 for inference \+ 1 for trainer\), but no GPU was found"),
        (0, {"device": "cuda"}, {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "CUDA_VISIBLE_DEVICES is ''"),
        (1, {}, {}, "one GPU can do both: --share-gpus"),
        # Not enough memory, or nobody knows.
        (2, {}, ON_ONE, r"3 servers on a GPU .* give inference.kv_cache_gib"),
        (2, {"kv_cache_gib": 4.0}, {"gib": 24.0, "model": ModelSize(1.2), **ON_ONE}, "3 servers on a GPU of 24.0 GiB leave 2.8 for each"),
        (1, HALF, {"share_gpus": True, "gib": 8.0}, r"of 8.0 GiB the server takes 50% = 4.0 .* leaves 0.0"),
        (1, {}, {"share_gpus": True}, "give trainer.model.memory_limit"),
        (2, {}, {"share_gpus": True, "trainer_gpus": 2}, "as many GPUs that train as serve, not 2 and 1"),
        (0, {}, {"share_gpus": True}, "both do not use GPUs"),
        (1, None, {"share_gpus": True}, r"there is no \[inference\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_refused(
    gpus: int, inference: Settings | None, given: Settings, message: str
) -> None:
    """Contract: one clear line with the numbers; where a setting means nothing here, it says which one does."""
    with pytest.raises(UserError, match=message):
        planned(gpus, inference, **given)


def test_visible_devices_are_respected() -> None:
    """`CUDA_VISIBLE_DEVICES=2,3 rl …` places on those two, by the names given there."""
    plan = planned(parse_visible("2,3"), environ={"CUDA_VISIBLE_DEVICES": "2,3"})
    assert gpus_of(plan) == {"inference": ("2",), "trainer": ("3",), "orchestrator": ()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("2,3", ["2", "3"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), (" GPU-8a , 1", ["GPU-8a", "1"])],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str, expected: list[str]) -> None:
    """The list ends at its first invalid entry."""
    assert parse_visible(value) == expected


def test_without_inference_the_trainer_gets_the_first_gpus() -> None:
    """A server that runs already is used and not planned."""
    plan = planned(2, None)
    assert gpus_of(plan) == {"trainer": ("0",), "orchestrator": ()}
    assert [(server.url, server.port) for server in plan.servers] == [("http://localhost:8000/v1", None)]


def test_one_rank_is_plain_and_several_go_through_torchrun() -> None:
    """Never `uv run`; torchrun runs under the lifeline and lets ranks finish by themselves."""
    _, single, _ = planned().processes
    assert single.argv[1:] == ("-m", "prime_rl.entrypoints.trainer", "@", "outputs/configs/trainer.toml")
    assert not single.drain_children
    _, several, _ = planned(trainer_ranks=2).processes
    assert several.argv[1:7] == ("-m", "prime_rl.lifeline", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert several.argv[-4:] == ("-m", "prime_rl.trainer.rl.train", "@", "outputs/configs/trainer.toml")
    assert several.drain_children


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"cores": 2}, {"inference": "1", "trainer": "1"}),
        ({"cores": 2, "async_level": 0}, {"inference": "1", "trainer": "2"}),
        ({"cores": 8}, {"inference": "4", "trainer": "4"}),
        ({"cores": 1}, {"inference": "1", "trainer": "1"}),
        ({"cores": 8, "inference_servers": 2}, {"inference": "2", "inference-1": "2"}),
        ({"cores": 2, "environ": {"OMP_NUM_THREADS": "3"}}, {"inference": None, "trainer": None}),
    ],
)
def test_threads_fit_the_cores(given: Settings, threads: dict[str, str | None]) -> None:
    """Servers and trainer share the cores when they work at the same time. What the user has set stays."""
    plan = planned(**given)
    assert {name: env(plan, name).get("OMP_NUM_THREADS") for name in threads} == threads


def test_api_key_travels_by_environment_and_is_not_shown() -> None:
    """Secrets are neither on a command line nor in the printed plan."""
    plan = planned(inference={"api_key": "s3cret"})
    assert env(plan, "inference")["VLLM_API_KEY"] == env(plan, "orchestrator")["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in describe(plan)
    assert "VLLM_API_KEY=***" in describe(plan)


def test_the_server_loads_weights_of_this_run_only() -> None:
    """Without a root of its own the server is confined to what the trainer exports, wherever it writes that."""
    plan = planned(trainer={"weights": {"tmpfs": "/dev/shm"}})
    assert {path.stem for path in plan.configs} == {"rl", "trainer", "orchestrator", "inference"}
    server = section(plan, "inference")
    assert (server.weights_root, server.weights_tmpfs) == (Path("outputs/weights"), Path("/dev/shm"))


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        ({}, "auto"),
        ({"recovery_interval": 3}, 3),
        ({"max_restarts": 0}, None),
        ({"bench": True}, None),
        ({"max_restarts": 0, "trainer": {"recovery_interval": 7}}, 7),
    ],
)
def test_recovery_needs_recovery_checkpoints(given: Settings, interval: int | str | None) -> None:
    """Where processes are started again the trainer keeps a rolling checkpoint; its own setting wins."""
    assert section(planned(**given), "trainer").recovery_interval == interval


@pytest.mark.parametrize("ranks", [1, 2])
def test_recover_is_passed_to_the_jobs(ranks: int) -> None:
    """`rl --recover`: trainer, with any number of ranks, and orchestrator go on; the server keeps nothing."""
    plan = planned(recover=True, trainer_ranks=ranks)
    recovers = {process.name: process.argv[-1] == "--recover" for process in plan.processes}
    assert recovers == {"inference": False, "trainer": True, "orchestrator": True}
