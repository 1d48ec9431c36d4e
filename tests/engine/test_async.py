"""Engine: streams, aborts, deadlines, drain and failures, each in an event loop of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxinfer import Engine, SamplingParams
from jaxinfer.errors import InvalidRequest, Unavailable
from jaxinfer.loading import LoadedModel
from jaxinfer.types import Logprob, RequestOutput
from tests.engine.conftest import SMALL
from tests.engine.requests import GREEDY, PROMPT, ask, ids, mixed_requests, tokens

LONG = SamplingParams(max_tokens=120, **GREEDY)
SHORT = SamplingParams(max_tokens=3, **GREEDY)


@pytest.fixture(scope="module")
def engine(tiny_model: LoadedModel):
    engine = Engine(tiny_model, **SMALL)
    yield engine
    engine.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In a fresh event loop, with a time limit, so that a hang is a failure."""
    return asyncio.run(asyncio.wait_for(coroutine, 100))


async def collect(engine: Engine, prompt: Any, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    if isinstance(prompt, list):
        prompt = {"prompt_token_ids": prompt}
    return [output async for output in engine.generate(prompt, *args, **kwargs)]


async def last(engine: Engine, prompt: Any, *args: Any, **kwargs: Any) -> RequestOutput:
    return (await collect(engine, prompt, *args, **kwargs))[-1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def is_idle(engine: Engine) -> bool:
    stats = engine.stats()
    return (
        stats["running"] == stats["waiting"] == stats["active_requests"] == 0
        and not engine.core.has_work()
        and all(kind["protected"] == 0 for kind in stats["kinds"])
    )


async def until_sampling(engine: Engine, rows: int = 1) -> None:
    """Wait for `rows` more output tokens: a counter, so that a slow test cannot miss the moment."""
    wanted = engine.stats()["tokens_sampled"] + rows
    await until(lambda: engine.stats()["tokens_sampled"] >= wanted)


async def settle(engine: Engine) -> None:
    await until(lambda: is_idle(engine))
    engine.core.check()


def assert_same_logprobs(
    ours: list[dict[int, Logprob]] | None, known: list[dict[int, Logprob]]
) -> None:
    """The same tokens in the same order, with their values, ranks and texts."""
    assert [list(row) for row in ours or []] == [list(row) for row in known]
    for row, wanted in zip(ours or [], known, strict=True):
        for entry, other in zip(row.values(), wanted.values(), strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert (entry.rank, entry.decoded_token) == (other.rank, other.decoded_token)


def test_streams_equal_the_offline_outputs(engine, llm):
    """16 at once on 4 slots; each item holds all so far, and text only grows. R-LPB-03: entries of
    log-probabilities are those of the offline run, whatever the chunks."""
    items = mixed_requests(16, 256, seed=1, longest=60)

    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, p, s) for p, s in items))

    streams = run(main())
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in items]
    wanted = llm.generate(prompts, [params for _, params in items], use_tqdm=False)
    for stream, other in zip(streams, wanted, strict=True):
        final, known = stream[-1].outputs[0], other.outputs[0]
        assert stream[-1].finished and not any(output.finished for output in stream[:-1])
        assert (final.token_ids, final.text) == (known.token_ids, known.text)
        assert (final.finish_reason, final.stop_reason) == (known.finish_reason, known.stop_reason)
        for before, after in zip(stream, stream[1:], strict=False):
            old, new = before.outputs[0], after.outputs[0]
            assert new.text.startswith(old.text) and "\ufffd" not in old.text[len(new.text) :]
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
        if known.logprobs is not None:
            assert_same_logprobs(final.logprobs, known.logprobs)
            for output in stream:
                so_far = output.outputs[0]
                assert_same_logprobs(so_far.logprobs, known.logprobs[: len(so_far.token_ids)])
    run(settle(engine))


def test_several_outputs_are_streamed_by_index(engine, llm):
    params = SamplingParams(n=4, seed=7, temperature=50.0, max_tokens=6)
    final = run(last(engine, PROMPT, params))
    known = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]
    assert [ids(final, i) for i in range(4)] == [ids(known, i) for i in range(4)]


