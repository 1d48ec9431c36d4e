"""The engine on the real demo model against transformers (recorded.npz, by record.py), and its contract there.

All 20 prompts run together, so that batching, chunked prefill and decoding are what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, load
from jaxinfer.crosscheck.compare import compare_greedy
from jaxinfer.loading import LoadedModel
from jaxinfer.types import Logprob, RequestOutput
from serving.cli import main
from tests.demo.prompts import MAX_MODEL_LEN, MAX_TOKENS, demo_prompts
from tests.engine.requests import Item, run

pytestmark = pytest.mark.demo

PROMPTS, TOP = 20, 20
MARGIN = 1e-3  # logits: where the reference's two best are closer, either may win
TOLERANCE = 2e-3  # nats
COMMON: dict[str, Any] = {"num_pages": 300, "progress": False}
TOGETHER: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": PROMPTS}


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the reference made of one prompt; see record.py."""

    prompt: np.ndarray
    positions: np.ndarray
    prompt_ids: np.ndarray
    prompt_logprobs: np.ndarray
    tokens: np.ndarray
    margins: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


@pytest.fixture(scope="module")
def recorded() -> list[Recorded]:
    with np.load(Path(__file__).parent / "recorded.npz") as file:
        fields = Recorded.__dataclass_fields__
        return [Recorded(**{f: file[f"{i}/{f}"] for f in fields}) for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def model(demo_model: Path) -> LoadedModel:
    return load(demo_model, dtype="float32")


@pytest.fixture(scope="module")
def llm(model: LoadedModel) -> LLM:
    return LLM(model, **(COMMON | TOGETHER))


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    """All prompts in one call, with the log-probabilities of prompt and output."""
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
    )
    prompts = [{"prompt_token_ids": p.token_ids} for p in demo_prompts(llm)]
    return llm.generate(prompts, params, use_tqdm=False)


def steps_alike(output: RequestOutput, recorded: Recorded) -> int:
    """How many steps have the reference's inputs: all up to the first token that is another."""
    other = np.flatnonzero(np.asarray(output.outputs[0].token_ids) != recorded.tokens)
    return int(other[0]) + 1 if len(other) else MAX_TOKENS


def errors(ours: dict[int, Logprob], ids: np.ndarray, logprobs: np.ndarray) -> list[float]:
    """|difference| for each of the reference's top 20; for one that is not among ours, how far it
    is above the least likely of ours, which must then be as likely."""
    least = min(entry.logprob for entry in ours.values())
    return [
        abs(ours[i].logprob - p) if i in ours else max(0.0, p - least)
        for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def test_token_ids_are_those_of_the_recording(llm: LLM, recorded: list[Recorded]) -> None:
    assert [p.token_ids for p in demo_prompts(llm)] == [r.prompt.tolist() for r in recorded]


def test_greedy_tokens_are_the_reference_s(
    outputs: list[RequestOutput], recorded: list[Recorded]
) -> None:
    for i, (output, want) in enumerate(zip(outputs, recorded, strict=True)):
        ours = output.outputs[0].token_ids
        result = compare_greedy(ours, want.tokens.tolist(), want.margins.tolist(), MARGIN)
        assert len(ours) == MAX_TOKENS and result.agrees, f"prompt {i}: {result}"


def test_logprobs_of_the_output_are_the_reference_s(
    outputs: list[RequestOutput], recorded: list[Recorded]
) -> None:
    found = []
    for output, want in zip(outputs, recorded, strict=True):
        entries = output.outputs[0].logprobs or []
        for i in range(steps_alike(output, want)):
            found.append(errors(entries[i], want.ids[i], want.logprobs[i]))
    assert len(found) >= 0.9 * PROMPTS * MAX_TOKENS
    assert np.max(found) < TOLERANCE


def test_logprobs_of_the_prompt_are_the_reference_s(
    outputs: list[RequestOutput], recorded: list[Recorded]
) -> None:
    found = []
    for output, want in zip(outputs, recorded, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None and len(entries) == len(want.prompt) and entries[0] is None
        for i, position in enumerate(want.positions.tolist()):
            entry = entries[position + 1]  # scored by the logits at `position`
            assert entry is not None
            found.append(errors(entry, want.prompt_ids[i], want.prompt_logprobs[i]))
    assert len(found) > 250
    assert np.max(found) < TOLERANCE


@pytest.fixture(scope="module")
def items(llm: LLM) -> list[Item]:
    """8 requests of real text: greedy and drawn, with penalties and biases; three share a prefix."""
    texts = [p.token_ids for p in demo_prompts(llm) if len(p.token_ids) >= 37]
    shared = texts[-1][:33]
    prompts = [
        *(text[: 30 + i] for i, text in enumerate(texts[:5])),
        *(shared + t[-i:] for i, t in enumerate(texts[:3], 2)),
    ]
    extra: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.2, "seed": 8, "top_p": 0.9, "top_k": 50},
        {"repetition_penalty": 1.3, "logit_bias": {28: -5.0}},
    ]
    common = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return [
        (prompt, SamplingParams(**(common | extra[i % len(extra)])))
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def solo(llm: LLM, items: list[Item]) -> list[list[int]]:
    return [run(llm, [item])[0] for item in items]


def test_tokens_of_the_real_model_equal_the_solo_run(
    llm: LLM, items: list[Item], solo: list[list[int]]
) -> None:
    """Together, for the most part after hits of the prefix cache."""
    assert [len(tokens) for tokens in solo] == [12] * 8
    assert run(llm, items) == solo


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 16}, {"page_size": 4, "num_pages": 20}],
    ids=["budget", "scarce pages"],
)
def test_tokens_of_the_real_model_survive_scarcity(
    model: LoadedModel, items: list[Item], solo: list[list[int]], options: dict[str, Any]
) -> None:
    """Prompts in chunks of at most 16 tokens; and 19 pages where two requests come to want 22."""
    # Few rows and small steps: compiling is most of the time that this takes.
    small: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 32}
    llm = LLM(model, **(COMMON | small | options))
    assert run(llm, items) == solo
    assert (llm.core.stats()["preemptions"] > 0) == ("num_pages" in options)


def test_the_command_knows_the_capital(
    capsys: pytest.CaptureFixture[str], demo_model: Path
) -> None:
    arguments = ["generate", "--model", str(demo_model), "--chat", "--temperature", "0"]
    arguments += ["--prompt", "What is the capital of France?", "--max-tokens", "16"]
    assert main(arguments) == 0
    assert "Paris" in capsys.readouterr().out
