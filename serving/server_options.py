"""Flags of `jaxinfer serve`, as tables: one for each field of ServerConfig and of Limits, the engine's,
and the names that people know from other servers.

A flag that stands for something the engine does not have is taken at the one value that changes
nothing and refused at any other. Called by commands/serve.py and server_config.py; imports no server
library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NewType

import typer

from jaxinfer.config import FIXED, EngineConfig
from jaxinfer.errors import ConfigError
from serving.config import Limits, ServerConfig
from serving.options import ENGINE, READERS, Flag
from serving.parsers import REASONING_PARSERS, TOOL_PARSERS

# A server compiles all before it says that it is ready.
ENGINE_DEFAULTS: Mapping[str, Any] = {"warmup": "eager"}
GRPC_PORT = 50051  # of the command; a ServerConfig made in Python has only the ports it names
OFF = "none"  # typed as a port: no such port
Port = NewType("Port", int)


def read_port(value: str | int) -> int | str:
    """A port number, or OFF."""
    if value == OFF:
        return OFF
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a port number, nor {OFF!r}") from None


def read_object(text: str) -> dict[str, Any]:
    """A JSON object that was typed."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r:.200} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r:.200} is not a JSON object, like {{...}}")
    return value


def _with_defaults(kind: Any, flags: tuple[Flag, ...], **other: Any) -> tuple[Flag, ...]:
    """The flags, whose help tells the default where it is a number or a word."""
    defaults = {f.name: f.default for f in fields(kind)} | other
    shown = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name, value in defaults.items()
        if isinstance(value, (int, float, str)) and not isinstance(value, bool)
    }
    return tuple(
        replace(f, help=f"{f.help}  (default: {shown[f.field]})") if f.field in shown else f
        for f in flags
    )


READERS[Port] = {"parser": read_port, "metavar": "PORT"}
READERS[dict] = {"parser": read_object, "metavar": "JSON"}

_SERVER = (
    Flag(
        "model",
        str,
        "a directory, a .gguf file, a Hub id or the alias smollm2-135m; or give it first",
        aliases=("--model-path", "-m"),
    ),
    Flag(
        "served_model_name",
        list[str],
        "name that requests may use; repeatable, the first is reported",
    ),
    Flag("chat_template", str, "file that replaces the chat template, or the Jinja text itself"),
    Flag("host", str, "address of both ports; the default is for this machine only"),
    Flag("port", Port, f"HTTP port, 0 for any free one, {OFF} for no HTTP"),
    Flag(
        "grpc_port",
        Port,
        f"gRPC port, 0 for any free one, {OFF} for no gRPC (default: {GRPC_PORT})",
    ),
    Flag(
        "api_keys",
        list[str],
        "bearer token that clients must show; repeatable; or JAXINFER_API_KEY",
        "--api-key",
    ),
    Flag(
        "admin_api_keys",
        list[str],
        "bearer token for the admin routes, which are off without; repeatable; or "
        "JAXINFER_ADMIN_API_KEY",
        "--admin-api-key",
    ),
    Flag("ssl_keyfile", str, "private key (PEM): TLS on both ports"),
    Flag("ssl_certfile", str, "certificate chain (PEM)"),
    Flag("ssl_ca_certs", str, "clients must show a certificate that this authority signed (PEM)"),
    Flag("tool_call_parser", str, f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}"),
    Flag(
        "reasoning_parser",
        str,
        f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}",
    ),
    Flag(
        "enable_auto_tool_choice",
        bool,
        "let requests say tool_choice=auto",
        "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
    ),
    Flag("kserve", bool, "also serve inference.GRPCInferenceService", "--kserve/--no-kserve"),
    Flag("kv_events", dict, "KV events: vLLM's JSON object", "--kv-events-config"),
    Flag("stream_interval", int, "most tokens that are held back to be sent together"),
    Flag("shutdown_timeout", float, "seconds that running requests get after SIGTERM"),
    Flag("watchdog_timeout", float, "seconds without an engine round before health fails"),
    Flag("max_logprobs", int, "most top log-probabilities that a request may ask for"),
    Flag("profile_dir", str, "where profiles are written; without it profiling is off"),
    Flag("otlp_traces_endpoint", str, "where OpenTelemetry spans are sent"),
    Flag(
        "log_requests",
        bool,
        "log prompts",
        "--enable-log-requests/--no-enable-log-requests",
        aliases=("--log-requests/--no-log-requests", " /--disable-log-requests"),
    ),
    Flag("max_log_len", int, "characters of a logged prompt"),
    Flag("log_json", bool, "log JSON lines", "--log-json/--no-log-json"),
    Flag("stats_interval", float, "seconds between log lines with the load; 0 is none"),
)

