"""How far the GPU kernels are from an H200's limits: right first, then time, in one table.

    python bench/device.py [--dry] [--out FILE.json] [--seconds 280]

`--dry` runs tiny shapes in the interpreter on a CPU: it shows that the script works, and its times say
nothing. An item that fails is listed and never stops the rest. Traffic is what the op must read and
write at least; "of copy" is traffic over time, as a fraction of the copy bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# rows, keys, heads, kv heads, head_dim, page: the first is the one with a target (140 us)
SHAPES = {
    "32 rows of 4,096, pages of 16": (32, 4096, 32, 8, 128, 16),
    "32 rows of 4,096, pages of 64": (32, 4096, 32, 8, 128, 64),
    "1 row of 32,768": (1, 32768, 32, 8, 128, 16),
    "64 rows of 8,192": (64, 8192, 32, 8, 128, 16),
    "256 rows of 2,048": (256, 2048, 32, 8, 128, 16),
    "64 rows of 4,096, head_dim 64": (64, 4096, 32, 8, 64, 16),
    "32 rows of 4,096, head_dim 256": (32, 4096, 16, 8, 256, 16),
}
DRY = {"dry": (1, 64, 2, 1, 64, 16)}
# As oracle.make_case takes them; every result is compared with float64 on fresh random inputs.
CASES = [
    {"rows": 4, "kv_heads": 2, "group": 4, "dim": 128, "page": 16, "pages": 70},
    {"rows": 4, "kv_heads": 2, "group": 8, "dim": 64, "page": 64, "pages": 20, "window": 700},
    {"rows": 3, "kv_heads": 2, "group": 2, "dim": 256, "page": 16, "pages": 40, "softcap": 20.0},
    {"rows": 3, "kv_heads": 1, "group": 9, "dim": 128, "page": 128, "pages": 9},
]
DRY_CASES = [{"rows": 1, "kv_heads": 1, "group": 2, "dim": 64, "page": 16, "pages": 5}]


@dataclass
class Row:
    """One line of the table."""

    item: str
    error: float | None = None  # largest absolute difference from float64
    microseconds: float | None = None
    mib: float | None = None
    gb_per_second: float | None = None
    of_copy: float | None = None


@dataclass
class Report:
    """What has been found so far."""

    dry: bool
    deadline: float
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    copy: float = 0.0  # bytes a second

    def attempt(self, name: str, run: Callable[[], object]) -> bool:
        """Runs an item; what goes wrong is kept as a line. False if something did."""
        try:
            if time.monotonic() > self.deadline:
                raise TimeoutError("no time left")
            run()
        except Exception as error:  # an item never stops the rest
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            return False
        return True

    def timed(self, name: str, traffic: int, call: Callable[[], Any]) -> float:
        """Adds the line of a call that moves `traffic` bytes; returns bytes a second."""
        seconds = median_seconds(call, self.dry)
        rate = traffic / seconds
        fraction = rate / self.copy if self.copy else None
        self.rows.append(Row(name, None, seconds * 1e6, traffic / 2**20, rate / 1e9, fraction))
        return rate


def median_seconds(call: Callable[[], Any], dry: bool) -> float:
    """Seconds a call: the median of 5 batches of queued calls, after one that compiles."""
    import jax

    jax.block_until_ready(call())
    batches, calls = (1, 1) if dry else (5, 30)
    seconds = []
    for _ in range(batches):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def measure_copy(report: Report) -> None:
    """The ceiling: read and write 2 GiB."""
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((1 << (18 if report.dry else 29),), jnp.float32)
    add = jax.jit(lambda a: a + 1)
    report.copy = report.timed("copy (read and write)", 2 * x.nbytes, lambda: add(x))
    report.rows[-1].of_copy = 1.0


def check_decode(report: Report, name: str, options: dict[str, Any]) -> None:
    """Compares a case with the float64 oracle; ValueError if it is wrong."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import pallas_kernels
    from tests.kernels.oracle import Case, attention, make_case, real

    case = make_case(time.time_ns() % 2**32, queries=1, **options)
    case.lengths[:] = 1
    arrays = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in case.arrays]
    op = partial(pallas_kernels.paged_attention, impl="mosaic", **case.options)
    out = np.asarray(jax.jit(lambda *a: op(*a))(*arrays), np.float64)
    floats = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    want = real(case, attention(Case(tuple(floats), case.options, case.lengths)))
    error = float(np.abs(real(case, out) - want).max())
    report.rows.append(Row(name, error))
    if not error < 1e-2:
        raise ValueError(f"differs from float64 by {error:.1e}")


