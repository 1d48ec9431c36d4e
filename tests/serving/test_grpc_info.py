"""What gateways ask a worker: model, server, loads, the tokenizer's archive; and the admin RPCs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from jaxinfer.engine import Engine
from jaxinfer.loading import load
from serving.grpc_tokenizer import CHUNK, bundle, chunks
from serving.kv_events import KvEventHub
from tests.checkpoints import BOS, CHAT_TEMPLATE, EOS, IM_END, VOCAB, byte_tokenizer
from tests.serving.grpc_support import Face, request, serving, slow_steps, until

FAILED = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
async def face(tiny_engine: Engine) -> AsyncIterator[Face]:
    async with serving(tiny_engine) as face:
        yield face


async def test_model_info(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "eos_token_id": [1]}
    monkeypatch.setattr(face.engine.model, "generation_config", recommended)
    info = await face.stub.GetModelInfo(pb.GetModelInfoRequest())
    longest = face.engine.core.max_model_len
    assert info == pb.GetModelInfoResponse(
        model_path="tiny",
        served_model_name="tiny",
        is_generation=True,
        max_context_length=longest,
        max_req_input_len=longest - 1,
        vocab_size=VOCAB,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        eos_token_ids=[EOS, IM_END],
        bos_token_id=BOS,
        default_sampling_params_json='{"temperature": 0.6, "top_k": 20}',
    )


async def test_the_served_name(tiny_engine: Engine) -> None:
    async with serving(tiny_engine, served_model_name=("my/name", "other")) as face:
        info = await face.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.served_model_name == "my/name"


async def test_server_info(face: Face) -> None:
    info = await face.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.server_type, info.data_parallel_size) == ("vllm-grpc", 1)
    assert (info.block_size, info.max_num_seqs) == (16, face.engine.core.config.rows)
    assert info.model_dtype == info.kv_cache_dtype == "float32"
    assert info.active_requests == 0 and not info.is_paused and 0 < info.uptime_seconds < 600
    await face.generate(request([65]))
    later = await face.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert later.last_receive_timestamp > info.last_receive_timestamp


async def test_loads(face: Face) -> None:
    loads = await face.stub.GetLoads(pb.GetLoadsRequest(include=["core", "queues"]))
    load = loads.loads[0]
    assert loads.dp_rank_count == 1 and load.num_total_reqs == 0 and load.token_usage == 0
    assert load.max_running_requests == face.engine.core.config.rows
    assert load.max_total_num_tokens == face.engine.stats()["kinds"][0]["total"] * 16
    assert not (await face.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
    with slow_steps(face.engine):
        sent = request(list(range(40)), request_id="a", max_tokens=150, ignore_eos=True)
        call = asyncio.ensure_future(face.generate(sent))
        await until(lambda: face.engine.stats()["running"] == 1)
        load = (await face.stub.GetLoads(pb.GetLoadsRequest(dp_rank=0))).loads[0]
        assert load.num_running_reqs == load.num_total_reqs == 1
        assert load.num_used_tokens >= 40 and 0 < load.token_usage < 1
        await asyncio.sleep(1.0)
        load = (await face.stub.GetLoads(pb.GetLoadsRequest())).loads[0]
        assert 0 < load.gen_throughput < 1000
        await face.stub.Abort(pb.AbortRequest(request_ids=["a"]))
        await call


# --- tokenizer ----------------------------------------------------------------------------------


async def archive(face: Face) -> zipfile.ZipFile:
    parts = [part async for part in face.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(part.data for part in parts)
    assert all(len(part.data) <= CHUNK for part in parts)
    assert [bool(part.sha256) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].sha256 == hashlib.sha256(data).hexdigest()
    return zipfile.ZipFile(io.BytesIO(data))


async def test_tokenizer_of_a_directory(face: Face, tiny: Path) -> None:
    found, again = await archive(face), await archive(face)
    assert found.fp.getvalue() == again.fp.getvalue()  # type: ignore[union-attr]
    names = set(found.namelist())
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert all(found.read(name) == (tiny / name).read_bytes() for name in names)
    loaded = Tokenizer.from_str(found.read("tokenizer.json").decode())
    assert loaded.encode("the hell<s>").ids == byte_tokenizer().encode("the hell<s>").ids


async def test_the_template_of_the_command_line_goes_out(tiny_engine: Engine) -> None:
    async with serving(tiny_engine, chat_template="{{ messages[0].content }}") as face:
        found = await archive(face)
    config = json.loads(found.read("tokenizer_config.json"))
    assert config["chat_template"] == "{{ messages[0].content }}" and config["bos_token"] == "<s>"


def test_a_tokenizer_that_has_no_files(tiny_engine: Engine, tmp_path: Path) -> None:
    """As for GGUF: what was built in memory is written out, with its special tokens and template."""
    model = replace(tiny_engine.model, path=tmp_path / "model.gguf")
    assert model.tokenizer is not None
    data = bundle(model, model.tokenizer, None)
    assert data == bundle(model, model.tokenizer, None)
    found = zipfile.ZipFile(io.BytesIO(data))
    assert found.namelist() == ["tokenizer.json", "tokenizer_config.json"]
    loaded = Tokenizer.from_str(found.read("tokenizer.json").decode())
    assert loaded.encode("the hell<s>").ids == byte_tokenizer().encode("the hell<s>").ids
    config = json.loads(found.read("tokenizer_config.json"))
    assert config["chat_template"] == CHAT_TEMPLATE and config["add_bos_token"] is False
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


def test_large_archives_come_in_chunks() -> None:
    data = bytes(range(256)) * 1000
    parts = list(chunks(data))
    assert [len(part.data) for part in parts] == [CHUNK, CHUNK, CHUNK, 256_000 - 3 * CHUNK]
    assert b"".join(part.data for part in parts) == data
    assert len(list(chunks(bytes(2 * CHUNK)))) == 2


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_no_tokenizer(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face.engine.model, "tokenizer", None)
    call = face.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
    assert await code_of(call.read()) is FAILED
    assert (await face.stub.GetModelInfo(pb.GetModelInfoRequest())).bos_token_id == 0


# --- embeddings, events, administration ---------------------------------------------------------


async def test_embeddings_do_not_exist(face: Face) -> None:
    assert await code_of(face.stub.Embed(pb.EmbedRequest())) is grpc.StatusCode.UNIMPLEMENTED


async def test_kv_events(face: Face) -> None:
    call = face.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    assert await code_of(call.read()) is grpc.StatusCode.UNIMPLEMENTED
    hub = face.service.kv_hub = KvEventHub(100)
    await face.engine.clear_prefix_cache()
    face.engine.set_kv_listener(hub.put)
    try:
        call = face.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await asyncio.wait_for(call.initial_metadata(), 2)
        await face.generate(request(list(range(100, 140))))
        stored: list[int] = []
        batch = common_pb2.KvEventBatch()
        while len(stored) < 32:
            batch = await asyncio.wait_for(call.read(), 5)
            for event in batch.events:
                stored += [token for block in event.stored.blocks for token in block.token_ids]
        assert stored[:32] == list(range(100, 132))
        assert batch.load.max_running_requests == face.engine.core.config.rows
        assert batch.load.engine_reports_steps
    finally:
        face.engine.set_kv_listener(None)
        hub.close()


async def test_flush_cache(face: Face) -> None:
    prompt = list(range(150, 200))

    async def cached() -> int:
        return (await face.generate(request(prompt)))[0].complete.cached_tokens

    await cached()
    assert await cached() == 48
    assert (await face.stub.FlushCache(common_pb2.FlushCacheRequest())).success
    assert await cached() == 0
    for wait in (-1.0, float("nan"), 1e9):
        call = face.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=wait))
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_flush_waits_for_running_requests(face: Face) -> None:
    with slow_steps(face.engine, 0.005):
        sent = request([65], request_id="a", max_tokens=60, ignore_eos=True)
        call = asyncio.ensure_future(face.generate(sent))
        await until(lambda: "a" in face.service.running)
        assert not (await face.stub.FlushCache(common_pb2.FlushCacheRequest())).success
        flushed = await face.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=20))
        assert flushed.success and not face.service.running
        await call


class Recorder:
    """Stands in for the profiler: its interface is that of serving.profiler.Profiler."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def start(self, num_steps: int | None = None) -> str:
        self.calls.append(num_steps)
        return "today"

    def stop(self) -> str:
        self.calls.append("stop")
        return "today"


