"""Flags of `bench serve`: each sets its field, wrong values and values without effect are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.errors import InvalidRequest
from serving.bench.settings import (
    DATA,
    TARGET,
    TRAFFIC,
    DataSettings,
    TargetSettings,
    TrafficSettings,
)

GROUPS = ((TARGET, TargetSettings), (TRAFFIC, TrafficSettings), (DATA, DataSettings))


@pytest.mark.parametrize(("flags", "settings"), GROUPS)
def test_every_field_has_a_flag(flags: Any, settings: Any) -> None:
    assert [f.field for f in flags] == [f.name for f in dataclasses.fields(settings)]


@pytest.mark.parametrize(
    ("settings", "options", "fragments"),
    [
        (TargetSettings, {"backend": "http"}, ["backend='http'", "openai-chat"]),
        (TargetSettings, {"base_url": "localhost:80"}, ["base_url", "http://HOST:PORT"]),
        (TargetSettings, {"base_url": "grpc://h:1"}, ["base_url"]),
        (TargetSettings, {"base_url": "http://h:99999"}, ["base_url"]),
        (TargetSettings, {"base_url": "http://h:x"}, ["base_url"]),
        (TargetSettings, {"base_url": "http://"}, ["base_url"]),
        (TargetSettings, {"base_url": "http://[::1"}, ["base_url"]),
        (TargetSettings, {"base_url": "http://me:secret@h"}, ["--api-key"]),
        (TargetSettings, {"timeout": 0}, ["timeout=0"]),
        (TargetSettings, {"timeout": math.nan}, ["timeout=nan"]),
        (TargetSettings, {"temperature": -1}, ["temperature=-1"]),
        (TargetSettings, {"api_key": "é"}, ["api_key"]),
        (TargetSettings, {"backend": "grpc", "endpoint": "/x"}, ["endpoint='/x'", "grpc"]),
        (TargetSettings, {"backend": "grpc", "extra_body": {"a": 1}}, ["extra_body"]),
        (TargetSettings, {"backend": "grpc", "continuous_usage_stats": False}, ["continuous"]),
        (TrafficSettings, {"request_rate": 0}, ["request_rate=0"]),
        (TrafficSettings, {"request_rate": math.nan}, ["request_rate=nan"]),
        (TrafficSettings, {"request_rate": 1, "burstiness": 0}, ["burstiness=0"]),
        (TrafficSettings, {"burstiness": 2}, ["burstiness=2", "--request-rate"]),
        (TrafficSettings, {"max_concurrency": 0}, ["max_concurrency=0"]),
        (TrafficSettings, {"think_time": -1}, ["think_time=-1"]),
        (TrafficSettings, {"request_rate": 1, "time_scale": 2}, ["time_scale=2"]),
        (TrafficSettings, {"num_warmups": -1}, ["num_warmups=-1"]),
        (DataSettings, {"num_prompts": 0}, ["num_prompts=0"]),
        (DataSettings, {"input_len": 0}, ["input_len=0"]),
        (DataSettings, {"output_len": 0}, ["output_len=0"]),
        (DataSettings, {"prefix_len": -1}, ["prefix_len=-1"]),
        (DataSettings, {"turns": 0}, ["turns=0"]),
        (DataSettings, {"range_ratio": 1.1}, ["range_ratio=1.1"]),
        (DataSettings, {"prompt_kind": "x"}, ["prompt_kind='x'", "ids"]),
        (DataSettings, {"vocab_size": 1}, ["vocab_size=1"]),
        (DataSettings, {"trace_block_size": 16}, ["trace_block_size=16", "--dataset"]),
        (DataSettings, {"dataset": Path("x"), "input_len": 7}, ["input_len=7", "--dataset"]),
        (DataSettings, {"dataset": Path("x"), "prefix_len": 7}, ["prefix_len=7"]),
        (DataSettings, {"dataset": Path("x"), "range_ratio": 0.5}, ["range_ratio=0.5"]),
    ],
)
def test_what_is_refused(settings: Any, options: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        settings(**options)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"base_url": "https://h.example/v1/"}, "https://h.example"),
        ({"base_url": "http://[::1]:80"}, "http://[::1]:80"),
        ({"backend": "grpc"}, "grpc://127.0.0.1:50051"),
        ({"backend": "grpc", "base_url": "h:1"}, "grpc://h:1"),
        ({"backend": "grpc", "base_url": "grpcs://h:1"}, "grpcs://h:1"),
    ],
)
def test_addresses(options: dict[str, Any], url: str) -> None:
    assert TargetSettings(**options).url == url


def test_paths() -> None:
    assert TargetSettings().path == "/v1/completions"
    assert TargetSettings(backend="openai-chat").path == "/v1/chat/completions"
    assert TargetSettings(endpoint="other").path == "/other"


def test_kinds_of_prompts() -> None:
    auto = DataSettings()
    assert [auto.kind(b) for b in ("openai", "openai-chat", "grpc")] == ["text", "text", "ids"]
    assert DataSettings(prompt_kind="ids").kind("openai") == "ids"
    with pytest.raises(InvalidRequest, match="chat"):
        DataSettings(prompt_kind="ids").kind("openai-chat")
    with pytest.raises(InvalidRequest, match="turns=2"):
        DataSettings(prompt_kind="text", turns=2).kind("grpc")


def test_what_is_written_holds_no_secret_and_is_strict_json() -> None:
    target = TargetSettings(api_key="key1", header={"X-Secret": "key2"})
    groups = [target, TrafficSettings(request_rate=math.inf), DataSettings(dataset=Path("/a/b"))]
    text = json.dumps([group.public() for group in groups], allow_nan=False)
    assert "key1" not in text and "key2" not in text and "X-Secret" in text
    assert '"request_rate": "inf"' in text and '"dataset": "b"' in text
    assert "key1" not in repr(target)
