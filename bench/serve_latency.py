"""What each face of the server adds to a token's latency, and how many token events a server process carries.

    .venv/bin/python bench/serve_latency.py [--model smollm2-135m] [--streams 32] [--rounds 3] [--json]

The server runs in a process of its own whose engine notes when it hands each token to the event loop.
A token's latency is from there to its arrival: at a coroutine of that loop ("python", the in-process
engine), or at a socket of this process (raw_streams.py). Contestants are interleaved. Both clocks are
CLOCK_MONOTONIC.
Nothing is written unless all contestants gave the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
FACES = ("python", "grpc", "http")
sys.path.insert(0, str(HERE))
import raw_streams  # noqa: E402
from raw_streams import Arrivals, Tokens  # noqa: E402


def prompt_of(index: int) -> list[int]:
    return [(index * 37 + j * 11) % 200 + 5 for j in range(16)]


# --- the server's process ------------------------------------------------------------------------


async def serve(args: argparse.Namespace) -> None:
    """Answer commands on stdin: "python TAG" runs the streams here, "marks" prints the engine's times."""
    from jaxinfer import Engine
    from serving.config import ServerConfig
    from serving.server import Server

    marks: dict[str, list[float]] = {}

    class Marking(Engine):
        def _deliver(self, updates: Any) -> None:
            now = time.monotonic()
            for update in updates:
                if update.token is not None:
                    marks.setdefault(update.sequence.request.request_id, []).append(now)
            super()._deliver(updates)

    options = {"max_num_seqs": args.streams, "max_num_batched_tokens": 512, "max_model_len": 512}
    engine = Marking(args.model, progress=False, warmup="eager", **options)
    config = ServerConfig(
        model="m", served_model_name=("m",), port=0, grpc_port=0, stats_interval=0
    )
    loop = asyncio.get_running_loop()
    async with Server(config, engine) as server:
        say({"http": server.http_port, "grpc": server.grpc_port})
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command, _, tag = line.strip().partition(" ")
            before = time.process_time()
            if command == "python":
                say(await local(engine, args, tag))
            elif command == "marks":
                say(marks | {"cpu": [before]})
                marks.clear()
    engine.close()


async def local(engine: Any, args: argparse.Namespace, tag: str) -> tuple[Arrivals, Tokens]:
    from jaxinfer import SamplingParams

    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    arrivals: Arrivals = {}
    tokens: Tokens = {}

    async def one(i: int) -> None:
        name = f"{tag}-{i}"
        got, seen = tokens.setdefault(name, []), arrivals.setdefault(name, [])
        stream = engine.generate(prompt_of(i), params, name, use_prefix_cache=False, deltas=True)
        async for item in stream:
            for output in item.outputs:
                got += output.token_ids
                seen.append((len(got), time.monotonic()))

    await asyncio.gather(*(one(i) for i in range(args.streams)))
    return arrivals, tokens


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


# --- this process: the clients -------------------------------------------------------------------


def over_grpc(port: int, args: argparse.Namespace, tag: str) -> tuple[Arrivals, Tokens]:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    params = pb.SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    messages = {
        f"{tag}-{i}": pb.GenerateRequest(
            request_id=f"{tag}-{i}",
            tokenized=pb.TokenizedInput(input_ids=prompt_of(i)),
            sampling_params=params,
            stream=True,
        ).SerializeToString()
        for i in range(args.streams)
    }
    path = "/vllm.grpc.engine.VllmEngine/Generate"
    return raw_streams.over_grpc(port, path, messages, pb.GenerateResponse)


def over_http(port: int, args: argparse.Namespace, tag: str) -> tuple[Arrivals, Tokens]:
    common = {"max_tokens": args.tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
              "return_token_ids": True}  # fmt: skip
    bodies = {
        f"{tag}-{i}": {**common, "prompt": prompt_of(i), "request_id": f"{tag}-{i}"}
        for i in range(args.streams)
    }
    return raw_streams.over_http(port, bodies)


class ServerProcess:
    """The process that runs `serve`."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = [f"--{k}={getattr(args, k)}" for k in ("model", "streams", "tokens")]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports = self._read()

    def ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the server's process has ended")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def run(face: str, server: ServerProcess, args: argparse.Namespace, tag: str) -> dict[str, Any]:
    """One contestant once: milliseconds of each token, messages, seconds, the server's CPU seconds."""
    cpu = server.ask("marks")["cpu"][0]
    start = time.monotonic()
    if face == "python":
        arrivals, tokens = server.ask(f"python {tag}")
    else:
        over = over_grpc if face == "grpc" else over_http
        arrivals, tokens = over(server.ports[face], args, tag)
    seconds = time.monotonic() - start
    marks = server.ask("marks")
    delays = []
    for name, seen in arrivals.items():
        known = 0
        for count, when in seen:
            delays += [(when - marks[name][k]) * 1e3 for k in range(known, count)]
            known = max(known, count)
    return {
        "tokens": {name.removeprefix(tag): ids for name, ids in tokens.items()},
        "delays": delays,
        "messages": sum(len(seen) for seen in arrivals.values()),
        "seconds": seconds,
        "cpu": marks["cpu"][0] - cpu,
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    delays = sorted(d for r in rounds for d in r["delays"])
    at = lambda q: round(delays[min(len(delays) - 1, int(q * len(delays)))], 4)  # noqa: E731
    rate = statistics.median(len(r["delays"]) / r["seconds"] for r in rounds)
    cpu = statistics.median(r["cpu"] / len(r["delays"]) * 1e6 for r in rounds)
    return {
        "p50_ms": at(0.5),
        "p95_ms": at(0.95),
        "p99_ms": at(0.99),
        "tokens_per_second": round(rate, 1),
        "tokens_per_message": round(
            sum(len(r["delays"]) for r in rounds) / sum(r["messages"] for r in rounds), 3
        ),
        "server_cpu_us_per_token": round(cpu, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for the dated JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        import uvloop

        return uvloop.run(serve(args))
    server = ServerProcess(args)
    rounds: dict[str, list[dict[str, Any]]] = {face: [] for face in FACES}
    try:
        for number in range(args.rounds + 1):  # the first warms up and is not counted
            for face in FACES:
                result = run(face, server, args, f"{face}{number}")
                if number:
                    rounds[face].append(result)
    finally:
        server.close()
    truth = rounds["python"][0]["tokens"]
    for face, results in rounds.items():
        if any(r["tokens"] != truth for r in results):
            raise SystemExit(
                f"{face} gave other tokens than the in-process engine: nothing is reported"
            )
    report(args, {face: summary(results) for face, results in rounds.items()})


def report(args: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from serving.bench.report import machine, versions, write_json

    base = results["python"]["p50_ms"]
    for row in results.values():
        row["added_p50_ms"] = round(row["p50_ms"] - base, 4)
    settings = {k: getattr(args, k) for k in ("streams", "tokens", "rounds")}
    settings["model"] = Path(args.model).name
    now = datetime.datetime.now(datetime.UTC)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "results": results,
    }
    if args.output:
        write_json(args.output / f"{now:%Y-%m-%d-%H%M}-serve-latency.json", document)
    if args.json:
        print(json.dumps(document))
        return
    table = Table(
        title=f"{Path(args.model).name}, {args.streams} streams: latency of a token after the engine"
    )
    for column in ("face", *next(iter(results.values()))):
        table.add_column(column, justify="right")
    for face, row in results.items():
        table.add_row(face, *(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
