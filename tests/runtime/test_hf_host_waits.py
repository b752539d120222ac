"""Models of `transformers` ask position ids for documents, and masks for padding: the host answers, and waits
for no device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.integrations.flex_attention as flex
import transformers.masking_utils as makes_masks
import transformers.modeling_flash_attention_utils as flash
from hf_families import VOCABULARY, documents, make_model, masks, tokens
from host_waits import DEVICE, HostWaits
from ranks import RunRanks
from tiny import adamw
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from zorselike import HeteroPipeline, list_modules
from zorselike.errors import ConfigError
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime import executor
from zorselike.runtime.batch import Batch, RowIndex
from zorselike.runtime.model.causal_lm import telling_of_rows

ROWS = 4


def watch(rank: int, world_size: int, asks_model: bool) -> list[set[str]]:
    """What the host waits for in a step without positions, with packed documents, with one a row, with
    padding and with a mask that leaves nothing out."""
    waits, model = HostWaits(), make_model("llama")
    names = list_modules(model)
    microbatches = (Microbatch(0, 0, 2), Microbatch(0, 2, 4))
    plan = Plan(ROWS, (Group((0,), microbatches),), (Ministage(0, names[:3]), Ministage(0, names[3:])))
    alone = torch.arange(documents(1).shape[1]).expand(ROWS, -1)
    told = mock.patch.object(executor, "telling_of_rows", lambda *_: nullcontext())
    found = []
    with waits.making(), told if asks_model else nullcontext():
        pipe = HeteroPipeline(model, plan, optimizer=adamw, device=DEVICE)
        batch = tokens(ROWS), torch.randint(VOCABULARY, (ROWS, alone.shape[1]))
        positions = [{}, {"position_ids": documents(ROWS)}, {"position_ids": alone}]
        padding = [{"attention_mask": mask} for mask in (masks(ROWS, left=False), torch.ones_like(alone))]
        for kwargs in (*positions, *padding):
            pipe.step_global(*batch, **kwargs)
            for optimizer in pipe.optimizers.values():
                for state in optimizer.state.values():
                    waits.mark(state["step"], host=True)
            for tensor in (*batch, *kwargs.values()):
                waits.mark(tensor, host=True)
            waits.found.clear()
            with waits.watching():
                pipe.step_global(*batch, **kwargs)
            found.append({place for place in waits.found if "work of a collective" not in place})
        pipe.close()
    return found


def test_a_forward_waits_for_no_device(run_ranks: RunRanks) -> None:
    assert run_ranks(watch, 1, False) == [[set()] * 5]


def test_else_each_would(run_ranks: RunRanks) -> None:
    for waits in run_ranks(watch, 1, True)[0]:
        assert any("MinistageForward" in place for place in waits)


def find(positions: Tensor) -> Tensor | None:
    return makes_masks.find_packed_sequence_indices(positions)


def test_what_is_told_is_what_would_be_found() -> None:
    own = makes_masks.find_packed_sequence_indices
    positions = torch.randint(3, (8, 6), generator=torch.Generator().manual_seed(0))
    expected = find(positions)
    assert expected is not None
    with telling_of_rows(True, None):
        told = find(positions)
        assert told is not None and torch.equal(told, expected)
    with telling_of_rows(False, None):
        assert find(torch.arange(6).expand(2, -1)) is None
    with telling_of_rows(None, None):
        assert makes_masks.find_packed_sequence_indices is own
    assert makes_masks.find_packed_sequence_indices is own


def test_what_is_told_of_padding_is_what_would_be_found() -> None:
    own = makes_masks._ignore_causal_mask_sdpa
    whole, padded = torch.ones(2, 6, dtype=torch.bool), masks(2, left=False).bool()
    for local in (None, 4):
        expected = [own(mask, 6, 6, 0, 0, local) for mask in (None, whole, padded)]
        for mask, are_padded in ((None, None), (whole, False), (padded, True)):
            with telling_of_rows(None, are_padded):
                found = makes_masks._ignore_causal_mask_sdpa(mask, 6, 6, 0, 0, local)
            assert found == expected[[None, False, True].index(are_padded)]
    with telling_of_rows(None, True):
        assert makes_masks._ignore_causal_mask_sdpa(None, 6, 6, 0, 0, None)  # Of a model with no mask.
    assert makes_masks._ignore_causal_mask_sdpa is own


def test_rows_are_looked_at_once_for_all_ministages() -> None:
    index = RowIndex((Microbatch(0, 0, 1), Microbatch(0, 1, ROWS)))
    given = {"position_ids": documents(ROWS), "attention_mask": masks(ROWS, left=False)}
    batch = Batch(index, torch.device("cpu"), inputs=None, targets=None, kwargs=given)
    for number, rows in enumerate((slice(0, 1), slice(1, ROWS))):
        told = batch.tell_of_rows(number)
        assert told == (True, bool((given["attention_mask"][rows] == 0).any()))
        with mock.patch.object(batch, "_known", side_effect=AssertionError):
            assert batch.tell_of_rows(number) is told


# -- flash attention, which looks in each layer ------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """As flash attention's kernels, `[rows, positions, heads, features]`."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attend_apart(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, **_: Any) -> Tensor:
    spans = list(pairwise(cu_seqlens_q.tolist()))
    return torch.cat([attend(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in spans])


def train_by_flash(rank: int, world_size: int, attention: str, num_rows: int) -> tuple[float, list[bool]]:
    """The third loss, of rows that hold documents, in microbatches of so many; and how often layers have
    looked."""
    model, looks, found = make_model("llama"), flash._is_packed_sequence, []
    model.config._attn_implementation = attention
    rows = tuple(Microbatch(0, start, start + num_rows) for start in range(0, ROWS, num_rows))
    group, batch = Group((0,), rows, recompute="layer"), (tokens(ROWS), tokens(ROWS))

    def look(positions: Tensor, batch_size: int) -> Any:
        found.append(True)
        return looks(positions, batch_size)

    functions = (attend, attend_apart, None, None, None), (lambda **_: {}, None)
    with (
        HostWaits().making(),
        mock.patch.object(flash, "lazy_import_flash_attention", lambda *_, **__: functions),
        mock.patch.object(flash, "_is_packed_sequence", look),
    ):
        names = list_modules(model)
        plan = Plan(ROWS, (group,), (Ministage(0, names[:3]), Ministage(0, names[3:])))
        with HeteroPipeline(model, plan, optimizer=adamw, device=DEVICE) as pipe:
            pipe.step_global(*batch)
            found.clear()
            pipe.step_global(*batch)
            return pipe.step_global(*batch, position_ids=documents(ROWS)).loss, found[:]


def test_flash_attention_keeps_documents_apart_or_says_that_it_cannot(run_ranks: RunRanks) -> None:
    """In microbatches of several rows it would not, and what a step comes to would depend on the plan."""
    expected = run_ranks(train_by_flash, 1, "sdpa", 2)[0][0]
    loss, looks = run_ranks(train_by_flash, 1, "flash_attention_2", 1)[0]
    assert loss == pytest.approx(expected, rel=1e-12) and not looks
    with pytest.raises(ConfigError, match=r"microbatches of one row, not of 2; take attention by sdpa"):
        run_ranks(train_by_flash, 1, "flash_attention_2", 2)


def test_of_documents_that_only_a_device_knows_flash_attention_is_asked() -> None:
    own, alone = flash._is_packed_sequence, torch.arange(6).expand(2, -1)
    with telling_of_rows(None, None):
        assert not flash._is_packed_sequence(alone, 2) and not flash._is_packed_sequence(None, 2)
        assert flash._is_packed_sequence(documents(1), 1)
        assert not flash._is_packed_sequence(alone.expand(3, 2, 6), 2)  # Of an image too.
        with pytest.raises(ConfigError, match="not of 2"):
            flash._is_packed_sequence(documents(2), 2)
        answer = flash._is_packed_sequence
    with telling_of_rows(None, None):
        assert flash._is_packed_sequence is answer
    assert flash._is_packed_sequence is own


# -- both are kernels for a GPU ----------------------------------------------------------------


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, **options: Any) -> Tensor:
    """As flex attention does, `[rows, heads, positions, features]`."""
    mask = create_mask(block_mask.mask_mod, len(q), None, q.shape[2], k.shape[2], device="cpu")
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=options["enable_gqa"])


