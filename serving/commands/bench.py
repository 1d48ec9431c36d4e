"""`jaxinfer bench`: `offline` measures one model here, `serve` puts load on a server.

Offline tells prefill and decode apart by two runs: one token for each prompt, then all of them. Its
prompts are random ids, new ones each time, so that nothing is found in the prefix cache. Neither
gives results of wrong or failed requests unless told to. Called by cli.py.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.errors import InvalidRequest
from jaxinfer.types import SamplingParams
from serving.bench.settings import (
    DATA,
    TARGET,
    TRAFFIC,
    DataSettings,
    TargetSettings,
    TrafficSettings,
)
from serving.commands.generate import AsJson, Model
from serving.options import ENGINE, READERS, with_options
from serving.present import print_json

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from serving.bench.session import Session

DEFAULT_BATCHES = (1, 8, 32)
CHECK_PROMPTS, CHECK_TOKENS = 3, 8

app = typer.Typer(help="Measure.")


@dataclass(frozen=True, slots=True)
class Result:
    """One batch size; medians over the repeats. Times in seconds, rates in tokens a second."""

    batch_size: int
    prompt_len: int
    gen_len: int
    prefill_tok_s: float
    decode_tok_s: float
    ttft_s: float
    steps: int
    compiles: int
    host_ms_per_step: float


@app.command("offline")
@with_options(engine=ENGINE)
def offline(
    model: Model,
    engine: dict[str, Any],
    batch_size: Annotated[
        list[int] | None,
        typer.Option(help="requests at once; repeatable  [default: 1 8 32]", **READERS[int]),
    ] = None,
    prompt_len: Annotated[int, typer.Option(help="tokens of a prompt", **READERS[int])] = 128,
    gen_len: Annotated[
        int, typer.Option(help="tokens to generate, at least 2", **READERS[int])
    ] = 32,
    repeats: Annotated[
        int, typer.Option(help="measured runs of each batch size", **READERS[int])
    ] = 3,
    as_json: AsJson = False,
) -> int:
    """Measure prefill, decode and time to first token. Exit code 1 if the tokens are not right."""
    batches = batch_size or list(DEFAULT_BATCHES)
    for name, value, low in (
        ("batch_size", min(batches), 1),
        ("prompt_len", prompt_len, 1),
        ("gen_len", gen_len, 2),
        ("repeats", repeats, 1),
    ):
        if value < low:
            raise InvalidRequest(f"{name}={value} is out of range; give at least {low}")

    from jaxinfer.llm import LLM

    start = time.perf_counter()
    options: dict[str, Any] = {"max_num_seqs": max(batches)} | engine
    llm = LLM(model, **options)
    load_s = time.perf_counter() - start
    runner = _Runner(llm, prompt_len, gen_len)
    if not runner.tokens_are_right():
        return _wrong(as_json)
    results = [runner.measure(size, repeats) for size in batches]
    if as_json:
        rows = [asdict(r) for r in results]
        about = {"model": llm.model.name, "dtype": llm.model.dtype, "load_s": round(load_s, 2)}
        compile_s = round(llm.core.executables.compile_seconds, 2)
        print_json(about | {"check": "ok", "compile_s": compile_s, "results": rows})
    else:
        _print_table(llm, results)
    return 0


class _Runner:
    """Runs batches of random prompts on one LLM; no prompt comes twice."""

    def __init__(self, llm: LLM, prompt_len: int, gen_len: int) -> None:
        import numpy as np

        self._llm, self._prompt_len, self._gen_len = llm, prompt_len, gen_len
        self._rng = np.random.default_rng(0)

    def _prompts(self, count: int) -> list[list[int]]:
        vocab = self._llm.model.config.vocab_size
        return self._rng.integers(0, vocab, (count, self._prompt_len)).tolist()

    def _run(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[Any]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, outputs

    def tokens_are_right(self) -> bool:
        """Prompts run together yield the tokens that they yield one by one."""
        prompts, count = self._prompts(CHECK_PROMPTS), min(CHECK_TOKENS, self._gen_len)
        together = [o.outputs[0].token_ids for o in self._run(prompts, count)[1]]
        alone = [self._run([p], count)[1][0].outputs[0].token_ids for p in prompts]
        return together == alone and all(len(t) == count for t in together)

    def measure(self, size: int, repeats: int) -> Result:
        """One batch size, after an unmeasured run that compiles what it needs."""
        self._run(self._prompts(size), self._gen_len)
        first, full, ttft = [], [], []
        before, steps = self._llm.core.stats(), []
        for _ in range(repeats):
            seconds, outputs = self._run(self._prompts(size), 1)
            first.append(seconds)
            metrics = [o.metrics for o in outputs]
            ttft += [m.first_token_time - m.arrival_time for m in metrics]
            start = self._llm.core.stats()["steps"]
            full.append(self._run(self._prompts(size), self._gen_len)[0])
            steps.append(self._llm.core.stats()["steps"] - start)
        after = self._llm.core.stats()
        ran = {k: after[k] - before[k] for k in ("steps", "compiles", "host_seconds")}
        prefill = statistics.median(first)
        decode = max(statistics.median(full) - prefill, 1e-9)
        return Result(
            batch_size=size,
            prompt_len=self._prompt_len,
            gen_len=self._gen_len,
            prefill_tok_s=round(size * self._prompt_len / prefill, 1),
            decode_tok_s=round(size * (self._gen_len - 1) / decode, 1),
            ttft_s=round(statistics.median(ttft), 4),
            steps=int(statistics.median(steps)),
            compiles=ran["compiles"],
            host_ms_per_step=round(1e3 * ran["host_seconds"] / ran["steps"], 3),
        )


def _wrong(as_json: bool) -> int:
    message = "prompts run together yield other tokens than one by one; nothing was measured"
    if as_json:
        print_json({"check": message, "results": []})
    else:
        typer.echo(f"jaxinfer: {message}", err=True)
    return 1


def _print_table(llm: LLM, results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{llm.model.name}, {llm.model.dtype}")
    heads = ("batch", "prompt", "new", "prefill tok/s", "decode tok/s", "TTFT s", "steps",
             "compiles", "host ms/step")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for result in results:
        table.add_row(*(f"{value:g}" for value in asdict(result).values()))
    Console().print(table)


@app.command("serve")
@with_options(target=TARGET, traffic=TRAFFIC, data=DATA)
def serve(
    target: dict[str, Any],
    traffic: dict[str, Any],
    data: dict[str, Any],
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="limits in ms, as in ttft:500 tpot:50 e2el:5000: requests within all"),
    ] = None,
    limits: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="LIMIT")] = None,
    output: Annotated[
        Path | None, typer.Option(help="write the results and each request as JSON; file or folder")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="write a figure: .png, .svg, .pdf or a folder")
    ] = None,
    allow_errors: Annotated[
        bool, typer.Option("--allow-errors", help="give results though requests failed")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Put load on a server and measure it. Exit code 1 if a request failed."""
    from serving.bench.metrics import parse_slo, summarize
    from serving.bench.plot import check_plot, write_plot
    from serving.bench.report import document, rows, target_file, write_json

    if limits and not goodput:
        raise typer.BadParameter(f"unexpected argument {limits[0]!r}; limits follow --goodput")
    slo = parse_slo(" ".join([*(goodput or []), *(limits or [])]).replace(",", " ").split())
    where, how, what = TargetSettings(**target), TrafficSettings(**traffic), DataSettings(**data)
    output = None if output is None else target_file("output", output, ".json")
    if plot is not None:
        plot = target_file("plot", plot, ".png")
        check_plot(plot)
    session = _run_load(where, how, what)
    records = session.run.records
    results = summarize(records, session.run.duration, slo)
    settings = {"target": where.public(), "traffic": how.public(), "data": what.public()}
    report = document(session, settings, results)
    failed = bool(results["errors"])
    if not failed or allow_errors:
        if output is not None:
            write_json(output, report | {"requests": rows(records)})
        if plot is not None:
            write_plot(plot, records, session.server.model, slo)
    _show_load(session, report, allow_errors, as_json)
    return 1 if failed else 0


def _run_load(target: TargetSettings, traffic: TrafficSettings, data: DataSettings) -> Session:
    """The measurement, with a progress bar on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from serving.bench.session import measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    quiet = not sys.stderr.isatty()
    bar = Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet, transient=True
    )
    with bar:
        task = bar.add_task("requests", total=None)
        return asyncio.run(
            measure(
                target,
                traffic,
                data,
                on_start=lambda count: bar.update(task, total=count),
                on_done=lambda _: bar.advance(task),
            )
        )


def _show_load(session: Session, report: dict[str, Any], allow_errors: bool, as_json: bool) -> None:
    """Results, or only what went wrong."""
    from rich.console import Console

    from serving.bench.report import print_errors, print_tables

    results = report["results"]
    failed = results["requests"] - results["succeeded"]
    check = "ok" if not failed else f"{failed} of {results['requests']} requests failed"
    if failed and not allow_errors:
        report = {"errors": results["errors"]}
        check += "; no results without --allow-errors"
    if as_json:
        print_json({"check": check} | report)
    elif "results" in report:
        print_tables(Console(), session, results)
    if failed:
        print_errors(Console(stderr=True), results, session.run.records)
        typer.echo(f"jaxinfer: {check}", err=True)
