"""A real headless Chromium, driven by its DevTools protocol."""

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60.0
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """One open page. Errors of its scripts are kept in `errors`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=SECONDS)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"])[:500])
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    async def evaluate(self, script: str) -> Any:
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Return the value of `script` as soon as it is true."""
        async with asyncio.timeout(SECONDS):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(0.05)
        return value

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url="about:blank")  # else another #view would be the same document
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=_KEYS[key], text=text)

    async def resize(self, width: int, height: int) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **sizes)

    async def dark(self, dark: bool = True) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.send("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Page]:
    """Start Chromium with an empty profile in `directory`."""
    assert CHROMIUM is not None
    profile = directory / "profile"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
    command = [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            while not (port := profile / "DevToolsActivePort").exists() or not port.read_text().strip():
                await asyncio.sleep(0.05)
            async with session.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json") as answer:
                target = next(one for one in await answer.json() if one["type"] == "page")
        async with aiohttp.ClientSession() as session:
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Runtime", "Page"):
                    await page.send(f"{domain}.enable")
                yield page
    finally:
        process.kill()
        await process.wait()
