"""/v1/completions: streamed equals whole equals the engine, for every form and field; echo and scores.

Also R-SRV-05 (usage) and R-LPB-01 (finite numbers), and what evaluators compare exactly.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai.types import Completion

from jaxinfer.types import RequestOutput, SamplingParams
from serving.config import ServerConfig
from serving.http import exchange
from serving.http import logprobs as forms
from tests.serving.http.wire import completion, events, join_completion, refusal
from tests.serving.live import LiveServer

IDS = [104, 101, 257, 33]
CASES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "hello world"},
    "ids": {"prompt": IDS},
    "logprobs": {"prompt": IDS, "logprobs": 5},
    "no top logprobs": {"prompt": IDS, "logprobs": 0},
    "three outputs": {"prompt": IDS, "n": 3, "temperature": 1.5, "logprobs": 2},
    "seed": {"prompt": IDS, "temperature": 2.0, "seed": 11},
    "filters": {"prompt": IDS, "temperature": 2.0, "seed": 5, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "only one is left": {"prompt": IDS, "temperature": 1.0, "top_k": 1, "logprobs": 5},
    "penalties": {
        "prompt": IDS, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    },
    "bias": {"prompt": IDS, "logit_bias": {"65": 100}},
    "allowed": {"prompt": IDS, "allowed_token_ids": [65, 66], "min_tokens": 2},
    "stop ids": {"prompt": IDS, "allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 0},
    "stop": {"prompt": IDS, "allowed_token_ids": [65], "stop": ["AAA"]},
    "stop kept": {
        "prompt": IDS, "allowed_token_ids": [65], "stop": "AAA", "include_stop_str_in_output": True,
    },
    "held at the end": {"prompt": IDS, "allowed_token_ids": [65], "stop": "AAAAAAAAAAAAAAB"},
    "end of text ignored": {"prompt": IDS, "ignore_eos": True, "skip_special_tokens": False},
    "prompt scores": {"prompt": IDS, "prompt_logprobs": 3, "logprobs": 1},
}  # fmt: skip
KEPT = ("n", "temperature", "seed", "top_k", "top_p", "min_p", "presence_penalty", "stop_token_ids",
        "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens",
        "stop", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "logprobs",
        "prompt_logprobs")  # fmt: skip


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return completion(http.post("/v1/completions", json=body))


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return events(http.post("/v1/completions", json={**body, "stream": True}))


def direct(server: LiveServer, body: dict[str, Any]) -> RequestOutput:
    """What the engine itself answers."""
    engine = server.engine
    given = {name: body[name] for name in KEPT if name in body}
    params = replace(engine.get_default_sampling_params(), max_tokens=body["max_tokens"], **given)

    async def last() -> RequestOutput:
        found = None
        async for output in engine.generate(body["prompt"], params):
            found = output
        assert found is not None
        return found

    return server.call(last())


@pytest.mark.parametrize("name", CASES)
def test_streamed_is_whole_is_the_engine(name: str, http: httpx.Client, server: LiveServer):
    body = {"max_tokens": 8, "temperature": 0, "seed": 1, "return_token_ids": True} | CASES[name]
    whole = post(http, **body)
    chunks = stream(http, **body, stream_options={"include_usage": True})
    joined = join_completion(chunks)
    expected = direct(server, body)
    assert len(whole["choices"]) == len(expected.outputs) == body.get("n", 1)
    for choice, output in zip(whole["choices"], expected.outputs, strict=True):
        assert choice["text"] == output.text
        assert choice["token_ids"] == output.token_ids
        assert choice["prompt_token_ids"] == expected.prompt_token_ids
        assert (choice["finish_reason"], choice["stop_reason"]) == (
            output.finish_reason,
            output.stop_reason,
        )
        if output.logprobs is not None:
            chosen = [next(iter(entry.values())).logprob for entry in output.logprobs]
            assert choice["logprobs"]["token_logprobs"] == chosen
            tops = [list(top.values()) for top in choice["logprobs"]["top_logprobs"]]
            assert tops == [[x.logprob for x in entry.values()] for entry in output.logprobs]
        else:
            assert choice["logprobs"] is None
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_token_ids)
    assert usage["completion_tokens"] == sum(len(o.token_ids) for o in expected.outputs)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert joined["choices"] == whole["choices"]
    assert {k: v for k, v in joined["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in usage.items() if k != "prompt_tokens_details"
    }
    if scores := whole["choices"][0].get("prompt_logprobs"):
        assert expected.prompt_logprobs is not None
        assert scores[0] is None
        for told, entry in zip(scores[1:], expected.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert {int(k): v["logprob"] for k, v in told.items()} == {
                k: v.logprob for k, v in entry.items()
            }


@pytest.mark.parametrize("interval", [2, 5])
def test_answers_do_not_depend_on_the_chunks(interval: int, http: httpx.Client, server: LiveServer):
    """R-LPB-03: chunks of several tokens."""
    config = ServerConfig(model="tiny", port=0, stream_interval=interval)
    coarse = LiveServer(config, server.engine)
    sizes: list[int] = []
    try:
        with httpx.Client(base_url=coarse.url, timeout=60) as other:
            for name in ("three outputs", "logprobs", "stop", "held at the end", "prompt scores"):
                body = {"max_tokens": 12, "temperature": 0, "seed": 1} | CASES[name]
                chunks = stream(other, **body, return_token_ids=True)
                whole = post(http, **body, return_token_ids=True)
                assert join_completion(chunks)["choices"] == whole["choices"]
                sizes += [len(c["token_ids"]) for e in chunks for c in e["choices"]]
    finally:
        coarse.close()
    assert max(sizes) >= interval


def test_many_prompts_at_once(http: httpx.Client):
    ids = [[65 + i % 20, 65 + i // 20 % 20] for i in range(1024)]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    whole = post(http, **body)
    assert [c["text"][:2] for c in whole["choices"]] == ["".join(map(chr, p)) for p in ids]
    assert whole["usage"]["completion_tokens"] == 1024
    assert join_completion(stream(http, **body))["choices"] == whole["choices"]


@pytest.mark.parametrize(
    "prompt",
    ["he", ["he", "llo", "x"], [104, 101], [[104, 101], [33]]],
    ids=["text", "texts", "ids", "lists"],
)
@pytest.mark.parametrize("n", [1, 2])
def test_forms_of_prompts(prompt: Any, n: int, http: httpx.Client):
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    body = {"max_tokens": 3, "temperature": 0, "n": n}
    together = post(http, prompt=prompt, **body)
    streamed = stream(http, prompt=prompt, **body, stream_options={"include_usage": True})
    alone = [post(http, prompt=one, **body) for one in several]
    texts = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == texts
    assert [choice["index"] for choice in together["choices"]] == list(range(len(texts)))
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)
        assert streamed[-1]["usage"][name] == together["usage"][name]
    assert [c["text"] for c in join_completion(streamed)["choices"]] == texts


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("continuous", [None, False, True])
def test_usage_of_streams(n: int, continuous: bool | None, http: httpx.Client):
    body = {"prompt": "hello", "max_tokens": 6, "n": n, "temperature": 1.0, "seed": 3}
    usage = post(http, **body)["usage"]
    assert all("usage" not in chunk for chunk in stream(http, **body))
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    chunks = stream(http, **body, stream_options=options)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    told = [chunk["usage"] for chunk in chunks[:-1]]
    if continuous:
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts) and counts[0] >= 1
        assert counts[-1] == usage["completion_tokens"]
    else:
        assert told == [None] * len(told)
    silent = stream(http, **body, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in silent)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["hello", IDS], ids=["text", "ids"])
def test_echo_with_scores_as_evaluators_read_it(prompt: Any, max_tokens: int, http: httpx.Client):
    body: dict[str, Any] = {
        "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0,
        "seed": 1234,
    }  # fmt: skip
    (choice,) = post(http, **body)["choices"]
    plain = post(http, prompt=prompt, max_tokens=max(max_tokens, 1), temperature=0, logprobs=1)
    text = "hello" if prompt == "hello" else "he" + "he" + "!"
    assert choice["text"].startswith(text)
    scores = choice["logprobs"]
    length = plain["usage"]["prompt_tokens"] + max_tokens
    assert {len(scores[name]) for name in scores} == {length}
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    pairs = zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True)
    for number, top in pairs:
        assert number in top.values() and number <= 0
        assert max(top.values()) == max([number, *top.values()])
    if max_tokens:
        assert choice["text"] == text + plain["choices"][0]["text"]
        greedy = scores["token_logprobs"][-max_tokens:]
        assert [max(top.values()) for top in scores["top_logprobs"][-max_tokens:]] == greedy
    assert scores["text_offset"] == [
        sum(map(len, scores["tokens"][:i])) for i in range(len(scores["tokens"]))
    ]
    assert join_completion(stream(http, **body))["choices"] == [choice]


def test_echo_without_scores(http: httpx.Client):
    body = {"prompt": ["hello", "he"], "echo": True, "max_tokens": 2, "temperature": 0, "n": 2}
    whole = post(http, **body)["choices"]
    assert [c["text"][:2] for c in whole] == ["he"] * 4 and whole[0]["text"].startswith("hello")
    assert [c["logprobs"] for c in whole] == [None] * 4
    assert join_completion(stream(http, **body))["choices"] == whole


def test_tokens_as_ids(http: httpx.Client):
    body = {"prompt": IDS, "logprobs": 2, "max_tokens": 4, "return_tokens_as_token_ids": True}
    (choice,) = post(http, **body, return_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(key.startswith("token_id:") for key in choice["logprobs"]["top_logprobs"][0])


def test_cached_tokens_and_salt(http: httpx.Client):
    body = {"prompt": list(range(40, 90)), "max_tokens": 1, "cache_salt": "a"}
    cached = []
    for salt in ("a", "a", "b"):
        usage = post(http, **body | {"cache_salt": salt})["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and cached[1] >= 32 and cached[2] == 0


def test_truncation_keeps_the_end(http: httpx.Client):
    ids = [65 + i % 20 for i in range(400)]  # longer than the model's 256
    for keep, length in ((3, 3), (-1, 256)):
        body = {"max_tokens": 0 if keep == -1 else 1, "return_token_ids": True}
        answer = post(http, prompt=ids, truncate_prompt_tokens=keep, **body)
        assert answer["choices"][0]["prompt_token_ids"] == ids[-length:]
    text = post(http, prompt="x" * 999, truncate_prompt_tokens=5, max_tokens=1)
    assert text["usage"]["prompt_tokens"] == 5


def test_silent_clients_get_sixteen_tokens_and_an_id(http: httpx.Client):
    response = http.post("/v1/completions", json={"prompt": "hello", "ignore_eos": True})
    answer = completion(response)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["id"] == response.headers["x-request-id"] and answer["id"].startswith("cmpl-")
    long = {"prompt": [[65] * 250, [65] * 251], "ignore_eos": True}  # of the model's 256
    assert post(http, **long)["usage"]["completion_tokens"] == 2 * 5
    full = http.post("/v1/completions", json={"prompt": [65] * 256})
    assert refusal(full)["param"] == "max_tokens"
    assert answer["model"] == "tiny" and answer["object"] == "text_completion"
    assert "x-jaxinfer-warning" not in response.headers


def test_ids_of_clients_are_kept(http: httpx.Client):
    by_header = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    by_body = http.post(
        "/v1/completions",
        json={"prompt": "a", "request_id": "body"},
        headers={"x-request-id": "header"},
    )
    assert by_header.headers["x-request-id"] == completion(by_header)["id"] == "mine"
    assert by_body.headers["x-request-id"] == completion(by_body)["id"] == "body"


def test_unknown_fields_are_warned_of(http: httpx.Client, caplog: pytest.LogCaptureFixture):
    body = {"prompt": "a", "max_tokens": 1, "some\r\nx: y": 1, "session_id": "s", "best_of": 1}
    response = http.post("/v1/completions", json=body)
    warning = response.headers["x-jaxinfer-warning"]
    assert warning == "unknown fields ignored: some??x??y, session_id"
    assert "x" not in response.headers
    assert "session_id" in caplog.text


def test_chunks_pass_openai_types_but_for_the_missing_reason(http: httpx.Client):
    for chunk in stream(http, prompt="hello", max_tokens=4, logprobs=1, n=2):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in OpenAI's, too
        Completion.model_validate(chunk)


def test_recommended_sampling_is_used_where_the_client_is_silent(server: LiveServer):
    from serving.http.fields import SamplingFields, sampling_params

    engine = server.engine
    given = engine.model.generation_config
    engine.model.generation_config = {**given, "temperature": 0.25, "top_k": 7}
    try:
        silent = sampling_params(SamplingFields(), server.service, 5)
        spoken = sampling_params(SamplingFields(temperature=1.0), server.service, None)
    finally:
        engine.model.generation_config = given
    assert (silent.temperature, silent.top_k, silent.max_tokens) == (0.25, 7, 5)
    assert (spoken.temperature, spoken.top_k, spoken.max_tokens) == (1.0, 7, None)
    assert SamplingParams().temperature == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"]
)
def test_many_scores_are_written_beside_the_event_loop(
    path: str, stream: bool, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
):
    """A prompt of 32k tokens with 20 scores each takes most of a second to write."""
    body: dict[str, Any] = {"prompt": "the b x", "messages": [{"role": "user", "content": "the b"}]}
    body |= {"max_tokens": 2, "prompt_logprobs": 1, "stream": stream, "temperature": 0.0}
    if path == "/inference/v1/generate":
        params = {name: body[name] for name in ("max_tokens", "prompt_logprobs", "temperature")}
        body = {"token_ids": [1, 2, 3], "sampling_params": params, "stream": stream}
    threads: list[str] = []
    original = forms.prompt_logprobs

    def told(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(forms, "prompt_logprobs", told)

    for numbers in (exchange.SMALL, 0):
        monkeypatch.setattr(exchange, "SMALL", numbers)
        assert '"prompt_logprobs":[null,{' in http.post(path, json=body).text
    assert threads[0] == "live-server" and threads[1].startswith("jaxinfer-text")
