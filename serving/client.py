"""Client and AsyncClient: a small client of the HTTP face, and of other OpenAI servers.

Both share requests and parsing; they differ only in how they wait. Answers keep the whole of what came
in `raw`. Proxies of the environment are not used. For tests, notebooks and `jaxinfer chat --server`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import httpx

from jaxinfer.errors import InvalidRequest
from serving.client_types import Answer, ApiError, Choice, Tokens, Usage
from serving.sse import SSEParser

__all__ = ["Answer", "ApiError", "AsyncClient", "Choice", "Client", "Tokens", "Usage"]

type Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
type Messages = Sequence[Mapping[str, Any]]

POLL_SECONDS = 0.1


class _Call[T](NamedTuple):
    """One exchange. body: None is a GET. parse: from the decoded JSON (text: from the text)."""

    path: str
    body: dict[str, Any] | None
    parse: Callable[[Any], T]
    text: bool = False


class _Calls(ABC):
    """What the methods of both clients send."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        model: str | None = None,
        ca_certs: str | None = None,
    ) -> None:
        self.base_url, self.model = base_url.rstrip("/").removesuffix("/v1"), model
        self._connect(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout,
            trust_env=False,
            verify=ssl.create_default_context(cafile=ca_certs),
        )

    @abstractmethod
    def _connect(self, **options: Any) -> None: ...

    def _body(self, options: dict[str, Any], **fields: Any) -> dict[str, Any]:
        model = {} if self.model is None else {"model": self.model}
        return model | fields | options

    def _tokenize(self, prompt: str | Messages, options: dict[str, Any]) -> _Call[Tokens]:
        field = "prompt" if isinstance(prompt, str) else "messages"
        return _Call("/tokenize", self._body(options, **{field: prompt}), Tokens.parse)

    def _detokenize(self, ids: Sequence[int]) -> _Call[str]:
        return _Call("/detokenize", self._body({}, tokens=list(ids)), lambda v: v["prompt"])

    def _late(self, timeout: float) -> ApiError:
        return ApiError(
            f"{self.base_url} is not ready after {timeout:g} s; is it running?",
            type="connection_error",
        )


_MODELS = _Call("/v1/models", None, lambda value: [m["id"] for m in value["data"]])
_METRICS = _Call("/metrics", None, lambda text: _samples(text), text=True)


def _completions(body: dict[str, Any]) -> _Call[Answer]:
    return _Call("/v1/completions", body, Answer.parse)


def _chat(body: dict[str, Any]) -> _Call[Answer]:
    return _Call("/v1/chat/completions", body, Answer.parse)


