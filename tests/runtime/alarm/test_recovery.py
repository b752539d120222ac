"""A step that breaks off on a rank alone leaves nothing behind: the next is as if it had not begun."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import volume
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from zorselike import HeteroPipeline
from zorselike.errors import ConfigError
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
CUTS = (NAMES[:2], NAMES[2:4], NAMES[4:])
NUM_RUNS = 3
Outcome = tuple[list[float], dict[str, Tensor]]


class Broken(Exception):
    """What a test breaks a step with."""


@dataclass(frozen=True)
class Setting:
    """Updates are deferred, so that a step that breaks off before them changes nothing at all."""

    offload: tuple[str, ...] = OFFLOAD_KINDS
    zero: int = 2
    recompute: str = "none"
    dtype: torch.dtype | None = None
    grad_reduce: str = "once"
    cuts: Sequence[Sequence[str]] = CUTS

    @property
    def case(self) -> Case:
        own = tuple(Microbatch(0, *rows) for rows in ((0, 1), (1, 3), (3, 4)))
        group = Group((0,), own, zero=self.zero, offload=self.offload)
        group = replace(group, recompute=self.recompute, grad_reduce=self.grad_reduce)  # type: ignore[arg-type]
        plan = Plan(4, (group,), tuple(Ministage(0, tuple(cut)) for cut in self.cuts))
        return Case(plan, NUM_LAYERS, tied=True, max_norm=0.5)

    def build(self) -> HeteroPipeline:
        case = self.case
        model = case.model() if self.dtype is None else case.model().float()
        return HeteroPipeline(
            model, case.plan, optimizer=adamw, param_dtype=self.dtype, max_norm=case.max_norm
        )


def go_on(pipe: HeteroPipeline, case: Case) -> Outcome:
    """Two steps and an evaluation."""
    results = [pipe.step_global(*case.batch(1)), pipe.step_global(*case.batch(2))]
    numbers = [number for result in results for number in (result.loss, result.grad_norm)]
    numbers.append(pipe.evaluate_global(*case.batch(3)).loss)
    return numbers, pipe.full_state_dict()


def is_same(ours: Outcome, theirs: Outcome) -> bool:
    return ours[0] == theirs[0] and all(torch.equal(ours[1][name], w) for name, w in theirs[1].items())


def break_step(pipe: HeteroPipeline, case: Case, *, before: int, error: type[BaseException] = Broken) -> str:
    """Breaks a step before its action of that number; that action."""
    executor = pipe._executor
    enter, count = executor.enter, -1

    def stop(action: Any) -> None:
        nonlocal count
        count += 1
        if count == before:
            raise error(str(action))
        enter(action)

    executor.enter = stop
    with pytest.raises(error) as broken:
        pipe.step_global(*case.batch(1))
    executor.enter = enter
    return str(broken.value)


def break_everywhere(rank: int, world_size: int, setting: Setting) -> list[list[str]]:
    """Actions up to the norm, before each of which a step breaks off; those lists of them after which
    training does not go on as it should."""
    case, pipe = setting.case, setting.build()
    pipe.step_global(*case.batch(0))
    texts = [str(action) for action in pipe._assembly.compiled.step_actions[pipe.rank]]
    expected = go_on(pipe, case)
    pipe.close()
    found = []
    for first in range(NUM_RUNS):
        pipe = setting.build()
        pipe.step_global(*case.batch(0))
        numbers = range(first, texts.index("NORM") + 1, NUM_RUNS)
        broken = [break_step(pipe, case, before=number) for number in numbers]
        assert broken == [texts[number] for number in numbers]
        if not is_same(go_on(pipe, case), expected):
            found.append(broken)
        pipe.close()
    return found


@volume.parametrize(
    "setting",
    [
        Setting(offload=()),
        Setting(),
        Setting(zero=0),
        Setting(zero=3, recompute="layer"),
        Setting(dtype=torch.bfloat16, recompute="layer"),
        Setting(dtype=torch.float16, grad_reduce="microbatch"),
        *(Setting(zero=zero, cuts=(NAMES,)) for zero in (0, 2, 3)),
        Setting(dtype=torch.bfloat16, grad_reduce="microbatch", recompute="layer", cuts=(NAMES,)),
    ],
    least=3,
)
def test_a_step_may_break_off_before_any_action(setting: Setting, run_ranks: RunRanks) -> None:
    assert run_ranks(break_everywhere, 1, setting, timeout=180) == [[]]


def break_twice(rank: int, world_size: int, setting: Setting) -> list[str]:
    """Breaks every step at its end, where updates have begun, and looks that the next ones run."""
    case, pipe = setting.case, setting.build()
    texts = [str(action) for action in pipe._assembly.compiled.step_actions[pipe.rank]]
    for number in range(texts.index("NORM") + 1, len(texts)):
        break_step(pipe, case, before=number)
        break_step(pipe, case, before=number // 2)
        numbers, _ = go_on(pipe, case)
        assert all(map(math.isfinite, numbers))
        ledger = pipe._assembly.resources.memory.ledger
        assert ledger.held("activations", "device") == ledger.held("gradient shards", "device") == 0
    pipe.close()
    return texts


@pytest.mark.parametrize("setting", [Setting(), Setting(zero=3, dtype=torch.bfloat16)])
def test_steps_break_off_again_and_again(setting: Setting, run_ranks: RunRanks) -> None:
    assert "NORM" in run_ranks(break_twice, 1, setting, timeout=120)[0]


def interrupt(rank: int, world_size: int, setting: Setting) -> list[str]:
    """Actions before which Ctrl-C, caught as in a notebook, changes what follows."""
    case, pipe = setting.case, setting.build()
    texts = [str(action) for action in pipe._assembly.compiled.step_actions[pipe.rank]]
    pipe.step_global(*case.batch(0))
    expected = go_on(pipe, case)
    pipe.close()
    found = []
    for number in range(1, texts.index("NORM") + 1, 6):
        pipe = setting.build()
        pipe.step_global(*case.batch(0))
        break_step(pipe, case, before=number, error=KeyboardInterrupt)
        if not is_same(go_on(pipe, case), expected):
            found.append(texts[number])
        pipe.close()
    return found


@pytest.mark.parametrize("setting", [Setting(offload=()), Setting()])
def test_a_step_may_be_interrupted(setting: Setting, run_ranks: RunRanks) -> None:
    assert run_ranks(interrupt, 1, setting, timeout=120) == [[]]


# -- errors of the user's own ----------------------------------------------------------------------


class Fragile(torch.autograd.Function):
    """Raises in one of its forwards or backwards."""

    countdown: ClassVar[dict[str, int]] = {"forward": -1, "backward": -1}

    @classmethod
    def count(cls, which: str) -> None:
        cls.countdown[which] -= 1
        if cls.countdown[which] == 0:
            raise Broken(which)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Fragile.count("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Fragile.count("backward")
        return grads[0]


def break_in_user_code(rank: int, world_size: int, setting: Setting) -> list[str]:
    """Where an error in a layer, in either direction, changes what follows."""
    case = setting.case

    def fragile(pipe: HeteroPipeline) -> HeteroPipeline:
        for ministage in pipe._assembly.ministages.values():
            for name, module in ministage.module.named_modules():
                if name.endswith(".up"):
                    make_fragile(module)
        pipe.step_global(*case.batch(0))
        return pipe

    pipe = fragile(setting.build())
    expected = go_on(pipe, case)
    pipe.close()
    found = []
    for which in ("forward", "backward"):
        pipe = fragile(setting.build())
        for calls in (1, 4, 9):
            Fragile.countdown[which] = calls
            with pytest.raises(Broken, match=which):
                pipe.step_global(*case.batch(1))
            if which == "backward" and not hasattr(FSDPModule, "reset_iter_state"):  # Before torch 2.13.
                with pytest.raises(ConfigError, match="build another one"):
                    go_on(pipe, case)
                return found
        if not is_same(go_on(pipe, case), expected):
            found.append(which)
        pipe.close()
    return found


def make_fragile(module: nn.Module) -> None:
    forward: Callable[[Tensor], Tensor] = module.forward
    module.forward = lambda x: Fragile.apply(forward(x))  # type: ignore[no-untyped-call,method-assign]


@pytest.mark.parametrize(
    "setting", [Setting(offload=()), Setting(), Setting(zero=3), Setting(zero=0), Setting(recompute="layer")]
)
def test_a_layer_may_raise_in_either_direction(setting: Setting, run_ranks: RunRanks) -> None:
    assert run_ranks(break_in_user_code, 1, setting, timeout=120) == [[]]


def fail_evaluation(rank: int, world_size: int, offload: Sequence[str]) -> bool:
    setting = Setting(offload=tuple(offload))
    case, pipe = setting.case, setting.build()
    pipe.step_global(*case.batch(0))
    expected = go_on(pipe, case)
    pipe.close()
    pipe = setting.build()
    pipe.step_global(*case.batch(0))
    executor = pipe._executor
    enter = executor.enter
    for number in (2, 5, 8):
        left = iter(range(number))

        def stop(action: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise Broken
            enter(action)

        executor.enter = stop
        with pytest.raises(Broken):
            pipe.evaluate_global(*case.batch(1))
    executor.enter = enter
    found = go_on(pipe, case)
    pipe.close()
    return is_same(found, expected)


@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
def test_an_evaluation_may_break_off(offload: Sequence[str], run_ranks: RunRanks) -> None:
    assert run_ranks(fail_evaluation, 1, offload) == [True]
