"""The same request over Python, gRPC and HTTP, streamed and not, alone and among others: one answer.

Token ids, text, log-probabilities, finish and stop reasons, and usage are compared exactly with what
LLM answers. Also cold against warm prefix cache: the same answer, and the same count of cached tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer import LLM
from jaxinfer.engine import Engine
from jaxinfer.types import SamplingParams
from tests.checkpoints import EOS
from tests.serving import faces
from tests.serving.conftest import SMALL
from tests.serving.faces import Answer, Asker, asking
from tests.serving.http.wire import completion
from tests.serving.live import LiveServer

LETTERS = dict.fromkeys(range(97, 123), 100.0)  # the answer is text that can be read
TEXT = "the hell in it, and then the other thing that belongs to it"
UNICODE = "Grüße, 世界 🙂: the é in it, and a tail to fill a page"
# name -> (prompt, parameters); a stop of (a, b) is the text from a to b of the answer without it.
CASES: dict[str, tuple[str | list[int], dict[str, Any]]] = {
    "greedy": (TEXT, {}),
    "ids": (list(range(40, 80)), {}),
    "seeded": (TEXT, {"temperature": 1.5, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}),
    "three outputs": (TEXT, {"n": 3, "temperature": 1.0, "seed": 11, "logprobs": 2}),
    "stop string": (TEXT, {"logit_bias": LETTERS, "stop": (2, 5)}),
    "stop string kept": (
        TEXT,
        {"logit_bias": LETTERS, "stop": (2, 5), "include_stop_str_in_output": True, "logprobs": 1},
    ),
    "stop string half there": (TEXT, {"logit_bias": LETTERS, "stop": (5, 8), "max_tokens": 7}),
    "stop id": (TEXT, {"logit_bias": {65: 100.0}, "stop_token_ids": [65], "min_tokens": 3}),
    "logprobs": (TEXT, {"logprobs": 5}),
    "chosen logprobs": (TEXT, {"logprobs": 0, "prompt_logprobs": 0, "temperature": 2.0, "seed": 3}),
    "prompt logprobs": (TEXT, {"prompt_logprobs": 3, "logprobs": 1}),
    "penalties": (
        TEXT,
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ),
    "bias": (TEXT, {"logit_bias": {65: 50.0, 66: 50.0}, "temperature": 1.0, "seed": 5}),
    "end of text": (TEXT, {"logit_bias": {EOS: 100.0}, "min_tokens": 2}),
    "end of text ignored": (TEXT, {"logit_bias": {EOS: 40.0}, "ignore_eos": True}),
    "one token": (TEXT, {"max_tokens": 1}),
    "parts of characters": (
        UNICODE,
        {"logit_bias": {0xC3: 100.0, 0xA9: 100.0}, "temperature": 2.0, "seed": 1, "max_tokens": 12},
    ),
}


@pytest.fixture(scope="module")
def llm(tiny_engine: Engine) -> Iterator[LLM]:
    """LLM with the same model and options as the server's engine."""
    options: dict[str, Any] = SMALL
    yield LLM(tiny_engine.model, progress=False, **options)


def resolve(name: str, llm: LLM) -> tuple[str | list[int], dict[str, Any]]:
    """A case with its stop string filled in."""
    prompt, given = CASES[name]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10} | given
    if "stop" in params:
        begin, end = params.pop("stop")
        plain = {key: value for key, value in params.items() if key != "include_stop_str_in_output"}
        text = ask(llm, prompt, plain | {"max_tokens": 10}).outputs[0].text
        assert text is not None and len(text) == 10
        params["stop"] = [text[begin:end]]
    return prompt, params


def ask(llm: LLM, prompt: Any, params: dict[str, Any]) -> Answer:
    (output,) = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return faces.of_engine(output, params)


def cold_and_warm(llm: LLM, prompt: Any, params: dict[str, Any]) -> list[Answer]:
    """What LLM answers with an empty cache, and again."""
    llm.core.scheduler.clear_prefix_cache()
    cold, warm = ask(llm, prompt, params), ask(llm, prompt, params)
    assert cold.usage[2] == 0
    assert (cold.outputs, cold.prompt_scores) == (warm.outputs, warm.prompt_scores)
    return [cold, warm]


async def check(server: LiveServer, asker: Asker, face: str, prompt: Any, params: Any, truth: Any):
    """Ask one face twice, first with an empty cache."""
    await server.engine.clear_prefix_cache()
    for want in truth:
        got = await FACES[face](asker, prompt, params)
        wanted = want if got.outputs[0].text is not None else want.without_text()
        assert got == wanted, face


FACES = faces.TOKEN_FACES | faces.TOKEN_ROUTES | faces.TEXT_ROUTES | faces.CHAT_ROUTES


