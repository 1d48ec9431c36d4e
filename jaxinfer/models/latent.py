"""Multi-head latent attention, dense or over the tokens that an indexer chooses: the mixer of LatentConfig.

The cache holds one entry a token, its latent and then its turned rope key, and an index key where a layer
has an indexer. Taps: "q" [T, H, nope + rope] turned, "k" [T, 1, rank + rope] the entry, and where a layer
chooses tokens "chosen_rows" and "chosen_blocks", i32[blocks, block, topk] positions. Never looks at
requests or files. Called by decoder.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.configs.latent import IndexConfig, LatentConfig
from jaxinfer.layers.latent import absorbed, expanded, regions
from jaxinfer.layers.linear import linear
from jaxinfer.layers.norm import layer_norm, rms_norm
from jaxinfer.layers.rope import apply_rope
from jaxinfer.layers.sparse import select
from jaxinfer.model_config import LayerConfig, ModelConfig
from jaxinfer.models.attention import grown
from jaxinfer.models.parts import Cache, Mixer, Pair, Pairs, Params, Tap, View, pair
from jaxinfer.params import ParamSpec, WeightRule
from pallas_kernels import page_write

_CHOSEN = "chosen_"  # before the name of a region, in View.shared
_EPS = 1e-6  # of the norms inside, whatever the model's own is


def pairs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Pairs:
    """qkv_a [D, q_rank + rank + rope], q_norm and q_b [q_rank, H (nope + rope)], or without a latent of
    queries q [D, H (nope + rope)]; kv_norm, w_uk [H, nope, rank], w_uv [H, rank, value], o [H value, D]."""
    m, d, attn = _config(layer), c.hidden_size, prefix + c.names.attn
    wide = c.num_heads * (m.nope + m.rope)
    down = ["q_a_proj"] * bool(m.q_rank) + ["kv_a_proj_with_mqa"]
    width = m.q_rank + m.rank + m.rope
    out = {
        "qkv_a": pair((d, width), ("embed", None), *(f"{attn}{n}.weight" for n in down)),
        "kv_norm": pair((m.rank,), (None,), f"{attn}kv_a_layernorm.weight"),
        "w_uk": _part_of_kv_b(c, m, attn, values=False),
        "w_uv": _part_of_kv_b(c, m, attn, values=True),
        "o": pair((c.num_heads * m.value, d), ("heads", "embed"), f"{attn}{c.names.o}.weight"),
    }
    if m.q_rank:
        out["q_norm"] = pair((m.q_rank,), (None,), f"{attn}q_a_layernorm.weight")
        out["q_b"] = pair((m.q_rank, wide), (None, "heads"), f"{attn}q_b_proj.weight")
    else:
        out["q"] = pair((d, wide), ("embed", "heads"), f"{attn}q_proj.weight")
    return out | (_index_pairs(m, m.index, d, f"{attn}indexer.") if m.index else {})


def _part_of_kv_b(c: ModelConfig, m: LatentConfig, attn: str, *, values: bool) -> Pair:
    """kv_b_proj holds the rows of all heads, of each first those for the key and then those for the value."""
    rows = (m.nope, m.nope + m.value) if values else (0, m.nope)
    shape = (m.rank, m.value) if values else (m.nope, m.rank)
    rule = WeightRule(
        (f"{attn}kv_b_proj.weight",),
        transpose=values,
        rows=rows,
        stack=c.num_heads,
        stride=m.nope + m.value,
    )
    return ParamSpec((c.num_heads, *shape), ("heads", None, None)), rule


def _index_pairs(m: LatentConfig, index: IndexConfig, d: int, prefix: str) -> Pairs:
    """index_q [q_rank, Hi di], index_k [D, di] and its norm f32, index_w f32[D, Hi]."""
    q, norm = index.heads * index.dim, f"{prefix}k_norm."
    return {
        "index_q": pair((m.q_rank, q), (None, None), f"{prefix}wq_b.weight"),
        "index_k": pair((d, index.dim), ("embed", None), f"{prefix}wk.weight"),
        "index_norm": pair((index.dim,), (None,), norm + "weight", dtype="float32"),
        "index_norm_bias": pair((index.dim,), (None,), norm + "bias", dtype="float32"),
        "index_w": pair(
            (d, index.heads), ("embed", None), f"{prefix}weights_proj.weight", dtype="float32"
        ),
    }


def kinds(_c: ModelConfig, layer: LayerConfig, dtype: str) -> tuple[CacheSpec, ...]:
    m = _config(layer)
    widths = {"latent": m.rank + m.rope} | ({"index": m.index.dim} if m.index else {})
    return tuple(
        CacheSpec(name, Scope.TOKEN, (), (Field(name, (1, width), dtype),))
        for name, width in widths.items()
    )


def _config(layer: LayerConfig) -> LatentConfig:
    assert isinstance(layer.mixer, LatentConfig)
    return layer.mixer


def apply(
    h: jax.Array,
    weights: Params,
    cache: Cache,
    layer: LayerConfig,
    c: ModelConfig,
    view: View,
    tap: Tap,
) -> tuple[Cache, jax.Array, dict[str, jax.Array]]:
    m, kind = _config(layer), view.pages("latent")
    q, q_latent, entry = _project(h, weights, c, m, view)
    q, entry = tap("q", q), tap("k", entry)
    pool = page_write(cache["latent"], entry, kind.write_page, kind.write_offset)
    cache, shared = cache | {"latent": pool}, view.shared
    # Rows that cannot hold more than topk tokens attend to all of them.
    sparse = 0 < m.topk < kind.tables.shape[1] * pool.shape[2]
    if m.index:
        cache, found = _index(h, q_latent, weights, cache, m, view, choose=sparse)
        shared = shared | {_CHOSEN + name: tap(_CHOSEN + name, x) for name, x in found.items()}
    chosen = {k.removeprefix(_CHOSEN): v for k, v in shared.items()} if sparse else None
    parts, late = regions(view.batch, kind), []
    if c.latent_form == "expanded" and not sparse:
        parts, late = [p for p in parts if p.block == 1], [p for p in parts if p.block > 1]
    w_uk, w_uv = weights["w_uk"], weights["w_uv"]
    out = [expanded(q[p.tokens], w_uk, w_uv, pool, p, scale=c.scale) for p in late]
    if parts:
        early = q[: parts[-1].tokens.stop]
        out.insert(0, absorbed(early, w_uk, w_uv, pool, parts, chosen, scale=c.scale))
    out = jnp.concatenate(out) if len(out) > 1 else out[0]
    return cache, linear(out.reshape(len(h), -1), weights["o"]), shared


def _project(
    h: jax.Array, weights: Params, c: ModelConfig, m: LatentConfig, view: View
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q[T, H, nope + rope] turned, the latent of queries [T, q_rank], the cache's entry [T, 1, rank + rope]."""
    down = linear(h, weights["qkv_a"])
    q_latent, latent, k = jnp.split(down, [m.q_rank, m.q_rank + m.rank], axis=-1)
    if m.q_rank:
        q_latent = rms_norm(q_latent, weights["q_norm"], _EPS, c.norm)
        q = linear(q_latent, weights["q_b"])
    else:
        q = linear(h, weights["q"])
    latent, k = rms_norm(latent, weights["kv_norm"], _EPS, c.norm), k[:, None]
    q = q.reshape(len(h), c.num_heads, -1)
    if view.rope is not None:
        turned = apply_rope(q[..., m.nope :], *view.rope, interleaved=m.interleaved)
        q = jnp.concatenate([q[..., : m.nope], turned], axis=-1)
        k = apply_rope(k, *view.rope, interleaved=m.interleaved)
    return grown(q, c, view), q_latent, jnp.concatenate([latent[:, None], k], axis=-1)


def _index(
    h: jax.Array,
    q_latent: jax.Array,
    weights: Params,
    cache: Cache,
    m: LatentConfig,
    view: View,
    *,
    choose: bool,
) -> tuple[Cache, dict[str, jax.Array]]:
    """The cache with the index keys and, if asked for, the positions chosen for each region."""
    index, kind = m.index, view.pages("index")
    assert index is not None and view.rope is not None
    k = layer_norm(
        linear(h, weights["index_k"]), weights["index_norm"], weights["index_norm_bias"], _EPS
    )
    k = apply_rope(k[:, None], *view.rope, interleaved=index.interleaved)
    pool = page_write(cache["index"], k, kind.write_page, kind.write_offset)
    cache = cache | {"index": pool}
    if not choose:
        return cache, {}
    q = linear(q_latent, weights["index_q"]).reshape(len(h), index.heads, index.dim)
    q = apply_rope(q, *view.rope, interleaved=index.interleaved)
    w = linear(h.astype(jnp.float32), weights["index_w"]) * index.heads**-0.5
    return cache, select(q, w, pool, kind, view.batch, topk=m.topk)


MIXER = Mixer(pairs, kinds, apply)
