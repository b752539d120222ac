"""Causal attention over whole sequences or over the documents packed into them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention


def document_mask(document_ids: Tensor) -> Tensor:
    """Which token may see which: earlier or equal, and of the same document.

    `document_ids`: `[rows, sequence]`. Returns bool `[rows, 1, sequence, sequence]`.
    """
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return same.tril().unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, causal unless `mask` (True: may be seen) says otherwise.

    `query`: `[rows, sequence, heads, head_dim]`; `key` and `value` may have fewer heads, each
    then serving as many neighbouring query heads (GQA). Returns `[rows, sequence, heads * head_dim]`.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and not _flash_takes_groups(q, k, v, mask):
        # Only the flash kernel has grouped heads; without it (V100, fp32, a mask) torch would fall
        # back to the kernel that writes out the sequence x sequence matrix.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        is_grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )
    return out.transpose(1, 2).flatten(2)


def _flash_takes_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    if mask is not None or not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, True))
