"""RowStore: the int32 records of all row slots, kept up to date so that a decode round is one copy.

Slots here are those of running sequences, never those of recurrent states, of which a record only holds
the numbers. A record says what the slot's next step feeds (layout.py). While a sequence decodes its record is
the only place that knows its next position and output index: they advance for all rows at once.
Never decides anything. Called by the scheduler.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.cache import Held, PrefixTree
from jaxinfer.layout import RecordLayout, RowField, RowFlag
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.types import SamplingParams

INT32_MAX = 2**31 - 1


def needs_counts(params: SamplingParams, banned: tuple[int, ...]) -> bool:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0) or bool(params.min_tokens and banned)


def needs_bias(params: SamplingParams) -> bool:
    return bool(params.logit_bias) or params.allowed_token_ids is not None


class RowStore:
    """records: i32[slots + 1, layout.width]; left: i32[slots + 1] outputs that may still be planned."""

    def __init__(self, slots: int, layout: RecordLayout) -> None:
        self.layout = layout
        self.records = np.zeros((slots + 1, layout.width), np.int32)
        self.left = np.zeros(slots + 1, np.int32)
        self._min_tokens = np.zeros(slots + 1, np.int32)
        self._free = list(range(slots, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def open(self, sequence: Sequence) -> None:
        """Give the sequence a slot and write everything in its record that never changes."""
        slot = sequence.slot = self._free.pop()
        request, params = sequence.request, sequence.request.params
        counts = needs_counts(params, request.banned_ids)
        random = not params.greedy
        filtered = random and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        flags = RowFlag.RANDOM * random | RowFlag.FILTER * filtered | RowFlag.COUNTS * counts
        flags |= RowFlag.BIAS * needs_bias(params)
        flags |= RowFlag.LOGPROBS * (params.logprobs is not None)
        row = self.records[slot]
        row[:] = 0
        row[RowField.SLOT] = slot
        row[RowField.FLAGS] = int(flags)
        seed = np.array([request.seed], np.uint64).view(np.int32)  # little-endian: low half first
        row[RowField.SEED_LOW], row[RowField.SEED_HIGH] = seed
        row[RowField.TOP_K] = min(params.top_k, INT32_MAX)
        row[RowField.ROPE_LENGTH] = request.rope_length
        floats = row.view(np.float32)
        floats[RowField.TEMPERATURE] = params.temperature if random else 0.0
        floats[RowField.TOP_P] = params.top_p
        floats[RowField.MIN_P] = params.min_p
        floats[RowField.REPETITION] = params.repetition_penalty
        floats[RowField.PRESENCE] = params.presence_penalty
        floats[RowField.FREQUENCY] = params.frequency_penalty
        self.left[slot] = sequence.limit - sequence.output_length
        self._min_tokens[slot] = params.min_tokens if request.banned_ids else 0

    def close(self, sequence: Sequence) -> None:
        self._free.append(sequence.slot)
        sequence.slot = 0

    def start_decoding(self, sequence: Sequence, tree: PrefixTree) -> None:
        """The token that the chunk just planned samples is the next one to feed."""
        row = self.records[sequence.slot]
        self.write_table(row, tree, sequence.held, len(sequence.tokens))
        row[RowField.START] = len(sequence.tokens)
        row[RowField.LENGTH] = 1
        row[RowField.OUT_POS] = sequence.output_length + 1
        row[RowField.FLAGS] |= RowFlag.SAMPLE

    def add_page(self, sequence: Sequence, tree: PrefixTree) -> None:
        """Enter what a decoding sequence at the start of a page holds now: the new page, its slots."""
        record, held = self.records[sequence.slot], sequence.held
        for kind, pages in enumerate(held.pages):
            if tree.windows[kind] or kind in tree.state_kinds:
                self._write_kind(record, kind, tree, held, int(record[RowField.START]))
            else:
                record[self.layout.base_column(kind) + len(pages)] = pages[-1]

    def write_table(self, record: np.ndarray, tree: PrefixTree, held: Held, start: int) -> None:
        """The pages that tokens from `start` on read and write, into one record."""
        for kind in range(len(held.pages)):
            self._write_kind(record, kind, tree, held, start)

    def _write_kind(
        self, record: np.ndarray, kind: int, tree: PrefixTree, held: Held, start: int
    ) -> None:
        if kind in tree.state_kinds:
            column = self.layout.base_column(kind)
            record[column : column + 2] = held.source[kind], held.pages[kind][0]
            return
        first = max(held.base[kind], tree.first_page(kind, start))
        live = held.pages[kind][first - held.base[kind] :]
        column = self.layout.base_column(kind)
        record[column] = first
        record[column + 1 : column + 1 + len(live)] = live
        record[column + 1 + len(live) : column + 1 + self.layout.tables[kind]] = 0

    def used_columns(self, longest: list[int]) -> list[slice]:
        """Column ranges that matter when kind k lists at most longest[k] pages."""
        out, first = [], 0
        for kind, pages in enumerate(longest):
            column = self.layout.base_column(kind)
            out.append(slice(first, column + 1 + pages))
            first = column + 1 + self.layout.tables[kind]
        return out

    def take_decode(self, slots: np.ndarray, longest: list[int]) -> np.ndarray:
        """Records of one decode round; afterwards the store describes the next round."""
        out = np.zeros((len(slots), self.layout.width), np.int32)
        for columns in self.used_columns(longest):
            out[:, columns] = self.records[slots, columns]
        early = out[:, RowField.OUT_POS] < self._min_tokens[slots]
        out[:, RowField.FLAGS] |= early * np.int32(RowFlag.MIN_TOKENS)
        for kind in self.layout.states:  # what a step writes is what the next one reads
            column = self.layout.base_column(kind)
            self.records[slots, column] = self.records[slots, column + 1]
        self.records[slots, RowField.START] += 1
        self.records[slots, RowField.OUT_POS] += 1
        self.left[slots] -= 1
        return out

    def take_prefill(
        self, sequence: Sequence, tree: PrefixTree, length: int, blocks: int
    ) -> np.ndarray:
        """Record of the chunk [scheduled, scheduled + length) of a prompt."""
        start, params = sequence.scheduled, sequence.request.params
        out = self.records[sequence.slot].copy()
        done = sequence.output_length
        out[RowField.START] = start
        out[RowField.LENGTH] = length
        out[RowField.BLOCKS] = blocks
        out[RowField.OUT_POS] = done
        if start + length == len(sequence.tokens) and sequence.limit > 0:
            out[RowField.FLAGS] |= RowFlag.SAMPLE
            if done < self._min_tokens[sequence.slot]:
                out[RowField.FLAGS] |= RowFlag.MIN_TOKENS
        if params.prompt_logprobs is not None and start < sequence.prompt_length:
            out[RowField.FLAGS] |= RowFlag.PROMPT_LOGPROBS
        self.write_table(out, tree, sequence.held, start)
        return out