def time_decode(report: Report, name: str, shape: tuple[int, ...]) -> None:
    """The kernel, the reference form, and cuDNN on keys that lie in one piece."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels

    rows, keys, heads, kv_heads, dim, page = shape
    pages = keys // page
    random = jax.random.key(0)
    q = jax.random.normal(random, (rows, 1, heads, dim), jnp.bfloat16)
    pool = jax.random.normal(random, (rows * pages + 1, kv_heads, page, dim), jnp.bfloat16)
    tables = jax.random.permutation(random, rows * pages).reshape(rows, pages) + 1
    base = jnp.zeros(rows, jnp.int32)
    arrays = (q, pool, pool + 1, tables.astype(jnp.int32), base, base + keys - 1)
    traffic = 2 * rows * keys * kv_heads * dim * 2 + 2 * q.nbytes

    def timed(what: str, call: Callable[[], Any]) -> None:
        item = f"{what}: {name}"
        report.attempt(item, partial(report.timed, item, traffic, call))

    for impl in ("mosaic", "reference"):
        op = partial(pallas_kernels.paged_attention, scale=dim**-0.5, impl=impl)
        timed(f"paged decode, {impl}", partial(jax.jit(lambda *a, op=op: op(*a)), *arrays))
    if not report.dry:
        k, v = jax.random.normal(random, (2, rows, keys, kv_heads, dim), jnp.bfloat16)
        attend = jax.jit(partial(jax.nn.dot_product_attention, implementation="cudnn"))
        timed("cuDNN, keys in one piece", partial(attend, q, k, v))


def measure(report: Report) -> None:
    """Everything: the ceiling, what is right, and how fast it is."""
    report.attempt("copy", partial(measure_copy, report))
    right = True
    for options in DRY_CASES if report.dry else CASES:
        name = f"paged decode is right: {options}"
        right &= report.attempt(name, partial(check_decode, report, name, options))
    if not right:
        report.failures.append("paged decode is not timed: it is not known to be right")
        return
    for name, shape in (DRY if report.dry else SHAPES).items():
        report.attempt(name, partial(time_decode, report, name, shape))


def show(report: Report) -> None:
    """The table, widest fact first."""

    def cell(value: float | None, form: str, width: int) -> str:
        return ("" if value is None else format(value, form)).rjust(width)

    print(f"{'item':76}{'us':>10}{'MiB':>9}{'GB/s':>8}{'of copy':>9}{'error':>9}")
    for row in report.rows:
        numbers = (
            cell(row.microseconds, ".1f", 10)
            + cell(row.mib, ".0f", 9)
            + cell(row.gb_per_second, ".0f", 8)
            + cell(row.of_copy, ".2f", 9)
            + cell(row.error, ".1e", 9)
        )
        print(f"{row.item[:75]:76}{numbers}")
    for failure in report.failures:
        print(f"FAILED {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU kernels against the hardware's limits")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, interpreted on the CPU")
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    parser.add_argument("--seconds", type=float, default=280, help="start no item after these")
    options = parser.parse_args()
    import jax

    if options.dry:
        jax.config.update("jax_platforms", "cpu")
    from pallas_kernels.gpu import compat

    device = jax.devices()[0]
    if device.platform != "gpu" and not options.dry:
        print(f"this is for a GPU, not {device.platform}; --dry shows that the script works")
        return 2
    print(f"jax {jax.__version__}, {device.device_kind}")
    report = Report(options.dry, time.monotonic() + options.seconds)
    with compat.interpreter() if options.dry else nullcontext():
        measure(report)
    show(report)
    if options.out:
        facts = {"jax": jax.__version__, "device": device.device_kind, **asdict(report)}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