def test_a_snapshot_does_not_change(engine):
    stream = run(collect(engine, PROMPT, LONG))
    assert [len(ids(output)) for output in stream] == sorted({len(ids(o)) for o in stream})
    assert len({id(output.prompt_token_ids) for output in stream}) == 1, "copied for every item"
    assert stream[0].prompt_token_ids == PROMPT
    assert stream[0].metrics.finished_time is None
    assert stream[-1].metrics.finished_time is not None


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_abort_at_any_point(engine, when):
    """R-SCH-06: pages are free within a few steps, and nothing is generated afterwards."""

    async def main() -> RequestOutput:
        busy = []
        if when == "queued":
            busy = [asyncio.create_task(last(engine, PROMPT, LONG, f"busy{i}")) for i in range(4)]
            await until_sampling(engine, 4)
        prompt = tokens(8 if when == "decode" else 90, seed=5)
        params = SamplingParams(max_tokens=120 if when == "decode" else 30, **GREEDY)
        stream = engine.generate({"prompt_token_ids": prompt}, params, "victim")
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # the request is on its way to the engine thread
        output = await first if when == "decode" else None
        assert await engine.abort("victim")
        output = output if output else await first
        output = [output, *[later async for later in stream]][-1]
        assert all(ids(o) and len(ids(o)) == 120 for o in await asyncio.gather(*busy))
        await settle(engine)
        assert not await engine.abort("victim")
        return output

    output = run(main())
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(ids(output)) < (120 if when == "decode" else 30)


def test_leaving_a_stream_early_frees_its_pages(engine):
    async def main() -> None:
        for _ in range(20):
            async for output in engine.generate({"prompt_token_ids": PROMPT}, LONG, "leaver"):
                if ids(output):
                    break
            await until(lambda: "leaver" not in engine._active)
        sampled = engine.stats()["tokens_sampled"]
        assert sampled < before + 20 * 120
        await settle(engine)
        counted = engine.stats()["tokens_sampled"]
        await asyncio.sleep(0.1)
        assert engine.stats()["tokens_sampled"] == counted

    before = engine.stats()["tokens_sampled"]
    run(main())


def test_a_cancelled_task_frees_its_pages(engine):
    async def main() -> None:
        task = asyncio.create_task(collect(engine, PROMPT, LONG))
        await until_sampling(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(engine)

    run(main())


def test_deadlines(engine):
    async def main() -> None:
        late = await last(engine, PROMPT, LONG, timeout=1e-4)
        assert late.outputs[0].finish_reason == "abort" and len(ids(late)) < 120
        good = await last(engine, PROMPT, SHORT, timeout=50.0)
        assert good.outputs[0].finish_reason == "length"
        await settle(engine)

    run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": "soon"}, "timeout='soon'"),
        ({"priority": "high"}, "priority='high'"),
        ({"cache_salt": ["a"]}, r"cache_salt=\['a'\]"),
        ({"request_id": ""}, "request_id=''"),
        ({"request_id": 5}, "request_id=5"),
        ({"sampling_params": {"n": 1}}, "sampling_params="),
        ({"prompt": []}, "empty"),
        ({"prompt": [999]}, "999"),
        ({"prompt": tokens(200)}, "200 tokens"),
    ],
    ids=str,
)
def test_bad_requests_never_reach_the_engine(engine, options, message):
    options = {"prompt": PROMPT, "sampling_params": SHORT} | options
    with pytest.raises(InvalidRequest, match=message):
        run(collect(engine, options.pop("prompt"), **options))
    assert is_idle(engine)


def test_ids_in_use_are_refused(engine):
    """Also an id that is that of a part of a request with n > 1."""

    async def main() -> None:
        parts = SamplingParams(n=2, max_tokens=60, **GREEDY)
        task = asyncio.create_task(last(engine, PROMPT, parts, "same"))
        await until_sampling(engine)
        for name in ("same", "same/1"):
            with pytest.raises(InvalidRequest, match=f"request_id='{name}'"):
                await last(engine, PROMPT, SHORT, name)
        output = await task
        assert [len(o.token_ids) for o in output.outputs] == [60, 60]
        assert len(ids(await last(engine, PROMPT, SHORT, "same"))) == 3
        await settle(engine)

    run(main())


def test_drain(tiny_model):
    """Running requests finish, new ones are refused; what is late is aborted."""
    engine = Engine(tiny_model, **SMALL)

    async def main() -> None:
        tasks = [asyncio.create_task(last(engine, PROMPT, LONG)) for _ in range(6)]
        await asyncio.sleep(0)
        assert engine.stats()["active_requests"] == 6
        drained = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        assert engine.stats()["draining"]
        with pytest.raises(Unavailable, match="draining"):
            await last(engine, PROMPT, SHORT)
        assert await drained
        assert [len(ids(output)) for output in await asyncio.gather(*tasks)] == [120] * 6
        assert await engine.drain(timeout=0.0), "nothing runs any more"

    run(main())
    run(settle(engine))
    engine.close()
    engine.close()
    with pytest.raises(Unavailable):
        run(last(engine, PROMPT, SHORT))


