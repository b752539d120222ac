"""Llama's own parts: grouped heads and rotary positions."""

from __future__ import annotations

import math

import pytest
import torch

from zorselike.models import RopeScaling, build_model
from zorselike.models.attention import attend, document_mask
from zorselike.models.rope import rope_tables, rotate
from zorselike.runtime.model.initialize import initialize


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_grouped_heads_are_repeated_heads() -> None:
    grouped = initialize(build_on_meta(num_kv_heads=2), seed=1, dtype=torch.float64)
    whole = initialize(build_on_meta(num_kv_heads=4), seed=1, dtype=torch.float64)
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = weight.unflatten(0, (2, 16)).repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(grouped(tokens), whole(tokens), rtol=0, atol=1e-12)


def build_on_meta(**overrides: int) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model("llama", "debug", num_layers=2, **overrides)


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_is_a_softmax_over_what_may_be_seen(is_masked: bool) -> None:
    q, k, v = random(2, 5, 4, 8), random(2, 5, 2, 8, seed=1), random(2, 5, 2, 8, seed=2)
    ids = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, 3]])
    mask = document_mask(ids) if is_masked else None
    out = attend(q, k, v, mask).view(2, 5, 4, 8)
    for row in range(2):
        for head in range(4):
            for t in range(5):
                seen = [s for s in range(t + 1) if not is_masked or ids[row, s] == ids[row, t]]
                scores = (k[row, seen, head // 2] @ q[row, t, head]) / math.sqrt(8)
                expected = scores.softmax(0) @ v[row, seen, head // 2]
                torch.testing.assert_close(out[row, t, head], expected, rtol=0, atol=1e-12)


def test_rotation_turns_neighbouring_pairs() -> None:
    x = random(2, 6, 3, 8)
    cos, sin = rope_tables(x, None, theta=100.0, scaling=None)
    turned = torch.view_as_complex(rotate([x], cos, sin)[0].unflatten(-1, (4, 2)))
    angles = torch.arange(6)[:, None] * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.exp(1j * angles)[:, None]
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)


def test_a_compiler_is_given_the_same_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(2, 6, 3, 8).requires_grad_()
    cos, sin = rope_tables(x, None, theta=100.0, scaling=None)
    turned = []
    for compiles in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiles=compiles: compiles)
        (y,) = rotate([x], cos, sin)
        turned.append((y, *torch.autograd.grad(y, x, torch.ones_like(y).cumsum(1))))
    for eager, compiled in zip(*turned, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=0, atol=1e-14)


def test_only_distances_between_positions_matter() -> None:
    model = initialize(build_on_meta(), seed=1, dtype=torch.float64)
    tokens, positions = torch.arange(24).view(2, 12), torch.arange(12).expand(2, 12)
    with torch.no_grad():
        here, there = model(tokens, positions=positions), model(tokens, positions=positions + 1000)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_tables_are_never_rounded_below_fp32(dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    x = random(1, 3000, 1, 4, dtype=torch.float64).to(dtype)
    cos, sin = rope_tables(x, None, theta=1e4, scaling=None)
    assert cos.dtype == sin.dtype == table_dtype
    assert rotate([x], cos, sin)[0].dtype == dtype
    angles = torch.arange(3000, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    torch.testing.assert_close(cos[:, 0].double(), angles.cos(), rtol=0, atol=2e-4)


def test_scaling_is_that_of_llama_3_1() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    x = torch.zeros(1, 2, 1, 128, dtype=torch.float64)
    _, sin = rope_tables(x, None, theta=500_000.0, scaling=scaling)
    scaled = sin[1, 0].asin()  # position 1: the angles are the frequencies
    for i, got in enumerate(scaled.tolist()):
        frequency = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert got == pytest.approx(expected, rel=1e-9)