class Client(_Calls):
    """Blocking client. Use it as a context manager, or close it.

    Args:
        base_url: "http://host:port", with or without /v1.
        api_key: bearer token. timeout: seconds without a byte before a call fails; None: none.
        model: name for requests that give none; None: the server's default.
        ca_certs: PEM file of the authority that signed the server's certificate.

    Methods raise ApiError.
    """

    def _connect(self, **options: Any) -> None:
        self._http = httpx.Client(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names that requests may use."""
        return self._send(_MODELS)

    def completions(self, prompt: Prompt, **options: Any) -> Answer:
        """POST /v1/completions; options are its other fields."""
        return self._send(_completions(self._body(options, prompt=prompt)))

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """POST /v1/chat/completions; options are its other fields."""
        return self._send(_chat(self._body(options, messages=messages)))

    def stream_completions(self, prompt: Prompt, **options: Any) -> Generator[Answer]:
        """The same as chunks; closing the generator aborts the request."""
        return self._stream(_completions(self._body(options, prompt=prompt, stream=True)))

    def stream_chat(self, messages: Messages, **options: Any) -> Generator[Answer]:
        """The same as chunks; closing the generator aborts the request."""
        return self._stream(_chat(self._body(options, messages=messages, stream=True)))

    def tokenize(self, prompt: str | Messages, **options: Any) -> Tokens:
        """Ids of a text, or of messages in the chat template."""
        return self._send(self._tokenize(prompt, options))

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._send(self._detokenize(ids))

    def metrics(self) -> dict[str, float]:
        """Prometheus samples: name and labels, as written, to value."""
        return self._send(_METRICS)

    def health(self) -> bool:
        """Whether the server is there and well; it may be loading."""
        return self._answers("/health")

    def ready(self) -> bool:
        """Whether the server takes requests."""
        return self._answers("/ready")

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Return when the server takes requests; ApiError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not self.ready():
            if time.monotonic() >= end:
                raise self._late(timeout)
            time.sleep(POLL_SECONDS)

    def _answers(self, path: str) -> bool:
        try:
            return self._http.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def _send[T](self, call: _Call[T]) -> T:
        with _errors(self.base_url):
            method = "GET" if call.body is None else "POST"
            response = self._http.request(method, call.path, json=call.body)
            return _result(call, response)

    def _stream(self, call: _Call[Answer]) -> Generator[Answer]:
        reader = _StreamReader(call)
        with (
            _errors(self.base_url),
            self._http.stream("POST", call.path, json=call.body) as response,
        ):
            if reader.refused(response):
                response.read()
                raise _error(response)
            for chunk in response.iter_bytes():
                yield from reader.feed(chunk)
            reader.end()


class AsyncClient(_Calls):
    """Client for asyncio, used in one event loop. Arguments and methods are those of Client."""

    def _connect(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        return await self._send(_MODELS)

    async def completions(self, prompt: Prompt, **options: Any) -> Answer:
        return await self._send(_completions(self._body(options, prompt=prompt)))

    async def chat(self, messages: Messages, **options: Any) -> Answer:
        return await self._send(_chat(self._body(options, messages=messages)))

    def stream_completions(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Answer]:
        """Use with aclosing: closing the generator aborts the request."""
        return self._stream(_completions(self._body(options, prompt=prompt, stream=True)))

    def stream_chat(self, messages: Messages, **options: Any) -> AsyncGenerator[Answer]:
        """Use with aclosing: closing the generator aborts the request."""
        return self._stream(_chat(self._body(options, messages=messages, stream=True)))

    async def tokenize(self, prompt: str | Messages, **options: Any) -> Tokens:
        return await self._send(self._tokenize(prompt, options))

    async def detokenize(self, ids: Sequence[int]) -> str:
        return await self._send(self._detokenize(ids))

    async def metrics(self) -> dict[str, float]:
        return await self._send(_METRICS)

    async def health(self) -> bool:
        return await self._answers("/health")

    async def ready(self) -> bool:
        return await self._answers("/ready")

    async def wait_ready(self, timeout: float = 300.0) -> None:
        end = time.monotonic() + timeout
        while not await self.ready():
            if time.monotonic() >= end:
                raise self._late(timeout)
            await asyncio.sleep(POLL_SECONDS)

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._http.get(path)).status_code == 200
        except httpx.TransportError:
            return False

    async def _send[T](self, call: _Call[T]) -> T:
        with _errors(self.base_url):
            method = "GET" if call.body is None else "POST"
            response = await self._http.request(method, call.path, json=call.body)
            return _result(call, response)

    async def _stream(self, call: _Call[Answer]) -> AsyncGenerator[Answer]:
        reader = _StreamReader(call)
        with _errors(self.base_url):
            async with self._http.stream("POST", call.path, json=call.body) as response:
                if reader.refused(response):
                    await response.aread()
                    raise _error(response)
                async for chunk in response.aiter_bytes():
                    for answer in reader.feed(chunk):
                        yield answer
                reader.end()


# --- what both read ---------------------------------------------------------------------------------

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, IndexError)


class _StreamReader:
    """From the bytes of an event stream to answers."""

    def __init__(self, call: _Call[Answer]) -> None:
        self._call, self._events, self._done = call, SSEParser(), False

    def refused(self, response: httpx.Response) -> bool:
        kind = response.headers.get("content-type", "")
        return not response.is_success or not kind.startswith("text/event-stream")

    def feed(self, chunk: bytes) -> Iterator[Answer]:
        """Answers that this chunk finishes; ApiError for an error event and for nonsense."""
        try:
            events = self._events.feed(chunk)
        except ValueError as error:
            raise _nonsense(error) from error
        for data in events:
            if data == "[DONE]":
                self._done = True
            elif not self._done:
                yield self._answer(data)

    def _answer(self, data: str) -> Answer:
        try:
            value = json.loads(data)
            if (error := value.get("error")) is None:
                return self._call.parse(value)
        except _MALFORMED as problem:
            raise _nonsense(problem) from problem
        raise ApiError.parse(error, None)

    def end(self) -> None:
        if not self._done:
            raise ApiError("the stream ended before [DONE]", type="connection_error")


@contextmanager
def _errors(base_url: str) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        what = str(error) or type(error).__name__
        raise ApiError(f"{base_url}: {what}", type="connection_error") from error
    except UnicodeEncodeError as error:  # of a body, before anything is sent
        raise InvalidRequest(f"a text of the request is not Unicode: {error.reason}") from error


def _result[T](call: _Call[T], response: httpx.Response) -> T:
    if not response.is_success:
        raise _error(response)
    try:
        return call.parse(response.text if call.text else response.json())
    except _MALFORMED as error:
        raise _nonsense(error) from error


def _error(response: httpx.Response) -> ApiError:
    if response.is_success:
        return _nonsense(f"content-type is {response.headers.get('content-type')!r}")
    try:
        value = response.json()
        value = value.get("error", value)
    except _MALFORMED:
        value = response.text[:1000] or response.reason_phrase
    return ApiError.parse(value, response.status_code, response.headers.get("retry-after"))


def _nonsense(problem: object) -> ApiError:
    return ApiError(f"the answer is not as the protocol says: {problem!r}", type="protocol_error")


def _samples(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in lines}
