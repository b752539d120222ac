"""Workloads by formula: decoders of any width, real ones among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zorselike.plan.workload import ITEMSIZES, LayerKind, Workload


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The shape of a model: embedding, equal layers, head."""

    name: str
    num_layers: int
    width: int
    inner: int
    """Width of the layers' feed-forward part."""
    num_words: int
    num_matrices: int = 3
    """Matrices of the feed-forward part: 3 where it is gated."""
    ties_head: bool = False

    @property
    def layer_parameters(self) -> int:
        return 4 * self.width**2 + self.num_matrices * self.width * self.inner


REAL_DECODERS = (
    Decoder(
        name="gpt2 small",
        num_layers=12,
        width=768,
        inner=3072,
        num_words=50257,
        num_matrices=2,
        ties_head=True,
    ),
    Decoder(
        name="opt 350m",
        num_layers=24,
        width=1024,
        inner=4096,
        num_words=50272,
        num_matrices=2,
        ties_head=True,
    ),
    Decoder(name="llama 1b", num_layers=16, width=2048, inner=8192, num_words=128256, ties_head=True),
    Decoder(name="llama 7b", num_layers=32, width=4096, inner=11008, num_words=32000),
    Decoder(name="llama 13b", num_layers=40, width=5120, inner=13824, num_words=32000),
    Decoder(name="llama 33b", num_layers=60, width=6656, inner=17920, num_words=32000),
    Decoder(name="llama 65b", num_layers=80, width=8192, inner=22016, num_words=32000),
)


def make_workload(
    shape: Decoder, *, sequence_length: int, dtype: str, num_frozen: int = 0, num_moments: int = 2
) -> Workload:
    """A decoder's workload; of its layers the first `num_frozen` are not trained, nor is the embedding then.

    FLOPs are two a parameter and token, and those of attention; activations are what attention with fused
    kernels and the feed-forward part keep.
    """
    itemsize = ITEMSIZES[dtype]
    boundary = sequence_length * shape.width
    attention = 4.0 * sequence_length**2 * shape.width
    layer = LayerKind(
        name="layer",
        num_parameters=shape.layer_parameters,
        forward_flops_per_row=2.0 * shape.layer_parameters * sequence_length + attention,
        input_elements_per_row=boundary,
        output_elements_per_row=boundary,
        activation_bytes_per_row=itemsize * sequence_length * (8 * shape.width + 3 * shape.inner),
        working_bytes_per_row=itemsize * sequence_length * 2 * shape.inner,
    )
    words = shape.num_words * shape.width
    kinds = [
        LayerKind(
            name="embedding",
            num_parameters=words,
            num_trainable=0 if num_frozen and not shape.ties_head else None,
            forward_flops_per_row=0.0,
            output_elements_per_row=boundary,
        ),
        layer,
        LayerKind(
            name="head",
            num_parameters=0 if shape.ties_head else words,
            num_borrowed=words if shape.ties_head else 0,
            forward_flops_per_row=2.0 * words * sequence_length,
            input_elements_per_row=boundary,
            activation_bytes_per_row=itemsize * boundary,
            working_bytes_per_row=itemsize * sequence_length * shape.num_words,
        ),
    ]
    names = ["layer"] * shape.num_layers
    if num_frozen:
        kinds.append(freeze(layer))
        names[:num_frozen] = [kinds[-1].name] * num_frozen
    return Workload(
        model=shape.name,
        sequence_length=sequence_length,
        dtype=dtype,
        layers=(
            ("embedding", "embedding"),
            *((f"layers.{i}", name) for i, name in enumerate(names)),
            ("head", "head"),
        ),
        kinds={kind.name: kind for kind in kinds},
        ties=(("embedding", "head"),) if shape.ties_head else (),
        num_moments=num_moments,
    )


def freeze(kind: LayerKind) -> LayerKind:
    """The same layer with only a part of a hundredth to train, beside weights that stay as they are."""
    return LayerKind(
        name=f"frozen {kind.name}",
        num_parameters=kind.num_parameters,
        num_trainable=kind.num_parameters // 100,
        forward_flops_per_row=kind.forward_flops_per_row,
        backward_flops_per_row=kind.forward_flops_per_row * 1.01,
        input_elements_per_row=kind.input_elements_per_row,
        output_elements_per_row=kind.output_elements_per_row,
        activation_bytes_per_row=kind.activation_bytes_per_row,
        working_bytes_per_row=kind.working_bytes_per_row,
    )


def make_chain(weights: Sequence[float], *, width: int, tokens: int, dtype: str) -> Workload:
    """Layers of which each is `weights[i]` times as costly as one of that width; equal ones are of a kind."""
    itemsize = ITEMSIZES[dtype]
    parameters, boundary = 12 * width**2, tokens * width
    kinds = {
        weight: LayerKind(
            name=f"layer of {weight:g}",
            num_parameters=int(weight * parameters),
            forward_flops_per_row=2.0 * weight * parameters * tokens,
            input_elements_per_row=boundary,
            output_elements_per_row=boundary,
            activation_bytes_per_row=int(weight * 16 * itemsize * boundary),
        )
        for weight in weights
    }
    return Workload(
        model="chain",
        sequence_length=tokens,
        dtype=dtype,
        layers=tuple((f"layers.{i}", kinds[weight].name) for i, weight in enumerate(weights)),
        kinds={kind.name: kind for kind in kinds.values()},
    )
