"""Parameters and floating-point operations of a model, from its config alone."""

from __future__ import annotations

from zorselike.models.decoder import DecoderConfig


def parameters_by_module(config: DecoderConfig) -> dict[str, int]:
    """Number of parameters of each module of `module_names(config)`; a tied `output` has none."""
    layers = {f"layers.{i}": config.layer_parameters for i in range(config.num_layers)}
    return {
        "tok_embeddings": config.embedding_parameters,
        **layers,
        "norm": config.norm_parameters,
        "output": 0 if config.tie_embeddings else config.vocab_size * config.dim,
    }


def num_parameters(config: DecoderConfig) -> int:
    """Number of parameters of the whole model, tied ones counted once."""
    return sum(parameters_by_module(config).values())


def forward_flops_by_module(config: DecoderConfig, seq_len: int) -> dict[str, int]:
    """Forward FLOPs per token of each module, in sequences of `seq_len` tokens.

    Two (multiply, add) per parameter, and `4 * seq_len * dim` per layer for the two products of
    attention. As is the custom (PaLM, appendix B; TorchTitan), the half of attention that a causal
    mask spares is not taken off. Looking up an embedding is free; the output projection is not,
    tied or not.
    """
    flops = {name: 2 * count for name, count in parameters_by_module(config).items()}
    for name in flops:
        if name.startswith("layers."):
            flops[name] += 4 * seq_len * config.dim
    return flops | {"tok_embeddings": 0, "output": 2 * config.vocab_size * config.dim}


def flops_per_token(config: DecoderConfig, seq_len: int, *, recompute: bool = False) -> int:
    """FLOPs per token of a training step: `6 N + 12 * num_layers * dim * seq_len`.

    `N` counts the parameters that multiply a token: all but the embedding tables, the output
    projection included. The backward costs twice the forward (`forward_flops_by_module`). With
    `recompute` the layers' forward, run again in the backward, is added: the hardware's FLOPs (HFU)
    and not the model's (MFU).
    """
    forward = forward_flops_by_module(config, seq_len)
    again = sum(flops for name, flops in forward.items() if name.startswith("layers.")) if recompute else 0
    return 3 * sum(forward.values()) + again
