"""Request bodies of OpenAI's completions and chat routes, and of vLLM's routes on tokens.

pydantic checks types and bounds, and is the source of the OpenAPI document. What needs the model is
checked later. Requests only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from jaxinfer.inputs import MAX_BREAKPOINTS
from jaxinfer.types import MAX_LOGPROBS
from serving.http.fields import MAX_INT, Count, Fields, SamplingFields

type Priority = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]
type Name = Annotated[str, Field(max_length=1024)]
type Filled = Annotated[str, Field(min_length=1)]
type Breakpoints = Annotated[  # numbers of tokens from the prompt's start
    list[Annotated[int, Field(ge=1, le=MAX_INT)]], Field(max_length=MAX_BREAKPOINTS)
]
type Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1)]
type Texts = Annotated[list[Filled], Field(min_length=1)]
type Batch = Annotated[list[Ids], Field(min_length=1)]
# For the document; what a message may hold depends on the template, which checks it.
_PART = {"type": "object", "required": ["type", "text"], "properties": {
    "type": {"const": "text"}, "text": {"type": "string"}}}  # fmt: skip
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"enum": ["user", "assistant", "system"], "examples": ["user"]},
    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}],
                "examples": ["Hello!"]}}}  # fmt: skip
_TURN = {**_MESSAGE, "properties": {**_MESSAGE["properties"],
         "role": {"enum": ["user", "assistant"], "examples": ["user"]}}}  # fmt: skip
type Messages = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]], Field(min_length=1)
]
type Turns = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_TURN)]], Field(min_length=1)]


def _check_prompt(value: Any) -> list[str | list[int]]:
    """Any of OpenAI's four forms, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(map(_is_ids, value)):
            return value
    raise ValueError(
        "must be a string, a list of strings, token ids, or lists of token ids, and not a mixture"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


type Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_check_prompt, json_schema_input_type=Filled | Texts | Ids | Batch),
]


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields):
    """What completions and chat have in common."""

    model: Name | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Priority | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")] | None = None
    user: Name | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens=0 leaves no prompt; give -1 or 1 and more")
        return self

    @property
    def limit(self) -> int | None:
        """Most output tokens; the newer name wins."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    breakpoints: Breakpoints | None = None

    @model_validator(mode="after")
    def _one_whole_prompt(self) -> Self:
        if self.breakpoints and len(self.prompt) > 1:
            raise ValueError(
                f"breakpoints belong to one prompt, not to {len(self.prompt)}; send a request for each"
            )
        if self.breakpoints and self.truncate_prompt_tokens is not None:
            raise ValueError("breakpoints and truncate_prompt_tokens are not supported together")
        return self


class ChatFields(Fields):
    """What makes a prompt of messages."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationFields, ChatFields):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"type": ["string", "object", "null"]})] = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _consistent_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.limit == 0:
            raise ValueError("max_tokens=0 asks for no answer; give 1 or more")
        return self


class TokenizePromptRequest(Fields):
    """POST /tokenize of a text."""

    prompt: str
    model: Name | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """POST /tokenize of messages."""

    model: Name | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, le=MAX_INT)]]
    model: Name | None = None


class TokenSamplingFields(SamplingFields):
    """sampling_params of POST /inference/v1/generate, by the names of SamplingParams."""

    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    detokenize: bool | None = None


class GenerateRequest(Fields):
    """POST /inference/v1/generate: tokens in, tokens out."""

    token_ids: Annotated[list[int], Field(min_length=1)]
    breakpoints: Breakpoints | None = None
    sampling_params: TokenSamplingFields
    model: Name | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Priority | None = None


class AbortRequest(Fields):
    """POST /abort_requests."""

    request_ids: Annotated[list[str], Field(max_length=65536)]
