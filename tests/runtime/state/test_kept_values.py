"""What optimizers, schedulers and modules keep beside tensors of parameters, saved and gone on from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RunRanks
from tiny import Case, Layer, adamw, module_names
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from zorselike import HeteroPipeline
from zorselike.checkpoint.folder import list_steps
from zorselike.checkpoint.layout import step_folder
from zorselike.errors import CheckpointError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

pytestmark = pytest.mark.pooled

NAMES = module_names(1)
ALONE = Case(Plan(2, (Group((0,), (Microbatch(0, 0, 2),)),), (Ministage(0, tuple(NAMES)),)), 1)
PAIR = Case(
    Plan(
        2,
        tuple(Group((rank,), (Microbatch(rank, 0, 2),)) for rank in range(2)),
        (Ministage(0, tuple(NAMES[:2])), Ministage(1, tuple(NAMES[2:]))),
    ),
    1,
)


def sgd(named: Any) -> optim.Optimizer:
    return optim.SGD(named, lr=0.1, momentum=0.9)


def tensors_as_options(named: Any) -> optim.Optimizer:
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    return optim.AdamW(named, lr=torch.tensor(1e-2), betas=betas, foreach=False)


SCHEDULES: dict[str, tuple[Callable[[Any], optim.Optimizer], Callable[[Any], Any]]] = {
    "milestones": (adamw, lambda own: lr_scheduler.MultiStepLR(own, [1, 3, 4], 0.1)),
    "infinite": (adamw, lambda own: lr_scheduler.ReduceLROnPlateau(own, patience=0)),
    "sets momenta": (adamw, lambda own: lr_scheduler.OneCycleLR(own, 0.05, total_steps=10)),
    "sets momentum": (sgd, lambda own: lr_scheduler.CyclicLR(own, 0.01, 0.1, step_size_up=3)),
    "tensors": (tensors_as_options, lambda own: lr_scheduler.ExponentialLR(own, 0.5)),
    "counts in tensors": (lambda named: optim.NAdam(named, lr=0.05), lambda own: lr_scheduler.StepLR(own, 2)),
}


class Counting(Layer):
    """A buffer that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x) * (1 + self.count / 8)


def counting() -> nn.Module:
    torch.manual_seed(0)
    model = ALONE.model().to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    model.layers["0"] = Counting().double()  # type: ignore[index, operator]
    return model


