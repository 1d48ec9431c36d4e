"""Converted checkpoints: round trip, restore into another sharding, refusals, atomic writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.errors import ConfigError, WeightsError
from jaxinfer.params import ParamSpec
from jaxinfer.weights.orbax_io import load_orbax, save_orbax
from jaxinfer.weights.source import resolve
from tests.weights.gguf_files import tokenizer_metadata
from tests.weights.test_gguf_models import tiny_gguf

SPECS = {"embed": ParamSpec((6, 4), ("vocab", None)), "layers": [ParamSpec((4,), (None,))] * 2}
PARAMS = {
    "embed": jax.numpy.arange(24.0).reshape(6, 4) / 8,
    "layers": [jax.numpy.ones(4), jax.numpy.zeros(4)],
}


@pytest.fixture
def converted(tiny: Path, tmp_path: Path) -> Path:
    save_orbax(tmp_path / "out", PARAMS, resolve(str(tiny)))
    return tmp_path / "out"


def test_round_trip_of_values_and_facts(tiny: Path, converted: Path) -> None:
    before, after = resolve(str(tiny)), resolve(str(converted))
    assert after.kind == "orbax"
    assert after.config == before.config
    assert after.chat_template == before.chat_template
    assert after.special == before.special
    text = "the bell <|im_end|>"
    assert after.build_tokenizer().encode(text).ids == before.build_tokenizer().encode(text).ids
    got = after.load(SPECS, None, "float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, got, PARAMS))
    half = after.load(SPECS, None, "bfloat16")
    assert half["embed"].dtype == jax.numpy.bfloat16
    assert np.array_equal(half["embed"], PARAMS["embed"].astype("bfloat16"))


def test_a_gguf_file_becomes_a_complete_directory(tmp_path: Path) -> None:
    before = resolve(str(tiny_gguf(tmp_path / "m.gguf", "llama")))
    save_orbax(tmp_path / "out", PARAMS, before)
    after = resolve(str(tmp_path / "out"))
    assert (after.config, after.chat_template) == (before.config, before.chat_template)
    assert after.special == before.special
    assert after.build_tokenizer().encode("abcd").ids == before.build_tokenizer().encode("abcd").ids


def test_an_existing_directory_is_kept(tiny: Path, converted: Path) -> None:
    checkpoint = resolve(str(tiny))
    with pytest.raises(ConfigError, match="exists"):
        save_orbax(converted, PARAMS, checkpoint)
    other = dict(PARAMS, embed=PARAMS["embed"] + 1)
    save_orbax(converted, other, checkpoint, overwrite=True)
    assert np.array_equal(load_orbax(converted, SPECS, "float32")["embed"], other["embed"])
    assert [p.name for p in converted.parent.iterdir()] == ["out"], "no leftovers"
    foreign = converted.parent / "foreign"
    foreign.mkdir()
    with pytest.raises(ConfigError, match="no converted model"):
        save_orbax(foreign, PARAMS, checkpoint, overwrite=True)


def test_a_failed_save_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(tiny))
    checkpoint.chat_template = "\ud800"  # cannot be written as UTF-8
    with pytest.raises(UnicodeEncodeError):
        save_orbax(tmp_path / "out", PARAMS, checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_an_overwrite_that_fails_keeps_the_old_model(
    tiny: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(source: Path, target: Path) -> Path:
        if source.name == "new":
            raise PermissionError("injected")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refuse)
    other = dict(PARAMS, embed=PARAMS["embed"] + 1)
    with pytest.raises(PermissionError):
        save_orbax(converted, other, resolve(str(tiny)), overwrite=True)
    assert np.array_equal(load_orbax(converted, SPECS, "float32")["embed"], PARAMS["embed"])
    assert [p.name for p in converted.parent.iterdir()] == ["out"], "no leftovers"


def test_an_old_model_that_cannot_be_put_back_is_kept_aside(
    tiny: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(source: Path, target: Path) -> Path:
        if target == converted:
            raise PermissionError(f"no {source.name}")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", refuse)
    other = dict(PARAMS, embed=PARAMS["embed"] + 1)
    with pytest.raises(WeightsError, match="no new.*no old.*lies in") as caught:
        save_orbax(converted, other, resolve(str(tiny)), overwrite=True)
    [old] = converted.parent.glob(".out-*/old")
    assert str(old) in str(caught.value)
    assert np.array_equal(load_orbax(old, SPECS, "float32")["embed"], PARAMS["embed"])


def test_progress_of_a_restore(converted: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    resolve(str(converted)).load(
        SPECS, None, "bfloat16", progress=lambda *report: heard.append(report)
    )
    size = 2 * (6 * 4 + 4 + 4)
    assert heard == [("loading weights", 0, size), ("loading weights", size, size)]


def test_leaves_that_do_not_fit_are_listed(converted: Path) -> None:
    wrong = {"embed": ParamSpec((5, 4), (None, None)), "layers": SPECS["layers"][:1]}
    wrong["head"] = ParamSpec((4,), (None,))
    with pytest.raises(WeightsError) as caught:
        load_orbax(converted, wrong, "float32")
    message = str(caught.value)
    assert "head is missing" in message and "nothing uses layers.1" in message
    assert "embed is (6, 4) where (5, 4) is wanted" in message


def test_an_incomplete_directory_is_refused(converted: Path) -> None:
    (converted / "orbax" / "_METADATA").unlink()
    with pytest.raises(WeightsError, match="orbax"):
        load_orbax(converted, SPECS, "float32")


@pytest.mark.multi
def test_restore_into_two_devices(converted: Path, run_python: Callable[..., str]) -> None:
    code = f"""
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxinfer.params import ParamSpec
from jaxinfer.weights.orbax_io import load_orbax
mesh = Mesh(np.array(jax.devices()), ("vocab",))
specs = {{"embed": ParamSpec((6, 4), ("vocab", None)), "layers": [ParamSpec((4,), (None,))] * 2}}
params = load_orbax(Path({str(converted)!r}), specs, "float32", lambda s: NamedSharding(mesh, P(*s.axes)))
print([s.data.shape for s in params["embed"].addressable_shards], len(jax.devices()))
assert np.array_equal(params["embed"], np.arange(24, dtype=np.float32).reshape(6, 4) / 8)
"""
    assert run_python(code, devices=2).strip() == "[(3, 4), (3, 4)] 2"


def test_json_files_are_readable(converted: Path) -> None:
    assert json.loads((converted / "config.json").read_text())["model_type"] == "llama"
    assert not list(converted.glob("*.safetensors"))


def test_gguf_with_two_ends_of_text_keeps_both(tmp_path: Path) -> None:
    meta = tokenizer_metadata(size=32) | {"tokenizer.ggml.eot_token_id": 5}
    path = tiny_gguf(tmp_path / "m.gguf", "llama", meta)
    save_orbax(tmp_path / "out", PARAMS, resolve(str(path)))
    assert resolve(str(tmp_path / "out")).special["eos_token_ids"] == [2, 5]
