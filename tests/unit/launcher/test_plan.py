"""What `rl` would start: placement, arithmetic, command lines. Pure: no process, no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from prime_rl.config import InferenceConfig, OrchestratorConfig, RLConfig, TrainerConfig
from prime_rl.config.orchestrator import TrainingEnv
from prime_rl.errors import UserError
from prime_rl.inference.checks import ModelSize
from prime_rl.launcher.plan import HostResources, Plan, describe, make_plan, parse_visible

Section = TypeVar("Section", RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig)


def config(
    inference: InferenceConfig | None = None, serve: bool = True, trainer: TrainerConfig | None = None, **shared: object
) -> RLConfig:
    return RLConfig(
        output_dir=Path("outputs"),
        trainer=trainer or TrainerConfig(),
        orchestrator=OrchestratorConfig(environments=[TrainingEnv(id="reverse-text")]),
        inference=(inference or InferenceConfig()) if serve else None,
        **shared,
    )


def machine(gpus: int = 0, cores: int = 2, **environ: str) -> HostResources:
    return HostResources([str(index) for index in range(gpus)], cores, environ)


def gpus(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {process.name: process.gpus for process in plan.processes}


def env(plan: Plan, name: str) -> dict[str, str]:
    return next(dict(process.env) for process in plan.processes if process.name == name)


def section(plan: Plan, kind: type[Section], name: str) -> Section:
    found = plan.configs[Path(f"outputs/configs/{name}.toml")]
    assert isinstance(found, kind)
    return found


def test_servers_get_the_first_gpus_and_the_trainer_the_next() -> None:
    """COMMANDS: `--trainer-gpus 2 --inference-gpus 6`; the orchestrator sees none."""
    large = InferenceConfig(tensor_parallel_size=3, data_parallel_size=2)
    plan = make_plan(config(large, trainer_gpus=2), machine(8))
    assert gpus(plan) == {"inference": ("0", "1", "2", "3", "4", "5"), "trainer": ("6", "7"), "orchestrator": ()}
    assert env(plan, "trainer")["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert env(plan, "orchestrator")["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_that_serve_are_filled_with_servers() -> None:
    """Every GPU that was asked for is used: one server a group of GPUs, each on a port of its own, all of them known to the orchestrator."""
    two_each = InferenceConfig(tensor_parallel_size=2)
    plan = make_plan(config(two_each, inference_gpus=4), machine(5))
    assert gpus(plan) == {"inference": ("0", "1"), "inference-1": ("2", "3"), "trainer": ("4",), "orchestrator": ()}
    assert [server.url for server in plan.servers] == ["http://localhost:8000", "http://localhost:8001"]
    orchestrator = section(plan, OrchestratorConfig, "orchestrator")
    assert orchestrator.client.api_roots == ["http://localhost:8000", "http://localhost:8001"]
    second = section(plan, InferenceConfig, "inference-1")
    assert (second.server.port, second.process) == (8001, "inference-1")
    command = ("-m", "prime_rl.entrypoints.inference", "@", "outputs/configs/inference-1.toml")
    assert plan.processes[1].argv[1:] == command
    run = section(plan, RLConfig, "rl")
    assert (
        run.orchestrator.client.base_url == "http://localhost:8000/v1"
    )  # as it was given: `rl @ configs/rl.toml` plans the same again


def test_several_servers_on_a_cpu_share_the_cores() -> None:
    plan = make_plan(config(inference_servers=2), machine(0, cores=8))
    assert [env(plan, name)["OMP_NUM_THREADS"] for name in ("inference", "inference-1")] == ["2", "2"]


def test_one_gpu_trains_and_serves() -> None:
    """Its memory is split and neither side takes more than its share. Where the size of the model is not known, the trainer starts once the server has
    measured what is free; else both start at once."""
    one = HostResources(["0"], 8, {}, gpu_gib=80.0)
    with pytest.raises(UserError, match="one GPU can do both: --share-gpus"):
        make_plan(config(), one)
    plan = make_plan(config(InferenceConfig(gpu_memory_utilization=0.25), share_gpus=True), one)
    assert gpus(plan) == {"inference": ("0",), "trainer": ("0",), "orchestrator": ()}
    trainer, inference = section(plan, TrainerConfig, "trainer"), section(plan, InferenceConfig, "inference")
    assert (inference.gpu_memory_utilization, trainer.model.memory_limit) == (0.25, 55.0)
    assert inference.stage_on_device  # where the trainer publishes
    assert next(process for process in plan.processes if process.name == "trainer").after_ready == ("inference",)

    known = replace(one, model=ModelSize(8.0))
    plan = make_plan(config(InferenceConfig(gpu_memory_utilization=0.25), share_gpus=True), known)
    inference = section(plan, InferenceConfig, "inference")
    # Of 20 GiB 8 are for weights and 2 for the engine.
    assert (inference.gpu_memory_utilization, inference.kv_cache_gib) == (0.25, 10.0)
    assert next(process for process in plan.processes if process.name == "trainer").after_ready == ()


@pytest.mark.parametrize(("share", "cache", "utilization"), [(True, 11.6, 0.2), (False, 31.6, 0.45)])
def test_two_servers_share_a_gpu_where_a_model_is_small(share: bool, cache: float, utilization: float) -> None:
    """Each gets half of the memory, and all start at once. The second leaves the ports after the first one's to others."""
    small = HostResources(
        [str(index) for index in range(2 - share)], 16, {}, gpu_gib=80.0, model=ModelSize(1.2, sequence=4.0)
    )
    plan = make_plan(config(share_gpus=share), small)
    assert gpus(plan) == {"inference": ("0",), "inference-1": ("0",), "trainer": (small.gpus[-1],), "orchestrator": ()}
    assert [server.url for server in plan.servers] == ["http://localhost:8000", "http://localhost:9000"]
    assert not any(process.after_ready for process in plan.processes)
    for name in ("inference", "inference-1"):
        server = section(plan, InferenceConfig, name)
        assert (server.gpu_memory_utilization, server.kv_cache_gib) == (
            pytest.approx(utilization),
            pytest.approx(cache),
        )


