"""What Generate refuses: the code, the field's name in the text, and that the next request works.

No refusal may reach the engine or leave a count raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.engine import Engine
from serving.config import Limits
from tests.serving.grpc_support import Face, idle, join, refused, request, serving

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN, INF = float("nan"), float("inf")
BIG_BIAS = dict.fromkeys(range(70_000), 1.0)


@pytest.fixture
async def face(tiny_engine: Engine) -> AsyncIterator[Face]:
    async with serving(tiny_engine) as face:
        yield face
        assert idle(tiny_engine) and not face.service.running


PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"n": 129}, "n="),
    ({"n": 2**32 - 1}, "n="),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"frequency_penalty": NAN}, "frequency_penalty"),
    ({"max_tokens": 2**32 - 1}, "max_tokens"),
    ({"max_tokens": 300}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stop": ["x" * 1025]}, "stop"),
    ({"stop": ["x" * 1_000_000]}, "stop"),
    ({"stop_token_ids": [288]}, "stop_token_ids"),
    ({"stop_token_ids": [0] * 70_000}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"logit_bias": {288: 1.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: NAN}}, "logit_bias"),
    ({"logit_bias": {5: 101.0}}, "logit_bias"),
    ({"logit_bias": BIG_BIAS}, "logit_bias"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("params", "name"), PARAMS, ids=lambda v: str(v)[:30])
async def test_parameters(face: Face, params: dict[str, Any], name: str) -> None:
    """R-SRV-09, R-SMP-04, R-LPB-02: refused by name, at once, and counted."""
    rejected: list[Any] = []
    face.service.on_reject.append(rejected.append)
    error = await refused(face, request([65, 66], **params))
    assert error.code() is INVALID and name in str(error.details())
    assert len(rejected) == 1
    assert join(await face.generate(request([65, 66], max_tokens=2)))[0].complete.output_ids


def other(change: Callable[[pb.GenerateRequest], Any]) -> Callable[[], pb.GenerateRequest]:
    def make() -> pb.GenerateRequest:
        made = request([65, 66])
        change(made)
        return made

    return make


OTHERS: dict[str, tuple[Callable[[], pb.GenerateRequest], str]] = {
    "no input": (lambda: pb.GenerateRequest(), "input"),
    "no ids": (lambda: request([]), "empty"),
    "no text": (lambda: request(""), "empty"),
    "id beyond the vocabulary": (lambda: request([65, 288]), "prompt_token_ids[1]"),
    "huge id": (lambda: request([2**32 - 1]), "prompt_token_ids[0]"),
    "too many ids": (lambda: request([65] * 257), "257"),
    "far too many ids": (lambda: request([1] * 3_000_000), "3000000"),
    "no room for output": (lambda: request([65] * 256, max_tokens=1), "max_tokens"),
    "long text": (lambda: request("x" * 300), "300"),
    "very long text": (lambda: request("x" * 20_000_000), "prompt"),
    "very long text, cut": (lambda: request("x" * 200_000, truncate_prompt_tokens=5), "text"),
    "long id": (lambda: request([65], request_id="x" * 257), "request_id"),
    "mm_inputs": (other(lambda r: r.mm_inputs.SetInParent()), "mm_inputs"),
    "extra_mm_inputs": (other(lambda r: r.extra_mm_inputs.add()), "extra_mm_inputs"),
    "media_refs": (other(lambda r: r.media_refs.SetInParent()), "media_refs"),
    "kv_transfer": (other(lambda r: r.kv_transfer_params.SetInParent()), "kv_transfer_params"),
    "kv_transfer_json": (
        other(lambda r: setattr(r, "kv_transfer_params_json", "{}")),
        "kv_transfer_params_json",
    ),
    "data_parallel_rank": (
        other(lambda r: setattr(r, "data_parallel_rank", 1)),
        "data_parallel_rank",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
async def test_other_fields(face: Face, case: str) -> None:
    make, name = OTHERS[case]
    error = await refused(face, make())
    assert error.code() is INVALID and name in str(error.details())


CONSTRAINTS: dict[str, Any] = {
    "json_schema": "{}",
    "regex": "a+",
    "grammar": 'root ::= "a"',
    "structural_tag": "{}",
    "json_object": True,
    "choice": pb.ChoiceConstraint(choices=["a", "b"]),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_constraints(face: Face, name: str) -> None:
    """The trailer tells a gateway that the grammar was refused, and no worker failed."""
    error = await refused(face, request([65], **{name: CONSTRAINTS[name]}))
    assert error.code() is INVALID and name in str(error.details())
    assert ("smg-constraint-failed", "engine") in tuple(error.trailing_metadata() or ())


async def test_a_constraint_that_is_switched_off(face: Face) -> None:
    assert await face.generate(request([65], json_object=False))


async def test_rank_0_is_the_rank_there_is(face: Face) -> None:
    sent = request([65])
    sent.data_parallel_rank = 0
    assert await face.generate(sent)


async def test_a_running_id(face: Face) -> None:
    sent = request([65], stream=True, request_id="it", max_tokens=200, ignore_eos=True)
    call = face.stub.Generate(sent)
    await call.read()
    error = await refused(face, request([66], request_id="it"))
    assert error.code() is INVALID and "request_id='it'" in str(error.details())
    await face.stub.Abort(pb.AbortRequest(request_ids=["it"]))
    messages: list[Any] = []
    while message := await call.read():
        messages.append(message)
    assert messages[-1].complete.finish_reason == "abort"


async def test_limits_of_the_configuration(tiny_engine: Engine) -> None:
    limits = Limits(outputs=2, stop_strings=1, stop_chars=3, request_id_chars=30, body_bytes=5000)
    async with serving(tiny_engine, limits=limits, max_logprobs=1) as face:
        for sent, name in (
            (request([65], n=3), "n=3"),
            (request([65], stop=["a", "b"]), "stop"),
            (request([65], stop=["abcd"]), "stop"),
            (request([65], request_id="x" * 31), "request_id"),
            (request([65], logprobs=2), "logprobs"),
        ):
            error = await refused(face, sent)
            assert error.code() is INVALID and name in str(error.details())
        error = await refused(face, request("x" * 6000))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # by gRPC itself, before reading
        assert await face.generate(request([65], n=2, max_tokens=1))


async def test_texts_without_a_tokenizer(
    face: Face, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_engine.model, "tokenizer", None)
    for sent in (request("abc"), request([65], stop=["a"])):
        error = await refused(face, sent)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.details() == "the model has no tokenizer; send token ids"


async def test_bytes_that_are_no_message(face: Face) -> None:
    for raw in (b"\xff", b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x22\x7f"):
        call: Any = face.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(raw)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is INVALID


async def test_too_many_ids_to_abort(face: Face) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="request_ids") as error:
        await face.stub.Abort(pb.AbortRequest(request_ids=["a"] * 3000))
    assert error.value.code() is INVALID


async def test_unknown_methods(face: Face) -> None:
    for method in ("/vllm.grpc.engine.VllmEngine/Nothing", "/no.Service/At"):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await face.channel.unary_unary(method)(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
