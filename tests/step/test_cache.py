"""The persistent compilation cache and the 64-bit flag, each in processes of their own (R-JAX-04, R-JAX-06)."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

CODE = """
import collections, json, sys, warnings
import jax
{setup}
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
warnings.simplefilter("default")
from jaxinfer import LLM, SamplingParams
options = dict(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64, num_pages=9)
llm = LLM({model!r}, progress=False, compile_cache={cache!r}, **options)
ids = []
for params in (
    dict(temperature=0.0, logprobs=2, prompt_logprobs=1),
    dict(seed=2**63 - 1, temperature=3.0, top_p=0.9, repetition_penalty=1.2, logit_bias={{7: 1.0}}),
):
    params = SamplingParams(max_tokens=6, ignore_eos=True, **params)
    ids += llm.generate({{"prompt_token_ids": [5, 6, 7]}}, params, use_tqdm=False)[0].outputs[0].token_ids
{after}
print(json.dumps([ids, events["cache_hits"], events["cache_misses"]]))
"""


@pytest.fixture(scope="module")
def start(tiny: Path, run_python: Callable[..., str]) -> Callable[..., list[Any]]:
    """Runs two requests in a new process: their tokens, cache hits, cache misses."""

    def run(cache: Path | str, setup: str = "", after: str = "") -> list[Any]:
        code = CODE.format(model=str(tiny), cache=str(cache), setup=setup, after=after)
        return json.loads(run_python(code).splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def filled(start, tmp_path_factory) -> tuple[Path, list[int]]:
    """A cache that two processes filled at the same time, and the tokens that both got."""
    folder = tmp_path_factory.mktemp("xla")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, [folder, folder])
    assert first[0] == second[0] and first[2] + second[2] > 0
    return folder, first[0]


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*-cache") if p.is_file())


def test_a_second_process_compiles_nothing(start, filled):
    folder, wanted = filled
    ids, hits, misses = start(folder)
    assert (ids, misses) == (wanted, 0) and hits >= 3


def test_broken_entries_cost_a_compilation(start, filled, tmp_path):
    """Cut, overwritten and empty files; the version stamp keeps other machines' entries apart."""
    folder, wanted = filled
    (stamp,) = folder.iterdir()
    copy = tmp_path / stamp.name
    copy.mkdir()
    for i, path in enumerate(entries(folder)):
        data = path.read_bytes()
        (copy / path.name).write_bytes([data[: len(data) // 2], b"garbage" * 99, b""][i % 3])
    ids, hits, _ = start(tmp_path)
    assert ids == wanted and hits == 0


def test_a_folder_that_cannot_be_written(start, filled, tmp_path):
    """A file stands where the folder should be: as good as a read-only one, also for root."""
    (tmp_path / "file").write_text("")
    ids, hits, _ = start(tmp_path / "file")
    assert ids == filled[1] and hits == 0


def test_sixty_four_bits_change_nothing(start, filled):
    """R-JAX-06: embedded in a program that sets the flag."""
    ids, _, _ = start("", setup='jax.config.update("jax_enable_x64", True)')
    assert ids == filled[1]


AFTER = """
from pathlib import Path
other = LLM(llm.model, progress=False, compile_cache={second!r}, **options)
other.generate({{"prompt_token_ids": [5]}}, use_tqdm=False)
assert list(Path({second!r}).rglob("*-cache")), "JAX kept the folder that it opened first"
count = len(list(Path({second!r}).rglob("*-cache")))
off = LLM(llm.model, progress=False, compile_cache="", **options | dict(num_pages=10))
off.generate({{"prompt_token_ids": [5]}}, use_tqdm=False)
assert len(list(Path({second!r}).rglob("*-cache"))) == count
"""


def test_each_engine_uses_its_own_folder(start, filled, tmp_path):
    after = AFTER.format(second=str(tmp_path / "second"))
    assert start(filled[0], after=after)[0] == filled[1]


GIVEN = """
import os
os.environ["JAX_COMPILATION_CACHE_DIR"] = {given!r}
from pathlib import Path
import jax
from jaxinfer.step.compile import enable_compile_cache, ensure_compile_cache
ensure_compile_cache()
assert jax.config.jax_compilation_cache_dir == {given!r}
assert enable_compile_cache(None) == Path({given!r})
assert enable_compile_cache({other!r}).parent == Path({other!r})
assert enable_compile_cache("") is None and jax.config.jax_compilation_cache_dir is None
ensure_compile_cache()
assert jax.config.jax_compilation_cache_dir is None, "an engine switched it off"
assert enable_compile_cache(None) == Path({given!r})
jax.config.update("jax_compilation_cache_dir", {other!r})
assert enable_compile_cache(None) == Path({other!r})
"""


def test_the_users_own_folder_is_kept(run_python, tmp_path):
    run_python(GIVEN.format(given=str(tmp_path / "given"), other=str(tmp_path / "other")))


RESEARCH = """
from pathlib import Path
import jax
import jaxinfer.step.compile as compile
compile.DEFAULT_CACHE = Path({folder!r})
from jaxinfer import load
from jaxinfer.research import score
model = load({model!r})
score(model.params, model, [5, 6, 7])
print(len(list(Path({folder!r}).rglob("*-cache"))))
"""


def test_research_is_cached_too(run_python, tiny, tmp_path):
    out = run_python(RESEARCH.format(folder=str(tmp_path / "xla"), model=str(tiny)))
    assert int(out.splitlines()[-1]) > 0
