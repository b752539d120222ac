"""The Llama family: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Parameter names are those of Meta's checkpoints and of TorchTitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.models.attention import attend
from zorselike.models.decoder import Decoder, DecoderConfig
from zorselike.models.layers import Linear, TokenEmbedding
from zorselike.models.rope import RopeScaling, rope_tables, rotate

_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The shape of a Llama."""

    num_kv_heads: int
    """Key and value heads; each serves `num_heads / num_kv_heads` query heads."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_theta <= 0:
            raise ConfigError(f"model: rope_theta = {self.rope_theta} must be above 0")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model: num_heads = {self.num_heads} does not divide by num_kv_heads = "
                f"{self.num_kv_heads}: every key head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model: dim / num_heads = {self.head_dim} is odd: rotary positions turn pairs, "
                f"so choose dim and num_heads with an even quotient"
            )

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.dim

    @property
    def layer_parameters(self) -> int:
        kv_width = self.num_kv_heads * self.head_dim
        attention = 2 * self.dim * (self.dim + kv_width)
        return attention + 3 * self.dim * self.ffn_hidden + 2 * self.dim

    @property
    def norm_parameters(self) -> int:
        return self.dim


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, output_std: float) -> None:
        super().__init__()
        kv_width = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.rope_scaling = config.rope_scaling
        self.wq = Linear(config.dim, config.dim, std=_STD)
        self.wk = Linear(config.dim, kv_width, std=_STD)
        self.wv = Linear(config.dim, kv_width, std=_STD)
        self.wo = Linear(config.dim, config.dim, std=output_std)

    def forward(self, h: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        cos, sin = rope_tables(q, positions, theta=self.rope_theta, scaling=self.rope_scaling)
        q, k = rotate((q, k), cos, sin)
        return self.wo(attend(q, k, v, mask))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1(h)) * w3(h))`."""

    def __init__(self, config: LlamaConfig, *, output_std: float) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_hidden, std=_STD)
        self.w2 = Linear(config.ffn_hidden, config.dim, std=output_std)
        self.w3 = Linear(config.dim, config.ffn_hidden, std=_STD)

    def forward(self, h: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(h)) * self.w3(h))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """One layer: attention and feed-forward, each normed before and added after."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        # The deeper a layer, the smaller its first step, so that the residual stream keeps its scale.
        output_std = _STD / (2 * (index + 1)) ** 0.5
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, output_std=output_std)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, output_std=output_std)

    def forward(self, h: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """`[rows, sequence, dim]` to the same; `positions` and `mask` as in `Decoder.forward`."""
        h = h + self.attention(self.attention_norm(h), positions=positions, mask=mask)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Llama(Decoder):
    """A Llama of any size."""

    tp_plan: ClassVar[dict[str, str]] = {
        **{f"layers.*.attention.{name}": "colwise" for name in ("wq", "wk", "wv")},
        "layers.*.attention.wo": "rowwise",
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    }
    """How layers are cut over the ranks of a tensor-parallel replica, in Hugging Face's words."""

    def __init__(self, config: LlamaConfig) -> None:
        std = _STD if config.tie_embeddings else 1.0
        embeddings = TokenEmbedding(config.vocab_size, config.dim, std=std)
        super().__init__(
            config,
            tok_embeddings=embeddings,
            token_table=embeddings,
            layers=[TransformerBlock(config, i) for i in range(config.num_layers)],
            norm=nn.RMSNorm(config.dim, eps=config.norm_eps),
        )


def _llama1(
    dim: int, num_layers: int, num_heads: int, ffn_hidden: int, *, norm_eps: float = 1e-6
) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_hidden=ffn_hidden,
        vocab_size=32_000,
        max_seq_len=2048,
        norm_eps=norm_eps,
    )


def _llama3(
    dim: int, num_layers: int, num_heads: int, ffn_hidden: int, *, factor: float, tie_embeddings: bool
) -> LlamaConfig:
    return LlamaConfig(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_hidden=ffn_hidden,
        vocab_size=128_256,
        max_seq_len=131_072,
        tie_embeddings=tie_embeddings,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=factor),
    )


LLAMA_FLAVORS = {
    "debug": LlamaConfig(
        dim=64, num_layers=6, num_heads=4, num_kv_heads=2, ffn_hidden=192, vocab_size=256, max_seq_len=2048
    ),
    "1b": _llama3(2048, 16, 32, 8192, factor=32, tie_embeddings=True),
    "3b": _llama3(3072, 28, 24, 8192, factor=32, tie_embeddings=True),
    "8b": _llama3(4096, 32, 32, 14_336, factor=8, tie_embeddings=False),
    "7b": _llama1(4096, 32, 32, 11_008),
    "13b": _llama1(5120, 40, 40, 13_824),
    "33b": _llama1(6656, 60, 52, 17_920),
    "65b": _llama1(8192, 80, 64, 22_016, norm_eps=1e-5),
}
"""`1b` and `3b` are Llama 3.2, `8b` is Llama 3.1, the others are the first Llama."""