async def test_profiles(face: Face) -> None:
    """Never a path from a client."""
    start, stop = common_pb2.StartProfileRequest, common_pb2.StopProfileRequest
    assert await code_of(face.stub.StartProfile(start())) is FAILED
    assert await code_of(face.stub.StopProfile(stop())) is FAILED
    face.service.profiler = recorder = Recorder()
    for bad in (start(output_dir="/somewhere"), start(start_step=3), start(activities=["CPU"])):
        assert await code_of(face.stub.StartProfile(bad)) is grpc.StatusCode.INVALID_ARGUMENT
    assert not recorder.calls
    for request_ in (start(), start(num_steps=3)):
        assert (await face.stub.StartProfile(request_)).message == "profile today begins"
    assert (await face.stub.StopProfile(stop())).success
    assert recorder.calls == [None, 3, "stop"]


@pytest.mark.demo
def test_tokenizer_of_a_gguf_file(demo_model: Path) -> None:
    """The archive alone gives the same ids, the special tokens and the chat template."""
    model = load(demo_model)
    assert model.tokenizer is not None and model.template is not None
    found = zipfile.ZipFile(io.BytesIO(bundle(model, model.tokenizer, None)))
    loaded = Tokenizer.from_str(found.read("tokenizer.json").decode())
    text = "<|im_start|>user\nHello, wörld 😀 1234<|im_end|>\n"
    assert loaded.encode(text).ids == model.tokenizer.encode(text)
    config = json.loads(found.read("tokenizer_config.json"))
    assert config["chat_template"] == model.template.source
    assert config["eos_token"] == model.tokenizer.eos_token
