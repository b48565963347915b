"""A headless Chromium for tests, driven over the DevTools protocol: its JSON messages over one WebSocket."""

import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEY_CODES = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """One tab. `problems` has the errors of its console, and what its Content-Security-Policy has refused."""

    def __init__(self, socket, domains: tuple[str, ...] = ("Page", "Runtime", "Log")):
        self._socket, self._num_calls = socket, 0
        self.problems: list[str] = []
        for domain in domains:
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict:
        self._num_calls += 1
        self._socket.send(json.dumps({"id": self._num_calls, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv(timeout=20))).get("id") != self._num_calls:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def _note(self, message: dict) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(parameters["entry"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it gives."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20) -> None:
        end = monotonic() + seconds
        while not self.run(condition):
            assert monotonic() < end, f"never true: {condition}"
            sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        code = KEY_CODES.get(key, 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def set_window(self, width: int, height: int, scale: float = 1, **features: str) -> None:
        """Size, and media features such as prefers_color_scheme="dark"."""
        size = dict(width=width, height=height, deviceScaleFactor=scale)
        self.call("Emulation.setDeviceMetricsOverride", mobile=False, **size)
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=media)

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", optimizeForSpeed=True)["data"])


@contextmanager
def open_browser() -> Iterator[Page]:
    from websockets.sync.client import connect

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            end = monotonic() + 30
            while not (port_file.exists() and len(port_file.read_text().split()) == 2):
                assert process.poll() is None and monotonic() < end, "Chromium does not start"
                sleep(0.05)
            port, path = port_file.read_text().split()
            with connect(f"ws://127.0.0.1:{port}{path}") as socket:
                target = Page(socket, domains=()).call("Target.createTarget", url="about:blank")["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(10)
