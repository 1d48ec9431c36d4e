"""The event stream parser: wherever the bytes are cut, the same events come out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.sse import MAX_EVENT, SSEParser

STREAM = (
    "\ufeff: a comment\n\n"
    'data: {"text": "é€😀"}\n\n'
    "event: note\r\nid: 7\r\ndata: one\r\ndata: two\r\n\r\n"
    "retry: 10\n\n"
    "data:no space\n\n"
    "data:  two spaces\n: inside\n\n"
    "data\n\n"
    "data: mac\r\r"
    "data: [DONE]\n\n"
).encode()
EVENTS = ['{"text": "é€😀"}', "one\ntwo", "no space", " two spaces", "", "mac", "[DONE]"]


def parse(chunks: list[bytes]) -> tuple[list[str], bool]:
    parser = SSEParser()
    return [data for part in chunks for data in parser.feed(part)], parser.pending


def test_cut_at_every_place() -> None:
    assert parse([STREAM]) == (EVENTS, False)
    assert parse([STREAM[i : i + 1] for i in range(len(STREAM))]) == (EVENTS, False)
    for i in range(len(STREAM)):
        assert parse([STREAM[:i], STREAM[i:]]) == (EVENTS, False)
        assert parse([STREAM[:i], b"", STREAM[i : i + 1], STREAM[i + 1 :]]) == (EVENTS, False)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_any_text_survives_any_cuts(texts: list[str], end: str, data: st.DataObject) -> None:
    raw = "".join(f"data: {text}{end}{end}" for text in texts).encode()
    places = data.draw(st.lists(st.integers(0, len(raw)), max_size=6))
    cuts = [0, *sorted(places), len(raw)]
    assert parse([raw[a:b] for a, b in itertools.pairwise(cuts)]) == (texts, False)


def test_an_event_is_only_complete_with_its_blank_line() -> None:
    for cut in range(1, len(b"data: x\n\n")):
        found, pending = parse([b"data: x\n\n"[:cut]])
        assert (found, pending) == ([], True), cut
    assert parse([b": comment\n"]) == ([], False)


def test_what_is_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        SSEParser().feed(b"data: \xff\xfe\n\n")
    with pytest.raises(ValueError, match="bytes"):
        SSEParser().feed(b"data: " + b"x" * MAX_EVENT)
    parser = SSEParser()
    with pytest.raises(ValueError, match="bytes"):
        for _ in range(20):
            parser.feed(b"data: " + b"x" * (MAX_EVENT // 16) + b"\n")
