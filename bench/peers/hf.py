"""Contestant: Hugging Face transformers on PyTorch, eager. --model is a Hugging Face folder."""

from __future__ import annotations

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from protocol import arguments, measure

args = arguments(__doc__)
torch.set_num_threads(args.threads)
model = transformers.AutoModelForCausalLM.from_pretrained(
    args.model, dtype=getattr(torch, args.dtype), local_files_only=True
).eval()


@torch.inference_mode()
def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    config = transformers.GenerationConfig(
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[:, ids.shape[1] :].tolist()


version = f"{transformers.__version__}, torch {torch.__version__}"
measure(args, "transformers", version, generate)
