"""Ports of the servers that a launcher starts: the one that was given, else the first that are free."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeVar
from urllib.parse import urlsplit

from prime_rl.config import RLConfig, SFTConfig
from prime_rl.config.rl import DeploymentConfig
from prime_rl.errors import UserError
from prime_rl.inference.checks import claim_port
from prime_rl.inference.server import guarded_host
from prime_rl.transport import tenants

_OPTION = "--inference.server.port"
_TRIED = 1000  # ports, from the default one on
# A server claims its port by itself, but seconds after its start, and again after a restart. These claims keep the port
# from other launchers until this process ends, or its run does (`prime_rl.run`).
claimed_ports = ExitStack()

Config = TypeVar("Config", RLConfig, SFTConfig)


def with_ports(config: Config, client: str, offsets: Sequence[int] = (0,)) -> Config:
    """Return the config with the first server's port, also in the address that the section `client` has.

    A port that was given is kept, and that of a deployment with members, which ask there. Else it is the first port
    from which all `offsets` (of each server, its own included) are free. In a dry run a kept port is not looked at.
    Raises UserError if a kept port is in use, or none is free.
    """
    if (inference := config.inference) is None:
        return config
    fixed, first = "port" in inference.server.model_fields_set, inference.server.port
    if not fixed and isinstance(config, DeploymentConfig) and tenants.joins(config.output_dir):
        known = [urlsplit(url).port for url in tenants.server_urls(config.output_dir)]
        fixed, first = bool(known), next(filter(None, known), first)
    host, refusals, looks = guarded_host(inference), list[UserError](), not (fixed and config.dry_run)
    for port in range(first, first + (1 if fixed else _TRIED)):
        server = inference.server.with_values({"port": port})
        with ExitStack() as claims:
            try:
                for offset in offsets if looks else ():
                    claim_port(host, port + offset, _OPTION).close()
                    claims.enter_context(claim_port(host, port + offset, _OPTION, "rl"))
                if not config.dry_run:
                    claimed_ports.push(claims.pop_all())
                return config.with_values({"inference.server": server, f"{client}.base_url": f"{server.url}/v1"})
            except UserError as error:
                refusals.append(error)
    raise refusals[0]
