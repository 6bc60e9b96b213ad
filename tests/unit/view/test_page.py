"""The page as it is served and as one file: who is answered, which runs are found, what it is made of."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from prime_rl.config import parse
from prime_rl.config.commands import ViewConfig
from prime_rl.entrypoints.rl import _name_runs
from prime_rl.errors import UserError
from prime_rl.view.page_server import STATIC, listen, page_app, view, write_page
from prime_rl.view.run_files import find_runs
from support.viewing import make_run


def test_only_who_has_the_token(tmp_path: Path) -> None:
    """Contract: no file and no answer without the token; with it a cookie that scripts cannot read."""
    client = TestClient(page_app([make_run(tmp_path / "run")], "secret"))
    for path in ("/", "/view.js", "/api/runs", "/?token=", "/?token=secre", "/?token=sécret"):
        assert client.get(path).status_code == 403
    shown = client.get("/?token=secret")
    assert (shown.status_code, "httponly" in shown.headers["set-cookie"].lower()) == (200, True)
    assert client.get("/api/runs").status_code == 200  # by the cookie
    other = TestClient(page_app([tmp_path / "run"], "other"), base_url="http://testserver:8801")
    other.get("/?token=other")
    assert not set(other.cookies) & set(client.cookies)  # a browser has one jar for all ports of a host


def test_other_sites_are_refused(tmp_path: Path) -> None:
    """Contract: on loopback a name that leads here is not enough: another site's page cannot read the runs."""
    app = page_app([make_run(tmp_path / "run")])
    assert TestClient(app, base_url="http://evil.example:8800").get("/api/runs").status_code == 400
    client = TestClient(app, base_url="http://localhost:8800")
    page = client.get("/")
    assert (page.status_code, "default-src 'self'" in page.headers["content-security-policy"]) == (200, True)
    assert client.get("/api/runs").json()[0]["last_step"] == 3
    assert client.get("/api/samples?step=0").json() == {
        "error": "step 0 was removed: samples are kept of 2 steps, 2 to 3"
    }
    for path in ("/api/_tables", "/api/series?run=7", "/api/samples?step=x", "/../run_files.py"):
        assert client.get(path).status_code == 404
    (tmp_path / "run").rename(tmp_path / "moved")
    assert "there is no directory" in client.get("/api/runs").json()["error"]


