"""A decoder's config as numbers: its `Workload`."""

from __future__ import annotations

from zorselike.errors import ConfigError
from zorselike.models.activation_bytes import (
    TokenBytes,
    count_embedding,
    count_gpt_layer,
    count_head,
    count_llama_layer,
)
from zorselike.models.decoder import DecoderConfig
from zorselike.models.flops import forward_flops_by_module, parameters_by_module
from zorselike.models.llama import LlamaConfig
from zorselike.models.registry import module_names
from zorselike.plan.workload import ITEMSIZES, LayerKind, Workload

_MODULES = {"embedding": "tok_embeddings", "layer": "layers.0", "norm": "norm", "head": "output"}
"""By kind, the first module of it."""


def make_workload(
    config: DecoderConfig, *, sequence_length: int, dtype: str, model: str, num_moments: int = 2
) -> Workload:
    """The workload of one of our decoders, with the kinds `embedding`, `layer`, `norm` and `head`.

    Args:
        config: of a model of `zorselike/models`.
        sequence_length: tokens of a row.
        dtype: what layers compute in, `float32`, `bfloat16` or `float16`.
        model: its name for people, plans and profiles, such as `llama 7b`.
        num_moments: averages that the optimizer keeps of each parameter.

    Raises:
        ConfigError: The sequence is longer than the model takes, or the dtype is not one of these.
    """
    if dtype not in ITEMSIZES:
        raise ConfigError(f"workload: there is no dtype {dtype!r}; choose one of {', '.join(ITEMSIZES)}")
    if not 1 <= sequence_length <= config.max_seq_len:
        raise ConfigError(
            f"workload: rows of {sequence_length} tokens do not fit max_seq_len = {config.max_seq_len} of "
            f"{model}; shorten them or raise max_seq_len"
        )
    names, kind_of = module_names(config), {module: kind for kind, module in _MODULES.items()}
    module_bytes = _count_bytes(config, itemsize=ITEMSIZES[dtype])
    parameters, flops = parameters_by_module(config), forward_flops_by_module(config, sequence_length)
    hidden, logits = sequence_length * config.dim, sequence_length * config.vocab_size
    kinds = {}
    for kind, module in _MODULES.items():
        borrows = kind == "head" and config.tie_embeddings
        kinds[kind] = LayerKind(
            name=kind,
            num_parameters=parameters[module],
            num_borrowed=config.vocab_size * config.dim if borrows else 0,
            forward_flops_per_row=sequence_length * flops[module],
            input_elements_per_row=0 if kind == "embedding" else hidden,
            output_elements_per_row=logits if kind == "head" else hidden,
            activation_bytes_per_row=sequence_length * module_bytes[kind].kept,
            working_bytes_per_row=sequence_length * module_bytes[kind].working,
        )
    return Workload(
        model=model,
        sequence_length=sequence_length,
        dtype=dtype,
        layers=tuple((name, kind_of.get(name, "layer")) for name in names),
        kinds=kinds,
        ties=((names[0], names[-1]),) if config.tie_embeddings else (),
        num_moments=num_moments,
        max_tensor_parallel=_count_pieces(config),
    )


def _count_pieces(config: DecoderConfig) -> int:
    """As `Workload.max_tensor_parallel`, by the model's `tp_plan`."""
    if not isinstance(config, LlamaConfig):
        return 1
    return min(config.num_kv_heads, config.ffn_hidden)


def _count_bytes(config: DecoderConfig, *, itemsize: int) -> dict[str, TokenBytes]:
    """What a decoder's modules keep of a token from forward to backward, by kind, when they compute in
    `itemsize` bytes; `head` is the output projection with the loss."""
    dim, num_heads, ffn_hidden = config.dim, config.num_heads, config.ffn_hidden
    if isinstance(config, LlamaConfig):
        kv_width = config.num_kv_heads * config.head_dim
        layer = count_llama_layer(
            dim=dim, num_heads=num_heads, kv_width=kv_width, ffn_hidden=ffn_hidden, itemsize=itemsize
        )
    else:
        layer = count_gpt_layer(dim=dim, num_heads=num_heads, ffn_hidden=ffn_hidden, itemsize=itemsize)
    norm, head = count_head(dim=dim, vocab_size=config.vocab_size, itemsize=itemsize)
    return {"embedding": count_embedding(), "layer": layer, "norm": norm, "head": head}
