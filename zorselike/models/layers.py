"""Linear layers and embeddings that carry the width of their own initialisation.

Every module initialises itself alone, in `reset_parameters`, so that a model's weights do not
depend on the pieces in which it is built.
"""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` with weights from a normal distribution of width `std` and zero bias."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with weights from a normal distribution of width `std`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(Embedding):
    """Token ids `[rows, sequence]` to hidden states; positions enter later, in the attention."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens)


class LearnedPositionEmbedding(nn.Module):
    """The sum of a token's and a position's embedding (GPT)."""

    def __init__(self, vocab_size: int, max_seq_len: int, dim: int, *, std: float) -> None:
        super().__init__()
        self.tokens = Embedding(vocab_size, dim, std=std)
        self.positions = Embedding(max_seq_len, dim, std=std)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Hidden states `[rows, sequence, dim]`; positions are 0, 1, 2, ... by default."""
        h: Tensor = self.tokens(tokens)
        if positions is None:
            return h + self.positions.weight[: tokens.shape[1]]
        return h + self.positions(positions)  # type: ignore[no-any-return]
