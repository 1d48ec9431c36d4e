"""Row records and load plans say what layout.py promises, for every sampling parameter."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.layout import FLOAT_FIELDS, LoadOp, RowField, RowFlag
from jaxinfer.scheduler import LoadPlan, StepPlan
from jaxinfer.scheduler.plan import LOAD_ENTRIES, LOAD_RESETS
from tests.scheduler.null_model import FULL, Runner, request, window


def plans(runner: Runner, *requests) -> tuple[list[LoadPlan], StepPlan]:
    """Load plans that come before and in the first step, and that step."""
    for req in requests:
        runner.add(req)
    loads: list[LoadPlan] = []
    while True:
        plan = runner.scheduler.plan()
        if isinstance(plan, StepPlan):
            return loads + ([plan.load] if plan.load else []), plan
        assert plan is not None
        loads.append(plan)


def first_row(**options) -> tuple[dict[RowField, float], RowFlag]:
    _, plan = plans(Runner(), request("r", [5, 6, 7], 9, **options))
    row = plan.prefill[0]
    floats = row.view(np.float32)
    fields = {f: float(floats[f] if f in FLOAT_FIELDS else row[f]) for f in RowField}
    return fields, RowFlag(int(row[RowField.FLAGS]))


def test_defaults():
    fields, flags = first_row()
    assert flags == RowFlag.SAMPLE | RowFlag.RANDOM
    assert fields[RowField.SLOT] == 1 and fields[RowField.START] == 0
    assert fields[RowField.LENGTH] == 3 and fields[RowField.BLOCKS] == 1
    assert fields[RowField.TEMPERATURE] == fields[RowField.TOP_P] == 1.0
    assert fields[RowField.REPETITION] == 1.0 and fields[RowField.OUT_POS] == 0
    for name in (RowField.TOP_K, RowField.MIN_P, RowField.PRESENCE, RowField.FREQUENCY):
        assert fields[name] == 0


def test_greedy_ignores_filters():
    for temperature in (0.0, 5e-5):
        fields, flags = first_row(temperature=temperature, top_k=3, top_p=0.5, min_p=0.1)
        assert flags == RowFlag.SAMPLE and fields[RowField.TEMPERATURE] == 0.0


@pytest.mark.parametrize(
    ("options", "field", "value", "flag"),
    [
        ({"temperature": 0.5}, RowField.TEMPERATURE, 0.5, RowFlag(0)),
        ({"top_k": 3}, RowField.TOP_K, 3, RowFlag.FILTER),
        ({"top_k": 2**62}, RowField.TOP_K, 2**31 - 1, RowFlag.FILTER),
        ({"top_p": 0.5}, RowField.TOP_P, 0.5, RowFlag.FILTER),
        ({"min_p": 0.25}, RowField.MIN_P, 0.25, RowFlag.FILTER),
        ({"repetition_penalty": 1.5}, RowField.REPETITION, 1.5, RowFlag.COUNTS),
        ({"presence_penalty": -0.5}, RowField.PRESENCE, -0.5, RowFlag.COUNTS),
        ({"frequency_penalty": 0.5}, RowField.FREQUENCY, 0.5, RowFlag.COUNTS),
        ({"logprobs": 0}, RowField.START, 0, RowFlag.LOGPROBS),
        ({"prompt_logprobs": 0}, RowField.START, 0, RowFlag.PROMPT_LOGPROBS),
        ({"rope_length": 77}, RowField.ROPE_LENGTH, 77, RowFlag(0)),
        ({"min_tokens": 2}, RowField.START, 0, RowFlag(0)),  # nothing to ban
    ],
)
def test_each_parameter_has_its_column_and_flag(options, field, value, flag):
    fields, flags = first_row(**options)
    assert fields[field] == value
    assert flags == RowFlag.SAMPLE | RowFlag.RANDOM | flag


def test_bias_and_bans_set_their_flags():
    for options in ({"logit_bias": {1: 2.0}}, {"allowed_token_ids": [1]}):
        _, flags = first_row(**options)
        assert flags == RowFlag.SAMPLE | RowFlag.RANDOM | RowFlag.BIAS
    _, flags = first_row(min_tokens=1, banned_ids=(4,))
    assert flags == RowFlag.SAMPLE | RowFlag.RANDOM | RowFlag.COUNTS | RowFlag.MIN_TOKENS


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1])
def test_seeds_are_split_in_two_halves(seed):
    _, plan = plans(Runner(), request("r", [5], 9, seed=seed))
    low, high = plan.prefill[0][[RowField.SEED_LOW, RowField.SEED_HIGH]].view(np.uint32).tolist()
    assert low + (high << 32) == seed


def test_only_the_last_chunk_samples_and_prompt_flags_end_with_the_prompt():
    runner = Runner(max_num_batched_tokens=8, overlap=False)
    runner.add(request("r", list(range(20)), 3, prompt_logprobs=1))
    flags = []
    while runner.scheduler.has_work():
        runner.launch()
        plan, _ = runner.inflight[0]
        rows = plan.decode if len(plan.decode) else plan.prefill
        flags.append(RowFlag(int(rows[0][RowField.FLAGS])) & ~RowFlag.RANDOM)
        runner.collect()
    scored = RowFlag.PROMPT_LOGPROBS
    assert flags == [scored, scored, scored | RowFlag.SAMPLE, RowFlag.SAMPLE, RowFlag.SAMPLE]


def test_min_tokens_flag_ends_in_time():
    runner = Runner(overlap=True)
    runner.add(request("r", [1], 6, min_tokens=3, banned_ids=(9,)))
    early = []
    while runner.launch():
        if runner.inflight:
            plan, _ = runner.inflight[-1]
            rows = plan.decode if len(plan.decode) else plan.prefill
            early.append(bool(rows[0][RowField.FLAGS] & RowFlag.MIN_TOKENS))
    assert early[-6:] == [True] * 3 + [False] * 3
    runner.drain()


def test_load_entries():
    runner = Runner(max_num_batched_tokens=512)
    loads, _ = plans(
        runner,
        request("plain", [1], 5),
        request("penal", [3, 4, 3], 5, repetition_penalty=1.2),
        request("bias", [1], 5, logit_bias={7: 1.5, 8: -2.0}),
        request("allow", [1], 5, allowed_token_ids=[7, 9], logit_bias={7: 1.5, 8: -2.0}),
        request("min", [1], 5, min_tokens=2, banned_ids=(0, 2)),
    )
    (load,) = loads
    assert load.resets == [(2, 0.0), (3, 0.0), (4, -np.inf), (5, 0.0)]
    assert load.entries == [
        (2, 3, LoadOp.PROMPT, 0.0),
        (2, 4, LoadOp.PROMPT, 0.0),
        (3, 7, LoadOp.BIAS, 1.5),
        (3, 8, LoadOp.BIAS, -2.0),
        (4, 7, LoadOp.BIAS, 1.5),
        (4, 9, LoadOp.BIAS, 0.0),
        (5, 0, LoadOp.BAN, 0.0),
        (5, 2, LoadOp.BAN, 0.0),
    ]


def test_loads_come_in_portions():
    runner = Runner((FULL,), (500,), max_num_seqs=64, max_num_batched_tokens=4096)
    bias = dict.fromkeys(range(150), 1.0)
    requests = [request(f"r{i}", [i], 2, logit_bias=bias) for i in range(40)]
    loads, plan = plans(runner, *requests)
    assert len(plan.sampled) == 40
    assert all(len(x.resets) <= LOAD_RESETS and len(x.entries) <= LOAD_ENTRIES for x in loads)
    assert sum(len(x.resets) for x in loads) == 40
    assert sum(len(x.entries) for x in loads) == 40 * 150
    seen: set[int] = set()
    for load in loads:  # a slot is reset before its first entry, and once
        for slot, _ in load.resets:
            assert slot not in seen
            seen.add(slot)
        assert {entry[0] for entry in load.entries} <= seen


@pytest.mark.parametrize("overlap", [False, True])
def test_state_is_loaded_again_after_preemption(overlap):
    """The null model compares counts, bans and biases of every sampled row."""
    runner = Runner((FULL, window(8)), (24, 24), 120, overlap=overlap)
    kinds = (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 20, "banned_ids": (1, 2)},
        {"allowed_token_ids": (1, 2, 3)},
        {},
    )
    requests = [request(f"r{i}", [i] * 6, 40, seed=i, **kinds[i % 5]) for i in range(10)]
    for req in requests:
        runner.add(req)
    runner.drain()
    for req in requests:
        runner.expect(req)
    assert runner.scheduler.stats().preemptions >= 3


def test_window_tables_fit_their_columns():
    runner = Runner((FULL, window(9)), (100, 40), 256, max_num_batched_tokens=32)
    layout = runner.scheduler.layout
    assert layout.tables == (64, -(-(9 + 32) // 4) + 2)
    runner.add(request("r", list(range(100)), 100))
    while runner.scheduler.has_work():
        runner.round()
    runner.drain()
