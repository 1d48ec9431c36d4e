"""Call: one generation as a face hands it to the Service; Record: what became of it.

Plain values; know no wire format and no engine. Made by the faces and by service.py; read by metrics, logs and traces.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxinfer.inputs import Prompt
from jaxinfer.types import RequestOutput, SamplingParams

TRACE_HEADERS = ("traceparent", "tracestate")  # in HTTP and as gRPC metadata


@dataclass(slots=True)
class Call:
    """One generation, as a face hands it over.

    Attributes:
        request_id: the client's, or one made by `Service.new_id`. It must not be running.
        face: "http", "grpc" or "kserve". endpoint: route or RPC, for logs and spans.
        arrival: when it reached the face, before its prompt was read (time.monotonic).
        trace: W3C trace headers (traceparent, tracestate). user: what the client says about itself.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    use_prefix_cache: bool = True
    face: str = "http"
    endpoint: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    arrival: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Record:
    """What became of a Call: for metrics, the log line and the span. Times are time.monotonic seconds.

    Attributes:
        output_tokens: tokens of each of the n outputs.
        reason: "abort" until all outputs have ended; then the last one's that was no "stop", else
            "stop". "error" as soon as one has failed.
        intervals: seconds between tokens of one output; tokens that came together share the time.
        handed: when the client's side was given an item that it has not taken yet; else None.
    """

    call: Call
    arrival: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: list[int] = field(default_factory=list)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    reason: str = "abort"
    intervals: array[float] = field(default_factory=lambda: array("d"))
    handed: float | None = None
    _last: list[float] = field(default_factory=list)
    _ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output_tokens = [0] * self.call.params.n
        self._last = [0.0] * self.call.params.n

    def take(self, output: RequestOutput) -> None:
        """Note one item of the stream."""
        now = time.monotonic()
        self.cached_tokens = output.num_cached_tokens
        self.first_scheduled = output.metrics.first_scheduled_time
        self.first_token = output.metrics.first_token_time
        for part in output.outputs:
            count = len(part.token_ids)
            if count and self.output_tokens[part.index]:
                self.intervals.extend([(now - self._last[part.index]) / count] * count)
            if count:
                self._last[part.index] = now
            self.output_tokens[part.index] += count
            if part.finish_reason is not None:
                self._ended.append(part.finish_reason)
        if "error" in self._ended:
            self.reason = "error"
        elif len(self._ended) == self.call.params.n:
            self.reason = next((r for r in reversed(self._ended) if r != "stop"), "stop")
