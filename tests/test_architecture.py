"""Rules that hold for the whole tree: import directions, sizes, what may read the environment,
what may be imported at all, and that every public option is applied or refused.

Reads source as text and syntax trees; a new file is checked without being named here.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.types import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxinfer", "pallas_kernels", "serving")
FILES = sorted(p for top in (*PACKAGES, "tests", "bench") for p in (ROOT / top).rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "pallas_kernels").rglob("*") if p.suffix in (".h", ".cc"))
SOURCES = [p for p in FILES if p.relative_to(ROOT).parts[0] in PACKAGES]

MAX_LINES, MAX_KERNEL_LINES, MAX_FUNCTION = 400, 500, 50

# What the parts of jaxinfer may import of each other, besides the plain values (CONTRACTS) and
# themselves. A part that is not named here is a front: it may import everything inside jaxinfer.
CONTRACTS = {
    "jaxinfer.architectures", "jaxinfer.cache.spec", "jaxinfer.config", "jaxinfer.config_reader",
    "jaxinfer.configs",     "jaxinfer.errors",
    "jaxinfer.layout", "jaxinfer.model_config", "jaxinfer.params", "jaxinfer.rope_config",
    "jaxinfer.scheduler.plan", "jaxinfer.types",
}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "cache": set(),
    "scheduler": {"cache"},
    "text": set(),
    "layers": set(),
    "models": {"layers"},
    "weights": {"models", "text"},
    "step": {"models", "layers"},
    "crosscheck": {"models", "layers", "weights", "text", "step", "llm", "research"},
}
NO_JAX = ("jaxinfer/cache", "jaxinfer/scheduler", "jaxinfer/text", "jaxinfer/types.py",
          "jaxinfer/config.py", "jaxinfer/errors.py", "jaxinfer/layout.py")  # fmt: skip
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "orbax"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Full names of what a file imports anywhere; `from a import b` gives a and a.b."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def parametrize(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", files, ids=name_of)


@parametrize(SOURCES)
def test_packages_import_in_one_direction(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    allowed = {"pallas_kernels": {"pallas_kernels"}, "jaxinfer": {"pallas_kernels", "jaxinfer"}}
    for name in imports_of(path):
        first = name.split(".")[0]
        assert first not in ("tests", "bench"), f"{name_of(path)} imports {name}"
        if first in PACKAGES:
            assert first in allowed.get(top, set(PACKAGES)), f"{name_of(path)} imports {name}"


def part_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def is_contract(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in CONTRACTS)


@parametrize([p for p in SOURCES if p.relative_to(ROOT).parts[0] == "jaxinfer"])
def test_parts_of_jaxinfer_import_in_one_direction(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    part = part_of(module)
    for name in imports_of(path):
        if not name.startswith("jaxinfer.") or is_contract(name):
            continue
        if any(name == parent for parent in ("jaxinfer.cache", "jaxinfer.scheduler")):
            continue  # the first half of `from jaxinfer.cache import spec`; the second half is checked
        target = part_of(name)
        if is_contract(module):
            assert part and target == part, f"{name_of(path)} holds plain values, imports {name}"
        elif part in MAY_IMPORT:
            assert target == part or target in MAY_IMPORT[part], f"{name_of(path)} imports {name}"


@parametrize([p for p in SOURCES if name_of(p).startswith(NO_JAX)])
def test_host_code_imports_no_jax(path: Path) -> None:
    bad = [name for name in imports_of(path) if name.split(".")[0] in DEVICE_LIBRARIES]
    assert not bad, f"{name_of(path)} imports {bad}"


@parametrize(FILES)
def test_sizes(path: Path) -> None:
    limit = MAX_KERNEL_LINES if name_of(path).startswith("pallas_kernels") else MAX_LINES
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= limit, f"{name_of(path)} has {lines} lines (limit {limit}): is a noun missing?"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= MAX_FUNCTION, (
                f"{name_of(path)}:{node.lineno} {node.name} has {size} lines"
            )
    depth = len(path.relative_to(ROOT).parts)
    assert depth <= 4, f"{name_of(path)} lies more than two folders deep in its package"


@parametrize(NATIVE)
def test_sizes_of_native_sources(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_KERNEL_LINES, f"{name_of(path)} has {lines} lines: is a noun missing?"


@parametrize(FILES)
def test_each_file_says_what_it_is(path: Path) -> None:
    assert len(ast.get_docstring(tree_of(path)) or "") >= 40, f"{name_of(path)}: no docstring"


@parametrize([p for p in SOURCES if name_of(p) != "serving/cli.py"])
def test_only_the_cli_reads_the_environment(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv", "environb", "putenv"), (
                f"{name_of(path)}:{node.lineno} uses os.{node.attr}"
            )
    assert not {"os.environ", "os.getenv"} & set(imports_of(path)), name_of(path)


@parametrize(FILES)
def test_nothing_unpickles(path: Path) -> None:
    bad = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    found = {name for name in imports_of(path) if name.split(".")[0] in bad}
    assert not found, f"{name_of(path)} imports {found}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant) and node.value.value is False
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load"), f"{name_of(path)} torch.load"


def tracked_text() -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = done.stdout.split() if done.returncode == 0 else [name_of(p) for p in FILES]
    binary = (".safetensors", ".gguf", ".png", ".npz", ".npy", ".whl")
    return [ROOT / n for n in names if (ROOT / n).is_file() and not n.endswith(binary)]


def test_no_machine_paths_and_no_registry_hosts() -> None:
    folders = "|".join(("work", "root", "home/[a-z]", "tmp/[a-z]", "Users/[a-z]"))
    hosts = "|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "npmjs" + r"\.(org|com)"))
    pattern = re.compile(rf"(?<![\w.~$}}/-])/({folders})[\w./-]*/|{hosts}")
    hits = []
    for path in tracked_text():
        for i, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
        ):
            if match := pattern.search(line):
                hits.append(f"{name_of(path)}:{i} {match.group()}")
    assert not hits, "\n".join(hits)


def test_import_is_cheap() -> None:
    code = (
        "import sys; import jaxinfer; "
        "print(*sorted({'jax', 'jaxlib', 'flax', 'orbax', 'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split(), f"import jaxinfer loads {done.stdout}"


# Options: each one is read by the code that runs, or refused with an error that names it.

REFUSED: dict[str, object] = {"best_of": 2}  # option -> a value that must be refused
DEFINITIONS = {"jaxinfer/config.py", "jaxinfer/types.py"}


@cache
def attributes_read() -> frozenset[str]:
    """Names read as `x.name` outside the files that define options."""
    return frozenset(
        node.attr
        for path in SOURCES
        if name_of(path) not in DEFINITIONS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


@cache
def readers(option: str) -> frozenset[str]:
    """The option's own name, and the methods and properties of its class that read it."""
    methods = [
        node
        for path in DEFINITIONS
        for node in ast.walk(tree_of(ROOT / path))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    found = {m.name for m in methods if f"self.{option}" in ast.unparse(m)}
    return frozenset({option, *found})


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, f.name) for kind in (EngineConfig, SamplingParams) for f in dataclasses.fields(kind)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_option_is_applied_or_refused(kind: type, option: str) -> None:
    if option in REFUSED:
        with pytest.raises(JaxinferError, match=option):
            kind(**{option: REFUSED[option]})
    else:
        assert readers(option) & attributes_read(), f"nothing reads {option}"


@parametrize([p for p in SOURCES if name_of(p).startswith("serving/commands/")])
def test_every_cli_option_is_used(path: Path) -> None:
    for command in tree_of(path).body:
        if not isinstance(command, ast.FunctionDef) or command.name.startswith("_"):
            continue
        read = {
            node.id
            for statement in command.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        takes = {arg.arg for arg in (*command.args.args, *command.args.kwonlyargs)}
        assert takes <= read, f"{name_of(path)}: {command.name} does not use {takes - read}"
