"""One layer of each kind of attention or recurrence at a published width, with a tiny vocabulary.

Recorded by record_families.py beside the cases of families.py, in the same form. Feed-forward parts
are small and, where the layer alone would be too big for a test, so is the hidden size. Needs numpy.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}
_MLA = _COMMON | {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
_GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _heads(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return _COMMON | {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rope_parameters": _ROPE,
    }


# case: (class of the model, model_type, fields of the config), as in families.CASES
WIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # GPT-OSS 120B: 64 query and 8 key heads of 64 with sinks.
    "wide_sinks": (
        "GptOssForCausalLM",
        "gpt_oss",
        _heads(2880, 64, 8, 64)
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 128},
    ),
    # DeepSeek-V2-Lite.
    "wide_mla": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _MLA
        | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"q_lora_rank": None, "rope_parameters": _ROPE},
    ),
    # DeepSeek-V3.2: 128 heads, an indexer of 64 heads of 128; the hidden size is 7168 there.
    "wide_dsa": (
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        _MLA
        | {"hidden_size": 512, "num_attention_heads": 128, "num_key_value_heads": 128}
        | {"q_lora_rank": 1536, "rope_parameters": _ROPE}
        | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 24},
    ),
    # Qwen3-Next 80B: Gated DeltaNet, and gated attention with heads of 256.
    "wide_gdn": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        _heads(2048, 16, 2, 256)
        | _GDN
        | {"layer_types": ["linear_attention"], "mlp_only_layers": [0]},
    ),
    "wide_gated_attention": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        _heads(2048, 16, 2, 256)
        | _GDN
        | {"layer_types": ["full_attention"], "mlp_only_layers": [0]}
        | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}},
    ),
    # Kimi Linear 48B.
    "wide_kda": (
        "KimiLinearForCausalLM",
        "kimi_linear",
        {k: v for k, v in _MLA.items() if k != "first_k_dense_replace"}
        | {"hidden_size": 2304, "num_attention_heads": 32, "num_key_value_heads": 32}
        | {"q_lora_rank": None, "linear_head_dim": 128, "linear_num_heads": 32}
        | {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]},
    ),
    # Granite 4.0 H Tiny.
    "wide_mamba2": (
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {k: v for k, v in _heads(1536, 12, 4, 128).items() if k != "head_dim"}
        | {"layer_types": ["linear_attention"], "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"shared_intermediate_size": 64, "mamba_n_heads": 48, "mamba_d_head": 64}
        | {"mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2},
    ),
    # LFM2 1.2B.
    "wide_short_conv": (
        "Lfm2ForCausalLM",
        "lfm2",
        {k: v for k, v in _heads(2048, 32, 8, 64).items() if k != "head_dim"}
        | {"full_attn_idxs": [], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    # MiniMax-Text-01: 64 heads of 128; the hidden size is 6144 there.
    "wide_lightning": (
        "MiniMaxForCausalLM",
        "minimax",
        _heads(1024, 64, 8, 128)
        | {"layer_types": ["linear_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
