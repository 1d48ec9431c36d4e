"""Row records and sampling state for tests of the sampler, made without scheduler or model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.layout import FLOAT_FIELDS, RowField, RowFlag
from jaxinfer.step.pack import Rows
from jaxinfer.step.state import DeviceState

COLUMNS = {
    "temperature": RowField.TEMPERATURE,
    "top_k": RowField.TOP_K,
    "top_p": RowField.TOP_P,
    "min_p": RowField.MIN_P,
    "repetition": RowField.REPETITION,
    "presence": RowField.PRESENCE,
    "frequency": RowField.FREQUENCY,
    "position": RowField.OUT_POS,
    "slot": RowField.SLOT,
    "flags": RowField.FLAGS,
}


def record(**fields: Any) -> np.ndarray:
    """One record; unset fields are those of a random row without filters."""
    row = np.zeros(len(RowField), np.int32)
    floats = row.view(np.float32)
    flags = RowFlag.SAMPLE | RowFlag.RANDOM | RowFlag.FILTER
    defaults = {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "flags": int(flags)}
    seed = fields.pop("seed", 0)
    row[[RowField.SEED_LOW, RowField.SEED_HIGH]] = np.array([seed], np.uint64).view(np.int32)
    for name, value in (defaults | fields).items():
        target = floats if COLUMNS[name] in FLOAT_FIELDS else row
        target[COLUMNS[name]] = value
    return row


def make_rows(*records: np.ndarray) -> Rows:
    table = np.stack(records)
    return Rows(jnp.asarray(table), jnp.int32(np.bitwise_or.reduce(table[:, RowField.FLAGS])))


def make_state(vocab: int, slots: int = 4, counts: Any = None, bias: Any = None) -> DeviceState:
    shape = (slots + 1, vocab)
    return DeviceState(
        caches=[],
        last_token=jnp.zeros(slots + 1, jnp.int32),
        counts=jnp.zeros(shape, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32),
        bias=jnp.zeros(shape, jnp.float32) if bias is None else jnp.asarray(bias, jnp.float32),
    )
