"""Percentiles against numpy, and results of hand-made records against arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidRequest
from serving.bench.metrics import describe, meets, parse_slo, percentile, summarize
from serving.bench.plot import _outputs, write_plot
from serving.bench.record import Record

FLOATS = st.floats(-1e9, 1e9)


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    expected = float(np.percentile(np.array(values), q))
    assert percentile(values, q) == pytest.approx(expected, rel=1e-9, abs=1e-5)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == pytest.approx(max(values))


def test_describe() -> None:
    values = [float(v) for v in range(1, 101)]
    found = describe(values)
    assert found is not None
    expected = {"mean": 50.5, "p50": 50.5, "p90": 90.1, "p95": 95.05, "p99": 99.01}
    assert found == {**expected, "min": 1, "max": 100, "count": 100}
    assert describe([]) is None
    for bad in ([], -1), ([1.0], 101), ([1.0], -1):
        with pytest.raises(ValueError):
            percentile(*bad)  # type: ignore[arg-type]


def record(**changes: Any) -> Record:
    """Sent at 1 s, tokens at 1.5, 1.6, 1.8 and 2.0 s, over at 2.1 s."""
    made = Record(0, 0, scheduled=0.9, output_len=4, sent=1.0, end=2.1, finish_reason="length")
    made.arrivals = [1.5, 1.6, 1.8, 2.0]
    made.prompt_tokens, made.completion_tokens, made.cached_tokens = 10, 4, 5
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_latencies_of_a_request() -> None:
    one = record()
    assert one.ttft == pytest.approx(0.5) and one.e2e == pytest.approx(1.1)
    assert one.itl == pytest.approx([0.1, 0.2, 0.2])
    assert one.tpot == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(
    ("changes", "tpot"),
    [
        ({"completion_tokens": 9}, 0.5 / 8),  # 9 tokens in 4 messages: the first held at least one
        ({"completion_tokens": 9, "counts": [3, 5, 7, 9]}, 0.5 / 6),  # the first held three
        ({"completion_tokens": 9, "counts": [9]}, 0.5 / 8),  # counts of some messages only
        ({"completion_tokens": None}, None),
        ({"arrivals": [1.5]}, None),  # all in one message
        ({"arrivals": [], "completion_tokens": 0}, None),
        ({"completion_tokens": 1}, None),
    ],
)
def test_tpot_divides_by_tokens_not_messages(changes: dict[str, Any], tpot: float | None) -> None:
    assert record(**changes).tpot == (None if tpot is None else pytest.approx(tpot))


def test_the_first_failure_is_kept() -> None:
    one = record()
    one.fail("http 500", "a\nb" + "c" * 1000)
    one.fail("timeout", "later")
    assert one.error == "http 500" and one.message is not None
    assert one.message.startswith("a bc") and len(one.message) == 300


def test_summary() -> None:
    bad = record(sent=1.9, end=4.0, arrivals=[2.0], error="timeout", completion_tokens=None)
    late = record(sent=3.0, arrivals=[3.5, 4.5], end=4.0, completion_tokens=11, cached_tokens=0)
    found = summarize([record(), late, bad], duration=4.0, slo={"ttft": 600, "tpot": 99})
    assert (found["requests"], found["succeeded"], found["errors"]) == (3, 2, {"timeout": 1})
    assert found["max_in_flight"] == 2
    assert (found["prompt_tokens"], found["completion_tokens"]) == (20, 15)
    assert (found["cached_tokens"], found["cached_share"]) == (5, 0.25)
    assert found["tokens_per_message"] == 2.5
    rates = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
    assert [found[name] for name in rates] == [0.5, 5.0, 3.75, 8.75]
    assert found["goodput"] == {
        "slo_ms": {"ttft": 600, "tpot": 99}, "met": 0, "share": 0, "requests_per_s": 0
    }  # fmt: skip
    assert found["latency_ms"]["ttft"]["count"] == 2
    assert found["latency_ms"]["ttft"]["p99"] == pytest.approx(500)
    assert found["latency_ms"]["tpot"]["mean"] == pytest.approx((500 / 3 + 100) / 2, abs=1e-3)
    assert found["latency_ms"]["itl"]["count"] == 4
    assert found["latency_ms"]["send_delay"]["max"] == pytest.approx(2100)
    json.dumps(found, allow_nan=False)


def test_what_is_not_told_is_not_guessed() -> None:
    silent = record(prompt_tokens=None, completion_tokens=None, cached_tokens=None)
    found = summarize([record(), silent], 2.0, {})
    for name in ("prompt_tokens", "completion_tokens", "output_tokens_per_s", "total_tokens_per_s",
                 "tokens_per_message", "goodput"):  # fmt: skip
        assert found[name] is None
    assert found["cached_share"] == 0.5 and found["requests_per_s"] == 1.0
    nothing = summarize([record(error="connect")], 0.0, {"e2el": 1})
    assert nothing["latency_ms"]["ttft"] is None and nothing["goodput"]["met"] == 0
    assert summarize([], 0.0, {"e2el": 1})["requests"] == 0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ({"ttft": 501}, True),
        ({"ttft": 499}, False),
        ({"tpot": 167}, True),
        ({"tpot": 166}, False),
        ({"e2el": 1101}, True),
        ({"e2el": 1099}, False),
        ({"ttft": 501, "tpot": 167, "e2el": 1099}, False),
    ],
)
def test_goodput_needs_every_limit(slo: dict[str, float], met: bool) -> None:
    assert meets(record(), slo) is met
    assert not meets(record(error="timeout"), slo)
    assert not meets(record(arrivals=[]), slo)
    found = summarize([record(), record(error="timeout")], 2.0, slo)["goodput"]
    assert (found["met"], found["share"], found["requests_per_s"]) == (met, met / 2, met / 2)


def test_slo_items() -> None:
    assert parse_slo(["ttft:500", "tpot:50.5", "e2el:5e3"]) == {
        "ttft": 500, "tpot": 50.5, "e2el": 5000
    }  # fmt: skip
    for bad in ("ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5"):
        with pytest.raises(InvalidRequest, match="goodput has"):
            parse_slo([bad])
    with pytest.raises(InvalidRequest, match="once"):
        parse_slo(["ttft:5", "ttft:6"])


def test_tokens_over_time_add_up() -> None:
    assert _outputs(record(counts=[1, 1, 3, 4])) == [(1.5, 1), (1.6, 0), (1.8, 2), (2.0, 1)]
    assert _outputs(record(completion_tokens=8)) == [(t, 2) for t in (1.5, 1.6, 1.8, 2.0)]
    assert _outputs(record(arrivals=[])) == []


@pytest.mark.parametrize("records", [[record(error="timeout", arrivals=[])], [record()]])
def test_a_figure_of_anything(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "figure.png"
    write_plot(path, records, "title", {"ttft": 100})
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
