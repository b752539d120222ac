"""Tokenizers: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from zorselike.errors import ConfigError

TOKENIZER = "tokenizer.json"

Tokens = NDArray[np.integer]


class Encoded(NamedTuple):
    """The tokens of an example, and which of them are of an answer."""

    tokens: Tokens
    is_answer: NDArray[np.bool_]


class Tokenizer(Protocol):
    """Turns documents into one stream of tokens."""

    @property
    def vocab_size(self) -> int:
        """Tokens are in `[0, vocab_size)`."""

    @property
    def end_of_document(self) -> int | None:
        """Token that ends every document; `None` if the vocabulary has none."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that affects `encode`."""

    def encode(self, text: str) -> Tokens:
        """The tokens of a text, without any token for its start or end."""

    def encode_answer(self, prompt: str, completion: str) -> Encoded:
        """The tokens of both as one document, with the tokens for its start and end that the vocabulary has;
        the completion and the end are the answer."""


class ByteTokenizer:
    """A token is a UTF-8 byte; byte 0, which text does not contain, ends a document."""

    vocab_size = 256
    end_of_document: int | None = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_answer(self, prompt: str, completion: str) -> Encoded:
        tokens = np.append(self.encode(prompt + completion), np.uint8(0))
        return Encoded(tokens, np.arange(len(tokens)) >= len(self.encode(prompt)))


class FileTokenizer:
    """A Hugging Face `tokenizer.json`; documents end with the `eos_token` of the `tokenizer_config.json`
    beside it."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise ConfigError(
                f"[model] hf_assets_path = {path} needs the package tokenizers: "
                "pip install 'zorselike[tokenizers]'"
            ) from error
        try:
            self._library = Library.from_buffer(path.read_bytes())
        except Exception as error:  # The library raises bare Exception for a file that it cannot parse.
            raise ConfigError(f"[model] hf_assets_path: {path} is not a tokenizer.json: {error}") from error
        # Which transformers saves as they were set last.
        self._library.no_truncation()
        self._library.no_padding()
        self.vocab_size: int = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_document = self._find_end(path.parent / "tokenizer_config.json")
        digest = hashlib.sha256(f"{self._library.to_str()}{self.end_of_document}".encode())
        self.fingerprint = digest.hexdigest()[:12]

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_answer(self, prompt: str, completion: str) -> Encoded:
        encoding = self._library.encode(prompt + completion)
        tokens = np.asarray(encoding.ids, dtype=np.uint32)
        ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
        is_answer = ends > len(prompt)  # A token across the border is to be predicted too.
        if self.end_of_document is not None:
            if len(tokens) and tokens[-1] == self.end_of_document:  # Some add it themselves.
                tokens, is_answer = tokens[:-1], is_answer[:-1]
            tokens = np.append(tokens, np.uint32(self.end_of_document))
            is_answer = np.append(is_answer, True)
        return Encoded(tokens, is_answer)

    def _find_end(self, config_path: Path) -> int | None:
        if not config_path.exists():
            return None
        try:
            token = json.loads(config_path.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"[model] hf_assets_path: {config_path} is not a JSON object: {error}"
            ) from error
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else self._library.token_to_id(str(content))


def load_tokenizer(hf_assets_path: str) -> Tokenizer:
    """The tokenizer of `[model] hf_assets_path`, a folder or the file itself; bytes if it is empty.

    Raises:
        ConfigError: there is no such file, it is not a tokenizer, or the package `tokenizers` is missing.
    """
    if not hf_assets_path:
        return ByteTokenizer()
    path = Path(hf_assets_path)
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"[model] hf_assets_path = {hf_assets_path}: there is no file {path}")
    return FileTokenizer(path)
