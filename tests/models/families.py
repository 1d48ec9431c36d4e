"""The recorded families (CASES, and WIDE: single layers) as checkpoints, for tests of models and engine.

Draws the weights by published tensor name, as the recording did; nothing here imports the engine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.reference.families import CASES, LONG, OLD_STYLE, SHORT, prompt, tensor
from tests.reference.wide import WIDE

__all__ = ["CASES", "COMPOSITES", "OLD_STYLE", "WIDE", "Recording", "composite", "load_case"]
__all__ += ["load_config", "write_case"]

RECORDINGS = Path(__file__).parent.parent / "reference" / "families.npz"
# Cases that are published as the text part of a model with eyes: class, model_type, model_type of
# the text part, text prefix, where lm_head is, one tensor of the rest.
COMPOSITES = {
    "deepseek_v3": (
        "KimiK25ForConditionalGeneration",
        "kimi_k25",
        "kimi_k2",
        "language_model.model.",
        "language_model.lm_head.",
        "vision_tower.patch_embed.proj.weight",
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        "qwen3_5_text",
        "model.language_model.",
        "lm_head.",
        "model.visual.blocks.0.attn.qkv.weight",
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "model.language_model.",
        "lm_head.",
        "model.visual.blocks.0.attn.qkv.weight",
    ),
}


@dataclass(frozen=True)
class Recording:
    """What PyTorch computed in float32 without a cache.

    Attributes:
        prompt: SHORT tokens. logits: f32[SHORT, vocab], their logits at every position.
        long_prompt: `prompt` and more, LONG tokens. long_logits: f32[n, vocab], logits at its
            `positions` i32[n].
        greedy: the tokens that follow `prompt`; margins: best less second-best logit of each.
    """

    prompt: list[int]
    logits: np.ndarray
    long_prompt: list[int]
    long_logits: np.ndarray
    positions: np.ndarray
    greedy: list[int]
    margins: np.ndarray


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(RECORDINGS) as file:
        return dict(file)


def load_config(case: str) -> dict[str, Any]:
    """The case's config.json as save_pretrained writes it."""
    return json.loads(_arrays()[f"{case}/config"].tobytes())


def load_case(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray], Recording]:
    """config.json, tensors by published name (those that a model ignores among them), recording."""
    arrays = {
        key.partition("/")[2]: value
        for key, value in _arrays().items()
        if key.startswith(f"{case}/")
    }
    shapes = json.loads(arrays["shapes"].tobytes())
    tensors = {name: tensor(case, name, tuple(shape)) for name, shape in shapes.items()}
    recording = Recording(
        prompt(case, SHORT),
        arrays["short"],
        prompt(case, LONG),
        arrays["long"],
        arrays["positions"],
        arrays["greedy"].tolist(),
        arrays["margins"],
    )
    return load_config(case), tensors, recording


def composite(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of a case of COMPOSITES as published; its recording holds for it.

    The config is nested, names have a prefix, a vision tensor is there, and Qwen's experts are fused:
    gate_up_proj [experts, 2 x width, hidden] (gate first) and down_proj [experts, hidden, width].
    """
    architecture, kind, text_kind, prefix, head, vision = COMPOSITES[case]
    text, tensors, _ = load_case(case)
    text = text | {"model_type": text_kind}
    config = {"architectures": [architecture], "model_type": kind, "text_config": text}
    config |= {"vision_config": {"depth": 1}, "tie_word_embeddings": text["tie_word_embeddings"]}
    renamed = {vision: np.ones((4, 4), np.float32)}
    for name, value in (_fused(tensors) if "qwen" in case else tensors).items():
        name = re.sub(r"^model\.", prefix, name)
        renamed[re.sub(r"^lm_head\.", head, name)] = value
    return config, renamed


def _fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as one tensor of all gates and ups and one of all downs."""
    out, experts = {}, {}
    for name, value in tensors.items():
        parts = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name)
        if parts:
            experts.setdefault((parts[1], parts[3]), {})[int(parts[2])] = value
        else:
            out[name] = value
    stacks = {key: np.stack([v[i] for i in range(len(v))]) for key, v in experts.items()}
    for at in {at for at, _ in stacks}:
        out[f"{at}.gate_up_proj"] = np.concatenate([stacks[at, "gate"], stacks[at, "up"]], 1)
        out[f"{at}.down_proj"] = stacks[at, "down"]
    return out


def write_case(
    folder: Path, case: str, tensors: dict[str, np.ndarray] | None = None, **config: Any
) -> Path:
    """Write the case's Hugging Face directory (without a tokenizer) and return it.

    `tensors` replaces the case's, `config` single entries of its config.json.
    """
    raw, drawn, _ = load_case(case)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | config, indent=1))
    save_file(tensors or drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