def go_on(
    rank: int, size: int, folder: Path, optimizer: Any, schedule: Any, *, loads: bool, late: bool
) -> Any:
    with HeteroPipeline(counting(), ALONE.plan, optimizer=optimizer) as pipe:
        if loads and late:
            pipe.load(folder)
        schedulers = pipe.lr_schedulers(schedule)
        if loads and not late:
            pipe.load(folder)
        losses = []
        for step in range(pipe.num_steps, 6):
            if step == 2 and not loads:
                pipe.save(folder)
            losses.append(pipe.step_global(*ALONE.batch(step)).loss)
            plateau = any(
                isinstance(s, lr_scheduler.ReduceLROnPlateau) for s in schedulers.schedulers.values()
            )
            schedulers.step(*([losses[-1]] if plateau else []))
        return losses[-4:]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_all_that_is_kept_goes_on(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    (expected,) = run_ranks(go_on_as(loads=False), 1, tmp_path, *SCHEDULES[kind])
    for late in (False, True):  # Schedulers that are made before and after the load.
        assert run_ranks(go_on_as(loads=True, late=late), 1, tmp_path, *SCHEDULES[kind]) == [expected]


def go_on_as(*, loads: bool, late: bool = False) -> Callable[..., Any]:
    return lambda *given: go_on(*given, loads=loads, late=late)


def thaw(rank: int, size: int, folder: Path) -> float:
    frozen = Case(ALONE.plan, 1, frozen=tuple(NAMES[:2]))
    for case in (frozen, ALONE):
        with HeteroPipeline(case.model(), PAIR.plan if size > 1 else case.plan, optimizer=adamw) as pipe:
            if case is ALONE:
                pipe.load(folder)
            schedulers = pipe.lr_schedulers(lambda own: lr_scheduler.StepLR(own, 1, 0.5))
            loss = pipe.step_global(*ALONE.batch(0)).loss
            schedulers.step()
            if case is frozen:
                pipe.save(folder)
    return loss


def test_what_was_frozen_may_train_after_a_load(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert len(set(run_ranks(thaw, 2, tmp_path))) == 1


def other_devices(rank: int, size: int, folder: Path) -> list[bool]:
    found = []
    for fused in (True, False):
        factory = lambda named: optim.AdamW(named, lr=1e-2 if fused else 1.0, fused=fused)  # noqa: B023, E731
        with HeteroPipeline(ALONE.model(), ALONE.plan, optimizer=factory) as pipe:
            if fused:
                pipe.step_global(*ALONE.batch(0))
                pipe.save(folder)
            else:
                pipe.load(folder)
                (group,) = pipe.optimizers[0].param_groups
                found += [group["fused"], group["lr"] == 1e-2]
    return found


def test_how_an_optimizer_computes_is_not_taken_over(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(other_devices, 1, tmp_path) == [[False, True]]


def fail_and_go_on(rank: int, size: int, folder: Path) -> list[str]:
    said = []

    def refuse(call: Callable[[], object]) -> None:
        with pytest.raises(CheckpointError) as caught:
            call()
        said.append(str(caught.value))

    with HeteroPipeline(PAIR.model(), PAIR.plan, optimizer=adamw) as pipe:
        schedulers = pipe.lr_schedulers(lambda own: lr_scheduler.StepLR(own, 1))
        if rank == 1:
            for scheduler in schedulers.schedulers.values():
                scheduler.strange = object()  # type: ignore[attr-defined]
            (folder / "1").touch()
        refuse(lambda: pipe.save(folder / "steps"))
        refuse(lambda: pipe.load(folder / str(rank)))
        os.chdir(folder)
        for scheduler in schedulers.schedulers.values():
            vars(scheduler).pop("strange", None)
        pipe.step_global(*PAIR.batch(0))
        save = pipe.save("steps", wait=False)
        os.chdir("/")
        assert save is not None and save.wait() == folder / "steps" / step_folder(1)
    return said


def test_a_reason_of_one_rank_is_everybodys(run_ranks: RunRanks, tmp_path: Path) -> None:
    for said in run_ranks(fail_and_go_on, 2, tmp_path):
        strange, no_folder = said
        assert "rank 1" in strange and "strange is a object" in strange
        assert str(tmp_path / "1") in no_folder
    assert [path.name for path in list_steps(tmp_path / "steps")] == [step_folder(1)]


# -- tied weights by another name --------------------------------------------------------------------


def tied_output_first(rank: int, size: int, folder: Path, *, loads: bool) -> list[float]:
    """What is used last is registered first: one ministage owns the weight as `output.weight`, two as
    `tok_embeddings.weight`."""
    names = ("tok_embeddings", "layers.0", "norm", "output")
    groups = tuple(Group((r,), (Microbatch(r, 0, 4),)) for r in range(size))
    cuts = [0, 4] if size == 1 else [0, 1, 4]
    plan = Plan(4, groups, tuple(Ministage(r, names[cuts[r] : cuts[r + 1]]) for r in range(size)))
    case = Case(plan, 1, tied=True)
    model = case.model()
    model._modules = {"output": model._modules.pop("output"), **model._modules}
    with HeteroPipeline(model, plan, optimizer=adamw, split="export") as pipe:
        if loads:
            pipe.load(folder)
        else:
            pipe.step_global(*case.batch(0))
            pipe.save(folder)
        return [pipe.step_global(*case.batch(step)).loss for step in (1, 2)]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_tied_weight_may_be_saved_under_another_of_its_names(
    run_ranks: RunRanks, tmp_path: Path, before: int, after: int
) -> None:
    expected = run_ranks(partial(tied_output_first, loads=False), before, tmp_path)
    found = run_ranks(partial(tied_output_first, loads=True), after, tmp_path)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
