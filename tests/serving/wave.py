"""Many clients of one server at once: some behave, some leave in the middle, some send nonsense.

`wave` asserts that each one gets what it should: the behaving ones exactly what they get alone, the others
a refusal of theirs. Called by test_stress.py.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.serving import faces
from tests.serving.faces import Answer, Asker
from tests.serving.grpc_support import GENERATE, mutate, request

FACES = (faces.completions_stream, faces.grpc_stream)
BAD_BODIES: tuple[bytes | dict[str, Any], ...] = (
    b"{", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 1000,
    {}, {"prompt": "a", "max_tokens": -1}, {"prompt": {"a": 1}}, {"prompt": "a", "temperature": "x"},
    {"prompt": "a", "n": 10**6}, {"prompt": "a", "stop": ["x"] * 500},
    {"prompt": "a", "model": "nobody"}, {"prompt": [10**9]}, {"prompt": [[1], "a"]},
    {"prompt": "a", "guided_json": {}}, {"prompt": "long " * 100_000}, {"prompt": "a", "seed": -2},
)  # fmt: skip
BAD_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0}, {"top_p": 7.0}, {"n": 100_000}, {"regex": "a*"}, {"min_tokens": 9},
    {"logit_bias": {10**6: 1.0}}, {"stop": ["x"] * 500}, {"stop_token_ids": [10**6]},
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A request and what it gets when it is alone."""

    prompt: str | list[int]
    params: dict[str, Any]
    truth: Answer


async def alone(asker: Asker, prompts: Sequence[Any], **params: Any) -> list[Ask]:
    """Every prompt asked by itself; all faces must agree."""
    asks = []
    for seed, prompt in enumerate(prompts):
        chosen = params | ({"temperature": 1.0, "seed": seed} if seed % 3 == 2 else {})
        truth, other = [await face(asker, prompt, chosen) for face in FACES]
        assert truth.without_text().outputs == other.outputs
        asks.append(Ask(prompt, chosen, truth))
    return asks


async def behave(asker: Asker, ask: Ask, face: faces.Face) -> None:
    """The right answer to the last token."""
    got = await face(asker, ask.prompt, ask.params)
    for mine, theirs in zip(got.outputs, ask.truth.outputs, strict=True):
        assert mine.ids == theirs.ids
        assert mine.text in (None, theirs.text)
        assert (mine.finish, mine.stop) == (theirs.finish, theirs.stop)
    assert got.usage[:2] == ask.truth.usage[:2]


async def leave(asker: Asker, ask: Ask, over_http: bool, rng: random.Random, span: float) -> None:
    """Go away after some messages, or after some time, whatever comes first."""
    messages = rng.randint(0, 30)
    with suppress(TimeoutError):
        async with asyncio.timeout(rng.uniform(0.0, span)):
            if over_http:
                await _leave_http(asker, ask, messages)
            else:
                await _leave_grpc(asker, ask, messages)


async def _leave_http(asker: Asker, ask: Ask, messages: int) -> None:
    body = {"prompt": ask.prompt, "stream": True, **ask.params}
    async with asker.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            messages -= 1
            if messages < 0:
                return


async def _leave_grpc(asker: Asker, ask: Ask, messages: int) -> None:
    call = asker.stub.Generate(request(ask.prompt, stream=True, **ask.params))
    try:
        async for _ in call:
            messages -= 1
            if messages < 0:
                return
    finally:
        call.cancel()


async def misbehave(asker: Asker, over_http: bool, rng: random.Random) -> None:
    """Nonsense is refused with a client's error."""
    if over_http:
        await garbage(asker, rng)
        body = rng.choice(BAD_BODIES)
        content: dict[str, Any] = {"json": body} if isinstance(body, dict) else {"content": body}
        kind = {"content-type": "application/json"}
        response = await asker.http.post("/v1/completions", headers=kind, **content)
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"]["message"]
        return
    sent = request("abc", **rng.choice(BAD_PARAMS))
    code = await _code(asker, sent.SerializeToString(), 120.0)
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED), code
    mutated = mutate(rng, request("abc", max_tokens=4).SerializeToString())
    code = await _code(asker, mutated, 5.0)
    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE), code


async def garbage(asker: Asker, rng: random.Random) -> None:
    """Bytes that are no HTTP, or the half of a request; then leave."""
    url = asker.http.base_url
    half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(rng.choice((rng.randbytes(300), half)))
    with suppress(ConnectionError):
        await writer.drain()
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        writer.close()
        await writer.wait_closed()


async def _code(asker: Asker, raw: bytes, seconds: float) -> grpc.StatusCode:
    """How the server ends a call with this message; it is left after that time."""
    call = asker.channel.unary_stream(
        GENERATE,
        request_serializer=bytes,
        response_deserializer=pb.GenerateResponse.FromString,
    )(raw)
    try:
        async with asyncio.timeout(seconds):
            async for _ in call:
                pass
    except TimeoutError:
        call.cancel()
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


async def probe(asker: Asker, ask: Ask, done: asyncio.Event) -> int:
    """One request again and again, over all faces; how often."""
    count = 0
    while not done.is_set():
        await behave(asker, ask, FACES[count % len(FACES)])
        count += 1
    return count


async def wave(asker: Asker, asks: Sequence[Ask], clients: int, seed: int, span: float) -> int:
    """All clients at once: a third leaves within `span` seconds, a tenth sends nonsense.

    Returns how many answers the probe got meanwhile.
    """
    rng = random.Random(seed)
    work = []
    for i in range(clients):
        ask, over_http = rng.choice(asks), i % 2 == 0
        mine = random.Random(rng.random())
        if i % 10 == 9:
            work.append(misbehave(asker, i % 20 == 9, mine))
        elif i % 3 == 0:
            work.append(leave(asker, ask, over_http, mine, span))
        else:
            work.append(behave(asker, ask, FACES[0] if over_http else FACES[1]))
    rng.shuffle(work)
    done = asyncio.Event()
    probing = asyncio.ensure_future(probe(asker, asks[0], done))
    try:
        await asyncio.gather(*work)
    finally:
        done.set()
    return await probing


# --- what is left afterwards --------------------------------------------------------------------------


def rss(pid: int) -> float:
    """Memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


async def gauges(http: httpx.AsyncClient) -> dict[str, float]:
    """What /metrics says about work and pages: name and labels -> value."""
    text = (await http.get("/metrics")).text
    names = "vllm:num_requests_running|vllm:num_requests_waiting|jaxinfer:requests_in_flight"
    found = re.findall(rf"^((?:{names}|jaxinfer:pages)(?:{{.*}})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def settled(http: httpx.AsyncClient, seconds: float = 10.0) -> None:
    """Wait until the server says that nothing runs and nothing is held."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        found = await gauges(http)
        assert min(found.values()) >= 0, found
        held = {k: v for k, v in found.items() if "pages" not in k or "protected" in k}
        assert len(held) >= 4, found
        if not any(held.values()):
            return
        assert asyncio.get_running_loop().time() < end, held
        await asyncio.sleep(0.05)
