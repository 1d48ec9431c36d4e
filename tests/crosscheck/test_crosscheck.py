"""`jaxinfer crosscheck` end to end: agreement, faults put into the weights, and what cannot be run.

The reference is a recording of transformers (record.py); the tests marked `torch` run it live.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxinfer.core
from jaxinfer.crosscheck import exchange
from jaxinfer.layout import RecordLayout, RowField
from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.step.pack import pack_step
from serving.cli import main
from tests.crosscheck.conftest import replay
from tests.crosscheck.record import LAYERS, MAX_TOKENS
from tests.models.families import write_case as write_family
from tests.reference import cases, families

ENGINE = ["--max-num-batched-tokens", "32", "--max-num-seqs", "2", "--page-size", "16"]


@pytest.fixture(autouse=True)
def recorded_reference(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "torch" not in request.keywords:
        monkeypatch.setattr(exchange, "run_reference", lambda python, *rest: replay(*rest))


def run(
    capsys: pytest.CaptureFixture[str], model: Path, prompts: Path, *more: str
) -> tuple[int, dict[str, Any]]:
    arguments = ["crosscheck", "--model", str(model), "--prompts", str(prompts), "--json", *ENGINE]
    if "--reference-python" not in more:
        arguments += ["--reference-python", sys.executable]  # any file: the recording stands in
    code = main([*arguments, *more])
    return code, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def faulty(source: Path, target: Path, tensor: str) -> Path:
    """A copy of a checkpoint with one column (of a matrix) or element of one tensor changed."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    value = tensors[tensor].copy()
    value[..., value.shape[-1] // 2] += 0.5
    save_file(tensors | {tensor: value}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_agrees(capsys: pytest.CaptureFixture[str], healthy: Path, prompt_file: Path) -> None:
    code, report = run(capsys, healthy, prompt_file, "--max-tokens", str(MAX_TOKENS))
    assert code == 0
    assert report["agree"] and not report["failures"]
    assert report["max_dlogprob"] < 2e-3 and report["max_dlogprob_served"] < 2e-3
    assert report["top1_agreement"] == 1.0
    assert report["first_diverging_layer"] is None and report["hint"] is None
    names = ["embed", *(f"layers.{i}.out" for i in range(LAYERS)), "final_norm"]
    assert [layer["name"] for layer in report["layers"]] == names
    assert report["greedy"] == {
        "identical": 3, "near_ties": 0, "different": 0, "shortest_agreement": MAX_TOKENS,
    }  # fmt: skip
    assert [p["prompt_tokens"] for p in report["prompts"]] == [1, 17, 40]
    assert report["thresholds"]["dlogprob"] == 2e-3


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.embed_tokens.weight", "embed"),
        ("model.layers.0.self_attn.v_proj.weight", "layers.0.out"),
        ("model.layers.2.mlp.down_proj.weight", "layers.2.out"),
        (f"model.layers.{LAYERS - 1}.input_layernorm.weight", f"layers.{LAYERS - 1}.out"),
        ("model.norm.weight", "final_norm"),
    ],
)
def test_a_fault_is_found_in_its_layer(
    capsys: pytest.CaptureFixture[str],
    healthy: Path,
    prompt_file: Path,
    tmp_path: Path,
    tensor: str,
    layer: str,
) -> None:
    model = faulty(healthy, tmp_path / "faulty", tensor)
    code, report = run(capsys, model, prompt_file, "--max-tokens", "1")
    assert code == 1
    assert not report["agree"] and any("dlogprob" in f for f in report["failures"])
    assert report["first_diverging_layer"] == layer
    assert report["hint"] is not None


