"""Text as an Engine streams it: characters of several bytes, and stop strings across tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer import Engine, SamplingParams
from jaxinfer.types import RequestOutput
from tests.engine.conftest import SMALL
from tests.engine.test_async import collect, run, settle


def test_chain_of_events_in_text(chain: Callable[..., Path]):
    """Streamed text of several-byte characters and a stop string: no marks, no leaks (R-TOK-01, R-STP-01)."""
    face = list("😀".encode())
    text = [ord("p"), *face, ord("A"), ord("D"), ord("E"), ord("F"), ord("G")]
    engine = Engine(str(chain(text)), **SMALL)

    async def main(**params: Any) -> list[RequestOutput]:
        params = {"temperature": 0.0, "max_tokens": 20} | params
        streams = await asyncio.gather(
            *(collect(engine, "p", SamplingParams(**params)) for _ in range(8))
        )
        assert len({stream[-1].outputs[0].text for stream in streams}) == 1
        return streams[0]

    plain = run(main())
    assert plain[-1].outputs[0].text == "😀ADEFG"
    assert all("\ufffd" not in output.outputs[0].text for output in plain)
    for stop in ("DEFG", "DE", "EF"):
        stream = run(main(stop=stop))
        final = stream[-1].outputs[0]
        wanted = "😀ADEFG".split(stop)[0]
        assert (final.text, final.finish_reason, final.stop_reason) == (wanted, "stop", stop)
        assert all(wanted.startswith(output.outputs[0].text) for output in stream)
        assert bytes(final.token_ids) == (wanted + stop).encode()
    run(settle(engine))
    engine.close()
