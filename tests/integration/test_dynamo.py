"""NVIDIA Dynamo's KV indexer on our KV events: see dynamo_indexer.py, which this runs.

The indexer listens on all addresses, so it gets a network of its own in which only loopback exists.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import ROOT

APART = ("unshare", "-rn", "sh", "-c")


@pytest.mark.clients
def test_the_indexer_answers_from_our_events(clients: Path):
    up = subprocess.run([*APART, "ip link set lo up"], capture_output=True, text=True)
    assert up.returncode == 0, f"this needs `unshare -rn` and `ip` (user namespaces): {up.stderr}"
    check = [sys.executable, "-m", "tests.integration.dynamo_indexer", "--python"]
    command = shlex.join([*check, str(clients / "python")])
    done = subprocess.run(
        [*APART, f"ip link set lo up && exec {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("right") >= 13, done.stdout
