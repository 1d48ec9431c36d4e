"""The recordings of the families are whole, each config in a publisher's words has its case, and what their
configs may hold instead is read or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.model_config import ModelConfig
from tests.models.families import (
    CASES,
    COMPOSITES,
    OLD_STYLE,
    RECORDINGS,
    WIDE,
    composite,
    load_case,
    load_config,
    write_case,
)
from tests.reference.families import GREEDY, LONG, VOCAB


def test_every_case_is_recorded() -> None:
    with np.load(RECORDINGS) as file:
        assert {name.partition("/")[0] for name in file} == set(CASES) | set(WIDE)


def test_every_case_has_a_config_in_its_publishers_words() -> None:
    assert {case for case, _ in OLD_STYLE} == set(CASES)


def test_recordings_agree_with_themselves() -> None:
    """The long prompt goes on from the short one, and the greedy tokens start at its last row."""
    for case in CASES:  # the weights of WIDE are big, and its recordings were made the same way
        recording = load_case(case)[2]
        shared = recording.positions[recording.positions < len(recording.prompt)]
        expected = recording.logits[shared]
        assert np.abs(recording.long_logits[: len(shared)] - expected).max() < 1e-3, case
        assert recording.long_prompt[: len(recording.prompt)] == recording.prompt
        assert len(recording.long_prompt) == LONG and len(recording.greedy) == GREEDY
        assert recording.greedy[0] == recording.logits[-1].argmax() and min(recording.margins) > 0
        assert recording.logits.shape[1] == VOCAB and np.isfinite(recording.logits).all()


def test_a_case_is_written_as_a_checkpoint(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "model", "mixtral", vocab_size=65)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 65
    assert (folder / "model.safetensors").stat().st_size > 4 * 181_000


WILD = [10**400, 5, 1, "x", [], [5], ["x"], [[1]], {"a": 1}, None, -1, 0, 1e300, float("nan")]
WILD += [float("inf"), True, {"rope_theta": "x"}]
OTHERS = ("hybrid_override_pattern", "index_topk_pattern", "indexer_types", "mlp_layer_types")
OTHERS += ("layer_types", "rope_parameters", "quantization_config", "mlp_only_layers")
NESTED = ("rope_parameters", "rope_scaling", "linear_attn_config")
# What only some of a nested mapping's readers look at.
ROPE = ("mscale", "mscale_all_dim", "llama_4_scaling_beta", "original_max_position_embeddings")


def _changed(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """`raw` with one field, or one of a nested mapping, of another value."""
    names = dict.fromkeys([*raw, *OTHERS])
    out = [raw | {name: value} for name in names for value in WILD if name != "architectures"]
    for outer in NESTED:
        inner = raw.get(outer) or {}
        keys = dict.fromkeys([*inner, *(ROPE if inner and "rope" in outer else ())])
        out += [raw | {outer: inner | {key: value}} for key in keys for value in WILD]
    return out


@pytest.mark.parametrize("words", ["recorded", "published"])
def test_values_of_any_type_are_read_or_refused(words: str) -> None:
    """A config.json is input from outside: whatever it holds, nothing but a ConfigError comes out."""
    configs = [load_config(c) for c in CASES] if words == "recorded" else [c for _, c in OLD_STYLE]
    refused = 0
    for raw in {json.dumps(c["architectures"]): c for c in configs}.values():
        for changed in _changed(raw):
            try:
                assert "nan" not in repr(ModelConfig.from_hf(changed)), changed
            except ConfigError as error:
                assert len(str(error)) < 3000
                refused += 1
    assert refused > 2000


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("deepseek_v3", {"n_group": 3}, "n_group=3"),
        ("deepseek_v3", {"num_experts_per_tok": 8}, "num_experts_per_tok=8"),
        ("deepseek_v3", {"layer_types": 5}, "layer_types=5"),
        ("nemotron_h", {"hybrid_override_pattern": 5}, "hybrid_override_pattern=5"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": 5}, "index_topk_pattern=5"),
        ("kimi_linear", {"linear_attn_config": 5}, "linear_attn_config=5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(case: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(load_config(case) | fields)


@pytest.mark.parametrize("case", COMPOSITES)
def test_quantization_is_refused_wherever_it_stands(case: str) -> None:
    """Also where the other place says that there is none."""
    raw, given = composite(case)[0], {"quantization_config": {"quant_method": "fp8"}}
    text = raw["text_config"]
    for changed in (
        raw | given | {"text_config": text | {"quantization_config": None}},
        raw | {"quantization_config": None, "text_config": text | given},
    ):
        with pytest.raises(ConfigError, match="quantization_config.*fp8"):
            ModelConfig.from_hf(changed)
