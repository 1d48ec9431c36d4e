"""`vllm.grpc.engine.VllmEngine/Generate` on the published stubs, streamed.

Token ids in and out, or text in. Checks that no token was lost on the way. Made by targets.py.
"""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlsplit

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as stubs

from jaxinfer.errors import InvalidRequest
from serving.bench.dataset import Prompt
from serving.bench.record import Clock, Record
from serving.bench.settings import TargetSettings
from serving.bench.targets import Server

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
BAD_FINISH = ("abort", "error")


class GrpcTarget:
    """A server that speaks vllm.grpc.engine."""

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        parts = urlsplit(settings.url)
        if parts.scheme in ("grpcs", "https"):
            self._channel = grpc.aio.secure_channel(
                parts.netloc, grpc.ssl_channel_credentials(), options=OPTIONS
            )
        else:
            self._channel = grpc.aio.insecure_channel(parts.netloc, options=OPTIONS)
        self._stub: Any = stubs.VllmEngineStub(self._channel)
        headers = {name.lower(): value for name, value in settings.header.items()}
        if settings.api_key:
            headers["authorization"] = f"Bearer {settings.api_key}"
        self._metadata = tuple(headers.items())

    async def __aenter__(self) -> GrpcTarget:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def describe(self) -> Server:
        """Asks GetModelInfo and GetServerInfo."""
        options = {"metadata": self._metadata, "timeout": 10}
        try:
            info = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), **options)
            about = await self._stub.GetServerInfo(pb.GetServerInfoRequest(), **options)
        except grpc.aio.AioRpcError as error:
            raise InvalidRequest(
                f"base_url={self._settings.url!r} does not answer GetModelInfo "
                f"({error.code().name}: {error.details()}); start the server, or give --base-url"
            ) from error
        model, asked = info.served_model_name or info.model_path, self._settings.model
        if asked and asked not in (info.served_model_name, info.model_path):
            raise InvalidRequest(f"model={asked!r}, but the server serves {model!r}")
        return Server(model, info.vocab_size or None, about.server_type or None)

    async def send(self, prompt: Prompt, record: Record, clock: Clock, need_ids: bool) -> None:
        del need_ids  # answers are ids in any case
        request = self._request(prompt, record.output_len)
        record.sent = clock()
        try:
            call = self._stub.Generate(
                request, metadata=self._metadata, timeout=self._settings.timeout
            )
            async for response in call:
                _take(response, clock(), record)
            _check(record)
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            kind = (
                "timeout" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else f"grpc {name}"
            )
            record.fail(kind, error.details() or name)
        record.end = clock()

    def _request(self, prompt: Prompt, output_len: int) -> Any:
        settings = self._settings
        sampling = pb.SamplingParams(
            temperature=settings.temperature, max_tokens=output_len, ignore_eos=settings.ignore_eos
        )
        request = pb.GenerateRequest(
            request_id=f"bench-{uuid.uuid4().hex}", sampling_params=sampling, stream=True
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt)  # type: ignore[arg-type]
        return request


def _take(response: Any, now: float, record: Record) -> None:
    if response.WhichOneof("response") == "chunk":
        part, ids = response.chunk, list(response.chunk.token_ids)
    else:
        part = response.complete
        record.finish_reason = part.finish_reason
        # A server that streams nothing has all tokens here; others repeat them.
        ids = [] if record.ids else list(part.output_ids)
    if ids:
        record.output(now, "", ids, len(record.ids) + len(ids))
    record.prompt_tokens = part.prompt_tokens
    record.completion_tokens = part.completion_tokens
    record.cached_tokens = part.cached_tokens


def _check(record: Record) -> None:
    if record.finish_reason is None:
        record.fail("truncated", "the stream ended without GenerateComplete")
    elif record.finish_reason in BAD_FINISH:
        record.fail("server error", f"finish_reason {record.finish_reason}")
    elif record.completion_tokens != len(record.ids):
        record.fail(
            "malformed", f"{len(record.ids)} tokens came, completion_tokens says "
            f"{record.completion_tokens}"
        )  # fmt: skip
