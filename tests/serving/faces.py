"""One request, asked over every face of a server; each answer in one form that can be compared.

A face is a coroutine `(asker, prompt, params) -> Answer`; params go by the names of SamplingParams. Numbers
are rounded to float32, which is what gRPC carries. Called by test_faces.py and test_stress.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jaxinfer.engine import Engine
from jaxinfer.types import Logprob, RequestOutput, SamplingParams
from tests.serving.grpc_support import join, request
from tests.serving.http.wire import (
    chat_completion,
    completion,
    events,
    extend,
    join_chat,
    join_completion,
)

type Scores = list[tuple[float, dict[int, float]] | None]  # of a token: its own, and the best ones


@dataclass
class Output:
    """One of the n outputs. `text` is None where the face speaks of tokens only."""

    ids: list[int]
    text: str | None
    scores: Scores | None
    finish: str | None
    stop: int | str | None


@dataclass
class Answer:
    outputs: list[Output]
    prompt_scores: Scores | None
    usage: tuple[int, int, int]  # prompt, output and cached tokens

    def without_text(self) -> Answer:
        bare = [Output(o.ids, None, o.scores, o.finish, o.stop) for o in self.outputs]
        return Answer(bare, self.prompt_scores, self.usage)


@dataclass
class Asker:
    """Clients of one server.

    Attributes:
        engine: the server's, where it is in this process. messages: what the chat routes are sent.
    """

    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    engine: Engine | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def stub(self) -> Any:
        return vllm_engine_pb2_grpc.VllmEngineStub(self.channel)


@asynccontextmanager
async def asking(url: str, target: str, engine: Engine | None = None) -> AsyncIterator[Asker]:
    """Clients of the server at these addresses, for any number of requests at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http,
        grpc.aio.insecure_channel(target) as channel,
    ):
        yield Asker(http, channel, engine)


type Face = Callable[[Asker, Any, dict[str, Any]], Awaitable[Answer]]


def f32(value: float) -> float:
    return float(np.float32(value))


def best(entry: dict[int, Logprob], count: int) -> dict[int, float]:
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:count]
    return {token: f32(item.logprob) for token, item in ranked}


def of_engine(output: RequestOutput, params: dict[str, Any]) -> Answer:
    """What Python's callers get."""

    def scores(entries: Any, ids: list[int], count: int | None) -> Scores | None:
        if entries is None or count is None:
            return None
        pairs = zip(ids, entries, strict=True)
        return [e and (f32(e[t].logprob), best(e, count)) for t, e in pairs]

    outputs = [
        Output(
            o.token_ids,
            o.text,
            scores(o.logprobs, o.token_ids, params.get("logprobs")),
            o.finish_reason,
            o.stop_reason,
        )
        for o in output.outputs
    ]
    ids = output.prompt_token_ids
    usage = (len(ids), sum(len(o.ids) for o in outputs), output.num_cached_tokens)
    told = scores(output.prompt_logprobs, ids, params.get("prompt_logprobs"))
    return Answer(outputs, told, usage)


# --- engine and gRPC ----------------------------------------------------------------------------------


