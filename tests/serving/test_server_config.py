"""--config and --print-config: YAML keys are the flags, mistakes are named, and what is printed reads back."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import ConfigError
from serving.cli import main
from serving.config import ServerConfig
from serving.server_config import HIDDEN, server_config, to_yaml
from serving.server_options import FIXED_FLAGS, GROUPS

Typed = dict[str, dict[str, Any]]


def layer(**groups: dict[str, Any]) -> Typed:
    return {group: groups.get(group, {}) for group in GROUPS}


def read(folder: Path, text: str, model: str | None = "m", **groups: Any) -> ServerConfig:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return server_config(model, layer(**groups), file, {})


def test_keys_are_flags(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
        model: somewhere
        port: none
        grpc_port: 5000
        served-model-name: [a, b]
        api-key: k
        max-model-len: 64
        gpu_memory_utilization: 0.5
        disable-radix-cache: true
        no-overlap: false
        shutdown-timeout: 1e1
        kv-events-config: {publisher: "null"}
        max-num-queued-reqs: 3
        tensor-parallel-size: 1
        trust-remote-code: false
        skip-server-warmup: true
        """,
        model=None,
    )
    assert (config.model, config.port, config.grpc_port) == ("somewhere", None, 5000)
    assert (config.served_model_name, config.api_keys) == (("a", "b"), ("k",))
    assert config.kv_events == {"publisher": "null"} and config.shutdown_timeout == 10.0
    assert config.limits.queued_requests == 3
    engine = {
        "max_model_len": 64,
        "memory_fraction": 0.5,
        "enable_prefix_caching": False,
        "overlap": True,
        "warmup": "lazy",
    }
    assert {name: config.engine[name] for name in engine} == engine


def test_the_command_line_wins_over_the_file_and_that_over_the_environment(tmp_path: Path) -> None:
    text = "model: f\nport: 1\npage-size: 32\napi-key: [f]\nstats-interval: 5\nlog-json: true\n"
    typed = {
        "server": {"port": 2},
        "engine": {"page_size": 64},
        "compatible": {"disable_log_stats": True},
    }
    config = read(tmp_path, text, "m", **typed)
    assert (config.model, config.port, config.engine["page_size"]) == ("m", 2, 64)
    assert (config.stats_interval, config.log_json) == (0.0, True)
    file = tmp_path / "config.yaml"
    keys = {"JAXINFER_API_KEY": "e", "JAXINFER_ADMIN_API_KEY": "e"}
    config = server_config(None, layer(), file, keys)
    assert (config.api_keys, config.admin_api_keys) == (("f",), ("e",))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing\n") == server_config("m", layer(), None, {})


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("max-model-length: 5", ["max-model-length is unknown", "max-model-len?"]),
        ("max_num_seq: 5", ["max_num_seq is unknown", "max-num-seqs?"]),
        ("zzz: 5", ["zzz is unknown", "--help"]),
        ("config: other.yaml", ["config is unknown"]),
        ("7: 5", ["7 is unknown"]),
        ("port: eight", ["port='eight'", "port number"]),
        ("port: 1.5", ["port=1.5"]),
        ("port:", ["port=None"]),
        ("page-size: yes", ["page-size=True", "an integer"]),
        ("page-size: '16'", ["page-size='16'", "an integer"]),
        ("shutdown-timeout: soon", ["shutdown-timeout='soon'", "a number"]),
        ("kserve: 1", ["kserve=1", "true or false"]),
        ("host: 1", ["host=1", "a text"]),
        ("api-key: 12345", ["api-key=12345", "a text or a list of texts"]),
        ("api-key: [a, 1]", ["api-key=['a', 1]", "a text or a list of texts"]),
        ("kv-events-config: x", ["kv-events-config='x'", "a mapping"]),
        ("port: 1\nport: 2", ["port is there twice"]),
        ("page-size: 16\nblock-size: 32", ["page-size and block-size", "one option"]),
        ("max-num-seqs: 0", ["max_num_seqs=0"]),
        ("max-json-depth: 0", ["--max-json-depth=0", "above 0"]),
        ("max-queued-requests: -1", ["--max-num-queued-reqs=-1", "above 0"]),
        ("stream-idle-timeout: .nan", ["--stream-idle-timeout=nan", "above 0"]),
        ("tp: 2", ["tp=2", "not supported"]),
        ("trust-remote-code: true", ["trust-remote-code=true", "not supported"]),
        ("speculative-config: {method: ngram}", ["speculative-config", "not supported"]),
        ("disable-log-stats: true\nstats-interval: 3", ["--stats-interval=3", "give one"]),
        ("- port", ["a mapping of flag names"]),
        ("port: [", ["cannot be read"]),
        ("a: !!python/object:os.system {}", ["cannot be read"]),
        (f"api-key: '{HIDDEN}'", ["--api-key", "--print-config"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml"):
        server_config("m", layer(), tmp_path / "none.yaml", {})


# --- round trip -------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20) | st.text(
    "\r\n\t\x85\u2028 {}#:-'\"%&*!|>~n", min_size=1, max_size=20
)
ports = st.integers(0, 65535)
seconds = st.floats(0.0, 1e6) | st.just(float("inf"))
counts = st.integers(1, 1 << 40)
fields: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "server": {
        "served_model_name": st.lists(texts, min_size=1, max_size=3),
        "chat_template": texts.map(lambda t: t + "{{ x }}"),
        "host": texts,
        "port": ports,
        "grpc_port": ports,
        "tool_call_parser": st.sampled_from(["hermes", "mistral"]),
        "reasoning_parser": st.sampled_from(["qwen3", "deepseek_r1"]),
        "kserve": st.booleans(),
        "kv_events": st.dictionaries(texts, st.none() | st.booleans() | counts | texts, max_size=3),
        "stream_interval": counts,
        "shutdown_timeout": seconds,
        "watchdog_timeout": st.floats(1e-3, 1e6),
        "max_logprobs": st.integers(0, 20),
        "profile_dir": texts,
        "otlp_traces_endpoint": texts,
        "log_requests": st.booleans(),
        "max_log_len": st.integers(0, 1 << 40),
        "log_json": st.booleans(),
        "stats_interval": seconds,
    },
    "limits": {
        flag.field: counts if flag.kind is int else st.floats(1e-3, 1e6)
        for flag in GROUPS["limits"]
    },
    "engine": {
        "dtype": st.sampled_from(["auto", "float16"]),
        "max_model_len": st.integers(2, 1000),
        "page_size": st.sampled_from([1, 16, 1024]),
        "num_pages": st.integers(2, 1000),
        "memory_fraction": st.floats(0.0, 1.0, exclude_min=True),
        "policy": st.sampled_from(["fcfs", "lpm"]),
        "enable_prefix_caching": st.booleans(),
        "overlap": st.booleans(),
        "warmup": st.sampled_from(["lazy", "eager"]),
        "seed": st.integers(0, 2**63 - 1),
        "compile_cache": st.just("") | texts,
    },
}
wishes = st.fixed_dictionaries(
    {group: st.fixed_dictionaries({}, optional=table) for group, table in fields.items()}
)


