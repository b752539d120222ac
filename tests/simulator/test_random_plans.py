"""Rules that hold for whatever plan is simulated."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import volume
from plain_costs import PlainNetwork, make_costs
from schedules import Lists, random_spec

from zorselike.cost.step_costs import StepCosts
from zorselike.schedule import build
from zorselike.schedule.actions import SENDS, TRANSFERS, Kind
from zorselike.simulator import Simulation, simulate

pytestmark = [pytest.mark.nightly, pytest.mark.parametrize("block", range(4))]
PER_BLOCK = 25


class Case:
    """A plan, its lists, and what they cost."""

    def __init__(self, seed: str) -> None:
        rng = random.Random(seed)
        self.spec = random_spec(rng, small=rng.random() < 0.9, replicas=rng.random() < 0.3)
        self.plan = self.spec.plan
        self.lists: Lists = build(self.spec)
        self._rng_seed = seed
        self.costs = self.make_costs()

    def make_costs(self, *, seconds: float = 1.0, rate: float = 1.0, cpu: bool | None = None) -> StepCosts:
        """`seconds` multiplies every time and latency, `rate` every rate."""
        rng = random.Random(self._rng_seed + "costs")
        ranks = sorted(self.plan.group_of_rank)
        speed = {rank: rng.choice([1.0, 1.0, 1.7, 3.1]) for rank in ranks}
        num_nodes = rng.randint(1, len(ranks))
        network = PlainNetwork(
            [rng.randrange(num_nodes) for _ in ranks],
            rate=rng.choice([0.7, 5.0, 50.0]) * rate,
            host_rate=rng.choice([1.3, 40.0]) * rate,
            latency_s=rng.choice([0.0, 0.01]) * seconds,
        )
        is_cpu = rng.random() < 0.5
        return make_costs(
            self.plan,
            forward=lambda rank, i, rows: speed[rank] * (0.1 + rows) * seconds,
            update=lambda rank, i: 0.3 * speed[rank] * seconds,
            network=network,
            row_bytes=rng.choice([0, 2]),
            unit_bytes=rng.choice([0, 4]),
            num_units=rng.randint(1, 3),
            is_cut=rng.random() < 0.7,
            cpu=is_cpu if cpu is None else cpu,
            eager_bytes=rng.choice([0, 3, math.inf]),
            tie_bytes=dict.fromkeys(self.spec.ties, 3),
            host_s={"F": 0.02 * seconds} if rng.random() < 0.3 else {},
            overlap_slowdown=rng.choice([1.0, 1.0, 1.25]),
        )

    def run(self, costs: StepCosts | None = None, *, num_steps: int | None = None) -> Simulation:
        return simulate(self.plan, self.lists, costs or self.costs, num_steps=num_steps, record=True)


def cases(block: int, *, least: int = 5) -> list[Case]:
    return [Case(f"{block}/{number}") for number in volume.part(range(PER_BLOCK), least=least)]


def test_where_the_time_went_adds_up(block: int) -> None:
    for case in cases(block):
        found = case.run()
        for rank, times in enumerate(found.ranks):
            parts = (
                times.busy_s,
                times.waiting_for_data_s,
                times.exposed_communication_s,
                times.exposed_copies_s,
            )
            assert sum(parts) == pytest.approx(found.iteration_s, rel=1e-9)
            assert min(parts) >= 0
            computed = times.forward_s + times.backward_s
            if case.spec.trainable is None and not case.spec.forward_only:
                # A whole step of the rank lies in one iteration. Without a backward of the first ministages
                # nothing keeps ranks from running ahead, more with every step.
                assert times.busy_s >= computed * (1 - 1e-9)
            expected = expected_seconds(case, rank)
            assert computed >= expected * (1 - 1e-9)
            if case.costs.overlap_slowdown == 1.0:
                assert computed == pytest.approx(expected)
            assert found.iteration_s >= computed * (1 - 1e-9)


def expected_seconds(case: Case, rank: int) -> float:
    """Of a rank's forwards and backwards, by its list."""
    rows = [microbatch.num_rows for microbatch in case.plan.microbatches_of_rank(rank)]
    seconds = 0.0
    for action in case.lists[rank]:
        assert action.microbatch is not None or action.kind not in (Kind.F, Kind.B)
        if action.kind in (Kind.F, Kind.B) and (action.microbatch or 0) < len(rows):
            times = case.costs.forward_s if action.kind is Kind.F else case.costs.backward_s
            seconds += times[rank, action.ministage or 0, rows[action.microbatch or 0]]
    return seconds


