"""Records what the reference makes of a tiny checkpoint, into recorded/, for the tests of the cross-check.

    python -m tests.crosscheck.record REFERENCE_PYTHON

Runs under the project's interpreter from the repository's root; transformers 5.24.0 was used. What it writes
holds no paths. Run it again when TINY or the prompts change.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from jaxinfer.crosscheck.exchange import Progress, Request, run_reference
from jaxinfer.crosscheck.prompts import NamedPrompt
from tests.checkpoints import VOCAB, write_tiny

RECORDED = Path(__file__).parent / "recorded"
LAYERS, MAX_TOKENS = 4, 6
LENGTHS = (1, 17, 40)  # one token; just past a page of 16; several pages
ENGINE = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 2, "page_size": 16}


def write_model(folder: Path) -> Path:
    return write_tiny(folder, num_hidden_layers=LAYERS)


def prompts() -> list[NamedPrompt]:
    rng = np.random.default_rng(7)
    return [NamedPrompt(f"{n} ids", rng.integers(0, VOCAB, n).tolist()) for n in LENGTHS]


def main() -> int:
    from jaxinfer.crosscheck.session import crosscheck
    from jaxinfer.llm import LLM

    RECORDED.mkdir(exist_ok=True)

    def run(request: Request, folder: Path, progress: Progress | None = None) -> None:
        run_reference(sys.argv[1], request, folder, progress)
        for file in folder.glob("*.safetensors"):
            shutil.copy(file, RECORDED / file.name)
        shutil.copy(folder / "versions.json", RECORDED)
        sequences = [asdict(s) for s in request.sequences]
        (RECORDED / "sequences.json").write_text(json.dumps(sequences) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_model(Path(folder) / "tiny")), **ENGINE)
        report = crosscheck(llm, prompts(), MAX_TOKENS, run)
    print("\n".join(report.failures) or "agree")
    return 0 if report.agree else 1


if __name__ == "__main__":
    sys.exit(main())
