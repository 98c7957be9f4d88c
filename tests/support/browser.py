"""A page in headless Chromium, led by the DevTools protocol through a pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# no display, no sandbox (as root it has none), and nothing that it would ask other hosts for
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SECONDS = 20
# key → its code for Windows, which the protocol asks for, and the text that it makes
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
ALT, CONTROL, SHIFT = 1, 2, 8


@contextmanager
def browser(folder: Path) -> Iterator["Page"]:
    """A browser with one page, and nothing of any other profile; there must be `CHROMIUM`."""
    assert CHROMIUM
    from_us, to_us = os.pipe(), os.pipe()
    command = f'exec "$0" "$@" 3<&{from_us[0]} 4>&{to_us[1]}'  # the descriptors that it talks on
    options = [*OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, *options],
        pass_fds=(from_us[0], to_us[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(from_us[0])
    os.close(to_us[1])
    try:
        page = Page(to_us[0], from_us[1])
        yield page
        page.browser("Browser.close")
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(from_us[1])
        os.close(to_us[0])


class Page:
    """A tab. complaints: what the browser had to say about the page: errors, and breaches of its policy. fetched: the
    addresses that it asked for."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        tabs = self.browser("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in tabs if one["type"] == "page")
        self._session = self.browser("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Goes there and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def browser(self, method: str, **params: Any) -> Any:
        """Asks the browser."""
        return self._ask({"method": method, "params": params})

    def call(self, method: str, **params: Any) -> Any:
        """Asks the tab."""
        return self._ask({"method": method, "params": params, "sessionId": self._session})

    def value(self, expression: str) -> Any:
        """What JavaScript makes of it; a promise is waited for."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until it is true."""
        end = time.monotonic() + SECONDS
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (
                f"never: {expression}\n{self.complaints}\n{self.value('document.body.innerText')}"
            )
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What a user reads there."""
        return self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def type(self, text: str) -> None:
        """As from a keyboard, into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, as a user does."""
        code, text = KEYS[key]
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def click(self, selector: str) -> None:
        """On the first element that a selector finds."""
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """The size of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, colours: str) -> None:
        """What the system asks for: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])

    def _ask(self, request: dict[str, Any]) -> Any:
        self._number += 1
        os.write(self._target, json.dumps({"id": self._number, **request}).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, (request, said["error"])
                return said["result"]
            self._note(said.get("method"), said.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.fetched.append(params["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            assert select.select([self._source], [], [], SECONDS)[0], "the browser says nothing"
            part = os.read(self._source, 1 << 20)
            assert part, "the browser has ended"
            self._left += part
        said, _, self._left = self._left.partition(b"\0")
        return json.loads(said)
