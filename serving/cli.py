"""The `jaxinfer` command: registers the commands, turns errors into one clear line, reads the environment.

The only file that reads environment variables. Exit codes: 0 done, 1 a check disagrees, 2 the request
or the setup is wrong, 130 interrupted. With --json an error is an object on stdout.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from jaxinfer import __version__
from jaxinfer.errors import JaxinferError
from serving.commands import bench, chat, convert, crosscheck, doctor, generate, serve
from serving.present import print_json

# What doctor shows: these change how JAX and the commands behave.
RELEVANT = (
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_ENABLE_X64",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)

# Read for the commands that need them; never shown.
SECRETS = ("JAXINFER_API_KEY", "JAXINFER_ADMIN_API_KEY")

# typer carries its own copy of click in newer versions, so the base class is found, not imported.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="jaxinfer",
    help="LLM inference on JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    generate.generate,
    chat.chat,
    convert.convert,
    crosscheck.crosscheck,
    doctor.doctor,
    serve.serve,
):
    app.command()(command)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="print the version"
    ),
) -> None:
    """LLM inference on JAX."""
    del version  # _version has done it
    # XLA writes start-up notes to stderr unless told not to; it looks once, when JAX is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    context.obj = {name: os.environ[name] for name in RELEVANT if name in os.environ}
    context.meta["environment"] = {n: os.environ[n] for n in SECRETS if os.environ.get(n)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. No traceback for what a user can mend."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in arguments
    try:
        result = app(args=arguments, prog_name="jaxinfer", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except _UsageError as error:
        return _fail("UsageError", _usage(error), as_json)
    except JaxinferError as error:
        return _fail(type(error).__name__, str(error), as_json)
    except BrokenPipeError:  # whoever read the output has enough; what is left must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that cannot be written, a file that cannot be read
        return _fail(type(error).__name__, str(error), as_json)
    except (typer.Abort, KeyboardInterrupt):
        return 130


def _usage(error: Any) -> str:
    """What is wrong with the command line; an unknown option comes with the name that is nearest."""
    name = getattr(error, "option_name", None)
    if name is None or not hasattr(error, "possibilities"):
        return error.format_message()
    names = [n for p in error.ctx.command.params for n in (*p.opts, *p.secondary_opts)]
    near = difflib.get_close_matches(name.replace("_", "-"), names, 1)
    hint = f"did you mean {near[0]}?" if near else f"see {error.ctx.command_path} --help"
    return f"{name} is unknown; {hint}"


def _fail(kind: str, message: str, as_json: bool) -> int:
    if as_json:
        print_json({"error": {"type": kind, "message": message}})
    else:
        print(f"jaxinfer: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
