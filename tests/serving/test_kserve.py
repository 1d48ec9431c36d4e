"""The KServe face, driven by the real `tritonclient` in this process.

Its package comes from the environment given with --clients; nothing else is taken from there.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from jaxinfer.engine import Engine
from jaxinfer.types import SamplingParams
from serving.config import Limits
from serving.kserve import NAME
from serving.service import Phase
from tests.serving.grpc_support import Face, idle, mutate, serving, slow_steps, until

GREEDY = {"temperature": 0.0, "max_tokens": 8}
FINAL = "triton_final_response"


@pytest.fixture(scope="module")
def triton(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module tritonclient.grpc.aio."""
    folder = request.config.getoption("--clients")
    if not folder:
        pytest.fail("tests marked 'clients' need --clients=FOLDER (a virtual environment)")
    found = [str(p) for p in Path(folder).resolve().glob("lib/python3*/site-packages")]
    sys.path += found  # last: everything that is installed here comes from here
    try:
        yield import_module("tritonclient.grpc.aio")
    finally:
        for path in found:
            sys.path.remove(path)


@pytest.fixture
async def face(triton: Any, tiny_engine: Engine) -> AsyncIterator[Face]:
    async with serving(tiny_engine, kserve=True) as face:
        yield face
        await until(lambda: idle(tiny_engine) and not face.service.running)


@pytest.fixture
async def client(triton: Any, face: Face) -> AsyncIterator[Any]:
    client = triton.InferenceServerClient(face.server.address)
    yield client
    await client.close()


def inputs(triton: Any, text: str | bytes = "the hell", **more: Any) -> list[Any]:
    """Input tensors as a user makes them."""
    made = []
    for name, value in {"text_input": text, **more}.items():
        kind = "BOOL" if isinstance(value, bool) else "BYTES"
        data = value.encode() if isinstance(value, str) else value
        tensor = triton.InferInput(name, [1], kind)
        tensor.set_data_from_numpy(np.array([data], dtype=bool if kind == "BOOL" else object))
        made.append(tensor)
    return made


async def direct(engine: Engine, text: str = "the hell", **params: Any) -> list[str]:
    last = None
    async for item in engine.generate(text, SamplingParams(**(GREEDY | params))):
        last = item
    assert last is not None
    return [output.text for output in last.outputs]


def texts(result: Any) -> list[str]:
    found = result.as_numpy("text_output")
    return [] if found is None else [text.decode() for text in found.reshape(-1)]


