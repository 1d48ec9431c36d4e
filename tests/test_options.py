"""Every option reaches the code that runs: a real request is run on values that note what is read.

The architecture test finds options that nothing names; this one finds those that are named in code
that a run never reaches. Reads by the dataclasses themselves (checks, copies) do not count.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxinfer.llm
from jaxinfer import LLM
from jaxinfer.config import EngineConfig
from jaxinfer.types import SamplingParams
from tests.recurrent import write_recurrent

DEFINITIONS = ("jaxinfer.config", "jaxinfer.types")
read: set[str] = set()


def note(name: str) -> None:
    caller = sys._getframe(2)
    module, function = caller.f_globals.get("__name__"), caller.f_code.co_name
    checks_itself = module in DEFINITIONS and function.startswith("__")
    if not checks_itself and module != "dataclasses":
        read.add(name)


class NotingConfig(EngineConfig):
    """An EngineConfig that notes which fields are read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        note(name)
        return EngineConfig.__getattribute__(self, name)


class NotingParams(SamplingParams):
    """A SamplingParams that notes which fields are read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        note(name)
        return SamplingParams.__getattribute__(self, name)


def unread(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} - read


def test_a_run_reads_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a model with recurrent states: some options are about them."""
    monkeypatch.setattr(jaxinfer.llm, "engine_config", lambda **options: NotingConfig(**options))
    llm = LLM(
        str(write_recurrent(tmp_path / "recurrent")),
        progress=False,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_pages=16,
        compile_cache=str(tmp_path / "programs"),
    )
    params = NotingParams(max_tokens=3, stop="zzz", logprobs=1, prompt_logprobs=1, temperature=0.5)
    llm.generate([[65, 66, 67]], params)
    assert unread(EngineConfig) == set()
    # best_of is refused when the value is built (test_architecture.py has the test).
    assert unread(SamplingParams) == {"best_of"}
