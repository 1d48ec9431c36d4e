"""What `jaxinfer bench serve` can be told, as checked values, and the flags that set them.

A wrong value is refused before anything is sent. Never holds a secret in what is written: `public`
leaves keys out. Called by commands/bench.py; imports nothing heavy.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxinfer.errors import InvalidRequest, check_range
from serving.options import Flag

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "grpc": ""}
BASE_URLS = {"openai": "http://127.0.0.1:8000", "grpc": "grpc://127.0.0.1:50051"}
SCHEMES = {"openai": ("http", "https"), "grpc": ("grpc", "grpcs", "http", "https")}
MAX_COUNT = 10**7
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Which server is driven, and how.

    Attributes:
        base_url: scheme, host and port; None is the backend's usual port on this machine.
        endpoint: path of the request, for the HTTP backends.
        model: None asks the server for its first model.
        header: added to every request. api_key: sent as `Authorization: Bearer`.
        timeout: seconds that one request may take.
        extra_body: fields that are added to an HTTP request's body.
    """

    base_url: str | None = None
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    header: dict[str, str] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = False
    continuous_usage_stats: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise InvalidRequest(f"backend={self.backend!r}; choose from {', '.join(ENDPOINTS)}")
        check_range("timeout", self.timeout, 0.001, 1e6)
        check_range("temperature", self.temperature, 0, 100)
        if self.is_grpc:
            unused = ("endpoint", "extra_body", "continuous_usage_stats")
            _refuse_unused(self, unused, "with --backend grpc")
        schemes = SCHEMES[self._family]
        if "@" in self.url:
            raise InvalidRequest("base_url holds a user name; use --api-key or --header")
        if not _is_address(self.url, schemes):
            raise InvalidRequest(
                f"base_url={self.base_url!r}; write {schemes[0]}://HOST:PORT for {self.backend}"
            )
        if not _is_plain(self.api_key or ""):
            raise InvalidRequest("api_key has characters that no header may have")

    @property
    def is_grpc(self) -> bool:
        return self.backend == "grpc"

    @property
    def _family(self) -> str:
        return "grpc" if self.is_grpc else "openai"

    @property
    def url(self) -> str:
        """Where the server is; a path of just /v1, as OpenAI clients write it, is dropped."""
        url = self.base_url or BASE_URLS[self._family]
        if self.is_grpc and "://" not in url:
            url = f"grpc://{url}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return "/" + (self.endpoint or ENDPOINTS[self.backend]).lstrip("/")

    def public(self) -> dict[str, Any]:
        """Plain values for a result: of headers the names alone, of the key nothing."""
        secret = {"header": sorted(self.header), "base_url": self.url}
        return {k: v for k, v in (asdict(self) | secret).items() if k != "api_key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings:
    """When requests are sent.

    Attributes:
        request_rate: conversations a second; inf is all at once; None is a trace's own times, or inf.
        burstiness: shape of the gamma-distributed gaps: 1 is Poisson, inf is constant.
        max_concurrency: requests in flight at most. With request_rate inf this is a closed loop.
        think_time: seconds between an answer and the conversation's next request.
        time_scale: factor on the times of a trace; 0.5 replays it twice as fast.
        num_warmups: requests sent one after another before the measurement, not counted.
    """

    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    think_time: float = 0.0
    time_scale: float = 1.0
    num_warmups: int = 0

    def __post_init__(self) -> None:
        if self.request_rate is not None:
            check_range("request_rate", self.request_rate, 1e-6, math.inf)
        check_range("burstiness", self.burstiness, 1e-3, math.inf, "1 is Poisson, inf is constant")
        if self.max_concurrency is not None:
            check_range("max_concurrency", self.max_concurrency, 1, MAX_COUNT)
        check_range("think_time", self.think_time, 0, 1e6)
        check_range("time_scale", self.time_scale, 0, 1e6)
        check_range("num_warmups", self.num_warmups, 0, MAX_COUNT)
        if self.request_rate in (None, math.inf):
            _refuse_unused(self, ("burstiness",), "without a finite --request-rate")
        if self.request_rate is not None:
            _refuse_unused(self, ("time_scale",), "with --request-rate")

    def public(self) -> dict[str, Any]:
        """Plain values; strict JSON has no infinity, so it is written as text."""
        return {k: "inf" if v == math.inf else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What is sent. Lengths are in tokens for ids, in words (about one token each) for text.

    Attributes:
        dataset: JSONL of prompts, chats or a trace; None makes synthetic prompts.
        num_prompts: conversations; None is the whole file, or 100 synthetic ones.
        range_ratio: lengths are uniform in [len * (1 - r), len * (1 + r)].
        prefix_len: length of a prefix that all synthetic prompts share, on top of input_len.
        turns: requests of a conversation; each sends the history with the server's own answers.
        prompt_kind: of synthetic prompts and traces: "ids", "text", or "auto", which is ids over
            gRPC and text over HTTP.
        vocab_size: ids are drawn below it; None asks the server.
        trace_block_size: tokens that one of a trace's hash_ids stands for.
    """

    dataset: Path | None = None
    num_prompts: int | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    turns: int = 1
    prompt_kind: str = "auto"
    vocab_size: int | None = None
    trace_block_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("prefix_len", 0), ("turns", 1),
                          ("trace_block_size", 1)):  # fmt: skip
            check_range(name, getattr(self, name), low, MAX_COUNT)
        for name, low in (("num_prompts", 1), ("vocab_size", 2)):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), low, MAX_COUNT)
        check_range("range_ratio", self.range_ratio, 0, 1)
        if self.prompt_kind not in ("auto", "ids", "text"):
            raise InvalidRequest(f"prompt_kind={self.prompt_kind!r}; choose from auto, ids, text")
        if self.dataset is None:
            _refuse_unused(self, ("trace_block_size",), "without --dataset")
        else:
            _refuse_unused(self, ("input_len", "prefix_len", "range_ratio"), "with --dataset")

    def kind(self, backend: str) -> str:
        """ "ids" or "text"; InvalidRequest for what the backend cannot do."""
        kind = self.prompt_kind
        if kind == "auto":
            kind = "ids" if backend == "grpc" else "text"
        if kind == "ids" and backend == "openai-chat":
            raise InvalidRequest("prompt_kind='ids' cannot be sent to a chat endpoint; use text")
        if kind == "text":
            _refuse_unused(self, ("vocab_size",), "on text")
        if kind == "text" and backend == "grpc" and self.turns > 1:
            raise InvalidRequest(
                f"turns={self.turns} over grpc needs prompt_kind='ids': answers come as ids there"
            )
        return kind

    def public(self) -> dict[str, Any]:
        return asdict(self) | {"dataset": self.dataset and self.dataset.name}


def _refuse_unused(settings: Any, names: tuple[str, ...], when: str) -> None:
    """InvalidRequest for a value that was set and would change nothing."""
    for entry in fields(settings):
        default = entry.default if entry.default is not MISSING else entry.default_factory()  # type: ignore[operator]
        value = getattr(settings, entry.name)
        if entry.name in names and value != default:
            raise InvalidRequest(f"{entry.name}={value!r} has no effect {when}; leave it out")


def _is_address(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # half a bracket, or a port beyond 65535
        return False
    return parts.scheme in schemes and port != 0 and _HOST.fullmatch(parts.netloc) is not None


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _headers(name: str, items: list[str]) -> dict[str, str]:
    out = {}
    for item in items:
        key, mark, value = item.partition("=")
        if not mark or not re.fullmatch(r"[\w.-]+", key, re.ASCII) or not _is_plain(value):
            raise InvalidRequest(f"{name} has {key!r}; write KEY=VALUE")
        out[key] = value.strip()
    return out


def _body(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{name}={text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f'{name}={text!r}; write a JSON object like {{"top_k": 1}}')
    return value


TARGET = (
    Flag("base_url", str, "server (default: http://127.0.0.1:8000; grpc://127.0.0.1:50051)"),
    Flag("backend", str, f"protocol: {', '.join(ENDPOINTS)} (default: openai)"),
    Flag("endpoint", str, "path of the request (default: the backend's)"),
    Flag("model", str, "model to ask for (default: the server's first)"),
    Flag("header", list[str], "KEY=VALUE, sent with every request; repeatable", None, _headers),
    Flag("api_key", str, "sent as a bearer token"),
    Flag("timeout", float, "seconds that a request may take (default: 600)"),
    Flag("temperature", float, "0 is greedy (default: 0)"),
    Flag("ignore_eos", bool, "always generate --output-len tokens", "--ignore-eos/--heed-eos"),
    Flag(
        "continuous_usage_stats",
        bool,
        "ask an HTTP server for token counts in every chunk (default: yes)",
        "--continuous-usage-stats/--no-continuous-usage-stats",
    ),
    Flag("extra_body", str, "JSON object added to the body of HTTP requests", None, _body),
)

TRAFFIC = (
    Flag("request_rate", float, "arrivals a second; inf is all at once (default: inf)"),
    Flag("burstiness", float, "gamma shape of the gaps; 1: Poisson, inf: constant (default: 1)"),
    Flag("max_concurrency", int, "most requests in flight; with rate inf a closed loop"),
    Flag("think_time", float, "seconds between an answer and the next turn (default: 0)"),
    Flag("time_scale", float, "factor on the times of a trace (default: 1)"),
    Flag("num_warmups", int, "unmeasured requests sent first (default: 0)"),
)

DATA = (
    Flag("dataset", Path, "JSONL of prompts, chats or a trace (default: synthetic)"),
    Flag("num_prompts", int, "conversations (default: all of the file, or 100)"),
    Flag("input_len", int, "synthetic prompt: tokens, or words of text (default: 1024)"),
    Flag("output_len", int, "most tokens to generate (default: 128)"),
    Flag("range_ratio", float, "lengths vary by this share, 0 to 1 (default: 0)"),
    Flag("prefix_len", int, "length of a prefix shared by all prompts (default: 0)"),
    Flag("turns", int, "requests of a conversation (default: 1)"),
    Flag("prompt_kind", str, "ids, text or auto (ids over grpc) (default: auto)"),
    Flag("vocab_size", int, "ids are drawn below it (default: the server's)"),
    Flag("trace_block_size", int, "tokens of a trace's hash id (default: 512)"),
    Flag("seed", int, "seed of prompts and arrivals (default: 0)"),
)
