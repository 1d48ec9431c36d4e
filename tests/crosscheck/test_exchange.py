"""The runner of the reference, with small programs in the place of its interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.crosscheck import exchange
from jaxinfer.errors import ConfigError


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo first >&2; echo the last line >&2; exit 1", "the last line"),
        ("exit 7", "exited with code 7 without a message"),
        ("kill -9 $$", "exited with code -9 without a message"),
    ],
)
def test_a_reference_that_dies_says_why(tmp_path: Path, script: str, reason: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    request = exchange.Request(str(tmp_path), [], 1, [])
    with pytest.raises(ConfigError, match=f": {reason}$"):
        exchange.run_reference(str(python), request, tmp_path)
