"""What a sequence keeps between steps, on the host's side: specs, page pools and the prefix tree.

Holds ids and counts only, never arrays. Imports no JAX. Called by the scheduler.
"""

from jaxinfer.cache.inspect import NodeView
from jaxinfer.cache.ledger import KindCounters
from jaxinfer.cache.node import Held, Match
from jaxinfer.cache.pool import PagePool, Pool, SlotPool
from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.cache.tree import PrefixTree

__all__ = [
    "CacheSpec",
    "Field",
    "Held",
    "KindCounters",
    "Match",
    "NodeView",
    "PagePool",
    "Pool",
    "PrefixTree",
    "Scope",
    "SlotPool",
]
