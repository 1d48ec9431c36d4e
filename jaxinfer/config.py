"""EngineConfig: how the engine runs a model. Frozen and checked once, at construction.

Every field is applied by the engine or refused here; tests walk all of them. ModelConfig, the
shape of the model itself, is in model_config.py. Imports no JAX.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from jaxinfer.errors import ConfigError
from jaxinfer.layout import StepShape

POLICIES = ("fcfs", "priority", "lpm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
WARMUPS = ("lazy", "eager")
CHECKPOINT_POLICIES = ("none", "align", "branch", "second-hit", "declared")
REPLAYS = ("tolerant", "exact")
EXACT_BLOCK = 64  # tokens that exact replay computes at once: pallas_kernels.EXACT, without JAX


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine options.

    Attributes:
        dtype: compute dtype; "auto" is float32 on CPU and the checkpoint's own (bfloat16) on GPU.
        max_model_len: longest prompt + output in tokens; None takes the model's, cut to what the pool holds.
        page_size: tokens a page, a power of two.
        num_pages: pages of the TOKEN pool; None sizes it from `memory_fraction` of the free memory.
        memory_fraction: share of the free device (CPU: host) memory that pools may take, in (0, 1].
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens a step feeds at most (decode rows first, then prefill chunks).
        max_partial_prefills: prompts that may be partly prefilled at once.
        long_prefill_threshold: most tokens that one prompt may take of a step; 0 is no limit.
        policy: order of the waiting queue: "fcfs", "priority" or "lpm" (longest cached prefix first).
        enable_prefix_caching: reuse pages of common prefixes.
        num_states: slots for recurrent states, slot 0 included; None sizes them from the same memory.
        checkpoint_policy: where recurrent states are kept for reuse. "align": at multiples of the interval, in
            prompts and in what is generated, and at branch points;
            "branch": only where a prompt parts from a known one; "second-hit": at the last multiple of the interval
            that a former prompt had too; "declared": at the request's breakpoints, which all but "none" also keep.
        checkpoint_interval: tokens between two states that are kept, rounded up to whole pages.
        max_states_per_path: states kept along one prefix (0: no limit); the shallowest inner ones go first, but
            none at a branch point and none of the request's breakpoints.
        replay: "tolerant": recurrent layers may round differently when a sequence is split differently;
            "exact": bitwise the same for any split, at the cost of computing up to 64 tokens again a step.
        serial_weight: what a prompt token of a recurrent model costs of the token budget (at least 1).
        prefill_deadline: steps after which a prompt under way gets every second step for itself, if the decode
            rows leave it less than half of a step's tokens; 0 is never.
        overlap: keep one step in flight ahead of the host.
        warmup: "eager" compiles the whole ladder at start, "lazy" compiles a rung when first used.
        seed: base of the seeds of requests that give none.
        compile_cache: folder of the persistent compilation cache; None is the one that JAX was given, else
            the default; "" switches it off. It holds for the whole process.
        strict_compile: raise if anything compiles after an eager warm-up (tests).
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float = 0.3
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_partial_prefills: int = 4
    long_prefill_threshold: int = 0
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    num_states: int | None = None
    checkpoint_policy: str = "align"
    checkpoint_interval: int = 64
    max_states_per_path: int = 8
    replay: str = "tolerant"
    serial_weight: float = 1.0
    prefill_deadline: int = 128
    overlap: bool = True
    warmup: str = "lazy"
    seed: int = 0
    compile_cache: str | None = None
    strict_compile: bool = False

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("policy", self.policy, POLICIES)
        _choice("warmup", self.warmup, WARMUPS)
        if self.checkpoint_policy == "all":  # a mode of vLLM's
            raise ConfigError(
                "checkpoint_policy='all' is not supported: not every page keeps a state; 'align' with "
                "checkpoint_interval=page_size keeps the most"
            )
        _choice("checkpoint_policy", self.checkpoint_policy, CHECKPOINT_POLICIES)
        _choice("replay", self.replay, REPLAYS)
        for name, low, high in (
            ("checkpoint_interval", 1, 1 << 20),
            ("max_states_per_path", 0, 1 << 20),
            ("prefill_deadline", 0, 1 << 30),
            ("page_size", 1, 1024),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("max_partial_prefills", 1, 1024),
            ("long_prefill_threshold", 0, 1 << 20),
            ("seed", 0, 2**63 - 1),
        ):
            _int_in(name, getattr(self, name), low, high)
        for name in ("max_model_len", "num_pages", "num_states"):
            if getattr(self, name) is not None:
                _int_in(name, getattr(self, name), 2, 2**31 - 1)
        for name in ("enable_prefix_caching", "overlap", "strict_compile"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.compile_cache is not None and not isinstance(self.compile_cache, str):
            raise ConfigError(f'compile_cache={self.compile_cache!r} must be a folder, "" or None')
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size={self.page_size} must be a power of two in [1, 1024]")
        share = self.memory_fraction
        if not _number(share) or not 0.0 < share <= 1.0:
            raise ConfigError(f"memory_fraction={share!r} must be a number in (0, 1]")
        weight = self.serial_weight
        if not _number(weight) or not 1.0 <= weight <= 1024.0:
            raise ConfigError(f"serial_weight={weight!r} must be a number in [1, 1024]")
        if self.replay == "exact" and self.max_num_batched_tokens < EXACT_BLOCK:
            raise ConfigError(
                f"replay='exact' computes {EXACT_BLOCK} tokens at once, but "
                f"max_num_batched_tokens={self.max_num_batched_tokens}; allowed [{EXACT_BLOCK}, {1 << 20}]"
            )
        if self.strict_compile and self.warmup != "eager":
            raise ConfigError("strict_compile=True needs warmup='eager'")

    @property
    def block(self) -> int:
        """Query tokens of one prefill block: a power of two, at most 32 and at most the budget.

        With exact replay it is the canonical chunk of the recurrent layers.
        """
        if self.replay == "exact":
            return EXACT_BLOCK
        return min(32, 1 << (self.max_num_batched_tokens.bit_length() - 1))

    @property
    def checkpoint_grid(self) -> int:
        """Tokens between two states that are kept for reuse: checkpoint_interval in whole pages."""
        return -(-self.checkpoint_interval // self.page_size) * self.page_size

    def reusable_unit(self, states: bool) -> int:
        """The shortest prefix in tokens that another prompt can reuse; 0 if none can.

        Args:
            states: whether the model has recurrent states, which can be resumed at checkpoints only: on the
                grid, or, where the policy knows none, at the page before a branch or a breakpoint.
        """
        if not self.enable_prefix_caching or (states and self.checkpoint_policy == "none"):
            return 0
        on_grid = states and self.checkpoint_policy in ("align", "second-hit")
        return self.checkpoint_grid if on_grid else self.page_size

    @property
    def rows(self) -> int:
        """Sequences that may run at once: a decode row takes one token of the budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def ladder(self) -> list[StepShape]:
        """Every shape that a step may have, smallest first: decode rungs, then mixed rungs."""
        rows = _powers(self.rows)
        blocks = _powers(max(1, self.max_num_batched_tokens // self.block))
        decode = [StepShape(r, 0, self.block) for r in rows]
        # Rows of mixed rungs are coarse: none, or all of them (padding rows cost little beside a block).
        mixed = [StepShape(r, b, self.block) for b in blocks for r in (0, self.rows)]
        return decode + mixed


def _powers(top: int) -> list[int]:
    """1, 2, 4, ... up to and including `top`."""
    out = [1 << i for i in range(top.bit_length()) if 1 << i < top]
    return [*out, top]


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _int_in(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be an integer in [{low}, {high}]")


# Names that vLLM users know -> ours.
ALIASES = {
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "gpu_memory_utilization": "memory_fraction",
    "async_scheduling": "overlap",
    "scheduling_policy": "policy",
    "max_num_partial_prefills": "max_partial_prefills",
    "long_prefill_token_threshold": "long_prefill_threshold",
    "mamba_cache_mode": "checkpoint_policy",
    "mamba_block_size": "checkpoint_interval",
}


# Options of vLLM that say what happens here anyway at one value, and ask for something else at any other:
# (that value, why).
FIXED: dict[str, tuple[object, str]] = {
    "tensor_parallel_size": (1, "a model runs on one device"),
    "pipeline_parallel_size": (1, "a model runs on one device"),
    "trust_remote_code": (False, "a checkpoint's own code is never run"),
    "enforce_eager": (False, "every step is compiled"),
    "enable_chunked_prefill": (True, "prompts are always prefilled in chunks"),
    "swap_space": (0, "preempted requests are computed again, never swapped out"),
    "quantization": (None, "the checkpoint's file says how its weights are stored"),
    "mamba_ssm_cache_dtype": ("float32", "recurrent states are kept in float32"),
    "mamba_cache_dtype": ("auto", "windows of convolutions are kept in the compute dtype"),
    "load_format": ("auto", "the checkpoint's files say their format"),
    "disable_log_stats": (True, "no statistics are logged; Engine.stats() has them"),
}
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def engine_config(**options: object) -> EngineConfig:
    """An EngineConfig from keyword options, vLLM's names included; unknown ones are refused with a hint.

    Raises ConfigError.
    """
    known = {f.name for f in fields(EngineConfig)}
    resolved: dict[str, object] = {}
    typed: dict[str, str] = {}  # our name -> the one that was given
    for name, value in options.items():
        if name in FIXED:
            _check_fixed(name, value)
            continue
        target = ALIASES.get(name, name)
        if target not in known:
            near = difflib.get_close_matches(name, [*known, *ALIASES, *FIXED], n=1)
            hint = (
                f"; did you mean {near[0]}?"
                if near
                else f"; known options: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"unknown engine option {name}={value!r}{hint}")
        if target in resolved:
            first = typed[target]
            raise ConfigError(
                f"{first}={resolved[target]!r} and {name}={value!r} are two names of one engine "
                "option; give one of them"
            )
        resolved[target], typed[target] = value, name
    dtype = resolved.get("dtype")
    if isinstance(dtype, str):
        resolved["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
    return EngineConfig(**resolved)  # type: ignore[arg-type]  # it checks the values itself


def _check_fixed(name: str, value: object) -> None:
    wanted, why = FIXED[name]
    if isinstance(value, bool) != isinstance(wanted, bool) or value != wanted:
        raise ConfigError(f"{name}={value!r} is not supported, only {wanted!r}: {why}")
