"""The recordings of the families are whole, and each config in a publisher's words has its case."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.models.families import CASES, OLD_STYLE, RECORDINGS, WIDE, load_case, write_case
from tests.reference.families import GREEDY, LONG, VOCAB


def test_every_case_is_recorded() -> None:
    with np.load(RECORDINGS) as file:
        assert {name.partition("/")[0] for name in file} == set(CASES) | set(WIDE)


def test_every_case_has_a_config_in_its_publishers_words() -> None:
    assert {case for case, _ in OLD_STYLE} == set(CASES)


def test_recordings_agree_with_themselves() -> None:
    """The long prompt goes on from the short one, and the greedy tokens start at its last row."""
    for case in CASES:  # the weights of WIDE are big, and its recordings were made the same way
        recording = load_case(case)[2]
        shared = recording.positions[recording.positions < len(recording.prompt)]
        expected = recording.logits[shared]
        assert np.abs(recording.long_logits[: len(shared)] - expected).max() < 1e-3, case
        assert recording.long_prompt[: len(recording.prompt)] == recording.prompt
        assert len(recording.long_prompt) == LONG and len(recording.greedy) == GREEDY
        assert recording.greedy[0] == recording.logits[-1].argmax() and min(recording.margins) > 0
        assert recording.logits.shape[1] == VOCAB and np.isfinite(recording.logits).all()


def test_a_case_is_written_as_a_checkpoint(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "model", "mixtral", vocab_size=65)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 65
    assert (folder / "model.safetensors").stat().st_size > 4 * 181_000