async def engine(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    last = None
    assert asker.engine is not None
    async for output in asker.engine.generate(prompt, SamplingParams(**params)):
        last = output
    assert last is not None
    return of_engine(last, params)


async def grpc_whole(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    return await _grpc(asker, prompt, params, False)


async def grpc_stream(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    return await _grpc(asker, prompt, params, True)


async def _grpc(asker: Asker, prompt: Any, params: dict[str, Any], stream: bool) -> Answer:
    sampling: dict[str, Any] = {"skip_special_tokens": True} | params
    sent = request(prompt, stream=stream, **sampling)
    messages = [message async for message in asker.stub.Generate(sent)]
    joined = join(messages)
    tops: dict[int, list[Any]] = {index: [] for index in joined}
    for message in messages:
        part = getattr(message, message.WhichOneof("response"))
        tops[part.index] += part.output_logprobs.top_logprobs
    outputs = []
    for index, out in sorted(joined.items()):
        last = out.complete
        assert out.ids == list(last.output_ids)  # in sum the chunks say what the last message says
        assert last.completion_tokens == len(out.ids)
        scores = None
        if params.get("logprobs") is not None:
            scores = _pair(out.logprobs, tops[index])
        matched = last.WhichOneof("matched_stop")
        stop = getattr(last, matched) if matched else None
        outputs.append(Output(out.ids, None, scores, last.finish_reason, stop))
    first = joined[0]
    told = None
    if first.prompt is not None:
        values = [v.value if v.HasField("value") else None for v in first.prompt.token_logprobs]
        told = _pair(values, first.prompt.top_logprobs)
    count = sum(len(output.ids) for output in outputs)
    return Answer(
        outputs, told, (first.complete.prompt_tokens, count, first.complete.cached_tokens)
    )


def _pair(numbers: list[Any], tops: Any) -> Scores:
    """Numbers with the best tokens beside them, which are left out where none were asked for."""
    found = [dict(zip(t.token_ids, t.values, strict=True)) for t in tops] or [{} for _ in numbers]
    return [
        None if number is None else (number, top)
        for number, top in zip(numbers, found, strict=True)
    ]


# --- HTTP ---------------------------------------------------------------------------------------------


async def _post(asker: Asker, path: str, body: dict[str, Any]) -> httpx.Response:
    return await asker.http.post(path, json=body)


def _body(params: dict[str, Any], stream: bool, **more: Any) -> dict[str, Any]:
    body = {"return_token_ids": True, "return_tokens_as_token_ids": True, **params, **more}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def completions(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    response = await _post(asker, "/v1/completions", _body(params, False, prompt=prompt))
    return _of_completion(completion(response), params)


async def completions_stream(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    response = await _post(asker, "/v1/completions", _body(params, True, prompt=prompt))
    return _of_completion(join_completion(events(response)), params)


def _of_completion(body: dict[str, Any], params: dict[str, Any]) -> Answer:
    def scores(told: Any) -> Scores | None:
        if told is None:
            return None
        found: Scores = []
        count = params["logprobs"]
        for name, number, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert top[name] == number  # evaluators compare the two
            if len(top) > count:  # the chosen one stands there besides
                top = {key: value for key, value in top.items() if key != name}
            found.append((f32(number), {_id(key): f32(value) for key, value in top.items()}))
        return found

    outputs = [
        Output(
            c["token_ids"], c["text"], scores(c["logprobs"]), c["finish_reason"], c["stop_reason"]
        )
        for c in body["choices"]
    ]
    told = body["choices"][0].get("prompt_logprobs")
    return Answer(outputs, _prompt_scores(told, params), _usage(body))


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _usage(body: dict[str, Any]) -> tuple[int, int, int]:
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], cached


def _prompt_scores(told: Any, params: dict[str, Any]) -> Scores | None:
    """vLLM's form: the token itself first, then the best ones."""
    if told is None:
        return None
    count, found = params["prompt_logprobs"], []
    for entry in told:
        if entry is None:
            found.append(None)
            continue
        ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])[:count]
        own = f32(next(iter(entry.values()))["logprob"])
        found.append((own, {int(token): f32(item["logprob"]) for token, item in ranked}))
    return found


async def chat(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    response = await _post(asker, "/v1/chat/completions", _chat_body(asker, params, False))
    return _of_chat(chat_completion(response), params)


async def chat_stream(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    response = await _post(asker, "/v1/chat/completions", _chat_body(asker, params, True))
    return _of_chat(join_chat(events(response)), params)


def _chat_body(asker: Asker, params: dict[str, Any], stream: bool) -> dict[str, Any]:
    more = dict(params)
    if (count := more.pop("logprobs", None)) is not None:
        more |= {"logprobs": True, "top_logprobs": count}
    return _body(more, stream, messages=asker.messages)


def _of_chat(body: dict[str, Any], params: dict[str, Any]) -> Answer:
    def scores(told: Any) -> Scores | None:
        if params.get("logprobs") is None:
            return None
        return [
            (f32(t["logprob"]), {_id(b["token"]): f32(b["logprob"]) for b in t["top_logprobs"]})
            for t in told["content"]
        ]

    outputs = [
        Output(
            c["token_ids"],
            c["message"].get("content", ""),
            scores(c.get("logprobs")),
            c["finish_reason"],
            c["stop_reason"],
        )
        for c in body["choices"]
    ]
    return Answer(outputs, _prompt_scores(body.get("prompt_logprobs"), params), _usage(body))


async def tokens(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    body = {"token_ids": prompt, "sampling_params": params}
    response = await _post(asker, "/inference/v1/generate", body)
    assert response.status_code == 200, response.text
    return _of_chat_like(response.json(), params)


async def tokens_stream(asker: Asker, prompt: Any, params: dict[str, Any]) -> Answer:
    body = {"token_ids": prompt, "sampling_params": params, "stream": True}
    body["stream_options"] = {"include_usage": True}
    whole: dict[str, Any] = {}
    outputs: dict[int, dict[str, Any]] = {}
    for chunk in events(await _post(asker, "/inference/v1/generate", body)):
        whole |= {key: chunk[key] for key in ("usage", "prompt_logprobs") if chunk.get(key)}
        for choice in chunk["choices"]:
            out = outputs.setdefault(choice["index"], {"logprobs": {}})
            extend(out, choice, ("token_ids",))
            extend(out["logprobs"], choice["logprobs"] or {}, ("content",))
            out |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
    whole["choices"] = [out for _, out in sorted(outputs.items())]
    return _of_chat_like(whole, params)


def _of_chat_like(body: dict[str, Any], params: dict[str, Any]) -> Answer:
    """/inference/v1/generate has chat's log-probabilities and no text."""
    choices = [choice | {"message": {}} for choice in body["choices"]]
    return _of_chat(body | {"choices": choices}, params).without_text()


TOKEN_FACES: dict[str, Face] = {
    "engine": engine,
    "grpc": grpc_whole,
    "grpc stream": grpc_stream,
}
TOKEN_ROUTES: dict[str, Face] = {"tokens": tokens, "tokens stream": tokens_stream}
TEXT_ROUTES: dict[str, Face] = {
    "completions": completions,
    "completions stream": completions_stream,
}
CHAT_ROUTES: dict[str, Face] = {"chat": chat, "chat stream": chat_stream}
