"""Finds stop strings in a stream of text and holds back only what may still become one.

One automaton (Aho-Corasick) follows all stop strings at once, a character at a time, so the cost
does not grow with their number and the result does not depend on how the text was cut into deltas.
Never sees token ids. Used by text.output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary


class StopAutomaton:
    """States of all prefixes of the stop strings; immutable once built, shared by n outputs."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.match: list[tuple[str, ...]] = [()]  # stop strings that end here, longest first
        for stop in dict.fromkeys(stops):
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(())
            state = self.next[state][char]
        self.match[state] = (stop,)

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.match[state] += self.match[self.fail[state]]
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The longest prefix of a stop string that ends with `char`."""
        while char not in self.next[state]:
            if not state:
                return 0
            state = self.fail[state]
        return self.next[state][char]


_IN_USE: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of `stops`, shared as long as an output uses it: it can take megabytes."""
    machine = _IN_USE.get(stops)
    if machine is None:
        machine = _IN_USE[stops] = StopAutomaton(stops)
    return machine


class StopChecker:
    """The text of one output up to the stop string that ends first (of those, the longest).

    Args:
        stops: the stop strings; may be empty.
        include_stop: keep the stop string at the end of the text.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._automaton = automaton(tuple(stops)) if stops else None
        self._include = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certain, the stop string that was hit or None)."""
        machine = self._automaton
        if machine is None or not text:
            return text, None
        state, step, match = self._state, machine.step, machine.match
        for i, char in enumerate(text):
            state = step(state, char)
            if match[state]:
                return self._stop(self._held + text[: i + 1], match[state][0])
        self._state = state
        return self._release(self._held + text, machine.depth[state])

    def push_hidden(self, text: str) -> tuple[str, str | None]:
        """A token that yields no text: hit if its text ends a stop string and lies within it."""
        machine = self._automaton
        if machine is None or not text:
            return "", None
        state = self._state
        for char in text:
            state = machine.step(state, char)
        stop = next((s for s in machine.match[state] if len(s) >= len(text)), None)
        return ("", None) if stop is None else self._stop(self._held + text, stop)

    def flush(self) -> str:
        """The held text: what follows cannot complete it any more."""
        text, self._held, self._state = self._held, "", 0
        return text

    def _stop(self, text: str, stop: str) -> tuple[str, str]:
        self._held, self._state = "", 0
        return (text if self._include else text[: len(text) - len(stop)]), stop

    def _release(self, text: str, hold: int) -> tuple[str, None]:
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut], None
