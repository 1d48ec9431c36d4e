"""The native kernels, built once for the session; absent only where no C++ compiler is installed."""

from __future__ import annotations

import pytest

from pallas_kernels import native


@pytest.fixture(scope="session")
def native_kernels() -> str:
    """Path of the library. A compiler that cannot build it is a failure, not a reason to skip."""
    try:
        native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))
    return native.load()