def test_the_page_needs_nobody_else() -> None:
    """Contract: no address of another host, and nothing of a run is parsed as HTML."""
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|innerHTML|insertAdjacentHTML|document\.write|eval\(", text), path


def test_one_file(tmp_path: Path) -> None:
    """Contract: an exported page holds style, script and data, and a reply cannot end the data."""
    path = tmp_path / "page.html"
    run = make_run(tmp_path / "run")
    (run / "logs" / "trainer.log").write_text("2026-11-30 10:00:00 ERROR </script><script>alert(1)</script>\n")
    assert write_page(find_runs([run]), path) > 10_000
    text = path.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "<script>alert" not in text
    data = json.loads(text.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    queries = {"series", "steps", "samples", "sample", "events", "ledger", "evals", "config"}
    assert {key.split("&")[0] for key in data} == {"runs", *queries}
    assert "samples&run=0" not in data
    assert "</script><script>alert(1)</script>" in [event["text"] for event in data["events&run=0"]]
    rows = [row["row"] for row in data["samples&run=0&step=3"]["rows"]]
    assert rows == [0, 2, 5, 8, 11, 14, 17, 20]  # some of all
    assert all("messages" in data[f"sample&run=0&row={row}&step=2"] for row in rows)


def test_what_a_page_replaces(tmp_path: Path) -> None:
    """Contract: an earlier page and nothing else; what cannot be written is one line."""
    run, path, other = make_run(tmp_path / "run"), tmp_path / "page.html", tmp_path / "precious.txt"
    for _ in range(2):
        view([run], "127.0.0.1", None, path)
    other.write_text("precious")
    for taken in (other, tmp_path):
        with pytest.raises(UserError, match="exists and is no page of runs"):
            view([run], "127.0.0.1", None, taken)
    with pytest.raises(UserError, match="^cannot write .*precious"):
        view([run], "127.0.0.1", None, other / "page.html")
    assert (other.read_text(), len([*tmp_path.iterdir()])) == ("precious", 3)


def test_values_that_json_lacks(tmp_path: Path) -> None:
    """Contract: dates and infinities of a configuration are text; what is no table is no environment."""
    run = make_run(tmp_path / "run")
    text = 'environments = ["x", {id = "y", args = {a = [2026-11-30, {b = inf}], c = nan, d = 1.5}}]\nmodel = "m"\n'
    (run / "configs" / "orchestrator.toml").write_text(text)
    (run / "logs" / "trainer.log").write_text("2026-13-99 10:00:00 ERROR odd\n2026-11-30 10:00:00 ERROR even\n")
    client = TestClient(page_app([run]), base_url="http://localhost")
    args = '{"a": ["2026-11-30", {"b": Infinity}], "c": NaN, "d": 1.5}'
    client.get("/api/runs")
    shown = client.get("/api/config").json()["orchestrator"]
    assert shown == {"environments": f'["x", {{"id": "y", "args": {args}}}]', "model": "m"}
    assert [event["text"] for event in client.get("/api/events").json() if event["kind"] == "error"] == ["even"]
    for wrong in ("samples?step=inf", "episodes?offset=1e400"):
        assert client.get(f"/api/{wrong}").status_code == 404
    write_page(find_runs([run]), tmp_path / "page.html")
    data = (tmp_path / "page.html").read_text().split('type="application/json">')[1].split("</")[0]
    json.loads(data, parse_constant=pytest.fail)


def test_which_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a deployment's tenants are runs; what is none is one line that names those near it."""
    monkeypatch.chdir(tmp_path)
    one, other = make_run(tmp_path / "outputs" / "one"), make_run(tmp_path / "deployment" / "tenants" / "alice")
    assert list(find_runs([one, tmp_path / "deployment"]).values()) == ["one", "alice"]
    (one / "tenants").mkdir()
    (one / "tenants" / "me").symlink_to(one)
    assert list(find_runs([one]).values()) == ["one"]
    make_run(tmp_path / "later" / "one")
    assert list(find_runs([one, other, tmp_path / "later" / "one"]).values())[::2] == ["outputs/one", "later/one"]
    with pytest.raises(UserError, match=r"there is no directory outputs/on: .*; near it: outputs/one"):
        find_runs([Path("outputs/on")])
    with pytest.raises(UserError, match=r"outputs holds no run: .*; near it: outputs/one"):
        find_runs([Path("outputs")])


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("a b", {"runs": ["a", "b"]}),
        ("--export p.html a", {"export": "p.html", "runs": ["a"]}),
        ("a --port 9 b", {"port": 9, "runs": ["a", "b"]}),
        ("--port=9 a", {"port": 9, "runs": ["a"]}),
        ("--runs a lr=1,seed=2", {"runs": ["a", "lr=1,seed=2"]}),
        ("", {}),
    ],
)
def test_runs_are_named_without_an_option(given: str, values: dict[str, Any]) -> None:
    """Contract: `rl view RUN --port N` and any other order; a comma is part of a name, as in those of a sweep."""
    config = parse(ViewConfig, _name_runs(given.split()), {})
    assert config.model_dump(mode="json", include=set(values)) == values
    assert [*map(str, config.runs)] == values.get("runs", [])


def test_ports() -> None:
    """Contract: without a port the next free one; one that is taken is a line."""
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        taken = first.getsockname()[1]
        assert second.getsockname()[1] > taken >= 8800
        with pytest.raises(UserError, match=f"cannot listen on port {taken} of 127.0.0.1"):
            listen("127.0.0.1", taken)
    with pytest.raises(UserError, match=r"of nowhere\.invalid \((?!Unknown error)"):
        listen("nowhere.invalid", 1)


def test_it_starts_without_torch() -> None:
    """Contract: neither torch nor vLLM is imported: the page opens at once, also beside a busy GPU."""
    code = "import sys, prime_rl.view.page_server; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
