"""Real processes for the integration tests: our server, and third parties' programs, on loopback.

Every process is started with free ports, logs to a file that a failing test shows, and is killed at
the end whatever happens. Called by conftest.py and the tests of this folder.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A program in the background. `log` is the file with its output."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._file = log.open("wb")
        self.popen = subprocess.Popen(
            [str(part) for part in command],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "*", **(env or {})},
            start_new_session=True,
        )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_http(self, url: str, seconds: float = 120.0, status: int = 200) -> None:
        """Wait until `url` answers `status`; fails at once when the process ends."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.popen.poll() is None, f"it ended:\n{self.output()[-4000:]}"
            if http_status(url) == status:
                return
            time.sleep(0.05)
        raise AssertionError(f"{url} did not answer {status}:\n{self.output()[-4000:]}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = 60.0) -> int:
        return self.popen.wait(seconds)

    def close(self) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
        self._file.close()


class Served(Process):
    """`jaxinfer serve MODEL` with both ports. Attributes: url, target, http_port, grpc_port."""

    def __init__(self, model: str | Path, log: Path, *flags: str) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.target = f"127.0.0.1:{self.grpc_port}"
        ports = ["--port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        super().__init__([sys.executable, "-m", "serving.cli", "serve", model, *ports, *flags], log)

    def wait_ready(self, seconds: float = 180.0) -> Served:
        self.wait_http(f"{self.url}/ready", seconds)
        return self


def http_status(url: str) -> int | None:
    """Status of a GET, None if nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
