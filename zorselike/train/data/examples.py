"""Examples to fine-tune on: lines of `.jsonl` files, each with what is asked and what is to be answered."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zorselike.errors import ConfigError
from zorselike.text.wording import show_value, suggest

JSON_LINES = ".jsonl"
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"

Kind = Literal["messages", "completion", "text"]
_KEYS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Of each kind's lines; the first kind whose keys a line has is its kind."""
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_SHARED = "conversations"
"""The key of ShareGPT's lines, whose turns are `{"from": "human", "value": ...}`."""


class Line(NamedTuple):
    """A line that is not empty."""

    where: str
    """File and line, for messages."""
    value: Any
    num_bytes: int


@dataclass(frozen=True)
class Conversation:
    """Turns that the tokenizer's chat template makes a text of."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    """Functions that the assistant may call, as the template takes them."""


@dataclass(frozen=True)
class Completion:
    """A text, and the text that is to follow it."""

    prompt: str
    completion: str


Example = Conversation | Completion


class Located(NamedTuple):
    example: Example
    where: str
    num_bytes: int


def read_lines(file: Path) -> Iterator[Line]:
    """The JSON values of a file; raises `ConfigError` for a line that is none, or no text."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ConfigError(f"{where}: is UTF-16; save the file as UTF-8")
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{where}: is not UTF-8 (byte {error.start} of it); save the file as UTF-8"
                ) from error
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: is not JSON: {error}") from error
            has_surrogates = b"\\ud" in line.lower()
            value = _replace_surrogates(value) if has_surrogates else value
            yield Line(where, _name_as_messages(value), len(line))


def _name_as_messages(value: Any) -> Any:
    """ShareGPT's lines under the names that chat templates know."""
    if not isinstance(value, dict) or "messages" in value or not isinstance(value.get(_SHARED), list):
        return value
    turns = []
    for turn in value[_SHARED]:
        if isinstance(turn, dict) and "from" in turn and "role" not in turn:
            role = turn["from"]
            named = _OTHER_NAMES.get(role, role) if isinstance(role, str) else role
            turn = {"role": named, "content": turn.get("value")}
        turns.append(turn)
    return {**value, "messages": turns}


def _replace_surrogates(value: Any) -> Any:
    """Tokenizers take no halves of characters, with which texts end that were cut within an emoji."""
    match value:
        case str():
            return value.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
        case list():
            return [_replace_surrogates(one) for one in value]
        case dict():
            return {_replace_surrogates(key): _replace_surrogates(one) for key, one in value.items()}
        case _:
            return value


def find_kind(files: Sequence[Path]) -> Kind:
    """What the lines of all of these text files hold; raises `ConfigError` where files differ."""
    kinds: dict[Kind, str] = {}
    for file in files:
        if file.suffix != JSON_LINES:
            kinds.setdefault("text", str(file))
        elif (line := next(read_lines(file), None)) is not None:
            kinds.setdefault(_kind_of(line), str(file))
    if len(kinds) > 1:
        (one, here), (other, there) = list(kinds.items())[:2]
        raise ConfigError(
            f"{here} holds {_name(one)}, {there} holds {_name(other)}; give folders of one kind, or one file"
        )
    return next(iter(kinds), "text")


def value_of(line: Line, kind: Kind) -> Mapping[str, Any]:
    """The line as an object with the keys of its kind; raises `ConfigError` otherwise."""
    keys = _KEYS[kind]
    if isinstance(line.value, dict) and all(key in line.value for key in keys):
        return line.value
    hint = ""
    if isinstance(line.value, dict) and (others := _kinds_of(line.value)):
        hint = f"; it holds {_name(others[0])}, and all lines of the data must be of one kind"
    noun = "a key" if len(keys) == 1 else "keys"
    raise ConfigError(f"{line.where}: is not a JSON object with {noun} {_name(kind)}{hint}")


def text_of(line: Line, key: str, value: Mapping[str, Any]) -> str:
    """A value that must be text."""
    text = value[key]
    if isinstance(text, str):
        return text
    hint = '; turns of a conversation go under "messages"' if isinstance(text, list) else ""
    raise ConfigError(f'{line.where}: "{key}" is not a string{hint}')


def read_examples(file: Path, kind: Kind) -> Iterator[Located]:
    """The examples of a file, none of them of kind "text".

    Raises:
        ConfigError: A line is of another kind, or damaged; with file, line and mend.
    """
    for line in read_lines(file):
        value = value_of(line, kind)
        example = _conversation(line, value) if kind == "messages" else _completion(line, value)
        yield Located(example, line.where, line.num_bytes)


def _kind_of(line: Line) -> Kind:
    found = _kinds_of(line.value) if isinstance(line.value, dict) else []
    if not found:
        known = ", ".join(_name(kind) for kind in _KEYS)
        raise ConfigError(f"{line.where}: is not a JSON object with the keys of one kind of data: {known}")
    return found[0]


def _kinds_of(value: Mapping[str, Any]) -> list[Kind]:
    return [kind for kind, keys in _KEYS.items() if all(key in value for key in keys)]


def _name(kind: Kind) -> str:
    return " and ".join(f'"{key}"' for key in _KEYS[kind])


def _completion(line: Line, value: Mapping[str, Any]) -> Completion:
    prompt, completion = (text_of(line, key, value) for key in _KEYS["completion"])
    if not completion:
        raise ConfigError(f'{line.where}: "completion" is empty; write the answer, or remove the line')
    return Completion(prompt, completion)


def _conversation(line: Line, value: Mapping[str, Any]) -> Conversation:
    messages, tools = value["messages"], value.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f'{line.where}: "messages" is {show_value(messages)}; write a list of '
            '{"role": ..., "content": ...}'
        )
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f'{line.where}: "tools" is not a list of functions')
    for number, message in enumerate(messages):
        if mend := _find_fault(message):
            raise ConfigError(f"{line.where}: messages[{number}] {mend}")
    return Conversation(messages, tools or None)


def _find_fault(message: Any) -> str:
    if not isinstance(message, dict) or "role" not in message:
        return f'is {show_value(message)}; write {{"role": ..., "content": ...}}'
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        other = _OTHER_NAMES.get(role) if isinstance(role, str) else None
        hint = f"; write '{other}'" if other else suggest(str(role), ROLES)
        return f"has role {show_value(role)}, which is none of {', '.join(ROLES)}{hint}"
    if role == ANSWERS and message.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        return f'has content {show_value(content)}; write text: {{"role": "{role}", "content": "..."}}'
    if role == ANSWERS and not content.strip():
        return "is an empty answer; write the answer, or remove the line"
    return ""
