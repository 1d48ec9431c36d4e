"""The GPU kernels on a CPU: a time limit for each test, and bfloat16 cases for the interpreter."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

_SECONDS = 300  # the slowest takes 10 on an idle machine


@pytest.fixture(autouse=True)
def limited(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Ends the run and prints where it hung: a wait too many stops the interpreter for good.

    The threads that hang belong to XLA and heed neither signals nor exceptions.
    """
    with capfd.disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(_SECONDS, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)
