"""GGUF files of every architecture against the Hugging Face checkpoint that they were made from:
the same ModelConfig, and the same parameters bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.errors import WeightsError
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.weights.gguf_arch import ARCHS
from jaxinfer.weights.gguf_config import gguf_config
from jaxinfer.weights.gguf_file import GGUFFile
from jaxinfer.weights.loader import load_params
from jaxinfer.weights.source import resolve
from jaxinfer.weights.tensors import open_safetensors
from tests.weights.gguf_files import from_hf, tokenizer_metadata, write_gguf

HEADS, KV, DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 8, 32, 48, 2, 32
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
GEMMA = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": None,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 16,
}
LONG, SHORT = [1.0, 1.5, 2.0, 4.0], [1.0, 1.0, 1.25, 1.5]
FACTORS = {"long_factor": LONG, "short_factor": SHORT}
# GGUF architecture -> (class, what config.json has, what the file's metadata has beyond the common).
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}, {}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"head_dim": 16},
        {"attention.key_length": 16, "attention.value_length": 16},
    ),
    "gemma": (
        "GemmaForCausalLM",
        {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {"attention.key_length": 16, "attention.value_length": 16},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        GEMMA | {"sliding_window": 64, "attn_logit_softcapping": 50.0},
        {
            "attention.key_length": 16,
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA
        | {"sliding_window": 64, "rope_theta": 1e6, "sliding_window_pattern": 6}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "attention.key_length": 16,
            "attention.sliding_window": 64,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 64,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope"} | FACTORS,
        },
        {
            "attention.sliding_window": 64,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {}, {}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}, {}),
    "granite": (
        "GraniteForCausalLM",
        {"attention_multiplier": 0.25, "embedding_multiplier": 12.0}
        | {"residual_multiplier": 0.5, "logits_scaling": 8.0},
        {
            "attention.scale": 0.25,
            "embedding_scale": 12.0,
            "residual_scale": 0.5,
            "logit_scale": 8.0,
        },
    ),
}


def hf_config(arch: str) -> dict[str, Any]:
    name, changes, _ = CASES[arch]
    config = BASE | {"architectures": [name], "model_type": ARCHS[arch].model_type} | changes
    return {key: value for key, value in config.items() if value is not None}


def hf_tensors(arch: str, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names of the architecture's own checkpoints."""
    dim = config.get("head_dim", DIM)
    q, kv = HEADS * dim, KV * dim
    layer = {"self_attn.o_proj": (HIDDEN, q), "mlp.down_proj": (HIDDEN, FFN)}
    if arch == "phi3":
        layer |= {
            "self_attn.qkv_proj": (q + 2 * kv, HIDDEN),
            "mlp.gate_up_proj": (2 * FFN, HIDDEN),
        }
    else:
        layer |= {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN)}
        layer |= {"self_attn.v_proj": (kv, HIDDEN)}
        layer |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN)}
    layer["post_attention_layernorm"] = (HIDDEN,)
    if arch != "olmo2":
        layer["input_layernorm"] = (HIDDEN,)
    if arch in ("gemma2", "gemma3"):
        layer["pre_feedforward_layernorm"] = (HIDDEN,)
    if arch in ("gemma2", "gemma3", "olmo2"):
        layer["post_feedforward_layernorm"] = (HIDDEN,)
    if arch in ("qwen3", "gemma3", "olmo2"):
        full = arch == "olmo2"
        layer |= {
            "self_attn.q_norm": (q if full else dim,),
            "self_attn.k_norm": (kv if full else dim,),
        }
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if arch == "qwen2":
            for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"model.layers.{i}.self_attn.{name}.bias"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    rng = np.random.default_rng(len(arch))
    # Sixteenths: adding and taking away the 1 of a norm is then exact.
    return {
        name: (rng.integers(-32, 32, shape) / 16).astype(np.float32)
        for name, shape in shapes.items()
    }


def common_metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    meta = {
        "block_count": config["num_hidden_layers"],
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": config.get("head_dim", DIM),
        "vocab_size": VOCAB,
    } | CASES[arch][2]
    return {f"{arch}.{key}": value for key, value in meta.items()}


