"""How an orchestrator becomes a tenant: check the deployment, ask its trainer, and note where the membership ends."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.errors import UserError
from prime_rl.monitor import Status
from prime_rl.monitor.status import ProcessStatus, read_record, status_path
from prime_rl.transport import tenants
from prime_rl.transport.settings import running_processes, slots_for
from prime_rl.wait import wait, wait_async

if TYPE_CHECKING:
    from prime_rl.config import OrchestratorConfig


def prepare(config: "OrchestratorConfig") -> "OrchestratorConfig":
    """Check that the deployment can train this tenant, claim its name, and export its key. Return the configuration
    with the deployment's servers, unless it names some.

    A deployment that is not there yet is waited for. With `clean` an earlier membership is ended first. Raises
    UserError.
    """
    assert config.tenant is not None
    deployment, name, directory = config.tenant.join, config.tenant.name, config.output_dir
    seconds, variable = config.client.ready_timeout, config.client.api_key_var

    if slots_for(config, deployment) is None:
        logger.info("no trainer with tenants runs in {} yet: `uv run rl tenants` starts one", deployment)
    owner = f"`rl tenants` in {deployment}"
    most = wait(lambda: slots_for(config, deployment), subject="trainer with tenants", owner=owner, seconds=seconds)
    others = sorted(tenants.joins(deployment).keys() - {name})
    if len(others) >= most:
        held = f"has {most} slots, taken by {', '.join(others)}"
        raise UserError(f"{deployment} {held}: wait for one of them to end, or raise trainer.tenants.slots there")
    key = os.environ.get(variable) or tenants.own_key(directory)
    if (whose := tenants.owner(key, tenants.key_hashes(deployment)) or name) != name:
        raise UserError(f"the key in ${variable} is that of the tenant {whose}: unset it, or give each its own")
    tenants.claim_name(directory, key)
    os.environ[variable] = key
    if config.clean and "orchestrator" not in running_processes(directory):
        tenants.leave(directory)
        wait(
            lambda: "trainer" not in running_processes(directory),
            subject=f"end of the earlier run of {name}", owner="trainer", seconds=seconds,
        )  # fmt: skip
    urls = [] if "base_url" in config.client.model_fields_set else tenants.server_urls(deployment)
    return config.with_values({"client.base_url": urls}) if urls else config


async def join(config: "OrchestratorConfig", status: Status) -> None:
    """Ask the trainer, and wait until it accepts. Raises UserError if it refuses or does not answer."""
    directory, seconds = config.output_dir, config.weights_timeout
    path, subject = status_path(directory, "trainer"), f"tenant {directory.name} to be accepted"
    before = read_record(ProcessStatus, path)
    if before is not None and before.outcome not in (None, "finished"):  # of an earlier membership
        path.unlink(missing_ok=True)
    tenants.ask_to_join(directory, trainer_settings(config))

    def accepted() -> bool:
        answer = read_record(ProcessStatus, path)
        status.waiting(subject, "trainer", seconds)
        if answer is None or (before is not None and answer.heartbeat == before.heartbeat):
            return False
        if (answer.outcome or "").startswith("failed"):
            raise UserError(_reason(answer.outcome))
        return answer.outcome in (None, "finished")

    await wait_async(accepted, subject=subject, owner="trainer", seconds=seconds)


def trainer_settings(config: "OrchestratorConfig") -> dict[str, Any]:
    """Return what the tenant is trained with, by the keys of a TrainerConfig."""
    assert config.tenant is not None
    chosen = {*tenants.SETTINGS}
    settings = config.model_dump(mode="json", include=chosen) | config.tenant.model_dump(mode="json", include=chosen)
    settings["model"] = {"name": config.model.name}
    wandb = settings["monitor"]["wandb"] or {}
    wandb["group"] = wandb.get("group") or config.output_dir.name
    wandb |= {key: f"{wandb[key]}-trainer" for key in ("name", "id") if wandb.get(key)}
    return settings


def check(directory: Path) -> None:
    """Raise UserError if the trainer has ended the membership before its last step, with its reason."""
    trainer = read_record(ProcessStatus, status_path(directory, "trainer"))
    outcome = trainer.outcome if trainer is not None else None
    if outcome in (None, "finished") or directory.name in tenants.joins(directory.parents[1]):
        return
    saved = "it was stopped; what is trained is saved, and the same command goes on"
    why = saved if outcome == "stopped" else _reason(outcome)
    raise UserError(f"the trainer has ended the run of {directory.name}: {why}")


def _reason(outcome: str | None) -> str:
    return (outcome or "").removeprefix("failed: ")
