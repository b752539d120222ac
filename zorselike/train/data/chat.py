"""Conversations as tokens, by the chat template of a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from zorselike.errors import ConfigError
from zorselike.text.wording import first_line
from zorselike.train.data.examples import ANSWERS, Conversation
from zorselike.train.data.tokenizer import Encoded

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUIET = {"verbose": False}
"""Without a warning of what is longer than the model can take: rows are shorter."""
_MEND = (
    "mark what the assistant says with {% generation %} and {% endgeneration %} in the template, which may "
    "be a file chat_template.jinja in that folder"
)


class ChatTokenizer:
    """The tokenizer of a folder, with its chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` where `transformers`, the tokenizer or its template is missing."""
        try:
            transformers: Any = import_module("transformers")
            self._template_error: type[Exception] = import_module("jinja2").TemplateError
        except ImportError as error:
            raise ConfigError(
                f'data with "messages" needs transformers, which cannot be imported ({first_line(error)}): '
                "pip install 'zorselike[hf]'"
            ) from error
        try:
            self._library = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # Of many kinds, bare ones among them.
            raise ConfigError(
                f"transformers finds no tokenizer in {folder} ({first_line(error)}): [model] hf_assets_path "
                "must be a folder with tokenizer.json and tokenizer_config.json"
            ) from error
        if not self._library.is_fast:
            raise ConfigError(
                f"the tokenizer of {folder} does not tell which characters its tokens are of; save it with a "
                "tokenizer.json"
            )
        self._folder = folder
        try:
            template = self._library.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer of {folder} has no chat template: put a file chat_template.jinja there (the "
                "model's chat or instruct version has one), or write the data as lines with "
                '"prompt" and "completion"'
            ) from error
        self.vocab_size: int = max(self._library.get_vocab().values(), default=-1) + 1
        content = f"{self._library.backend_tokenizer.to_str()} {template} {self._library.special_tokens_map}"
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:12]

    def encode(self, conversation: Conversation, where: str) -> Encoded:
        """The tokens of a conversation; what the assistant says is answers, the end of its turns included.

        Raises `ConfigError`, naming `where`, for a conversation that the template refuses, or of which it
        does not show where answers are.
        """
        try:
            template = self._library.get_chat_template(None, conversation.tools)
            if _MARKS_ANSWERS.search(template):
                marked = self._library.apply_chat_template(
                    conversation.messages,
                    tools=conversation.tools,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    tokenizer_kwargs=_QUIET,
                )
                return Encoded(
                    np.asarray(marked["input_ids"], dtype=np.uint32),
                    np.asarray(marked["assistant_masks"], dtype=np.bool_),
                )
            return self._encode_by_differences(conversation, where)
        except (self._template_error, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{where}: the chat template of {self._folder} refuses this conversation: {first_line(error)}"
            ) from error

    def _encode_by_differences(self, conversation: Conversation, where: str) -> Encoded:
        text = self._render(conversation.messages, conversation)
        encoding = self._library(text, add_special_tokens=False, return_offsets_mapping=True, **_QUIET)
        starts, stops = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        is_answer = np.zeros(len(starts), dtype=np.bool_)
        for number, message in enumerate(conversation.messages):
            if message["role"] == ANSWERS:
                first, stop = self._find_answer(text, conversation, number, where)
                # Also a token across the border is to be predicted.
                is_answer |= (stops > first) & (starts < stop)
        return Encoded(np.asarray(encoding["input_ids"], dtype=np.uint32), is_answer)

    def _find_answer(self, text: str, conversation: Conversation, number: int, where: str) -> tuple[int, int]:
        """Where in the text of a conversation an answer is: it begins after the template's prompt for it, and
        ends with what the template writes after it where it is the last."""
        messages = conversation.messages
        if number:
            before = self._render(messages[:number], conversation, prompts=True)
        else:  # Templates need a message: what stays as it is if this one's content is another.
            changed = self._render([_with_other_content(messages[0]), *messages[1:]], conversation)
            before = text[: _count_common(text, changed)]
        after = ending = ""
        if number + 1 < len(messages):
            ending = self._render_after(messages[: number + 1], conversation, number)
            after = self._render_after(messages, conversation, number)
        if not (text.startswith(before) and after.startswith(ending)):
            raise ConfigError(
                f"{where}: the chat template of {self._folder} writes what is before or after messages"
                f"[{number}] otherwise in the whole conversation than where it ends there, so the answer's "
                f"tokens cannot be told; {_MEND}"
            )
        return len(before), len(text) - len(after) + len(ending)

    def _render_after(
        self, messages: Sequence[Mapping[str, Any]], conversation: Conversation, number: int
    ) -> str:
        """What follows the content of a message: what stays as it is at the end if the content is another."""
        other = _with_other_content(messages[number])
        text = self._render(messages, conversation)
        changed = self._render([*messages[:number], other, *messages[number + 1 :]], conversation)
        return text[len(text) - _count_common(reversed(text), reversed(changed)) :]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], conversation: Conversation, *, prompts: bool = False
    ) -> str:
        text: str = self._library.apply_chat_template(
            messages, tools=conversation.tools, tokenize=False, add_generation_prompt=prompts
        )
        return text


def _with_other_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content begins and ends with another letter."""
    content = message.get("content") or ""
    ends = {end for text in (content, content.strip()) for end in (text[:1], text[-1:])}
    return {**message, "content": next(letter for letter in "abcde" if letter not in ends)}


def _count_common(one: Iterable[str], other: Iterable[str]) -> int:
    """Letters with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
