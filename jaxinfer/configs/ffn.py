"""Feed-forward parts that are not the dense MLP of ModelConfig: MLPs of their own width, and experts.

Sizes, maths and the names of the tensors; all frozen and hashable. Built by the readers of this
package, computed by models/mlp.py and models/moe.py. Imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.model_config import FfnConfig


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between the projections.

    Attributes:
        name: one of model_config.ACTIVATIONS.
        gated: act(gate) * up of the two halves of the first projection; False: act(up) of all of it.
        limit: clamps gate to (-inf, limit] and up to [-limit, limit]; 0: does not.
        alpha: not 0: (up + 1) * gate * sigmoid(alpha * gate) instead of act(gate) * up.
        gate_scale: multiplies the gate before all that.
    """

    name: str
    gated: bool = True
    limit: float = 0.0
    alpha: float = 0.0
    gate_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MlpConfig(FfnConfig):
    """A dense MLP.

    Attributes:
        width: of the hidden activations. bias: both projections have one.
        up: names of what is joined to the first projection (gate first); down: name of the second. Both
            after the layer's prefix and without `.weight`.
        scale: multiplies the output.
    """

    width: int
    activation: Activation
    up: tuple[str, ...]
    down: str
    bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a token chooses its experts and what they weigh.

    Attributes:
        experts: how many there are. chosen: how many a token takes.
        score: "softmax" over all experts, "sigmoid", or "chosen": the logits themselves choose, and
            their softmax over the chosen weighs.
        exact: logits from float32 inputs and weights; else in the activations' dtype.
        bias: the logits have a bias. correction: a bias is added to the scores for the choice only.
        groups: experts form so many groups, of which a token takes `kept_groups`; by the sum of the two
            best scores of each (`group_pairs`; other groups are out) or by its best one (others score 0).
        renormalize: weights are divided by their sum + epsilon. scale: multiplies them last.
    """

    experts: int
    chosen: int
    score: str
    exact: bool = False
    bias: bool = False
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_pairs: bool = True
    renormalize: bool = False
    epsilon: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint keeps a projection of all experts.

    Attributes:
        names: full names after the layer's prefix. With `{e}` one tensor an expert, [out, in], several of
            them joined along `out` (gate first); without, one tensor of all experts.
        turned: the one tensor is [experts, in, out], else [experts, out, in].
    """

    names: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig(FfnConfig):
    """Experts behind a router, and perhaps an MLP that every token shares.

    Attributes:
        width: of the hidden activations of one expert.
        bias: names of the biases of all experts' two projections, [experts, out], after the layer's prefix.
        interleaved: gate and up alternate in the first projection; else gate comes first.
        router_name: tensor of the router after the layer's prefix, without `.weight` and `.bias`.
        correction_name: the router's correction bias, full name after the layer's prefix.
        up, down: how the two projections are stored; several: any of them, a file has one of the forms.
        latent: width of the experts' inputs and outputs where projections stand around them, else 0; the
            names of the two follow, after the layer's prefix and without `.weight`.
        shared: the shared MLP. shared_gate: name (without `.weight`) of what gates it by a sigmoid, or "".
    """

    router: RouterConfig
    width: int
    activation: Activation
    up: tuple[Stored, ...]
    down: tuple[Stored, ...]
    bias: tuple[str, ...] = ()
    interleaved: bool = False
    router_name: str = "mlp.gate"
    correction_name: str = "mlp.gate.e_score_correction_bias"
    latent: int = 0
    latent_names: tuple[str, str] = ("", "")
    shared: MlpConfig | None = None
    shared_gate: str = ""


def each_expert(block: str, *names: str) -> tuple[Stored, Stored]:
    """(up, down) of experts that are a tensor each: `names` are those of gate, up and down, or of up and
    down, as in `{block}experts.7.{name}.weight`."""
    full = [f"{block}experts.{{e}}.{name}.weight" for name in names]
    return Stored(tuple(full[:-1])), Stored((full[-1],))


def shared_mlp(block: str, width: int, activation: Activation) -> MlpConfig:
    """The shared MLP `{block}{gate,up,down}_proj`, without a gate where the activation has none."""
    up = ("gate_proj", "up_proj") if activation.gated else ("up_proj",)
    return MlpConfig(width, activation, tuple(block + name for name in up), f"{block}down_proj")
