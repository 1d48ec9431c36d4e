"""What holds where a client says nothing: the checkpoint's generation_config, in LLM and in Engine."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from jaxinfer import Engine, SamplingParams
from jaxinfer.errors import JaxinferError
from jaxinfer.inputs import default_sampling_params
from tests.engine.conftest import SMALL
from tests.engine.requests import ids


def test_defaults_come_from_the_checkpoint():
    found = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 2}
    params = default_sampling_params(found)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 0)
    assert default_sampling_params(found | {"do_sample": False}).greedy
    assert default_sampling_params({}) == SamplingParams()
    with pytest.raises(JaxinferError, match="top_p=7"):
        default_sampling_params({"top_p": 7})


def test_an_engine_takes_them_too(tiny_model, monkeypatch):
    """Temperature 1 would not give the greedy tokens four times."""
    monkeypatch.setattr(tiny_model, "generation_config", {"do_sample": False})

    async def answer(params: SamplingParams | None = None) -> list[int]:
        outputs = [o async for o in engine.generate({"prompt_token_ids": [5, 6, 7]}, params)]
        return ids(outputs[-1])

    with closing(Engine(tiny_model, **SMALL)) as engine:
        wanted = asyncio.run(answer(SamplingParams(temperature=0.0)))
        for _ in range(4):
            assert asyncio.run(answer()) == wanted
