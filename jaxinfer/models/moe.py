"""The feed-forward part of layers with experts: a router, the experts that each token takes, and perhaps
an MLP that all tokens share.

Taps: "router_experts" i32[T, k] and "router_weights" f32[T, k]. Never looks at requests or files.
Called by decoder.py.
"""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxinfer.configs.ffn import MoeConfig, Stored
from jaxinfer.layers.elementwise import alone
from jaxinfer.layers.experts import mix_experts
from jaxinfer.layers.linear import linear
from jaxinfer.layers.router import route
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.mlp import output_of, pairs_of
from jaxinfer.models.parts import Ffn, Pair, Pairs, Params, Tap, View, pair

_SHARED = "shared_"


def pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """router [D, E], expert_up [E, D, 2F] ([E, D, F] where nothing gates), expert_down [E, F, D], their biases,
    correction f32[E]; shared_gate_up, shared_down as of an MLP, and shared_gate [D, 1]. Where the experts have a
    latent width L instead of D, latent_in [D, L] and latent_out [L, D]."""
    moe, d = _config(layer), c.hidden_size
    router = moe.router
    e, exact = router.experts, "float32" if router.exact else None
    inner, own = moe.width * (1 + moe.activation.gated), moe.latent or d
    name, side = prefix + moe.router_name, None if moe.latent else "embed"
    out = {
        "router": pair((d, e), ("embed", None), f"{name}.weight", dtype=exact),
        "expert_up": _expert_pair((e, own, inner), ("expert", side, "gate_up"), moe.up, prefix),
        "expert_down": _expert_pair((e, moe.width, own), ("expert", "mlp", side), moe.down, prefix),
    }
    if router.bias:
        out["router_bias"] = pair((e,), (None,), f"{name}.bias", dtype=exact)
    if router.correction:
        correction = prefix + moe.correction_name
        out["correction"] = pair((e,), (None,), correction, dtype="float32")
    ends = (("up", inner, "gate_up"), ("down", own, side))
    for (leaf, width, axis), source in zip(ends, moe.bias, strict=False):
        shape, axes = (e, width), ("expert", axis)
        out[f"expert_{leaf}_bias"] = pair(shape, axes, prefix + source, transpose=False)
    if moe.latent:
        names = [f"{prefix}{name}.weight" for name in moe.latent_names]
        out["latent_in"] = pair((d, own), ("embed", None), names[0])
        out["latent_out"] = pair((own, d), (None, "embed"), names[1])
    if moe.shared is not None:
        shared = pairs_of(moe.shared, d, prefix)
        out |= {_SHARED + leaf: value for leaf, value in shared.items()}
    if moe.shared_gate:
        gate = f"{prefix}{moe.shared_gate}.weight"
        out["shared_gate"] = pair((d, 1), ("embed", None), gate)
    return out


def _expert_pair(
    shape: tuple[int, ...], axes: tuple[str | None, ...], stored: tuple[Stored, ...], prefix: str
) -> Pair:
    """A leaf of all experts, from whichever of the stored forms a file has."""
    first, *others = (_stored_pair(shape, axes, form, prefix) for form in stored)
    spec, rule = first
    return spec, replace(rule, others=tuple(other for _, other in others))


def _stored_pair(
    shape: tuple[int, ...], axes: tuple[str | None, ...], form: Stored, prefix: str
) -> Pair:
    names = [prefix + name for name in form.names]
    if "{e}" not in form.names[0]:
        return pair(shape, axes, *names, transpose=not form.turned)
    sources = [name.format(e=i) for i in range(shape[0]) for name in names]
    return pair(shape, axes, *sources, stack=shape[0])


def _config(layer: LayerConfig) -> MoeConfig:
    assert isinstance(layer.ffn, MoeConfig)
    return layer.ffn


def apply(
    h: jax.Array, weights: Params, layer: LayerConfig, _c: ModelConfig, _view: View, tap: Tap
) -> jax.Array:
    moe = _config(layer)
    bias, correction = weights.get("router_bias"), weights.get("correction")
    experts, shares = route(h, weights["router"], bias, correction, moe.router)
    experts, shares = tap("router_experts", experts), tap("router_weights", shares)
    out = mix_experts(
        linear(h, weights["latent_in"]) if moe.latent else h,
        experts,
        shares,
        _part(weights, "expert_"),
        moe.activation,
        interleaved=moe.interleaved,
    )
    out = linear(out, weights["latent_out"]) if moe.latent else out
    if moe.shared is None:
        return out
    shared = output_of(moe.shared, h, _part(weights, _SHARED))
    if moe.shared_gate:
        # Rounded, so that the product is not fused into the sum for some numbers of tokens.
        gate = alone(jax.nn.sigmoid, linear(h, weights["shared_gate"]))
        shared = jax.lax.optimization_barrier(shared * gate)
    return out + shared


def _part(weights: Params, prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


FFN = Ffn(pairs, apply)
