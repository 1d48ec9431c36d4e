"""Measures jaxinfer against transformers on mid-size random models of the newer families, on a CPU.

    .venv/bin/python bench/families.py --python PYTHON --models FOLDER --rounds 3

PYTHON has torch and transformers; FOLDER is where `PYTHON bench/peers/random_models.py FOLDER` has put the
models. Both engines run interleaved, each in its own process, in float32, and must give the same
greedy tokens to a known question, or nothing is written. Prints medians and ratios, and writes dated JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pathlib import Path
from typing import Any

from compare import HERE, Contestant, command, machine, rates, run_once
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

Run = dict[str, Any]
MODELS = {
    "gdn": "Gated DeltaNet hybrid with experts (qwen3_next)",
    "mla": "latent attention with experts (deepseek_v3)",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", required=True, help="interpreter with torch and transformers")
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reps", type=int, default=1, help="repetitions inside each process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--ctx", type=int, default=64)
    parser.add_argument("--gen", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a process may take")
    return parser.parse_args()


def contestants(model: Path, python: str) -> dict[str, Contestant]:
    return {
        "ours": Contestant("ours.py", str(model)),
        "transformers": Contestant("hf.py", str(model), str(Path(python).absolute())),
    }


def measure(name: str, args: argparse.Namespace, console: Console) -> dict[str, list[Run]]:
    """All rounds of one model. Raises SystemExit if the two engines answer differently."""
    pair = contestants(args.models.absolute() / name, args.python)
    runs: dict[str, list[Run]] = {who: [] for who in pair}
    for number in range(1, args.rounds + 1):
        for who, contestant in pair.items():
            run = run_once(who, command(contestant, args, ""), args.timeout)
            runs[who].append(run)
            shown = "  ".join(f"{key} {value:.1f}" for key, value in rates(run).items())
            console.print(
                f"{name} round {number}  {who:12s} {shown}  others {run['elsewhere']:.0%}"
            )
        ours, theirs = (runs[who][-1]["check"] for who in pair)
        if ours != theirs:
            raise SystemExit(f"{name}: we answer {ours}, transformers {theirs}; nothing is written")
    return runs


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Medians, and the median of each round's own ratio of ours to theirs."""
    out: dict[str, Any] = {}
    for key in rates(runs["ours"][0]):
        mine, theirs = ([rates(run)[key] for run in runs[who]] for who in ("ours", "transformers"))
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        out[key] = {
            "ours": statistics.median(mine),
            "transformers": statistics.median(theirs),
            "ratio": ratio,
        }
    return out


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title="tokens/s: ours, transformers, ratio", box=MARKDOWN)
    shown.add_column("model")
    for column in next(iter(results.values())):
        shown.add_column(column, justify="right")
    for name, row in results.items():
        cells = [
            f"{c['ours']:.1f} / {c['transformers']:.1f} = {c['ratio']:.2f}x" for c in row.values()
        ]
        shown.add_row(MODELS[name], *cells)
    return shown


def main() -> None:
    args = parse()
    args.peers = args.models  # where `command` looks for relative paths; ours are absolute
    console = Console(width=150, highlight=False)
    runs = {name: measure(name, args, console) for name in args.only}
    results = {name: summary(of_model) for name, of_model in runs.items()}
    console.print(table(results))
    now = datetime.datetime.now(datetime.UTC)
    target = args.out / f"{now:%Y-%m-%d-%H%M}-families.json"
    keys = ("rounds", "reps", "threads", "prompt_len", "ctx", "gen", "batches")
    settings = {key: getattr(args, key) for key in keys}
    record = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "settings": settings}
    args.out.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record | {"summary": results, "runs": runs}, indent=1) + "\n")
    console.print(f"wrote {target}")


if __name__ == "__main__":
    main()
