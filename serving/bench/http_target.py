"""OpenAI completions and chat completions over HTTP, streamed as server-sent events.

Trusts nothing in the answer: what is not as the protocol says marks the request as failed.
Proxies of the environment are not used. Made by targets.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from jaxinfer.errors import InvalidRequest
from serving.bench.dataset import Prompt
from serving.bench.record import Clock, Record
from serving.bench.settings import TargetSettings
from serving.bench.targets import Server
from serving.sse import SSEParser

BAD_FINISH = ("abort", "error")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class _ServerError(Exception):
    """The stream carried an error object."""


class HttpTarget:
    """A server with /v1/completions or /v1/chat/completions."""

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._chat = settings.backend == "openai-chat"
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._client = httpx.AsyncClient(
            base_url=settings.url,
            headers=headers | settings.header,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=None,  # one limit for the whole request, in send
            trust_env=False,
        )
        self._model = settings.model or ""

    async def __aenter__(self) -> HttpTarget:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def describe(self) -> Server:
        """Asks /v1/models, and /version where there is one. llama.cpp's tells the vocabulary."""
        models = (await self._get("/v1/models")).get("data") or []
        named = [m for m in models if isinstance(m, dict) and isinstance(m.get("id"), str)]
        if not self._settings.model and not named:
            raise InvalidRequest(
                f"base_url={self._settings.url!r} names no model (GET /v1/models); give --model, "
                "and --api-key if the server wants one"
            )
        self._model = self._settings.model or named[0]["id"]
        entry = next((m for m in named if m["id"] == self._model), {})
        vocab = (entry.get("meta") or {}).get("n_vocab")
        version = (await self._get("/version")).get("version")
        return Server(
            self._model,
            vocab if type(vocab) is int and vocab > 1 else None,
            None if version is None else str(version),
        )

    async def _get(self, path: str) -> dict[str, Any]:
        """A JSON object, {} where the server has none there. InvalidRequest without a server."""
        try:
            answer = await self._client.get(path, timeout=10)
            value = answer.json() if answer.is_success else {}
        except httpx.HTTPError as error:
            raise InvalidRequest(
                f"base_url={self._settings.url!r} cannot be reached ({type(error).__name__}); start "
                "the server, or give another --base-url"
            ) from error
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    async def send(self, prompt: Prompt, record: Record, clock: Clock, need_ids: bool) -> None:
        body = json.dumps(self._body(prompt, record.output_len, need_ids)).encode()
        record.sent = clock()
        try:
            async with (
                asyncio.timeout(self._settings.timeout),
                self._client.stream("POST", self._settings.path, content=body) as response,
            ):
                await self._read(response, record, clock)
        except TimeoutError:
            record.fail("timeout", f"no end after {self._settings.timeout:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            record.fail("connect", str(error))
        except httpx.TransportError as error:
            record.fail("disconnect", str(error))
        except httpx.HTTPError as error:
            record.fail("malformed", str(error))
        except _ServerError as error:
            record.fail("server error", str(error))
        except _MALFORMED as error:
            record.fail("malformed", f"{type(error).__name__}: {error}")
        record.end = record.end or clock()
        if need_ids and record.error is None and not record.ids:
            record.fail("no ids", "the server returned no token_ids; use --prompt-kind text")

    def _body(self, prompt: Prompt, output_len: int, need_ids: bool) -> dict[str, Any]:
        settings = self._settings
        stream = {"include_usage": True}
        if settings.continuous_usage_stats:
            stream["continuous_usage_stats"] = True
        body = {
            "model": self._model,
            "messages" if self._chat else "prompt": prompt,
            "max_tokens": output_len,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": stream,
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if need_ids:
            body["return_token_ids"] = True
        return body | settings.extra_body

    async def _read(self, response: httpx.Response, record: Record, clock: Clock) -> None:
        if response.status_code != 200:
            record.fail(f"http {response.status_code}", _message(await response.aread()))
            return
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            record.fail("malformed", f"content-type is {kind!r}, not text/event-stream")
            return
        parser, done = SSEParser(), False
        async for chunk in response.aiter_bytes():
            now = clock()
            for data in parser.feed(chunk):
                if data == "[DONE]":
                    # The rest is read too, so that the connection can be used again.
                    record.end, done = now, True
                elif not done:
                    _take(json.loads(data), self._chat, now, record)
        if parser.pending:
            record.fail("truncated", "the stream ended inside an event")
        elif not done and record.finish_reason is None:
            record.fail("truncated", "the stream ended with neither finish_reason nor [DONE]")
        elif record.finish_reason in BAD_FINISH:
            record.fail("server error", f"finish_reason {record.finish_reason}")


def _take(event: dict[str, Any], chat: bool, now: float, record: Record) -> None:
    """One event of the stream. Raises _ServerError, or one of _MALFORMED."""
    if event.get("error"):
        raise _ServerError(_text_of(event["error"]))
    usage = event.get("usage")
    count = None
    if usage:
        count = _count(usage, "completion_tokens")
        record.prompt_tokens = _count(usage, "prompt_tokens")
        cached = usage.get("prompt_tokens_details") or {}
        if cached.get("cached_tokens") is not None:
            record.cached_tokens = _count(cached, "cached_tokens")
    for choice in event.get("choices") or []:
        part = choice.get("delta") or {} if chat else choice
        text = part.get("content" if chat else "text") or ""
        ids = choice.get("token_ids") or []
        if not isinstance(text, str) or not isinstance(ids, list):
            raise TypeError("text is no string, or token_ids no list")
        other = part.get("reasoning") or part.get("reasoning_content") or part.get("tool_calls")
        # An event that shows nothing may still carry a token, whose text is held back. But where
        # only the last event has a count, it tells nothing of that event.
        told_before = record.completion_tokens is not None
        rose = count is not None and count > (record.completion_tokens or 0)
        rose = rose and (told_before or choice.get("finish_reason") is None)
        if text or ids or other or rose:
            record.output(now, text, ids, count)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    if count is not None:
        record.completion_tokens = count


def _count(values: dict[str, Any], name: str) -> int:
    value = values[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}={value!r} is no count")
    return value


def _text_of(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _message(body: bytes) -> str:
    text = body[:10_000].decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return _text_of(value.get("error") or value) if isinstance(value, dict) else text
