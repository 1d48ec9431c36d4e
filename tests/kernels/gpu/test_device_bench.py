"""bench/device.py works up to the device: a dry run is right, and without a GPU it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/device.py", *options]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )


def test_a_dry_run(tmp_path: Path) -> None:
    done = run("--dry", "--out", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    items = [row["item"].split(":")[0] for row in report["rows"]]
    assert items == [
        "copy (read and write)",
        "paged decode is right",
        "paged decode, mosaic",
        "paged decode, reference",
    ]
    assert report["rows"][1]["error"] < 1e-2


def test_what_is_out_of_time_is_listed(tmp_path: Path) -> None:
    done = run("--dry", "--seconds", "0", "--out", str(tmp_path / "report.json"))
    assert done.returncode == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["rows"] == []
    assert all("no time left" in line for line in report["failures"][:-1])
    assert report["failures"][-1] == "paged decode is not timed: it is not known to be right"


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "--dry" in done.stdout