@pytest.mark.parametrize(
    ("changed", "inference", "shared"),
    [
        ({"model": ModelSize(8.0)}, InferenceConfig(), {}),
        ({"model": None}, InferenceConfig(), {}),
        ({"model": ModelSize(1.2, sequence=40.0)}, InferenceConfig(), {}),
        ({}, InferenceConfig.model_validate({"model": {"dtype": "float32"}}), {}),
        ({}, InferenceConfig.model_validate({"server": {"port": 65000}}), {}),
        ({}, InferenceConfig(quantization="fp8"), {}),
        ({}, InferenceConfig(kv_cache_gib=70.0), {}),
        ({"cores": 7}, InferenceConfig(), {}),
        ({}, InferenceConfig(gpu_memory_utilization=0.1), {}),
        ({}, InferenceConfig(deterministic=True), {}),
        ({}, InferenceConfig(vllm={"kv-cache-memory-bytes": 1}), {}),
        ({}, InferenceConfig(vllm={"max-num-seqs": 64}), {}),
        ({}, InferenceConfig(), {"inference_servers": 1}),
    ],
)
def test_one_server_a_gpu(changed: dict[str, Any], inference: InferenceConfig, shared: dict[str, int]) -> None:
    """A larger model, or one whose size is not known or whose longest sequence would not fit; weights of another size than the files; no port; few
    cores; no room; one sequence at a time; a cache that is given; a number that is."""
    small = replace(HostResources(["0", "1"], 16, {}, gpu_gib=80.0, model=ModelSize(1.2)), **changed)
    assert len(make_plan(config(inference, **shared), small).servers) == 1


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
def test_a_server_leaves_room_to_stage_a_version(
    weights: float, inference: dict[str, Any], share: float | None
) -> None:
    """On its GPU, if vLLM's own choice would not; unless the user has chosen, or too little would be left to serve."""
    two = HostResources(["0", "1"], 16, {}, gpu_gib=80.0, model=ModelSize(weights))
    server = section(make_plan(config(InferenceConfig.model_validate(inference)), two), InferenceConfig, "inference")
    assert server.gpu_memory_utilization == (None if share is None else pytest.approx(share))


def test_servers_on_a_gpu_by_number() -> None:
    """`--inference-servers 3 --inference-gpus 1`, if it is known how much memory each may use."""
    one = HostResources(["0", "1"], 8, {})
    with pytest.raises(UserError, match=r"3 servers on a GPU .* give inference.kv_cache_gib"):
        make_plan(config(inference_servers=3, inference_gpus=1), one)
    given = InferenceConfig(kv_cache_gib=4.0)
    plan = make_plan(config(given, inference_servers=3, inference_gpus=1), one)
    assert [server.port for server in plan.servers] == [8000, 8001, 8002]
    known = replace(one, gpu_gib=24.0, model=ModelSize(1.2))
    with pytest.raises(UserError, match=r"kv_cache_gib 4: 3 servers on a GPU of 24.0 GiB leave 2.8 for each"):
        make_plan(config(given, inference_servers=3, inference_gpus=1), known)
    shared = make_plan(config(given, inference_servers=2, share_gpus=True), replace(known, gpu_gib=80.0))
    assert gpus(shared)["inference-1"] == ("0",)
    assert [process.gpus for process in plan.processes] == [("0",), ("0",), ("0",), ("1",), ()]


