"""Servers behind a router as one client. (Runs through a router: test_stories.py.)"""

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from prime_rl.config.shared import ClientConfig
from prime_rl.errors import UserError
from prime_rl.fleet.client import ServerError
from prime_rl.fleet.logprob_check import LogprobCheckFailed
from prime_rl.fleet.router import RouterClient, connect_all
from support.fleet import Router, Server


@pytest.fixture
def servers() -> list[Server]:
    return [Server("http://a"), Server("http://b")]


@pytest.fixture
def routed(servers) -> RouterClient:
    return RouterClient(Router(), servers)


class Weights:
    version, hash, incarnation = 3, "h" * 32, 0


async def test_backends_that_serve_other_names_have_none_in_common(servers, routed):
    """Contract: a name that one of them does not know would fail wherever a router leads to it."""
    base = servers[0].now
    servers[0].now = replace(base, models=("m", "y"))
    for models in (("m", "x"), None):
        servers[1].now = replace(base, models=models)
        (await routed.served()).check_name(routed.root, "m")
    servers[1].now = replace(base, models=("x",))
    with pytest.raises(UserError, match="models without a common name, not m"):
        (await routed.served()).check_name(routed.root, "m")


@pytest.mark.parametrize(
    ("errors", "raised"),
    [
        ([ServerError("t"), None], ServerError),
        ([ServerError("t"), UserError("refused")], UserError),
        ([ServerError("t"), LogprobCheckFailed("c")], LogprobCheckFailed),
        ([LogprobCheckFailed("c"), ValueError("a bug")], ValueError),
    ],
)
async def test_the_most_severe_error_of_an_update_is_raised(servers, routed, errors, raised):
    """Contract: a backend that computes something else is not hidden by another that did not answer."""
    for server, error in zip(servers, errors, strict=True):

        async def fail(version, error=error):
            if error is not None:
                raise error

        server.on_load = fail
    with pytest.raises(raised) as found:
        await routed.update(Weights)
    assert type(found.value) is raised


async def test_clients_are_made_of_settings():
    """Contract: a list is a list of servers; those behind a router are one client, known by the router's address."""
    config = ClientConfig(base_url="http://r:1/v1", admin_base_url=["http://a:1", "http://b:1/v1"])
    async with AsyncExitStack() as stack:
        (client,) = connect_all(config, stack, None)
        backends = [each.root for each in client._backends]
        assert (client.root, backends) == ("http://r:1", ["http://a:1", "http://b:1"])
        several = connect_all(ClientConfig(base_url=["http://a:1", "http://b:1"]), stack, None)
        assert [each.root for each in several] == ["http://a:1", "http://b:1"]
