"""Record what PyTorch's transformers computes for every case of cases.py, into recordings.npz.

    python tests/reference/record.py [CASE ...]

Runs under an interpreter with torch and transformers (5.24.0 was used), never under the project's.
Holds for each case: names and shapes of the checkpoint's tensors, the last row of logits for each
prompt length, all rows and the hidden states of the last token for the longest one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from cases import CASE_LENGTHS, CASES, prompt, tensor
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoConfig,
    AutoModelForCausalLM,
)

HERE = Path(__file__).parent


def build(case: str, folder: str) -> torch.nn.Module:
    """The case's model in float32, read from its config.json, with drawn weights."""
    (Path(folder) / "config.json").write_text(json.dumps(CASES[case]))
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tensor(case, name, tuple(parameter.shape))))
    return model.eval()


def record(case: str) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build(case, folder)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    out["shapes"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    lengths = CASE_LENGTHS[case]
    result = None
    for length in lengths:  # ascending: dynamic rope keeps the longest length that it has seen
        ids = torch.tensor([prompt(case, length)])
        with torch.no_grad():
            result = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        out[f"last{length}"] = result.logits[0, -1].numpy()
    assert result is not None, f"{case} has no lengths"
    out["logits"] = result.logits[0].numpy()
    out["hidden"] = torch.stack([h[0, -1] for h in result.hidden_states]).numpy()
    return out


def main() -> int:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(CASES)
    path = HERE / "recordings.npz"
    arrays = dict(np.load(path)) if sys.argv[1:] and path.exists() else {}
    for case in names:
        for key, value in record(case).items():
            arrays[f"{case}/{key}"] = value
        print(case, f"max|logit|={np.abs(arrays[f'{case}/logits']).max():.2f}", flush=True)
    np.savez_compressed(path, **arrays)
    print(f"{len(names)} cases, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
