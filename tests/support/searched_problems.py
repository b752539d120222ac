"""Questions to the planner for tests of its parts: small clusters, and candidates drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from scipy.stats import spearmanr

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.candidate.candidate import CandidatePlan
from zorselike.planner.candidate.choice import Choice, GroupChoice
from zorselike.planner.candidate.layer_table import LayerTable
from zorselike.planner.candidate.modes import list_families
from zorselike.planner.candidate.to_plan import make_plan
from zorselike.planner.estimate.memory import RankMemory
from zorselike.planner.estimate.step_time import StepTimeEstimate
from zorselike.planner.groups.bandwidths import read_bandwidths
from zorselike.planner.groups.candidates import find_groupings
from zorselike.planner.groups.replicas import DEGREES, Degrees
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.builder import CandidateBuilder
from zorselike.simulator.simulated_plan import SimulatedPlan

TYPES = ("A100-40", "T4", "V100-16", "A10G", "H100-SXM")
WIDTH = 2048


def make_decoder(num_layers: int = 10, *, tokens: int = 512, ties: bool = False) -> Workload:
    """A model of embedding, layers and head in float16."""
    boundary, vocabulary = tokens * WIDTH, 32000 * WIDTH
    matrix = 12 * WIDTH**2
    kinds = {
        "embedding": LayerKind(
            name="embedding",
            num_parameters=vocabulary,
            forward_flops_per_row=0.0,
            output_elements_per_row=boundary,
            activation_bytes_per_row=8 * tokens,
        ),
        "layer": LayerKind(
            name="layer",
            num_parameters=matrix,
            forward_flops_per_row=2.0 * matrix * tokens,
            input_elements_per_row=boundary,
            output_elements_per_row=boundary,
            activation_bytes_per_row=34 * boundary,
            working_bytes_per_row=8 * boundary,
        ),
        "head": LayerKind(
            name="head",
            num_parameters=0 if ties else vocabulary,
            num_borrowed=vocabulary if ties else 0,
            forward_flops_per_row=2.0 * vocabulary * tokens,
            input_elements_per_row=boundary,
            output_elements_per_row=tokens * 32000,
            activation_bytes_per_row=8 * tokens * 32000,
        ),
    }
    layers = tuple((f"layers.{i}", "layer") for i in range(num_layers))
    return Workload(
        model="decoder",
        sequence_length=tokens,
        dtype="float16",
        layers=(("embed", "embedding"), *layers, ("head", "head")),
        kinds=kinds,
        ties=(("embed", "head"),) if ties else (),
    )


def draw_problem(rng: random.Random, **changes: object) -> PlanProblem:
    """One to four nodes of one type each."""
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=(rng.choice(TYPES),) * rng.choice([1, 2, 4]),
            fabric=Link(rng.choice([10e9, 100e9]), 5e-6),
            nic=Link(rng.choice([3e9, 12e9]), 2e-5),
            host_memory_bytes=2**38,
        )
        for i in range(rng.randint(1, 4))
    )
    workload = make_decoder(ties=rng.random() < 0.3)
    settings = {
        "workload": workload,
        "cluster": Cluster(nodes=nodes, default_link=Link(12e9, 2e-5)),
        "profile": Profile(model="decoder"),
        "global_batch": rng.choice([8, 32, 64]),
    }
    return PlanProblem(**{**settings, **changes})  # type: ignore[arg-type]


@dataclass
class Bench:
    """The parts of a search, for one problem."""

    problem: PlanProblem

    def __post_init__(self) -> None:
        clock = LayerTimeModel(self.problem.profile, self.problem.workload)
        self.table = LayerTable(self.problem.workload, clock, self.problem.replicas.exchange_s)
        self.step_time = StepTimeEstimate(self.problem, self.table)
        self.memory = RankMemory(self.problem, self.table, clock.kept_bytes)
        self.builder = CandidateBuilder(self.problem, self.table, self.step_time, self.memory)

    def draw_candidate(self, rng: random.Random) -> CandidatePlan | None:
        """Any groups, modes, rounds and ministages, and replicas where layers can be cut; None where they do
        not fit."""
        bandwidths = read_bandwidths(self.problem.cluster)
        grouping = rng.choice(find_groupings(bandwidths))
        modes = [mode for family in list_families(Fixed()) for mode in family]
        groups = tuple(
            GroupChoice(
                own, rng.choice(modes), rng.choice([1, 2, 4, 8]), degrees=self._draw_degrees(own, rng)
            )
            for own in grouping.groups
        )
        num_ministages = rng.choice([1, 2, 3]) * len(groups)
        return self.builder.build(Choice(groups, min(len(self.table.keys), num_ministages)))

    def _draw_degrees(self, devices: tuple[int, ...], rng: random.Random) -> Degrees:
        """Of each type its own."""
        most = self.problem.replicas.most_by_type(devices)
        drawn = ((device, min(degree, rng.choice(DEGREES))) for device, degree in sorted(most.items()))
        return tuple((device, degree) for device, degree in drawn if degree > 1)

    def draw_candidate_in_flight(self, rng: random.Random) -> CandidatePlan | None:
        """With bounds on microbatches in flight; None where it does not fit."""
        bandwidths = read_bandwidths(self.problem.cluster)
        grouping = rng.choice(find_groupings(bandwidths))
        if not 1 < len(grouping.groups) <= len(self.table.keys):
            return None
        modes = [mode for family in list_families(Fixed()) for mode in family if mode.may_bound_in_flight]
        groups = tuple(
            GroupChoice(
                own, rng.choice(modes), rng.choice([2, 4, 8, 16]), degrees=self._draw_degrees(own, rng)
            )
            for own in grouping.groups
        )
        number = min(len(self.table.keys), len(groups) * rng.choice([1, 1, 2, 3]) + rng.choice([0, 0, 1]))
        return self.builder.build(Choice(groups, 1).bound(rng.choice([1.0, 1.5, 2.0, 3.0]), number))


class Simulated(NamedTuple):
    """A candidate that was drawn at random, and its plan as simulated."""

    bench: Bench
    candidate: CandidatePlan
    case: SimulatedPlan


def simulate_candidates(
    seed: int,
    number: int,
    draw: Callable[[Bench, random.Random], CandidatePlan | None],
    *,
    draw_changes: Callable[[random.Random], dict[str, object]] = lambda rng: {},
    is_wanted: Callable[[CandidatePlan], bool] = lambda candidate: True,
) -> list[Simulated]:
    """Random candidates, about so many; `draw_changes`: of problems, as `draw_problem` takes them."""
    rng = random.Random(seed)
    found: list[Simulated] = []
    while len(found) < number:
        bench = Bench(draw_problem(rng, **draw_changes(rng)))
        for _ in range(3):
            candidate = draw(bench, rng)
            if candidate is not None and is_wanted(candidate):
                plan = make_plan(candidate, bench.problem, bench.table).validate()
                found.append(Simulated(bench, candidate, bench.problem.setting.simulate(plan)))
    return found


def check_times(
    simulated: Sequence[Simulated], *, middle: tuple[float, float], tenths: tuple[float, float]
) -> None:
    """Asserts that estimates of time rank candidates as the simulator does.

    Args:
        middle: between what the median of estimate over simulation is.
        tenths: what all but a tenth are above, and all but a tenth below.
    """
    pairs = [
        (own.bench.step_time.estimate_s(own.candidate), own.case.simulation.iteration_s) for own in simulated
    ]
    ratios = sorted(estimate / real for estimate, real in pairs)
    assert middle[0] < median(ratios) < middle[1]
    assert ratios[len(ratios) // 10] > tenths[0] and ratios[-len(ratios) // 10] < tenths[1]
    assert spearmanr(*zip(*pairs, strict=True)).statistic > 0.9
