"""Steps that offload take on a device's streams what the simulator says, by the real runtime's own waits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
import volume
from plain_costs import PlainNetwork, make_costs
from ranks import RunRanks
from timed_streams import Speeds, TimedStreams
from tiny import Case, module_names

from zorselike import HeteroPipeline
from zorselike.cost.network import Flow
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.schedule import ScheduleSpec, build
from zorselike.simulator import simulate
from zorselike.simulator.tasks.copies import HostCopies

NUM_STEPS = 4
SINGLE = range(200, 212)
"""Seeds of plans with a single ministage."""
SEEDS = (*volume.part(range(30)), *(105, 189), *volume.part(SINGLE))
"""With 105 and 189 nobody must wait for copies to the host that begin at the end of a step."""


@dataclass(frozen=True)
class Run:
    """Training of a small model on one rank."""

    case: Case
    speeds: Speeds
    param_dtype: torch.dtype | None
    max_norm: float | None

    @property
    def rows(self) -> list[int]:
        return [microbatch.num_rows for microbatch in self.case.plan.microbatches_of_rank(0)]


@dataclass(frozen=True)
class Found:
    """What the runtime did."""

    step_s: float
    shard_bytes: tuple[int, ...]
    """Of each ministage what is offloaded, if that is asked for."""
    gradient_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    kept_bytes: dict[tuple[int, int], int]
    """Activations, by ministage and microbatch."""


class OwnRates(PlainNetwork):
    """Copies do not share the host's link, as `TimedStreams` has it."""

    def copy(self, rank: int, num_bytes: float, *, to_device: bool) -> Flow:
        return Flow(num_bytes, (), self.host_rate)


def make_run(seed: int) -> Run:
    rng = random.Random(seed)
    num_layers = rng.randint(2, 4)
    names = module_names(num_layers)
    num_ministages = 1 if seed in SINGLE else rng.randint(2, min(5, len(names)))
    cuts = [0, *sorted(rng.sample(range(1, len(names)), num_ministages - 1)), len(names)]
    rows = [0, *accumulate(rng.randint(1, 2) for _ in range(rng.randint(1, 4)))]
    group = Group(
        (0,),
        tuple(Microbatch(0, start, stop) for start, stop in pairwise(rows)),
        zero=rng.randint(0, 3),
        offload=tuple(kind for kind in OFFLOAD_KINDS if rng.random() < 0.6),
        recompute=rng.choice(("none", "layer")),
    )
    ministages = tuple(Ministage(0, tuple(names[start:stop])) for start, stop in pairwise(cuts))
    forward_s = tuple(rng.uniform(0.5, 2) for _ in ministages)
    return Run(
        Case(Plan(rows[-1], (group,), ministages).validate(), num_layers),
        Speeds(
            forward_s,
            tuple(2 * seconds for seconds in forward_s),
            tuple(rng.uniform(0.1, 2) for _ in ministages),
            rng.choice((300.0, 1e3, 4e3, 2e4)),
        ),
        rng.choice((None, torch.bfloat16)),
        rng.choice((None, None, 0.5)),
    )


def train(run: Run) -> Found:
    """The time of a step once steps are alike, and what it copies."""
    streams = TimedStreams(run.speeds, run.rows)
    model = run.case.model()
    with streams.running():
        pipe = HeteroPipeline(
            model if run.param_dtype is None else model.float(),
            run.case.plan,
            optimizer=streams.adamw,
            param_dtype=run.param_dtype,
            max_norm=run.max_norm,
        )
        ends = []
        for step in range(NUM_STEPS):
            pipe.step_global(*run.case.batch(step))
            ends.append(streams.now_s)
        executor = pipe._executor
        own = executor._ministages.values()
        stash = executor._resources.activations
        found = Found(
            ends[-1] - ends[-2],
            tuple(sum(mirror.num_bytes for mirror in ministage.shards.host_backed()) for ministage in own),
            tuple(ministage.sizes.gradient_shard_bytes for ministage in own),
            tuple(sum(mirror.num_bytes for mirror in ministage.state.host_backed()) for ministage in own),
            {} if stash is None else dict(stash.kept_bytes),  # type: ignore[arg-type]
        )
        pipe.close()
    return found


def train_all(rank: int, world_size: int, seeds: Sequence[int]) -> list[Found]:
    return [train(make_run(seed)) for seed in seeds]


def predict(run: Run, found: Found, monkeypatch: pytest.MonkeyPatch) -> float:
    """The simulator's time of the step, of copies of the same bytes."""
    plan, speeds = run.case.plan, run.speeds
    masters = run.param_dtype is not None
    costs = make_costs(
        plan,
        forward=lambda _, i, rows: speeds.forward_s[i] * rows,
        backward=lambda _, i, rows: speeds.backward_s[i] * rows,
        update=lambda _, i: speeds.update_s[i],
        network=OwnRates([0], host_rate=speeds.bytes_per_s),
    )
    sizes = {
        i: replace(
            costs.sizes[0][i],
            shard_bytes=found.shard_bytes[i],
            gradient_shard_bytes=found.gradient_bytes[i],
            state_bytes=found.state_bytes[i],
        )
        for i in range(plan.num_ministages)
    }
    monkeypatch.setattr(HostCopies, "_activation_bytes", lambda _, i, m: found.kept_bytes.get((i, m), 0))
    actions = build(ScheduleSpec(plan, masters=masters, defer_steps=run.max_norm is not None))
    return simulate(plan, actions, replace(costs, sizes=(sizes,))).iteration_s


@pytest.mark.nightly
def test_steps_take_what_the_runtime_s_waits_make_of_them(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = run_ranks(train_all, 1, SEEDS)
    for seed, found in zip(SEEDS, own, strict=True):
        run = make_run(seed)
        predicted_s = predict(run, found, monkeypatch)
        assert predicted_s == pytest.approx(found.step_s, rel=1e-6), (seed, run.case.plan.groups[0])
