"""`jaxinfer convert`: write a model as an Orbax checkpoint, which loads straight into a sharding.

Called by cli.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.config import DTYPES
from jaxinfer.errors import ConfigError
from serving.commands.generate import AsJson
from serving.present import print_json


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="the model, as for generate --model")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="the directory to make")],
    dtype: Annotated[
        str, typer.Option(help=f"dtype to store: {', '.join(DTYPES)} (auto: as the model says)")
    ] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace a converted model")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model as an Orbax checkpoint with its config, tokenizer and chat template."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; choose another directory or give --overwrite")

    from jaxinfer.loading import load
    from jaxinfer.model_config import ModelConfig
    from jaxinfer.progress import console_progress
    from jaxinfer.weights.orbax_io import save_orbax
    from jaxinfer.weights.source import resolve

    start = time.perf_counter()
    with console_progress(True) as progress:
        checkpoint = resolve(source, progress=progress.update)
        stored = ModelConfig.from_hf(checkpoint.config).dtype if dtype == "auto" else dtype
        params = load(source, dtype=stored, progress=progress.update).params
        save_orbax(target, params, checkpoint, overwrite=overwrite)
    size = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
    seconds = round(time.perf_counter() - start, 2)
    if as_json:
        print_json({"path": str(target), "dtype": stored, "bytes": size, "seconds": seconds})
    else:
        print(f"{target}: {size / 2**20:.1f} MiB in {stored}, {seconds} s")
