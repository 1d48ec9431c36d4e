"""RECURRENT: the recorded Qwen3.5 (three Gated DeltaNet layers to one of attention) as a whole checkpoint.

Its vocabulary is widened to the BYTE tokenizer's, so that text and messages work. For tests that need the
engine or a server with recurrent states; nothing here imports the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints import VOCAB, write_tokenizer
from tests.models.families import load_case, write_case

# Few shapes to compile; a prompt chunk is one checkpoint interval.
SMALL: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_pages": 65,
    "progress": False,
}


def write_recurrent(folder: Path) -> Path:
    """Write the directory and return it."""
    _, tensors, _ = load_case("qwen3_5")
    rng = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        known = tensors[name]
        more = known.std() * rng.standard_normal((VOCAB - len(known), known.shape[1]))
        tensors[name] = np.concatenate([known, more.astype(np.float32)])
    write_case(folder, "qwen3_5", tensors, vocab_size=VOCAB)
    write_tokenizer(folder)
    return folder
