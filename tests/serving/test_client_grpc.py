"""GrpcClient and AsyncGrpcClient against a live server: the engine's own tokens, aborts and errors."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jaxinfer.engine import Engine
from jaxinfer.errors import InvalidRequest
from jaxinfer.types import SamplingParams
from serving import client_grpc
from serving.client import ApiError
from serving.client_grpc import AsyncGrpcClient, GrpcClient, sampling_message
from serving.config import ServerConfig
from serving.speakers import unpack
from tests.serving.live import LiveServer

PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[GrpcClient]:
    with GrpcClient(f"grpc://{server.target}", timeout=30) as client:
        yield client


def direct(server: LiveServer, prompt: Any, params: SamplingParams) -> Any:
    async def ask() -> Any:
        async with aclosing(server.engine.generate(prompt, params)) as outputs:
            return [output async for output in outputs][-1]

    return server.call(ask())


def test_tokens_are_the_engines(client: GrpcClient, server: LiveServer) -> None:
    truth = direct(server, PROMPT, GREEDY)
    (output,) = truth.outputs
    for prompt in (PROMPT, truth.prompt_token_ids):
        answers = list(client.generate(prompt, GREEDY))
        choices = [choice for answer in answers for choice in answer.choices]
        assert [i for c in choices for i in c.token_ids] == output.token_ids
        assert choices[-1].finish_reason == output.finish_reason
        usage = answers[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == len(truth.prompt_token_ids)
        assert usage.completion_tokens == len(output.token_ids)
        logprobs = [entry for c in choices for entry in c.logprobs or ()]
        for entry, wanted in zip(logprobs, output.logprobs, strict=True):
            assert next(iter(entry)) == next(iter(wanted))
            assert entry == pytest.approx({i: w.logprob for i, w in wanted.items()}, abs=1e-5)


def test_n_outputs_are_told_apart(client: GrpcClient, server: LiveServer) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    ids: list[list[int]] = [[], [], []]
    for answer in client.generate(PROMPT, params):
        for choice in answer.choices:
            ids[choice.index] += choice.token_ids
    assert ids == [o.token_ids for o in direct(server, PROMPT, params).outputs]


async def test_the_async_client_does_the_same(client: GrpcClient, server: LiveServer) -> None:
    async with AsyncGrpcClient(f"grpc://{server.target}", timeout=30) as other:
        mine = [a async for a in other.generate(PROMPT, GREEDY)]
        theirs = list(client.generate(PROMPT, GREEDY))
        ids = [
            [i for a in answers for c in a.choices for i in c.token_ids]
            for answers in (mine, theirs)
        ]
        assert ids[0] == ids[1]
        assert await other.health()
        await other.wait_ready(1.0)
        assert await other.model_info() == client.model_info()
        assert (await other.server_info()).server_type == client.server_info().server_type
        assert (await other.loads()).dp_rank_count == client.loads().dp_rank_count == 1
        assert await other.tokenizer() == client.tokenizer()
        await other.abort("nobody")


def test_facts(client: GrpcClient, server: LiveServer) -> None:
    client.wait_ready(1.0)
    info = client.model_info()
    assert info.served_model_name == "tiny"
    assert info.max_context_length == server.engine.core.max_model_len
    (load,) = client.loads().loads
    assert load.num_running_reqs == 0


def test_the_tokenizer_arrives(client: GrpcClient, server: LiveServer) -> None:
    tokenizer, template = unpack(client.tokenizer(), None)
    own = server.engine.model
    assert own.tokenizer is not None and own.template is not None
    assert tokenizer.encode(PROMPT) == own.tokenizer.encode(PROMPT)
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == own.template.render(messages)
    assert unpack(client.tokenizer(), "{{ 1 }}")[1].render(messages) == "1"


def test_leaving_and_abort_end_the_work(client: GrpcClient, server: LiveServer) -> None:
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = client.generate(PROMPT, endless)
    next(stream)
    stream.close()
    assert server.settle()["running"] == 0
    stream = client.generate(PROMPT, endless, request_id="mine")
    assert next(stream).id == "mine"
    client.abort("mine")
    *_, last = stream
    assert last.choices[0].finish_reason == "abort"
    assert server.settle()["running"] == 0


def test_errors(client: GrpcClient, tiny_engine: Engine) -> None:
    with pytest.raises(ApiError) as caught:
        list(client.generate([10**6], GREEDY))
    assert caught.value.status == "INVALID_ARGUMENT"
    with pytest.raises(InvalidRequest, match="grpc://HOST:PORT"):
        GrpcClient("127.0.0.1:1")
    with GrpcClient("grpc://127.0.0.1:1") as nobody:
        assert not nobody.health()
        with pytest.raises(ApiError) as caught:
            nobody.model_info()
        assert (caught.value.status, caught.value.type) == ("UNAVAILABLE", "connection_error")
        with pytest.raises(ApiError, match="not ready after"):
            nobody.wait_ready(0.05)
    guarded = LiveServer(ServerConfig("t", grpc_port=0, port=0, api_keys=("k",)), tiny_engine)
    try:
        url = f"grpc://{guarded.target}"
        with GrpcClient(url, "k") as friend, GrpcClient(url) as stranger:
            assert list(friend.generate(PROMPT, GREEDY))
            with pytest.raises(ApiError) as caught:
                list(stranger.generate(PROMPT, GREEDY))
            assert caught.value.status == "UNAUTHENTICATED"
    finally:
        guarded.close()


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {n: list(inspect.signature(f).parameters) for n, f in found if n[0] != "_"}

    assert methods(GrpcClient) == methods(AsyncGrpcClient)


# --- messages ---------------------------------------------------------------------------------------

SENT: dict[str, Any] = {
    "n": 2, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 9, "top_p": 0.5,
    "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25,
    "logit_bias": {4: -1.5}, "ignore_eos": True, "stop": ["a"], "stop_token_ids": [5],
    "include_stop_str_in_output": True, "seed": 11, "logprobs": 0, "prompt_logprobs": 4,
    "skip_special_tokens": False,
}  # fmt: skip


def test_every_parameter_is_sent_or_refused() -> None:
    message, default = sampling_message(SamplingParams(**SENT)), sampling_message(SamplingParams())
    fields = {field.name for field, _ in message.ListFields()}  # those that are on the wire
    assert fields >= SENT.keys() - {"skip_special_tokens"}
    for name, value in SENT.items():
        sent = getattr(message, name)
        assert (dict(sent) if name == "logit_bias" else type(value)(sent)) == value
        assert sent != getattr(default, name) or not default.HasField(name)
    rest = {f.name for f in dataclasses.fields(SamplingParams)} - SENT.keys()
    assert rest == {"allowed_token_ids", "best_of", "detokenize"}  # no text comes in any case
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        sampling_message(SamplingParams(allowed_token_ids=[1]))
    with pytest.raises(InvalidRequest, match="do not fit"):
        sampling_message(SamplingParams(seed=2**40))
    assert not default.HasField("max_tokens") or default.max_tokens == SamplingParams().max_tokens


def test_a_complete_message_may_repeat_all_tokens() -> None:
    """As vLLM's servicer has it; another sends none, or streams nothing at all."""

    def complete(*ids: int) -> pb.GenerateResponse:
        part = pb.GenerateComplete(output_ids=ids, finish_reason="stop", matched_stop_str="s")
        return pb.GenerateResponse(complete=part)

    chunk = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1, 2]))
    for messages in (
        [chunk, complete(1, 2)],
        [chunk, complete()],
        [complete(1, 2)],
        [chunk, complete(1, 2, 3)],
    ):
        reader = client_grpc._Reader()
        choices = [reader.answer("r", message).choices[0] for message in messages]
        ids = [i for choice in choices for i in choice.token_ids]
        assert ids == ([1, 2, 3] if messages[-1] == complete(1, 2, 3) else [1, 2])
        assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", "s")
    with pytest.raises(ApiError):
        client_grpc._Reader().answer("r", pb.GenerateResponse())


def test_a_damaged_tokenizer_is_refused() -> None:
    digest = hashlib.sha256(b"ab").hexdigest()
    parts = [b"a", b"b"]
    chunks = [common_pb2.GetTokenizerChunk(data=p) for p in parts]
    chunks[-1].sha256 = digest
    for some, whole in ((chunks, True), (chunks[:1], False), (chunks[1:], False), ([], False)):
        archive = client_grpc._Archive()
        for chunk in some:
            archive.add(chunk)
        if whole:
            assert archive.whole() == b"ab"
        else:
            with pytest.raises(ApiError, match="checksum"):
                archive.whole()


async def test_a_tokenizer_without_end_is_not_read(
    client: GrpcClient, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_grpc, "MAX_TOKENIZER", 10)
    with pytest.raises(ApiError, match="more than 10 bytes"):
        client.tokenizer()
    async with AsyncGrpcClient(f"grpc://{server.target}") as other:
        with pytest.raises(ApiError, match="more than 10 bytes"):
            await other.tokenizer()
