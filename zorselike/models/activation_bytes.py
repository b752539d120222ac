"""What decoders keep between forward and backward, in bytes per token.

Counted tensor by tensor as Korthikanti et al. 2022 do ("Reducing Activation Recomputation in Large
Transformer Models", section 4.1), for `zorselike/models` in eager mode on a GPU: no dropout, flash
attention, which keeps its output and one fp32 logarithm a head instead of the scores, and norms
that are one kernel and keep their input. `h` is the width, `f` that of the feed-forward network,
`k` that of keys, `e` the bytes of an element. Beside Korthikanti's 34 bytes a token and element of
the width, GPT has 32 in half precision: the two masks of dropout are missing.

A layer that is recomputed keeps its input, `h * e`, and needs the rest while its backward runs.
"""

from __future__ import annotations

from dataclasses import dataclass

_FP32 = 4
_TOKEN_ID = 8


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per token of one module."""

    kept: int
    """From its forward until its backward."""
    working: int
    """What comes and goes in its backward, which needs more than its forward."""


def count_llama_layer(
    *, dim: int, num_heads: int, kv_width: int, ffn_hidden: int, itemsize: int
) -> TokenBytes:
    """RMSNorm, rotary positions, attention with grouped keys, SwiGLU (`zorselike/models/llama.py`)."""
    h, f, k, e = dim, ffn_hidden, kv_width, itemsize
    if e == _FP32:
        k = h  # Flash attention is for half precision; the other kernels want as many keys as queries.
    norms = 2 * (2 * h * e + _FP32)  # Input and output of each, and the inverse of its root mean square.
    attention = (h + 2 * k) * e + h * e + num_heads * _FP32  # Turned q and k, v; the output; logarithms.
    tables = h // num_heads * _FP32  # Cosine and sine, of half the width of a head each.
    feed_forward = 4 * f * e  # w1 x, its SiLU, w3 x and the product that w2 multiplies.
    return TokenBytes(norms + attention + tables + feed_forward, _working(h, f, e, inner=3))


def count_gpt_layer(*, dim: int, num_heads: int, ffn_hidden: int, itemsize: int) -> TokenBytes:
    """LayerNorm, attention, GELU (`zorselike/models/gpt.py`)."""
    h, f, e = dim, ffn_hidden, itemsize
    norms = 2 * (2 * h * e + 2 * _FP32)
    attention = 3 * h * e + h * e + num_heads * _FP32
    feed_forward = 2 * f * e  # Before and after GELU.
    return TokenBytes(norms + attention + feed_forward, _working(h, f, e, inner=2))


def _working(h: int, f: int, e: int, *, inner: int) -> int:
    """Gradients at one time: in the feed-forward network `inner` of its width and two of the layer's;
    in attention three of the layer's, and fp32 sums and rotations of queries and keys."""
    return max((inner * f + 2 * h) * e, 6 * h * e + 4 * h * _FP32)


def count_embedding() -> TokenBytes:
    """A token's number; its gradient is one of parameters."""
    return TokenBytes(_TOKEN_ID, 0)


def count_head(*, dim: int, vocab_size: int, itemsize: int) -> tuple[TokenBytes, TokenBytes]:
    """The last norm; the output projection with the cross-entropy of `token_cross_entropy`.

    The loss keeps the logarithms of all probabilities in fp32. Its backward has two gradients of
    that size and one of the logits.
    """
    norm = TokenBytes(dim * itemsize + 2 * _FP32, dim * itemsize)
    loss = vocab_size * _FP32 + _TOKEN_ID
    output = TokenBytes(dim * itemsize + loss, vocab_size * (2 * _FP32 + itemsize))
    return norm, output
