"""Runs the example notebooks in this folder and stores their outputs, cleaned.

    python bench/notebooks/refresh.py [NAME ...]

Needs the `demo` and `test` extras. What depends on the machine (times, warnings, paths, versions) is
taken out, so that a diff shows only what changed. Called by hand; tests/research keeps the code alive.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
KEPT_OUTPUTS = ("stream", "execute_result", "display_data")


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what a machine leaves in it; ids are numbers, stderr is dropped."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.output_type in KEPT_OUTPUTS and output.get("name") != "stderr"
            ]
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
                if "metadata" in output:
                    output.metadata = nbformat.from_dict({})
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Pieces that were printed one after the other become one."""
    out: list[nbformat.NotebookNode] = []
    for output in outputs:
        if out and output.output_type == out[-1].output_type == "stream":
            out[-1].text += output.text
        else:
            out.append(output)
    return out


def refresh(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    root = {"metadata": {"path": str(FOLDER.parent.parent)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=root).execute()
    nbformat.write(clean(notebook), path)
    print(f"refreshed {path.name}")


def main() -> None:
    chosen = sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb"))
    for name in chosen:
        refresh(FOLDER / name)


if __name__ == "__main__":
    main()
