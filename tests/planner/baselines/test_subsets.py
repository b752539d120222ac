"""Baselines that may leave devices out."""

from __future__ import annotations

from dataclasses import replace

import device_problems

from zorselike.plan.cluster.cluster import Link
from zorselike.planner.baselines.subsets import NAME, plan_best_on_subsets
from zorselike.planner.baselines.systems import plan_baselines


def test_the_best_of_any_subset_is_as_good_as_the_best_of_all_and_says_of_whom():
    fast = device_problems.make_nodes("a", "A100-40 A100-40", 1, 4.0, zone="a")
    slow = device_problems.make_nodes("t", "T4 T4", 1, 4.0, zone="b")
    problem = device_problems.make_problem(fast, slow, global_batch=16, links={"default_link": Link(1e5)})
    baselines = plan_baselines(problem)
    for wanted in ("throughput", "cost"):
        asked = replace(problem, objective=wanted)
        found = plan_best_on_subsets(asked, baselines, used=(0, 1))
        assert found.name == NAME and found.simulated is not None
        measures = [
            own.simulated.simulation.cost if wanted == "cost" else own.simulated.simulation.iteration_s
            for own in (*baselines, found)
            if own.simulated is not None
        ]
        assert measures[-1] == min(measures)
        assert " on " in found.how
