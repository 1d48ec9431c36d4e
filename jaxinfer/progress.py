"""Progress of what takes long (loading, compiling, generating), on stderr, for people who look.

Bars appear only after two seconds and only on a terminal; elsewhere nothing is printed.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Self

log = logging.getLogger(__name__)
DELAY_SECONDS = 2.0
LOG_SECONDS = 5.0


class Progress:
    """A context that shows `update(what, done, total)`; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, what: str, done: int, total: int) -> None:
        """Report `done` of `total` units of a named activity."""


class ConsoleProgress(Progress):
    """rich bars on stderr, one for each activity."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._start = 0.0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._bars, self._tasks = None, {}

    def update(self, what: str, done: int, total: int) -> None:
        if self._bars is None:
            if time.monotonic() - self._start < DELAY_SECONDS:
                return
            self._bars = _bars()
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)


class LogProgress(Progress):
    """Log lines, one an activity each few seconds and at its end: for servers."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def update(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun = self._last.setdefault(what, now)
        if done >= total or now - begun >= LOG_SECONDS:
            self._last[what] = now
            log.info("%s: %d of %d", what, done, total)


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return RichProgress(*columns, console=Console(stderr=True), transient=True)


def console_progress(show: bool) -> Progress:
    """Bars if wanted and stderr is a terminal, else silence."""
    return ConsoleProgress() if show and sys.stderr.isatty() else Progress()
