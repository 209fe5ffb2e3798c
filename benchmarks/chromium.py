"""A headless Chromium, driven by its DevTools protocol: what tests, pictures and figures of the page need of it.

It is the system's own browser (Debian: `apt-get install chromium`); nothing is downloaded."""

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # it opens our own page alone, and containers run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "about:blank",
)
START_S = 60.0
MAX_MESSAGE = 256 * 2**20
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, "Enter": 13, "Tab": 9}


def find_chromium() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class PageError(Exception):
    """What a script in the page threw, or what never came true."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        """Errors and warnings: also what the content-security policy has refused."""
        self.requests: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, START_S)

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            answer = self._answers.pop(found.get("id", -1), None)
            if answer is not None and not answer.done():
                failed = "error" in found
                answer.set_exception(PageError(str(found["error"]))) if failed else answer.set_result(
                    found["result"]
                )
            self._note(found.get("method", ""), found.get("params", {}))

    def _note(self, method: str, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.console.append(str(found["exceptionDetails"].get("exception", {}).get("description", found)))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.console.append(" ".join(str(one.get("value", one)) for one in found["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    async def prepare(self, width: int, height: int, *, dark: bool, scale: float = 1.0) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.resize(width, height, scale=scale)
        await self.set_theme(dark=dark)

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    async def set_theme(self, *, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(str(details.get("exception", {}).get("description", details)))
        return found["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 20.0) -> Any:
        """Wait in the page itself until an expression is true, and give its value."""
        script = f"""new Promise((done, fail) => {{
            const end = performance.now() + {timeout_s * 1000};
            const look = () => {{
                let found = false;
                try {{ found = {condition}; }} catch {{ }}
                if (found) done(found);
                else if (performance.now() > end) fail(new Error('never came true'));
                else requestAnimationFrame(look);
            }};
            look();
        }})"""
        try:
            return await self.run(script)
        except PageError as error:
            text = await self.run("document.body.innerText.slice(0, 600)")
            raise PageError(f"{condition}: {error}\n{text}\n{self.console}") from None

    async def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {} if len(key) > 1 else {"text": key}
        code = KEYS.get(key, ord(key.upper()[0]))
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    async def picture(self, path: Path) -> None:
        found = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()


class Chromium:
    """A browser at work; `new_page` opens tabs."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self._base = f"http://127.0.0.1:{port}"
        self._session = session

    @contextlib.asynccontextmanager
    async def new_page(
        self, width: int = 1280, height: int = 800, *, dark: bool = False, scale: float = 1.0
    ) -> AsyncIterator[Page]:
        async with self._session.put(f"{self._base}/json/new?about:blank") as answer:
            found = await answer.json(content_type=None)
        socket = await self._session.ws_connect(found["webSocketDebuggerUrl"], max_msg_size=MAX_MESSAGE)
        page = Page(socket)
        try:
            await page.prepare(width, height, dark=dark, scale=scale)
            yield page
        finally:
            await page.close()
            async with self._session.get(f"{self._base}/json/close/{found['id']}"):
                pass


@contextlib.asynccontextmanager
async def chromium(program: str | None = None) -> AsyncIterator[Chromium]:
    """Start one with a profile of its own, and end it."""
    found = program or find_chromium()
    if found is None:
        raise PageError("there is no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="penstock-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            found,
            f"--user-data-dir={profile}",
            *ARGUMENTS,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await asyncio.wait_for(_port(process), START_S)
            async with aiohttp.ClientSession() as session:
                yield Chromium(port, session)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process) -> int:
    """Chromium says where it listens."""
    assert process.stderr is not None
    async for line in process.stderr:
        words = line.decode(errors="replace")
        if "DevTools listening on" in words:
            return int(words.split("127.0.0.1:")[1].split("/")[0])
    raise PageError("Chromium ended before it listened")
