"""`jaxinfer serve`: every field has a flag, what is typed or written arrives, nothing is ignored."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import serving
from jaxinfer.config import EngineConfig, engine_config
from serving.cli import main
from serving.config import Limits, ServerConfig
from serving.options import Flag
from serving.posture import posture
from serving.server_options import FIXED_FLAGS, GROUPS, LIMITS, SERVE_ENGINE, SERVER

TEMPLATE = "{{ messages[0].content }}"
# Field -> what is typed, and what the field then holds: never the default.
SERVER_CASES: dict[str, tuple[list[str], Any]] = {
    "model": (["--model", "m"], "m"),
    "served_model_name": (["--served-model-name", "a", "--served-model-name", "b"], ("a", "b")),
    "chat_template": (["--chat-template", TEMPLATE], TEMPLATE),
    "host": (["--host", "0.0.0.0"], "0.0.0.0"),
    "port": (["--port", "none", "--grpc-port", "1"], None),
    "grpc_port": (["--grpc-port", "0"], 0),
    "api_keys": (["--api-key", "a", "--api-key", "b"], ("a", "b")),
    "admin_api_keys": (["--admin-api-key", "a"], ("a",)),
    "ssl_keyfile": (["--ssl-keyfile", "k", "--ssl-certfile", "c"], "k"),
    "ssl_certfile": (["--ssl-keyfile", "k", "--ssl-certfile", "c"], "c"),
    "ssl_ca_certs": (
        ["--ssl-keyfile", "k", "--ssl-certfile", "c", "--ssl-ca-certs", "a"], "a"
    ),
    "tool_call_parser": (["--tool-call-parser", "hermes"], "hermes"),
    "reasoning_parser": (["--reasoning-parser", "qwen3"], "qwen3"),
    "enable_auto_tool_choice": (
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"], True
    ),
    "kserve": (["--kserve"], True),
    "kv_events": (["--kv-events-config", '{"publisher": "null"}'], {"publisher": "null"}),
    "stream_interval": (["--stream-interval", "4"], 4),
    "shutdown_timeout": (["--shutdown-timeout", "7"], 7.0),
    "watchdog_timeout": (["--watchdog-timeout", "7"], 7.0),
    "max_logprobs": (["--max-logprobs", "5"], 5),
    "profile_dir": (["--profile-dir", "d"], "d"),
    "otlp_traces_endpoint": (["--otlp-traces-endpoint", "http://c:4317"], "http://c:4317"),
    "log_requests": (["--enable-log-requests"], True),
    "max_log_len": (["--max-log-len", "9"], 9),
    "log_json": (["--log-json"], True),
    "stats_interval": (["--stats-interval", "3"], 3.0),
}  # fmt: skip
ALIASES = [  # two spellings of the same wish
    (["--model-path", "x"], ["-m", "x"]),
    (["--context-length", "64"], ["--max-model-len", "64"]),
    (["--block-size", "32"], ["--page-size", "32"]),
    (["--num-gpu-blocks-override", "9"], ["--num-pages", "9"]),
    (["--gpu-memory-utilization", "0.5"], ["--memory-fraction", "0.5"]),
    (["--device-memory-utilization", "0.5"], ["--memory-fraction", "0.5"]),
    (["--mem-fraction-static", "0.5"], ["--memory-fraction", "0.5"]),
    (["--max-running-requests", "3"], ["--max-num-seqs", "3"]),
    (["--chunked-prefill-size", "64"], ["--max-num-batched-tokens", "64"]),
    (["--max-num-partial-prefills", "2"], ["--max-partial-prefills", "2"]),
    (["--long-prefill-token-threshold", "5"], ["--long-prefill-threshold", "5"]),
    (["--scheduling-policy", "lpm"], ["--policy", "lpm"]),
    (["--schedule-policy", "lpm"], ["--policy", "lpm"]),
    (["--no-enable-prefix-caching"], ["--no-prefix-caching"]),
    (["--disable-radix-cache"], ["--no-prefix-caching"]),
    (["--max-mamba-cache-size", "9"], ["--num-states", "9"]),
    (["--mamba-cache-mode", "none"], ["--checkpoint-policy", "none"]),
    (["--mamba-block-size", "32"], ["--checkpoint-interval", "32"]),
    (["--mamba-track-interval", "32"], ["--checkpoint-interval", "32"]),
    (["--no-async-scheduling"], ["--no-overlap"]),
    (["--disable-overlap-schedule"], ["--no-overlap"]),
    (["--random-seed", "5"], ["--seed", "5"]),
    (["--engine-seed", "5"], ["--seed", "5"]),
    (["--max-queued-requests", "5"], ["--max-num-queued-reqs", "5"]),
    (["--log-requests"], ["--enable-log-requests"]),
    (["--disable-log-stats"], ["--stats-interval", "0"]),
    (["--skip-server-warmup"], ["--warmup", "lazy"]),
]
# Names that people bring along from other servers.
KNOWN = """
--host --port --grpc-port --served-model-name --tokenizer --tokenizer-path --dtype --max-model-len
--context-length --tensor-parallel-size --tp --tp-size --data-parallel-size --dp
--pipeline-parallel-size --gpu-memory-utilization --device-memory-utilization
--mem-fraction-static --kv-cache-memory-bytes --kv-cache-dtype --block-size --page-size
--max-num-seqs --max-running-requests --max-num-batched-tokens --chunked-prefill-size
--max-num-queued-reqs --max-num-queued-tokens --max-queued-requests --scheduling-policy
--schedule-policy --enable-prefix-caching --no-enable-prefix-caching --disable-radix-cache
--prefix-caching-hash-algo --enable-chunked-prefill --quantization --speculative-config
--spec-method --spec-model --spec-tokens --enable-lora --max-loras --max-lora-rank --lora-modules
--structured-outputs-config --reasoning-parser --tool-call-parser --enable-auto-tool-choice
--chat-template --trust-request-chat-template --kv-events-config --otlp-traces-endpoint
--enable-log-requests --max-log-len --disable-log-stats --max-logprobs --logprobs-mode --seed
--random-seed --api-key --ssl-keyfile --ssl-certfile --ssl-ca-certs --stream-interval
--shutdown-timeout --skip-server-warmup --model --model-path --mamba-cache-mode --mamba-block-size
--mamba-ssm-cache-dtype --mamba-cache-dtype --max-mamba-cache-size --mamba-ssm-dtype
"""


class Served:
    """Takes the place of serving.server: remembers the configuration that it was given."""

    config: ServerConfig

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("serving.server")
        module.run = self._run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "serving.server", module)
        for name in ("JAXINFER_API_KEY", "JAXINFER_ADMIN_API_KEY"):
            monkeypatch.delenv(name, raising=False)

    def _run(self, config: ServerConfig) -> int:
        self.config = config
        return 0

    def __call__(self, *arguments: str) -> ServerConfig:
        code = main(["serve", *arguments])
        assert code == 0
        return self.config


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def default(**changes: Any) -> ServerConfig:
    options = dataclasses.asdict(engine_config(warmup="eager"))
    engine = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(ServerConfig("m", engine=engine, grpc_port=50051), **changes)


@pytest.mark.parametrize(
    ("flags", "kind", "left_out"),
    [
        (SERVER, ServerConfig, {"engine", "limits"}),
        (LIMITS, Limits, set()),
        (SERVE_ENGINE, EngineConfig, set()),
    ],
    ids=["server", "limits", "engine"],
)
def test_each_field_has_one_flag(flags: tuple[Flag, ...], kind: type, left_out: set[str]) -> None:
    names = {f.name for f in dataclasses.fields(kind)} - left_out
    assert sorted(f.field for f in flags) == sorted(names)


def test_each_option_is_read_where_it_counts() -> None:
    """None is parsed and then ignored."""
    folder = Path(serving.__file__).parent
    sources = [p for p in folder.rglob("*.py") if p.name not in ("config.py", "server_config.py")]
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {flag.field for flag in (*SERVER, *LIMITS)} <= read


def test_each_name_belongs_to_one_flag() -> None:
    flags = [f for group in GROUPS.values() for f in group]
    names = [name for f in flags for side in f.switches for name in side]
    assert sorted(names) == sorted(set(names))
    assert not set(KNOWN.split()) - set(names)
    assert SERVER_CASES.keys() == {f.field for f in SERVER}


def test_without_flags_all_is_default(serve: Served) -> None:
    assert serve("m") == default()


@pytest.mark.parametrize("field", SERVER_CASES)
def test_a_server_flag_arrives(serve: Served, field: str) -> None:
    typed, value = SERVER_CASES[field]
    config = serve(*(typed if field == "model" else ["m", *typed]))
    assert getattr(config, field) == value
    if field != "model":
        assert getattr(default(), field) != value
    flags = {name.split("/")[0] for name in typed if name.startswith("--")}
    touched = {f.field for f in SERVER if f.switches[0][0] in flags}
    for other in dataclasses.fields(ServerConfig):
        if other.name not in touched:  # and nothing else changed
            assert getattr(config, other.name) == getattr(default(), other.name)


@pytest.mark.parametrize("flag", LIMITS, ids=lambda f: f.field)
def test_a_limit_arrives(serve: Served, flag: Flag) -> None:
    assert serve("m", flag.spelling, "7").limits == Limits(**{flag.field: 7})


@pytest.mark.parametrize(("one", "other"), ALIASES, ids=lambda v: v[0])
def test_aliases_say_the_same(serve: Served, one: list[str], other: list[str]) -> None:
    model = [] if one[0] == "--model-path" else ["m"]
    first, second = serve(*model, *one), serve(*model, *other)
    assert first == second != default()


@pytest.mark.parametrize("row", FIXED_FLAGS.values(), ids=lambda r: r.flag.field)
def test_a_name_without_a_feature_has_one_value(
    serve: Served, capsys: pytest.CaptureFixture[str], row: Any
) -> None:
    on, off = [*row.flag.switches[0], None], [*row.flag.switches[1], None]
    name = on[0]
    assert name is not None
    if row.flag.kind is bool:
        assert off[0] is not None
        right, wrong = ([name], [off[0]]) if row.value else ([off[0]], [name])
    else:
        right = [name, "none" if row.value is None else str(row.value)]
        wrong = [name, "7"]
    if row.flag.field != "lora_modules":  # a list, which is there or not
        assert serve("m", *right) == default()
    message = refused(capsys, "m", *wrong)
    assert name in message and "not supported" in message and row.why in message


def test_the_models_own_tokenizer_may_be_named(
    serve: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve("m", "--tokenizer", "m") == default()
    assert "--tokenizer=x" in refused(capsys, "m", "--tokenizer", "x")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["no model"]),
        (["m", "--watchdog-timeout", "0"], ["watchdog_timeout=0", "above 0"]),
        (["m", "--model", "n"], ["'m'", "'n'", "give one"]),
        (["m", "--port", "eight"], ["--port", "eight"]),
        (["m", "--port", "70000"], ["port=70000"]),
        (["m", "--port", "none", "--grpc-port", "none"], ["port", "grpc_port"]),
        (["m", "--page-size", "3"], ["page_size=3"]),
        (["m", "--mamba-cache-mode", "all"], ["checkpoint_policy='all'", "'align'"]),
        (["m", "--serial-weight", "0.5"], ["serial_weight=0.5", "[1, 1024]"]),
        (["m", "--max-body-bytes", "0"], ["--max-body-bytes=0"]),
        (["m", "--shutdown-timeout", "nan"], ["shutdown_timeout=nan"]),
        (["m", "--kv-events-config", "{"], ["--kv-events-config", "JSON"]),
        (["m", "--kv-events-config", "[]"], ["--kv-events-config", "object"]),
        (["m", "--chat-template", "not/there"], ["--chat-template", "not/there"]),
        (["m", "--api-key", ""], ["--api-key", "empty"]),
        (["m", "--api-key", "a b"], ["--api-key"]),
        (["m", "--context-length", "9", "--max-model-len", "8"], ["--context-length", "give one"]),
        (["m", "--disable-log-stats", "--stats-interval", "5"], ["--stats-interval=5", "one"]),
        (["m", "--skip-server-warmup", "--warmup", "eager"], ["--warmup", "eager"]),
        (["m", "--tool-call-parser", "hermes2"], ["tool_call_parser='hermes2'", "hermes"]),
        (["m", "--max-model-length", "5"], ["--max-model-length is unknown", "--max-model-len?"]),
        (["m", "--max_num_seqs", "5"], ["--max_num_seqs is unknown", "--max-num-seqs?"]),
        (["m", "--zzz"], ["--zzz is unknown", "jaxinfer serve --help"]),
        (["m", "--max-model-length=5"], ["--max-model-length is unknown", "--max-model-len?"]),
        (["m", "-tp", "2"], ["--tensor-parallel-size=2", "only 1"]),
    ],
    ids=lambda v: " ".join(v),
)  # fmt: skip
def test_what_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], serve: Served, arguments: list[str], fragments: list[str]
) -> None:
    message = refused(capsys, *arguments)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    ("command", "typed", "hint"),
    [
        (["generate"], "--max-token", "--max-tokens"),
        (["bench", "offline"], "--repeat", "--repeats"),
        (["chat"], "--sever", "--server"),
        ([], "--versoin", "--version"),
    ],
)
def test_every_command_knows_the_nearest_name(
    capsys: pytest.CaptureFixture[str], command: list[str], typed: str, hint: str
) -> None:
    assert main([*command, typed, "1"]) == 2
    assert f"{typed} is unknown; did you mean {hint}?" in capsys.readouterr().err


def test_a_template_file_is_read(
    serve: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    assert serve("m", "--chat-template", str(file)).chat_template == TEMPLATE
    file.write_text("no braces")
    assert "no Jinja template" in refused(capsys, "m", "--chat-template", str(file))


# --- keys and posture -------------------------------------------------------------------------------


def test_keys_may_come_from_the_environment(
    serve: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXINFER_API_KEY", "sesame")
    monkeypatch.setenv("JAXINFER_ADMIN_API_KEY", "")
    assert serve("m").api_keys == ("sesame",)
    assert serve("m").admin_api_keys == ()
    assert serve("m", "--api-key", "typed").api_keys == ("typed",)
    assert main(["doctor", "--json"]) == 0
    assert "sesame" not in capsys.readouterr().out


OPEN: list[tuple[dict[str, Any], str]] = [
    ({"api_keys": ()}, "no authentication"),
    ({"host": "0.0.0.0"}, "0.0.0.0"),
    ({"ssl_certfile": None, "ssl_keyfile": None}, "no TLS"),
    ({"admin_api_keys": ("k",)}, "admin routes"),
    ({"grpc_port": 0}, "FlushCache"),
    ({"log_requests": True}, "prompts are logged"),
    ({"otlp_traces_endpoint": "http://c"}, "http://c"),
    ({"kv_events": {"enable_kv_cache_events": True}}, "KV events"),
    ({"chat_template": TEMPLATE}, "chat template"),
]


@pytest.mark.parametrize(("change", "fragment"), OPEN, ids=lambda v: str(v)[:20])
def test_posture_names_what_is_open(change: dict[str, Any], fragment: str) -> None:
    closed = ServerConfig("m", api_keys=("k",), ssl_keyfile="k", ssl_certfile="c")
    assert posture(closed) == []
    (line,) = posture(dataclasses.replace(closed, **change))
    assert fragment in line


def test_importing_the_command_line_is_cheap() -> None:
    heavy = {"jax", "numpy", "grpc", "starlette", "uvicorn", "httpx", "yaml", "pydantic", "rich"}
    code = (
        "import sys; import serving.cli; "
        f"print(*sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
