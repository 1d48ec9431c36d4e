"""Reader: typed access to a checkpoint's config.json that notices what nobody has read.

Every field that a class reads goes through here; `check_unread` then refuses leftovers that would
change the maths, so that no option is accepted and ignored. Used by configs/;
rope_config.py shares its bound.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import ConfigError

log = logging.getLogger(__name__)
LARGEST = 1e15  # more than any size, length or factor of a model
_JSON_NAMES = {list: "list", dict: "JSON object", str: "string"}

# Fields that say nothing about the forward pass (training, files, generation, bookkeeping).
_INERT = frozenset(
    " ".join(
        (
            "architectures model_type transformers_version _name_or_path name_or_path auto_map",
            "torch_dtype dtype initializer_range initializer_factor use_cache bos_token_id",
            "eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id",
            "attention_dropout hidden_dropout residual_dropout resid_pdrop embd_pdrop",
            "hidden_dropout_prob dropout classifier_dropout attention_probs_dropout_prob",
            "pretraining_tp tokenizer_class id2label label2id num_labels problem_type",
            "task_specific_params return_dict output_attentions output_hidden_states torchscript",
            "chunk_size_feed_forward rope_theta sliding_window_pattern _sliding_window_pattern",
            "max_window_layers cache_implementation attn_implementation _attn_implementation",
            "_attn_implementation_autoset use_bfloat16 tf_legacy_loss finetuning_task prefix",
            "gradient_checkpointing keys_to_ignore_at_inference vocab_file no_rope_layer_interval",
            "is_decoder is_llama_config embedding_size model_max_length unsloth_version",
            "unsloth_fixed original_max_position_embeddings full_attn_mod interpolate_factor",
            "sliding_window_size",
        )
    ).split()
)
# Names that change the maths, wherever they come from.
_MATHS = re.compile(
    r"expert|moe|router|quant|compress|alibi|mamba|ssm|conv|lora|chunk|sink|bidirection|parallel|rope|"
    r"rotary|attention|attn|norm|window|softcap|multiplier|scal|activation|hidden_act|bias|clip|"
    r"encoder|mtp|nextn|head|layer|temperature_tuning|embed|tie_|residual|linear|position|query|logit|"
    r"shared|swiglu|intermediate"
)


class Reader:
    """Reads fields of `raw`, falling back on `defaults` for those that the file omits."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._raw = raw
        self._defaults = defaults
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value in the file, else the class default, else `default`."""
        self._read.add(name)
        return self._raw.get(name, self._defaults.get(name, default))

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise ConfigError(f"config.json: {name}={value!r} must be an integer in [{low}, 2**31)")
        return value

    def number(self, name: str, default: float | None) -> float:
        """A number in (0, LARGEST]; None stands for `default` (an error if that is None too)."""
        value = self.get(name, default)
        value = default if value is None else value
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is None or not number or not 0 < value <= LARGEST:
            raise ConfigError(
                f"config.json: {name}={value!r:.80} must be a number in (0, {LARGEST:g}]"
            )
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {name}={value!r} must be true or false")
        return value

    def typed(self, name: str, kind: type) -> Any:
        """The value, of the Python type that a JSON `kind` (list, dict or str) has; None if not given."""
        value = self.get(name)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"config.json: {name}={value!r:.80} must be a {_JSON_NAMES[kind]}")
        return value

    def check_unread(self) -> None:
        """Refuse unread fields that change the maths; log the other unknown ones once."""
        unknown = []
        for name, value in self._raw.items():
            if name in self._read or name in _INERT or _neutral(value):
                continue
            if _MATHS.search(name):
                raise ConfigError(
                    f"config.json: {name}={value!r:.80} is not supported for this architecture; "
                    "only an absent, null, false, zero or empty value is"
                )
            unknown.append(name)
        if unknown:
            log.warning("config.json: fields without meaning here: %s", ", ".join(sorted(unknown)))


def _neutral(value: Any) -> bool:
    return (
        value is None or value is False or value == 0 or value == [] or value == {} or value == ""
    )
