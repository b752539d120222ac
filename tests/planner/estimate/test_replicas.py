"""What the search estimates of tensor-parallel replicas, against the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searched_problems import Bench, check_times, make_decoder, simulate_candidates

from zorselike.cost.purposes import Purpose


@pytest.fixture(scope="module", params=[Bench.draw_candidate, Bench.draw_candidate_in_flight])
def simulated(request):
    """Random candidates with replicas."""
    return simulate_candidates(
        19,
        30,
        request.param,
        draw_changes=lambda rng: {
            "workload": replace(make_decoder(ties=rng.random() < 0.3), max_tensor_parallel=4)
        },
        is_wanted=lambda candidate: candidate.degree > 1,
    )


def test_time_is_about_right_and_ranks_as_the_simulator_does(simulated):
    check_times(simulated, middle=(0.85, 1.3), tenths=(0.6, 1.9))


def test_memory_is_what_the_whole_plan_needs(simulated):
    for bench, candidate, case in simulated:
        bounds = candidate.bounds_in_flight
        rank = 0
        for g, group in enumerate(candidate.groups):
            for position, replica in enumerate(group.replicas):
                # What has fewer microbatches than others joins their reductions with more gradients.
                least = 0.75 if len(group.sizes[position]) < group.microbatches_per_device else 0.9
                least -= 0.05 * bounds  # Of groups that return, not every order is walked.
                need = bench.memory.need(candidate, g, position)
                for _ in replica:
                    ratio = need.device_bytes / case.peak_bytes[rank]
                    assert least < ratio < (2.1 if bounds else 1.15)
                    walk = case.simulation.memory[rank]
                    offloaded = walk.host_peak_bytes - walk.host.get(Purpose.COMMUNICATION, 0)
                    assert need.host_bytes >= 0.97 * offloaded
                    rank += 1
        assert not any(map(case.is_overfull, range(case.plan.num_ranks)))


def test_a_plan_has_the_replicas_of_its_candidate(simulated):
    for bench, candidate, case in simulated:
        plan, problem = case.plan, bench.problem
        assert plan.sequence_length == problem.workload.sequence_length
        devices = iter(device for group in candidate.groups for device in group.devices)
        places = [problem.cluster.places[device] for device in devices]
        assert case.costs.places == tuple(places)
        for own, group in zip(candidate.groups, plan.groups, strict=True):
            assert [replica.degree for replica in group.replicas] == [*map(len, own.replicas)]
            for sizes, replica in zip(own.sizes, group.replicas, strict=True):
                booked = [m.num_rows for m in group.microbatches if m.rank == replica.first]
                assert sorted(booked) == sorted(sizes)
                nodes = {case.costs.places[rank].node for rank in replica.ranks}
                types = {case.device_types[rank] for rank in replica.ranks}
                assert len(nodes) == len(types) == 1