@pytest.mark.parametrize("name", CASES)
async def test_one_answer(name: str, llm: LLM, server: LiveServer):
    prompt, params = resolve(name, llm)
    truth = cold_and_warm(llm, prompt, params)
    assert truth[1].usage[2] > 0 or "prompt_logprobs" in params  # the cache does take part
    async with asking(server.url, server.target, server.engine) as asker:
        for face in (*faces.TOKEN_FACES, *faces.TEXT_ROUTES):
            await check(server, asker, face, prompt, params, truth)
        for face in faces.TOKEN_ROUTES:
            ids = prompt if isinstance(prompt, list) else llm.prompt(prompt).token_ids
            await check(server, asker, face, list(ids), params, truth)
    server.settle()


@pytest.mark.parametrize("name", [name for name, (prompt, _) in CASES.items() if prompt is TEXT])
async def test_one_answer_to_a_chat(name: str, llm: LLM, server: LiveServer):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TEXT}]
    rendered = llm.chat_prompt(messages)
    _, params = resolve(name, llm)
    truth = cold_and_warm(llm, rendered, params)
    async with asking(server.url, server.target, server.engine) as asker:
        asker.messages = messages
        for face in faces.CHAT_ROUTES:
            await check(server, asker, face, None, params, truth)
        for face in faces.TOKEN_FACES:
            await check(server, asker, face, list(rendered.token_ids), params, truth)
    server.settle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_echoed_scores_are_prompt_logprobs(stream: bool, llm: LLM, server: LiveServer):
    """Evaluators ask for the prompt's numbers by echo; Python and gRPC by prompt_logprobs."""
    params = {"max_tokens": 4, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2}
    want = ask(llm, TEXT, params)
    assert want.prompt_scores is not None and want.outputs[0].scores is not None
    async with asking(server.url, server.target, server.engine) as asker:
        over_grpc = await faces.grpc_stream(asker, TEXT, params)
        assert over_grpc.prompt_scores == want.prompt_scores
        body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
        response = await asker.http.post("/v1/completions", json=body | {"stream": stream})
    if stream:
        choice = faces.join_completion(faces.events(response))["choices"][0]
    else:
        choice = completion(response)["choices"][0]
    assert choice["text"] == TEXT + (want.outputs[0].text or "")
    numbers = [score and score[0] for score in want.prompt_scores + want.outputs[0].scores]
    told = choice["logprobs"]["token_logprobs"]
    assert [number and faces.f32(number) for number in told] == numbers
    tops = [score and list(score[1].values()) for score in want.prompt_scores[1:]]
    listed = choice["logprobs"]["top_logprobs"]
    assert [sorted(map(faces.f32, top.values()))[-2:] for top in listed[1 : len(tops) + 1]] == [
        sorted(top) for top in tops if top
    ]


async def test_one_answer_among_others(llm: LLM, server: LiveServer):
    """All cases over all faces at once, more than fit into a step, and again with a warm cache."""
    resolved = [resolve(name, llm) for name in CASES]
    truth = [cold_and_warm(llm, *case)[0] for case in resolved]
    await server.engine.clear_prefix_cache()
    async with asking(server.url, server.target, server.engine) as asker:
        for _ in range(2):
            work = [
                (want, FACES[face](asker, prompt, params))
                for (prompt, params), want in zip(resolved, truth, strict=True)
                for face in (*faces.TOKEN_FACES, *faces.TEXT_ROUTES)
            ]
            answers = await asyncio.gather(*(call for _, call in work))
            for (want, _), got in zip(work, answers, strict=True):
                same_but_for_the_last_bits(got, want)
    server.settle()


def same_but_for_the_last_bits(got: Answer, want: Answer) -> None:
    """Sums of another step's shape differ in their last bits; nothing else may."""
    assert got.usage[:2] == want.usage[:2]
    for mine, theirs in zip(got.outputs, want.outputs, strict=True):
        assert mine.ids == theirs.ids
        assert mine.text in (None, theirs.text)
        assert (mine.finish, mine.stop) == (theirs.finish, theirs.stop)
        near(mine.scores, theirs.scores)
    near(got.prompt_scores, want.prompt_scores)


def near(mine: faces.Scores | None, theirs: faces.Scores | None) -> None:
    assert (mine is None) == (theirs is None)
    for one, other in zip(mine or (), theirs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert len(one[1]) == len(other[1])
            both = [
                (value, other[1][token]) for token, value in one[1].items() if token in other[1]
            ]
            assert len(both) >= len(one[1]) - 1  # two that are equal but for these bits may swap
            for a, b in [(one[0], other[0]), *both]:
                assert a == pytest.approx(b, abs=1e-4)
