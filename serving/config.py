"""ServerConfig: everything that `jaxinfer serve` can be told, checked once, frozen.

Plain values; imports no server library. The names are those of vLLM and SGLang where they have one
(aliases live in options.py). Built by commands/serve.py and by tests; read by all faces.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.errors import ConfigError

LOOPBACK = "127.0.0.1"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for. Beyond it: 400 (HTTP), INVALID_ARGUMENT (gRPC).

    Attributes:
        body_bytes: of an HTTP body, and of a gRPC message.
        arriving_bytes: of all HTTP bodies that are being read at a time; more get 429.
        json_depth: nesting of a JSON body.
        prompts: prompts in one completions request.
        outputs: prompts times n of one request.
        stop_strings, stop_chars: count, and length of each.
        request_id_chars: length of a request id that a client gives.
        queued_requests, queued_tokens: waiting work past which new requests are refused (429).
        idle_seconds: an unread stream is aborted after this long.
        connections: HTTP connections at once; more get 503.
    """

    body_bytes: int = 32 * MIB
    arriving_bytes: int = 512 * MIB
    json_depth: int = 64
    prompts: int = 1024
    outputs: int = 1024
    stop_strings: int = 16
    stop_chars: int = 1024
    request_id_chars: int = 256
    queued_requests: int = 2048
    queued_tokens: int = 1 << 24
    idle_seconds: float = 600.0
    connections: int = 2048

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name}={value!r} must be a number above 0")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How to serve one model.

    Attributes:
        model: model reference. served_model_name: names that requests may use, the first is reported
            (default: the model's own name).
        engine: EngineConfig options. chat_template: Jinja source in place of the checkpoint's.
        host: address of both ports. port: HTTP port; None: no HTTP. grpc_port: None: no gRPC.
        0 takes a free port.
        api_keys: bearer tokens; empty: no authentication. admin_api_keys: for admin routes;
            empty: the admin routes do not exist.
        ssl_keyfile, ssl_certfile: TLS for both ports. ssl_ca_certs: clients must present a
            certificate that this authority signed.
        tool_call_parser, reasoning_parser: names of serving.parsers; None: text goes out as it is.
        enable_auto_tool_choice: allow tool_choice="auto" (needs tool_call_parser).
        kserve: also serve inference.GRPCInferenceService.
        kv_events: the JSON object of --kv-events-config; None: no KV events.
        stream_interval: most tokens of an output that are held back to be sent together.
        shutdown_timeout: seconds that running requests get after SIGTERM.
        watchdog_timeout: seconds without an engine round before health fails.
        max_logprobs: most top logprobs that a request may ask for.
        profile_dir: where StartProfile writes; None: profiling is off.
        otlp_traces_endpoint: where spans go; None: no tracing.
        log_requests: log prompts, cut to max_log_len characters. log_json: logs as JSON lines.
        stats_interval: seconds between log lines with the load; 0: none.
    """

    model: str
    served_model_name: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    host: str = LOOPBACK
    port: int | None = 8000
    grpc_port: int | None = None
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False
    kserve: bool = False
    kv_events: Mapping[str, Any] | None = None
    stream_interval: int = 1
    shutdown_timeout: float = 30.0
    watchdog_timeout: float = 120.0
    max_logprobs: int = 20
    profile_dir: str | None = None
    otlp_traces_endpoint: str | None = None
    log_requests: bool = False
    max_log_len: int = 256
    log_json: bool = False
    stats_interval: float = 10.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value!r} is out of range [0, 65535]")
        if self.port is None and self.grpc_port is None:
            raise ConfigError("port and grpc_port are both off; give one of them")
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval={self.stream_interval!r} must be at least 1")
        if not 0 <= self.max_logprobs <= 20:
            raise ConfigError(f"max_logprobs={self.max_logprobs!r} is out of range [0, 20]")
        for name in ("shutdown_timeout", "stats_interval", "max_log_len"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be 0 or more")
        if not self.watchdog_timeout > 0:
            raise ConfigError(f"watchdog_timeout={self.watchdog_timeout!r} must be above 0 seconds")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together; give both")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs needs ssl_keyfile and ssl_certfile")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice needs tool_call_parser; give its name")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
