"""Controls a headless Chromium through the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The time limit in seconds for the browser to start, to load a page, and to answer.
TIMEOUT = 30


class Tab:
    """A page of the browser, with the events that it has reported."""

    def __init__(self, commands: int, messages: int) -> None:
        self._commands = commands
        self._messages = messages
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._messages], [], [], max(0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {TIMEOUT} s"
            read = os.read(self._messages, 1 << 16)
            assert read, "Chromium has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        request = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._commands, json.dumps(request).encode() + b"\0")
        end = time.monotonic() + TIMEOUT
        while True:
            message = self._receive(end)
            if message.get("id") == self._last:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if "method" in message:
                self._events.append(message)

    def show(self, url: str, width: int, scheme: str) -> None:
        """Opens a page in a window of this width, in the colour scheme `light` or `dark`."""
        metrics = {"height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", width=width, **metrics)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=media)
        opened = self._call("Page.navigate", url=url)
        assert "errorText" not in opened, opened
        self.wait("document.readyState === 'complete' && !!document.querySelector('main')")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in JavaScript."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + TIMEOUT
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"not true after {TIMEOUT} s: {expression}"
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """Stores a picture of the whole page."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Returns the errors and warnings of the console so far."""
        found = []
        for event in self._events:
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(json.dumps(parameters["entry"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(json.dumps(parameters["args"]))
        return found

    def requested(self) -> set[str]:
        """Returns the URLs that were requested so far."""
        events = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return {event["params"]["request"]["url"] for event in events}


@contextlib.contextmanager
def chromium() -> Iterator[Tab]:
    """Runs a browser with one page."""
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
        command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += ["--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
        command += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # The browser reads commands from file descriptor 3, and writes answers to descriptor 4.
        shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait, TIMEOUT)
        stack.callback(process.terminate)
        os.close(to_read)
        os.close(from_write)
        stack.callback(os.close, to_write)
        stack.callback(os.close, from_read)
        yield Tab(to_write, from_read)