def test_spans_of_a_track_do_not_overlap(block: int) -> None:
    for case in cases(block):
        found = case.run()
        tracks = defaultdict(list)
        for span in found.spans:
            assert span.start_s < span.stop_s
            if span.action.kind in TRANSFERS:
                track: tuple[object, ...] = (span.rank, span.track, span.action.peer, span.action.kind)
            elif span.track in ("send", "receive"):
                continue  # Slices of tied weights travel side by side.
            else:
                # Shards, optimizer state and activations have streams of their own.
                track = (span.rank, span.track)
                if span.track in ("to device", "to host"):
                    track = (*track, span.action.kind in (Kind.LOAD_STATE, Kind.LOAD_GRAD))
                    track = (*track, span.action.microbatch is None)
            tracks[track].append(span)
        for spans in tracks.values():
            spans.sort(key=lambda span: span.start_s)
            for before, after in pairwise(spans):
                assert before.stop_s <= after.start_s + 1e-9


def test_actions_follow_each_other_in_a_cpu_rank_s_thread(block: int) -> None:
    for case in cases(block):
        found = case.run(case.make_costs(cpu=True))
        assert found.action_times is not None
        for rank, times in found.action_times.items():
            assert len(times) == len(case.lists[rank])
            for (_, stop), (start, _) in pairwise(times):
                assert stop <= start + 1e-9


def test_the_same_case_gives_the_same_result(block: int) -> None:
    for case in cases(block)[::5]:
        first, second = case.run(), Case(case._rng_seed).run()
        assert first.iteration_s == second.iteration_s
        assert first.spans == second.spans and first.ranks == second.ranks


def test_times_scale_with_all_costs(block: int) -> None:
    for case in cases(block):
        once = case.run()
        twice = case.run(case.make_costs(seconds=2.0, rate=0.5))
        # A power of two: not even round-off differs.
        assert twice.iteration_s == 2 * once.iteration_s
        assert [t.exposed_communication_s for t in twice.ranks] == [
            2 * t.exposed_communication_s for t in once.ranks
        ]


def test_a_later_step_is_like_the_last_one(block: int) -> None:
    for case in cases(block)[::3]:
        assert case.run(num_steps=6).iteration_s == pytest.approx(case.run().iteration_s, rel=1e-6)


def test_bytes_on_the_wires_are_those_of_the_actions(block: int) -> None:
    for case in cases(block):
        network = PlainNetwork(sorted(case.plan.group_of_rank))
        costs = replace(case.make_costs(), network=network)  # type: ignore[arg-type]
        costs = replace(costs, units=((),) * case.plan.num_ministages, tie_bytes={})
        found = case.run(costs)
        for rank, own in case.lists.items():
            sent = sum(
                ((a.stop or 0) - (a.start or 0))
                * costs.row_bytes[(a.ministage or 0) + (1 if a.kind is Kind.SEND_F else 0)]
                * (1 if a.positions is None else (a.positions[1] - a.positions[0]) / case.spec.num_positions)
                for a in own
                if a.kind in SENDS
            )
            norm = 0.0
            if case.plan.num_ranks > 1 and any(a.kind is Kind.NORM for a in own):
                norm = 8 * 2 * (case.plan.num_ranks - 1) / case.plan.num_ranks
            assert found.bytes_by_link.get(f"node {rank}, out", 0.0) == pytest.approx(sent + norm)


def test_faster_wires_do_not_slow_a_step_down(block: int) -> None:
    """Not a law: who comes first on a shared wire may change, and the other one be the urgent one. So a
    little is allowed, and the mean must be clearly better."""
    ratios = []
    for case in cases(block, least=PER_BLOCK):
        costs = replace(case.costs, overlap_slowdown=1.0)
        slow = case.run(costs).iteration_s
        network = costs.network
        faster = PlainNetwork(
            network.nodes,  # type: ignore[attr-defined]
            rate=network.rate * 4,  # type: ignore[attr-defined]
            host_rate=network.host_rate * 4,  # type: ignore[attr-defined]
        )
        ratios.append(case.run(replace(costs, network=faster)).iteration_s / slow)  # type: ignore[arg-type]
    assert max(ratios) <= 1.02
    assert sum(ratios) / len(ratios) < 0.99
