"""Flags: every field of SamplingParams and EngineConfig has one, and what is typed arrives there."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import jaxinfer.llm
from jaxinfer.config import EngineConfig
from jaxinfer.inputs import Prompt
from jaxinfer.types import CompletionOutput, RequestOutput, SamplingParams
from serving.cli import main
from serving.commands import bench, chat, convert, crosscheck, doctor, generate, serve
from serving.options import ENGINE, SAMPLING, Flag

# Field -> what is typed, and what the field then holds: never the default.
SAMPLING_CASES: dict[str, tuple[list[str], Any]] = {
    "n": (["--n", "3"], 3),
    "best_of": (["--best-of", "1"], 1),
    "max_tokens": (["--max-tokens", "77"], 77),
    "min_tokens": (["--min-tokens", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "9"], 9),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.25"], 0.25),
    "logit_bias": (["--logit-bias", "4=-1.5", "--logit-bias", "7=2"], {4: -1.5, 7: 2.0}),
    "allowed_token_ids": (["--allowed-token-ids", "1, 2,3"], (1, 2, 3)),
    "ignore_eos": (["--ignore-eos"], True),
    "stop": (["--stop", "a", "--stop", "b c"], ("a", "b c")),
    "stop_token_ids": (["--stop-token-ids", "5"], (5,)),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "seed": (["--seed", "11"], 11),
    "logprobs": (["--logprobs", "0"], 0),
    "prompt_logprobs": (["--prompt-logprobs", "4"], 4),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "detokenize": (["--no-detokenize"], False),
}
ENGINE_CASES: dict[str, tuple[list[str], Any]] = {
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "max_model_len": (["--max-model-len", "99"], 99),
    "page_size": (["--page-size", "32"], 32),
    "num_pages": (["--num-pages", "40"], 40),
    "memory_fraction": (["--memory-fraction", "0.5"], 0.5),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "48"], 48),
    "max_partial_prefills": (["--max-partial-prefills", "2"], 2),
    "long_prefill_threshold": (["--long-prefill-threshold", "8"], 8),
    "policy": (["--policy", "lpm"], "lpm"),
    "enable_prefix_caching": (["--no-prefix-caching"], False),
    "num_states": (["--num-states", "12"], 12),
    "checkpoint_policy": (["--checkpoint-policy", "branch"], "branch"),
    "checkpoint_interval": (["--checkpoint-interval", "128"], 128),
    "max_states_per_path": (["--max-states-per-path", "0"], 0),
    "replay": (["--replay", "exact"], "exact"),
    "serial_weight": (["--serial-weight", "2.5"], 2.5),
    "prefill_deadline": (["--prefill-deadline", "0"], 0),
    "overlap": (["--no-overlap"], False),
    "warmup": (["--warmup", "eager"], "eager"),
    "seed": (["--engine-seed", "5"], 5),
    "compile_cache": (["--compile-cache", ""], ""),
    "strict_compile": (["--warmup", "eager", "--strict-compile"], True),
}


class RecordingLLM:
    """Takes the place of LLM: remembers what it was given."""

    options: dict[str, Any]
    params: SamplingParams

    def __init__(self, model: str, *, chat_template: str | None = None, **options: Any) -> None:
        type(self).options = options

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25)

    max_model_len = 1 + 128

    def prompt(self, prompt: str) -> Prompt:
        return Prompt(prompt, (1,))

    def generate(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
        (type(self).params,) = params
        outputs = [CompletionOutput(i, finish_reason="stop") for i in range(params[0].n)]
        return [RequestOutput("0", p.text, [1], outputs, finished=True) for p in prompts]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(jaxinfer.llm, "LLM", RecordingLLM)
    return main(["generate", "--model", "m", "--prompt", "p", "--json", *arguments])


@pytest.mark.parametrize(
    ("flags", "kind"),
    [(SAMPLING, SamplingParams), (ENGINE, EngineConfig)],
    ids=["sampling", "engine"],
)
def test_each_field_has_one_flag(flags: tuple[Flag, ...], kind: type) -> None:
    assert sorted(f.field for f in flags) == sorted(f.name for f in dataclasses.fields(kind))


def test_each_flag_has_a_case() -> None:
    assert SAMPLING_CASES.keys() == {f.field for f in SAMPLING}
    assert ENGINE_CASES.keys() == {f.field for f in ENGINE}


@pytest.mark.parametrize("field", SAMPLING_CASES)
def test_a_sampling_flag_arrives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    typed, value = SAMPLING_CASES[field]
    assert run(monkeypatch, *typed) == 0, capsys.readouterr().out
    assert getattr(RecordingLLM.params, field) == value
    if field != "best_of":  # the only value that is not refused is as good as the default
        assert getattr(SamplingParams(max_tokens=128), field) != value
    expected = dataclasses.replace(
        SamplingParams(temperature=0.25, max_tokens=128), **{field: value}
    )
    assert expected == RecordingLLM.params  # and nothing else changed
    assert RecordingLLM.options == {}


@pytest.mark.parametrize("field", ENGINE_CASES)
def test_an_engine_flag_arrives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    typed, value = ENGINE_CASES[field]
    assert run(monkeypatch, *typed) == 0, capsys.readouterr().out
    config = EngineConfig(**RecordingLLM.options)
    assert getattr(config, field) == value != getattr(EngineConfig(), field)
    assert SamplingParams(temperature=0.25, max_tokens=128) == RecordingLLM.params


@pytest.mark.parametrize("command", ["generate", "chat", "crosscheck", "bench offline", "serve"])
def test_help_names_every_engine_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    for flag in ENGINE:
        for name in (flag.spelling, *flag.aliases):
            assert name.strip(" /").split("/")[0] in out


@pytest.mark.parametrize("module", [generate, chat, convert, crosscheck, doctor, bench, serve])
def test_commands_read_all_their_parameters(module: Any) -> None:
    """No option is parsed and ignored: each parameter of a command is read in its body."""
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    name = {"bench": "offline"}.get(module.__name__.split(".")[-1], module.__name__.split(".")[-1])
    (command,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    read = {n.id for n in ast.walk(command) if isinstance(n, ast.Name)}
    for argument in (*command.args.args, *command.args.kwonlyargs):
        assert argument.arg in read


def test_the_answer_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--n", "2") == 0
    (item,) = json.loads(capsys.readouterr().out)
    assert [o["index"] for o in item["outputs"]] == [0, 1]
