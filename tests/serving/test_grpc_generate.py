"""Generate over a real channel: the same as the engine itself, for every way to ask.

The truth is Engine.generate in this process with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.engine import Engine
from jaxinfer.types import RequestOutput, SamplingParams
from tests.checkpoints import EOS, IM_END, byte_tokenizer
from tests.serving.grpc_support import idle, join, request, serving, until

ABC = [ord(c) for c in "ABCDEFGHIJ"]


@pytest.fixture
def engine(tiny_engine: Engine) -> Engine:
    return tiny_engine


@pytest.fixture(scope="module")
def letters(chain: Callable[..., Path]) -> Iterator[Engine]:
    """After "A" comes "B", and so on to "J"; then the end."""
    options = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    engine = Engine(str(chain(ABC)), progress=False, num_pages=16, **options)
    yield engine
    engine.close()


async def direct(engine: Engine, prompt: Any, **params: Any) -> RequestOutput:
    last = None
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | params))
    async for item in engine.generate(prompt, sampling):
        last = item
    assert last is not None
    return last


CASES = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_k": 40, "top_p": 0.5, "min_p": 0.125},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "bias": {"logit_bias": {65: 50.0, 66: 49.0}, "max_tokens": 4},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "chosen": {"logprobs": 0, "prompt_logprobs": 0},
    "n": {"n": 3, "temperature": 1.0, "seed": 11, "logprobs": 2, "prompt_logprobs": 1},
    "stop id": {"logit_bias": {65: 100.0}, "stop_token_ids": [65]},
    "min tokens": {"logit_bias": {EOS: 40.0}, "min_tokens": 3},
    "ignore eos": {"logit_bias": {EOS: 100.0}, "ignore_eos": True},
    "score": {"max_tokens": 0, "prompt_logprobs": 1},
}


def check(messages: list[Any], truth: RequestOutput, params: dict[str, Any], stream: bool) -> None:
    outputs = join(messages)
    assert sorted(outputs) == list(range(len(truth.outputs)))
    for want in truth.outputs:
        got = outputs[want.index]
        assert got.ids == want.token_ids
        assert (got.chunks > 0) == stream
        complete = got.complete
        assert list(complete.output_ids) == want.token_ids
        assert complete.finish_reason == want.finish_reason
        assert complete.completion_tokens == len(want.token_ids)
        assert complete.prompt_tokens == len(truth.prompt_token_ids)
        matched = complete.WhichOneof("matched_stop")
        assert (getattr(complete, matched) if matched else None) == want.stop_reason
        if want.logprobs is None:
            assert not got.logprobs
        else:
            chosen = [e[t].logprob for e, t in zip(want.logprobs, want.token_ids, strict=True)]
            assert got.logprobs == pytest.approx(chosen, abs=1e-4)
            assert all(len(top) == params["logprobs"] for top in got.top)
        if truth.prompt_logprobs is None:
            assert got.prompt is None
            continue
        entries = list(zip(truth.prompt_token_ids, truth.prompt_logprobs, strict=True))
        values = [v.value if v.HasField("value") else None for v in got.prompt.token_logprobs]
        assert values == pytest.approx([e and e[t].logprob for t, e in entries], abs=1e-4)
        assert list(got.prompt.token_ids) == truth.prompt_token_ids
        tops = [len(top.token_ids) for top in got.prompt.top_logprobs]
        count = params["prompt_logprobs"]
        assert tops == ([0] + [count] * (len(entries) - 1) if count else [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
async def test_same_as_the_engine(engine: Engine, case: str, stream: bool) -> None:
    params = CASES[case]
    prompt = byte_tokenizer().encode("the hell in it").ids
    truth = await direct(engine, prompt, **params)
    async with serving(engine) as face:
        messages = await face.generate(request(prompt, stream=stream, **params))
    check(messages, truth, params, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_text_prompts(engine: Engine, stream: bool) -> None:
    truth = await direct(engine, "the hell in it")
    async with serving(engine) as face:
        messages = await face.generate(request("the hell in it", stream=stream))
    check(messages, truth, {}, stream)


async def test_zeros_are_not_set(engine: Engine) -> None:
    """A message of zeros draws at temperature 1 up to the context's end, one output, no penalty."""
    truth = await direct(engine, [72, 73], temperature=1.0, seed=3, max_tokens=254)
    async with serving(engine) as face:
        sent = pb.GenerateRequest(sampling_params=pb.SamplingParams(seed=3))
        sent.tokenized.input_ids.extend([72, 73])
        messages = await face.generate(sent)
        check(messages, truth, {}, False)
        greedy = await face.generate(request([72, 73], temperature=0.0, max_tokens=4))
    want = await direct(engine, [72, 73], max_tokens=4)
    assert join(greedy)[0].ids == want.outputs[0].token_ids


