"""Tiny models of the families with experts, latent attention and recurrent layers.

CASES has the fields that transformers' config class takes; the config.json that it writes and the
tensor names of the published checkpoint are in families.npz. Shared by record_families.py (PyTorch
interpreter) and the tests (JAX interpreter): both draw the same weights by tensor name from the raw
stream of a bit generator, which numpy keeps stable. OLD_STYLE has the same models in the words of
the published checkpoints: flat rope fields, torch_dtype, each publisher's own names. Needs numpy.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, SHORT, LONG, STRIDE, GREEDY = 64, 41, 150, 7, 12

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
_GQA = _COMMON | _HEADS | {"intermediate_size": 96, "rope_parameters": _ROPE}
_WIDE = _GQA | {"head_dim": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MLA = _COMMON | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "rope_parameters": _ROPE,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_V3_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_GDN = {
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_MROPE = _ROPE | {
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_ZERO_CENTRED = ("qwen3_next", "qwen3_5", "wide_gdn", "wide_gated_attention")
_SPARSE = ["dense", "sparse", "sparse", "sparse"]
_LINEAR, _FULL = "linear_attention", "full_attention"

# (case, config.json) that must be read as the very model of the case.
OLD_STYLE: list[tuple[str, dict[str, Any]]] = [
    (entry["case"], entry["config"])
    for entry in json.loads(Path(__file__).with_name("old_configs.json").read_text())
]
# case: (class of the model, model_type, fields of the config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {}


def _add(case: str, name: str, *parts: dict[str, Any], kind: str = "", **fields: Any) -> None:
    merged: dict[str, Any] = {}
    for part in (*parts, fields):
        merged |= part
    CASES[case] = (f"{name}ForCausalLM", kind or case, merged)


# Experts over grouped-query attention.
_TWO = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
_add("mixtral", "Mixtral", _WIDE, _TWO, num_local_experts=4, sliding_window=None)
_add(
    "qwen3_moe",
    "Qwen3Moe",
    _WIDE,
    _EXPERTS,
    num_experts=8,
    norm_topk_prob=True,
    num_hidden_layers=3,
    mlp_only_layers=[0],
)
_add(
    "qwen2_moe",
    "Qwen2Moe",
    _GQA,
    _EXPERTS,
    num_experts=8,
    norm_topk_prob=False,
    shared_expert_intermediate_size=48,
    num_hidden_layers=3,
    decoder_sparse_step=2,
)
_add(
    "gpt_oss",
    "GptOss",
    _WIDE,
    num_hidden_layers=4,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=8,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
)
_add(
    "glm4_moe",
    "Glm4Moe",
    _WIDE,
    _V3_MOE,
    num_hidden_layers=3,
    use_qk_norm=True,
    attention_bias=True,
    num_nextn_predict_layers=1,
    rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
)
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_add("olmoe", "Olmoe", _GQA, _TWO, num_experts=8, norm_topk_prob=False)
_add(
    "dots1",
    "Dots1",
    _WIDE,
    _V3_MOE,
    _ONE_GROUP,
    num_hidden_layers=3,
    sliding_window=8,
    max_window_layers=2,
)
_add(
    "minimax_m2",
    "MiniMaxM2",
    _WIDE,
    num_local_experts=8,
    num_experts_per_tok=3,
    num_hidden_layers=2,
    rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
)
_add("granitemoe", "GraniteMoe", _GQA, _MULTIPLIERS, _TWO, num_local_experts=4)

# Latent attention, with and without an indexer.
_V2 = _MLA | _EXPERTS
_V2 |= {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
_V2 |= {"routed_scaling_factor": 1.5}
_V2 |= {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
_add("deepseek_v2", "DeepseekV2", _V2, _GROUPS, q_lora_rank=None)
_add("deepseek_v2_greedy", "DeepseekV2", _V2, _ONE_GROUP, kind="deepseek_v2", topk_method="greedy")
_V3 = _MLA | _V3_MOE | {"rope_parameters": _YARN}
_add("deepseek_v3", "DeepseekV3", _V3, num_nextn_predict_layers=1)
_add(
    "deepseek_v3_norope_interleave",
    "DeepseekV3",
    _V3,
    _ONE_GROUP,
    kind="deepseek_v3",
    rope_interleave=False,
    rope_parameters=_ROPE,
)
_add("glm4_moe_lite", "Glm4MoeLite", _MLA, _V3_MOE, _ONE_GROUP)
_add("deepseek_v32", "DeepseekV32", _V3, _INDEX)
_add(
    "glm_moe_dsa",
    "GlmMoeDsa",
    _MLA,
    _V3_MOE,
    _ONE_GROUP,
    _INDEX,
    num_hidden_layers=4,
    indexer_types=["full", "full", "shared", "full"],
)
_GROWN = _YARN | {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3}
_add("mistral4", "Mistral4", _MLA, _V3_MOE, num_hidden_layers=2, rope_parameters=_GROWN)

# Delta rules.
_add(
    "qwen3_next",
    "Qwen3Next",
    _WIDE,
    _EXPERTS,
    _GDN,
    num_experts=8,
    norm_topk_prob=True,
    shared_expert_intermediate_size=32,
    rope_parameters=_ROPE | {"partial_rotary_factor": 0.25},
)
_add("qwen3_5", "Qwen3_5", _WIDE, _GDN, kind="qwen3_5_text", rope_parameters=_MROPE)
_add(
    "qwen3_5_moe",
    "Qwen3_5Moe",
    {k: v for k, v in _WIDE.items() if k != "intermediate_size"},
    _EXPERTS,
    _GDN,
    kind="qwen3_5_moe_text",
    num_experts=8,
    shared_expert_intermediate_size=32,
    rope_parameters=_MROPE,
)
_add(
    "kimi_linear",
    "KimiLinear",
    {k: v for k, v in _MLA.items() if k != "rope_parameters"},
    _EXPERTS,
    q_lora_rank=None,
    num_hidden_layers=4,
    num_local_experts=8,
    n_shared_experts=1,
    linear_head_dim=16,
    linear_num_heads=4,
    layer_types=[_LINEAR, _LINEAR, _LINEAR, _FULL],
    mlp_layer_types=_SPARSE,
)

# State spaces, lightning attention and short convolutions.
_add(
    "mamba2",
    "Mamba2",
    _COMMON,
    num_hidden_layers=2,
    num_heads=8,
    head_dim=16,
    state_size=16,
    n_groups=2,
    chunk_size=16,
)
_add(
    "bamba",
    "Bamba",
    _GQA,
    _MAMBA,
    num_hidden_layers=4,
    attn_layer_indices=[1, 3],
    rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
)
_FALCON = {
    "mamba_d_ssm": 128,
    "num_hidden_layers": 2,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.7,
    "mlp_multipliers": [0.9, 1.2],
    "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.8,
}
for _case, _norm, _first in (
    ("falcon_h1", True, True),
    ("falcon_h1_gate_first", True, False),
    ("falcon_h1_plain", False, False),
):
    _flags = {"mamba_rms_norm": _norm, "mamba_norm_before_gate": _first}
    _add(_case, "FalconH1", _GQA, _MAMBA, _FALCON, _flags, kind="falcon_h1")
_add(
    "nemotron_h",
    "NemotronH",
    {k: v for k, v in _WIDE.items() if k != "rope_parameters"},
    layers_block_type=[_LINEAR, "moe", _FULL, "mlp"],
    ssm_state_size=16,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    chunk_size=16,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=48,
    n_routed_experts=8,
    num_experts_per_tok=2,
)
_GRANITE_4 = _GQA | _MAMBA | _MULTIPLIERS
_GRANITE_4 |= {"num_hidden_layers": 4, "shared_intermediate_size": 48}
_GRANITE_4 |= {"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}
_add("granitemoehybrid", "GraniteMoeHybrid", _GRANITE_4, num_local_experts=4, num_experts_per_tok=2)
_add(
    "granitemoehybrid_dense",
    "GraniteMoeHybrid",
    _GRANITE_4,
    kind="granitemoehybrid",
    num_local_experts=0,
    num_experts_per_tok=0,
    position_embedding_type="rope",
)
_add("lfm2", "Lfm2", _GQA, num_hidden_layers=4, block_multiple_of=32, full_attn_idxs=[1, 3])
_add(
    "minimax",
    "MiniMax",
    _WIDE,
    num_hidden_layers=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    block_size=8,
    full_attn_alpha_factor=1.3,
    linear_attn_alpha_factor=1.2,
    mlp_alpha_factor=1.1,
    full_attn_beta_factor=0.9,
    linear_attn_beta_factor=0.8,
    mlp_beta_factor=0.7,
)


def prompt(case: str, length: int) -> list[int]:
    """The first `length` tokens (3 .. VOCAB - 1) of the case's prompt."""
    return [3 + int(v % (VOCAB - 3)) for v in _raw(f"{case}/prompt", LONG)[:length]]


def tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One float32 checkpoint tensor, drawn so that no part of the model is near an identity."""
    bits = _raw(f"{case}/{name}", int(np.prod(shape))) >> np.uint64(11)
    uniform = (bits.astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)  # -1 .. 1
    centre, half = _range(case, name, shape)
    return (centre + half * uniform).astype(np.float32)


def _range(case: str, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Middle and half width of a tensor's values."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return 0.7, 1.4
    if leaf == "dt_bias":  # softplus is in 0.01 .. 0.5: states forget at different rates
        return -2.5, 2.1
    if leaf == "D":
        return 1.0, 0.5
    if leaf == "e_score_correction_bias":
        return 0.0, 0.2
    if leaf == "sinks":
        return 0.0, 0.9
    if leaf == "bias" or leaf.endswith("_bias"):
        return 0.0, 0.35
    if "norm" in name:
        zero = case.startswith(_ZERO_CENTRED) and "linear_attn.norm" not in name
        return (0.0 if zero else 1.0), 0.35
    if "conv1d" in name or ".conv.conv." in name:
        return 0.0, 0.85
    if "embed" in name:
        return 0.0, 1.7
    # The expert tensors of gpt-oss are [experts, in, out]; all others are [..., out, in].
    fan_in = shape[-2] if case in ("gpt_oss", "wide_sinks") and ".experts." in name else shape[-1]
    return 0.0, 1.2 * math.sqrt(3.0 / fan_in)


def _raw(name: str, count: int) -> np.ndarray:
    return np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