@settings(max_examples=100, deadline=None)
@given(model=texts, wish=wishes, off=st.sampled_from([None, "port", "grpc_port"]))
def test_what_is_printed_reads_back(model: str, wish: Typed, off: str | None) -> None:
    if off is not None:
        wish["server"].pop("port" if off == "grpc_port" else "grpc_port", None)
        wish["server"][off] = "none"
    config = server_config(model, layer(**wish), None, {})
    with tempfile.TemporaryDirectory() as folder:
        assert read(Path(folder), to_yaml(config), None) == config


def test_print_config_prints_all_and_hides_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["serve", "m", "--api-key", "sesame", "--page-size", "32", "--print-config"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out
    values = yaml.safe_load(out)
    assert (values["api-key"], values["page-size"], values["port"]) == ([HIDDEN], 32, 8000)
    shown = {f.switches[0][0] for g in ("server", "limits", "engine") for f in GROUPS[g]}
    assert {f"--{key}" for key in values} <= shown
    with pytest.raises(ConfigError, match="--print-config hid"):
        read(tmp_path, out)
    values["api-key"] = "sesame"
    again = read(tmp_path, yaml.safe_dump(values), None)
    typed = layer(server={"api_keys": ["sesame"]}, engine={"page_size": 32})
    assert again == server_config("m", typed, None, {})


def test_all_fixed_names_may_stand_in_a_file(tmp_path: Path) -> None:
    """At their own values; None says that the key has no value that is right."""
    values = {row.flag.switches[0][0].removeprefix("--"): row.value for row in FIXED_FLAGS.values()}
    assert read(tmp_path, yaml.safe_dump(values)) == server_config("m", layer(), None, {})


def test_configurations_compare_by_value() -> None:
    one = server_config("m", layer(), None, {})
    assert one != dataclasses.replace(one, port=1)