async def streamed(client: Any, requests: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """(result, error) of every reply to a stream of requests."""

    async def source() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    return [pair async for pair in client.stream_infer(source())]


def by_callback(address: str, request: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The same with the blocking client, which alone can ask for an empty final reply."""
    client = import_module("tritonclient.grpc").InferenceServerClient(address)
    pairs: list[tuple[Any, Any]] = []
    client.start_stream(lambda result, error: pairs.append((result, error)))
    client.async_stream_infer(**request)
    client.stop_stream()
    client.close()
    return pairs


pytestmark = pytest.mark.clients


async def test_facts(client: Any, face: Face) -> None:
    assert await client.is_server_live() and await client.is_server_ready()
    assert await client.is_model_ready("tiny") and await client.is_model_ready("tiny", "1")
    assert not await client.is_model_ready("other") and not await client.is_model_ready("tiny", "2")
    assert (await client.get_server_metadata()).name == "jaxinfer"
    metadata = await client.get_model_metadata("tiny")
    assert [tensor.name for tensor in metadata.outputs] == ["text_output"]
    assert "text_input" in [tensor.name for tensor in metadata.inputs]
    config = (await client.get_model_config("tiny")).config
    assert config.model_transaction_policy.decoupled
    face.service.set_phase(Phase.DRAINING)
    assert await client.is_server_live()
    assert not await client.is_server_ready() and not await client.is_model_ready("tiny")


async def test_infer_is_the_engine(client: Any, face: Face, triton: Any) -> None:
    want = await direct(face.engine)
    result = await client.infer("tiny", inputs(triton), request_id="x", parameters=dict(GREEDY))
    assert texts(result) == want
    assert result.get_response().id == "x"
    asked = {"n": 3, "temperature": 1.0, "seed": 5, "top_k": 30, "max_tokens": 6}
    result = await client.infer("tiny", inputs(triton), parameters=asked)
    assert texts(result) == await direct(face.engine, **asked)


async def test_sampling_parameters_as_json(client: Any, face: Face, triton: Any) -> None:
    """As Triton's own vLLM backend takes them."""
    whole = (await direct(face.engine, max_tokens=20))[0]
    stop = whole[6:8]
    want = await direct(face.engine, max_tokens=20, stop=[stop])
    asked = f'{{"temperature": 0, "max_tokens": 20, "stop": [{stop!r}]}}'.replace("'", '"')
    result = await client.infer("tiny", inputs(triton, sampling_parameters=asked))
    assert texts(result) == want and want[0] in whole
    result = await client.infer("tiny", inputs(triton), parameters=GREEDY | {"stop": stop})
    assert texts(result) == await direct(face.engine, stop=stop)


@pytest.mark.parametrize("empty_final", [False, True])
@pytest.mark.parametrize("how", ["tensor", "parameter", "off"])
async def test_streams(face: Face, triton: Any, how: str, empty_final: bool) -> None:
    want = (await direct(face.engine))[0]
    sent = {
        "model_name": "tiny",
        "inputs": inputs(triton, stream=True) if how == "tensor" else inputs(triton),
        "parameters": GREEDY | ({"stream": True} if how == "parameter" else {}),
        "request_id": "a",
        "enable_empty_final_response": empty_final,
    }
    pairs = await asyncio.to_thread(by_callback, face.server.address, sent)
    assert not any(error for _, error in pairs)
    replies = [result.get_response() for result, _ in pairs]
    assert [r.parameters[FINAL].bool_param for r in replies[:-1]] == [False] * (len(replies) - 1)
    assert replies[-1].parameters[FINAL].bool_param and {r.id for r in replies} == {"a"}
    assert (len(replies[-1].outputs) == 0) == empty_final
    assert "".join(text for result, _ in pairs for text in texts(result)) == want
    assert (len(replies) > 2) == (how != "off")


async def test_requests_of_a_stream_run_side_by_side(client: Any, face: Face, triton: Any) -> None:
    """One that is refused takes none of the others along; each reply names its request."""
    prompts = {f"{i}": f"prompt {i}" for i in range(5)}
    sent = [
        {"model_name": "tiny" if i != "3" else "no", "inputs": inputs(triton, text),
         "parameters": GREEDY | {"stream": True}, "request_id": i}
        for i, text in prompts.items()
    ]  # fmt: skip
    pairs = await streamed(client, sent)
    errors = [error for _, error in pairs if error]
    assert len(errors) == 1 and "no" in str(errors[0])
    got = dict.fromkeys(prompts, "")
    for result, error in pairs:
        if not error:
            got[result.get_response().id] += "".join(texts(result))
    assert got.pop("3") == ""
    for i, text in got.items():
        assert text == (await direct(face.engine, prompts[i]))[0]


async def test_a_stream_with_too_many_requests(triton: Any, tiny_engine: Engine) -> None:
    """Those beyond the limit are refused one by one, and counted."""
    rejected: list[Any] = []
    async with serving(tiny_engine, kserve=True, limits=Limits(outputs=1)) as face:
        face.service.on_reject.append(rejected.append)
        client = triton.InferenceServerClient(face.server.address)
        asked = {"model_name": "tiny", "inputs": inputs(triton), "parameters": {"max_tokens": 60}}
        with slow_steps(face.engine):
            answers = await streamed(client, [asked | {"request_id": str(i)} for i in range(3)])
        await client.close()
    refused = [error for _, error in answers if error is not None]
    assert len(refused) == 2 and all("limit is 1" in str(error) for error in refused)
    assert len(rejected) == 2


async def test_trace_headers_reach_the_record(client: Any, face: Face, triton: Any) -> None:
    calls: list[Any] = []
    face.service.on_finish.append(lambda record: calls.append(record.call))
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": trace, "x-other": "1"}
    await client.infer("tiny", inputs(triton), parameters=GREEDY, headers=headers)
    assert calls[0].trace == {"traceparent": trace}


async def test_leaving_a_stream_ends_its_work(client: Any, face: Face, triton: Any) -> None:
    async def source() -> AsyncIterator[dict[str, Any]]:
        for i in range(3):
            yield {"model_name": "tiny", "inputs": inputs(triton), "request_id": f"{i}",
                   "parameters": {"stream": True, "max_tokens": 200, "ignore_eos": True}}  # fmt: skip
        await asyncio.sleep(60)

    with slow_steps(face.engine):
        replies = client.stream_infer(source())
        await anext(replies)
        replies.cancel()
        await until(lambda: idle(face.engine), 3.0)


async def test_leaving_a_call_ends_its_work(client: Any, face: Face, triton: Any) -> None:
    with slow_steps(face.engine):
        asked = {"max_tokens": 200, "ignore_eos": True}
        with pytest.raises(Exception, match="Deadline Exceeded"):
            await client.infer("tiny", inputs(triton), parameters=asked, client_timeout=0.3)
        await until(lambda: idle(face.engine), 3.0)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"max_tokens": -1}, "max_tokens"),
    ({}, {"temperature": "hot"}, "temperature"),
    ({}, {"beams": 3}, "beams"),
    ({}, {"n": 2, "stream": True}, "n=2"),
    ({}, {"stream": 1}, "stream"),
    ({"text": b"\xff\xfe"}, {}, "UTF-8"),
    ({"text": ""}, {}, "empty"),
    ({"text": "x" * 300}, {}, "300"),
    ({"other": "x"}, {}, "other"),
    ({"sampling_parameters": "[1]"}, {}, "sampling_parameters"),
    ({"sampling_parameters": "[" * 100_000}, {}, "sampling_parameters"),
    ({"sampling_parameters": '{"beams": 1}'}, {}, "beams"),
]


