"""The shape all our models share: embeddings, layers, a norm, an output projection.

The attribute names are TorchTitan's (`torchtitan/models/llama3`). Any of the four may be taken
out, so that an instance with some layers and no embeddings is one piece of a pipeline; names of
parameters stay those of the whole model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_type_hints

from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.models.attention import document_mask
from zorselike.models.layers import Linear

MAX_LAYERS = 10_000
"""A thousand have been trained; far more is a slip, and would fill the memory with names."""

_NOUNS = {int: "an integer", float: "a number", bool: "True or False"}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """What every decoder has; raises `ConfigError` where the numbers contradict each other."""

    dim: int
    num_layers: int
    num_heads: int
    ffn_hidden: int
    """Width inside the feed-forward network."""
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Whether the output projection uses the token embedding's weight."""

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(type(self)).items():
            value = getattr(self, key)
            if hint in (int, float, bool) and type(value) not in ((int, float) if hint is float else (hint,)):
                raise ConfigError(f"model: {key} = {value!r} must be {_NOUNS[hint]}")
            if hint is float and not abs(value) < math.inf:
                raise ConfigError(f"model: {key} = {value!r} must be finite")
        for key in ("dim", "num_layers", "num_heads", "ffn_hidden", "vocab_size", "max_seq_len"):
            if getattr(self, key) < 1:
                raise ConfigError(f"model: {key} = {getattr(self, key)} must be at least 1")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"model: num_layers = {self.num_layers} must be at most {MAX_LAYERS}")
        if self.norm_eps < 0:
            raise ConfigError(f"model: norm_eps = {self.norm_eps} must not be negative")
        if self.dim % self.num_heads:
            raise ConfigError(
                f"model: dim = {self.dim} does not divide by num_heads = {self.num_heads}: "
                f"every head needs the same width, so change one of them"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    @abstractmethod
    def embedding_parameters(self) -> int:
        """Parameters of `tok_embeddings`."""

    @property
    @abstractmethod
    def layer_parameters(self) -> int:
        """Parameters of one of `layers`."""

    @property
    @abstractmethod
    def norm_parameters(self) -> int:
        """Parameters of `norm`."""


class Decoder(nn.Module):
    """A decoder-only transformer; missing parts are `None` and are passed through."""

    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict
    norm: nn.Module | None
    output: nn.Module | None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        tok_embeddings: nn.Module,
        token_table: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module,
    ) -> None:
        """`token_table` is the embedding whose weight `output` shares if the config ties them."""
        super().__init__()
        self.config = config
        self.tok_embeddings = tok_embeddings
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm = norm
        output = Linear(config.dim, config.vocab_size, std=config.dim**-0.5)
        if config.tie_embeddings:
            output.weight = token_table.weight
        self.output = output

    def forward(
        self, x: Tensor, *, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Logits `[rows, sequence, vocab]`, or hidden states where `output` is missing.

        `x`: token ids `[rows, sequence]`, or hidden states `[rows, sequence, dim]` where
        `tok_embeddings` is missing. `positions` `[rows, sequence]`: each token's position,
        0, 1, 2, ... by default. `document_ids` `[rows, sequence]`: a token attends only to
        earlier tokens with its own number; by default to all earlier ones.
        Raises `ConfigError` if the sequence is longer than `max_seq_len`.
        """
        if x.shape[1] > self.config.max_seq_len:
            raise ConfigError(
                f"model: a sequence of {x.shape[1]} tokens is longer than max_seq_len = "
                f"{self.config.max_seq_len}: shorten the sequence or raise max_seq_len"
            )
        h = self.tok_embeddings(x, positions) if self.tok_embeddings is not None else x
        mask = None if document_ids is None else document_mask(document_ids)
        for layer in self.layers.values():
            h = layer(h, positions=positions, mask=mask)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h
