"""State spaces: what a Mamba-2 mixer is, how its fields are read, and the pure models, Mamba2.

SsmConfig and ParallelConfig hold sizes and maths. Models that mix state spaces with attention are read
in hybrids.py. Called by configs/__init__.py; computed by models/ssm.py. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.architectures import Architecture
from jaxinfer.config_reader import Reader
from jaxinfer.configs.dense import decoder
from jaxinfer.configs.fields import bounds, inert, initial_time_steps, only, renamed, without
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import LayerConfig, MixerConfig, ModelConfig, Names, NoFfn


@dataclass(frozen=True, slots=True)
class SsmConfig(MixerConfig):
    """A Mamba-2 mixer: z, x, B, C, dt from one projection; a short convolution of x, B, C; then
    S <- exp(-exp(A_log) dt) S + B (dt x)^T and y = S^T C + D x in each head.

    Attributes:
        heads, head_dim: of x; heads * head_dim is the inner width. groups, state: of B and C; head h
            uses group h // (heads // groups). kernel: taps of the convolution.
        conv_bias, in_bias, out_bias: which of them have a bias.
        limits: dt (after softplus) is clamped to them, in prefill and in decoding alike.
        norm: "gate_first" norms y * silu(z), "norm_first" multiplies the norm of y by silu(z), and "none"
            has no norm; statistics are those of one group.
        parts: factors of z, x, B, C and dt as they come out of the projection.
        prefix: of the tensors within the layer.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    limits: tuple[float, float]
    prefix: str
    norm: str = "gate_first"
    parts: tuple[float, ...] = (1.0,) * 5

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class ParallelConfig(MixerConfig):
    """A state space and plain attention that both read the layer's input; their outputs are added.

    Attributes:
        ssm_scales, attention_scales: factors of the input and of the output of each.
    """

    ssm: SsmConfig
    ssm_scales: tuple[float, float]
    attention_scales: tuple[float, float]


# What the classes call the sizes of a mixer.
MAMBA = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
    "chunk": "mamba_chunk_size",
}
MAMBA2 = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "kernel": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "chunk": "chunk_size",
}
MAMBA2_DEFAULTS = {"n_groups": 8, "conv_kernel": 4, "use_conv_bias": True}
BACKBONE = Names(
    embed="embeddings",
    final_norm="norm_f",
    attn="mixer.",
    mlp="mixer.",
    norms=(("attn_norm", "norm"), ("mlp_norm", "norm")),
)
UNLIMITED = 2**20  # tokens; max_length where neither the maths nor the file has a limit

_MAMBA2 = Architecture(
    "mamba2",
    MAMBA2_DEFAULTS
    | {"num_heads": 128, "head_dim": 64, "state_size": 128, "expand": 2}
    | {"residual_in_fp32": True, "rms_norm_eps": 1e-5, "max_position_embeddings": UNLIMITED},
    prefix="backbone.",
)
MODEL_TYPES = {"Mamba2ForCausalLM": _MAMBA2.model_type}


def read(name: str, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a class of MODEL_TYPES. Raises ConfigError naming the field and the value."""
    own = {field: raw[field] for field in MAMBA2.values() if field in raw}
    rest = renamed(without(raw, *own), rms_norm_eps="layer_norm_epsilon")
    # There is neither plain attention nor an MLP; no layer asks for their sizes.
    rest |= {"num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1}
    config, reader = decoder(name, _MAMBA2, rest)
    inner = reader.integer("expand") * config.hidden_size
    mixer = ssm(Reader(own, _MAMBA2.defaults), MAMBA2, "mixer.", bounds(reader, "time_step_limit"))
    if mixer.inner != inner:
        raise ConfigError(
            f"config.json: num_heads={mixer.heads} of head_dim={mixer.head_dim} must make up "
            f"expand * hidden_size = {inner}"
        )
    only(reader, "rms_norm", True)
    initial_time_steps(reader)
    inert(reader, "norm_before_gate")  # true in old files; the gate goes first all the same
    config = replace(
        config,
        layers=(LayerConfig(0, None, mixer, NoFfn()),) * config.num_layers,
        names=BACKBONE,
        wide_residual=reader.flag("residual_in_fp32"),
    )
    reader.check_unread()
    return config


def ssm(
    reader: Reader,
    fields: Mapping[str, str],
    prefix: str,
    limits: tuple[float, float],
    head_dim: int | None = None,
) -> SsmConfig:
    """The mixer whose sizes have the names `fields`; head_dim where the caller has read it."""
    heads, groups = reader.integer(fields["heads"]), reader.integer(fields["groups"])
    if heads % groups:
        raise ConfigError(
            f"config.json: {fields['groups']}={groups} must divide {fields['heads']}={heads}"
        )
    inert(reader, fields["chunk"])
    bias = reader.flag(fields["bias"])
    return SsmConfig(
        heads=heads,
        head_dim=head_dim or reader.integer(fields["head_dim"]),
        groups=groups,
        state=reader.integer(fields["state"]),
        kernel=reader.integer(fields["kernel"], low=2),
        conv_bias=reader.flag(fields["conv_bias"]),
        in_bias=bias,
        out_bias=bias,
        limits=limits,
        prefix=prefix,
    )
