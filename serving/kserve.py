"""KServe v2: inference.GRPCInferenceService for text, as `tritonclient` drives it.

text_input in, text_output out, sampling options as parameters; ModelStreamInfer is decoupled. Shared memory
and the model repository do not exist here. Needs the extra jaxinfer[kserve]. Called by grpc_server.py.
"""

# ruff: noqa: ARG002  # every RPC is called with its request and its context

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib import import_module
from typing import Any

import grpc

import jaxinfer
from jaxinfer.errors import ConfigError, Unavailable
from jaxinfer.types import RequestOutput
from serving.calls import Call
from serving.coalesce import coalesce
from serving.errors import INTERNAL, BadField, NotFound, Overloaded, message
from serving.grpc_guard import log_internal, trace_headers
from serving.kserve_convert import Asked, read, text_reply
from serving.service import Service

NAME = "inference.GRPCInferenceService"
VERSION = "1"
WAITING = 8  # replies of a stream's requests that wait for its reader
Context = grpc.aio.ServicerContext


def add_kserve(service: Service, server: grpc.aio.Server) -> str:
    """Add the service to a server; returns its name. Raises ConfigError without the extra."""
    try:
        stubs = import_module("tritonclient.grpc.service_pb2_grpc")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "kserve needs the package tritonclient; install jaxinfer[kserve], or leave --kserve out"
        ) from error
    # What KServe does not override answers UNIMPLEMENTED.
    servicer = type("Servicer", (KServe, stubs.GRPCInferenceServiceServicer), {})(service)
    stubs.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    return NAME


