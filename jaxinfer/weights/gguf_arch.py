"""GGUF architectures as data, and GGUFSource: a GGUF file's tensors under Hugging Face names.

The table says how a writer changed a checkpoint: names, permuted query and key rows, norms stored
plus one. Everything is undone on reading. An architecture or a tensor that the table does not know
is refused by name. Called by source.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from jaxinfer.errors import WeightsError
from jaxinfer.weights.gguf_file import GGUFFile, StoredTensor
from jaxinfer.weights.tensors import Index, row_range

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Tensors that hold numbers of the config (rope factors); gguf_config.py reads them.
CONFIG_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
_PLAIN = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}


@dataclass(frozen=True, slots=True)
class Arch:
    """One GGUF architecture.

    Attributes:
        model_type, hf_class: what config.json of the original checkpoint says.
        layer: GGUF name inside a block -> name inside a Hugging Face layer, without the suffix.
        permuted: query and key rows are stored with the two rope halves interleaved.
        norm_plus_one: norms are stored as 1 + w where Hugging Face stores w.
        activation: (config entry, value) of the activation.
        extra: config entries that the format leaves to the architecture.
    """

    model_type: str
    hf_class: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_plus_one: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    extra: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


_GELU = "gelu_pytorch_tanh"
_PHI3 = {k: v for k, v in _PLAIN.items() if k not in ("attn_q", "attn_k", "attn_v", "ffn_gate")} | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_OLMO2 = {k: v for k, v in _PLAIN.items() if k not in ("attn_norm", "ffn_norm")}

ARCHS: dict[str, Arch] = {
    "llama": Arch("llama", "LlamaForCausalLM", _PLAIN, permuted=True),
    "qwen2": Arch("qwen2", "Qwen2ForCausalLM", _PLAIN),
    "qwen3": Arch("qwen3", "Qwen3ForCausalLM", _PLAIN | _QK_NORM),
    "gemma": Arch(
        "gemma", "GemmaForCausalLM", _PLAIN, norm_plus_one=True, activation=("hidden_act", _GELU)
    ),
    "gemma2": Arch(
        "gemma2",
        "Gemma2ForCausalLM",
        _PLAIN | _SANDWICH,
        norm_plus_one=True,
        activation=("hidden_activation", _GELU),
    ),
    "gemma3": Arch(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _PLAIN | _SANDWICH | _QK_NORM,
        norm_plus_one=True,
        activation=("hidden_activation", _GELU),
    ),
    "phi3": Arch("phi3", "Phi3ForCausalLM", _PHI3),
    "olmo2": Arch("olmo2", "Olmo2ForCausalLM", _OLMO2 | _POST_NORMS | _QK_NORM),
    "smollm3": Arch(
        "smollm3",
        "SmolLM3ForCausalLM",
        _PLAIN,
        permuted=True,
        extra={"no_rope_layer_interval": 4},
    ),
    "granite": Arch("granite", "GraniteForCausalLM", _PLAIN, permuted=True),
}


def find_arch(file: GGUFFile) -> tuple[str, Arch]:
    """(GGUF name, table entry) of the file's architecture; WeightsError if it is unknown."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHS:
        raise WeightsError(
            f"GGUF file {file.path} has the architecture {name!r}; known are {', '.join(ARCHS)}"
        )
    return name, ARCHS[name]


class GGUFSource:
    """Tensors of a GGUF file under the names, and with the values, of the original checkpoint.

    heads, kv_heads: counts that the permutation of query and key rows goes by.
    """

    def __init__(self, file: GGUFFile, arch: Arch, heads: int, kv_heads: int) -> None:
        self._file = file
        self._arch = arch
        self._heads = {"q_proj": heads, "k_proj": kv_heads}
        self._tensors: dict[str, StoredTensor] = {}
        unknown: list[str] = []
        for stored in file.tensors.values():
            if stored.name in CONFIG_TENSORS:
                continue
            name = hf_name(stored.name, arch)
            if name is None:
                unknown.append(stored.name)
            else:
                self._tensors[name] = stored
        if unknown:
            raise WeightsError(
                f"GGUF file {file.path} has tensors that a {arch.model_type} model does not: "
                f"{', '.join(unknown)}"
            )

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._stored(name).dtype

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        stored = self._stored(name)
        start, stop, rest = row_range(index, stored.shape)
        part = name.split(".")[-2]
        if self._arch.permuted and part in self._heads:
            out = self._unpermuted(stored, self._heads[part], start, stop)
        else:
            out = self._file.rows(stored, start, stop)
        if self._arch.norm_plus_one and name.endswith("norm.weight"):
            out = out - np.asarray(1, out.dtype)
        return out[(slice(None), *rest)]

    def _unpermuted(self, stored: StoredTensor, heads: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) in the original order: reads the whole heads they lie in.

        Row h*D + half*D/2 + i of the checkpoint is stored as row h*D + 2*i + half.
        """
        size = stored.shape[0] // heads
        first = start // size * size
        rows = np.arange(start, stop)
        half, pair = np.divmod(rows % size, size // 2)
        stored_rows = rows // size * size + 2 * pair + half
        return self._file.rows(stored, first, -(-stop // size) * size)[stored_rows - first]

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise WeightsError(f"GGUF file {self._file.path} has no tensor for {name!r}")
        return self._tensors[name]


def hf_name(name: str, arch: Arch) -> str | None:
    """Hugging Face name of a GGUF tensor, or None if the architecture has no such tensor."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match:
        return None
    layer, inner, suffix = match.groups()
    if layer is None:
        return f"{_GLOBAL[inner]}.{suffix}" if inner in _GLOBAL else None
    return f"model.layers.{layer}.{arch.layer[inner]}.{suffix}" if inner in arch.layer else None
