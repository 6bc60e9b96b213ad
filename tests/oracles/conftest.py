"""Other projects, each installed when the first test asks for it; tests are skipped with the reason where it cannot be."""

import functools
from pathlib import Path
from typing import Any

import pytest

from support.oracles import Answers, Oracle


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What a peer, by its name, gives for all that the module asks it (`question`): it is started once."""

    @functools.cache
    def answer(name: str) -> dict[str, Any]:
        oracle = Oracle(name, request.config.cache.mkdir("oracles"))  # type: ignore[union-attr]
        question = {"model": str(tiny_model)} | request.module.question(name)
        return dict(oracle.answer(Path(__file__).parent / f"call_{name}.py", question, tmp_path_factory.mktemp(name)))

    return answer
