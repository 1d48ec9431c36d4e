"""Pages: how many pages tokens need in every cache kind, and who gets them.

Joins the prefix tree with the page arithmetic of the model's cache kinds. Never decides which
sequence runs. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxinfer.cache import CacheSpec, Held, Match, PagePool, PrefixTree, Scope, SlotPool
from jaxinfer.config import EngineConfig
from jaxinfer.errors import CapacityError, ConfigError
from jaxinfer.layout import RecordLayout
from jaxinfer.scheduler.checkpoints import Checkpoints
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.types import Request


class Pages:
    """The pools and the tree of one engine, in tokens. num_pages: pages of each kind's pool, of STATE kinds slots."""

    def __init__(
        self, config: EngineConfig, specs: Seq[CacheSpec], num_pages: Seq[int], max_model_len: int
    ) -> None:
        self.size = config.page_size
        self.caching = config.enable_prefix_caching
        self.max_model_len = max_model_len
        pools = [
            (PagePool if s.paged else SlotPool)(n) for s, n in zip(specs, num_pages, strict=True)
        ]
        self.tree = PrefixTree(specs, self.size, pools, config.max_states_per_path)
        self.checkpoints = Checkpoints(config, bool(self.tree.state_kinds))
        self.aligned = config.replay == "exact"
        chunk = config.max_num_batched_tokens
        if config.long_prefill_threshold:
            chunk = min(chunk, config.long_prefill_threshold)
        self._paged = tuple(k for k, spec in enumerate(specs) if spec.paged)
        tables = tuple(self._table(spec, chunk) for spec in specs)
        self.layout = RecordLayout(tables, self.tree.state_kinds)
        for spec, pool in zip(specs, pools, strict=True):
            least = self.count(spec.window - 1) + 1
            if spec.scope is Scope.WINDOW and pool.usable < least:
                raise ConfigError(
                    f"num_pages={pool.size} of cache kind {spec.name!r} cannot hold one window of "
                    f"{spec.window} tokens; at least {least + 1}"
                )
            if not spec.paged and pool.usable < 2:
                raise ConfigError(
                    f"num_states={pool.size} of cache kind {spec.name!r} is too small: a sequence reads one "
                    "slot while it writes another; at least 3"
                )
        usable = [p.usable for p, s in zip(pools, specs, strict=True) if s.scope is Scope.TOKEN]
        # Tokens whose entries a sequence that runs alone can keep.
        self.capacity = min(usable, default=2**31 // self.size) * self.size

    def _table(self, spec: CacheSpec, chunk: int) -> int:
        if not spec.paged:
            return 1
        whole = self.count(self.max_model_len)
        return min(self.count(spec.window + chunk) + 2, whole) if spec.window else whole

    def count(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.size)

    def output_limit(self, request: Request) -> int:
        """Output tokens that the request may reach; CapacityError if it can never be served.

        The last output token is never fed, so its entries need no room.
        """
        prompt = len(request.prompt_token_ids)
        if prompt + min(request.max_tokens, 1) > self.max_model_len:
            raise CapacityError(
                f"a prompt of {prompt} tokens leaves no room for output: max_model_len is "
                f"{self.max_model_len}; shorten the prompt"
            )
        needed = prompt + (request.max_tokens > 1)
        if needed > self.capacity:
            raise CapacityError(
                f"a prompt of {prompt} tokens needs {self.count(needed)} pages of {self.size} tokens, "
                f"the pool has {self.capacity // self.size}; at most {self.capacity - 1} prompt tokens "
                "fit: shorten the prompt or raise num_pages"
            )
        return min(request.max_tokens, self.max_model_len - prompt, self.capacity - prompt + 1)

    # -- growing and shrinking -----------------------------------------------------------------

    def missing(self, held: Held, tokens: int) -> list[int]:
        """Pages of each kind to come before `tokens` tokens are held (WINDOW: at most a table; STATE: a slot)."""
        out = []
        for kind, window in enumerate(self.tree.windows):
            if kind in self.tree.state_kinds:
                out.append(1 - len(held.pages[kind]))
                continue
            more = max(0, self.count(tokens) - held.end(kind))
            if window:
                more = min(more, max(0, self.layout.tables[kind] - len(held.pages[kind])))
            out.append(more)
        return out

    def available(self) -> list[int]:
        return [self.tree.available(kind) for kind in range(len(self.tree.pools))]

    def reach(self, held: Held) -> int:
        """Tokens that could be held with all pages that can be had now."""
        ends = (held.end(k) + self.tree.available(k) for k in self._paged)
        return min(ends, default=2**31 // self.size) * self.size

    def extend(self, held: Held, tokens: int) -> bool:
        """Hold pages for `tokens` tokens in every kind; False (and no change) if some kind runs out."""
        tree, whole = self.tree, self.count(tokens)
        for kind in self._paged:
            if whole - held.end(kind) > tree.available(kind):
                return False
        for kind in self._paged:
            more = whole - held.end(kind)
            if more > 0:
                held.pages[kind] += tree.allocate(kind, more) or ()
        return True

    # -- prefixes ------------------------------------------------------------------------------

    def may_read(self, sequence: Sequence) -> bool:
        return self.caching and sequence.reads_cache

    def lookup(self, sequence: Sequence) -> Match:
        """The longest cached prefix; at least the last known token is left to compute."""
        if not self.may_read(sequence):
            return Match(0, (), (), None)
        tokens = sequence.tokens
        return self.tree.match(sequence.request.namespace, tokens, len(tokens) - 1)

    def keep_states(self, held: Held, positions: Seq[int]) -> dict[int, tuple[int, ...]]:
        """Reserve checkpoints at `positions`, at each of which a block of the step must end: position -> slot
        of each STATE kind.

        As far as there are slots: without one a state is not kept, and nothing waits for it.
        """
        kept: dict[int, tuple[int, ...]] = {}
        for position in positions:
            slots = self.tree.reserve_checkpoint(held, position)
            if slots is not None:
                kept[position] = slots
        return kept

    def turn_state(self, sequence: Sequence, position: int) -> bool:
        """Keep the state at `position` that a decoding sequence has reached, if the policy wants it and there
        is a slot to go on in."""
        wanted = self.checkpoints.at_decode(sequence, position)
        return wanted and self.tree.turn_checkpoint(sequence.held, position)

    def settle(self, sequence: Sequence, computed: int) -> bool:
        """A committed step has computed the first `computed` tokens: publish the full pages, drop dead ones.

        True if the sequence's table changed because the tree had some of its pages already.
        """
        rewritten: list[tuple[int, int]] = []
        request, held = sequence.request, sequence.held
        if self.caching and request.use_prefix_cache:
            spared = self.checkpoints.declared(request) if held.pending else ()
            rewritten = self.tree.insert(request.namespace, sequence.tokens, computed, held, spared)
        self.tree.trim(held, computed)
        return bool(rewritten)
