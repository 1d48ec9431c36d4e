"""Record what PyTorch's transformers makes of the demo model, into recorded.npz, for test_demo.py.

    python tests/demo/record.py MODEL.gguf PROMPTS.json

Runs under an interpreter with torch and transformers (5.24.0 was used) and never imports the engine;
prompts.py writes PROMPTS.json. For each prompt: 64 greedy tokens (end-of-text ids do not end them), the
lead of the best logit over the second, and the 20 best log-probabilities of every step and of some
positions of the prompt. All in float32 with eager attention; log-probabilities are taken in float64.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
MAX_TOKENS, TOP, POSITIONS = 64, 20, 16


def load(path: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    )
    return model.eval()


def best(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(u16[N, 20] ids, f32[N, 20] log-probabilities) of the rows of logits, best first."""
    top = torch.topk(torch.log_softmax(logits.double(), -1), TOP, -1)
    return top.indices.numpy().astype(np.uint16), top.values.numpy().astype(np.float32)


def record(model: torch.nn.Module, prompt: list[int]) -> dict[str, np.ndarray]:
    """Rows of prompt_* are of the logits at `positions`: they score the token after."""
    positions = np.unique(np.linspace(0, len(prompt) - 2, POSITIONS).astype(int))
    if len(prompt) < 2:
        positions = positions[:0]
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    prompt_ids, prompt_logprobs = best(out.logits[0, torch.from_numpy(positions)])
    rows: list[torch.Tensor] = []
    tokens: list[int] = []
    while True:
        rows.append(out.logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) == MAX_TOKENS:
            break
        out = model(
            input_ids=torch.tensor([tokens[-1:]]),
            past_key_values=out.past_key_values,
            use_cache=True,
        )
    logits = torch.stack(rows)
    two = torch.topk(logits.double(), 2, -1).values
    ids, logprobs = best(logits)
    return {
        "prompt": np.asarray(prompt, np.uint16),
        "positions": positions.astype(np.uint16),
        "prompt_ids": prompt_ids,
        "prompt_logprobs": prompt_logprobs,
        "tokens": np.asarray(tokens, np.uint16),
        "margins": (two[:, 0] - two[:, 1]).numpy().astype(np.float32),
        "ids": ids,
        "logprobs": logprobs,
    }


def main() -> int:
    torch.set_num_threads(1)
    model = load(Path(sys.argv[1]).resolve())
    arrays: dict[str, Any] = {}
    for i, item in enumerate(json.loads(Path(sys.argv[2]).read_text("utf-8"))):
        with torch.no_grad():
            one = record(model, item["token_ids"])
        arrays |= {f"{i}/{key}": value for key, value in one.items()}
        print(item["name"], len(item["token_ids"]), f"{one['margins'].min():.2e}", flush=True)
    path = HERE / "recorded.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path.stat().st_size} bytes, transformers {transformers.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
