"""Which ports the servers of a run get, beside sockets that others hold."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.config import RLConfig, SFTConfig
from prime_rl.config.rl import DeploymentConfig
from prime_rl.errors import UserError
from prime_rl.launcher import ports
from prime_rl.launcher.ports import Config, with_ports
from prime_rl.transport import tenants
from support.configs import from_table

RUN = {"orchestrator": {"environments": [{"id": "reverse-text"}]}}
EVALUATED = {"eval": {"environment": {"id": "reverse-text"}}}
DEPLOYMENT = {"trainer": {"lora": {}, "tenants": {}}}


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that another program listens on; what the test claims is released after it."""
    with ports.claimed_ports, socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def run(default: int, **settings: object) -> RLConfig:
    """A run whose port nobody gave, on a host where it would be this one."""
    return at_default(from_table(RLConfig, {**RUN, "inference": {}, **settings}), default)


def at_default(config: Config, port: int) -> Config:
    assert config.inference is not None
    config.inference.server.port = port
    config.inference.server.model_fields_set.discard("port")
    return config


def port_of(config: RLConfig | SFTConfig) -> int:
    assert config.inference is not None
    return config.inference.server.port


def test_a_free_port_is_taken_and_both_sides_have_it(busy: int) -> None:
    """Contract: also of two that start at once: the first one's server, which listens later, keeps its port."""
    first, second = (with_ports(run(busy), "orchestrator.client") for _ in range(2))
    assert busy < port_of(first) < port_of(second)
    for config in (first, second):
        assert config.orchestrator.client.base_url == f"http://localhost:{port_of(config)}/v1"
    made = at_default(from_table(SFTConfig, {**EVALUATED, "inference": {}}), busy)
    evaluated = with_ports(made, "eval.client")
    assert evaluated.eval is not None
    assert evaluated.eval.client.base_url == f"http://localhost:{port_of(evaluated)}/v1"
    assert port_of(evaluated) > port_of(second)


def test_several_servers_move_together(busy: int) -> None:
    """Contract: a second server keeps its distance, so that each of a GPU's two has the port that the guide says."""
    config = with_ports(run(busy - 5), "orchestrator.client", (0, 5))
    assert port_of(config) > busy - 5


def test_a_dry_run_claims_nothing(busy: int) -> None:
    dry = run(busy, dry_run=True)
    assert busy < port_of(with_ports(dry, "orchestrator.client")) == port_of(with_ports(dry, "orchestrator.client"))


@pytest.mark.parametrize("given", [True, False])
def test_a_port_that_was_given_is_kept_or_refused(busy: int, given: bool, tmp_path: Path) -> None:
    """Contract: a person who gave one wants that one, and the members of a deployment ask at the one that it had."""
    client = "orchestrator.client"
    if given:
        configs = [
            from_table(RLConfig, {**RUN, "inference": {"server": {"port": busy}}, "dry_run": dry}) for dry in (0, 1)
        ]
    else:
        deployment = {**DEPLOYMENT, "inference": {}, "output_dir": tmp_path}
        configs = [from_table(DeploymentConfig, {**deployment, "dry_run": dry}) for dry in (0, 1)]
        tenants.publish_servers(tmp_path, [f"http://localhost:{busy}/v1"])
        assert port_of(with_ports(at_default(configs[0], busy), client)) > busy  # nobody asks there
        member = tenants.tenant_dir(tmp_path, "alice")
        member.mkdir(parents=True)
        tenants.ask_to_join(member, {})
    with pytest.raises(UserError, match=f"^port {busy} is in use: .* --inference.server.port$"):
        with_ports(configs[0], client)
    assert port_of(with_ports(configs[1], client)) == busy
    by_address = {"environments": [{"id": "x"}], "client": {"base_url": f"http://localhost:{busy}"}}
    with pytest.raises(UserError, match=f"^port {busy} is in use"):
        with_ports(from_table(RLConfig, {"inference": {}, "orchestrator": by_address}), client)
