"""`jaxinfer bench serve` from the command line: exit codes, files, what is and is not written."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from serving.cli import main
from tests.serving.bench.fakes import FakeOpenAI, answers

SMALL = ["--num-prompts", "4", "--input-len", "5", "--output-len", "6"]


@pytest.fixture(scope="module")
def running() -> Iterator[FakeOpenAI]:
    with FakeOpenAI().serving() as server:
        yield server


@pytest.fixture
def server(running: FakeOpenAI) -> FakeOpenAI:
    running.reset()
    return running


def bench(server: FakeOpenAI, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, *SMALL, *arguments])


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def half_fails(server: FakeOpenAI) -> None:
    good = answers()

    def script(body: dict[str, Any]) -> Response:
        if len(server.bodies) % 2:
            return good(body)
        return JSONResponse({"error": {"message": "[red]no room[/red]"}}, 429)

    server.script = script


def test_json_and_files(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.script = answers(size=2, cached=5)
    (tmp_path / "results").mkdir()
    arguments = ["--output", str(tmp_path / "results"), "--plot", str(tmp_path / "figure.png")]
    arguments += ["--goodput", "ttft:30000", "e2el:60000", "--api-key", "hidden", "--json"]
    assert bench(server, *arguments) == 0
    out, err = capsys.readouterr()
    report = strict(out)
    assert err == "" and report.pop("check") == "ok"
    results = report["results"]
    assert (results["succeeded"], results["completion_tokens"]) == (4, 24)
    assert (results["cached_share"], results["tokens_per_message"]) == (0.5, 2)
    assert results["goodput"]["slo_ms"] == {"ttft": 30000, "e2el": 60000}
    assert results["goodput"]["met"] == 4
    (file,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{4}-serve\.json", file.name)
    text = file.read_text("utf-8")
    written = strict(text)
    assert "hidden" not in text and "hidden" not in out
    requests = written.pop("requests")
    assert written == report and len(requests) == 4
    for row in requests:
        assert row["completion_tokens"] == 6 and row["messages"] == 3 and row["error"] is None
        assert row["scheduled"] == 0 <= row["sent"] < row["sent"] + row["ttft"] <= row["end"]
    assert written["server"] == {"model": "fake", "vocab_size": 50, "version": "1.2.3"}
    assert written["settings"]["data"]["output_len"] == 6 and written["settings"]["target"]
    assert written["machine"]["cores"] and written["versions"]["httpx"] and written["date"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_tables(server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--goodput", "ttft:30000,e2el:60000") == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("TTFT", "TPOT", "ITL", "E2EL", "p99", "4 of 4", "output tokens", "goodput"):
        assert part in out
    assert "100.0 %" in out
    server.script = answers(counted=False)
    assert bench(server) == 0
    assert "not told by the server" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
def test_errors_write_nothing_unless_allowed(
    server: FakeOpenAI, capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    half_fails(server)
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--output", str(output), "--plot", str(plot), *(["--json"] if as_json else [])]
    assert bench(server, *arguments) == 1
    out, err = capsys.readouterr()
    assert not output.exists() and not plot.exists()
    assert "2 of 4 requests failed" in err and "[red]no room[/red]" in err
    if as_json:
        found = strict(out)
        assert found.keys() == {"check", "errors"} and found["errors"] == {"http 429": 2}
    else:
        assert out == ""
    assert bench(server, *arguments, "--allow-errors") == 1
    out, err = capsys.readouterr()
    assert "2 of 4 requests failed" in err and "--allow-errors" not in err
    assert (strict(out)["results"]["succeeded"] == 2) if as_json else ("2 of 4" in out)
    written = strict(output.read_text("utf-8"))
    assert written["results"]["errors"] == {"http 429": 2} and plot.exists()
    assert [row["error"] for row in written["requests"]].count("http 429") == 2


def test_the_seed_decides_what_is_sent(server: FakeOpenAI) -> None:
    sent = []
    for seed in ("1", "1", "2"):
        server.bodies.clear()
        assert bench(server, "--seed", seed, "--range-ratio", "0.5") == 0
        sent.append(sorted((b["prompt"], b["max_tokens"]) for b in server.bodies))
    assert sent[0] == sent[1] != sent[2]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--backend", "carrier-pigeon"], ["backend='carrier-pigeon'", "grpc"]),
        (["--goodput", "ttft:x"], ["ttft:x", "tpot"]),
        (["ttft:5"], ["ttft:5", "--goodput"]),
        (["--header", "nonsense"], ["--header", "KEY=VALUE"]),
        (["--extra-body", "[1]"], ["--extra-body", "object"]),
        (["--extra-body", "{"], ["--extra-body", "JSON"]),
        (["--request-rate", "fast"], ["fast", "not a number"]),
        (["--output", "{tmp}/none/x.json"], ["output", "none"]),
        (["--plot", "{tmp}/x.bmp"], ["plot", ".png"]),
        (["--plot", "{tmp}/none/x.png"], ["plot", "none"]),
    ],
)
def test_wrong_options_send_nothing(
    server: FakeOpenAI,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    fragments: list[str],
) -> None:
    assert bench(server, *(a.replace("{tmp}", str(tmp_path)) for a in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxinfer: ") and err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err
    assert not server.bodies


def test_a_missing_matplotlib_is_named_before_anything_is_sent(
    server: FakeOpenAI,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *a: None if name == "matplotlib" else find(name, *a),
    )
    assert bench(server, "--plot", str(tmp_path / "x.png")) == 2
    assert "pip install 'jaxinfer[demo]'" in capsys.readouterr().err and not server.bodies
