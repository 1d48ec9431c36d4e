"""Spans: their attributes, parents and times, in memory and over OTLP to a receiver on loopback."""

from __future__ import annotations

import builtins
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxinfer.errors import ConfigError
from jaxinfer.inputs import Prompt
from jaxinfer.types import SamplingParams
from serving.calls import Call, Record
from serving.config import ServerConfig
from serving.service import Service
from serving.tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def make_service(**options: Any) -> Service:
    return Service(ServerConfig(model="m", served_model_name=("served",), **options))


def finish(service: Service, *, reason: str = "stop", started: bool = True, **more: Any) -> None:
    params = SamplingParams(n=2, max_tokens=9, temperature=0.5, top_p=0.9)
    call = Call("req-1", Prompt("a secret", (5, 6, 7)), params, endpoint="/v1/x", **more)
    now = time.monotonic()
    record = Record(call, now - 1.0, 3, cached_tokens=2, reason=reason)
    record.output_tokens, record.finished = [4, 1], now
    if started:
        record.first_scheduled, record.first_token = now - 0.75, now - 0.5
    for observe in service.on_finish:
        observe(record)


def test_spans_in_memory():
    service, exporter = make_service(), InMemorySpanExporter()
    tracing = Tracing(service, exporter)
    finish(service, trace={"Traceparent": PARENT, "tracestate": "a=b"})
    finish(service, reason="error", started=False, trace={"traceparent": "nonsense"})
    tracing.close()
    good, bad = exporter.get_finished_spans()
    assert good.name == "llm_request" and good.kind is SpanKind.SERVER
    assert good.resource.attributes["service.name"] == "jaxinfer"
    assert good.context and f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    assert good.parent and f"{good.parent.span_id:016x}" == PARENT.split("-")[2]
    assert good.attributes is not None
    attributes = dict(good.attributes)
    times = {k: attributes.pop(k) for k in list(attributes) if ".latency." in k}
    assert times == {
        "gen_ai.latency.time_in_queue": pytest.approx(0.25),
        "gen_ai.latency.time_to_first_token": pytest.approx(0.5),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.25),
        "gen_ai.latency.time_in_model_decode": pytest.approx(0.5),
        "gen_ai.latency.time_in_model_inference": pytest.approx(0.75),
        "gen_ai.latency.e2e": pytest.approx(1.0),
    }
    assert attributes == {
        "gen_ai.request.id": "req-1",
        "gen_ai.request.model": "served",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 0,
        "gen_ai.response.model": "served",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cached_tokens": 2,
        "jaxinfer.face": "http",
        "jaxinfer.endpoint": "/v1/x",
    }
    assert good.start_time and good.end_time
    assert (good.end_time - good.start_time) / 1e9 == pytest.approx(1.0, abs=1e-3)
    assert good.end_time / 1e9 == pytest.approx(time.time(), abs=60)
    assert [event.name for event in good.events] == ["first_token"]
    assert bad.parent is None and bad.status.status_code is StatusCode.ERROR
    assert "gen_ai.latency.time_to_first_token" not in (bad.attributes or {})
    assert "secret" not in good.to_json() + bad.to_json()


class Receiver(rpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return pb.ExportTraceServiceResponse()


def test_spans_over_otlp():
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(1))
    rpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        service = make_service(otlp_traces_endpoint=f"http://127.0.0.1:{port}")
        tracing = Tracing(service)
        finish(service, trace={"traceparent": PARENT})
        tracing.close()
    finally:
        server.stop(None)
    (span,) = receiver.spans
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert {a.key for a in span.attributes} >= {"gen_ai.request.id", "gen_ai.latency.e2e"}


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"jaxinfer\[otel\]"):
        Tracing(make_service(otlp_traces_endpoint="http://127.0.0.1:1"))
