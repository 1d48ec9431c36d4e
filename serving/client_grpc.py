"""GrpcClient and AsyncGrpcClient: clients of vllm.grpc.engine.VllmEngine on the published stubs.

Token ids or text go in, token ids come out: the service sends no text. Also gets the tokenizer's files.
For tests, notebooks and `jaxinfer chat --server grpc://...`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs

from jaxinfer.errors import InvalidRequest
from jaxinfer.types import SamplingParams
from serving.client_types import Answer, ApiError, Choice, Usage

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0))
MAX_TOKENIZER = 1 << 28  # bytes
POLL_SECONDS = 0.1


class _Calls(ABC):
    """What both clients send."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float | None = None,
        ca_certs: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("grpc", "grpcs") or not parts.netloc:
            raise InvalidRequest(f"url={url!r} must be grpc://HOST:PORT or grpcs://HOST:PORT")
        self.url = url
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._options: dict[str, Any] = {"metadata": metadata, "timeout": timeout}
        roots = None if ca_certs is None else Path(ca_certs).read_bytes()
        tls = grpc.ssl_channel_credentials(roots) if parts.scheme == "grpcs" else None
        self._channel = self._connect(parts.netloc, tls)
        self._stub: Any = stubs.VllmEngineStub(self._channel)

    @abstractmethod
    def _connect(self, target: str, tls: grpc.ChannelCredentials | None) -> Any: ...

    def _late(self, timeout: float) -> ApiError:
        return ApiError(
            f"{self.url} is not ready after {timeout:g} s; is it running?", type="connection_error"
        )


