"""Models of `transformers` ask position ids for documents: the host answers, and waits for no device."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
import transformers.masking_utils as masks
from hf_families import VOCABULARY, documents, make_model, tokens
from host_waits import DEVICE, HostWaits
from ranks import RunRanks
from tiny import adamw
from torch import Tensor

from zorselike import HeteroPipeline, list_modules
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime import executor
from zorselike.runtime.model.causal_lm import telling_of_documents

ROWS = 4


def watch(rank: int, world_size: int, asks_model: bool) -> list[set[str]]:
    """What the host waits for in a step without positions, with packed documents, and with one a row."""
    waits, model = HostWaits(), make_model("llama")
    names = list_modules(model)
    microbatches = (Microbatch(0, 0, 2), Microbatch(0, 2, 4))
    plan = Plan(ROWS, (Group((0,), microbatches),), (Ministage(0, names[:3]), Ministage(0, names[3:])))
    alone = torch.arange(documents(1).shape[1]).expand(ROWS, -1)
    told = mock.patch.object(executor, "telling_of_documents", lambda are_packed: nullcontext())
    found = []
    with waits.making(), told if asks_model else nullcontext():
        pipe = HeteroPipeline(model, plan, optimizer=adamw, device=DEVICE)
        batch = tokens(ROWS), torch.randint(VOCABULARY, (ROWS, alone.shape[1]))
        for kwargs in ({}, {"position_ids": documents(ROWS)}, {"position_ids": alone}):
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
    assert run_ranks(watch, 1, False) == [[set(), set(), set()]]


def test_else_each_would(run_ranks: RunRanks) -> None:
    for waits in run_ranks(watch, 1, True)[0]:
        assert any("MinistageForward" in place for place in waits)


def find(positions: Tensor) -> Tensor | None:
    return masks.find_packed_sequence_indices(positions)


def test_what_is_told_is_what_would_be_found() -> None:
    own = masks.find_packed_sequence_indices
    positions = torch.randint(3, (8, 6), generator=torch.Generator().manual_seed(0))
    expected = find(positions)
    assert expected is not None
    with telling_of_documents(True):
        told = find(positions)
        assert told is not None and torch.equal(told, expected)
    with telling_of_documents(False):
        assert find(torch.arange(6).expand(2, -1)) is None
    with telling_of_documents(None):
        assert masks.find_packed_sequence_indices is own
    assert masks.find_packed_sequence_indices is own
