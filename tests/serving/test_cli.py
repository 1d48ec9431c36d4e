"""The commands end to end on small checkpoints: answers, strict JSON, and one clear line for errors."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.engine import Engine
from serving.cli import main
from serving.commands import doctor as doctor_module
from tests.checkpoints import EOS, VOCAB, byte_tokenizer

ENGINE = ["--max-num-batched-tokens", "64", "--max-num-seqs", "4"]
FORCED = list(b"The quick!")  # each byte once; CHAIN emits the rest after the first, then EOS


@pytest.fixture(scope="module")
def forced(chain: Callable[..., Path]) -> str:
    return str(chain(FORCED))


@pytest.fixture(scope="module")
def talker(chain: Callable[..., Path]) -> str:
    """Answers "hi": the chat template ends with a line break."""
    return str(chain([ord("\n"), ord("h"), ord("i")]))


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = main([*arguments, "--json"])
    out = capsys.readouterr().out
    assert code == 0, out
    return strict(out)


# --- generate -------------------------------------------------------------------------------------


def test_generate_text_is_the_text_alone(capsys: pytest.CaptureFixture[str], forced: str) -> None:
    code = main(["generate", "-m", forced, "-p", "T", "-p", "q", "--temperature", "0", *ENGINE])
    assert code == 0
    assert capsys.readouterr().out == "he quick!\nuick!\n"


def test_generate_text_may_be_empty(capsys: pytest.CaptureFixture[str], forced: str) -> None:
    arguments = ["generate", "-m", forced, "-p", "!", "--temperature", "0", *ENGINE]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "\n"
    assert main([*arguments, "--no-detokenize"]) == 0
    assert capsys.readouterr().out == f"[{EOS}]\n"


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_closed_pipe_is_quiet(flags: list[str]) -> None:
    code = "import sys; from serving.cli import main; sys.exit(main(['doctor', '--json']))"
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (1, "")


def test_generate_json(capsys: pytest.CaptureFixture[str], forced: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("k")
    outputs = answer(
        capsys,
        *("generate", "-m", forced, "-p", "T", "--prompt-file", str(file)),
        *("--prompt-token-ids", "113,117", "--temperature", "0", *ENGINE),
    )
    assert [o["prompt"] for o in outputs] == ["T", "k", None]
    assert [o["prompt_token_ids"] for o in outputs] == [[84], [107], [113, 117]]
    texts = [o["outputs"][0]["text"] for o in outputs]
    assert texts == ["he quick!", "!", "ick!"]
    first = outputs[0]["outputs"][0]
    assert first["token_ids"] == [*FORCED[1:], EOS]
    assert (first["finish_reason"], first["stop_reason"], first["index"]) == ("stop", None, 0)
    assert first["logprobs"] is None and outputs[0]["prompt_logprobs"] is None
    for output in outputs:
        timing = output["timing"]
        assert set(timing) == {"load_s", "ttft_s", "total_s", "tokens_per_s"}
        assert 0 < timing["ttft_s"] <= timing["total_s"]
        assert output["num_cached_tokens"] == 0 and output["error"] is None


def test_the_default_of_max_tokens_is_cut_to_the_room(
    capsys: pytest.CaptureFixture[str], tiny: Path
) -> None:
    """But what the user asks for is refused if it does not fit."""
    short = ["generate", "-m", str(tiny), *ENGINE, "--max-model-len", "64", "--ignore-eos"]
    outputs = answer(capsys, *short, "-p", "abc", "-p", "x" * 60)
    assert [len(o["outputs"][0]["token_ids"]) for o in outputs] == [61, 4]
    assert main([*short, "-p", "abc", "--max-tokens", "62", "--json"]) == 2
    assert "max_tokens=62" in capsys.readouterr().out
    assert main([*short, "-p", "x" * 64, "--json"]) == 2
    assert "leaves no room" in capsys.readouterr().out
    (long,) = answer(capsys, *("generate", "-m", str(tiny), *ENGINE, "--ignore-eos", "-p", "abc"))
    assert len(long["outputs"][0]["token_ids"]) == 128


def test_generate_logprobs(capsys: pytest.CaptureFixture[str], forced: str) -> None:
    """CHAIN: the follower has logit 20, all others 0."""
    (output,) = answer(
        capsys,
        *("generate", "-m", forced, "-p", "Tq", "--temperature", "0", "--max-tokens", "3"),
        *("--logprobs", "2", "--prompt-logprobs", "0", *ENGINE),
    )
    completion = output["outputs"][0]
    entries = completion["logprobs"]
    assert [e["token_id"] for e in entries] == completion["token_ids"] == list(b"uic")
    assert [e["token"] for e in entries] == ["u", "i", "c"]
    for entry in entries:
        assert entry["rank"] == 1 and entry["logprob"] == pytest.approx(0.0, abs=1e-5)
        assert len(entry["top"]) == 2
        assert entry["top"][0] == {k: v for k, v in entry.items() if k != "top"}
        assert entry["top"][1]["logprob"] == pytest.approx(-20.0, abs=0.05)
    none, second = output["prompt_logprobs"]
    assert none is None
    assert second["token_id"] == ord("q") and second["logprob"] == pytest.approx(-20.0, abs=0.05)
    assert second["top"] == []


def test_masked_tokens_stay_strict_json(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    """R-LPB-01: with one token allowed all others have probability 0."""
    (output,) = answer(
        capsys,
        *("generate", "-m", str(tiny), "-p", "a", "--max-tokens", "2", "--allowed-token-ids", "65"),
        *("--logprobs", "20", "--top-k", "1", *ENGINE),
    )
    completion = output["outputs"][0]
    assert completion["token_ids"] == [65, 65]
    for entry in completion["logprobs"]:
        assert entry["token_id"] == 65 and entry["logprob"] == pytest.approx(0.0, abs=1e-6)
        assert all(-9999.0 <= top["logprob"] <= 0.0 for top in entry["top"])
    assert completion["cumulative_logprob"] == pytest.approx(0.0, abs=1e-5)


def test_generate_chat_uses_the_template(capsys: pytest.CaptureFixture[str], talker: str) -> None:
    (output,) = answer(
        capsys,
        *("generate", "-m", talker, "-p", "yo", "--chat", "--system", "be", "--temperature", "0"),
        *ENGINE,
    )
    rendered = (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = byte_tokenizer().encode(rendered, add_special_tokens=False).ids
    assert output["prompt_token_ids"] == ids
    assert output["outputs"][0]["text"] == "hi"


def test_a_chat_template_file_is_used(
    capsys: pytest.CaptureFixture[str], talker: str, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("Q {{ messages[0]['content'] }}\n\n")
    (output,) = answer(
        capsys,
        *("generate", "-m", talker, "-p", "yo", "--chat", "--chat-template", str(file), *ENGINE),
    )
    assert bytes(output["prompt_token_ids"]) == b"Q yo\n"  # Jinja drops the last line break


# --- errors ---------------------------------------------------------------------------------------

SAMPLING_ERRORS = [
    (["--temperature", "-1"], ["temperature", "-1"]),
    (["--temperature", "nan"], ["temperature", "nan"]),
    (["--top-p", "1.5"], ["top_p", "1.5"]),
    (["--n", "0"], ["n=0"]),
    (["--n", "two"], ["--n", "two"]),
    (["--min-p", "much"], ["--min-p", "much"]),
    (["--best-of", "2"], ["best_of", "2"]),
    (["--max-tokens", "-1"], ["max_tokens", "-1"]),
    (["--logprobs", "21"], ["logprobs", "21"]),
    (["--logit-bias", "4"], ["--logit-bias", "'4'"]),
    (["--logit-bias", "4=101"], ["logit_bias[4]", "101"]),
    (["--stop-token-ids", "1,x"], ["--stop-token-ids", "'x'"]),
    (["--prompt-token-ids", "1,-"], ["--prompt-token-ids", "'-'"]),
    (["--page-size", "3"], ["page_size", "3"]),
    (["--dtype", "int8"], ["dtype", "int8"]),
    (["--policy", "best"], ["policy", "best"]),
    (["--system", "be nice"], ["--system", "be nice", "--chat"]),
    (["--prompt-file", "not/there"], ["--prompt-file", "not/there"]),
    (["--chat", "--chat-template", "not/there"], ["--chat-template", "not/there"]),
    (["--no-such-flag"], ["--no-such-flag"]),
    (["--stop-token-ids", str(VOCAB)], ["stop_token_ids", str(VOCAB)]),
    (["--prompt-token-ids", str(VOCAB)], ["prompt_token_ids[0]", str(VOCAB)]),
    (["--max-tokens", "512"], ["max_tokens=512", "512"]),
    (["--max-model-len", "100000"], ["max_model_len", "100000"]),
]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(("more", "fragments"), SAMPLING_ERRORS, ids=lambda v: " ".join(v))
def test_an_error_names_field_and_value(
    capsys: pytest.CaptureFixture[str],
    tiny: Path,
    more: list[str],
    fragments: list[str],
    as_json: bool,
) -> None:
    if more[0] == "--logprobs" and not as_json:
        fragments = [*fragments, "--json"]  # refused earlier: text output does not show them
    arguments = ["generate", "-m", str(tiny), "-p", "a", *ENGINE, *more]
    check_error(capsys, arguments, fragments, as_json)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["generate", "-m", "not/there", "-p", "a"], ["model", "not/there"]),
        (["generate", "-m", "x"], ["--prompt"]),
        (["generate", "-p", "a"], ["--model"]),
        (["no-such-command"], ["no-such-command"]),
        (["bench", "no-such-bench"], ["no-such-bench"]),
        (["convert", "not-there", "target"], ["not-there"]),
        (["convert", "{tiny}", "{tiny}/config.json/target"], ["config.json"]),
        (["convert", "x", "target", "--dtype", "int4"], ["dtype", "int4"]),
        (["bench", "offline", "-m", "x", "--batch-size", "0"], ["batch_size", "0"]),
        (["bench", "offline", "-m", "x", "--gen-len", "1"], ["gen_len", "1"]),
        (["chat", "-m", "not/there"], ["model", "not/there"]),
        (["generate", "-m", "{mute}", "-p", "a", "--chat", *ENGINE], ["--chat-template FILE"]),
        (["chat", "-m", "x", "--top-p", "7"], ["top_p", "7"]),
    ],
)
def test_errors_of_other_kinds(
    capsys: pytest.CaptureFixture[str],
    tiny: Path,
    tmp_path: Path,
    arguments: list[str],
    fragments: list[str],
    as_json: bool,
) -> None:
    arguments = [a.replace("{tiny}", str(tiny)) for a in arguments]
    mute = shutil.copytree(tiny, tmp_path / "mute")  # a model without a chat template
    (mute / "tokenizer_config.json").unlink()
    arguments = [a.replace("{mute}", str(mute)) for a in arguments]
    check_error(capsys, arguments, fragments, as_json)


def check_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fragments: list[str], as_json: bool
) -> None:
    code = main([*arguments, "--json"] if as_json else arguments)
    out, err = capsys.readouterr()
    assert code == 2
    if as_json:
        message = strict(out)["error"]["message"]
        assert err == ""
    else:
        assert out == "" and err.startswith("jaxinfer: ") and err.count("\n") == 1
        message = err
    for fragment in fragments:
        assert fragment in message


# --- the other commands -----------------------------------------------------------------------------


def test_chat_from_a_pipe(
    capsys: pytest.CaptureFixture[str], talker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("one\n\n/what\n/system s\ntwo\n/reset\nthree\n/exit\nno")
    )
    arguments = ["chat", "-m", talker, "--temperature", "0", *ENGINE]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == "hi\nhi\nhi\n", err
    assert "/what is unknown" in err


def test_chat_json_keeps_the_history(
    capsys: pytest.CaptureFixture[str], talker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["a", "b", "/reset", "a", "x" * 600, "b", ""]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    arguments = ["chat", "-m", talker, "--temperature", "0", "--max-tokens", "9", "--json", *ENGINE]
    assert main(arguments) == 1, "a question failed"
    first, second, again, too_long, after = [
        strict(x) for x in capsys.readouterr().out.splitlines()
    ]
    assert first["content"] == second["content"] == after["content"] == "hi"
    assert first["finish_reason"] == "stop" and first["completion_tokens"] == 3
    assert again["prompt_tokens"] == first["prompt_tokens"] < second["prompt_tokens"]
    assert "max_model_len" in too_long["error"]["message"]
    assert after["prompt_tokens"] == second["prompt_tokens"]  # the refused turn left no trace


def test_ctrl_c_stops_the_answer_only(
    capsys: pytest.CaptureFixture[str],
    chain: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = str(chain([ord("\n"), *b"abc"], cycle=True))
    generate, interrupted = Engine.generate, []

    async def interrupting(self: Engine, *args: Any, **options: Any) -> AsyncIterator[Any]:
        async for output in generate(self, *args, **options):
            yield output
            if len(output.outputs[0].token_ids) >= 3 and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt  # what asyncio.run makes of SIGINT, at a known place

    monkeypatch.setattr(Engine, "generate", interrupting)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    arguments = ["chat", "-m", endless, "--temperature", "0", "--max-tokens", "40", *ENGINE]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err.count("[stopped]") == 1
    assert out.endswith("abc\n" * 10 + "\n")  # the second answer is whole


def test_convert_and_load(capsys: pytest.CaptureFixture[str], forced: str, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    made = answer(capsys, "convert", forced, str(target))
    assert made["dtype"] == "float32" and made["path"] == str(target) and made["bytes"] > 0
    assert main(["convert", forced, str(target)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", forced, str(target), "--overwrite", "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    (output,) = answer(
        capsys, "generate", "-m", str(target), "-p", "T", "--temperature", "0", *ENGINE
    )
    assert output["outputs"][0]["text"] == "he quick!"


def test_bench_offline(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    report = answer(
        capsys,
        *("bench", "offline", "-m", str(tiny), "--batch-size", "1", "--batch-size", "3"),
        *("--prompt-len", "20", "--gen-len", "4", "--repeats", "1"),
        *("--max-num-batched-tokens", "64"),
    )
    assert report["check"] == "ok" and report["dtype"] == "float32"
    assert [r["batch_size"] for r in report["results"]] == [1, 3]
    for row in report["results"]:
        assert row["prefill_tok_s"] > 0 and row["decode_tok_s"] > 0 and row["ttft_s"] > 0
        assert row["compiles"] == 0 and row["steps"] >= 4


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    report = answer(capsys, "doctor")
    assert report["usable"] and report["problems"] == []
    assert report["packages"]["jax"] and report["devices"] and report["backend"] == "cpu"
    assert report["dtype"]["auto"] == "float32" and report["dtype"]["why"]
    assert report["kernels"]["platform"] == "cpu"
    assert set(report["extras"]) == {"cuda", "serve", "demo", "test"}
    assert report["environment"]["XLA_FLAGS"] == ""
    assert report["memory"]["free_bytes"] > 0
    assert main(["doctor"]) == 0
    assert "ready" in capsys.readouterr().out


def test_doctor_finds_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "PACKAGES", ("jax", "no-such-package"))
    assert main(["doctor", "--json"]) == 1
    report = strict(capsys.readouterr().out)
    assert not report["usable"] and "no-such-package" in report["problems"][0]


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys; from serving.cli import main; code = main(['--help']); "
        "print(*sorted({'jax', 'numpy', 'torch'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    assert "generate" in done.stdout and "doctor" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"
