"""The recorded reference: stands in for the interpreter with PyTorch, and the model it was recorded on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.crosscheck.exchange import Progress, Request
from tests.crosscheck.record import RECORDED, prompts, write_model

PER_TOKEN = ("hidden.", "top_")


def replay(request: Request, folder: Path, progress: Progress | None = None) -> None:
    """What the reference wrote, cut to the tokens asked for (it is causal, so its rows stay right)."""
    sequences = json.loads((RECORDED / "sequences.json").read_text())
    for i, (asked, recorded) in enumerate(zip(request.sequences, sequences, strict=True)):
        fed = len(asked.token_ids)
        assert asked.token_ids == recorded["token_ids"][:fed], "the engine's greedy tokens changed"
        ends = {"next_logprobs": fed - 1, "greedy_ids": request.max_tokens}
        ends["greedy_margins"] = request.max_tokens
        tensors = load_file(RECORDED / f"{i}.safetensors")
        cut = {
            name: value[: fed if name.startswith(PER_TOKEN) else ends[name]].copy()
            for name, value in tensors.items()
        }
        save_file(cut, folder / f"{i}.safetensors")
        if progress:
            progress("reference", i + 1, len(sequences))
    shutil.copy(RECORDED / "versions.json", folder)


@pytest.fixture(scope="session")
def healthy(checkpoint_root: Path) -> Path:
    """The checkpoint that the recording was made of."""
    return write_model(checkpoint_root / "crosscheck-healthy")


@pytest.fixture(scope="session")
def prompt_file(checkpoint_root: Path) -> Path:
    file = checkpoint_root / "crosscheck-prompts.json"
    items = [{"name": p.name, "prompt_token_ids": p.token_ids} for p in prompts()]
    file.write_text(json.dumps(items))
    return file
