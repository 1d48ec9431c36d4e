"""From a model reference to something that can run: config, parameters, tokenizer, chat template.

The only place where a checkpoint, a model family and the text side meet. Called by LLM, Engine, research
and the CLI.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.core import EngineCore
from jaxinfer.inputs import InputProcessor
from jaxinfer.model_config import ModelConfig
from jaxinfer.models.registry import get_family
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.weights.source import Checkpoint, missing_tokenizer, resolve

log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        params: the parameter tree on the device. dtype: its compute dtype.
        tokenizer, template: None if the checkpoint has none.
        eos_ids: every end-of-text id that the checkpoint names anywhere.
        generation_config: the checkpoint's own, as a plain dict.
    """

    name: str
    path: Path
    config: ModelConfig
    params: Any
    dtype: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    eos_ids: frozenset[int]
    generation_config: dict[str, Any]

    def core(self, config: EngineConfig) -> EngineCore:
        """An engine core that runs this model."""
        return EngineCore(config, self.config, self.params, self.dtype)

    def inputs(self, core: EngineCore) -> InputProcessor:
        """The request checker that goes with a core."""
        return InputProcessor(
            self.config,
            self.tokenizer,
            self.eos_ids,
            core.max_model_len,
            core.config.seed,
            missing_tokenizer(self.path),
        )


def load(
    model: str | Path, *, dtype: str = "auto", progress: Progress | None = None
) -> LoadedModel:
    """Load a model: a directory, a .gguf file, a Hub id or an alias.

    Args:
        dtype: "auto" is float32 on CPU (whose bfloat16 arithmetic is many times slower) and the
            checkpoint's own on GPU.

    Raises ConfigError for a model that is not there or not supported, WeightsError for broken files.
    """
    checkpoint = resolve(model, progress=progress)
    config = ModelConfig.from_hf(checkpoint.config)
    family = get_family(config)
    chosen = compute_dtype(dtype, config.dtype)
    params = checkpoint.load(
        family.param_specs(config),
        family.weight_rules(config),
        chosen,
        ignored=family.ignored_tensors(config),
        progress=progress,
    )
    tokenizer = _tokenizer(checkpoint)
    template = checkpoint.chat_template
    return LoadedModel(
        name=checkpoint.name,
        path=checkpoint.path,
        config=config,
        params=params,
        dtype=chosen,
        tokenizer=tokenizer,
        template=None if template is None else chat_template(template, tokenizer),
        eos_ids=frozenset(checkpoint.special["eos_token_ids"]),
        generation_config=checkpoint.generation_config,
    )


def compute_dtype(wanted: str, stored: str) -> str:
    """The dtype to compute in; `stored` is the checkpoint's."""
    if wanted != "auto":
        if wanted == "float16" and stored == "bfloat16":
            log.warning("float16 was asked for a bfloat16 model: large activations may overflow")
        return wanted
    return "float32" if jax.default_backend() == "cpu" else stored


def chat_template(source: str | dict[str, str], tokenizer: Tokenizer | None) -> ChatTemplate:
    """A template with the tokenizer's special tokens at hand."""
    names = tokenizer.special_tokens if tokenizer else {}
    return ChatTemplate(source, **names)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None (and a warning) if it has no file for one."""
    if checkpoint.kind != "gguf":
        if checkpoint.tokenizer_json is None:
            log.warning("text prompts are refused: %s", missing_tokenizer(checkpoint.path))
            return None
        return Tokenizer.from_dir(checkpoint.path)
    facts = checkpoint.special
    names = {k: facts[k] for k in ("pad_token", "unk_token") if facts.get(k)}
    return Tokenizer(
        checkpoint.build_tokenizer(),
        bos_token=facts["bos_token"],
        eos_token=facts["eos_token"],
        special_tokens=names,
    )
