"""What of a conversation is an answer, by the tokenizer's own chat template."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from conversations import MARKED, TEMPLATE, decode, save_tokenizer, turns

from zorselike import ConfigError
from zorselike.train.data.chat import ChatTokenizer
from zorselike.train.data.examples import Conversation
from zorselike.train.data.tokenizer import ByteTokenizer, load_tokenizer

pytest.importorskip("transformers")
TALK = Conversation(turns("what?", "a fox", "é?", "é!", system="be kind")["messages"], None)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_answers_are_what_the_assistant_says(tmp_path: Path, template: str) -> None:
    folder = save_tokenizer(tmp_path / "tokenizer", template)
    tokens, is_answer = ChatTokenizer(folder).encode(TALK, "here")
    assert decode(folder, tokens) == (
        "<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwhat?<|im_end|>\n"
        "<|im_start|>assistant\na fox<|im_end|>\n<|im_start|>user\né?<|im_end|>\n"
        "<|im_start|>assistant\né!<|im_end|>\n"
    )
    assert decode(folder, tokens[is_answer]) == "a fox<|im_end|>\né!<|im_end|>\n"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_an_assistant_that_speaks_first(tmp_path: Path, template: str) -> None:
    messages = turns("", "hello", "what?", "a fox")["messages"][1:]
    folder = save_tokenizer(tmp_path / "tokenizer", template)
    tokens, is_answer = ChatTokenizer(folder).encode(Conversation(messages, None), "here")
    assert decode(folder, tokens[is_answer]) == "hello<|im_end|>\na fox<|im_end|>\n"


def test_fingerprints_know_the_template(tmp_path: Path) -> None:
    prints = [ChatTokenizer(save_tokenizer(tmp_path, t)).fingerprint for t in (TEMPLATE, TEMPLATE, MARKED)]
    assert prints[0] == prints[1] != prints[2]


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    """As some end the last turn in another way."""
    rewriting = TEMPLATE.replace(
        "<|im_end|>\n", "{{ '</s>' if loop.last and m['role'] == 'assistant' else '<|im_end|>\n' }}"
    )
    tokenizer = ChatTokenizer(save_tokenizer(tmp_path, rewriting))
    with pytest.raises(ConfigError, match=r"line 3: .* after messages\[2\] otherwise .*{% generation %}"):
        tokenizer.encode(TALK, "line 3")
    short = Conversation(TALK.messages[:3], None)
    assert decode(tmp_path, np.compress(*tokenizer.encode(short, "")[::-1])) == "a fox</s>"


def test_a_template_that_thinks_in_the_last_turn_only(tmp_path: Path) -> None:
    """As Qwen 3's."""
    thinking = TEMPLATE.replace(
        "{{ m['content'] }}",
        "{{ '<think></think>' if loop.last and m['role'] == 'assistant' }}{{ m['content'] | trim }}",
    )
    tokenizer = ChatTokenizer(save_tokenizer(tmp_path, thinking))
    messages = turns("what?", "a fox \n", "é?", "é! ", "so")["messages"]
    for stop, expected in (
        (4, "a fox<|im_end|>\n<think></think>é!<|im_end|>\n"),
        (5, "a fox<|im_end|>\né!<|im_end|>\n"),
    ):
        tokens, is_answer = tokenizer.encode(Conversation(messages[:stop], None), "")
        assert decode(tmp_path, tokens[is_answer]) == expected


def test_a_template_that_refuses(tmp_path: Path) -> None:
    strict = "{{ raise_exception('no system, please') if messages[0].role == 'system' }}" + TEMPLATE
    with pytest.raises(ConfigError, match=r"line 3: the chat template of .* refuses .* no system, please"):
        ChatTokenizer(save_tokenizer(tmp_path, strict)).encode(TALK, "line 3")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template: put a file chat_template\.jinja there"):
        ChatTokenizer(save_tokenizer(tmp_path / "plain", None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"finds no tokenizer in .*empty"):
        ChatTokenizer(tmp_path / "empty")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'zorselike\[hf\]'"):
        ChatTokenizer(tmp_path / "plain")


def test_a_completion_ends(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    tokens, is_answer = load_tokenizer(str(folder)).encode_answer("two é", "é three")
    assert decode(folder, tokens) == "two éé three</s>"
    assert decode(folder, tokens[is_answer]) == "é three</s>"
    tokens, is_answer = ByteTokenizer().encode_answer("é", "éa")
    assert bytes(tokens.tolist()) == "ééa\0".encode()
    assert bytes(tokens[is_answer].tolist()) == "éa\0".encode()
