"""What the prefix cache looks like now: its kinds, the top of its tree, hits, states in use, its rules.

A value for people and tools: counts, lengths and names, never tokens, text or namespaces. Changes
nothing. Made by Scheduler.inspect in the thread that owns the cache; shown by the engine and the servers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from jaxinfer.cache import PrefixTree
from jaxinfer.cache.tree import NodeView
from jaxinfer.config import EngineConfig
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.scheduler.stats import KindStats, SchedulerStats

MAX_NODES = 10_000  # of the tree that one look may visit: it delays the next step


@dataclass(frozen=True, slots=True)
class KindView(KindStats):
    """One cache kind: what it is, and how its pages (STATE kinds: slots) are used (KindStats).

    Attributes:
        unit: tokens of one entry. window: visible tokens, 0 is all. layers: how many layers keep it.
        bytes_each: bytes of a page, STATE kinds of a slot, over all layers.
    """

    unit: int
    window: int
    layers: int
    bytes_each: int


@dataclass(frozen=True, slots=True)
class CacheView:
    """The cache of one engine.

    Attributes:
        page_size: tokens a page. unit_tokens: see EngineConfig.reusable_unit.
        prefix_caching, checkpoint_policy, max_states_per_path, replay: as configured.
        checkpoint_interval: tokens, in whole pages.
        queries: prompt tokens that were looked up. hits: those that were found. hit_rate: their ratio;
            what a kind cut off is its `shortened`.
        working_states: sequences with slots that their steps write, in every STATE kind.
        pending_checkpoints: states that a step in flight computes for the tree.
        tree: the top of the prefix tree, parents first. complete: nothing was left out of it.
    """

    page_size: int
    unit_tokens: int
    prefix_caching: bool
    checkpoint_policy: str
    checkpoint_interval: int
    max_states_per_path: int
    replay: str
    queries: int
    hits: int
    hit_rate: float
    working_states: int
    pending_checkpoints: int
    kinds: tuple[KindView, ...]
    tree: tuple[NodeView, ...]
    complete: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["kinds"] = [asdict(kind) for kind in self.kinds]
        out["tree"] = [view._asdict() for view in self.tree]
        return out


def inspect_cache(
    config: EngineConfig,
    tree: PrefixTree,
    running: Iterable[Sequence],
    stats: SchedulerStats,
    limit: int,
) -> CacheView:
    """The cache as it stands. `running`: who holds parts of it. `limit`: nodes of the tree."""
    nodes = tree.inspect(limit + 1)
    size, held = config.page_size, [sequence.held for sequence in running]
    return CacheView(
        page_size=size,
        unit_tokens=config.reusable_unit(bool(tree.state_kinds)),
        prefix_caching=config.enable_prefix_caching,
        checkpoint_policy=config.checkpoint_policy,
        checkpoint_interval=config.checkpoint_grid,
        max_states_per_path=config.max_states_per_path,
        replay=config.replay,
        queries=stats.prefix_queries,
        hits=stats.prefix_hits,
        hit_rate=stats.prefix_hits / max(1, stats.prefix_queries),
        working_states=sum(any(h.pages[k] for k in tree.state_kinds) for h in held),
        pending_checkpoints=sum(len(h.pending) for h in held),
        kinds=tuple(
            KindView(
                **asdict(kind),
                unit=spec.unit,
                window=spec.window,
                layers=len(spec.layers),
                bytes_each=spec.bytes_per_page(size) if spec.paged else spec.bytes_per_slot(),
            )
            for spec, kind in zip(tree.specs, stats.kinds, strict=True)
        ),
        tree=tuple(nodes[:limit]),
        complete=len(nodes) <= limit,
    )
