"""`rl` after its configuration has been read: check, plan, start, watch, sum up."""

import os
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from prime_rl.config import RLConfig, write_toml
from prime_rl.config.shared import how_to_start
from prime_rl.errors import UserError, say
from prime_rl.inference.checks import check_model
from prime_rl.inference.server import guarded_host
from prime_rl.launcher import preflight, rundir, slurm
from prime_rl.launcher.console import Console
from prime_rl.launcher.nodes import Nodes
from prime_rl.launcher.plan import HostResources, NodeRole, Plan, describe, headlines, lay_out, make_plan
from prime_rl.launcher.ports import claimed_ports, with_ports
from prime_rl.launcher.supervise import RestartPolicy, RunOutcome, Supervisor
from prime_rl.monitor import read_status
from prime_rl.monitor.monitor import bench_table, metrics_path, read_metrics
from prime_rl.monitor.terminal import minutes
from prime_rl.monitor.trackers import check_trackers
from prime_rl.orchestrator.checkpoint import resume_point
from prime_rl.transport import tenants
from prime_rl.transport.commit import list_steps
from prime_rl.transport.settings import other_directory
from prime_rl.transport.weights import REFERENCE_TOKENS
from prime_rl.wait import WaitTimeout, wait

_PORT_SECONDS = 3.0
_OTHER_HOSTS_SECONDS = 45.0  # heartbeats there count for 30 s


def run(config: RLConfig) -> int:
    """Run to the end; return the exit status. Raises UserError for what cannot work, before anything is started."""
    if config.bench:
        config = rundir.as_benchmark(config)
    if config.recover and config.trainer.tenants is None and not rundir.results(config.output_dir):
        print(f"nothing to recover in {config.output_dir}: starting from the beginning")
        config = config.model_copy(update={"recover": False})
    _check(config)
    if config.slurm is not None:
        if not config.dry_run:
            _check_directory(config)
        slurm.submit(config, "rl")
        return RunOutcome.SUCCESS.value
    host = HostResources.of_this_host(config.inference)
    if config.dry_run:
        _show(config, host)
        return RunOutcome.SUCCESS.value
    return _start(config, host).value


def _show(config: RLConfig, host: HostResources) -> None:
    """Print what this host would run, and what would refuse it; write the configuration of each process."""
    role = NodeRole.of(config)
    urls = [] if role.is_alone else [f"http://NODE-{rank}:PORT" for rank in range(role.leader)]
    plan = make_plan(_with_ports(config, host), host, urls)
    for path, section in plan.configs.items():
        write_toml(section, path)
    say("\n".join([*headlines(config, plan), "", describe(plan)]))
    ranks, shared = config.trainer_ranks or config.trainer_gpus, config.trainer.tenants
    say(preflight.state_memory(config.trainer, ranks * role.trainers, 1 if shared is None else shared.slots))
    if role.is_alone and shared is None:
        served = {gpu for process in plan.processes if process.server is not None for gpu in process.gpus}
        if estimate := preflight.step_estimate(config, len(served), config.trainer_gpus):
            say(estimate)
    try:
        if role.leads:
            rundir.refuse_running(config.output_dir, {rundir.LAUNCHER, *(process.name for process in plan.processes)})
            _check_directory(config)
    except UserError as error:
        say(f"rl would refuse: {error}")


def _start(config: RLConfig, host: HostResources) -> RunOutcome:
    """Prepare the run directory, unless another node does, and run what this host runs."""
    names = {process.name for process in make_plan(config, host).processes}
    nodes, owner, urls = None if config.nodes == 1 else Nodes(config), None, list[str]()
    with ExitStack() as exit_stack:
        if nodes is None or nodes.role.leads:
            owner = exit_stack.enter_context(rundir.Owner(config.output_dir))
            exit_stack.enter_context(claimed_ports)
            try:
                claimed = _claim(config, host, names)
            except UserError:
                if nodes is not None:
                    nodes.end(RunOutcome.FAILURE)
                raise
            if claimed is None:
                return RunOutcome.SUCCESS if nodes is None else nodes.end(RunOutcome.SUCCESS)
            config = claimed
        if nodes is not None:
            urls = exit_stack.enter_context(nodes).await_others(say)
            if nodes.has_ended:
                return nodes.end(RunOutcome.FAILURE)
        plan = make_plan(config, host, urls)
        for process in plan.processes:
            if process.server is not None:
                rundir.forget_status(config.output_dir, process.name)
        if config.trainer.tenants is not None:
            tenants.publish_servers(config.output_dir, [f"{server.url}/v1" for server in plan.servers if server.port])
        return _supervise(config, plan, owner, nodes)


