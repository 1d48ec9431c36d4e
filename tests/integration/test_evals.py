"""Evaluators as their users start them, on the demo model: lm-eval and inspect-ai.

lm-eval's log-likelihoods are compared with what transformers gives (lm_eval/recorded.json).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Served

pytestmark = [pytest.mark.clients, pytest.mark.demo]
HERE = Path(__file__).parent
TOLERANCE = 1e-3


def run(command: list[str | Path], folder: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "NO_PROXY": "*",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(
        "smollm2-135m", tmp_path_factory.mktemp("evals") / "server.log", "--max-model-len", "256",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--warmup", "lazy",
    )  # fmt: skip
    try:
        yield served.wait_ready()
    finally:
        served.close()


def test_lm_eval_reads_the_references_log_likelihoods(demo_server, clients, tmp_path):
    for name in ("jaxinfer_choice.yaml", "choice.jsonl"):
        shutil.copy(HERE / "lm_eval" / name, tmp_path)
    model = f"model=smollm2-135m,base_url={demo_server.url}/v1/completions,num_concurrent=4"
    run(
        [clients / "lm_eval", "run", "--model", "local-completions", "--model_args", model,
         "--include_path", ".", "--tasks", "jaxinfer_choice", "--log_samples", "--output_path", "out"],
        tmp_path,
    )  # fmt: skip
    (samples,) = tmp_path.glob("out/**/samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    found = {row["doc_id"]: [r[0] for r in row["resps"]] for row in rows}
    wanted = json.loads((HERE / "lm_eval" / "recorded.json").read_text())
    assert len(found) == len(wanted)
    worst = 0.0
    for doc, choices in enumerate(wanted):
        for ours, (logprob, greedy) in zip(found[doc], choices, strict=True):
            worst = max(worst, abs(float(ours[0]) - logprob))
            assert (str(ours[1]) == "True") == greedy, (doc, ours)
    print(f"the log-likelihoods differ by {worst:.2g} at most")
    assert worst < TOLERANCE


def test_inspect_ai_runs_a_task(demo_server, clients, tmp_path):
    shutil.copy(HERE / "inspect_task.py", tmp_path)
    run(
        [clients / "inspect", "eval", "inspect_task.py", "--model", "openai-api/jaxf/smollm2-135m",
         "--display", "plain", "--log-format", "json", "--log-dir", "logs"],
        tmp_path,
        JAXF_BASE_URL=f"{demo_server.url}/v1",
        JAXF_API_KEY="x",
    )  # fmt: skip
    (log,) = tmp_path.glob("logs/*.json")
    result = json.loads(log.read_text(encoding="utf-8"))
    assert result["status"] == "success"
    assert result["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 1.0