def take_out_padding(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    kept, lengths = mask.flatten().nonzero().flatten(), mask.sum(1)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return x.flatten(0, 1)[kept], kept, ends, int(lengths.max()), lengths


def put_back_padding(x: Tensor, kept: Tensor, num_rows: int, length: int) -> Tensor:
    whole = x.new_zeros(num_rows * length, *x.shape[1:]).index_copy(0, kept, x)
    return whole.view(num_rows, length, *x.shape[1:])


def train_padded(rank: int, world_size: int, attention: str) -> list[float]:
    model, mask = make_model("llama"), masks(ROWS, left=False)
    model.config._attn_implementation = attention
    functions = (attend, attend_apart, None, put_back_padding, take_out_padding), (lambda **_: {}, None)
    with (
        mock.patch.object(flash, "lazy_import_flash_attention", lambda *_, **__: functions),
        mock.patch.object(flex, "compile_friendly_flex_attention", attend_by_blocks),
        mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")),  # Masks of blocks.
    ):
        names = list_modules(model)
        rows = (Microbatch(0, 0, 1), Microbatch(0, 1, 4))
        group = Group((0,), rows, recompute="layer", offload=OFFLOAD_KINDS)
        plan = Plan(ROWS, (group,), (Ministage(0, names[:3]), Ministage(0, names[3:])))
        targets = tokens(ROWS)[:, : mask.shape[1]].masked_fill(mask == 0, -100)
        with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
            results = [pipe.step_global(tokens(ROWS), targets, attention_mask=mask) for _ in range(2)]
            return [result.loss for result in results]


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_by_kernels_for_a_gpu_is_traced_like_any_other(attention: str, run_ranks: RunRanks) -> None:
    (expected,), (found,) = (run_ranks(train_padded, 1, each) for each in ("sdpa", attention))
    assert found == pytest.approx(expected, rel=1e-12)
