"""Stop strings in text (R-STP-01, R-STP-02) against a brute-force search."""

from __future__ import annotations

import gc

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.text.stops import _IN_USE, StopChecker


def feed(
    stops: list[str], deltas: list[str], include: bool = False
) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include)
    out = []
    for delta in deltas:
        text, stop = checker.push(delta)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, checker.flush()], None


def splits(text: str) -> list[list[str]]:
    """All ways to cut `text` into deltas."""
    if len(text) < 2:
        return [[text]]
    rest = splits(text[1:])
    return [[text[0], *r] for r in rest] + [[text[0] + r[0], *r[1:]] for r in rest]


def test_no_part_of_the_stop_string_leaks_whatever_the_split():
    for cut in splits("DEFGHIJ"):
        out, stop = feed(["DEFGHIJ"], ["A", "B", "C", *cut])
        assert stop == "DEFGHIJ" and "".join(out) == "ABC" and not any("D" in d for d in out)


def test_all_text_comes_out_without_a_match_and_little_is_held():
    checker, given_text, out = StopChecker(["DEFX"]), "", ""
    for delta in ["A", "B", "C", "DEF", "G", "HI", "DE", "J", "DEF"]:
        given_text += delta
        out += checker.push(delta)[0]
        assert given_text.startswith(out) and len(given_text) - len(out) <= 3
    assert out + checker.flush() == given_text == "ABCDEFGHIDEJDEF"


def test_held_tail_is_flushed():
    assert feed(["b,c"], ["a", ",b"]) == (["a", ",", "b"], None)


def test_include_the_stop_string():
    assert feed(["b,"], ["a", "b,c"], include=True) == (["a", "b,"], "b,")
    assert feed(["b,"], ["a", "b,c"]) == (["a", ""], "b,")


def test_the_stop_that_ends_first_wins_and_the_longest_of_those():
    for cut in splits("xabcd"):
        out, stop = feed(["abcd", "bc"], cut)
        assert ("".join(out), stop) == ("xa", "bc")
        out, stop = feed(["bc", "abc"], cut)
        assert ("".join(out), stop) == ("x", "abc")


def test_hidden_text_completes_a_stop_but_is_no_text():
    checker = StopChecker(["foo<end>"])
    assert checker.push("a foo") == ("a ", None)
    assert checker.push_hidden("<other>") == ("", None)
    assert checker.push_hidden("<end>") == ("", "foo<end>")
    checker = StopChecker(["end"])
    assert checker.push_hidden("<end>") == ("", None) == checker.push_hidden("end>")


def brute(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_against_brute_force(stops: list[str], deltas: list[str]):
    out, stop = feed(stops, deltas)
    assert ("".join(out), stop) == brute(stops, "".join(deltas))
    held = max(map(len, stops)) - 1
    for i in range(len(out) - 1):
        assert len("".join(deltas[: i + 1])) - len("".join(out[: i + 1])) <= held


def test_outputs_of_one_request_share_an_automaton_that_dies_with_them():
    checkers = [StopChecker(["unshared stop"]) for _ in range(3)]
    assert len({id(c._automaton) for c in checkers}) == 1
    assert ("unshared stop",) in _IN_USE
    checkers.clear()
    gc.collect()
    assert ("unshared stop",) not in _IN_USE


def test_cost_does_not_grow_with_the_stop_strings():
    many = [("ab" * 511)[:1000] + str(i) for i in range(64)]
    checker = StopChecker(many)
    assert checker._automaton is not None
    looked_up = 0

    class Counted(list):
        def __getitem__(self, state):
            nonlocal looked_up
            looked_up += 1
            return super().__getitem__(state)

    checker._automaton.next = Counted(checker._automaton.next)
    for _ in range(1000):
        checker.push("abab")
    # A character leads to one state more; falling back undoes such steps, so it is paid for by them.
    assert 4000 <= looked_up <= 3 * 4000