def tiny_gguf(
    path: Path,
    arch: str,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file of one of CASES; `more` and `tensors` add or replace metadata and tensors."""
    config = hf_config(arch)
    stored = from_hf(arch, hf_tensors(arch, config), HEADS, KV)
    if arch == "phi3":
        stored["rope_factors_long.weight"] = np.array(LONG, np.float32)
        stored["rope_factors_short.weight"] = np.array(SHORT, np.float32)
    meta = common_metadata(arch, config) | tokenizer_metadata(size=VOCAB) | dict(more or {})
    return write_gguf(path, arch, meta, stored | dict(tensors or {}))


@pytest.mark.parametrize("arch", ARCHS)
def test_same_config_and_parameters(arch: str, tmp_path: Path) -> None:
    raw = hf_config(arch)
    save_file(hf_tensors(arch, raw), tmp_path / "model.safetensors")
    want = ModelConfig.from_hf(raw)
    checkpoint = resolve(str(tiny_gguf(tmp_path / "m.gguf", arch)))
    got = ModelConfig.from_hf(checkpoint.config)
    if arch == "phi3":  # the file holds the attention factor as a float32
        assert [r.attention_factor for r in got.ropes] == pytest.approx(
            [r.attention_factor for r in want.ropes], rel=1e-6
        )
        checkpoint.config["rope_scaling"].pop("attention_factor")
        got = ModelConfig.from_hf(checkpoint.config)
    assert got == want
    family = get_family(want)
    specs, rules = family.param_specs(want), family.weight_rules(want)
    ignored = family.ignored_tensors(want)
    from_gguf = checkpoint.load(specs, rules, "float32", ignored=ignored)
    from_hf_dir = load_params(specs, rules, open_safetensors(tmp_path), "float32", ignored=ignored)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(from_gguf), jax.tree.leaves(from_hf_dir), strict=True
    ):
        assert np.array_equal(a, b), jax.tree_util.keystr(path)


def test_unpermuted_rows_can_be_sliced(tmp_path: Path) -> None:
    want = hf_tensors("llama", hf_config("llama"))["model.layers.1.self_attn.q_proj.weight"]
    source = resolve(str(tiny_gguf(tmp_path / "m.gguf", "llama"))).tensors
    for start, stop in [(0, 32), (3, 5), (7, 9), (5, 30), (8, 16), (4, 4)]:
        got = source.read(
            "model.layers.1.self_attn.q_proj.weight", (slice(start, stop), slice(2, 9))
        )
        assert np.array_equal(got, want[start:stop, 2:9])


def test_biases_of_permuted_models(tmp_path: Path) -> None:
    bias = np.arange(HEADS * DIM, dtype=np.float32)
    stored = from_hf("llama", {"model.layers.0.self_attn.q_proj.bias": bias}, HEADS, KV)
    checkpoint = resolve(str(tiny_gguf(tmp_path / "m.gguf", "llama", tensors=stored)))
    assert checkpoint.config["attention_bias"] is True
    assert np.array_equal(checkpoint.tensors.read("model.layers.0.self_attn.q_proj.bias"), bias)


def llama3_factors(dim: int, theta: float, factor: float, low: float, high: float, old: int) -> Any:
    """What the published converter writes to rope_freqs.weight."""
    out = []
    for i in range(0, dim, 2):
        wavelen = 2 * math.pi * theta ** (i / dim)
        if wavelen < old / high:
            out.append(1.0)
        elif wavelen > old / low:
            out.append(factor)
        else:
            smooth = (old / wavelen - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("dim", "numbers"),
    [(128, (8.0, 1.0, 4.0, 8192)), (64, (32.0, 1.0, 4.0, 8192)), (64, (4.0, 1.0, 8.0, 4096))],
)
def test_llama3_scaling_is_found_again(
    dim: int, numbers: tuple[float, float, float, int], tmp_path: Path
) -> None:
    more = {"llama.attention.key_length": dim, "llama.rope.freq_base": 500000.0}
    more |= {"llama.attention.value_length": dim, "llama.rope.dimension_count": dim}
    freqs = {"rope_freqs.weight": llama3_factors(dim, 500000.0, *numbers)}
    path = tiny_gguf(tmp_path / "m.gguf", "llama", more, freqs)
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    assert gguf_config(GGUFFile(path))["rope_scaling"] == {"rope_type": "llama3"} | dict(
        zip(keys, numbers, strict=True)
    )


def test_rope_freqs_that_follow_no_rule_are_refused(tmp_path: Path) -> None:
    freqs = {"rope_freqs.weight": np.array([1, 7, 2, 9], np.float32)}
    path = tiny_gguf(tmp_path / "m.gguf", "llama", tensors=freqs)
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight"):
        resolve(str(path))


def test_yarn(tmp_path: Path) -> None:
    more = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    more |= {"qwen2.rope.scaling.original_context_length": 64}
    config = gguf_config(GGUFFile(tiny_gguf(tmp_path / "m.gguf", "qwen2", more)))
    want = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config["rope_scaling"] == want


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}, "'su'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"attn_factor=2\.0"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attention.causal": False}, "attention.causal"),
        ({"llama.strange": 1}, r"llama\.strange"),
        ({"llama.attention.value_length": 4}, "value_length=4"),
        ({"llama.attention.head_count": [4, 2]}, r"head_count=\[4, 2\]"),
        ({"llama.attention.head_count": 0}, "head_count=0"),
        ({"llama.rope.freq_base": "x"}, "freq_base='x'"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_metadata_that_changes_the_maths_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        resolve(str(tiny_gguf(tmp_path / "m.gguf", "llama", more)))


def test_unknown_architecture_and_tensors_are_named(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "x.gguf", "mamba", {}, {})
    with pytest.raises(WeightsError, match="architecture 'mamba'"):
        resolve(str(other))
    odd = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    checkpoint = resolve(str(tiny_gguf(tmp_path / "m.gguf", "llama", tensors=odd)))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_sinks\.weight"):
        _ = checkpoint.tensors
    olmo3 = {"olmo2.attention.sliding_window": 64}
    with pytest.raises(WeightsError, match="OLMo-3"):
        resolve(str(tiny_gguf(tmp_path / "o.gguf", "olmo2", olmo3)))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", "llama", {"llama.block_count": 1}, {})
    with pytest.raises(
        WeightsError, match=r"lacks.*llama\.context_length, llama\.embedding_length"
    ):
        resolve(str(path))


@pytest.mark.parametrize(
    "more",
    [
        {"llama.rope.dimension_count": "many"},
        {"llama.expert_count": "none"},
        {"tokenizer.ggml.bos_token_id": "<s>"},
    ],
    ids=str,
)
def test_metadata_of_another_type_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"m\.gguf|expert_count"):
        resolve(str(tiny_gguf(tmp_path / "m.gguf", "llama", more)))
