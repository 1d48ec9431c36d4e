"""Makes the mid-size random models that bench/families.py measures, with transformers' own classes.

    python bench/peers/random_models.py FOLDER

Runs under the peers' interpreter. Every weight is drawn with a fixed seed, so that two runs make the same files;
norms, decays and biases get values of a useful size instead of zeros and ones.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

_COMMON: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS: dict[str, dict[str, Any]] = {
    # Three layers of Gated DeltaNet, then one of gated attention, twice; experts in every layer.
    "gdn": _COMMON
    | {
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 32,
        "shared_expert_intermediate_size": 256,
        "rope_parameters": _COMMON["rope_parameters"] | {"partial_rotary_factor": 0.25},
    },
    # Multi-head latent attention at DeepSeek's head sizes, experts behind a sigmoid router.
    "mla": _COMMON
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
}


def draw(model: Any, seed: int) -> None:
    """Overwrite all weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias", "bias")) or weight.ndim == 1:
                weight.add_(0.1 * noise)
            else:
                fan_in = 1.0 if "embed" in name else weight.shape[-1]
                weight.copy_(noise * (1.2 / math.sqrt(fan_in)))


def main() -> None:
    folder = Path(sys.argv[1])
    for name, fields in MODELS.items():
        config = transformers.AutoConfig.for_model(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        draw(model, seed=7)
        model.save_pretrained(folder / name)
        count = sum(p.numel() for p in model.parameters())
        print(f"{folder / name}: {count / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
