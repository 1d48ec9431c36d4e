"""`jaxinfer chat --server`: the same conversation over HTTP and gRPC as with the model here, without JAX."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from jaxinfer.engine import Engine
from serving.cli import main
from serving.commands import chat
from serving.config import ServerConfig
from serving.speakers import ARCHIVE, Reply, unpack
from tests.serving.live import LiveServer

LINES = "a\n/system be\nb <|im_end|>\n/reset\nc\n"
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
FLAGS = [
    part for name, value in ENGINE.items() for part in (f"--{name.replace('_', '-')}", str(value))
]
GREEDY = ["--temperature", "0", "--max-tokens", "9"]


@pytest.fixture(scope="module")
def talker(chain: Callable[..., Path]) -> str:
    """Answers "hi €": the chat template ends with a line break. The euro sign is three tokens."""
    return str(chain([ord("\n"), *"hi €".encode()]))


@pytest.fixture(scope="module")
def talking(talker: str) -> Iterator[LiveServer]:
    engine = Engine(talker, progress=False, **ENGINE)
    live = LiveServer(ServerConfig(talker, ("hi",), port=0, grpc_port=0, api_keys=("k",)), engine)
    yield live
    live.close()
    engine.close()


def converse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(LINES))
    code = main(["chat", *GREEDY, *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_the_server_says_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    talking: LiveServer,
    talker: str,
    more: list[str],
) -> None:
    monkeypatch.setenv("JAXINFER_API_KEY", "k")
    here = converse(monkeypatch, capsys, "--model", talker, *FLAGS, *more)
    answers = [here, *(
        converse(monkeypatch, capsys, "--server", url, *more)
        for url in (talking.url, f"grpc://{talking.target}")
    )]  # fmt: skip
    if more:  # how much was cached depends on what came before
        turns = [[json.loads(line) for line in out.splitlines()] for out in answers]
        for conversation in turns:
            for turn in conversation:
                del turn["cached_tokens"]
        assert turns[0] == turns[1] == turns[2]
        assert [turn["content"] for turn in turns[0]] == ["hi €"] * 3
    else:
        assert answers == ["hi €\n" * 3] * 3


def test_an_error_ends_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], talking: LiveServer
) -> None:
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)
    for url in (talking.url, f"grpc://{talking.target}"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
        assert main(["chat", "--json", "--server", url, "--api-key", "wrong"]) == 1
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["error"]["type"] for line in lines] == ["ApiError"] * 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600 + "\na\n"))
    assert main(["chat", *GREEDY, "--json", "--server", talking.url, "--api-key", "k"]) == 1
    long, short = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "max_model_len" in long["error"]["message"] and short["content"] == "hi €"


@pytest.mark.parametrize("flags", [[], ["--system", "\udcff"]], ids=["line", "system"])
def test_bytes_that_are_no_text_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    talking: LiveServer,
    flags: list[str],
) -> None:
    for url in (talking.url, f"grpc://{talking.target}"):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\udcff\udcfe\n"))
        assert main(["chat", *GREEDY, *flags, "--server", url, "--api-key", "k"]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("jaxinfer: ") and "surrogate" in err


def test_no_jax_is_loaded(talking: LiveServer) -> None:
    code = (
        "import sys; from serving.cli import main; "
        "code = main(sys.argv[1:]); assert 'jax' not in sys.modules; sys.exit(code)"
    )
    for url in (talking.url, f"grpc://{talking.target}"):
        done = subprocess.run(
            [sys.executable, "-c", code, "chat", "--server", url, *GREEDY],
            input="a\n",
            capture_output=True,
            text=True,
            env=os.environ | {"JAXINFER_API_KEY": "k"},
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "hi €\n", "")


async def _thinking(*parts: Reply) -> AsyncGenerator[Reply]:
    for part in parts:
        yield part


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_reasoning_is_shown_beside_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    asked: list[Sequence[Mapping[str, str]]] = []

    class Thinker:
        def reply(self, messages: Sequence[Mapping[str, str]]) -> AsyncGenerator[Reply]:
            asked.append(list(messages))
            told = Reply(reasoning="hm, so")
            return _thinking(Reply(reasoning="hm"), told, Reply("yes", "stop", reasoning="hm, so"))

    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    chat._Conversation(Thinker(), as_json, "be").run()
    out, err = capsys.readouterr()
    if as_json:
        assert [json.loads(line)["reasoning"] for line in out.splitlines()] == ["hm, so"] * 2
    else:
        assert (out, err) == ("yes\nyes\n", "hm, so\n" * 2)
    assert [m["content"] for m in asked[1]] == ["be", "a", "yes", "b"]  # no thoughts


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ([], ["--model", "--server"]),
        (["--server", "127.0.0.1:80"], ["--server='127.0.0.1:80'", "http(s)://"]),
        (["--server", "http://x", "--page-size", "16"], ["--page-size", "server"]),
        (["--server", "http://x", "--chat-template", "{template}"], ["--chat-template"]),
        (["--server", "grpc://x", "--model", "m"], ["--model='m'"]),
        (["--model", "m", "--api-key", "k"], ["--api-key", "--server"]),
        (["--server", "http://x", "--api-key", "é"], ["--api-key", "header"]),
        (["--server", "http://x", "--top-p", "7"], ["top_p", "7"]),
    ],
    ids=lambda v: " ".join(v),
)
def test_what_does_not_go_together_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], fragments: list[str]
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ 1 }}")
    assert main(["chat", *(a.replace("{template}", str(template)) for a in arguments)]) == 2
    err = capsys.readouterr().err
    for fragment in fragments:
        assert fragment in err


def test_an_archive_cannot_write_elsewhere(
    talking: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    from serving.client_grpc import GrpcClient

    with GrpcClient(f"grpc://{talking.target}", "k") as client:
        data = io.BytesIO(client.tokenizer())
    names = ("../../escaped", str(tmp_path / "escaped"), "sub/tokenizer.json")
    with zipfile.ZipFile(data, "a") as archive:
        for name in names:
            archive.writestr(name, "x")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "deep" / "er"))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    tokenizer, _ = unpack(data.getvalue(), None)
    assert tokenizer.encode("a") and not set(names) & set(ARCHIVE)
    assert [p.name for p in tmp_path.rglob("*")] == ["deep", "er"]
