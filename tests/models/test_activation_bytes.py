"""The counts of activations against what autograd saves, storage by storage."""

from __future__ import annotations

import pytest
import torch
from ranks import RunRanks
from torch import Tensor, nn

from zorselike.models import GPTConfig, LlamaConfig
from zorselike.models.activation_bytes import count_gpt_layer, count_head, count_llama_layer
from zorselike.models.gpt import TransformerBlock as GPTBlock
from zorselike.models.llama import TransformerBlock as LlamaBlock
from zorselike.runtime.loss import token_cross_entropy

pytestmark = pytest.mark.pooled

TOKENS = 256
WIDTHS = {"dim": 128, "num_heads": 4, "ffn_hidden": 352}
REST = {"num_layers": 1, "vocab_size": 1000, "max_seq_len": TOKENS}


class Saved:
    """Adds up the storages that autograd saves inside, each once, without those of parameters."""

    def __init__(self, *without: nn.Module) -> None:
        self._without = {p.untyped_storage().data_ptr() for m in without for p in m.parameters()}
        self._kept: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._without:
            self._kept[address] = tensor
        return tensor

    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def measure(rank: int, world_size: int, family: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per token of a layer, and of the last norm, projection and loss."""
    layer: nn.Module
    if family == "llama":
        layer = LlamaBlock(LlamaConfig(num_kv_heads=4, **WIDTHS, **REST), 0)
        # On a CPU RMSNorm is several kernels, each of which saves; LayerNorm is one as on a GPU.
        layer.attention_norm, layer.ffn_norm = nn.LayerNorm(128), nn.LayerNorm(128)
    else:
        layer = GPTBlock(GPTConfig(**WIDTHS, **REST))
    norm, output = nn.LayerNorm(128).to(dtype), nn.Linear(128, 1000, bias=False, dtype=dtype)
    layer.to(dtype)
    x = torch.randn(1, TOKENS, 128, dtype=dtype, requires_grad=True)
    found = []
    in_layer, in_head = Saved(layer), Saved(norm, output)
    with torch.autograd.graph.saved_tensors_hooks(in_layer.pack, lambda saved: saved):
        layer(x)
    found.append(in_layer.num_bytes() / TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(in_head.pack, lambda saved: saved):
        token_cross_entropy(output(norm(x)), torch.zeros(1, TOKENS, dtype=torch.long))
    found.append(in_head.num_bytes() / TOKENS)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_counts_are_what_autograd_saves(run_ranks: RunRanks, family: str, dtype: torch.dtype) -> None:
    ((layer, head),) = run_ranks(measure, 1, family, dtype)
    if family == "llama":
        counted = count_llama_layer(**WIDTHS, kv_width=128, itemsize=dtype.itemsize)
    else:
        counted = count_gpt_layer(**WIDTHS, itemsize=dtype.itemsize)
    assert counted.kept == pytest.approx(layer, rel=0.01)
    norm, output = count_head(dim=128, vocab_size=1000, itemsize=dtype.itemsize)
    assert norm.kept + output.kept == pytest.approx(head, rel=0.01)


def test_grouped_keys_are_smaller_where_flash_attention_takes_them() -> None:
    half = count_llama_layer(**WIDTHS, kv_width=32, itemsize=2).kept
    assert half == count_llama_layer(**WIDTHS, kv_width=128, itemsize=2).kept - 2 * 2 * (128 - 32)
    whole = count_llama_layer(**WIDTHS, kv_width=32, itemsize=4).kept
    assert whole == count_llama_layer(**WIDTHS, kv_width=128, itemsize=4).kept


def test_gpt_is_korthikanti_without_dropout() -> None:
    """34 bytes a token and element of the width, less one byte for each of two masks of dropout."""
    h = 4096
    counted = count_gpt_layer(dim=h, num_heads=32, ffn_hidden=4 * h, itemsize=2).kept
    assert counted == pytest.approx((34 - 2) * h, rel=0.01)
