"""Measures jaxinfer against other CPU engines on SmolLM2-135M: interleaved, each in its own process.

    .venv/bin/python bench/compare.py --rounds 3                  all contestants that are set up
    .venv/bin/python bench/compare.py --only ours llamacpp-f32    some of them

Every float32 contestant must first give the float32 answer to a known question; if one does not,
nothing is written. Prints medians and ratios to ours, and writes dated JSON with machine and
versions to bench/results/. How to set the peers up: bench/peers/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from serving.bench import report

HERE = Path(__file__).resolve().parent
Run = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """One engine at one precision.

    Attributes:
        script: its file in bench/peers.
        python: its interpreter below the peers folder; "" is the one that runs this script.
        model: its weights below the peers folder, or a model reference of ours.
        exact: computes in float32, so it must give the float32 answer.
        cold: gets an empty folder for compiled code every round.
    """

    script: str
    model: str
    python: str = ""
    dtype: str = "float32"
    exact: bool = False
    cold: bool = False


HF, OV = "venv-hf/bin/python", "venv-ov/bin/python"
CONTESTANTS = {
    "ours": Contestant("ours.py", "smollm2-135m", exact=True),
    "ours-cold": Contestant("ours.py", "smollm2-135m", exact=True, cold=True),
    "transformers-f32": Contestant("hf.py", "smollm2-135m", HF, exact=True),
    "llamacpp-f32": Contestant("llamacpp.py", "gguf/smollm2-135m-f32.gguf", exact=True),
    "llamacpp-bf16": Contestant("llamacpp.py", "gguf/smollm2-135m-bf16.gguf", dtype="bfloat16"),
    "llamacpp-q8_0": Contestant("llamacpp.py", "gguf/smollm2-135m-q8_0.gguf", dtype="q8_0"),
    "llamacpp-q4_1": Contestant(
        "llamacpp.py", "gguf/smollm2-135m-instruct-q4_1.gguf", dtype="q4_1"
    ),
    "ort-f32": Contestant("ort.py", "ort-f32", HF, exact=True),
    "ort-int4": Contestant("ort.py", "ort-int4", HF, dtype="int4"),
    "openvino-f16": Contestant("ov.py", "gguf/smollm2-135m-f16.gguf", OV, dtype="float16"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", nargs="+", choices=CONTESTANTS, help="default: all that are set up"
    )
    parser.add_argument("--peers", type=Path, default=Path.home() / ".cache" / "jaxinfer-peers")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reps", type=int, default=1, help="repetitions inside each process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--ctx", type=int, default=64)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between processes")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a process may take")
    return parser.parse_args()


def is_ready(contestant: Contestant, peers: Path) -> bool:
    needed = [peers / contestant.python] if contestant.python else []
    if contestant.script != "ours.py":
        needed.append(peers / contestant.model)
    if contestant.script == "llamacpp.py":
        needed.append(peers / "llamacpp.so")
    return all(path.exists() for path in needed)


def command(contestant: Contestant, args: argparse.Namespace, cache: str) -> list[str]:
    ours = contestant.script == "ours.py"
    python = str(args.peers / contestant.python) if contestant.python else sys.executable
    model = contestant.model if ours else str(args.peers / contestant.model)
    line = [python, str(HERE / "peers" / contestant.script), "--model", model]
    line += ["--dtype", contestant.dtype, "--reps", str(args.reps), "--threads", str(args.threads)]
    line += ["--prompt-len", str(args.prompt_len), "--ctx", str(args.ctx), "--gen", str(args.gen)]
    line += ["--batches", *map(str, args.batches)]
    line += ["--exact"] if contestant.exact else []
    line += (
        ["--library", str(args.peers / "llamacpp.so")] if "llamacpp" in contestant.script else []
    )
    line += ["--cache", cache] if cache else []
    return [*line, "--started", str(time.time())]


def measure(name: str, args: argparse.Namespace) -> Run:
    """Run one contestant once. Raises SystemExit with its last words if it fails."""
    contestant = CONTESTANTS[name]
    with tempfile.TemporaryDirectory() as empty:
        line = command(contestant, args, empty if contestant.cold else "")
        run = run_once(name, line, args.timeout)
    time.sleep(args.rest)
    return run


def run_once(name: str, line: list[str], timeout: float) -> Run:
    """What one contestant's process prints. Raises SystemExit with its last words if it fails."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)
    rows = [x for x in done.stdout.splitlines() if x.startswith('{"engine"')]
    if done.returncode or len(rows) != 1:
        raise SystemExit(
            f"{name} failed ({done.returncode}); nothing is written\n{done.stderr[-2000:]}"
        )
    return json.loads(rows[0])


