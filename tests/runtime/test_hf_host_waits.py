"""Models of `transformers` ask position ids for documents, and masks for padding: the host answers, and waits
for no device."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
import transformers.masking_utils as makes_masks
from hf_families import VOCABULARY, documents, make_model, masks, tokens
from host_waits import DEVICE, HostWaits
from ranks import RunRanks
from tiny import adamw
from torch import Tensor

from zorselike import HeteroPipeline, list_modules
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime import executor
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
