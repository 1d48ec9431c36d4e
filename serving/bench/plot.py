"""A figure of a run: distributions of the latencies, and requests and tokens over time.

Needs matplotlib, which is imported when asked for; opens no window. Called by commands/bench.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidRequest
from serving.bench.metrics import Slo, in_flight, latencies
from serving.bench.record import Record

PANELS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "E2EL"))
BINS = 60


def check_plot(path: Path) -> None:
    """InvalidRequest if the figure could not be made after the run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest(
            f"plot={str(path)!r} needs matplotlib: pip install 'jaxinfer[demo]', or leave it out"
        )
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidRequest(f"plot={str(path)!r}; the name must end in .png, .svg or .pdf")


def write_plot(path: Path, records: Sequence[Record], title: str, slo: Slo) -> None:
    """CDFs of the latencies with the limits, then requests in flight and output over time."""
    from matplotlib.figure import Figure

    good = [r for r in records if r.error is None]
    samples = latencies(good)
    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(3, 4)
    for column, (name, label) in enumerate(PANELS):
        _cdf(figure.add_subplot(grid[0, column]), samples[name], label, slo.get(name))
    end = max((r.end for r in records), default=0.0) or 1.0
    flight = figure.add_subplot(grid[1, :])
    moments = [(0.0, 0), *in_flight(records)]
    flight.step([m for m, _ in moments], [level for _, level in moments], where="post")
    flight.set(ylabel="requests in flight", xlim=(0, end), ylim=(0, None))
    tokens = figure.add_subplot(grid[2, :], sharex=flight)
    arrivals = [(moment, size) for r in good for moment, size in _outputs(r)]
    weights = [size * BINS / end for _, size in arrivals]
    tokens.hist([m for m, _ in arrivals], bins=BINS, range=(0, end), weights=weights)
    tokens.set(xlabel="seconds", ylabel="output tokens/s")
    figure.savefig(path, dpi=120)


def _cdf(axes: Any, values: list[float], label: str, limit: float | None) -> None:
    axes.set(xlabel=f"{label}, ms", ylim=(0, 1.02))
    if values:
        ordered = sorted(values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step(ordered, shares, where="post")
        axes.set_xlim(0, None)
    if limit is not None:
        axes.axvline(limit, linestyle="--", color="tab:red")


def _outputs(record: Record) -> list[tuple[float, float]]:
    """(time, tokens) of each message; spread evenly where the server counts only the sum."""
    if not record.arrivals:
        return []
    if len(record.counts) == len(record.arrivals):
        before = [0, *record.counts]
        sizes = [float(b - a) for a, b in zip(before, record.counts, strict=False)]
    else:
        even = (record.completion_tokens or len(record.arrivals)) / len(record.arrivals)
        sizes = [even] * len(record.arrivals)
    return list(zip(record.arrivals, sizes, strict=True))
