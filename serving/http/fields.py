"""Sampling fields that all generating routes share, with their bounds, and SamplingParams from them.

A field that the engine cannot honour is refused by name unless its value asks for nothing; a field
that nobody knows is accepted and answered with a warning. Requests only: responses are plain dicts.
Called by the request models (schemas.py, and those of other APIs).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jaxinfer.types import MAX_BIAS, MAX_LOGPROBS, MAX_N, MAX_TOKEN_LIST, SamplingParams
from serving.http.errors import UnsupportedField
from serving.service import Service

log = logging.getLogger(__name__)

MAX_INT = 2**31 - 1
MAX_STOPS = 1024  # what is parsed; Limits.stop_strings is what is taken
# Fields of OpenAI's and vLLM's APIs that the engine cannot honour, with what asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_decoding_backend": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "media_io_kwargs": (None, {}),
    "min_thinking_tokens": (None,),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None, []),
    "response_format": (None, {"type": "text"}),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None, {}),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
MAX_NAMES = 16  # in a warning
_SAFE = re.compile(r"[^A-Za-z0-9_.\-]")

type Count = Annotated[int, Field(ge=0, le=MAX_INT)]
type Stops = Annotated[
    list[str],
    Field(max_length=MAX_STOPS),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=str | list[str],
    ),
]
type TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_LIST)]


class Fields(BaseModel):
    """Base of request models: types are exact, and fields nobody knows end up in model_extra."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    def warnings(self) -> list[str]:
        """Refuse what cannot be honoured; returns the names of unknown fields. Raises UnsupportedField."""
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name not in NEUTRAL:
                unknown.append(name)
            elif not any(type(value) is type(n) and value == n for n in NEUTRAL[name]):
                raise UnsupportedField(
                    name, f"{name}={value!r:.100} is not supported by this server; leave it out"
                )
        return unknown


class SamplingFields(Fields):
    """The fields of SamplingParams that clients may set; None: the model's recommendation."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
            Field(max_length=MAX_TOKEN_LIST),
        ]
        | None
    ) = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


_NAMES = tuple(SamplingFields.model_fields)


def sampling_params(
    fields: SamplingFields, service: Service, max_tokens: int | None, **changes: Any
) -> SamplingParams:
    """The checkpoint's recommendation, overridden by what the client set and then by `changes`.

    Args:
        max_tokens: None: as many as the model's length allows. changes: None values count, too.
    """
    values = {name: getattr(fields, name) for name in _NAMES}
    given = {name: value for name, value in values.items() if value is not None}
    base = service.engine.get_default_sampling_params()
    return replace(base, **(given | {"max_tokens": max_tokens} | changes))


def warning_headers(names: Iterable[str]) -> dict[str, str]:
    """The header, and a log line, that tell of unknown fields."""
    safe = [_SAFE.sub("?", name)[:64] for name in names]
    if not safe:
        return {}
    shown = ", ".join(safe[:MAX_NAMES]) + (", ..." if len(safe) > MAX_NAMES else "")
    _warn_once(shown)
    return {"x-jaxinfer-warning": f"unknown fields ignored: {shown}"}


@lru_cache(maxsize=1024)
def _warn_once(shown: str) -> None:
    """Clients send the same fields with each request."""
    log.warning("unknown fields in a request, ignored: %s", shown)
