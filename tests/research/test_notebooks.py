"""The example notebooks run: with a small model always, with the demo model in tests marked `demo` and `slow`.

Their stored outputs must be clean: executed in order, small, and with nothing of a machine in them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[Any]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


async def run_cell(source: str, name: str, space: dict[str, Any]) -> None:
    """Run a cell as a notebook does: names stay, `await` may stand at the top."""
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, space)  # with a top-level await, the code is a coroutine
    if inspect.iscoroutine(result):
        await result


def test_which_there_are() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "1_quickstart",
        "2_engine",
        "3_research",
        "4_serving",
    ]


@each_notebook
async def test_the_code_runs_on_a_small_model(
    path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(path.parent)
    matplotlib.use("Agg")
    space: dict[str, Any] = {"__name__": "__main__"}
    for i, cell in enumerate(code_cells(path)):
        await run_cell(cell.source, f"{path.stem}[{i}]", space)
        if "parameters" in cell.metadata.get("tags", []):
            assert space["MODEL"] == "smollm2-135m"
            space["MODEL"] = str(tiny)
    claims = re.findall(r": (True|False)$", capsys.readouterr().out, re.MULTILINE)
    assert set(claims) == {"True"}, "what a notebook claims, the run confirms"


@each_notebook
def test_stored_outputs_are_clean(path: Path) -> None:
    raw = path.read_text(encoding="utf-8")
    assert len(raw) < 100_000
    assert not re.search(r"/(home|root|tmp|work|Users)/|[A-Z]:\\\\|site-packages", raw)
    nbformat.validate(nbformat.read(path, as_version=4))
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell.outputs}
    assert kinds and kinds <= {"stream", "execute_result", "display_data"}
    streams = [o for cell in cells for o in cell.outputs if o["output_type"] == "stream"]
    assert all(output["name"] == "stdout" for output in streams)
    assert set(json.loads(raw)["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.slow
@pytest.mark.demo
@each_notebook
def test_the_notebook_runs_on_the_demo_model(path: Path, demo_model: Path, tmp_path: Path) -> None:
    """In a kernel, as a reader does; what the stored outputs print comes out again."""
    copy = Path(shutil.copy(path, tmp_path))
    notebook = nbformat.read(copy, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = f"MODEL = {str(demo_model)!r}"
    where = {"metadata": {"path": str(FOLDER.parents[1])}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where).execute()
    done = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for stored, now in zip(code_cells(path), done, strict=True):
        assert printed(now) == printed(stored)


def printed(cell: Any) -> str:
    return "".join(o["text"] for o in cell.outputs if o.get("name") == "stdout")
