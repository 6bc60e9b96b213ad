"""What runs beside `sft`: an `eval` that follows its versions, and a server for it if one is to be started."""

import os
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Self

from loguru import logger

from prime_rl.config import EvalConfig, InferenceConfig, SFTConfig
from prime_rl.config.eval import Measure
from prime_rl.config.inference import SERVER
from prime_rl.config.loader import child_env
from prime_rl.config.shared import ModelConfig
from prime_rl.errors import UserError
from prime_rl.evals.results import REPORT, report_table
from prime_rl.inference.checks import visible_gpus
from prime_rl.launcher.one_server import process_of
from prime_rl.launcher.plan import ProcessSpec, ServerSpec, gpus_of_a_server
from prime_rl.launcher.supervise import RestartPolicy, RunOutcome, Supervisor
from prime_rl.monitor import Status
from prime_rl.monitor.status import read_status

EVAL = "eval"
_STOP_SECONDS = 60.0  # for the end of what hangs in the kernel
_MAX_RESTARTS = 3
# An engine would take what torchrun sets for its ranks for its own.
_TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_")


def eval_config(config: SFTConfig) -> EvalConfig:
    section = config.eval
    assert section is not None
    return EvalConfig(
        **{name: getattr(section, name) for name in Measure.model_fields},
        model=ModelConfig(name=config.model.name, trust_remote_code=config.model.trust_remote_code),
        weights_dir=config.output_dir / "weights",
        # Without an interval the last version alone: none of a run without end is a multiple of this.
        interval=section.interval or sys.maxsize,
        eval_base=section.at_start,
        follow=True,
        output_dir=config.output_dir,
        seed=config.seed,
        log=config.log,
        monitor=config.monitor,
    )


def server_config(config: SFTConfig) -> InferenceConfig | None:
    if config.inference is None:
        return None
    paths = {"output_dir": config.output_dir, "weights_root": config.output_dir / "weights", "log": config.log}
    device = config.inference.device if config.inference.device != "auto" else config.device
    return config.inference.model_copy(update={**paths, "device": device})


class EvalSidecar:
    """`with EvalSidecar(config) as sidecar: train(config); sidecar.finish()`, of a config with `eval`.

    A supervisor in a thread of its own restarts what fails; leaving the `with` block ends it with all that it started.
    """

    def __init__(self, config: SFTConfig, environ: Mapping[str, str] = os.environ) -> None:
        """Raises UserError: there is no GPU for the server."""
        assert config.eval is not None
        self._output_dir, self._client, served = config.output_dir, config.eval.client, server_config(config)
        self._configs: dict[str, EvalConfig | InferenceConfig] = {EVAL: eval_config(config)}
        self.variables: dict[str, dict[str, str]] = {EVAL: {}}
        if served is not None:
            gpus = _gpus_of_server(served, environ)
            placed = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
            self._configs[SERVER], self.variables[SERVER] = served, placed if gpus else {}
            if served.api_key:
                self.variables[EVAL] = {self._client.api_key_var: served.api_key}
        inherited = child_env(environ, SFTConfig).items()
        self.environ = {name: value for name, value in inherited if not name.startswith(_TORCHRUN_PREFIXES)}

    def __enter__(self) -> Self:
        Status(self._output_dir, "sft")  # replaces an earlier run's outcome
        processes = list[ProcessSpec]()
        for name, config in self._configs.items():
            server = ServerSpec(self._client.servers, self._client.ready_timeout) if name == SERVER else None
            processes.append(process_of(name, config, self.variables[name], server))
            logger.info("starting {} (log: {})", name, processes[-1].log)
        policy = RestartPolicy(_MAX_RESTARTS)
        self._supervisor = Supervisor(processes, self._output_dir, logger.info, policy=policy, environ=self.environ)
        executor = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._outcome = executor.submit(self._supervisor.run)
        return self

    def __exit__(self, *exc: object) -> None:
        self._supervisor.stop()
        wait([self._outcome], _STOP_SECONDS)

    def finish(self) -> None:
        """Wait, after the training, until its last version is evaluated, unless it was stopped.
        Raises UserError: the evaluation failed, or its server is gone; the weights are there."""
        training, log = read_status(self._output_dir).get("sft"), self._output_dir / "logs" / f"{EVAL}.log"
        if training is not None and training.outcome == "stopped":
            return
        # The training's own handler has nothing left to finish.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.info("training has ended: waiting for the evaluation of its last version (log: {})", log)
        if self._outcome.result() is not RunOutcome.SUCCESS:  # bounded: every process is watched for stalls
            # It follows a run that has ended: it evaluates what is chosen, and the last version, and waits for nothing.
            paths = {name: self._output_dir / "configs" / f"{name}.toml" for name in reversed(self._configs)}
            commands = [f"uv run {name} @ {path}" for name, path in paths.items()]
            failures = "\n".join(self._supervisor.failures)
            raise UserError(
                f"the training is complete, but {failures}\nwhat is missing: {', and then '.join(commands)} "
                f"(weights: {self._output_dir / 'weights'})"
            )
        report = self._output_dir / "evals" / REPORT
        logger.info("evaluated, see {}\n{}", report, report_table(report))


def _gpus_of_server(server: InferenceConfig, environ: Mapping[str, str]) -> list[str]:
    if server.device == "cpu" or not (names := visible_gpus(environ)):
        return []
    wanted, ranks = gpus_of_a_server(server), int(environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks + wanted > len(names):
        raise UserError(
            f"inference needs {wanted} GPU(s) beside the {ranks} that train, and {len(names)} are visible: "
            "start a server elsewhere and name it in eval.client.base_url"
        )
    return names[ranks : ranks + wanted]
