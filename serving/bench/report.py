"""Results as a document, a file and tables. A file holds no secret, no prompt and no answer.

Called by commands/bench.py.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer import __version__
from jaxinfer.errors import InvalidRequest
from serving.bench.metrics import PERCENTILES
from serving.bench.record import Record
from serving.bench.session import Session

if TYPE_CHECKING:
    from rich.console import Console

PACKAGES = ("httpx", "grpcio", "smg-grpc-proto")
NOTES = (
    "TTFT: from sending to the first message with output. TPOT: from that message to the last, "
    "divided by the tokens that the server counts after it. ITL: gaps between messages, however "
    "many tokens each holds. E2EL: until the stream's end. Failed requests are left out."
)
LABELS = {
    "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "send_delay": "send delay",
}  # fmt: skip


def document(session: Session, settings: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """What is printed and written: date, machine, versions, settings, server and results."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "server": asdict(session.server),
        "settings": settings,
        "client_cpu_share": round(session.run.cpu_share, 4),
        "results": results,
        "notes": NOTES,
    }


def machine() -> dict[str, Any]:
    """The machine that sent the load, without its name."""
    cpuinfo, meminfo = Path("/proc/cpuinfo"), Path("/proc/meminfo")
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    memory = int(meminfo.read_text("utf-8").split()[1]) // (1 << 20) if meminfo.exists() else None
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": memory,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"jaxinfer": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One object a request: seconds since the start, and the server's counts."""
    names = ("conversation", "turn", "prompt_tokens", "completion_tokens", "cached_tokens",
             "finish_reason", "error", "message")  # fmt: skip
    out = []
    for r in records:
        times = {"scheduled": r.scheduled, "sent": r.sent, "end": r.end, "ttft": r.ttft}
        times["tpot"] = r.tpot
        row = {k: None if v is None else round(v, 6) for k, v in times.items()}
        out.append(row | {name: getattr(r, name) for name in names} | {"messages": len(r.arrivals)})
    return out


def target_file(name: str, path: Path, suffix: str) -> Path:
    """Where a result goes; in a folder, a name with the date. InvalidRequest if it cannot."""
    if path.is_dir():
        path = path / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d-%H%M}-serve{suffix}"
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidRequest(f"{name}={str(path)!r}: folder {str(path.parent)!r} cannot be written")
    return path


def write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", "utf-8")


def print_errors(console: Console, results: dict[str, Any], records: Sequence[Record]) -> None:
    """Kinds of errors, how often each came, and the first message of each."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{results['requests'] - results['succeeded']} requests failed")
    for head in ("error", "requests", "first message"):
        table.add_column(head, overflow="fold")
    for kind, count in results["errors"].items():
        message = next(r.message for r in records if r.error == kind)
        table.add_row(Text(kind), str(count), Text(message or ""))
    console.print(table)


def print_tables(console: Console, session: Session, results: dict[str, Any]) -> None:
    """Latencies and rates for people."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{escape(session.server.model)}: latency, ms")
    table.add_column("", no_wrap=True)
    heads = ("mean", *(f"p{q}" for q in PERCENTILES), "min", "max")
    for head in heads:
        table.add_column(head, justify="right")
    for name, label in LABELS.items():
        found = results["latency_ms"][name]
        cells = [_short(found[head]) for head in heads] if found else ["-"] * len(heads)
        table.add_row(label, *cells)
    console.print(table)
    rates = Table(show_header=False)
    rates.add_column()
    rates.add_column(justify="right")
    for label, value in _rates(session, results):
        rates.add_row(label, value)
    console.print(rates)
    console.print(NOTES, style="dim", highlight=False)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _rates(session: Session, results: dict[str, Any]) -> list[tuple[str, str]]:
    def show(value: float | None, unit: str = "") -> str:
        return "not told by the server" if value is None else f"{value:,.2f}{unit}"

    cached, goodput = results["cached_share"], results["goodput"]
    out = [
        ("requests succeeded", f"{results['succeeded']} of {results['requests']}"),
        ("duration", show(results["duration_s"], " s")),
        ("requests", show(results["requests_per_s"], " /s")),
        ("input tokens", show(results["input_tokens_per_s"], " /s")),
        ("output tokens", show(results["output_tokens_per_s"], " /s")),
        ("tokens per message", show(results["tokens_per_message"])),
        ("prompt tokens cached", show(cached and 100 * cached, " %")),
        ("most requests in flight", str(results["max_in_flight"])),
        ("CPU of this program", show(100 * session.run.cpu_share, " % of a core")),
    ]
    if goodput:
        share = f"{goodput['requests_per_s']:,.2f} /s ({100 * goodput['share']:.1f} %)"
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        out.append((f"goodput at {limits}", share))
    return out
