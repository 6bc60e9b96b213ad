"""Other projects, each installed when the first test asks for it; tests are skipped with the reason where it cannot be."""

from pathlib import Path

import pytest

from support.oracles import Oracle


@pytest.fixture(scope="session")
def oracle_cache(request: pytest.FixtureRequest) -> Path:
    return request.config.cache.mkdir("oracles")  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def verl(oracle_cache: Path) -> Oracle:
    return Oracle("verl", oracle_cache)


@pytest.fixture(scope="session")
def trl(oracle_cache: Path) -> Oracle:
    return Oracle("trl", oracle_cache)
