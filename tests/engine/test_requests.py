"""What requests ask and get, at the LLM (R-SMP, R-LPB, R-SCH and R-WLD-07 rules)."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, load
from jaxinfer.errors import CapacityError, InvalidRequest, JaxinferError
from jaxinfer.loading import LoadedModel, compute_dtype
from jaxinfer.types import RequestOutput
from tests.engine.conftest import SMALL
from tests.engine.hand import next_logits
from tests.engine.requests import GREEDY, PROMPT, ask, ids, tokens


def logprob_row(output: RequestOutput, step: int) -> dict[int, float]:
    rows = output.outputs[0].logprobs
    assert rows is not None
    return {token: entry.logprob for token, entry in rows[step].items()}


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def assert_logprobs(row: dict[int, float], wanted: np.ndarray) -> None:
    """The 20 best, floored at -9999; logits reach 50, so float32 sums are good to 1e-4."""
    best = np.argsort(-wanted, kind="stable")[:20]
    for token in best:
        if wanted[token] > -9000:
            assert row[int(token)] == pytest.approx(wanted[token], abs=2e-4)
    for token, value in row.items():
        assert value == pytest.approx(max(wanted[token], -9999.0), abs=2e-4)


# -- penalties and masks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}],
    ids=str,
)
def test_which_tokens_a_penalty_counts(llm, tiny_model, penalty):
    """R-SMP-05: repetition counts the prompt from step 1 on, the others count the output alone."""
    output = ask(llm, PROMPT, max_tokens=6, logprobs=20, **GREEDY, **penalty)
    for step in range(6):
        done = ids(output)[:step]
        x = next_logits(tiny_model, PROMPT + done)
        for token in range(len(x)):
            count = done.count(token)
            if "repetition_penalty" in penalty and (count or token in PROMPT):
                x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
            x[token] -= penalty.get("frequency_penalty", 0.0) * count
            x[token] -= penalty.get("presence_penalty", 0.0) * (count > 0)
        assert ids(output)[step] == x.argmax()
        assert_logprobs(logprob_row(output, step), log_softmax(x))


def test_padding_is_not_counted(llm):
    """R-SMP-06: id 0 pads; in a batch the log-probabilities are those of the solo run."""
    short = [7, 0, 8]
    params = SamplingParams(
        max_tokens=8, frequency_penalty=1.05, repetition_penalty=1.3, logprobs=20, **GREEDY
    )
    plain = SamplingParams(max_tokens=8, **GREEDY)
    solo = ask(
        llm,
        short,
        max_tokens=8,
        frequency_penalty=1.05,
        repetition_penalty=1.3,
        logprobs=20,
        **GREEDY,
    )
    prompts = [{"prompt_token_ids": p} for p in (short, tokens(40))]
    both = llm.generate(prompts, [params, plain], use_tqdm=False)
    assert ids(both[0]) == ids(solo)
    for step in range(8):
        assert logprob_row(both[0], step) == pytest.approx(logprob_row(solo, step), abs=1e-4)


def test_bias_allowed_ids_and_min_tokens(llm, tiny_model):
    x = next_logits(tiny_model, PROMPT)
    worst = int(x.argmin())
    allowed = [int(t) for t in np.argsort(x)[:5]]
    output = ask(llm, PROMPT, max_tokens=1, logprobs=20, logit_bias={worst: 100.0}, **GREEDY)
    wanted = x.copy()
    wanted[worst] += 100.0
    assert ids(output) == [worst]
    assert_logprobs(logprob_row(output, 0), log_softmax(wanted))

    output = ask(llm, PROMPT, max_tokens=8, logprobs=20, allowed_token_ids=allowed, **GREEDY)
    assert set(ids(output)) <= set(allowed)
    masked = np.full_like(x, -np.inf)
    masked[allowed] = x[allowed]
    assert_logprobs(logprob_row(output, 0), log_softmax(masked))

    first = int(x.argmax())
    stopped = ask(llm, PROMPT, max_tokens=8, temperature=0.0, stop_token_ids=[first])
    assert ids(stopped) == [first]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", first)
    later = ask(llm, PROMPT, max_tokens=8, temperature=0.0, stop_token_ids=[first], min_tokens=4)
    assert first not in ids(later)[:4] and len(ids(later)) >= 4


# -- draws ---------------------------------------------------------------------------------------


def test_unseeded_draws_vary(llm):
    """R-SMP-03: along a row, between equal requests, and from call to call."""
    flat = dict.fromkeys(range(256), 0.0)
    params = {"temperature": 100.0, "max_tokens": 64, "ignore_eos": True, "logit_bias": flat}
    prompts = [{"prompt_token_ids": PROMPT}] * 16
    rows = [ids(o) for o in llm.generate(prompts, SamplingParams(**params), use_tqdm=False)]
    assert all(len(set(row)) > 30 for row in rows)
    assert len({tuple(row) for row in rows}) == 16
    assert ids(ask(llm, PROMPT, **params)) not in rows


def test_several_outputs(llm):
    """R-SMP-07."""
    params: dict[str, Any] = {"n": 4, "seed": 7, "temperature": 50.0, "max_tokens": 12}
    first, second = (ask(llm, PROMPT, **params) for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(ids(first, i)) for i in range(4)}) == 4
    assert [ids(first, i) for i in range(4)] == [ids(second, i) for i in range(4)]
    assert ids(first) == ids(ask(llm, PROMPT, **(params | {"n": 1})))
    greedy = ask(llm, PROMPT, n=4, max_tokens=5, **GREEDY)
    assert len({tuple(ids(greedy, i)) for i in range(4)}) == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-8, 1e-30])
def test_tiny_temperature_beside_others(llm, temperature):
    """R-SMP-01."""
    seeded = SamplingParams(temperature=0.9, seed=3, max_tokens=8)
    alone = ids(llm.generate({"prompt_token_ids": PROMPT}, seeded, use_tqdm=False)[0])
    tiny = SamplingParams(temperature=temperature, max_tokens=8)
    both = llm.generate([{"prompt_token_ids": PROMPT}] * 2, [tiny, seeded], use_tqdm=False)
    assert ids(both[0]) == ids(ask(llm, PROMPT, temperature=0.0, max_tokens=8))
    assert ids(both[1]) == alone


@pytest.mark.parametrize("seed", [0, 2**31, 2**32, 2**63 - 1])
def test_seeds_of_every_size(llm, seed):
    params: dict[str, Any] = {"temperature": 30.0, "seed": seed, "max_tokens": 8}
    assert ids(ask(llm, PROMPT, **params)) == ids(ask(llm, PROMPT, **params))


def test_top_k_past_the_vocabulary_is_off(llm):
    params: dict[str, Any] = {"temperature": 5.0, "seed": 1, "max_tokens": 8}
    assert ids(ask(llm, PROMPT, top_k=9999999, **params)) == ids(ask(llm, PROMPT, **params))


# -- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_finite_and_hold_the_chosen_token(llm):
    """R-LPB-01, R-LPB-02: a floor instead of -inf; 0 gives the chosen token alone."""
    output = ask(llm, PROMPT, max_tokens=3, logprobs=20, allowed_token_ids=[3], **GREEDY)
    for step in range(3):
        row = logprob_row(output, step)
        assert row[3] == 0.0
        assert all(math.isfinite(value) for value in row.values())
        assert min(row.values()) in (0.0, -9999.0)
    output = ask(llm, PROMPT, max_tokens=3, logprobs=0, **GREEDY)
    assert [list(row) for row in output.outputs[0].logprobs or []] == [[t] for t in ids(output)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(
        sum(logprob_row(output, i)[t] for i, t in enumerate(ids(output)))
    )
    sampled = ask(llm, PROMPT, max_tokens=6, logprobs=2, temperature=40.0, seed=5)
    for step, token in enumerate(ids(sampled)):
        row = (sampled.outputs[0].logprobs or [])[step]
        assert token in row and 2 <= len(row) <= 3
        assert sorted(e.rank or 0 for e in row.values())[:2] == [1, 2]


def test_prompt_logprobs_against_an_independent_forward(llm, tiny_model):
    """Over several chunks, with a warm cache, beside another request."""
    prompt = tokens(100, seed=2)
    ask(llm, prompt, max_tokens=1, **GREEDY)
    other = SamplingParams(max_tokens=4, **GREEDY)
    scored = SamplingParams(max_tokens=2, prompt_logprobs=3, **GREEDY)
    output, _ = llm.generate(
        [{"prompt_token_ids": p} for p in (prompt, PROMPT)], [scored, other], use_tqdm=False
    )
    rows = output.prompt_logprobs
    assert rows is not None and len(rows) == 100 and rows[0] is None
    wanted = next_logits(tiny_model, prompt, every=True)
    for position in range(1, 100):
        row, x = rows[position], log_softmax(wanted[position - 1])
        assert row is not None and prompt[position] in row and 3 <= len(row) <= 4
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(x[token], abs=5e-4)
    scores = llm.score({"prompt_token_ids": prompt})[0]
    assert scores.total == pytest.approx(
        sum(log_softmax(wanted[i - 1])[prompt[i]] for i in range(1, 100)), abs=1e-2
    )


# -- lengths and pages ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_max_tokens_zero_and_one(llm, max_tokens):
    """R-SCH-04."""
    output = ask(llm, PROMPT, max_tokens=max_tokens, prompt_logprobs=1)
    assert len(ids(output)) == max_tokens
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs or []) == len(PROMPT)


@pytest.mark.parametrize(
    ("length", "max_tokens", "output"),
    [
        (126, 1, 1), (126, 2, 2), (126, 3, None), (126, None, 2),
        (127, 1, 1), (127, 2, None), (127, None, 1),
        (128, 0, 0), (128, 1, None), (128, None, None),
        (129, 0, None), (129, 1, None), (129, None, None),
    ],
)  # fmt: skip
def test_prompts_about_as_long_as_the_model(llm, length, max_tokens, output):
    """R-SCH-09, with max_model_len=128."""
    prompt = tokens(length)
    if output is None:
        with pytest.raises(InvalidRequest, match=rf"{length} tokens.*12[78]"):
            ask(llm, prompt, max_tokens=max_tokens, **GREEDY)
    else:
        got = ask(llm, prompt, max_tokens=max_tokens, **GREEDY)
        assert len(ids(got)) == output and got.outputs[0].finish_reason == "length"
    assert len(ids(ask(llm, PROMPT, max_tokens=1))) == 1


def test_a_request_that_never_fits_is_refused_at_once(tiny_model):
    """R-SCH-01: with the numbers; the short ones go on. Nothing runs if one of a batch is refused."""
    options: dict[str, Any] = SMALL | {"num_pages": 5}
    llm = LLM(tiny_model, **options)
    with pytest.raises(CapacityError, match=r"prompt of 100 tokens needs 7 pages.*the pool has 4"):
        ask(llm, tokens(100), max_tokens=8)
    with pytest.raises(CapacityError):
        llm.generate([PROMPT, tokens(100)], SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.core.stats()["steps"] == 0 and not llm.core.has_work()
    short = llm.generate(
        [tokens(20, i) for i in range(5)], SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False
    )
    assert [len(ids(o)) for o in short] == [8] * 5
    llm.core.check()


@pytest.mark.parametrize("length", [16, 17, 32, 48, 64])
def test_cached_tokens_leave_the_last_one_to_compute(llm, length):
    """R-SCH-02: the whole pages of the prompt without its last token."""
    prompt = tokens(length, seed=length + 1000)
    cold, warm = (ask(llm, prompt, max_tokens=4, **GREEDY) for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (length - 1) // 16 * 16
    assert ids(cold) == ids(warm)


@pytest.mark.parametrize("budget", [2000, 17, 1])
def test_budgets_of_every_kind(tiny_model, llm, budget):
    """R-SCH-05: also with more sequences than the budget has tokens."""
    seqs = 2 if budget == 2000 else 20
    options: dict[str, Any] = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    other = LLM(tiny_model, **(SMALL | options))
    for length in (3, 33, 70):
        prompt = tokens(length, seed=length)
        assert ids(ask(other, prompt, max_tokens=6, **GREEDY)) == ids(
            ask(llm, prompt, max_tokens=6, **GREEDY)
        )
    other.core.check()


def test_objects_return_to_their_base(llm):
    """R-SCH-07: nothing is kept of requests that have ended."""
    sizes = []
    for _ in range(3):
        for _ in range(10):
            prompts = [{"prompt_token_ids": PROMPT}] * 10
            llm.generate(prompts, SamplingParams(max_tokens=1, stop="zz"), use_tqdm=False)
        gc.collect()
        sizes.append(sum(str(type(o).__module__).startswith("jaxinfer") for o in gc.get_objects()))
    assert sizes[2] <= sizes[1]


def test_long_prompt_without_the_cache(tiny_model):
    """R-SCH-08: five chunks of 16; the pool is as it was before."""
    options: dict[str, Any] = SMALL | {"max_num_batched_tokens": 16, "max_num_seqs": 1}
    llm = LLM(tiny_model, enable_prefix_caching=False, **options)
    before = llm.core.stats()["kinds"]
    assert len(ids(ask(llm, tokens(80), max_tokens=3, **GREEDY))) == 3
    assert llm.core.stats()["kinds"] == before


# -- results and defaults ---------------------------------------------------------------------


def test_token_ids_of_numpy_are_token_ids(llm):
    wanted = ids(ask(llm, [5, 6, 7], max_tokens=3, **GREEDY))
    params = SamplingParams(max_tokens=3, **GREEDY)
    array = np.array([5, 6, 7], np.int32)
    for prompt in (array, list(array), [array], array[None], {"prompt_token_ids": array}):
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert ids(output) == wanted
        assert all(type(token) is int for token in output.prompt_token_ids)
    assert len(llm.generate(np.stack([array, array]), params, use_tqdm=False)) == 2


def test_the_final_message_is_continued(llm):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    params = SamplingParams(max_tokens=1, **GREEDY)
    [output] = llm.chat(
        messages,
        params,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert (output.prompt or "").endswith("assistant\nIt is")


def test_times_are_in_order(llm):
    output = ask(llm, PROMPT, max_tokens=5, **GREEDY)
    times = output.metrics
    assert times.first_scheduled_time and times.first_token_time and times.finished_time
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time <= times.finished_time


# -- numbers that are not finite -----------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tiny: Path) -> LoadedModel:
    """TINY whose embedding of token 200 is infinite."""
    model = load(str(tiny))
    params = model.params | {"embed": model.params["embed"].at[200].set(np.inf)}
    model.params = jax.block_until_ready(params)
    return model


def test_not_a_number_ends_its_own_request(broken, llm):
    """R-WLD-07: never a run of token 0, and the neighbours' tokens are their own."""
    other = LLM(broken, **SMALL)
    prompts = [tokens(12, 1), [3, 200, 4], tokens(30, 2), [200]]
    prompts = [
        [t for t in p if t != 200] or [1] if i % 2 == 0 else p for i, p in enumerate(prompts)
    ]
    params = SamplingParams(max_tokens=6, logit_bias={200: -100.0}, **GREEDY)
    outputs = other.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for i in (1, 3):
        assert outputs[i].outputs[0].finish_reason == "error" and not ids(outputs[i])
        assert "not finite" in (outputs[i].error or "")
    for i in (0, 2):
        wanted = ask(llm, prompts[i], max_tokens=6, logit_bias={200: -100.0}, **GREEDY)
        assert ids(outputs[i]) == ids(wanted) and outputs[i].error is None
    other.core.check()


def test_scores_that_are_nan_are_an_error(llm, broken):
    """R-WLD-07: with max_tokens=0 nothing is sampled, and -9999 would look like an answer."""
    other = LLM(broken, **SMALL)
    good = {"prompt_token_ids": tokens(70, 1)}
    good["prompt_token_ids"] = [t for t in good["prompt_token_ids"] if t != 200]
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    outputs = other.generate([{"prompt_token_ids": [3, 200, 4]}, good], params, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error" and outputs[0].prompt_logprobs is None
    assert outputs[1].outputs[0].finish_reason == "length" and outputs[1].prompt_logprobs
    with pytest.raises(JaxinferError, match="not finite"):
        other.score({"prompt_token_ids": [3, 200, 4]})
    other.core.check()


def test_float16_for_a_bfloat16_model_warns(caplog):
    """R-WLD-07."""
    assert compute_dtype("float16", "bfloat16") == "float16"
    assert "overflow" in caplog.text
    caplog.clear()
    assert compute_dtype("float16", "float16") == "float16"
    assert compute_dtype("auto", "bfloat16") == "float32", "on the CPU"
    assert not caplog.text
