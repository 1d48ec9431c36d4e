"""Profiler: traces of the running engine, written where the server's owner said.

Clients start and stop; they never name a path and learn only the name of the folder. Each trace gets
a folder of its own, for xprof or Perfetto. Called by gRPC's and HTTP's admin calls, from a thread:
starting and stopping take a moment.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import jax

from jaxinfer.core import StepReport
from jaxinfer.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)
MAX_STEPS = 100_000


class Profiler:
    """Writes one trace at a time below `directory`. Safe to call from any thread.

    `on_step` must be told each step (Metrics.on_step) for `num_steps` to end a trace.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"profile_dir={str(directory)!r} cannot be made ({error.strerror}); name a folder that "
                "can be written to"
            ) from None
        self._lock = threading.Lock()
        self._name: str | None = None  # of the folder being written
        self._left: tuple[str, int] = (
            "",
            0,
        )  # a profile, and steps until it ends by itself; 0: never

    @property
    def running(self) -> bool:
        return self._name is not None

    def start(self, num_steps: int | None = None) -> str:
        """Begin a trace that ends with `stop`, or after `num_steps` steps. Returns its folder's name.

        Raises InvalidRequest while another one runs.
        """
        if num_steps is not None and (
            isinstance(num_steps, bool)
            or not isinstance(num_steps, int)
            or not 1 <= num_steps <= MAX_STEPS
        ):
            raise InvalidRequest(f"num_steps={num_steps!r:.40} is out of range [1, {MAX_STEPS}]")
        with self._lock:
            if self._name is not None:
                raise InvalidRequest(f"the profile {self._name} is running; stop it first")
            name = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%f")
            try:
                jax.profiler.start_trace(self._directory / name)
            except RuntimeError as error:  # this process is being traced by other means
                raise InvalidRequest("another profile is running in this process") from error
            self._name, self._left = name, (name, num_steps or 0)
        log.info("profile %s begins", name)
        return name

    def stop(self) -> str:
        """End the trace and write it. Returns its folder's name. Raises InvalidRequest if none runs."""
        with self._lock:
            if self._name is None:
                raise InvalidRequest("no profile is running; start one first")
            return self._write(self._name)

    def _write(self, name: str) -> str:
        """With the lock held: `running` until the files are there."""
        try:
            jax.profiler.stop_trace()
        finally:
            self._name = None
        log.info("profile %s is written", name)
        return name

    def on_step(self, _: StepReport) -> None:
        """Count a step; runs in the engine thread, so the last one leaves the writing to another."""
        name, left = self._left
        if left:
            self._left = (name, left - 1)
            if left == 1:
                threading.Thread(target=self._end, args=(name,), daemon=True).start()

    def _end(self, name: str | None) -> None:
        """Write the trace `name`, or any (None), unless somebody has done so."""
        with self._lock:
            if self._name is not None and name in (None, self._name):
                self._write(self._name)

    def close(self) -> None:
        """Write what is being traced, if anything is; waits for a writer that is at work."""
        self._end(None)
