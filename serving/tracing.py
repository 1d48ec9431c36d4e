"""Tracing: one OpenTelemetry span for each ended request, as a child of the client's span.

Needs the extra `jaxinfer[otel]`, imported only when an endpoint is set. Spans carry counts and times,
never text. Export runs in a thread of the SDK; a collector that is away costs dropped spans, nothing
else. Called by server.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import ConfigError
from serving.calls import Record
from serving.service import Service

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN = "llm_request"


class Tracing:
    """Makes spans of the Records of one Service.

    Args:
        exporter: where spans go; default: OTLP over gRPC to config.otlp_traces_endpoint.
    """

    def __init__(self, service: Service, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _missing() from error
        self._service = service
        if exporter is None:
            exporter = _otlp(service.config.otlp_traces_endpoint or "")
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxinfer"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxinfer")
        self._parents = TraceContextTextMapPropagator()
        service.on_finish.append(self._finish)

    def close(self) -> None:
        """Export what is left (waits some seconds for a collector that is away)."""
        self._provider.shutdown()

    def _finish(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        assert record.finished is not None
        to_unix = time.time() - time.monotonic()
        span = self._tracer.start_span(
            SPAN,
            context=self._parents.extract({k.lower(): v for k, v in record.call.trace.items()}),
            kind=SpanKind.SERVER,
            attributes=self._attributes(record),
            start_time=int((record.arrival + to_unix) * 1e9),
        )
        if record.first_token is not None:
            span.add_event("first_token", timestamp=int((record.first_token + to_unix) * 1e9))
        if record.reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(int((record.finished + to_unix) * 1e9))

    def _attributes(self, record: Record) -> dict[str, Any]:
        call, params = record.call, record.call.params
        end, start, token = record.finished, record.first_scheduled, record.first_token
        attributes = {
            "gen_ai.request.id": call.request_id,
            "gen_ai.request.model": self._service.model_names[0],
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.response.model": self._service.model_names[0],
            "gen_ai.response.finish_reasons": [record.reason],
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": sum(record.output_tokens),
            "gen_ai.usage.cached_tokens": record.cached_tokens,
            "gen_ai.latency.time_in_queue": _between(record.arrival, start),
            "gen_ai.latency.time_to_first_token": _between(record.arrival, token),
            "gen_ai.latency.time_in_model_prefill": _between(start, token),
            "gen_ai.latency.time_in_model_decode": _between(token, end),
            "gen_ai.latency.time_in_model_inference": _between(start, end),
            "gen_ai.latency.e2e": _between(record.arrival, end),
            "jaxinfer.face": call.face,
            "jaxinfer.endpoint": call.endpoint,
        }
        return {key: value for key, value in attributes.items() if value is not None}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _otlp(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _missing() from error
    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))


def _missing() -> ConfigError:
    return ConfigError(
        "otlp_traces_endpoint needs OpenTelemetry, which is not installed; pip install 'jaxinfer[otel]'"
    )
