"""KV events: which pages of tokens the prefix tree can reuse, told as they come and go.

Routers keep an index of them to send a prompt where its prefix is cached. The ids are int64 values
chained with SHA-256, equal in every process for equal tokens under an equal namespace. They only
name blocks to the outside: the tree itself compares tokens in full. Called by the prefix tree and the
engine core, on the engine thread; imports no JAX.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby

Namespace = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full pages that follow one another and can be reused from now on.

    Attributes:
        hashes: int64 ids, never 0, one a page. parent: id of the page before the first; None: none.
        pages: the tokens of each page. namespace: the cache key they stand under (Request.namespace).
    """

    hashes: tuple[int, ...]
    parent: int | None
    pages: tuple[tuple[int, ...], ...]
    namespace: Namespace = ()

    @property
    def tokens(self) -> list[int]:
        return [token for page in self.pages for token in page]

    @property
    def block_size(self) -> int:
        """Tokens in each of the pages."""
        return len(self.pages[0])

    @property
    def cache_salt(self) -> str | None:
        """The salt that the request gave: the first part of the engine's namespaces, if it is not empty."""
        salt = self.namespace[0] if self.namespace else None
        return salt if isinstance(salt, str) and salt else None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that can't be reused any more; nothing stored hangs below them."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is stored."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
Listener = Callable[[Event], None]


def root_hash(namespace: Namespace) -> int:
    """Start of the chain. `repr` of strings, numbers and tuples of them is the same in every process."""
    return _int64(repr(namespace).encode())


def page_hash(parent: int, tokens: Sequence[int]) -> int:
    """Id of a page after the page (or root) `parent`; tokens are int64."""
    return _int64(struct.pack(f"<{len(tokens) + 1}q", parent, *tokens))


def _int64(data: bytes) -> int:
    """A signed value other than 0, which stands for "none" in some consumers."""
    return int.from_bytes(sha256(data).digest()[:8], "big", signed=True) or 1


class EventBuffer:
    """Gathers the events of an engine round, so that a listener gets one list of them a round.

    AllBlocksCleared goes out at once, with what came before it: a cache is also cleared between rounds.
    """

    def __init__(self) -> None:
        self.listener: Callable[[list[Event]], None] | None = None
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, AllBlocksCleared):
            self.flush()

    def flush(self) -> None:
        """Hand over what has gathered; does nothing if that is nothing."""
        if self._events:
            events, self._events = _merged(self._events), []
            if self.listener is not None:
                self.listener(events)


def _merged(events: list[Event]) -> list[Event]:
    """The same with one BlockRemoved for each run of them."""
    out: list[Event] = []
    for kind, run in groupby(events, type):
        if kind is BlockRemoved:
            out.append(
                BlockRemoved(tuple(h for e in run if isinstance(e, BlockRemoved) for h in e.hashes))
            )
        else:
            out += run
    return out
