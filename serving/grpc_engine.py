"""vllm.grpc.engine.VllmEngine: the token-level service that gateways and direct clients speak.

Translates messages and calls the Service; the guard before it (grpc_guard.py) maps what is raised. Streams
end by cancellation, by Abort or by their deadline, each within a step. Called by grpc_server.py.
"""

# ruff: noqa: ARG002  # every RPC is called with its request and its context

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.errors import JaxinferError
from jaxinfer.inputs import MAX_TIMEOUT, Prompt
from jaxinfer.types import RequestOutput
from serving.calls import Call
from serving.coalesce import coalesce
from serving.errors import INTERNAL, BadField, Precondition, Unsupported
from serving.grpc_convert import (
    Replies,
    aborted,
    check_supported,
    prompt_ids,
    sampling_params,
    truncation,
)
from serving.grpc_guard import trace_headers
from serving.grpc_info import Load, model_info, server_info
from serving.grpc_kv_events import subscribe_kv_events
from serving.grpc_tokenizer import bundle, chunks
from serving.service import Phase, Service

NAME = "vllm.grpc.engine.VllmEngine"
ADMIN = tuple(f"/{NAME}/{rpc}" for rpc in ("FlushCache", "StartProfile", "StopProfile"))
LATE = "the deadline has passed; the request was ended"
MAX_FLUSH_WAIT = 600.0  # seconds
IDLE_LOOK = 0.02

Context = grpc.aio.ServicerContext


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The RPCs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._load = Load(service)
        self._arriving: dict[str, bool] = {}  # ids whose prompt is being read -> aborted meanwhile
        self._bundle: asyncio.Task[bytes] | None = None

    # --- generation -----------------------------------------------------------------------------

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        service, arrival = self._service, time.monotonic()
        request_id = request.request_id or service.new_id("grpc")
        remaining = context.time_remaining()
        end = math.inf if remaining is None else time.monotonic() + remaining
        if remaining is not None and remaining <= 0:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
        with self._arrival(request_id) as was_aborted:
            try:
                call = await self._call(request, request_id, context)
            except JaxinferError as error:
                service.reject(error)
                raise
            if was_aborted():
                for message in aborted(len(call.prompt.token_ids), call.params.n):
                    yield message
                return
        call.arrival = arrival
        if remaining is not None:
            call.timeout = min(max(end - time.monotonic(), 1e-3), MAX_TIMEOUT)
        replies = Replies(call.params, request.stream)
        interval = service.config.stream_interval if request.stream else math.inf
        deltas = coalesce(service.generate(call), interval, first=request.stream)
        async with aclosing(deltas):
            async for item in deltas:
                await _check_end(item, end, context)
                for message in replies.take(item):
                    yield message

    @contextmanager
    def _arrival(self, request_id: str) -> Iterator[Callable[[], bool]]:
        """While a prompt is read, Abort must find its request; gives whether it did."""
        new = request_id not in self._arriving
        self._arriving.setdefault(request_id, False)
        try:
            yield lambda: self._arriving.get(request_id, False)
        finally:
            if new:
                del self._arriving[request_id]

    async def _call(self, request: pb.GenerateRequest, request_id: str, context: Context) -> Call:
        check_supported(request)
        service = self._service
        params = sampling_params(request.sampling_params, service.config.limits)
        if params.stop:
            service.tokenizer  # noqa: B018  # says that there is none to find the text with
        return Call(
            request_id=request_id,
            prompt=await self._prompt(request),
            params=params,
            face="grpc",
            endpoint=f"/{NAME}/Generate",
            trace=trace_headers(context),
        )

    async def _prompt(self, request: pb.GenerateRequest) -> Prompt:
        service = self._service
        longest = service.engine.core.max_model_len
        keep = truncation(request.sampling_params, longest)
        match request.WhichOneof("input"):
            case "tokenized":
                return await service.prompt(prompt_ids(request, keep, longest))
            case "text":
                tokenizer = service.tokenizer
                if keep is None:
                    return await service.prompt(request.text)
                service.check_length("text", len(request.text))
                ids = await service.in_thread(tokenizer.encode, request.text)
                return await service.prompt(ids[-keep:])
        raise BadField("input", "input is missing; give tokenized.input_ids or text")

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        most = self._service.config.limits.queued_requests
        if len(request.request_ids) > most:
            raise BadField(
                "request_ids",
                f"request_ids has {len(request.request_ids)} ids; at most {most} are allowed",
            )
        for request_id in request.request_ids:
            if request_id in self._arriving:
                self._arriving[request_id] = True
            await self._service.abort(request_id)
        return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        raise Unsupported("this server has no embedding models")

    # --- facts ----------------------------------------------------------------------------------

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        phase = self._service.phase
        return pb.HealthCheckResponse(healthy=phase is Phase.READY, message=str(phase))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        return model_info(self._service)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return server_info(self._service)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return self._load.report(request.dp_rank if request.HasField("dp_rank") else None)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        service = self._service
        if self._bundle is None or (self._bundle.done() and self._bundle.exception()):
            work = service.in_thread(
                bundle, service.engine.model, service.tokenizer, service.config.chat_template
            )
            self._bundle = asyncio.ensure_future(work)
        for chunk in chunks(await asyncio.shield(self._bundle)):
            yield chunk

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        hub = self._service.kv_hub
        if hub is None:
            raise Unsupported("KV events are off; start the server with --kv-events-config")
        batches: Any = subscribe_kv_events(hub, request, context, self._load.record)
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    # --- administration -------------------------------------------------------------------------

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        wait = request.timeout_s
        if not 0 <= wait <= MAX_FLUSH_WAIT:
            raise BadField(
                "timeout_s", f"timeout_s={wait:g} is out of range [0, {MAX_FLUSH_WAIT:g}]"
            )
        service = self._service
        engine, end = service.engine, time.monotonic() + wait
        while service.running and time.monotonic() < end:
            await asyncio.sleep(IDLE_LOOK)
        if service.running:
            return common_pb2.FlushCacheResponse(
                success=False, message=f"{len(service.running)} requests are running"
            )
        await engine.clear_prefix_cache()
        return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        for field, _ in request.ListFields():
            if field.name != "num_steps":
                raise BadField(field.name, f"{field.name} cannot be set here; leave it out")
        steps = request.num_steps if request.HasField("num_steps") else None
        name = await self._service.in_thread(self._profiler().start, steps)
        return common_pb2.ProfileResponse(success=True, message=f"profile {name} begins")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        name = await self._service.in_thread(self._profiler().stop)
        return common_pb2.ProfileResponse(success=True, message=f"profile {name} is written")

    def _profiler(self) -> Any:
        if self._service.profiler is None:
            raise Precondition("profiling is off; start the server with --profile-dir")
        return self._service.profiler


async def _check_end(item: RequestOutput, end: float, context: Context) -> None:
    """Turn the ends that are no result into a status."""
    for output in item.outputs:
        if output.finish_reason == "error":
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL)
        if output.finish_reason == "abort" and time.monotonic() >= end:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
