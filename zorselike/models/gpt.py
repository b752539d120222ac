"""The GPT family: learned positions, LayerNorm, GELU, biases, tied embeddings (GPT-2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from zorselike.models.attention import attend
from zorselike.models.decoder import Decoder, DecoderConfig
from zorselike.models.layers import LearnedPositionEmbedding, Linear

_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """The shape of a GPT."""

    tie_embeddings: bool = True
    bias: bool = True
    """Whether linear layers and norms have biases."""

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab_size + self.max_seq_len) * self.dim

    @property
    def layer_parameters(self) -> int:
        weights = 4 * self.dim * self.dim + 2 * self.dim * self.ffn_hidden
        biases = 5 * self.dim + self.ffn_hidden if self.bias else 0
        return weights + biases + 2 * self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        return self.dim * (2 if self.bias else 1)


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: GPTConfig, *, output_std: float) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.wqkv = Linear(config.dim, 3 * config.dim, bias=config.bias, std=_STD)
        self.wo = Linear(config.dim, config.dim, bias=config.bias, std=output_std)

    def forward(self, h: Tensor, *, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.wqkv(h).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return self.wo(attend(q, k, v, mask))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """`w2(gelu(w1(h)))`, with GPT-2's approximation of GELU."""

    def __init__(self, config: GPTConfig, *, output_std: float) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_hidden, bias=config.bias, std=_STD)
        self.w2 = Linear(config.ffn_hidden, config.dim, bias=config.bias, std=output_std)

    def forward(self, h: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(h), approximate="tanh"))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each normed before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        output_std = _STD / (2 * config.num_layers) ** 0.5
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.attention = Attention(config, output_std=output_std)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.feed_forward = FeedForward(config, output_std=output_std)

    def forward(self, h: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """`[rows, sequence, dim]` to the same. Positions are in `h` already; `mask` as in `Decoder`."""
        h = h + self.attention(self.attention_norm(h), mask=mask)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class GPT(Decoder):
    """A GPT of any size; both embedding tables are in `tok_embeddings`."""

    def __init__(self, config: GPTConfig) -> None:
        embeddings = LearnedPositionEmbedding(config.vocab_size, config.max_seq_len, config.dim, std=_STD)
        super().__init__(
            config,
            tok_embeddings=embeddings,
            token_table=embeddings.tokens,
            layers=[TransformerBlock(config) for _ in range(config.num_layers)],
            norm=nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias),
        )


def _gpt(
    dim: int, num_layers: int, num_heads: int, *, vocab_size: int = 50_257, max_seq_len: int
) -> GPTConfig:
    return GPTConfig(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_hidden=4 * dim,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
    )


GPT_FLAVORS = {
    "debug": _gpt(64, 6, 4, vocab_size=256, max_seq_len=512),
    "124m": _gpt(768, 12, 12, max_seq_len=1024),
    "350m": _gpt(1024, 24, 16, vocab_size=50_272, max_seq_len=2048),
    "2.7b": _gpt(2560, 32, 20, max_seq_len=2048),
}
"""`124m` is GPT-2. `350m` and `2.7b` have the sizes of OPT-350M and GPT-Neo 2.7B in GPT-2's design: layers
are alike in parameters, but OPT-350M's embedding of width 512 with its two projections is one of width
1024 here, OPT's two more positions are missing, and GPT-Neo's biases and local attention are GPT-2's."""
