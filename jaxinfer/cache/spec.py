"""What one kind of layer keeps between steps, as a value: the contract of the cache.

A model is a tuple of CacheSpecs. The scheduler asks them for page arithmetic and the step
for array shapes; nobody else knows how state is laid out. Never allocates. Imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """How a kind of state grows with its sequence (design.md section 4)."""

    TOKEN = "token"  # one entry for every `unit` tokens, kept for ever
    WINDOW = "window"  # the same, but only the last `window` tokens are ever read
    STATE = "state"  # one slot a sequence; cannot be split or rewound


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a kind: `shape` is that of a single entry; of one slot in STATE kinds."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One kind of state, shared by the layers in `layers`.

    What a compressed kind (unit > 1) keeps between two entries, its boundary state (the tokens that
    are pending and the overlap with the entry before), is a STATE kind of its own.

    Attributes:
        name: unique name of the kind, for example "full" or "window512".
        scope: see Scope.
        layers: the model layers that keep this kind, in order; each has arrays of its own.
        fields: the arrays of one layer; K/V attention has fields "k" and "v" of [kv_heads, head_dim].
        unit: tokens that one entry covers (1 for plain attention); paged kinds only.
        window: visible tokens including the query itself; 0 means unlimited.
    """

    name: str
    scope: Scope
    layers: tuple[int, ...]
    fields: tuple[Field, ...]
    unit: int = 1
    window: int = 0

    @property
    def paged(self) -> bool:
        """Whether it is kept in pages of tokens; otherwise in one slot a sequence."""
        return self.scope is not Scope.STATE

    def bytes_per_token(self) -> int:
        """Bytes that one more token costs over all layers of this kind (TOKEN and WINDOW scopes)."""
        return self._bytes() // self.unit

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens (a multiple of `unit`) over all layers."""
        return self._bytes() * (page_size // self.unit)

    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state over all layers (STATE scope)."""
        return self._bytes()

    def _bytes(self) -> int:
        return len(self.layers) * sum(_entry_bytes(f) for f in self.fields)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "int32": 4}


def _entry_bytes(field: Field) -> int:
    size = DTYPE_BYTES[field.dtype]
    for n in field.shape:
        size *= n
    return size