def _claim(config: RLConfig, host: HostResources, names: set[str]) -> RLConfig | None:
    """Prepare the run directory for processes of these names; return the configuration with ports, None if all is made.

    For a while processes of a run before may take to die, or to be known as dead. Raises UserError.
    """
    _check_directory(config)
    if config.recover and _is_finished(config):
        say(f"this run has made its {config.max_steps} steps already: nothing is trained again")
        return None
    refusals = list[UserError]()

    def claimed() -> RLConfig | None:
        try:
            rundir.refuse_running(config.output_dir, names)
            return _with_ports(config, host)
        except UserError as error:
            refusals.append(error)
            return None

    seconds = _PORT_SECONDS if config.nodes == 1 else _OTHER_HOSTS_SECONDS
    try:
        with_its_ports = wait(claimed, subject="its port", owner="a run before", seconds=seconds)
    except WaitTimeout:
        raise refusals[-1] from None
    if _resumes(config):
        for name in names if config.nodes > 1 else read_status(config.output_dir).keys() - {rundir.LAUNCHER}:
            rundir.forget_status(config.output_dir, name)
    else:  # asked for, or nothing but an earlier benchmark, or the remains of a run that failed at its start
        with rundir.cleaned(config.output_dir, "rl", keep_evals=not config.clean):
            pass
    return with_its_ports


def _with_ports(config: RLConfig, host: HostResources) -> RLConfig:
    """Choose the ports of this host's servers. Those of several nodes have the one that is given."""
    return with_ports(config, "orchestrator.client", lay_out(config, host).ports) if config.nodes == 1 else config


def _supervise(config: RLConfig, plan: Plan, owner: rundir.Owner | None, nodes: Nodes | None) -> RunOutcome:
    output_dir, bench, began = config.output_dir, config.bench, time.time()
    for path, section in plan.configs.items():
        write_toml(section, path)
    logs = {process.name: process.log for process in plan.processes}
    console, of_tenants = Console(output_dir, config.max_steps, bench, logs), dict[Path, Console]()

    def tick() -> None:
        console.look()
        for directory in sorted(output_dir.glob("tenants/*")) if config.trainer.tenants else ():
            if directory not in of_tenants:
                of_tenants[directory] = Console(directory, None)
            for line in of_tenants[directory].step_lines():
                console.say(f"{directory.name}: {line}")
            console.steps |= of_tenants[directory].steps
        if owner is not None:
            owner.beat()
        if nodes is not None:
            nodes.tick(supervisor, console.say)

    for line in headlines(config, plan):
        console.say(line)
    if sys.dont_write_bytecode:
        console.say(
            "PYTHONDONTWRITEBYTECODE is set: every process compiles its imports; unset it to start 10 to 20 s faster"
        )
    for server in plan.servers:
        if server.port is None:
            console.say(f"an inference server is expected at {server.url}: {how_to_start(server.url)}")
    # A benchmark that had to be restarted measures nothing.
    restarts = 0 if bench else config.max_restarts
    policy = RestartPolicy(restarts, heartbeat_timeout=config.heartbeat_timeout, stall_timeout=config.stall_timeout)
    with console.region:
        supervisor = Supervisor(
            plan.processes, output_dir, console.say, tick, policy, lambda: drained(config), os.environ,
            over=lambda: nodes is None or nodes.role.trains,
            writes_status=nodes is None or nodes.role.leads or nodes.role.serves,  # the leader's ranks report for all
        )  # fmt: skip
        outcome = supervisor.run()
        if nodes is not None:
            outcome = nodes.end(outcome)
        console.look()
    words = {RunOutcome.SUCCESS: "done", RunOutcome.FAILURE: "failed", RunOutcome.INTERRUPTED: "interrupted"}
    steps = len(read_metrics(metrics_path(output_dir, "trainer"))) if bench else len(console.steps)
    made = (
        f"{steps} step{'' if steps == 1 else 's'}" if config.trainer.tenants is None else f"{len(of_tenants)} tenants"
    )
    console.say(f"{words[outcome]}: {made} in {minutes(time.time() - began)}")
    if started := ", ".join(f"{name} {count} x" for name, count in supervisor.restarts.items()):
        console.say(f"started again: {started}")
    if bench or outcome is not RunOutcome.FAILURE:
        tables = [bench_table(output_dir, process) for process in ("trainer", "orchestrator") if bench]
        for text in tables or ([] if config.trainer.tenants else console.summary()):
            console.say(text)
    if console.steps and not bench:
        console.say(f"page     uv run rl view {shlex.quote(str(output_dir))}")
    if config.trainer.tenants is not None:
        console.say("to go on: the same command")
    elif outcome is not RunOutcome.SUCCESS and not bench:
        option = rundir.option_to_go_on(output_dir, failed=outcome is RunOutcome.FAILURE)
        if option == "--clean":
            console.say("to begin again: the same command with --clean")
        elif option:
            console.say(f"to go on: the same command {'without --clean and ' if config.clean else ''}with {option}")
    return outcome


