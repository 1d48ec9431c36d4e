"""The tokenizer as a zip archive, so that a gateway can build the same one without a hub.

Holds the checkpoint's own text files, or what stands in for them where the tokenizer was built in memory
(GGUF); the same model always gives the same bytes. Never reads a path from a client. Called by grpc_engine.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2 as pb

from jaxinfer.loading import LoadedModel
from jaxinfer.text.tokenizer import Tokenizer

CHUNK = 64 * 1024
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date that a zip archive can hold


def bundle(model: LoadedModel, tokenizer: Tokenizer, template: str | None) -> bytes:
    """The archive. `template`: the chat template in place of the checkpoint's; None: its own."""
    files: dict[str, bytes] = {}
    if model.path.is_dir():
        files = {n: (model.path / n).read_bytes() for n in FILES if (model.path / n).is_file()}
    if "tokenizer.json" not in files:
        files["tokenizer.json"] = tokenizer.backend.to_str().encode()
        config = _tokenizer_config(model, tokenizer)
        files["tokenizer_config.json"] = json.dumps(config, sort_keys=True).encode()
    if template is not None:
        _replace_template(files, template)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in sorted(files.items()):
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return out.getvalue()


def _tokenizer_config(model: LoadedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    if tokenizer.add_bos is not None:
        config["add_bos_token"] = tokenizer.add_bos
    if model.template is not None and model.template.source is not None:
        config["chat_template"] = model.template.source
    return config


def _replace_template(files: dict[str, bytes], template: str) -> None:
    """Leave one template in the archive: this one."""
    for name in ("chat_template.jinja", "chat_template.json"):
        files.pop(name, None)
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    files["tokenizer_config.json"] = json.dumps(config | {"chat_template": template}).encode()


def chunks(data: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """The archive in messages of at most 64 KiB; the last one has the sha256 of the whole."""
    digest = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), CHUNK):
        last = start + CHUNK >= len(data)
        yield pb.GetTokenizerChunk(data=data[start : start + CHUNK], sha256=digest if last else "")


def config_json(path: Path) -> dict[str, Any]:
    """A checkpoint's config.json; {} where there is none (GGUF)."""
    file = path / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
