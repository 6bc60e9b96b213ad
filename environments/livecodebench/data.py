"""Problems of LiveCodeBench. A release's hidden tests are gigabytes: those in JSON lines stay there until needed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmark_tasks.rows import DataError, Rows, ask_hub, json_line, looks_local, read
from livecodebench.tests import Test, read_tests

COLUMNS = (
    "question_id",
    "question_content",
    "starter_code",
    "difficulty",
    "contest_date",
    "public_test_cases",
    "private_test_cases",
)
LATEST = "release_v6"
RELEASES = 6


@dataclass(frozen=True)
class Where:
    """The tests of a problem: themselves, or the file and the offset in bytes of the line that holds them."""

    public: str = ""
    private: str = ""
    file: str = ""
    offset: int = 0

    def tests(self, problem: str) -> list[Test]:
        """Raises DataError, see `read_tests`."""
        if not self.file:
            return read_tests(self.public, self.private, problem)
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            row = json.loads(file.readline())
        return read_tests(row["public_test_cases"], row["private_test_cases"], problem)


@dataclass(frozen=True)
class CodeProblem:
    id: str
    question: str
    starter: str
    function: str  # "": the program reads its standard input
    difficulty: str
    date: str  # of the contest, ISO 8601
    where: Where


def read_problems(data: str, subset: str | None, split: str | None) -> list[CodeProblem]:
    """Read the problems of a release of the hub's dataset, or of a local copy: .jsonl files, or what `read` reads.

    Raises:
        DataError: it is not there or cannot be read, a column is missing, or two problems have the same id.
    """
    path = Path(data).expanduser()
    if not path.exists() and not looks_local(data):
        files = _release_files(data, subset or LATEST)
    else:
        if subset is not None:
            raise DataError(
                f"subset {subset!r}: a release of the hub's dataset, and {data!r} is a local path; leave it out"
            )
        files = [path] if path.suffix == ".jsonl" else sorted(path.glob("*.jsonl"))
    if files and split is None and all(file.is_file() for file in files):
        found = [problem for file in files for problem in _lines(file)]
    else:
        rows = read(data, split, (None,), "test").require(*COLUMNS)
        found = [_problem(row, Where(row["public_test_cases"], row["private_test_cases"]), data) for row in rows.rows]
    if not found:
        raise DataError(f"data {data!r} has no rows")
    Rows(data, [{"question_id": problem.id} for problem in found]).ids("question_id")
    return found


def _release_files(name: str, release: str) -> list[Path]:
    """`release_v3` is all problems up to that release, `v3` those that came with it. The hub has a file of each."""
    whole, number = release.startswith("release_"), release.removeprefix("release_").removeprefix("v")
    if not number.isdigit() or not 1 <= int(number) <= RELEASES or release not in (f"v{number}", f"release_v{number}"):
        raise DataError(f"subset {release!r}: give one of release_v1 to release_v{RELEASES}, or v1 to v{RELEASES}")
    numbers = range(1, int(number) + 1) if whole else [int(number)]
    from huggingface_hub import hf_hub_download

    files = [f"test{'' if one == 1 else one}.jsonl" for one in numbers]
    # Not through `datasets`: the dataset is made by a script, which that runs no more.
    return [Path(ask_hub(name, partial(hf_hub_download, name, file, repo_type="dataset"))) for file in files]


def _lines(path: Path) -> Iterator[CodeProblem]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json_line(line, path, number)
                Rows(f"{path}, line {number}", [row if isinstance(row, dict) else {}]).require(*COLUMNS)
                yield _problem(row, Where(file=str(path.resolve()), offset=offset), str(path))
            offset += len(line)


def _problem(row: dict[str, Any], where: Where, source: str) -> CodeProblem:
    id = str(row["question_id"])
    metadata = row.get("metadata") or "{}"
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError as error:
        raise DataError(f"{source}, problem {id}: metadata is not JSON: {error}") from error
    name = metadata.get("func_name") or ""
    return CodeProblem(
        id, row["question_content"], row["starter_code"], name, row["difficulty"], str(row["contest_date"]), where
    )
