"""What is sent: synthetic prompts, files of prompts and chats, traces; the same seed, the same data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidRequest
from serving.bench.dataset import Conversation, conversations, first_prompt, next_prompt
from serving.bench.settings import DataSettings


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n", "utf-8")
    return path


def contents(load: list[Conversation]) -> list[list[Any]]:
    return [[turn.content for turn in c.turns] for c in load]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 40), st.floats(0, 1), st.integers(0, 20), st.integers(1, 3),
    st.integers(0, 99),
)  # fmt: skip
def test_synthetic_ids(
    input_len: int, output_len: int, ratio: float, prefix: int, turns: int, seed: int
) -> None:
    data = DataSettings(
        num_prompts=8, input_len=input_len, output_len=output_len, range_ratio=ratio,
        prefix_len=prefix, turns=turns, seed=seed,
    )  # fmt: skip
    load = conversations(data, 100)
    assert load == conversations(data, 100)
    assert len(load) == 8 and all(len(c.turns) == turns for c in load)
    shared = load[0].turns[0].content[:prefix]
    for c in load:
        assert c.at is None and c.turns[0].content[:prefix] == shared
        for number, turn in enumerate(c.turns):
            length = len(turn.content) - (0 if number else prefix)
            assert max(1, input_len * (1 - ratio) - 1e-6) <= length <= input_len * (1 + ratio)
            assert max(1, output_len * (1 - ratio) - 1e-6) <= turn.output_len
            assert turn.output_len <= output_len * (1 + ratio)
            assert isinstance(turn.content, list) and set(turn.content) <= set(range(100))


def test_lengths_vary_over_the_whole_range_and_prompts_differ() -> None:
    data = DataSettings(num_prompts=400, input_len=10, output_len=4, range_ratio=0.5)
    load = conversations(data, 1000)
    assert {len(c.turns[0].content) for c in load} == set(range(5, 16))
    assert {c.turns[0].output_len for c in load} == set(range(2, 7))
    assert len({tuple(c.turns[0].content) for c in load}) == 400
    other = conversations(DataSettings(num_prompts=400, input_len=10, seed=1), 1000)
    assert contents(other) != contents(load)


def test_synthetic_text_has_a_word_a_token() -> None:
    data = DataSettings(num_prompts=3, input_len=7, prefix_len=5, turns=2)
    for first, second in contents(conversations(data, None)):
        assert first.startswith(" ") and (len(first.split()), len(second.split())) == (12, 7)
    assert len(conversations(DataSettings(), None)) == 100


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, "a", {"prompt": "b", "output_len": 3}, {"prompt": [1, 2]}, [4])
    load = conversations(DataSettings(dataset=path, output_len=9), None)
    assert contents(load) == [["a"], ["b"], [[1, 2]], [[4]]]
    assert [c.turns[0].output_len for c in load] == [9, 3, 9, 9]
    assert contents(conversations(DataSettings(dataset=path, num_prompts=2), None)) == [
        ["a"],
        ["b"],
    ]


def test_a_file_of_chats(tmp_path: Path) -> None:
    def say(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    messages = [say("system", "s"), say("user", "1"), say("assistant", "x"), say("user", "2")]
    path = write(tmp_path, {"messages": messages, "max_tokens": 5})
    (whole,) = conversations(DataSettings(dataset=path), None)
    assert whole.turns[0].content == messages and whole.turns[0].output_len == 5
    (turns,) = conversations(DataSettings(dataset=path, turns=5), None)
    assert [t.content for t in turns.turns] == [messages[:2], [messages[3]]]
    prompt = first_prompt(turns.turns[0].content, "openai-chat")
    prompt = next_prompt(prompt, "real", [], turns.turns[1].content, "openai-chat")
    assert prompt == [*messages[:2], say("assistant", "real"), messages[3]]


def test_a_trace_keeps_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"timestamp": 500, "input_length": 25, "output_length": 4, "hash_ids": [0, 1, 2]},
        {"timestamp": 1250, "input_length": 30, "output_length": 5, "hash_ids": [0, 1, 3]},
        {"timestamp": 1250, "input_length": 7, "output_length": 6},
        {"timestamp": 1300, "input_length": 18, "output_length": 6, "hash_ids": [0]},
    )
    data = DataSettings(dataset=path, trace_block_size=10)
    load = conversations(data, 10_000)
    assert [c.at for c in load] == [0.5, 1.25, 1.25, 1.3]
    first, second, third, fourth = (c.turns[0].content for c in load)
    assert [len(x) for x in (first, second, third, fourth)] == [25, 30, 7, 18]
    assert [c.turns[0].output_len for c in load] == [4, 5, 6, 6]
    assert first[:20] == second[:20] and first[20:] != second[20:25]
    assert fourth[:10] == first[:10] and fourth[10:] != first[10:18]
    ((text,), *_) = contents(conversations(data, None))
    assert len(text.split()) == 25


@pytest.mark.parametrize(
    ("lines", "options", "fragments"),
    [
        ([], {}, ["no lines"]),
        (["a"], {"num_prompts": 2}, ["num_prompts=2", "1 lines"]),
        (["a"], {"turns": 2}, ["line 1", "turns=2"]),
        ([{"prompt": ""}], {}, ["line 1"]),
        (["a", {"prompt": [1, -2]}], {}, ["line 3"]),
        ([{"prompt": [True]}], {}, ["line 1"]),
        ([{"question": "x"}], {}, ["line 1", "prompt"]),
        ([7], {}, ["line 1"]),
        ([{"prompt": "a", "output_len": 0}], {}, ["output_len=0"]),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], {}, ["user's"]),
        ([{"messages": "hi"}], {}, ["line 1"]),
        ([{"input_length": 3, "output_length": 1}], {}, ["timestamp"]),
        ([{"timestamp": -1, "input_length": 3, "output_length": 1}], {}, ["timestamp=-1"]),
        ([{"timestamp": 1, "input_length": 2.5, "output_length": 1}], {}, ["input_length=2.5"]),
        ([{"timestamp": 1, "input_length": 2, "output_length": 1}], {"turns": 2}, ["turns=2"]),
        (["a", {"timestamp": 1, "input_length": 2}], {}, ["timestamp"]),
    ],
)
def test_lines_that_cannot_be_used(
    tmp_path: Path, lines: list[Any], options: dict[str, Any], fragments: list[str]
) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(InvalidRequest) as caught:
        conversations(DataSettings(dataset=path, **options), 50)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        conversations(DataSettings(dataset=path), None)
    path.write_text('"a"\n{')
    with pytest.raises(InvalidRequest, match="line 2 is not JSON"):
        conversations(DataSettings(dataset=path), None)
    path.write_bytes(b'"\xff"')
    with pytest.raises(InvalidRequest, match="cannot be read"):
        conversations(DataSettings(dataset=path), None)


def test_prompts_as_backends_take_them() -> None:
    chat = [{"role": "user", "content": "a"}]
    assert first_prompt("a", "openai-chat") == chat == first_prompt(chat, "openai-chat")
    assert first_prompt([1], "openai") == [1] == first_prompt([1], "grpc")
    assert next_prompt([1], "x", [2, 3], [4], "grpc") == [1, 2, 3, 4]
    assert next_prompt(" a", " b", [7], " c", "openai") == " a b c"
    with pytest.raises(InvalidRequest, match="chat endpoint"):
        first_prompt([1], "openai-chat")
    for backend in ("openai", "grpc"):
        with pytest.raises(InvalidRequest, match="openai-chat"):
            first_prompt(chat, backend)