def test_a_fault_of_the_cache_is_told_from_one_of_the_model(
    capsys: pytest.CaptureFixture[str],
    healthy: Path,
    prompt_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later chunks of a prompt lose its first page: the model is right, what is served is not."""

    def losing_a_page(plan: StepPlan, layout: RecordLayout) -> np.ndarray:
        late = plan.prefill[:, RowField.START] > 0
        plan.prefill[late, layout.table_slice(0).start] = 0
        return pack_step(plan, layout)

    monkeypatch.setattr(jaxinfer.core, "pack_step", losing_a_page)
    code, report = run(capsys, healthy, prompt_file, "--max-tokens", "1")
    assert code == 1
    assert any("max_dlogprob_served" in f for f in report["failures"])
    assert report["first_diverging_layer"] is None and report["hint"] is None
    assert "position 32, a multiple of the page size 16" in report["hint_served"]
    by_name = {p["name"]: p["max_dlogprob_served"] for p in report["prompts"]}
    assert by_name["1 ids"] < 2e-3 and by_name["17 ids"] < 2e-3 < by_name["40 ids"]


def test_a_table_for_people(
    capsys: pytest.CaptureFixture[str], healthy: Path, prompt_file: Path
) -> None:
    arguments = ["crosscheck", "--model", str(healthy), "--prompts", str(prompt_file), *ENGINE]
    arguments += ["--reference-python", sys.executable, "--max-tokens", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "layers.2.out" in out and "17 ids" in out and "agree" in out


@pytest.mark.parametrize(
    ("more", "fragments"),
    [
        (
            ["--reference-python", "not/there"],
            ["reference_python", "not/there", "pip install torch"],
        ),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
        (["--prompts", "not/there.json"], ["prompts", "not/there.json"]),
        (["--max-tokens", "600"], ["max_tokens=600"]),
        (["--model", "not/there"], ["not/there"]),
    ],
)
def test_what_cannot_run(
    capsys: pytest.CaptureFixture[str],
    healthy: Path,
    prompt_file: Path,
    more: list[str],
    fragments: list[str],
) -> None:
    code, answer = run(capsys, healthy, prompt_file, *more)
    assert code == 2
    for fragment in fragments:
        assert fragment in answer["error"]["message"]


def test_a_model_of_nan_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], healthy: Path, prompt_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(healthy, tmp_path / "nan")
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    code, answer = run(capsys, tmp_path / "nan", prompt_file, "--max-tokens", "1")
    assert code == 2
    assert "could not be served" in answer["error"]["message"]
    assert "not finite" in answer["error"]["message"]


def test_no_interpreter_tells_how_to_make_one(
    capsys: pytest.CaptureFixture[str],
    healthy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["crosscheck", "--model", str(healthy)]) == 2
    error = capsys.readouterr().err
    assert ".venv-ref/bin/python" in error and "pip install torch transformers" in error


def test_an_interpreter_without_torch_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The real runner with the project's own interpreter, which has no torch."""
    request = tmp_path / "request.json"
    request.write_text("{}")
    done = subprocess.run(
        [sys.executable, str(exchange.SCRIPT), str(request), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "torch" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.torch
def test_live(
    capsys: pytest.CaptureFixture[str], healthy: Path, prompt_file: Path, reference_python: Path
) -> None:
    more = ("--reference-python", str(reference_python), "--max-tokens", "8")
    code, report = run(capsys, healthy, prompt_file, *more)
    assert code == 0, report["failures"]
    assert report["reference"]["model_class"] == "LlamaForCausalLM"


def write_case(folder: Path, case: str) -> Path:
    """The checkpoint of one of the reference cases, whose tensors' shapes are in its recordings."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(cases.CASES[case]))
    with np.load(Path(cases.__file__).with_name("recordings.npz")) as recordings:
        shapes = json.loads(recordings[f"{case}/shapes"].tobytes())
    tensors = {name: cases.tensor(case, name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("case", ["gemma2", "gemma3", "qwen3"])
def test_live_on_architectures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, reference_python: Path, case: str
) -> None:
    """Longer than the windows of 8 and the pages of 16; layer by layer and as served."""
    prompts = tmp_path / "prompts.json"
    items = [{"prompt_token_ids": cases.prompt(case, length)} for length in (1, 17, 37)]
    prompts.write_text(json.dumps(items))
    more = ("--reference-python", str(reference_python), "--max-tokens", "8")
    code, report = run(capsys, write_case(tmp_path / case, case), prompts, *more)
    assert code == 0, report
    assert report["reference"]["model_class"] == cases.CASES[case]["architectures"][0]
    assert report["first_diverging_layer"] is None
    assert len(report["layers"]) == cases.CASES[case]["num_hidden_layers"] + 2


@pytest.mark.torch
@pytest.mark.parametrize("case", ["deepseek_v32", "falcon_h1", "gpt_oss", "qwen3_next"])
def test_live_on_families(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, reference_python: Path, case: str
) -> None:
    """Latent and sparse attention, states beside attention, sinks, experts: prompts longer than a chunk."""
    prompts = tmp_path / "prompts.json"
    tokens = families.prompt(case, 90)
    prompts.write_text(json.dumps([{"prompt_token_ids": tokens[:n]} for n in (1, 17, 90)]))
    more = ("--reference-python", str(reference_python), "--max-tokens", "8")
    code, report = run(capsys, write_family(tmp_path / case, case), prompts, *more)
    assert code == 0, report
    assert report["first_diverging_layer"] is None