def test_empty_parameters_are_not_the_default(engine):
    with pytest.raises(InvalidRequest, match="sampling_params"):
        run(last(engine, PROMPT, {}))


def test_drain_does_not_wait_for_a_reader_that_sleeps(tiny_model):
    engine = Engine(tiny_model, **SMALL)

    async def main() -> None:
        stream = engine.generate({"prompt_token_ids": PROMPT}, LONG)
        await anext(stream)
        slow = asyncio.create_task(last(engine, tokens(8), LONG))
        await asyncio.sleep(0)
        assert engine.stats()["active_requests"] == 2
        assert not await engine.drain(timeout=0.0)
        assert (await slow).outputs[0].finish_reason == "abort"
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "abort"

    run(main())
    engine.close()


def test_close_ends_streams(tiny_model):
    engine = Engine(tiny_model, **SMALL)

    async def main() -> RequestOutput:
        task = asyncio.create_task(last(engine, PROMPT, LONG))
        await until_sampling(engine)
        await asyncio.to_thread(engine.close)
        return await task

    assert run(main()).outputs[0].finish_reason == "abort"


def test_drain_of_an_engine_that_closes_meanwhile(tiny_model, monkeypatch):
    """The thread is gone before it could read the question."""
    engine = Engine(tiny_model, **SMALL)
    inbox = engine._inbox

    class Late:
        def put(self, command: Any) -> None:
            monkeypatch.setattr(engine, "_inbox", inbox)
            engine.close()
            inbox.put(command)

    monkeypatch.setattr(engine, "_inbox", Late())
    assert asyncio.run(asyncio.wait_for(engine.drain(), 10))


def test_a_cancelled_drain_harms_no_request(engine):
    async def main() -> None:
        task = asyncio.create_task(last(engine, PROMPT, LONG))
        await until_sampling(engine)
        asked = [asyncio.create_task(engine._is_busy()) for _ in range(50)]
        await asyncio.sleep(0)
        for one in asked:
            one.cancel()
        assert (await task).outputs[0].finish_reason == "length"
        await settle(engine)

    run(main())


def test_an_id_that_another_loop_takes_first_is_refused(engine, monkeypatch):
    async def main() -> None:
        task = asyncio.create_task(last(engine, PROMPT, LONG, "mine"))
        await until_sampling(engine)
        monkeypatch.setattr(engine, "_name", lambda wanted: wanted)  # the check came too early
        with pytest.raises(InvalidRequest, match="'mine' is already running"):
            await last(engine, PROMPT, SHORT, "mine")
        assert len(ids(await task)) == 120
        await settle(engine)

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_event_loop_that_is_gone_does_not_harm_the_others(engine):
    loop = asyncio.new_event_loop()
    stream = engine.generate({"prompt_token_ids": PROMPT}, LONG, "orphan")
    loop.run_until_complete(anext(stream))
    loop.close()
    assert len(ids(run(last(engine, tokens(8), SHORT)))) == 3
    run(settle(engine))
    del stream
    gc.collect()
    assert len(ids(run(last(engine, PROMPT, SHORT, "orphan")))) == 3


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
def test_a_failing_loop_ends_its_requests_and_goes_on(engine, llm, monkeypatch, error):
    """Whatever step() may raise: requests end with "error", later ones are as good as any."""
    step = engine.core.step

    def fail() -> Any:
        step()
        monkeypatch.undo()
        raise error("injected")

    async def main() -> None:
        monkeypatch.setattr(engine.core, "step", fail)
        outputs = await asyncio.gather(*(last(engine, PROMPT, LONG) for _ in range(6)))
        assert all(o.finished for o in outputs)
        assert "error" in {o.outputs[0].finish_reason for o in outputs}
        assert all(o.error for o in outputs if o.outputs[0].finish_reason == "error")
        assert ids(await last(engine, PROMPT, SHORT)) == ids(
            ask(llm, PROMPT, max_tokens=3, **GREEDY)
        )
        await settle(engine)

    run(main())


def test_two_event_loops_share_an_engine(engine, llm):
    wanted = ids(ask(llm, PROMPT, max_tokens=20, **GREEDY))

    async def main() -> None:
        params = SamplingParams(max_tokens=20, **GREEDY)

        def other() -> list[int]:
            return ids(asyncio.run(last(engine, PROMPT, params)))

        both = await asyncio.gather(asyncio.to_thread(other), last(engine, PROMPT, params))
        assert both[0] == ids(both[1]) == wanted

    run(main())
