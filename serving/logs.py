"""Logs: one line for each ended request, one with the load now and then, as text or JSON lines.

Never shows what a request said, unless `log_requests` asks for prompts. Strings that come from
clients are quoted, so that they can't forge lines. Called by server.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

from serving.calls import Record
from serving.config import ServerConfig
from serving.service import Phase, Service

log = logging.getLogger("jaxinfer.requests")

MAX_VALUE = 256  # characters of an id or a user name in a line
QUIET = ("httpx", "httpcore", "uvicorn.access", "jax", "absl")  # warnings only
FOREIGN = (
    "uvicorn",
    "uvicorn.error",
    "uvicorn.access",
    "grpc",
)  # handlers of their own, not wanted


class _Handler(logging.StreamHandler):
    """Ours, so that a second call replaces it."""


class TextFormatter(logging.Formatter):
    """TIME LEVEL logger: message key=value ... ; control characters are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        record.message = _printable(record.message)
        line = super().formatMessage(record)
        return " ".join([line, *(f"{key}={_quoted(value)}" for key, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(config: ServerConfig) -> None:
    """Send all loggers of the process, uvicorn's and gRPC's too, to stderr in one form."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_json else TextFormatter())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(logging.NOTSET)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class RequestLog:
    """Writes the line of each ended request, and the load every stats_interval while anything runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        self._last = (time.monotonic(), 0, 0)  # when, tokens fed and tokens sampled by then
        service.on_finish.append(self._finish)
        service.on_phase.append(self._phase)

    def _finish(self, record: Record) -> None:
        log.info("request", extra={"fields": self._request_fields(record)})

    def _request_fields(self, record: Record) -> dict[str, Any]:
        call, config = record.call, self._service.config
        fields: dict[str, Any] = {
            "id": call.request_id[:MAX_VALUE],
            "face": call.face,
            "endpoint": call.endpoint,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": sum(record.output_tokens),
            "queue": _since(record.first_scheduled, record.arrival),
            "ttft": _since(record.first_token, record.arrival),
            "e2e": _since(record.finished, record.arrival),
            "reason": record.reason,
        }
        if call.user is not None:
            fields["user"] = call.user[:MAX_VALUE]
        if config.log_requests:
            prompt = call.prompt
            most = config.max_log_len
            shown = str(list(prompt.token_ids[:most])) if prompt.text is None else prompt.text
            fields["prompt"] = shown[:most]
        return fields

    # --- load -----------------------------------------------------------------------------------

    def _phase(self, phase: Phase) -> None:
        """Runs in the event loop, as all of Service does."""
        if phase is Phase.STOPPED:
            if self._timer is not None:
                self._timer.cancel()
        elif self._timer is None and self._service.loaded and self._service.config.stats_interval:
            self._read_counters()
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._service.config.stats_interval, self._tick)

    def _tick(self) -> None:
        fields = self._load_fields()
        if fields["running"] or fields["waiting"] or fields["in_flight"]:
            log.info("load", extra={"fields": fields})
        self._arm()

    def _read_counters(self) -> tuple[dict[str, Any], float, int, int]:
        """(Engine.stats(), seconds, tokens fed and tokens sampled since the last reading)."""
        stats = self._service.engine.stats()
        (then, fed, sampled), now = self._last, time.monotonic()
        self._last = (now, stats["tokens_fed"], stats["tokens_sampled"])
        return stats, max(now - then, 1e-3), self._last[1] - fed, self._last[2] - sampled

    def _load_fields(self) -> dict[str, Any]:
        stats, seconds, fed, sampled = self._read_counters()
        return {
            "running": stats["running"],
            "waiting": stats["waiting"],
            "in_flight": len(self._service.running),
            "computed_per_s": round(fed / seconds, 1),
            "sampled_per_s": round(sampled / seconds, 1),
            "pages_used": round(self._service.engine.pool_load().usage, 4),
            "prefix_hits": round(stats["prefix_hits"] / max(1, stats["prefix_queries"]), 4),
            "preemptions": stats["preemptions"],
        }


def _since(moment: float | None, arrival: float) -> float | None:
    return None if moment is None else round(max(0.0, moment - arrival), 6)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _printable(text: str) -> str:
    """Line breaks and other control characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _quoted(value: Any) -> str:
    """Strings that hold more than a plain word as JSON strings."""
    if not isinstance(value, str):
        return "-" if value is None else str(value)
    plain = value and value.isascii() and value.isprintable() and not set(' "=\\') & set(value)
    return value if plain else json.dumps(value)
