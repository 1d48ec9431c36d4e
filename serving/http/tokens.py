"""Routes about tokens: /tokenize, /detokenize, /tokenizer_info, and rendering a chat to token ids.

The shapes are vLLM's. Text work runs in threads.
"""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.types import SamplingParams
from serving.errors import BadField
from serving.http.body import read_body_json, read_model, validate
from serving.http.chat import prepare
from serving.http.errors import JsonResponse, counted
from serving.http.fields import warning_headers
from serving.http.prompts import chat_prompt, encode
from serving.http.schemas import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizePromptRequest,
)
from serving.service import Service

MAX_DETOKENIZE = 1 << 18  # token ids in one request


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages as the chat route would send them to the model."""
    service: Service = request.app.state.service
    value = await read_body_json(request)
    body: TokenizePromptRequest | TokenizeChatRequest
    if isinstance(value, dict) and "messages" in value:
        body = validate(value, TokenizeChatRequest)
        unknown = body.warnings()
        service.check_model(body.model)
        prompt = await chat_prompt(
            service, body, tools=body.tools, template_kwargs=body.chat_template_kwargs or {}
        )
        ids = list(prompt.token_ids)
    else:
        body = validate(value, TokenizePromptRequest)
        unknown = body.warnings()
        service.check_model(body.model)
        ids = await encode(service, body.prompt, body.add_special_tokens is not False)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.engine.core.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.id_to_token(i) for i in ids]
    return JsonResponse(answer, headers=warning_headers(unknown))


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service: Service = request.app.state.service
    body = await read_model(request, DetokenizeRequest)
    unknown = body.warnings()
    service.check_model(body.model)
    tokenizer, vocabulary = service.tokenizer, service.engine.model.config.vocab_size
    if len(body.tokens) > MAX_DETOKENIZE:
        raise BadField(
            "tokens", f"tokens has {len(body.tokens)} ids; at most {MAX_DETOKENIZE} are allowed"
        )
    if body.tokens and max(body.tokens) >= vocabulary:
        raise BadField("tokens", f"tokens has id {max(body.tokens)}, outside [0, {vocabulary - 1}]")
    text = await service.in_thread(tokenizer.decode, body.tokens, False)
    return JsonResponse({"prompt": text}, headers=warning_headers(unknown))


async def tokenizer_info(request: Request) -> Response:
    """What evaluators ask to use this tokenizer from afar."""
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    loaded = service.engine.model.template
    source = service.config.chat_template or (loaded and loaded.source)
    return JsonResponse(
        {
            "tokenizer_class": type(tokenizer).__name__,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
            **tokenizer.special_tokens,
            "additional_special_tokens": sorted(
                text for i in tokenizer.special_ids if (text := tokenizer.id_to_token(i))
            ),
            "add_bos_token": tokenizer.add_bos,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.engine.core.max_model_len,
            "chat_template": source,
        }
    )


async def render(request: Request) -> Response:
    """A chat request as the body of /inference/v1/generate that does the same."""
    service: Service = request.app.state.service
    with counted(service):
        job = await prepare(request, service, await read_model(request, ChatRequest), "gen")
    answer = {
        "request_id": job.id,
        "model": job.model,
        "token_ids": list(job.call.prompt.token_ids),
        "sampling_params": _told(job.params, service.engine.get_default_sampling_params()),
        "stream": bool(job.body.stream),
        "cache_salt": job.call.cache_salt,
        "priority": job.call.priority,
    }
    return JsonResponse(answer, headers=warning_headers(job.unknown))


def _told(params: SamplingParams, silent: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as JSON: the length, and those unlike what a silent client gets."""
    told: dict[str, Any] = {"max_tokens": params.max_tokens}
    for item in dataclass_fields(SamplingParams):
        value = getattr(params, item.name)
        if value != getattr(silent, item.name):
            told[item.name] = list(value) if isinstance(value, tuple) else value
    return told


ROUTES = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
    Route("/v1/chat/completions/render", render, methods=["POST"]),
]
