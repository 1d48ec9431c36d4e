"""POST /inference/v1/generate: tokens in, tokens out, for gateways and trainers that own the text.

vLLM's shape. Text is made only if a stop string asks for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.types import CompletionOutput, RequestOutput
from serving.calls import Call
from serving.errors import BadField
from serving.http import logprobs as forms
from serving.http.body import read_model
from serving.http.chunks import whole as whole_body
from serving.http.errors import counted
from serving.http.exchange import (
    Collected,
    Usage,
    Whole,
    collect,
    encoded,
    make_calls,
    request_id,
    run,
    scores_size,
    usage_of,
)
from serving.http.fields import sampling_params, warning_headers
from serving.http.prompts import with_breakpoints
from serving.http.schemas import GenerateRequest
from serving.http.sse import EventStream, event, while_connected, with_errors
from serving.service import Service


async def generate(request: Request) -> Response:
    """Continue token ids with token ids."""
    service: Service = request.app.state.service
    with counted(service):
        body = await read_model(request, GenerateRequest)
        unknown = body.warnings() + body.sampling_params.warnings()
        call = await _call(request, service, body)
    headers = {"x-request-id": call.request_id, **warning_headers(unknown)}
    if body.stream:
        idle = service.config.limits.idle_seconds
        return EventStream(with_errors(_stream(service, call, body)), idle, headers)
    done = await while_connected(request.receive, collect(service, [call]))
    answer = await done.encode(service, call.params, lambda: _whole(service, call, done))
    return Response(answer, headers=headers, media_type="application/json")


ROUTES = [Route("/inference/v1/generate", generate, methods=["POST"])]


async def _call(request: Request, service: Service, body: GenerateRequest) -> Call:
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise BadField("stream_options", "stream_options needs stream=true")
    wanted = body.sampling_params
    detokenize = bool(wanted.stop) if wanted.detokenize is None else wanted.detokenize
    limit = wanted.max_tokens if "max_tokens" in wanted.model_fields_set else 16
    params = sampling_params(
        wanted, service, limit, logprobs=wanted.logprobs, detokenize=detokenize
    )
    prompt = with_breakpoints(await service.prompt(body.token_ids), body.breakpoints)
    identity = request_id(request, service, body.request_id, "gen")
    (call,) = make_calls(
        request,
        identity,
        [prompt],
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    return call


def _whole(service: Service, call: Call, done: Collected) -> bytes:
    choices = (_choice(service, call, i, whole) for i, whole in enumerate(done.outputs[0]))
    more: dict[str, Any] = {"usage": done.usage.json()}
    if (scores := done.prompt_logprobs[0]) is not None:
        more["prompt_logprobs"] = forms.prompt_logprobs(scores, call.params.prompt_logprobs or 0)
    return whole_body({"request_id": call.request_id}, choices, more)


def _choice(
    service: Service, call: Call, index: int, part: Whole | CompletionOutput
) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": part.token_ids,
        "logprobs": _logprobs(service, call, part.logprobs or ()),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }


def _logprobs(
    service: Service, call: Call, entries: Sequence[forms.Entry]
) -> dict[str, Any] | None:
    count = call.params.logprobs
    if count is None:
        return None
    return {"content": forms.chat_logprobs(entries, count, service.engine.model.tokenizer, True)}


async def _stream(service: Service, call: Call, body: GenerateRequest) -> AsyncGenerator[bytes]:
    usage = usage_of([call])
    async with aclosing(run(service, [call], service.config.stream_interval)) as stream:
        async for _, item in stream:
            usage.take(0, item)
            if item.outputs or item.prompt_logprobs is not None:
                size = scores_size(item.prompt_logprobs, call.params)
                yield await encoded(
                    service, size, partial(_chunk, service, call, body, item, usage)
                )
    if body.stream_options and body.stream_options.include_usage:
        yield event({"request_id": call.request_id, "choices": [], "usage": usage.json()})


def _chunk(
    service: Service, call: Call, body: GenerateRequest, item: RequestOutput, usage: Usage
) -> bytes:
    options = body.stream_options
    chunk: dict[str, Any] = {"request_id": call.request_id}
    chunk["choices"] = [_choice(service, call, o.index, o) for o in item.outputs]
    if item.prompt_logprobs is not None:
        count = call.params.prompt_logprobs or 0
        chunk["prompt_logprobs"] = forms.prompt_logprobs(item.prompt_logprobs, count)
    if options and options.include_usage:
        chunk["usage"] = usage.json() if options.continuous_usage_stats else None
    return event(chunk)