class GrpcClient(_Calls):
    """Blocking client. Use it as a context manager, or close it.

    Args:
        url: "grpc://host:port", or "grpcs://host:port" for TLS.
        api_key: bearer token. timeout: seconds that a whole call may take; None: no limit.
        ca_certs: PEM file of the authority that signed the server's certificate.

    Methods raise ApiError; `generate` also InvalidRequest for what cannot be sent.
    """

    def _connect(self, target: str, tls: grpc.ChannelCredentials | None) -> Any:
        if tls is None:
            return grpc.insecure_channel(target, options=OPTIONS)
        return grpc.secure_channel(target, tls, options=OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Generator[Answer]:
        """Stream deltas; closing the generator aborts the request."""
        request, reader = _request(prompt, params, request_id), _Reader()
        with _errors():
            call = self._stub.Generate(request, **self._options)
            try:
                for message in call:
                    yield reader.answer(request.request_id, message)
            finally:
                call.cancel()

    def abort(self, *request_ids: str) -> None:
        """End running requests: their streams end with finish_reason "abort"."""
        self._call("Abort", pb.AbortRequest(request_ids=request_ids))

    def health(self) -> bool:
        """Whether the server takes requests."""
        try:
            return self._call("HealthCheck", pb.HealthCheckRequest()).healthy
        except ApiError:
            return False

    def wait_ready(self, timeout: float = 300.0) -> None:
        """Return when the server takes requests; ApiError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not self.health():
            if time.monotonic() >= end:
                raise self._late(timeout)
            time.sleep(POLL_SECONDS)

    def model_info(self) -> pb.GetModelInfoResponse:
        return self._call("GetModelInfo", pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        return self._call("GetServerInfo", pb.GetServerInfoRequest())

    def loads(self) -> pb.GetLoadsResponse:
        return self._call("GetLoads", pb.GetLoadsRequest())

    def tokenizer(self) -> bytes:
        """The zip archive of the tokenizer's files; its checksum was compared."""
        with _errors():
            archive = _Archive()
            for chunk in self._stub.GetTokenizer(common_pb2.GetTokenizerRequest(), **self._options):
                archive.add(chunk)
            return archive.whole()

    def _call(self, name: str, request: Any) -> Any:
        with _errors():
            return getattr(self._stub, name)(request, **self._options)


class AsyncGrpcClient(_Calls):
    """Client for asyncio, used in one event loop. Arguments and methods are those of GrpcClient."""

    def _connect(self, target: str, tls: grpc.ChannelCredentials | None) -> Any:
        if tls is None:
            return grpc.aio.insecure_channel(target, options=OPTIONS)
        return grpc.aio.secure_channel(target, tls, options=OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[Answer]:
        """Use with aclosing: closing the generator aborts the request."""
        request, reader = _request(prompt, params, request_id), _Reader()
        with _errors():
            call = self._stub.Generate(request, **self._options)
            try:
                async for message in call:
                    yield reader.answer(request.request_id, message)
            finally:
                call.cancel()

    async def abort(self, *request_ids: str) -> None:
        await self._call("Abort", pb.AbortRequest(request_ids=request_ids))

    async def health(self) -> bool:
        try:
            return (await self._call("HealthCheck", pb.HealthCheckRequest())).healthy
        except ApiError:
            return False

    async def wait_ready(self, timeout: float = 300.0) -> None:
        end = time.monotonic() + timeout
        while not await self.health():
            if time.monotonic() >= end:
                raise self._late(timeout)
            await asyncio.sleep(POLL_SECONDS)

    async def model_info(self) -> pb.GetModelInfoResponse:
        return await self._call("GetModelInfo", pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        return await self._call("GetServerInfo", pb.GetServerInfoRequest())

    async def loads(self) -> pb.GetLoadsResponse:
        return await self._call("GetLoads", pb.GetLoadsRequest())

    async def tokenizer(self) -> bytes:
        with _errors():
            archive, request = _Archive(), common_pb2.GetTokenizerRequest()
            async for chunk in self._stub.GetTokenizer(request, **self._options):
                archive.add(chunk)
            return archive.whole()

    async def _call(self, name: str, request: Any) -> Any:
        with _errors():
            return await getattr(self._stub, name)(request, **self._options)


# --- messages ---------------------------------------------------------------------------------------

# Fields of SamplingParams that the message has no place for, with what they must be.
_NOWHERE = {"allowed_token_ids": None, "best_of": None}
_COPIED = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "skip_special_tokens", "ignore_eos", "n", "logprobs",
    "prompt_logprobs", "include_stop_str_in_output",
)  # fmt: skip


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """The wire's form. Raises InvalidRequest for what it cannot carry."""
    for name, neutral in _NOWHERE.items():
        if getattr(params, name) not in (neutral, ()):
            raise InvalidRequest(
                f"{name}={getattr(params, name)!r:.100} cannot be sent over gRPC; use HTTP"
            )
    fields = {name: getattr(params, name) for name in _COPIED}
    try:
        return pb.SamplingParams(
            **{name: value for name, value in fields.items() if value is not None},
            top_k=max(params.top_k, 0),
            stop=params.stop_strings,
            stop_token_ids=params.stop_token_ids or (),
            seed=params.seed,
            logit_bias=params.logit_bias or {},
            spaces_between_special_tokens=True,
        )
    except ValueError as error:
        raise InvalidRequest(f"sampling parameters do not fit the gRPC message: {error}") from None


def _request(
    prompt: str | Sequence[int], params: SamplingParams | None, request_id: str | None
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        request_id=request_id or f"client-{uuid.uuid4().hex}",
        sampling_params=sampling_message(params or SamplingParams()),
        stream=True,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    return request


class _Reader:
    """From messages to deltas: the last message of an output may repeat all of its tokens."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}  # index -> tokens

    def answer(self, request_id: str, message: pb.GenerateResponse) -> Answer:
        kind = message.WhichOneof("response")
        if kind is None:
            raise ApiError("a message holds neither chunk nor complete", type="protocol_error")
        part: Any = getattr(message, kind)
        told = self._told.get(part.index, 0)
        if kind == "chunk":
            ids, skip = tuple(part.token_ids), 0
        else:
            ids, skip = tuple(part.output_ids[told:]), told
        self._told[part.index] = told + len(ids)
        finish, stop = None, None
        if kind == "complete":
            matched = part.WhichOneof("matched_stop")
            finish, stop = part.finish_reason, getattr(part, matched) if matched else None
        logprobs = _logprobs(part.output_logprobs)[skip:] or None
        choice = Choice(part.index, "", ids, finish, stop, logprobs)
        usage = Usage(part.prompt_tokens, part.completion_tokens, part.cached_tokens)
        return Answer(request_id, "", (choice,), usage, part)


def _logprobs(values: pb.OutputLogProbs) -> list[dict[int, float]]:
    """One mapping for each token, the chosen one first."""
    return [
        {token: logprob, **dict(zip(top.token_ids, top.values, strict=True))}
        for token, logprob, top in zip(
            values.token_ids,
            values.token_logprobs,
            itertools.chain(values.top_logprobs, itertools.repeat(pb.TopLogProbs())),
            strict=False,
        )
    ]


class _Archive:
    """Puts a tokenizer's archive together, up to MAX_TOKENIZER bytes."""

    def __init__(self) -> None:
        self._data, self._digest = bytearray(), ""

    def add(self, chunk: common_pb2.GetTokenizerChunk) -> None:
        self._data += chunk.data
        self._digest = chunk.sha256 or self._digest
        if len(self._data) > MAX_TOKENIZER:
            raise ApiError(f"the tokenizer has more than {MAX_TOKENIZER} bytes")

    def whole(self) -> bytes:
        if hashlib.sha256(self._data).hexdigest() != self._digest:
            raise ApiError("the tokenizer's checksum is wrong", type="protocol_error")
        return bytes(self._data)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        kind = "connection_error" if code is grpc.StatusCode.UNAVAILABLE else None
        details = error.details() or code.name  # type: ignore[attr-defined]
        raise ApiError(details, status=code.name, type=kind) from error
