"""`jaxinfer serve`: one model behind HTTP and gRPC until a signal. Called by cli.py.

With --print-config it only prints what it would do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from serving.options import with_options
from serving.server_options import GROUPS


@with_options(**GROUPS)
def serve(
    context: typer.Context,
    server: dict[str, Any],
    limits: dict[str, Any],
    engine: dict[str, Any],
    compatible: dict[str, Any],
    fixed: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(help="a directory, a .gguf file, a Hub id or an alias")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with flags as keys; the command line wins")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the configuration as YAML and end")
    ] = False,
) -> int:
    """Serve a model over HTTP (OpenAI) and gRPC (vllm.grpc.engine) until SIGTERM or Ctrl-C."""
    from serving.server_config import server_config, to_yaml

    typed = {
        "server": server,
        "limits": limits,
        "engine": engine,
        "compatible": compatible,
        "fixed": fixed,
    }
    resolved = server_config(model, typed, config, context.meta["environment"])
    if print_config:
        print(to_yaml(resolved), end="")
        return 0

    from serving.server import run

    return run(resolved)
