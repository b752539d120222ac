"""A tiny Hugging Face tokenizer with a chat template, and files of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{{ '\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of the same text as `TEMPLATE`."""


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Bytes, and a few tokens more: 260 in all."""
    folder.mkdir(exist_ok=True)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([], trainer)
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def decode(folder: Path, tokens: Iterable[int]) -> str:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text: str = library.decode([int(token) for token in tokens], skip_special_tokens=False)
    return text


def turns(*contents: str, system: str = "") -> dict[str, Any]:
    """A conversation in which user and assistant speak in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    return {"messages": messages}


def write_lines(path: Path, values: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path
