"""A small decoder shaped like those of Hugging Face's transformers, for tests.

What is typical there and unlike our own models: everything comes by keyword and most of it may be
None, attention reshapes with `view(b, t, -1, d)`, masks and rotary tables are made once outside
the layers and given to each of them, nothing may be missing, and the output is an object.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class HFConfig:
    vocab_size: int = 19
    hidden_size: int = 16
    intermediate_size: int = 24
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    dropout: float = 0.0
    tie_word_embeddings: bool = False


class ModelOutput(OrderedDict[str, Any]):
    """A dictionary without the entries that are None, which are attributes too."""

    loss: Tensor | None
    logits: Tensor

    def __init__(self, **entries: Any) -> None:
        super().__init__((key, value) for key, value in entries.items() if value is not None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.promote_types(torch.float32, input_dtype))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + 1e-6)).to(input_dtype)


class RotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        return 1.0 / (100.0 ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))

    def init_buffers(self) -> None:
        self.inv_freq = self.frequencies()

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        with torch.autocast(device_type=x.device.type, enabled=False):
            freqs = (inv_freq @ position_ids[:, None, :].float()).transpose(1, 2)
            table = torch.cat((freqs, freqs), dim=-1)
        return table.cos().to(x.dtype), table.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.dropout = config.dropout
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        b, t, _ = hidden_states.shape
        q, k, v = (
            proj(hidden_states).view(b, t, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (x.repeat_interleave(self.groups, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, dropout_p=self.dropout if self.training else 0.0
        )
        return self.o_proj(out.transpose(1, 2).contiguous().view(b, t, -1)), None


class MLP(nn.Module):
    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states,)


class HFModel(nn.Module):
    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config.hidden_size // config.num_attention_heads)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_states.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden_states.device).unsqueeze(0)
        mask = causal_mask(length, attention_mask, hidden_states)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
            )[0]
        return ModelOutput(last_hidden_state=self.norm(hidden_states), past_key_values=None)


def causal_mask(length: int, attention_mask: Tensor | None, like: Tensor) -> Tensor:
    """`[1 or rows, 1, sequence, sequence]`, 0 where attention may look, far below elsewhere."""
    least = torch.finfo(like.dtype).min
    mask = torch.full((length, length), least, dtype=like.dtype, device=like.device)
    mask = torch.triu(mask, diagonal=1)[None, None, :, :]
    if attention_mask is not None:
        mask = mask.expand(attention_mask.shape[0], 1, -1, -1).clone()
        padding = (mask + attention_mask[:, None, None, :].to(mask.dtype)) == 0
        mask[:, :, :, :length] = mask.masked_fill(padding, least)
    return mask


class HFForCausalLM(nn.Module):
    """Takes `labels` too, and then computes a loss inside, as they do."""

    def __init__(self, config: HFConfig | None = None) -> None:
        super().__init__()
        self.config = config or HFConfig()
        self.model = HFModel(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> ModelOutput:
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:, :])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss, logits=logits)


def hf_modules(config: HFConfig) -> list[str]:
    """Names of the modules that a plan may cut between, in model order."""
    layers = [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def logits_of(output: Any) -> Tensor:
    """What `unpack=` is for."""
    return output.logits  # type: ignore[no-any-return]
