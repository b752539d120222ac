"""Offloading changes where bytes are, never what they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import pytest
import torch
import volume
from cases import CASES
from offloaded import IN_PLACE
from ranks import RunRanks
from tiny import Case, adamw, with_groups
from torch import Tensor

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS, Plan
from zorselike.runtime.memory_report import MemoryLine
from zorselike.runtime.ministage.sharding import local_tensor

pytestmark = pytest.mark.pooled

SUBSETS = list(chain.from_iterable(combinations(OFFLOAD_KINDS, n) for n in (1, 2, 3)))
ALIGNMENT_BYTES = 64 * 200
"""Of at most so many host buffers."""
NUM_SETTINGS = 36
"""Of the random cases so many have every kind of offload under every ZeRO stage; see the first test."""
NUM_STEPS = 2
DTYPES = (None, None, torch.bfloat16)


@dataclass(frozen=True)
class Setting:
    """A case, and how its groups offload."""

    case: Case
    offload: tuple[tuple[str, ...], ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Numbers:
    """All that a training run shows of itself."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluations: tuple[float, ...]
    weights: dict[str, Tensor]
    states: list[Tensor]
    memory: tuple[MemoryLine, ...]


def make_setting(number: int) -> Setting:
    """Every group of a case with a random subset, at least one of them not empty. Where microbatches in
    flight are bounded that is the optimizer; half of these cases are taken without bounds."""
    rng = random.Random(number)
    case = CASES[number]
    if case.plan.bounds_in_flight and rng.random() < 0.5:
        case = replace(case, plan=with_groups(case.plan, lambda g: replace(g, max_in_flight=None)))
    subsets = [("optimizer",)] if case.plan.bounds_in_flight else SUBSETS
    offload = [rng.choice(subsets) for _ in case.plan.groups]
    return Setting(case, tuple(offload), rng.choice(DTYPES))


SETTINGS = [make_setting(number) for number in range(NUM_SETTINGS)]


def with_offload(plan: Plan, offload: Sequence[tuple[str, ...]]) -> Plan:
    groups = [replace(group, offload=kinds) for group, kinds in zip(plan.groups, offload, strict=True)]
    return replace(plan, groups=tuple(groups))


def train(setting: Setting, *, offload: bool) -> Numbers:
    """A few steps, with this rank's weights and moments at the end."""
    case = setting.case
    plan = with_offload(case.plan, setting.offload) if offload else case.plan
    model = case.model() if setting.dtype is None else case.model().float()
    pipe = HeteroPipeline(
        model, plan, optimizer=adamw, max_norm=case.max_norm, seed=case.seed, param_dtype=setting.dtype
    )
    results, evaluations = [], []
    for step in range(NUM_STEPS):
        if step in case.evaluate_before:
            evaluations.append(pipe.evaluate_global(*case.batch(step)))
        results.append(pipe.step_global(*case.batch(step)))
    memory = pipe.memory_report().lines
    with pipe.loaded():
        states = [state.clone() for state in states_of(pipe)]
    numbers = Numbers(
        tuple(result.loss for result in results),
        tuple(result.grad_norm for result in results),
        tuple(result.loss for result in evaluations),
        pipe.full_state_dict(),
        states,
        memory,
    )
    pipe.close()
    return numbers


def states_of(pipe: HeteroPipeline) -> list[Tensor]:
    """This rank's parameters and moments, in order."""
    found: list[Tensor] = []
    for _, optimizer in sorted(pipe.optimizers.items()):
        for parameter in optimizer.param_groups[0]["params"]:
            found.append(local_tensor(parameter.detach()))
            state = optimizer.state[parameter]
            found += [local_tensor(state[key]) for key in ("exp_avg", "exp_avg_sq")]
    return found


