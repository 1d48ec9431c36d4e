"""What readers of several families share: experts in the words of Qwen and of DeepSeek, which layers have
them, and fields that a class has without a meaning for the forward pass.

Called by the readers of this package.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.config_reader import Reader
from jaxinfer.configs.ffn import (
    Activation,
    MoeConfig,
    RouterConfig,
    Stored,
    each_expert,
    shared_mlp,
)
from jaxinfer.configs.fields import inert, layer_kinds, only
from jaxinfer.errors import ConfigError
from jaxinfer.model_config import FfnConfig, ModelConfig

log = logging.getLogger(__name__)
GATED = ("gate_proj", "up_proj", "down_proj")
# Training, and how other engines run experts.
_TRAINING = (
    "router_aux_loss_coef",
    "router_jitter_noise",
    "output_router_logits",
    "aux_loss_alpha",
)
_TRAINING += ("seq_aux", "ep_size", "router_z_loss_coef", "moe_shared_expert_overlap")


def with_ffns(config: ModelConfig, ffns: Sequence[FfnConfig | None]) -> ModelConfig:
    """`config` with these feed-forward parts, layer by layer (None: its dense MLP)."""
    pairs = zip(config.layers, ffns, strict=True)
    return replace(config, layers=tuple(replace(layer, ffn=ffn) for layer, ffn in pairs))


def read_training(reader: Reader) -> None:
    """Take note of fields of classes with experts that say nothing about the forward pass."""
    inert(reader, *_TRAINING)


def read_experts(reader: Reader, *names: str, default: int | None = None) -> int:
    """How many experts there are, by the first of `names` that the file has."""
    given = [name for name in names if reader.get(name) is not None]
    return reader.integer(given[0] if given else names[0], default)


def check_router(router: RouterConfig) -> RouterConfig:
    """`router`, if its numbers fit one another. Raises ConfigError."""
    experts, chosen, groups, kept = (
        router.experts,
        router.chosen,
        router.groups,
        router.kept_groups,
    )
    if experts % groups or not kept <= groups or chosen > experts // groups * kept:
        raise ConfigError(
            f"config.json: num_experts_per_tok={chosen} of {experts} experts in n_group={groups} groups, "
            f"topk_group={kept} of them kept, cannot be chosen: groups must divide the experts, and those "
            "kept must hold enough"
        )
    if router.group_pairs and kept < groups and experts // groups < 2:
        raise ConfigError(
            f"config.json: n_group={groups} groups of {experts} experts must hold at least two experts each"
        )
    return router


def qwen_experts(
    reader: Reader, activation: str, *, renormalize: bool | None = None, width: int | None = None
) -> MoeConfig:
    """Experts of Qwen's classes: num_experts (or num_local_experts), norm_topk_prob (unless `renormalize`
    says it), moe_intermediate_size (unless `width` does), a shared expert behind a gate where there is
    shared_expert_intermediate_size. Files may hold one tensor an expert or all of them in one."""
    act = Activation(activation)
    if renormalize is None:
        renormalize = reader.flag("norm_topk_prob")
    router = RouterConfig(
        experts=read_experts(reader, "num_experts", "num_local_experts"),
        chosen=reader.integer("num_experts_per_tok"),
        score="softmax",
        renormalize=renormalize,
    )
    up, down = each_expert("mlp.", *GATED)
    moe = MoeConfig(
        router=check_router(router),
        width=width or reader.integer("moe_intermediate_size"),
        activation=act,
        up=(up, Stored(("mlp.experts.gate_up_proj",))),
        down=(down, Stored(("mlp.experts.down_proj",))),
    )
    read_training(reader)
    if reader.get("shared_expert_intermediate_size"):
        width = reader.integer("shared_expert_intermediate_size")
        shared = shared_mlp("mlp.shared_expert.", width, act)
        moe = replace(moe, shared=shared, shared_gate="mlp.shared_expert_gate")
    return moe


def qwen_sparse(reader: Reader, layers: int) -> list[bool]:
    """Which layers have experts, by decoder_sparse_step and mlp_only_layers."""
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.typed("mlp_only_layers", list) or []
    if any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ConfigError(f"config.json: mlp_only_layers={dense!r:.80} must be numbers of layers")
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def deepseek_experts(
    reader: Reader, activation: str, *, softmax: bool = False, block: str = "mlp."
) -> MoeConfig:
    """Experts in DeepSeek's words: those of V2 (`softmax`) or the sigmoid router with a correction bias of
    V3 and its many relatives; shared experts are one MLP of n_shared_experts times the width."""
    act, width = Activation(activation), reader.integer("moe_intermediate_size")
    router = _softmax_router(reader) if softmax else _sigmoid_router(reader)
    # Choices that the class does not make; dots.llm1 says noaux_tc twice.
    only(reader, "scoring_func", *(("softmax",) if softmax else ("sigmoid", "noaux_tc")))
    only(reader, "topk_method", *(("greedy", "group_limited_greedy") if softmax else ("noaux_tc",)))
    only(reader, "moe_layer_freq", 1)
    up, down = each_expert(block, *GATED)
    moe = MoeConfig(
        check_router(router),
        width,
        act,
        (up,),
        (down,),
        router_name=f"{block}gate",
        correction_name=f"{block}gate.e_score_correction_bias",
    )
    read_training(reader)
    if reader.get("n_shared_experts"):
        shared = reader.integer("n_shared_experts") * width
        moe = replace(moe, shared=shared_mlp(f"{block}shared_experts.", shared, act))
    return moe


def _sigmoid_router(reader: Reader) -> RouterConfig:
    return RouterConfig(
        experts=read_experts(reader, "n_routed_experts", "num_local_experts"),
        chosen=reader.integer("num_experts_per_tok"),
        score="sigmoid",
        exact=True,
        correction=True,
        groups=reader.integer("n_group", 1),
        kept_groups=reader.integer("topk_group", 1),
        renormalize=reader.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=reader.number("routed_scaling_factor", 1.0),
    )


def _softmax_router(reader: Reader) -> RouterConfig:
    """V2 never renormalises, whatever norm_topk_prob says."""
    method = reader.typed("topk_method", str) or "greedy"
    reader.flag("norm_topk_prob")
    groups, kept = reader.integer("n_group", 1), reader.integer("topk_group", 1)
    grouped = method == "group_limited_greedy"
    return RouterConfig(
        experts=read_experts(reader, "n_routed_experts", "num_local_experts"),
        chosen=reader.integer("num_experts_per_tok"),
        score="softmax",
        exact=True,
        groups=groups if grouped else 1,
        kept_groups=kept if grouped else 1,
        group_pairs=False,
        scale=reader.number("routed_scaling_factor", 1.0),
    )


def sparse_layers(reader: Reader, layers: int, *, first: int = 0) -> list[bool]:
    """Which layers have experts: mlp_layer_types, or all from first_k_dense_replace (default `first`) on."""
    dense = reader.integer("first_k_dense_replace", first, low=0)
    types = reader.typed("mlp_layer_types", list)
    if types is None:
        return [i >= dense for i in range(layers)]
    known = {"dense": "dense", "sparse": "sparse"}
    return [t == "sparse" for t in layer_kinds("mlp_layer_types", types, layers, known)]


def ignore_mtp(reader: Reader, config: ModelConfig) -> ModelConfig:
    """`config` that passes over the layers for multi-token prediction, which stand after its own
    (num_nextn_predict_layers says how many)."""
    count = reader.integer("num_nextn_predict_layers", 0, low=0)
    if not count:
        return config
    log.info("config.json: %d layers for multi-token prediction are not used", count)
    first = config.num_layers
    layers = "|".join(str(i) for i in range(first, first + count))
    pattern = rf"{re.escape(config.prefix)}layers\.({layers})\..*"
    return replace(config, ignored=(*config.ignored, pattern))
