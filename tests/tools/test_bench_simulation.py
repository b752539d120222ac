"""The discrete simulation that the benchmark's bounds come from."""

from __future__ import annotations

import pytest

from second_simulator.operations import Links, Meet, Send, SimulatedDeadlockError, Work, simulate_operations


def test_a_rank_runs_its_operations_one_after_the_other() -> None:
    outcome = simulate_operations({0: [Work(1.0), Work(2.0)], 1: [Work(0.5)]})
    assert outcome.makespan_s == 3.0
    assert outcome.busy_s == (3.0, 0.5)
    assert outcome.busy_share == (1.0, 0.5 / 3.0)


def test_work_waits_for_what_is_sent_to_it() -> None:
    outcome = simulate_operations(
        {0: [Work(2.0), Send("x", 1), Work(1.0)], 1: [Work(0.5), Work(1.0, needs=("x",))]}
    )
    assert outcome.makespan_s == 3.0


def test_work_gives_a_token_at_its_end() -> None:
    outcome = simulate_operations({0: [Work(2.0, gives="x")], 1: [Work(1.0, needs=("x",))]})
    assert outcome.makespan_s == 3.0


def test_a_collective_completes_with_its_last_member() -> None:
    blocking = {r: [Work(float(r)), Meet("g", (0, 1, 2)), Work(1.0)] for r in range(3)}
    assert simulate_operations(blocking).makespan_s == 3.0
    # Started early and waited for late it hides behind the computation.
    ahead = {
        r: [Meet("g", (0, 1), blocks=False), Work(2.0), Work(1.0, needs=("g",))]
        if r == 0
        else [Meet("g", (0, 1))]
        for r in range(2)
    }
    assert simulate_operations(ahead).makespan_s == 3.0


def test_a_link_carries_one_message_after_the_other() -> None:
    links = Links(node_of_rank=(0, 0, 1), latency_s=0.5, bytes_per_s=10.0)
    outcome = simulate_operations(
        {
            0: [Send("a", 2, num_bytes=20.0)],
            1: [Send("b", 2, num_bytes=10.0), Send("near", 0, num_bytes=1e9)],
            2: [Work(0.0, needs=("a",), gives="a there"), Work(1.0, needs=("b",))],
        },
        links,
    )
    assert outcome.makespan_s == 2.0 + 1.0 + 0.5 + 1.0


def test_a_collective_across_nodes_takes_its_bytes_around_the_ring() -> None:
    links = Links(node_of_rank=(0, 0, 1), latency_s=0.25, bytes_per_s=10.0)
    across = {r: [Meet("g", (0, 1, 2), num_bytes=20.0)] for r in range(3)}
    assert simulate_operations(across, links).makespan_s == 2.0 + 2 * 0.25
    inside = {r: [Meet("g", (0, 1), num_bytes=20.0)] if r < 2 else [] for r in range(3)}
    assert simulate_operations(inside, links).makespan_s == 0.0


def test_what_can_never_end_is_an_error_that_names_the_operation() -> None:
    with pytest.raises(SimulatedDeadlockError, match=r"rank 1 at Work\(.*'never'"):
        simulate_operations({0: [Work(1.0)], 1: [Work(1.0, needs=("never",))]})
