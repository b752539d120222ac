"""Lines to fine-tune on: each kind is known by its keys, and what is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conversations import turns, write_lines

from zorselike import ConfigError
from zorselike.train.data.examples import Completion, Conversation, find_kind, read_examples

GOOD = turns("hello", "hi")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (GOOD, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"text": "a"}, "text"),
        ({"prompt": "a", "text": "b", **GOOD}, "messages"),
        ({"prompt": "a", "text": "b"}, "text"),
    ],
)
def test_the_first_line_tells_the_kind(tmp_path: Path, value: Any, kind: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"\n{json.dumps(value)}\nnot read yet\n")
    assert find_kind([path]) == kind


def test_examples_are_read_in_order(tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "x.jsonl", [GOOD, {**turns("a", "b"), "tools": [{"name": "f"}], "id": 3}])
    found = list(read_examples(chats, "messages"))
    assert [located.example for located in found] == [
        Conversation(GOOD["messages"], None),
        Conversation(turns("a", "b")["messages"], [{"name": "f"}]),
    ]
    assert sum(located.num_bytes for located in found) == chats.stat().st_size
    pairs = write_lines(tmp_path / "y.jsonl", [{"prompt": "", "completion": "b"}])
    assert [located.example for located in read_examples(pairs, "completion")] == [Completion("", "b")]


def test_turns_of_sharegpt_have_the_names_of_messages(tmp_path: Path) -> None:
    said = [("system", "be brief"), ("human", "hello"), ("gpt", "hi"), ("human", "bye"), ("gpt", "bye")]
    line = {"id": "1", "conversations": [{"from": who, "value": what} for who, what in said]}
    under_roles = {"conversations": GOOD["messages"]}
    path = write_lines(tmp_path / "x.jsonl", [line, under_roles])
    first, second = (located.example for located in read_examples(path, "messages"))
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert [message["role"] for message in first.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert [message["content"] for message in first.messages] == [what for _, what in said]
    assert second.messages == GOOD["messages"]
    wrong = write_lines(tmp_path / "y.jsonl", [{"conversations": [{"from": "function_call", "value": "x"}]}])
    with pytest.raises(
        ConfigError, match=r"line 1: messages\[0\] has role 'function_call', which is none of"
    ):
        list(read_examples(wrong, "messages"))


def test_halves_of_characters_are_replaced(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "\ud83d", "completion": "é😀 \\ud83d\ude00"}])
    (found,) = read_examples(path, "completion")
    assert found.example == Completion("\ufffd", "é😀 \\ud83d\ufffd")


def test_files_in_other_encodings(tmp_path: Path) -> None:
    path, line = tmp_path / "x.jsonl", '{"prompt": "für", "completion": "é"}\n'
    path.write_bytes(line.encode("utf-8-sig"))
    assert [found.example for found in read_examples(path, "completion")] == [Completion("für", "é")]
    for encoding, said in (("latin-1", "line 2: is not UTF-8 .byte 13"), ("utf-16", "line 1: is UTF-16")):
        path.write_bytes((b"\n" if encoding == "latin-1" else b"") + line.encode(encoding))
        with pytest.raises(ConfigError, match=said):
            list(read_examples(path, "completion"))


@pytest.mark.parametrize("line", ['{"prompt": "x"', "[" * 10**5], ids=["cut", "deep"])
def test_lines_that_are_no_json_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "x", "completion": "y"}\n' + line)
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 2: is not JSON: "):
        list(read_examples(path, "completion"))


def test_files_of_two_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    write_lines(tmp_path / "empty.jsonl", [])
    write_lines(tmp_path / "x.jsonl", [GOOD])
    files = sorted(tmp_path.iterdir())
    assert find_kind(files[1:]) == "messages"
    with pytest.raises(ConfigError, match=r'a\.txt holds "text", .*x\.jsonl holds "messages"'):
        find_kind(files)


def say(role: Any, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}, {"role": role, "content": content, **more}]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"text": "x"}, 'is not a JSON object with a key "messages"; it holds "text", and all lines'),
        ([1], 'is not a JSON object with a key "messages"'),
        ({"messages": []}, '"messages" is []; write a list of {"role": ..., "content": ...}'),
        ({"messages": [{"from": "human", "value": "x"}]}, 'write {"role": ..., "content": ...}'),
        ({"messages": ["x"]}, "messages[0] is 'x'; write"),
        (say("gpt"), "messages[1] has role 'gpt', which is none of system, developer, user, assistant, tool"),
        (say("gpt"), "write 'assistant'"),
        (say("asistant"), "did you mean 'assistant'?"),
        (say(["a"]), "has role ['a']"),
        (say("assistant", " \n"), "messages[1] is an empty answer; write the answer, or remove the line"),
        (say("user", [{"type": "text"}]), "messages[1] has content [{'type': 'text'}]; write text"),
        ({**GOOD, "tools": "f"}, '"tools" is not a list of functions'),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path: Path, value: Any, expected: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [GOOD, value])
    with pytest.raises(ConfigError) as caught:
        list(read_examples(path, "messages"))
    assert f"{path}, line 2: " in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "x"}, 'is not a JSON object with keys "prompt" and "completion"'),
        ({"prompt": "x", "completion": ""}, '"completion" is empty; write the answer, or remove the line'),
        ({"prompt": [], "completion": "x"}, '"prompt" is not a string; turns of a conversation go under'),
        ({"prompt": "x", "completion": 3}, '"completion" is not a string'),
    ],
)
def test_a_wrong_completion_is_named(tmp_path: Path, value: Any, expected: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [value])
    with pytest.raises(ConfigError) as caught:
        list(read_examples(path, "completion"))
    assert f"{path}, line 1: " in str(caught.value) and expected in str(caught.value)


def test_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [say("assistant", None, tool_calls=[{"name": "f"}])])
    assert len(list(read_examples(path, "messages"))) == 1
