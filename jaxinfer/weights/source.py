"""resolve(): from a model reference to a Checkpoint (config, tokenizer facts, lazy tensors).

A reference is a Hugging Face directory, a `.gguf` file, an Orbax directory made by `convert`, an
alias (demo.py) or a Hub id. Reads headers and JSON only, never weights, and imports no JAX. Called
by LLM, Engine, the converter and the CLI.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxinfer.errors import ConfigError, WeightsError
from jaxinfer.weights.tensors import TensorSource, lfs_pointer, open_safetensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from jaxinfer.weights.gguf_file import GGUFFile
    from jaxinfer.weights.loader import ShardingFor

Progress = Callable[[str, int, int], None]
Kind = Literal["hf", "gguf", "orbax"]

FORMS = (
    "a Hugging Face directory with config.json and safetensors, a .gguf file, a directory made by "
    "`jaxinfer convert`, the alias smollm2-135m, or a Hub id like org/name"
)
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # other copies of the same weights
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
ARRAYS = "orbax"  # folder of the arrays inside a converted model
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Checkpoint:
    """A model as it lies on disk; opening one reads no weights.

    Attributes:
        name: short name for messages and APIs.
        path: the directory or the file.
        kind: "hf", "gguf" or "orbax".
        config: content of config.json (for GGUF derived from the metadata).
        generation_config: content of generation_config.json, or {}.
        tokenizer_json: path of tokenizer.json; None for GGUF.
        chat_template: Jinja source; or several by name, one of them "default"; or None.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tokenizer_facts: dict[str, Any],
        chat_template: str | dict[str, str] | None,
        *,
        name: str = "",
        gguf_file: GGUFFile | None = None,
    ) -> None:
        self.path = path
        self.kind: Kind = kind
        self.name = name or path.stem
        self.config = config
        self.generation_config = generation_config
        self.chat_template = chat_template
        self._facts = tokenizer_facts
        self._gguf = gguf_file
        json_path = path / "tokenizer.json"
        self.tokenizer_json = json_path if kind != "gguf" and json_path.is_file() else None

    @cached_property
    def tensors(self) -> TensorSource:
        """Lazy handles under Hugging Face names; WeightsError for an Orbax directory."""
        if self._gguf is not None:
            from jaxinfer.weights.gguf_arch import GGUFSource, find_arch

            heads = self.config["num_attention_heads"]
            kv_heads = self.config["num_key_value_heads"]
            return GGUFSource(self._gguf, find_arch(self._gguf)[1], heads, kv_heads)
        if self.kind == "orbax":
            raise WeightsError(f"{self.path} is an Orbax checkpoint: load() restores it as a whole")
        return open_safetensors(self.path)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._gguf is not None:
            from jaxinfer.weights.gguf_tokenizer import build_tokenizer

            return build_tokenizer(self._gguf)
        if self.tokenizer_json is None:
            raise ConfigError(missing_tokenizer(self.path))
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self.tokenizer_json))
        except Exception as error:  # the library raises bare Exception for broken files
            raise ConfigError(f"{self.tokenizer_json} is broken: {error}") from error

    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer. `encode(add_special_tokens=True)` adds BOS where the model wants one."""
        return self._tokenizer

    @cached_property
    def special(self) -> dict[str, Any]:
        """Tokenizer facts.

        bos_token, eos_token, pad_token, unk_token: str or None. add_bos_token, add_eos_token: bool,
        or None where the checkpoint leaves it to tokenizer.json's post-processor. eos_token_ids:
        sorted union over the tokenizer, config.json and generation_config.json.
        """
        facts = dict(self._facts)
        ids = set(facts.pop("eot_token_ids", ()))
        text = self.config.get("text_config") or {}  # composite models may have the id there alone
        for source in (self.config, text, self.generation_config):
            value = source.get("eos_token_id")
            ids.update(value if isinstance(value, list) else [value])
        if facts["eos_token"] is not None and (self._gguf or self.tokenizer_json):
            ids.add(self._tokenizer.token_to_id(facts["eos_token"]))
        # Some files write -1 (or null) for "none".
        return facts | {"eos_token_ids": sorted(i for i in ids if isinstance(i, int) and i >= 0)}

    def load(
        self,
        specs_tree: Any,
        rules_tree: Any,
        dtype: str,
        *,
        sharding_for: ShardingFor | None = None,
        ignored: Sequence[re.Pattern[str]] = (),
        progress: Progress | None = None,
    ) -> Any:
        """The parameter tree of `specs_tree` on the devices; see loader.load_params.

        `progress` counts bytes; Orbax restores in one go, so there it tells the start and the end.
        """
        if self.kind == "orbax":
            from jaxinfer.weights.orbax_io import load_orbax

            return load_orbax(self.path, specs_tree, dtype, sharding_for, progress)
        from jaxinfer.weights.loader import load_params

        return load_params(
            specs_tree,
            rules_tree,
            self.tensors,
            dtype,
            sharding_for=sharding_for,
            ignored=ignored,
            progress=progress,
        )


def missing_tokenizer(path: Path) -> str:
    """Why a model directory has no tokenizer, and what to do."""
    others = [name for name in OTHER_TOKENIZERS if (path / name).is_file()]
    if not others:
        return f"{path} has no tokenizer.json; put the model's there, or send prompt_token_ids"
    return (
        f"{path} has {' and '.join(others)} and no tokenizer.json, which alone is read; make one with transformers: "
        f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r}); "
        "or send prompt_token_ids"
    )


def resolve(
    model: str | Path, cache_dir: Path | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Open a model reference; see FORMS. `cache_dir` holds what has to be fetched.

    Raises ConfigError (no such model, unreadable config) or WeightsError (broken files).
    """
    from jaxinfer.weights.demo import DEMO_ALIAS, fetch_demo

    if not model or not isinstance(model, (str, Path)):
        raise ConfigError(f"model={model!r:.80} names no model; accepted is {FORMS}")
    path, model = Path(model).expanduser(), str(model)
    if path.is_dir() and path.suffix != ".gguf":
        return open_directory(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf(path)
        raise ConfigError(f"model={model!r} is a file that is not GGUF; accepted is {FORMS}")
    if path.is_dir():
        raise WeightsError(f"model={model!r} is a folder called like a GGUF file")
    if model == DEMO_ALIAS:
        return open_gguf(fetch_demo(cache_dir, progress), name=model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith((".", "/")):
        return open_directory(_from_hub(model), name=model)
    raise ConfigError(f"model={model!r} is not there; accepted is {FORMS}")


def open_gguf(path: Path, name: str = "") -> Checkpoint:
    """A GGUF file: config, tokenizer facts and chat template from its metadata."""
    from jaxinfer.weights.gguf_config import gguf_config
    from jaxinfer.weights.gguf_file import GGUFFile
    from jaxinfer.weights.gguf_tokenizer import tokenizer_facts

    file = GGUFFile(path)
    try:
        config = gguf_config(file)
        facts = tokenizer_facts(file)
    except (TypeError, ArithmeticError, IndexError) as error:  # a key's value is of another type
        raise WeightsError(f"GGUF file {path} has metadata of a wrong type: {error}") from error
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(path, "gguf", config, {}, facts, template, name=name, gguf_file=file)


def open_directory(path: Path, name: str = "") -> Checkpoint:
    """A Hugging Face directory, or one that `convert` wrote."""
    if not (path / "config.json").is_file():
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; give the path of a file in it: {', '.join(inside)}" if inside else ""
        raise ConfigError(f"model={str(path)!r} has no config.json{hint}; accepted is {FORMS}")
    tokenizer_json = path / "tokenizer.json"
    if tokenizer_json.is_file() and (problem := lfs_pointer(tokenizer_json)):
        raise ConfigError(problem)
    tokenizer = read_json(path / "tokenizer_config.json")
    fallback = read_json(path / "special_tokens_map.json")
    facts: dict[str, Any] = {
        key: _token(tokenizer.get(key) or fallback.get(key)) for key in _SPECIAL
    }
    facts |= {key: tokenizer.get(key) for key in ("add_bos_token", "add_eos_token")}
    return Checkpoint(
        path,
        "orbax" if (path / ARRAYS).is_dir() else "hf",
        read_json(path / "config.json"),
        read_json(path / "generation_config.json"),
        facts,
        _chat_template(path, tokenizer),
        name=name or path.resolve().name,
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file; ConfigError if it is broken."""
    if not path.is_file():
        return {}
    try:
        if problem := lfs_pointer(path):
            raise ConfigError(problem)
        value = json.loads(path.read_text("utf-8"))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__} instead of an object")
    return value


def _token(value: Any) -> str | None:
    """A token's text; tokenizer_config.json spells it plainly or as an object."""
    return value.get("content") if isinstance(value, dict) else value


def _chat_template(path: Path, tokenizer: dict[str, Any]) -> str | dict[str, str] | None:
    """The template, or several by name; a file of its own comes before tokenizer_config.json's entry."""
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text("utf-8")
    template = read_json(path / "chat_template.json").get("chat_template")
    template = template or tokenizer.get("chat_template")
    if isinstance(template, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ConfigError(
                f"{path} has the chat templates {', '.join(named)} and none called 'default'"
            )
        return named
    return template


def _from_hub(model: str) -> Path:
    """Folder with a snapshot of a Hub repository: JSON, tokenizer and safetensors only."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"model={model!r} is neither a path here nor loadable from the Hub, because the package "
            f"huggingface_hub is not installed; accepted is {FORMS}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED))
    except Exception as error:  # whatever its HTTP library raises: the user needs one message
        raise ConfigError(
            f"model={model!r} is no path here, and the Hub has no such repository or cannot be "
            f"reached ({type(error).__name__}: {error}); accepted is {FORMS}"
        ) from error
