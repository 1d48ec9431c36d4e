"""What a sequence keeps between steps, on the host's side: specs, page pools and the prefix tree.

Holds ids and counts only, never arrays. Imports no JAX. Called by the scheduler.
"""

from jaxinfer.cache.pool import PagePool
from jaxinfer.cache.spec import CacheSpec, Field, Scope
from jaxinfer.cache.tree import Held, Match, PrefixTree

__all__ = ["CacheSpec", "Field", "Held", "Match", "PagePool", "PrefixTree", "Scope"]