def rates(run: Run) -> dict[str, float]:
    decode = {f"B{rows}": rate for rows, rate in run["decode_tok_s"].items()}
    return {"prefill": run["prefill_tok_s"], **decode}


def summary(runs: dict[str, list[Run]]) -> dict[str, Run]:
    """Medians over the rounds, and the median of each round's own ratio of ours to the peer."""
    out: dict[str, Run] = {}
    for name, rounds in runs.items():
        row: Run = {
            key: statistics.median(run[key] for run in rounds)
            for key in ("ready_s", "first_s", "ttft_s", "peak_rss_mb", "elsewhere")
        }
        row |= {
            rate: statistics.median(rates(run)[rate] for run in rounds) for rate in rates(rounds[0])
        }
        if "ours" in runs:
            pairs = list(zip(runs["ours"], rounds, strict=True))
            row["ratio"] = {
                rate: statistics.median(
                    rates(ours)[rate] / rates(peer)[rate] for ours, peer in pairs
                )
                for rate in rates(rounds[0])
            }
        out[name] = row
    return out


def table(results: dict[str, Run]) -> Table:
    shown = Table(title="SmolLM2-135M; tokens/s, and (ours / peer)", box=MARKDOWN)
    shown.add_column("contestant")
    columns = [key for key in next(iter(results.values())) if key == "prefill" or key[:1] == "B"]
    for column in (*columns, "TTFT s", "ready s", "first s", "peak MB", "others' CPU"):
        shown.add_column(column, justify="right")
    for name, row in results.items():
        cells = [
            f"{row[rate]:.1f}" + (f" ({row['ratio'][rate]:.2f}x)" if "ratio" in row else "")
            for rate in columns
        ]
        cells += [f"{row['ttft_s']:.2f}", f"{row['ready_s']:.1f}", f"{row['first_s']:.2f}"]
        shown.add_row(name, *cells, f"{row['peak_rss_mb']:.0f}", f"{row['elsewhere']:.0%}")
    return shown


def machine() -> Run:
    """What ran this, without its name, and the commit that was measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    python = {"python": platform.python_version(), "commit": commit.stdout.strip()}
    return report.machine() | python


def main() -> None:
    args = parse()
    console = Console(width=150, highlight=False)  # the table can be pasted into the README
    names = args.only or [n for n, c in CONTESTANTS.items() if is_ready(c, args.peers)]
    missing = [n for n in names if not is_ready(CONTESTANTS[n], args.peers)]
    if missing:
        raise SystemExit(f"{missing} are not set up in {args.peers}; see bench/peers/README.md")
    console.print(f"contestants: {', '.join(names)}")
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(1, args.rounds + 1):
        for name in names:
            run = measure(name, args)
            runs[name].append(run)
            shown = "  ".join(f"{key} {value:.1f}" for key, value in rates(run).items())
            console.print(f"round {number}  {name:18s} {shown}  others {run['elsewhere']:.0%}")
    results = summary(runs)
    console.print(table(results))
    args.out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    target = args.out / f"{now:%Y-%m-%d-%H%M}-peers.json"
    settings = {
        key: getattr(args, key)
        for key in ("rounds", "reps", "threads", "prompt_len", "ctx", "gen", "batches")
    }
    record = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "settings": settings}
    target.write_text(json.dumps(record | {"summary": results, "runs": runs}, indent=1) + "\n")
    console.print(f"wrote {target}")


if __name__ == "__main__":
    main()