@pytest.mark.parametrize(("tensors", "parameters", "name"), REFUSED, ids=lambda v: str(v)[:30])
async def test_refusals(
    client: Any, face: Face, triton: Any, tensors: Any, parameters: Any, name: str
) -> None:
    rejected: list[Any] = []
    face.service.on_reject.append(rejected.append)
    with pytest.raises(Exception, match=name) as error:
        await client.infer("tiny", inputs(triton, **tensors), parameters=parameters)
    assert "INVALID_ARGUMENT" in error.value.status()  # type: ignore[attr-defined]
    assert len(rejected) == 1


async def test_more_refusals(client: Any, face: Face, triton: Any) -> None:
    with pytest.raises(Exception, match="does not exist") as error:
        await client.infer("other", inputs(triton))
    assert "NOT_FOUND" in error.value.status()  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="ModelStreamInfer"):
        await client.infer("tiny", inputs(triton, stream=True))
    with pytest.raises(Exception, match="text_input"):
        await client.infer("tiny", inputs(triton, stream=False)[1:])
    shared = triton.InferInput("text_input", [1], "BYTES")
    shared.set_shared_memory("region", 16)
    with pytest.raises(Exception, match="shared memory"):
        await client.infer("tiny", [shared])


async def test_no_shared_memory_and_no_repository(client: Any) -> None:
    for call in (
        client.register_system_shared_memory("a", "/a", 16),
        client.get_system_shared_memory_status(),
        client.register_cuda_shared_memory("a", b"AAAA", 0, 16),
        client.unregister_system_shared_memory("a"),
        client.load_model("tiny"),
        client.unload_model("tiny"),
        client.get_model_repository_index(),
        client.get_trace_settings(),
        client.get_log_settings(),
        client.get_inference_statistics(),
    ):
        with pytest.raises(Exception, match="does not have this RPC") as error:
            await call
        assert "UNIMPLEMENTED" in error.value.status()  # type: ignore[attr-defined]


async def test_bytes_that_are_no_message_end_a_stream(face: Face) -> None:
    call: Any = face.channel.stream_stream(f"/{NAME}/ModelStreamInfer")()
    await call.write(b"\x0a\xff")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_damaged_requests(face: Face, triton: Any) -> None:
    """Every answer is a result or a refusal; nothing of the inside, no page lost (see the fixture)."""
    pb = import_module("tritonclient.grpc.service_pb2")
    valid = pb.ModelInferRequest(model_name="tiny", id="x", raw_input_contents=[b"\2\0\0\0ab"])
    valid.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    valid.parameters["max_tokens"].int64_param = 3
    valid.parameters["stop"].string_param = '["a"]'
    valid.parameters["temperature"].double_param = 0.5
    rng, data = random.Random(4), valid.SerializeToString(deterministic=True)
    infer: Any = face.channel.unary_unary(f"/{NAME}/ModelInfer")
    codes = set()
    for _ in range(300):
        try:
            await infer(mutate(rng, data), timeout=60)
            codes.add(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
    assert codes == {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    }