def compare_all(rank: int, world_size: int, settings: Sequence[Setting]) -> list[str]:
    """Which settings differ, in anything, from keeping everything on the device, or need other memory
    than was planned."""
    complaints = []
    for setting in settings:
        ours, theirs = train(setting, offload=True), train(setting, offload=False)
        if not is_equal(ours, theirs):
            complaints.append(f"differs: {setting}")
        frozen = bool(setting.case.frozen)
        complaints += [
            f"{line}: {setting}"
            for line in (*ours.memory, *theirs.memory)
            if not is_as_planned(line, frozen=frozen)
        ]
    return complaints


def is_as_planned(line: MemoryLine, *, frozen: bool) -> bool:
    """What is moved as a whole is planned exactly; the rest never needs more than was planned. (Where
    layers are frozen, shards are on the device before the first step that no step has there at once.)"""
    planned, found = line.device_planned, line.device_peak
    if frozen and line.purpose == "parameter shards" and planned is not None:
        return found is None or found <= planned + (line.host_planned or 0)
    exact = line.purpose in ("parameter shards", "optimizer state", "gradient shards")
    on_device = planned is None or found is None or (planned == found if exact else planned >= found)
    planned, found = line.host_planned, line.host_peak
    return on_device and (planned is None or found is None or planned + ALIGNMENT_BYTES >= found)


def is_equal(ours: Numbers, theirs: Numbers) -> bool:
    same_numbers = (ours.losses, ours.norms, ours.evaluations) == (
        theirs.losses,
        theirs.norms,
        theirs.evaluations,
    )
    return (
        same_numbers
        and ours.weights.keys() == theirs.weights.keys()
        and all(torch.equal(ours.weights[name], theirs.weights[name]) for name in ours.weights)
        and len(ours.states) == len(theirs.states)
        and all(torch.equal(a, b) for a, b in zip(ours.states, theirs.states, strict=True))
    )


def test_the_settings_cover_what_they_should() -> None:
    groups = [
        (group, kinds, setting)
        for setting in SETTINGS
        for group, kinds in zip(setting.case.plan.groups, setting.offload, strict=True)
    ]
    for zero in range(4):
        for kind in OFFLOAD_KINDS:
            assert sum(group.zero == zero and kind in kinds for group, kinds, _ in groups) >= 4
    assert sum(setting.dtype is not None for setting in SETTINGS) >= 10
    deferred = [
        s for s in SETTINGS if s.case.max_norm is not None and any("optimizer" in k for k in s.offload)
    ]
    assert len(deferred) >= 10
    assert sum(setting.case.plan.bounds_in_flight for setting in SETTINGS) >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", range(1, 8))
def test_offloading_is_bit_equal(num_ranks: int, run_ranks: RunRanks) -> None:
    settings = volume.part([s for s in SETTINGS if s.case.plan.num_ranks == num_ranks])
    for differing in run_ranks(compare_all, num_ranks, settings, timeout=300):
        assert differing == []


def replace_moments(rank: int, world_size: int) -> list[Tensor]:
    """Between steps, by zeros with the ids of those that go, as a load may; then what they are."""
    with IN_PLACE.build(("optimizer",)) as pipe:
        pipe.step_global(*IN_PLACE.case(()).batch(0))
        moments = []
        with pipe.loaded():
            for parameter, state in pipe.optimizers[0].state.items():
                for key in ("exp_avg", "exp_avg_sq"):
                    old, others = id(state.pop(key)), [torch.zeros_like(parameter)]
                    while id(others[-1]) != old and len(others) < 10_000:
                        others.append(torch.zeros_like(parameter))
                    assert id(others[-1]) == old, "the test needs an id that comes again"
                    state[key] = others.pop()
                    moments.append(state[key])
        assert not any(moment.untyped_storage().nbytes() for moment in moments)
        with pipe.loaded():
            return [moment.clone() for moment in moments]


def test_moments_that_take_the_place_of_others_are_offloaded_whatever_their_ids(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(replace_moments, 1)
    assert found and not any(moment.any() for moment in found)
