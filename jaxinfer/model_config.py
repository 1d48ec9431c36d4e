"""ModelConfig: the shape and the maths of a model, read from its checkpoint's config.json.

Frozen, hashable, knows no devices and imports no JAX. The readers of checkpoints' files are in
configs/, one family a file. Models read it; the engine reads lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.rope_config import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """Base of what mixes the tokens of a layer where that is not the plain attention of ModelConfig."""


@dataclass(frozen=True, slots=True)
class FfnConfig:
    """Base of a layer's feed-forward part where that is not the dense MLP of ModelConfig."""


@dataclass(frozen=True, slots=True)
class NoMixer(MixerConfig):
    """The layer is a feed-forward part alone."""


@dataclass(frozen=True, slots=True)
class NoFfn(FfnConfig):
    """The layer is a mixer alone."""


@dataclass(frozen=True, slots=True)
class Names:
    """Where a family's checkpoints keep what every family has; `{i}` is the layer's number.

    Attributes:
        embed, final_norm, lm_head: tensors without `.weight`, the first two after ModelConfig.prefix.
        layer, attn, mlp: prefixes of a layer, and within it of plain attention and of the dense MLP.
        o, q_norm, k_norm: the output projection and the norms of plain attention. gate, up, down: projections
            of the dense MLP.
        norms: leaf -> tensor for the norms of a layer; empty: by ModelConfig.placement.
    """

    embed: str = "embed_tokens"
    final_norm: str = "norm"
    lm_head: str = "lm_head"
    layer: str = "layers.{i}."
    attn: str = "self_attn."
    mlp: str = "mlp."
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    norms: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer.

    Attributes:
        window: visible tokens including the query itself (0: all). rope: None for NoPE.
        mixer, ffn: None for the plain attention and the dense MLP that ModelConfig describes.
        norms: (leaf, tensor, other names of it ...) of this layer's norms; empty: as Names.norms says.
        mixer_factors, ffn_factors: (a, b): the stream after the branch is a * its normed input + b * its
            output; None: the stream + its output.
    """

    window: int
    rope: RopeConfig | None
    mixer: MixerConfig | None = None
    ffn: FfnConfig | None = None
    norms: tuple[tuple[str, ...], ...] = ()
    mixer_factors: tuple[float, float] | None = None
    ffn_factors: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: what all layers share, its plain attention and dense MLP, and the layers in order.

    Attributes:
        architecture: class name of the checkpoint. dtype: dtype that the file says it was saved in.
        max_length: longest sequence in tokens, rope scaling included.
        norm, placement, qk_norm, fused, prefix, ignored: see architectures.Architecture.
        gated: plain attention multiplies its output by sigmoid of a gate that q_proj yields beside each head's query.
        sinks: plain attention has one sink logit a head.
        scale: multiplies q.k. query_growth: (beta, length); q is multiplied by
            1 + beta log(1 + floor(position / length)); beta 0 switches it off.
        attention_softcap, final_softcap: x -> cap tanh(x / cap); 0 switches it off.
        embed_scale, residual_scale, logits_scale: multiply embeddings, branch outputs and logits.
        wide_residual: the residual stream is float32 whatever the weights are.
        names: see Names.
        replay: "tolerant", or "exact": recurrent layers compute a position by the same arithmetic however
            the sequence was split (see layers/delta.py).
        latent_form: "absorbed", or "expanded": latent attention makes keys and values of every head for prefill
            blocks (see layers/latent.py).
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_length: int
    norm: str
    norm_eps: float
    placement: str
    qk_norm: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str
    tied: bool
    fused: bool
    prefix: str
    ignored: tuple[str, ...]
    scale: float
    query_growth: tuple[float, int] = (0.0, 1)
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    gated: bool = False
    sinks: bool = False
    wide_residual: bool = False
    names: Names = Names()
    replay: str = "tolerant"
    latent_form: str = "absorbed"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json (as a dictionary). Raises ConfigError naming the field and the value."""
        from jaxinfer.configs import read  # the readers build this class

        return read(raw)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def length_dependent_rope(self) -> bool:
        """True if a request's rope frequencies are fixed by the length of its prompt."""
        return any(layer.rope and layer.rope.length_dependent for layer in self.layers)

    def rope_key(self, prompt_length: int) -> int:
        """Key of the prefix cache: pages may be shared by requests whose keys are equal."""
        return max((r.length_key(prompt_length) for r in self.ropes), default=0)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct ropes of the layers, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope))