class KServe:
    """The RPCs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pb: Any = import_module("tritonclient.grpc.service_pb2")
        self._config_pb: Any = import_module("tritonclient.grpc.model_config_pb2")

    # --- facts ----------------------------------------------------------------------------------

    async def ServerLive(self, request: Any, context: Context) -> Any:
        return self._pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Context) -> Any:
        return self._pb.ServerReadyResponse(ready=self._service.ready)

    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        return self._pb.ServerMetadataResponse(
            name="jaxinfer", version=jaxinfer.__version__, extensions=[]
        )

    async def ModelReady(self, request: Any, context: Context) -> Any:
        known = request.name in self._service.model_names and request.version in ("", VERSION)
        return self._pb.ModelReadyResponse(ready=known and self._service.ready)

    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        tensor = self._pb.ModelMetadataResponse.TensorMetadata
        return self._pb.ModelMetadataResponse(
            name=self._model(request.name, request.version),
            versions=[VERSION],
            platform="jaxinfer",
            inputs=[
                tensor(name="text_input", datatype="BYTES", shape=[1]),
                tensor(name="stream", datatype="BOOL", shape=[1]),
                tensor(name="sampling_parameters", datatype="BYTES", shape=[1]),
            ],
            outputs=[tensor(name="text_output", datatype="BYTES", shape=[-1])],
        )

    async def ModelConfig(self, request: Any, context: Context) -> Any:
        pb = self._config_pb
        config = pb.ModelConfig(
            name=self._model(request.name, request.version),
            backend="jaxinfer",
            input=[
                pb.ModelInput(name="text_input", data_type=pb.TYPE_STRING, dims=[1]),
                pb.ModelInput(name="stream", data_type=pb.TYPE_BOOL, dims=[1], optional=True),
                pb.ModelInput(
                    name="sampling_parameters", data_type=pb.TYPE_STRING, dims=[1], optional=True
                ),
            ],
            output=[pb.ModelOutput(name="text_output", data_type=pb.TYPE_STRING, dims=[-1])],
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
        return self._pb.ModelConfigResponse(config=config)

    def _model(self, name: str, version: str) -> str:
        self._service.check_model(name)
        if version not in ("", VERSION):
            raise NotFound(f"model_version={version!r:.40} does not exist; it is {VERSION!r}")
        return name

    # --- inference ------------------------------------------------------------------------------

    async def ModelInfer(self, request: Any, context: Context) -> Any:
        """The whole text of each of the n outputs."""
        asked = await self._read(request)
        if asked.stream:
            error = BadField("stream", "stream=true needs ModelStreamInfer")
            self._service.reject(error)
            raise error
        return await self._whole(request, asked, context)

    async def _whole(self, request: Any, asked: Asked, context: Context) -> Any:
        call = await self._call(asked, context, "ModelInfer")
        texts = [""] * call.params.n
        deltas = self._service.generate(call)
        async with aclosing(deltas):
            async for item in deltas:
                _check(item)
                for output in item.outputs:
                    texts[output.index] += output.text
        return self._reply(request, asked, texts)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        """Requests of one stream run side by side; each reply carries its request's id."""
        replies: asyncio.Queue[Any] = asyncio.Queue(WAITING)
        most = self._service.config.limits.outputs
        running: set[asyncio.Task[None]] = set()

        async def accept() -> None:
            async for request in request_iterator:
                if len(running) >= most:
                    error = Overloaded(f"{most} requests of this stream run; the limit is {most}")
                    self._service.reject(error)
                    await replies.put(self._failure(request, error))
                    continue
                task = asyncio.create_task(self._answer(request, context, replies))
                running.add(task)
                task.add_done_callback(running.discard)
            while running:
                await asyncio.wait(running)
            await replies.put(None)

        async def accept_all() -> None:
            try:
                await accept()
            except Exception as error:  # a message that cannot be read ends the stream
                await replies.put(error)

        accepting = asyncio.create_task(accept_all())
        try:
            while (reply := await replies.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                yield reply
        finally:
            for task in (accepting, *running):
                task.cancel()

    async def _answer(self, request: Any, context: Context, replies: asyncio.Queue[Any]) -> None:
        """Put a request's replies, or its error, into the stream's queue."""
        try:
            async with aclosing(self._replies(request, context)) as made:
                async for reply in made:
                    await replies.put(self._pb.ModelStreamInferResponse(infer_response=reply))
        except Exception as error:
            log_internal(error)
            await replies.put(self._failure(request, error))

    def _failure(self, request: Any, error: Exception) -> Any:
        reply = self._pb.ModelStreamInferResponse(error_message=message(error))
        reply.infer_response.id = request.id
        reply.infer_response.model_name = request.model_name
        return reply

    async def _replies(self, request: Any, context: Context) -> AsyncGenerator[Any]:
        """With stream=true what is new, else the whole; the last one (or an empty one) is final."""
        asked = await self._read(request)
        if asked.stream:
            call = await self._call(asked, context, "ModelStreamInfer")
            deltas = coalesce(self._service.generate(call), self._service.config.stream_interval)
            async with aclosing(deltas):
                async for item in deltas:
                    _check(item)
                    if not item.outputs:
                        continue
                    texts = [output.text for output in item.outputs]
                    final = item.finished and not asked.empty_final
                    yield self._reply(request, asked, texts, final)
        else:
            reply = await self._whole(request, asked, context)
            reply.parameters["triton_final_response"].bool_param = not asked.empty_final
            yield reply
        if asked.empty_final:
            yield self._reply(request, asked, None, True)

    async def _read(self, request: Any) -> Asked:
        try:
            self._model(request.model_name, request.model_version)
            return read(request, self._service.config.limits)
        except Exception as error:
            self._service.reject(error)
            raise

    async def _call(self, asked: Asked, context: Context, rpc: str) -> Call:
        service = self._service
        remaining = context.time_remaining()
        try:
            service.tokenizer  # noqa: B018  # says that there is none
            prompt = await service.prompt(asked.text)
        except Exception as error:
            service.reject(error)
            raise
        return Call(
            request_id=service.new_id("kserve"),
            prompt=prompt,
            params=asked.params,
            timeout=None if remaining is None else max(remaining, 1e-3),
            face="kserve",
            endpoint=f"/{NAME}/{rpc}",
            trace=trace_headers(context),
        )

    def _reply(
        self, request: Any, asked: Asked, texts: list[str] | None, final: bool | None = None
    ) -> Any:
        reply = self._pb.ModelInferResponse(
            model_name=request.model_name, model_version=VERSION, id=request.id
        )
        if texts is not None:
            text_reply(reply, texts)
        if final is not None:
            reply.parameters["triton_final_response"].bool_param = final
        return reply


def _check(item: RequestOutput) -> None:
    """Raise for an output that did not come to its end."""
    if any(output.finish_reason == "error" for output in item.outputs):
        raise RuntimeError(item.error or INTERNAL)
    if any(output.finish_reason == "abort" for output in item.outputs):
        raise Unavailable("the server ended the request; send it again")