def drained(config: RLConfig) -> str:
    """Say what a run that is asked to stop still does, and from where it could go on."""
    if config.trainer.tenants is not None:
        return "what is trained of each tenant will be saved"
    if config.bench:
        return "the current step will be finished; a benchmark saves nothing"
    recovers = config.trainer.recovery_interval or (config.max_restarts and config.recovery_interval)
    if config.trainer.ckpt is not None or recovers:
        return "the current step will be finished and saved"
    step = max(0, *(rundir.newest_step(config.output_dir / name) for name in ("recovery", "checkpoints")))
    hint = f"--recover goes on from step {step} or later"
    return f"the current step will be finished, not saved for good (no [ckpt]): {hint}"


def _check(config: RLConfig) -> None:
    orchestrator, shared = config.orchestrator, config.trainer.tenants is not None  # without an orchestrator
    sections = (config.trainer, None if shared else orchestrator, config.inference)
    for name in {section.model.name for section in sections if section is not None}:
        check_model(name)
    preflight.check_lora(config.trainer.lora, config.trainer.model.name, resumes=_resumes(config))
    check_trackers({"trainer": config.trainer.monitor, **({} if shared else {"orchestrator": orchestrator.monitor})})
    if config.inference is not None:
        guarded_host(config.inference)
        room, needed = config.inference.max_model_len, REFERENCE_TOKENS + 1
        if config.orchestrator.logprob_check and room is not None and room < needed:
            raise UserError(f"inference.max_model_len {room}: the fixed prompt of the logprob check needs {needed}")
    else:
        preflight.check_key(config.orchestrator.client)
    if shared:
        return
    # Before the trainer goes back for nothing.
    resume_point(orchestrator.model_copy(update={"output_dir": config.output_dir, "recover": config.recover}))
    for environment in orchestrator.all_environments():
        preflight.check_environment(environment)


def _check_directory(config: RLConfig) -> None:
    other = other_directory(config.output_dir)
    if config.trainer.tenants is None:
        if any(config.output_dir.glob("tenants/*/tenant.json")):
            raise UserError(
                f"{config.output_dir} holds a deployment, of `rl tenants`: give the run --output-dir {other}"
            )
    elif {"rollouts", "weights"} & {*rundir.results(config.output_dir)}:
        raise UserError(f"{config.output_dir} holds a run of its own: give the deployment --output-dir {other}")
    if not config.clean and not config.bench and not _resumes(config):
        rundir.refuse_results(config.output_dir)


def _is_finished(config: RLConfig) -> bool:
    """Whether an earlier `rl` came to the end of this run; it was shorter where `max_steps` was raised since."""
    processes = [read_status(config.output_dir).get(name) for name in ("trainer", "orchestrator")]
    finished = all(process is not None and process.outcome == "finished" for process in processes)
    return finished and config.max_steps in list_steps(config.output_dir / "weights")


def _resumes(config: RLConfig) -> bool:
    sections = (config.ckpt, config.trainer.ckpt, config.orchestrator.ckpt)
    return config.recover or any(ckpt is not None and ckpt.resume_step is not None for ckpt in sections)
