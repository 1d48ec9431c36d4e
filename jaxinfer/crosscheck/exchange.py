"""What the two sides of the cross-check hand each other: a request, and one safetensors file a sequence.

Token ids are exchanged, never text: transformers may tokenize a GGUF file otherwise. Called by
session.py; reference_hf.py is the other side. Imports no JAX.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from jaxinfer.errors import ConfigError

SCRIPT = Path(__file__).with_name("reference_hf.py")
DEFAULT_PYTHON = Path(".venv-ref/bin/python")
HOW_TO_MAKE = (
    "make one with `python3 -m venv .venv-ref` and "
    "`.venv-ref/bin/pip install torch transformers safetensors gguf`"
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens that both sides are fed.

    Attributes:
        token_ids: the prompt and the engine's greedy continuation but for its last token.
    """

    name: str
    token_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """What the reference shall compute. model: a Hugging Face directory or a .gguf file."""

    model: str
    sequences: list[Sequence]
    max_tokens: int
    eos_ids: list[int]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference made of one sequence of T tokens.

    Attributes:
        hidden: f32[T, D] by tap name, in the order of the forward pass.
        top_ids, top_logprobs: [T, k] the k = min(20, vocab) most likely next tokens.
        next_logprobs: f32[T - 1] of the token that does follow.
        greedy_ids, greedy_margins: its own continuation, and the best logit's lead over the second.
    """

    hidden: dict[str, np.ndarray]
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    next_logprobs: np.ndarray
    greedy_ids: np.ndarray
    greedy_margins: np.ndarray


def find_python(given: str | None) -> str:
    """The reference interpreter: the given one, else .venv-ref of the working directory."""
    if given is not None:
        if not Path(given).is_file():
            raise ConfigError(f"reference_python={given!r} is no file; {HOW_TO_MAKE}")
        return given
    if not DEFAULT_PYTHON.is_file():
        raise ConfigError(
            f"no reference interpreter: --reference-python is not given and {DEFAULT_PYTHON} is not "
            f"there; {HOW_TO_MAKE}"
        )
    return str(DEFAULT_PYTHON)


def run_reference(
    python: str, request: Request, folder: Path, progress: Progress | None = None
) -> None:
    """Run the reference; it leaves its files in `folder`. ConfigError says why it could not."""
    if not Path(request.model).exists():
        raise ConfigError(f"the reference's model {request.model!r} is not there")
    (folder / "request.json").write_text(json.dumps(asdict(request)), "utf-8")
    command = [python, str(SCRIPT), str(folder / "request.json"), str(folder)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise ConfigError(f"reference_python={python!r} cannot be started: {error}") from error
        with process:
            assert process.stdout is not None
            for done, line in enumerate(process.stdout):
                if progress and line.startswith("{"):
                    progress("reference", done + 1, len(request.sequences))
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if process.returncode:
        reason = lines[-1] if lines else f"exited with code {process.returncode} without a message"
        hint = f"; {HOW_TO_MAKE}" if process.returncode == 3 else ""
        raise ConfigError(f"the reference failed on {request.model}: {reason}{hint}")


def read_reference(folder: Path, index: int) -> Reference:
    """The reference's file of one sequence."""
    tensors = load_file(folder / f"{index}.safetensors")
    hidden = {k.removeprefix("hidden."): v for k, v in tensors.items() if k.startswith("hidden.")}
    rest = {k: v for k, v in tensors.items() if not k.startswith("hidden.")}
    return Reference({name: hidden[name] for name in sorted(hidden, key=_depth)}, **rest)


def _depth(name: str) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return -1 if name == "embed" else sys.maxsize