_LIMITS = (
    Flag("body_bytes", int, "bytes of an HTTP body or a gRPC message", "--max-body-bytes"),
    Flag("arriving_bytes", int, "bytes of all bodies being read", "--max-arriving-bytes"),
    Flag("json_depth", int, "nesting of a JSON body", "--max-json-depth"),
    Flag("prompts", int, "prompts in one request", "--max-prompts-per-request"),
    Flag("outputs", int, "prompts times n of one request", "--max-outputs-per-request"),
    Flag("stop_strings", int, "stop strings of one request", "--max-stop-strings"),
    Flag("stop_chars", int, "characters of a stop string", "--max-stop-chars"),
    Flag("request_id_chars", int, "characters of a client's request id", "--max-request-id-chars"),
    Flag(
        "queued_requests",
        int,
        "waiting requests past which new ones are refused",
        "--max-num-queued-reqs",
        aliases=("--max-queued-requests",),
    ),
    Flag("queued_tokens", int, "the same in prompt tokens", "--max-num-queued-tokens"),
    Flag("idle_seconds", float, "an unread stream is aborted after this", "--stream-idle-timeout"),
    Flag("connections", int, "HTTP connections at once", "--max-connections"),
)

SERVER, LIMITS = _with_defaults(ServerConfig, _SERVER), _with_defaults(Limits, _LIMITS)
# There are no sampling flags here, so --seed is free for the engine's.
_ENGINE = tuple(
    replace(f, name="--seed", aliases=("--engine-seed", *f.aliases)) if f.field == "seed" else f
    for f in ENGINE
)
SERVE_ENGINE = _with_defaults(EngineConfig, _ENGINE, **ENGINE_DEFAULTS)

# Names for what other flags say.
COMPATIBLE = (
    Flag(
        "disable_log_stats",
        bool,
        "the same as --stats-interval 0",
        "--disable-log-stats/--no-disable-log-stats",
    ),
    Flag(
        "skip_server_warmup",
        bool,
        "the same as --warmup lazy",
        "--skip-server-warmup/--no-skip-server-warmup",
    ),
)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A known name with one value that is right here. None: any value is refused."""

    flag: Flag
    value: Any
    why: str

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError unless `value` is the one; `name` is the spelling that was used."""
        if isinstance(value, str) and value.lower() == OFF:
            value = None
        if isinstance(value, bool) == isinstance(self.value, bool) and value == self.value:
            return
        only = "" if self.value is None else f", only {_shown(self.value)}"
        raise ConfigError(f"{name}={_shown(value):.100} is not supported yet{only}: {self.why}")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fixed(field: str, kind: Any, value: Any, why: str, *aliases: str) -> Fixed:
    name = "--" + field.replace("_", "-")
    spelling = f"{name}/--no-{name[2:]}" if kind is bool else name
    only = "not supported yet" if value is None else f"only {_shown(value)}"
    return Fixed(Flag(field, kind, f"{only}: {why}", spelling, aliases=aliases), value, why)


def _known(field: str, kind: Any, *aliases: str) -> Fixed:
    return _fixed(field, kind, *FIXED[field], *aliases)


_NO_LORA = "there are no adapters"
_NO_DRAFTS = "there is no speculative decoding"
_FIXED = (
    _known("tensor_parallel_size", int, "--tp", "--tp-size", "-tp"),
    _known("pipeline_parallel_size", int, "--pp", "--pp-size", "-pp"),
    _fixed(
        "data_parallel_size", int, 1, "a server runs one engine; put a gateway before several",
        "--dp", "--dp-size", "-dp",
    ),
    _fixed("enable_expert_parallel", bool, False, "a model runs on one device"),
    _known("trust_remote_code", bool),
    _known("enforce_eager", bool),
    _known("enable_chunked_prefill", bool),
    _known("swap_space", float),
    _known("quantization", str),
    _known("load_format", str),
    _fixed("tokenizer", str, None, "the model's own is used", "--tokenizer-path"),
    _fixed("tokenizer_mode", str, "auto", "the model's own tokenizer is used"),
    _fixed("kv_cache_dtype", str, "auto", "the cache holds the compute dtype"),
    _known("mamba_ssm_cache_dtype", str, "--mamba-ssm-dtype"),
    _known("mamba_cache_dtype", str),
    _fixed("kv_cache_memory_bytes", str, None, "give --memory-fraction or --num-pages"),
    _fixed("prefix_caching_hash_algo", str, "sha256", "prefixes are compared token by token"),
    _fixed("logprobs_mode", str, "raw_logprobs", "temperature and cuts do not change them"),
    _fixed("speculative_config", str, None, _NO_DRAFTS),
    _fixed("spec_method", str, None, _NO_DRAFTS),
    _fixed("spec_model", str, None, _NO_DRAFTS),
    _fixed("spec_tokens", int, 0, _NO_DRAFTS),
    _fixed("enable_lora", bool, False, _NO_LORA),
    _fixed("max_loras", int, 1, _NO_LORA),
    _fixed("max_lora_rank", int, 16, _NO_LORA),
    _fixed("lora_modules", list[str], None, _NO_LORA),
    _fixed("structured_outputs_config", str, None, "there is no constrained decoding"),
    _fixed("trust_request_chat_template", bool, False, "requests cannot bring a template"),
    _fixed("enable_tokenizer_info_endpoint", bool, True, "/tokenizer_info is always there"),
)  # fmt: skip
FIXED_FLAGS: Mapping[str, Fixed] = {row.flag.field: row for row in _FIXED}

GROUPS: dict[str, tuple[Flag, ...]] = {
    "server": SERVER,
    "limits": LIMITS,
    "engine": SERVE_ENGINE,
    "compatible": COMPATIBLE,
    "fixed": tuple(row.flag for row in _FIXED),
}
