"""How many pages each cache kind gets, and the longest sequence that follows from it.

The arithmetic is logged, and a configuration that cannot hold one sequence is refused. Imports no JAX
at module level: the device is asked only when the pool must be sized from free memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxinfer.cache.spec import CacheSpec, Scope
from jaxinfer.config import EngineConfig
from jaxinfer.errors import CapacityError, ConfigError
from jaxinfer.model_config import ModelConfig

log = logging.getLogger(__name__)
FALLBACK_MEMORY = 4 << 30
STATE_SHARE = 0.5  # of the pools' memory that recurrent states take at most
STATES_PER_ROW = 4  # checkpoints for each row, where memory allows
SAMPLING_BYTES = 8  # of a slot and vocabulary entry: DeviceState.counts and .bias


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """pages: pages (STATE kinds: slots) of each kind, the trash one included; max_model_len: tokens."""

    pages: tuple[int, ...]
    max_model_len: int


def size_pools(config: EngineConfig, model: ModelConfig, specs: tuple[CacheSpec, ...]) -> PoolSizes:
    """Pages or slots for every spec. Raises CapacityError when one sequence of max_model_len does not fit."""
    limit = model.max_length
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds what the model supports; allowed [2, {limit}]"
        )
    wanted = config.max_model_len or limit
    size = config.page_size
    memory = _Memory(config, model.vocab_size)
    states = [s for s in specs if not s.paged]
    slots = _slots_for(config, states, memory) if states else 0
    memory.states = slots * sum(s.bytes_per_slot() for s in states)
    paged = [s for s in specs if s.paged]
    pages = config.num_pages or 2
    if config.num_pages is None and paged:
        pages = _pages_for(config, memory, paged, wanted)
    given = (config.num_pages or not paged) and (config.num_states or not states)
    why = "the numbers given" if given else memory.why
    longest = (pages - 1) * size if any(s.scope is Scope.TOKEN for s in specs) else wanted
    if config.max_model_len is None:
        wanted = min(wanted, longest)
    elif config.num_pages is None and wanted > longest:
        raise CapacityError(
            f"max_model_len={wanted} needs {-(-wanted // size)} pages, but memory holds {pages - 1} "
            f"({why}); lower max_model_len to at most {longest} or raise memory_fraction={config.memory_fraction}"
        )
    counts = tuple(_kind_pages(config, s, pages, wanted) if s.paged else slots for s in specs)
    total = sum(
        n * (s.bytes_per_page(size) if s.paged else s.bytes_per_slot())
        for s, n in zip(specs, counts, strict=True)
    )
    log.info(
        "cache: %s (pages of %d tokens, slots of one state; from %s), %.1f MiB, max_model_len %d",
        " + ".join(f"{n} {s.name}" for s, n in zip(specs, counts, strict=True)),
        size,
        why,
        total / 2**20,
        wanted,
    )
    unit = config.reusable_unit(bool(states))
    rule = f" (checkpoint policy {config.checkpoint_policy})" if states else ""
    if unit:
        log.info("cache: prompts share prefixes in units of %d tokens%s", unit, rule)
    else:
        log.info("cache: prompts share no prefixes%s", rule)
    return PoolSizes(counts, wanted)


class _Memory:
    """What all pools may take together; asked for only when a pool must be sized from it.

    states: bytes of it that the pools of recurrent states take.
    """

    def __init__(self, config: EngineConfig, vocab: int) -> None:
        self._share = config.memory_fraction
        self._sampling = SAMPLING_BYTES * vocab * (config.rows + 1)
        self.states = 0

    @cached_property
    def free(self) -> tuple[int, str]:
        return free_memory()

    @property
    def bytes(self) -> int:
        return int(max(self.free[0] - self._sampling, 0) * self._share)

    @property
    def why(self) -> str:
        states = f" and {self.states / 2**20:.0f} MiB of recurrent states" if self.states else ""
        return (
            f"{self._share:g} of {self.free[0] / 2**20:.0f} MiB free {self.free[1]} memory less "
            f"{self._sampling / 2**20:.0f} MiB of sampling state{states}"
        )


def _slots_for(config: EngineConfig, states: list[CacheSpec], memory: _Memory) -> int:
    """Slots of each STATE kind, slot 0 included: one for each row, and the rest for checkpoints."""
    if config.num_states is not None:
        return config.num_states
    wanted = 1 + config.rows * (1 + STATES_PER_ROW)
    each = sum(s.bytes_per_slot() for s in states)
    slots = min(wanted, int(memory.bytes * STATE_SHARE) // max(each, 1))
    if slots < 3:
        raise CapacityError(
            f"{memory.why} holds {slots} states of {each / 2**20:.1f} MiB, at least 3 are needed; raise "
            f"memory_fraction={config.memory_fraction} or set num_states"
        )
    return slots


def _kind_pages(config: EngineConfig, spec: CacheSpec, pages: int, max_len: int) -> int:
    """TOKEN kinds take `pages`; a WINDOW kind needs no more than its rows' windows, twice over for reuse."""
    if spec.scope is not Scope.WINDOW:
        return pages
    span = min(max_len, spec.window + config.max_num_batched_tokens)
    per_row = -(-span // config.page_size) + 2
    return min(pages, 2 * per_row * config.rows + 1) if pages > per_row else per_row + 1


def _pages_for(config: EngineConfig, memory: _Memory, paged: list[CacheSpec], max_len: int) -> int:
    """Pages that the rest of the memory holds, at most what the rows could ever use."""
    per_page = sum(s.bytes_per_page(config.page_size) for s in paged)
    affordable = max(memory.bytes - memory.states, 0) // max(per_page, 1)
    rows = max_len * config.rows
    # A CPU's memory is shared with everything else: twice the longest sequence is a sensible pool.
    useful = rows if memory.free[1] == "device" else max(2 * max_len, 512 * config.rows)
    pages = 1 + min(-(-min(useful, rows) // config.page_size), affordable)
    if pages < 2:
        raise CapacityError(
            f"memory_fraction={config.memory_fraction}: {memory.why} holds no page of "
            f"{per_page / 2**10:.0f} KiB; raise memory_fraction, lower max_num_seqs or num_states, or set "
            "num_pages"
        )
    return pages


def free_memory() -> tuple[int, str]:
    """Free bytes and whose: "device" where the backend reports it, else "host"."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return _device_memory(device), "device"
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024, "host"
    return _fallback("host"), "host"


def _device_memory(device: Any) -> int:
    """Free bytes of an accelerator; not every backend can say."""
    import jax

    try:
        stats = device.memory_stats() or {}
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        stats = {}
    if "bytes_limit" not in stats:
        return _fallback(str(device))
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _fallback(where: str) -> int:
    size = FALLBACK_MEMORY >> 20
    log.warning("free memory of %s cannot be read; assuming %d MiB (set num_pages)", where, size)
    return FALLBACK_MEMORY
