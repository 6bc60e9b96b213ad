"""Serve the page on a port of this host, or write it into one file."""

import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.trustedhost import TrustedHostMiddleware

from prime_rl.errors import UserError, say, user_errors
from prime_rl.transport.commit import write_atomically
from prime_rl.view.run_files import RunFiles, answer, find_runs

STATIC = Path(__file__).parent / "static"
PORTS = range(8800, 8900)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_EXPORT_STEPS, _EXPORT_SAMPLES = 3, 8  # samples of each step


def view(paths: Sequence[Path], host: str, port: int | None, export: Path | None) -> None:
    """Serve the page of the runs at `paths` until interrupted, or write it into the file `export`.
    Raises UserError: a path is no run, the port is taken, or the file cannot be written."""
    runs = find_runs(paths)
    if export is not None:
        with user_errors(f"cannot write {export}", OSError):
            size = write_page(runs, export)
        return say(f"wrote {export} ({size / 2**20:.1f} MiB), which needs no other file")
    listener, token = listen(host, port), "" if host in _LOOPBACK else secrets.token_urlsafe(24)
    url_host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{url_host}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
    say(f"{', '.join(runs.values())}: {url} (Ctrl-C ends)")
    uvicorn.Server(uvicorn.Config(page_app(paths, token), log_level="warning")).run(sockets=[listener])


def listen(host: str, port: int | None) -> socket.socket:
    """Listen on `port`, or on the first free one of `PORTS`. Raises UserError: it is taken, or not of this host."""
    reason = ""
    for number in PORTS if port is None else [port]:
        try:
            return socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            reason = str(error.strerror).partition(" (while")[0]  # Python adds "(while attempting to bind …)"
    ports = f"port {port}" if port is not None else f"ports {PORTS[0]} to {PORTS[-1]}"
    raise UserError(f"cannot listen on {ports} of {host} ({reason}): give another --port or --host")


def page_app(paths: Sequence[Path], token: str = "") -> FastAPI:
    """Make the app. With a `token`, requests without the token get 403; it comes as `?token=…`, later as a cookie.
    Without one, requests must name this host, so that pages of other sites cannot read the runs in a browser."""
    app, runs = FastAPI(openapi_url=None), dict[Path, RunFiles]()

    @app.middleware("http")
    async def guard(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        cookie = f"prime_rl_view_{request.scope['server'][1]}"  # browsers send a host's cookies to all its ports
        presented_token = request.query_params.get("token", request.cookies.get(cookie, ""))
        if token and not secrets.compare_digest(presented_token.encode(), token.encode()):
            return Response("this page needs the token that `rl view` printed in its address", status_code=403)
        response = await call(request)
        response.headers.update(_HEADERS)
        if token:
            response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response

    if not token:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK, "[::1]"])

    @app.get("/api/runs")
    def summaries() -> Any:
        for path, name in find_runs(paths).items():  # tenants may have joined
            runs.setdefault(path, RunFiles(path, name))
        return JSONResponse([answer(run, "summary", {}) for run in list(runs.values())])

    @app.get("/api/{query}")
    def query_run(query: str, request: Request, run: int = 0) -> Any:
        if not 0 <= run < len(runs):
            raise UserError(f"there is no run {run}: ask for api/runs first")
        return JSONResponse(answer(list(runs.values())[run], query, request.query_params))

    @app.exception_handler(UserError)
    def explain(request: Request, error: UserError) -> Response:
        return JSONResponse({"error": str(error)}, status_code=404)

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def write_page(runs: dict[Path, str], path: Path) -> int:
    """Write the page with the data of the runs into one file and return its size. It has a few samples of the first,
    middle and last step. Keys are those of `fromFile` in view.js. Raises UserError: `path` exists and is no page."""
    if path.exists() and not (path.is_file() and _is_page(path)):
        raise UserError(f"{path} exists and is no page of runs: give another --export")
    run_files = [RunFiles(*run) for run in runs.items()]
    answers: dict[str, Any] = {"runs": [answer(run, "summary", {}) for run in run_files]}
    for number, run in enumerate(run_files):

        def add(query: str, number: int = number, run: RunFiles = run, **params: int) -> Any:
            key = "&".join([query, f"run={number}", *(f"{name}={value}" for name, value in params.items())])
            try:
                answers[key] = answer(run, query, {name: str(value) for name, value in params.items()})
            except UserError as error:
                answers[key] = {"error": str(error)}
            return answers[key]

        for query in ("events", "ledger", "evals", "config"):
            add(query)
        keys = "|".join(answers["runs"][number]["keys"])
        answers[f"series&run={number}"] = answer(run, "series", {"keys": keys})
        known = add("steps")
        known["steps"] = _evenly(known.get("steps", []), _EXPORT_STEPS)
        for page, step in [(add("samples", step=step), step) for step in known["steps"]]:
            page["rows"] = _evenly(page.get("rows", []), _EXPORT_SAMPLES)
            page["total"] = len(page["rows"])
            for row in page["rows"]:
                add("sample", row=row["row"], step=step)
    html, style, script = ((STATIC / name).read_text() for name in ("index.html", "style.css", "view.js"))
    data = json.dumps(answers, separators=(",", ":")).replace("<", "\\u003c")
    html = html.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    inline = f'<script id="data" type="application/json">{data}</script>\n<script>{script}</script>\n</body>'
    html = html.replace('<script src="view.js" defer></script>\n', "").replace("</body>", inline)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html.encode())
    return len(html.encode())


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` items: the first, the last and some evenly between."""
    return [items[index] for index in sorted({n * (len(items) - 1) // (count - 1) for n in range(count) if items})]


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1000)
    return head.startswith(b"<!doctype html>") and b"<title>prime-rl</title>" in head
