"""`jaxinfer crosscheck`: is the model computed as PyTorch's transformers computes it? Called by cli.py.

Exit code 0 when both agree, 1 when they do not, 2 when it could not be run.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.errors import InvalidRequest
from serving.commands.generate import AsJson, Model
from serving.options import ENGINE, READERS, with_options
from serving.present import print_json

if TYPE_CHECKING:
    from jaxinfer.crosscheck.session import Report

DEFAULT_DTYPE = "float32"


@with_options(engine=ENGINE)
def crosscheck(
    model: Model,
    engine: dict[str, Any],
    reference_python: Annotated[
        str | None,
        typer.Option(help="a Python with torch and transformers  [default: .venv-ref/bin/python]"),
    ] = None,
    reference_model: Annotated[
        str | None,
        typer.Option(help="what the reference loads, if it cannot read --model (Orbax)"),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of prompts  [default: 20 varied ones]")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="greedy tokens for each prompt", **READERS[int])
    ] = 64,
    as_json: AsJson = False,
) -> int:
    """Compare with the PyTorch reference, layer by layer. Exit code 0 only if they agree."""
    from jaxinfer.crosscheck.exchange import find_python, run_reference

    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens={max_tokens} is out of range; give at least 1")
    python = find_python(reference_python)

    from jaxinfer.crosscheck.prompts import load_prompts
    from jaxinfer.crosscheck.session import crosscheck as run
    from jaxinfer.llm import LLM
    from jaxinfer.progress import console_progress

    options: dict[str, Any] = {"dtype": DEFAULT_DTYPE} | engine
    llm = LLM(model, **options)
    chosen, skipped = load_prompts(llm, prompts, max_tokens)
    with console_progress(True) as progress:
        report = run(
            llm,
            chosen,
            max_tokens,
            functools.partial(run_reference, python),
            reference_model=reference_model,
            skipped=skipped,
            progress=progress.update,
        )
    if as_json:
        print_json(report.as_json())
    else:
        _print_report(report)
    return 0 if report.agree else 1


def _print_report(report: Report) -> None:
    from rich.console import Console

    console = Console()
    console.print(_layers(report))
    console.print(_prompts(report))
    totals = report.as_json()
    console.print(
        f"max |Δ logprob| {totals['max_dlogprob']:.2e} (as served {totals['max_dlogprob_served']:.2e}), "
        f"mean {totals['mean_dlogprob']:.2e}, top-1 agreement {totals['top1_agreement']:.2%}"
    )
    if report.skipped:
        console.print(f"left out (too long, or no chat template): {', '.join(report.skipped)}")
    if report.first_diverging_layer:
        console.print(f"first diverging layer: {report.first_diverging_layer}")
    for failure in report.failures:
        console.print(failure, style="red", markup=False)
    for what, hint in (("forward pass", report.hint), ("as served", report.hint_served)):
        if hint:
            console.print(f"{what}: {hint}")
    versions = " ".join(f"{k} {v}" for k, v in report.reference.items())
    verdict = "[green]agree[/green]" if report.agree else "[red]DISAGREE[/red]"
    console.print(f"{report.model} ({report.dtype}) and {versions}: {verdict}")


def _layers(report: Report) -> Any:
    from rich.table import Table

    table = Table("hidden state", title="Layers, worst over all tokens")
    for name in ("max |Δ|", "relative"):
        table.add_column(name, justify="right")
    for layer in report.layers:
        table.add_row(layer.name, f"{layer.max_abs:.2e}", f"{layer.relative:.2e}")
    return table


def _prompts(report: Report) -> Any:
    from rich.table import Table

    table = Table("prompt", title="Prompts")
    for name in ("tokens", "greedy", "max |Δ logprob|", "as served", "top-1"):
        table.add_column(name, justify="right")
    for p in report.prompts:
        tie = f" near tie {p.greedy.margin:.1e}" if p.greedy.near_tie else ""
        table.add_row(
            p.name,
            str(p.prompt_tokens),
            f"{p.greedy.length}/{p.greedy.of}{tie}",
            f"{p.max_dlogprob:.2e}",
            f"{p.max_dlogprob_served:.2e}",
            f"{p.top1_agreement:.2%}",
        )
    return table
