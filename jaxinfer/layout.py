"""The int32 record that describes one row of a step, shared by the scheduler and the device.

A row is one sequence's part of a step. Its record is RowField columns (floats and the two halves
of the seed are bit-cast to int32), then for each cache kind one `base` column followed by `pages`
columns of page ids (STATE kinds: the slot to read, then the slot to write). The scheduler keeps one
record a slot and copies them into a plan; the jitted step slices the same columns. Imports no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag


class RowField(IntEnum):
    """Columns of a row record. FLOAT_FIELDS hold float32 bits."""

    SLOT = 0  # slot of the sequence; 0 is the padding slot
    START = 1  # position of the first token that this step feeds for the row
    LENGTH = 2  # tokens that this step feeds for the row (1 for decode rows, 0 for padding)
    FLAGS = 3  # RowFlag bits
    SEED_LOW = 4
    SEED_HIGH = 5
    OUT_POS = 6  # index of the output token that this step would sample (0 = first)
    TOP_K = 7  # 0 = off
    TEMPERATURE = 8  # 0 = greedy
    TOP_P = 9
    MIN_P = 10
    REPETITION = 11
    PRESENCE = 12
    FREQUENCY = 13
    ROPE_LENGTH = 14  # prompt length, which fixes length-dependent rope (dynamic, longrope)
    BLOCKS = 15  # prefill rows: number of query blocks of the row (0 for decode rows)


FLOAT_FIELDS = (
    RowField.TEMPERATURE,
    RowField.TOP_P,
    RowField.MIN_P,
    RowField.REPETITION,
    RowField.PRESENCE,
    RowField.FREQUENCY,
)


class RowFlag(IntFlag):
    """Bits of RowField.FLAGS."""

    SAMPLE = 1  # the row's last token yields an output token
    RANDOM = 2  # temperature > 0
    COUNTS = 4  # penalties or min_tokens: read the slot's token counts
    BIAS = 8  # logit_bias or allowed_token_ids: read the slot's bias row
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32  # also score the fed tokens of this step
    MIN_TOKENS = 64  # fewer than min_tokens so far: banned ids are masked
    FILTER = 128  # RANDOM with top_k, top_p or min_p switched on


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where everything stands in a record: `tables[i]` ids for the i-th cache kind.

    For paged kind i the columns are [base_column(i)] = index of the first page in the table (always 0 for
    TOKEN kinds; grows for WINDOW kinds), then `tables[i]` page ids; 0 stands for "no page". For a STATE
    kind (its number stands in `states`) they are the slot that the row reads, and one slot that it writes.
    """

    tables: tuple[int, ...]
    states: tuple[int, ...] = ()

    def base_column(self, kind: int) -> int:
        return len(RowField) + sum(n + 1 for n in self.tables[:kind])

    def table_slice(self, kind: int) -> slice:
        first = self.base_column(kind) + 1
        return slice(first, first + self.tables[kind])

    @property
    def width(self) -> int:
        return len(RowField) + sum(n + 1 for n in self.tables)


class LoadOp(IntEnum):
    """What one entry (slot, token, value) of a LoadPlan does to the slot's sampling state."""

    NONE = 0
    PROMPT = 1  # token stands in the prompt (for repetition_penalty)
    OUTPUT = 2  # token was generated once more
    BAN = 3  # token is masked while MIN_TOKENS is set
    BIAS = 4  # bias[slot, token] = value


@dataclass(frozen=True, slots=True)
class StepShape:
    """A rung of the shape ladder: one compiled executable.

    Tokens of a step = `rows` decode tokens, then `blocks` x `block` prefill tokens (each block belongs
    to one prefill row). Sampled rows = `rows` decode rows, then `blocks` prefill rows.
    """

    rows: int
    blocks: int
    block: int

    @property
    def tokens(self) -> int:
        return self.rows + self.blocks * self.block

    @property
    def sample_rows(self) -> int:
        return self.rows + self.blocks
