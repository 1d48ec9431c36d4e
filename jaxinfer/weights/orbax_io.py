"""Orbax checkpoints: a converted parameter tree that restores straight into a target sharding.

A directory made here is a complete model reference: config, tokenizer and chat template lie beside
the arrays. It appears in one rename, whole or not at all. Called by `jaxinfer convert` and source.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxinfer.errors import ConfigError, WeightsError
from jaxinfer.params import ParamSpec
from jaxinfer.weights.loader import ShardingFor, leaf_dtype
from jaxinfer.weights.source import ARRAYS, Checkpoint, Progress

_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def save_orbax(path: Path, params: Any, checkpoint: Checkpoint, *, overwrite: bool = False) -> None:
    """Write `params` and everything that makes `checkpoint` usable to the new directory `path`.

    `path` never holds a part of a model. With `overwrite` the old one is renamed aside, the new one
    renamed in, the old one deleted; between the two renames there is no `path`, and a process killed
    just there leaves both beside it, in a folder called ".NAME-" and random letters. If the second
    rename fails the old one is put back; if even that fails, the error says where it lies.

    Raises ConfigError if `path` exists, unless `overwrite` is set and it is such a directory;
    WeightsError if the old model is left aside.
    """
    path = path.absolute()
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; choose another directory or ask to overwrite it")
    if path.exists() and not (path / ARRAYS).is_dir():
        raise ConfigError(f"{path} exists and is no converted model, so it is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one file system.
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    old = folder / "old"
    try:
        new = folder / "new"
        new.mkdir()
        _write_texts(new, checkpoint)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(new / ARRAYS, params)
            checkpointer.wait_until_finished()
        _replace(path, new, old)
    finally:
        if path.exists() or not old.exists():  # else `old` is the only model that there is
            shutil.rmtree(folder)


def _replace(path: Path, new: Path, old: Path) -> None:
    """Rename `new` to `path`; what was there becomes `old`, or is put back if that fails."""
    moved = path.exists()
    if moved:
        path.rename(old)
    try:
        new.rename(path)
    except BaseException as error:
        if moved:
            try:
                old.rename(path)
            except OSError as second:
                raise WeightsError(
                    f"{path} could not be replaced ({error}), nor the old model put back ({second}); "
                    f"the old one lies in {old}: rename it to {path}"
                ) from error
        raise


def load_orbax(
    path: Path,
    specs_tree: Any,
    dtype: str,
    sharding_for: ShardingFor | None = None,
    progress: Progress | None = None,
) -> Any:
    """The parameter tree of `specs_tree`, every leaf restored into its sharding and dtype.

    sharding_for None puts everything on the default device. `progress` hears of the start and of the
    end: the restore itself reports nothing. Raises WeightsError listing missing,
    unused and mis-shaped leaves.
    """
    arrays = path.absolute() / ARRAYS
    is_spec = {"is_leaf": lambda x: isinstance(x, ParamSpec)}
    local = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(
            spec.shape,
            leaf_dtype(spec, dtype),
            sharding=sharding_for(spec) if sharding_for else local,
        ),
        specs_tree,
        **is_spec,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(arrays).item_metadata.tree
        except (OSError, ValueError, AttributeError) as error:
            raise WeightsError(f"{arrays} is no complete Orbax checkpoint: {error}") from error
        _compare(arrays, _shapes(stored), _shapes(target))
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target))
        if progress:
            progress("loading weights", 0, total)
        try:
            params = checkpointer.restore(arrays, target)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{arrays} cannot be restored: {error}") from error
    if progress:
        progress("loading weights", total, total)
    return params


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    problems += [f"nothing uses {name}" for name in sorted(stored.keys() - wanted.keys())]
    problems += [
        f"{name} is {stored[name]} where {shape} is wanted"
        for name, shape in wanted.items()
        if stored.get(name, shape) != shape
    ]
    if problems:
        raise WeightsError(f"{path} does not fit the model: {'; '.join(problems)}")


def _write_texts(folder: Path, checkpoint: Checkpoint) -> None:
    special = checkpoint.special
    generation = checkpoint.generation_config | {"eos_token_id": special["eos_token_ids"]}
    _write_json(folder / "config.json", checkpoint.config)
    _write_json(folder / "generation_config.json", generation)
    if isinstance(checkpoint.chat_template, str):  # named ones come along in tokenizer_config.json
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, "utf-8")
    if checkpoint.kind == "gguf":
        checkpoint.build_tokenizer().save(str(folder / "tokenizer.json"))
        facts = {k: v for k, v in special.items() if k != "eos_token_ids" and v is not None}
        _write_json(folder / "tokenizer_config.json", facts)
        return
    for name in _COPIED:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, folder / name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
