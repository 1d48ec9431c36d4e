"""Host time of the prefix tree with a million cached tokens: match, insert and evict, in milliseconds.

    .venv/bin/python bench/tree_operations.py [--tokens 1000000] [--output bench/results]

Kinds: full attention, a window of 512 and two states with a checkpoint each 256 tokens; pages of 16. Half of each
prompt is cached, and the tree is full, so the other half evicts as much. Times are of this process's CPU: neighbours
on the machine count only by what they do to its caches. Nothing is reported unless the tree's own checks pass and
every prompt is hit where it has to be, before and after.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfer.cache import CacheSpec, Held, PagePool, PrefixTree, Scope, SlotPool
from serving.bench.report import machine, versions, write_json

PAGE, WINDOW, GRID = 16, 512, 256
TARGET_MS = 1.0  # match + insert
NAMESPACE = ("", 0)
SPECS = (
    CacheSpec("full", Scope.TOKEN, (0,), ()),
    CacheSpec("window", Scope.WINDOW, (1,), (), window=WINDOW),
    CacheSpec("conv", Scope.STATE, (2,), ()),
    CacheSpec("state", Scope.STATE, (2,), ()),
)


class Clock:
    """CPU time of named parts, in seconds a round."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def __call__[T](self, part: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        self.parts.setdefault(part, []).append(time.process_time() - start)
        return result


def prompt(rng: random.Random, stem: list[int], length: int) -> list[int]:
    return stem + [rng.randrange(128_000) for _ in range(length - len(stem))]


def serve(tree: PrefixTree, tokens: list[int], hit: int, clock: Clock) -> None:
    """What a prompt does to the tree from admission to release; it must hit `hit` tokens."""
    match = clock("match", lambda: tree.match(NAMESPACE, tokens, len(tokens) - 1))
    assert match.length == hit, f"hit {match.length} tokens, not {hit}"
    held = clock("lock", lambda: tree.lock(match))
    clock("allocate", lambda: hold(tree, held, len(tokens), hit))
    clock("insert", lambda: tree.insert(NAMESPACE, tokens, len(tokens), held))
    clock("trim + release", lambda: finish(tree, held, len(tokens)))
    again = tree.match(NAMESPACE, tokens).length
    assert again == len(tokens) // GRID * GRID, f"hit {again} of {len(tokens)} tokens afterwards"


def hold(tree: PrefixTree, held: Held, tokens: int, hit: int) -> None:
    assert tree.open_states(held)
    for kind, spec in enumerate(tree.specs):
        if spec.paged:
            held.pages[kind] += tree.allocate(kind, -(-tokens // PAGE) - held.end(kind)) or ()
    for position in range(hit + GRID, tokens + 1, GRID):
        assert tree.reserve_checkpoint(held, position) is not None
    tree.settle_source(held)


def finish(tree: PrefixTree, held: Held, position: int) -> None:
    tree.trim(held, position)
    tree.release(held)


def full_tree(rng: random.Random, tokens: int, length: int) -> tuple[PrefixTree, list[list[int]]]:
    """A tree of `tokens` cached tokens with no page free, and the prompts in it, oldest first."""
    pages, slots = tokens // PAGE, tokens // GRID
    pools = [SlotPool(slots + 1) if not s.paged else PagePool(pages + 1) for s in SPECS]
    tree, prompts = PrefixTree(SPECS, PAGE, pools), list[list[int]]()
    while len(prompts) * length < tokens + 2 * length:
        prompts.append(prompt(rng, [], length))
        serve(tree, prompts[-1], 0, Clock())
    return tree, prompts


def measure(tokens: int, length: int, rounds: int) -> dict[str, dict[str, float]]:
    rng, clock = random.Random(0), Clock()
    tree, prompts = full_tree(rng, tokens, length)
    half = length // 2 // GRID * GRID
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        # One from the younger half of the cache: all of it is still there.
        stem = prompts[-1 - number % (len(prompts) // 2)][:half]
        prompts.append(prompt(rng, stem, length))
        serve(tree, prompts[-1], half, clock)
    tree.check()
    assert tree.cached(0) == tokens // PAGE, "the tree is not full"
    for _ in range(rounds // 4):
        clock("evict", lambda: tree.evict(0, length // PAGE))
    tree.check()
    pairs = zip(clock.parts["match"], clock.parts["insert"], strict=True)
    clock.parts["match + insert"] = [match + insert for match, insert in pairs]
    return {
        part: {
            "least_ms": round(min(times) * 1e3, 4),
            "median_ms": round(statistics.median(times) * 1e3, 4),
            "per_second": round(1 / statistics.median(times)),
        }
        for part, times in clock.parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="cached tokens")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the dated JSON")
    args = parser.parse_args()
    results = measure(args.tokens, args.prompt, args.rounds)
    now = datetime.datetime.now(datetime.UTC)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {k: v for k, v in versions().items() if k in ("jaxinfer", "python")},
        "settings": {k: getattr(args, k) for k in ("tokens", "prompt", "rounds")}
        | {"page": PAGE, "window": WINDOW, "checkpoints_every": GRID, "kinds": len(SPECS)},
        "results": results,
        "target": {"match + insert": TARGET_MS},
        "notes": "milliseconds of this process's CPU time; evict: a prompt's pages at once",
    }
    if args.output:
        write_json(args.output / f"{now:%Y-%m-%d-%H%M}-tree-operations.json", document)
    if args.json:
        print(json.dumps(document))
        return
    table = Table(
        title=f"{args.tokens} cached tokens, a prompt of {args.prompt}: CPU time of the host"
    )
    for column in ("part", *next(iter(results.values()))):
        table.add_column(column, justify="right")
    for part, row in results.items():
        table.add_row(part, *(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