@pytest.mark.parametrize(
    ("gpus", "gib", "inference", "shared", "message"),
    [
        (["0"], 8.0, InferenceConfig(gpu_memory_utilization=0.5), {}, r"of 8.0 GiB the server takes 50% = 4.0 .* leaves 0.0"),
        (["0", "1"], 80.0, InferenceConfig(), {"trainer_gpus": 2}, "as many GPUs that train as serve, not 2 and 1"),
        (["0"], None, InferenceConfig(), {}, "give trainer.model.memory_limit"),
        ([], None, InferenceConfig(), {}, "both do not use GPUs"),
        (["0"], 80.0, None, {}, r"there is no \[inference\]"),
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_shared(
    gpus: list[str], gib: float | None, inference: InferenceConfig | None, shared: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(
            config(inference, serve=inference is not None, share_gpus=True, **shared),
            HostResources(gpus, 8, {}, gpu_gib=gib),
        )


@pytest.mark.parametrize(("transport", "published"), [("auto", True), ("memory", True), ("filesystem", False)])
def test_on_a_shared_gpu_servers_stage_where_weights_are_published(transport: str, published: bool) -> None:
    """The trainer then leaves room for both copies; else what is free on a shared GPU is its own."""
    trainer = TrainerConfig.model_validate({"weights": {"transport": transport}})
    plan = make_plan(config(trainer=trainer, share_gpus=True), HostResources(["0"], 8, {}, gpu_gib=80.0))
    server, training = section(plan, InferenceConfig, "inference"), section(plan, TrainerConfig, "trainer")
    assert (server.stage_on_device, training.weights.shares_gpu) == (published, True)


SPREAD = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_address": "h"}


@pytest.mark.parametrize(
    ("inference", "shared", "message"),
    [
        (None, {"inference_servers": 2}, r"there is no \[inference\]"),
        ({"headless": True, "vllm": {"nnodes": 2}}, {}, "another node serves its requests"),
        (SPREAD, {"inference_servers": 2}, "spread over nodes"),
        ({"server": {"port": 65535}}, {"inference_servers": 2, "device": "cpu"}, "port 65535 leaves no ports for 2 servers"),
        ({"tensor_parallel_size": 4}, {"inference_gpus": 6}, r"a server uses 4 \(tensor_parallel_size 4\), 6 is no multiple"),
        ({}, {"inference_gpus": 3, "inference_servers": 2}, "a server uses 1, 2 servers use 2"),
        ({"data_parallel_size": 4}, {"inference_gpus": 2}, r"a server uses 4 \(data_parallel_size 4\), 2 is no multiple"),
        ({}, {"trainer_ranks": 2}, "trainer_ranks 2 must equal trainer_gpus 1"),
        ({}, {"device": "cpu", "trainer_gpus": 2}, "trainer_gpus 2: .* does not use GPUs here .*--trainer-ranks"),
        ({}, {"device": "cpu", "inference_gpus": 2}, "inference_gpus 2: .* do not use GPUs here .*--inference-servers"),
    ],
)  # fmt: skip
def test_servers_that_cannot_be_laid_out_are_refused(
    inference: dict[str, Any] | None, shared: dict[str, Any], message: str
) -> None:
    """No two at one address, no GPU that nobody would use; where a number means nothing the error says what does."""
    given = None if inference is None else InferenceConfig.model_validate(inference)
    gpus = 0 if shared.pop("device", None) == "cpu" else 8
    with pytest.raises(UserError, match=message):
        make_plan(config(given, serve=inference is not None, **shared), machine(gpus))


def test_visible_devices_are_respected() -> None:
    """`CUDA_VISIBLE_DEVICES=2,3 rl …` places on those two, by the names given there."""
    visible = HostResources(parse_visible("2,3"), 8, {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert gpus(make_plan(config(), visible)) == {"inference": ("2",), "trainer": ("3",), "orchestrator": ()}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("2,3", ["2", "3"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), (" GPU-8a , 1", ["GPU-8a", "1"])],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str, expected: list[str]) -> None:
    """The list ends at its first invalid entry."""
    assert parse_visible(value) == expected


def test_too_few_gpus_is_refused_with_the_arithmetic() -> None:
    """A GPU that is asked for and not there: one clear line with the numbers."""
    with pytest.raises(UserError, match=r"needs 5 GPUs \(4 for inference \+ 1 for trainer\), but 2 visible \(0, 1\)"):
        make_plan(config(inference_gpus=4), machine(2))
    cuda = config(InferenceConfig(device="cuda"))
    with pytest.raises(UserError, match=r"needs 2 GPUs \(1 for inference \+ 1 for trainer\), but no GPU was found"):
        make_plan(cuda, machine(0))
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES is ''"):
        make_plan(cuda, machine(0, CUDA_VISIBLE_DEVICES=""))


def test_without_inference_the_trainer_gets_the_first_gpus() -> None:
    """A server that runs already is used and not planned."""
    plan = make_plan(config(serve=False), machine(2))
    assert gpus(plan) == {"trainer": ("0",), "orchestrator": ()}
    (server,) = plan.servers
    assert server.port is None
    assert server.url == "http://localhost:8000/v1"


def test_one_rank_is_plain_and_several_go_through_torchrun() -> None:
    """Never `uv run`; torchrun runs under the lifeline and lets ranks finish by themselves."""
    single = {p.name: p for p in make_plan(config(), machine(0)).processes}
    assert single["trainer"].argv[1:] == ("-m", "prime_rl.entrypoints.trainer", "@", "outputs/configs/trainer.toml")
    assert not single["trainer"].drain_children
    several = {p.name: p for p in make_plan(config(trainer_ranks=2), machine(0)).processes}["trainer"]
    assert several.argv[1:7] == ("-m", "prime_rl.lifeline", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    assert several.argv[-4:] == ("-m", "prime_rl.trainer.rl.train", "@", "outputs/configs/trainer.toml")
    assert several.drain_children


@pytest.mark.parametrize(
    ("cores", "async_level", "serving", "training"),
    [(2, 1, "1", "1"), (2, 0, "1", "2"), (8, 1, "4", "4"), (1, 1, "1", "1")],
)
def test_threads_fit_the_cores(cores: int, async_level: int, serving: str, training: str) -> None:
    """ServerSpec and trainer share the cores when they work at the same time."""
    plan = make_plan(config(async_level=async_level), machine(0, cores))
    assert (env(plan, "inference")["OMP_NUM_THREADS"], env(plan, "trainer")["OMP_NUM_THREADS"]) == (serving, training)


def test_what_the_user_has_set_stays() -> None:
    """Our defaults never override a variable of the environment."""
    plan = make_plan(config(), machine(0, OMP_NUM_THREADS="3"))
    assert "OMP_NUM_THREADS" not in env(plan, "trainer")


def test_api_key_travels_by_environment_and_is_not_shown() -> None:
    """Secrets are neither on a command line nor in the printed plan."""
    plan = make_plan(config(InferenceConfig(api_key="s3cret")), machine(0))
    assert env(plan, "inference")["VLLM_API_KEY"] == env(plan, "orchestrator")["VLLM_API_KEY"] == "s3cret"
    assert "s3cret" not in describe(plan)
    assert "VLLM_API_KEY=***" in describe(plan)


def test_the_server_loads_weights_of_this_run_only() -> None:
    """Without a root of its own the server is confined to what the trainer exports."""
    plan = make_plan(config(), machine(0))
    assert {path.stem for path in plan.configs} == {"rl", "trainer", "orchestrator", "inference"}
    assert section(plan, InferenceConfig, "inference").weights_root == Path("outputs/weights")


def test_servers_read_weights_where_the_trainer_writes_them() -> None:
    run = config()
    run.trainer.weights.tmpfs = Path("/dev/shm")
    plan = make_plan(run, machine(0))
    assert section(plan, InferenceConfig, "inference").weights_tmpfs == Path("/dev/shm")


def test_recovery_needs_recovery_checkpoints() -> None:
    """Where processes are started again the trainer keeps a rolling checkpoint; its own setting wins; a benchmark keeps none."""

    def interval(**shared: object) -> int | str | None:
        run = config(**shared)
        return section(make_plan(run, machine()), TrainerConfig, "trainer").recovery_interval

    assert interval() == "auto"
    assert interval(recovery_interval=3) == 3
    assert interval(max_restarts=0) is None
    assert interval(bench=True) is None
    own = config().model_copy(update={"trainer": TrainerConfig(recovery_interval=7), "max_restarts": 0})
    assert section(make_plan(own, machine()), TrainerConfig, "trainer").recovery_interval == 7


def test_recover_is_passed_to_the_jobs() -> None:
    """`rl --recover`: trainer, with any number of ranks, and orchestrator are told; the server keeps nothing."""
    for ranks in (1, 2):
        plan = make_plan(config(recover=True, trainer_ranks=ranks), machine())
        told = {process.name: process.argv[-1] == "--recover" for process in plan.processes}
        assert told == {"inference": False, "trainer": True, "orchestrator": True}