async def test_negative_seeds_are_seeds(engine: Engine) -> None:
    """Gateways cut 64-bit seeds to an int32."""
    truth = await direct(engine, [72, 73], temperature=1.0, seed=2**32 - 5)
    async with serving(engine) as face:
        messages = await face.generate(request([72, 73], temperature=1.0, seed=-5))
    check(messages, truth, {}, False)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_stop_strings(letters: Engine, stream: bool) -> None:
    """R-STP-01, R-STP-02: found by the engine's own text, told as matched_stop_str."""
    async with serving(letters) as face:
        sent = request([ABC[0]], stream=stream, stop=["zzz", "EF"], max_tokens=9)
        output = join(await face.generate(sent))[0]
        assert bytes(output.ids) == b"BCDEF"
        assert output.complete.finish_reason == "stop"
        assert output.complete.matched_stop_str == "EF"
        output = join(await face.generate(request([ABC[0]], stop=["JK"], stream=stream)))[0]
        assert bytes(output.ids) == b"BCDEFGHI" and output.complete.finish_reason == "length"


async def test_end_of_text_names_no_stop(letters: Engine) -> None:
    """R-STP-03: EOS ends with "stop" and no matched_stop; a stop id is told."""
    async with serving(letters) as face:
        output = join(await face.generate(request([ABC[8]])))[0]
        assert output.ids == [ABC[9], EOS]
        assert output.complete.finish_reason == "stop"
        assert output.complete.WhichOneof("matched_stop") is None
        output = join(await face.generate(request([ABC[0]], stop_token_ids=[ABC[3], IM_END])))[0]
        assert output.complete.matched_token_id == ABC[3]


async def test_cached_tokens(engine: Engine) -> None:
    await engine.clear_prefix_cache()
    async with serving(engine) as face:
        prompt = list(range(60, 110))
        first, second = [
            join(await face.generate(request(prompt, stream=True)))[0].complete for _ in range(2)
        ]
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)


async def test_truncation_keeps_the_end(engine: Engine) -> None:
    async with serving(engine) as face:

        async def prompt_tokens(prompt: Any, **params: Any) -> int:
            sent = request(prompt, max_tokens=1, **params)
            return join(await face.generate(sent))[0].complete.prompt_tokens

        ids = list(range(40, 60))
        cut = join(await face.generate(request(ids, truncate_prompt_tokens=7)))[0]
        whole = await direct(engine, ids[-7:])
        assert cut.ids == whole.outputs[0].token_ids and cut.complete.prompt_tokens == 7
        assert await prompt_tokens("abcdef", truncate_prompt_tokens=4) == 4
        assert await prompt_tokens("abcdef", truncate_prompt_tokens=400) == 6
        assert await prompt_tokens([65] * 1000, truncate_prompt_tokens=-1) == 255


async def test_all_indices_finish_and_pages_return(engine: Engine) -> None:
    async with serving(engine) as face:
        sent = request("abc", stream=True, n=4, temperature=1.0, seed=1, max_tokens=20)
        outputs = join(await face.generate(sent))
        assert sorted(outputs) == list(range(4))
        assert all(o.complete.finish_reason in ("length", "stop") for o in outputs.values())
        assert not face.service.running
    await until(lambda: idle(engine))


async def test_one_message_per_output_and_step_at_most(engine: Engine) -> None:
    async with serving(engine) as face:
        before = engine.stats()["steps"]
        output = join(await face.generate(request("abc", stream=True, max_tokens=40)))[0]
        assert 1 <= output.chunks <= engine.stats()["steps"] - before


async def test_stream_interval_holds_back(engine: Engine) -> None:
    """R-LPB-03: the lists are the same however the tokens are cut."""
    params = {"max_tokens": 22, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    truth = await direct(engine, [80, 81], **params)
    async with serving(engine, stream_interval=5) as face:
        messages = await face.generate(request([80, 81], stream=True, **params))
    check(messages, truth, params, True)
    sizes = [len(m.chunk.token_ids) for m in messages if m.HasField("chunk")]
    assert sizes[0] <= 5 and all(size >= 5 for size in sizes[1:-1]) and len(sizes) <= 6


async def test_request_ids(engine: Engine) -> None:
    """No id: one is made; a running one is refused, a finished one may come again."""
    seen: list[str] = []
    async with serving(engine) as face:
        face.service.on_finish.append(lambda record: seen.append(record.call.request_id))
        await face.generate(request(request_id="mine"))
        await face.generate(request(request_id="mine"))
        await face.generate(request())
    assert seen[:2] == ["mine", "mine"] and seen[2] not in ("", "mine")


async def test_trace_headers_reach_the_record(engine: Engine) -> None:
    calls = []
    async with serving(engine) as face:
        face.service.on_finish.append(lambda record: calls.append(record.call))
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await face.generate(request(), metadata=(("traceparent", trace), ("x-other", "1")))
    assert calls[0].trace == {"traceparent": trace} and calls[0].face == "grpc"
