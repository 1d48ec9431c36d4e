"""Where the kinds of a model can go on: the rules of a hit, over the nodes that a prompt's tokens lead to.

TOKEN kinds need every page before that point, WINDOW kinds those of the last window, STATE kinds a
checkpoint exactly there. Changes nothing, counts no references. Called by the prefix tree only.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.cache.node import Node
from jaxinfer.cache.spec import CacheSpec, Scope


def first_page(spec: CacheSpec, position: int, size: int) -> int:
    """Index of the first page that the token at `position` (and all later ones) can see."""
    windowed = spec.scope is Scope.WINDOW
    return max(0, position - spec.window + 1) // size if windowed else 0


def needed(spec: CacheSpec, path: list[Node], size: int) -> list[Node]:
    """The nodes whose pages (or checkpoint) this kind needs to go on at the end of the path."""
    return path[first_page(spec, len(path) * size, size) :] if spec.paged else path[-1:]


def depths(specs: Sequence[CacheSpec], path: list[Node], size: int) -> tuple[int, int, list[int]]:
    """Depths in pages at which all kinds can go on, all paged kinds, and all kinds but each one.

    A depth of the last sort that is not above the first one is given as 0.
    """
    # TOKEN pages stand in every node: only the other kinds ever cut a hit short.
    cutting = [(k, s) for k, s in enumerate(specs) if s.scope is not Scope.TOKEN]
    fits = [(k, s.paged, _fits(s, [n.pages[k] for n in path], size)) for k, s in cutting]
    known, others = 0, [0] * len(specs)
    for depth in range(len(path), 0, -1):
        bad = [(kind, paged) for kind, paged, fit in fits if not fit[depth - 1]]
        if not known and not any(paged for _, paged in bad):
            known = depth
        if not bad:
            return depth, known, others
        if len(bad) == 1:
            others[bad[0][0]] = max(others[bad[0][0]], depth)
    return 0, known, others


def _fits(spec: CacheSpec, pages: list[int], size: int) -> list[int] | list[bool]:
    """Whether the kind can go on after each node of a path that has these pages (0: none)."""
    if not spec.paged:
        return pages
    out, start = [], 0  # first page of the live run that ends at the current one
    for index, page in enumerate(pages):
        if not page:
            start = index + 1
        out.append(start * size <= max(0, (index + 1) * size - spec.window + 1))
    return out
