"""Steps that can be computed by hand."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from plain_costs import PlainNetwork, make_costs

from zorselike.cost.wires import make_network
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import GradReduce, Group, Microbatch, Ministage, Plan
from zorselike.schedule import ScheduleSpec, build, parse_actions
from zorselike.schedule.actions import Action, Kind
from zorselike.simulator import DeadlockError, Simulation, simulate
from zorselike.simulator.tasks.graph import Tasks

BOTH = pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "device"])


def pipeline(num_groups: int, num_microbatches: int, *, ministages: int = 1, zero: int = 2) -> Plan:
    """One rank a group, microbatches of one row."""
    groups = tuple(
        Group((g,), tuple(Microbatch(g, m, m + 1) for m in range(num_microbatches)), zero=zero)
        for g in range(num_groups)
    )
    modules = tuple(Ministage(i % num_groups, (f"layers.{i}",)) for i in range(num_groups * ministages))
    return Plan(num_microbatches, groups, modules).validate()


def one_group(
    *counts: int,
    ministages: int = 1,
    zero: int = 2,
    offload: tuple[str, ...] = (),
    grad_reduce: GradReduce = "once",
    overlap_grad_reduce: bool = True,
) -> Plan:
    """One group; rank `r` has `counts[r]` microbatches of one row."""
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    group = Group(
        tuple(range(len(counts))),
        tuple(Microbatch(rank, row, row + 1) for row, rank in enumerate(owners)),
        zero=zero,
        offload=offload,
        grad_reduce=grad_reduce,
        overlap_grad_reduce=overlap_grad_reduce,
    )
    return Plan(
        len(owners), (group,), tuple(Ministage(0, (f"layers.{i}",)) for i in range(ministages))
    ).validate()


def run(plan: Plan, lists: Mapping[int, list[Action]] | None = None, **costs: object) -> Simulation:
    """One step from a common start, with spans."""
    made = make_costs(plan, **costs)  # type: ignore[arg-type]
    return simulate(plan, lists or build(ScheduleSpec(plan)), made, num_steps=1, record=True)


def spans_of(simulation: Simulation, rank: int, track: str) -> list[tuple[float, float, str]]:
    return [
        (span.start_s, span.stop_s, span.action.text)
        for span in simulation.spans
        if span.rank == rank and span.track == track
    ]


# -- computation -------------------------------------------------------------------------------


@BOTH
def test_one_rank_computes_without_a_break(cpu: bool) -> None:
    found = run(one_group(3), forward=1.0, backward=2.0, update=0.5, cpu=cpu)
    assert found.iteration_s == 9.5
    times = found.ranks[0]
    assert (times.busy_s, times.forward_s, times.backward_s, times.update_s) == (9.5, 3.0, 6.0, 0.5)
    assert (times.waiting_for_data_s, times.exposed_communication_s, times.exposed_copies_s) == (0, 0, 0)


@BOTH
@pytest.mark.parametrize("num_groups, num_microbatches", [(2, 1), (2, 4), (3, 5), (4, 4)])
def test_the_bubble_of_gpipe(num_groups: int, num_microbatches: int, cpu: bool) -> None:
    found = run(pipeline(num_groups, num_microbatches), cpu=cpu)
    assert found.iteration_s == pytest.approx(3 * (num_microbatches + num_groups - 1))
    for times in found.ranks:
        assert times.busy_s == 3 * num_microbatches
        assert times.waiting_for_data_s == pytest.approx(3 * (num_groups - 1))


@BOTH
@pytest.mark.parametrize("ministages", [1, 2, 4])
def test_ministages_make_the_bubble_smaller(ministages: int, cpu: bool) -> None:
    plan = pipeline(3, 6, ministages=ministages)
    found = run(plan, forward=1 / ministages, cpu=cpu, network=PlainNetwork(range(3), host_rate=1e99))
    assert found.iteration_s == pytest.approx(3 * (6 + 2 / ministages))


def test_update_of_one_ministage_runs_beside_the_backward_of_the_next_on_a_device() -> None:
    plan = one_group(2, ministages=2)
    assert run(plan, update=1.5, cpu=True).iteration_s == 2 * 2 * 3 + 2 * 1.5
    device = run(plan, update=1.5)
    assert device.iteration_s == 2 * 2 * 3 + 1.5
    assert device.ranks[0].busy_s == device.iteration_s
    assert device.ranks[0].update_s == 3.0


@BOTH
def test_the_host_takes_its_time(cpu: bool) -> None:
    found = run(one_group(2), host_s={"F": 0.25, "B": 0.25}, cpu=cpu)
    # A device computes while the host starts the next thing: only the first start shows.
    assert found.iteration_s == (7.0 if cpu else 6.25)
    assert found.ranks[0].busy_s == found.iteration_s


def test_units_and_steps_take_the_host_s_time_too() -> None:
    plan = one_group(2, ministages=2)
    assert run(plan, cpu=True).iteration_s == 12.0
    host_s = {("F", 0): 0.25, ("B", 1): 0.5, ("STEP", 0): 4.0}
    assert run(plan, cpu=True, unit_host_s=host_s, step_host_s=8.0).iteration_s == 12 + 0.5 + 1 + 4 + 8
    both = run(plan, cpu=True, unit_host_s=host_s, host_s={"F": 1.0})
    assert both.iteration_s == 12 + 4 * 1.0 + 0.5 + 1 + 4


def test_the_norm_takes_the_time_of_all_of_a_rank_s_units() -> None:
    plan = one_group(1, ministages=2)
    host_s = {("NORM", 0): 0.25, ("NORM", 1): 0.5}
    lists = build(ScheduleSpec(plan, defer_steps=True))
    alone, found = (run(plan, lists, cpu=True, unit_host_s=each) for each in ({}, host_s))
    assert found.iteration_s == alone.iteration_s + 0.75


# -- transfers ---------------------------------------------------------------------------------


def fan_out(rows: int = 2) -> Plan:
    """Rank 0, then ranks 1 and 2 with one row each of every two."""
    groups = (
        Group((0,), tuple(Microbatch(0, m, m + 2) for m in range(0, rows, 2))),
        Group((1, 2), tuple(Microbatch(1 + m % 2, m, m + 1) for m in range(rows))),
    )
    return Plan(rows, groups, (Ministage(0, ("a",)), Ministage(1, ("b",)))).validate()


@BOTH
def test_two_transfers_out_of_one_node_take_twice_as_long(cpu: bool) -> None:
    found = run(fan_out(), forward=1.0, row_bytes=3, network=PlainNetwork(range(3)), cpu=cpu)
    assert spans_of(found, 0, "send") == [(2.0, 8.0, "0SEND_F0@1[0:1]"), (2.0, 8.0, "0SEND_F0@2[1:2]")]
    assert spans_of(found, 1, "receive")[0] == (2.0, 8.0, "1RECV_F0@0[0:1]")
    # Forward 2, two rows out, 1 and 2 there, gradients in the same way back, backward 4.
    assert found.iteration_s == 2 + 6 + 3 + 6 + 4
    assert found.bytes_by_link["node 0, out"] == found.bytes_by_link["node 0, in"] == 6
    first, second, third = found.ranks
    # Gradients travel for 6 s, and before that they are not there.
    assert first.exposed_communication_s == 6 and first.waiting_for_data_s == 9
    # Its step ends once its gradients have left; 2 s before the forward, 4 s after its end.
    assert second.exposed_communication_s == 12 and second.waiting_for_data_s == 6
    assert second == third


def test_ranks_that_end_early_wait_for_data_of_the_next_step() -> None:
    plan = fan_out()
    costs = make_costs(plan, row_bytes=3, network=PlainNetwork(range(3)))
    found = simulate(plan, build(ScheduleSpec(plan)), costs)
    assert found.iteration_s == 21
    times = found.ranks[1]
    # Its own step: until its send has gone, 17 s after the step began.
    assert times.busy_s == 3 and times.exposed_communication_s == 12 and times.waiting_for_data_s == 6


@BOTH
def test_what_a_group_that_ends_early_gathers_for_its_next_step_takes_from_others_reductions(
    cpu: bool,
) -> None:
    """Two groups, each with a rank on each of two nodes. Were the last step followed by none, the second
    group's gather would share no wire with the first one's reduction, half of which it meets: 4.5 s."""
    groups = tuple(Group((g, g + 2), (Microbatch(g, 0, 1), Microbatch(g + 2, 1, 2)), zero=2) for g in (0, 1))
    plan = Plan(2, groups, (Ministage(0, ("a",)), Ministage(1, ("b",)))).validate()
    costs = make_costs(plan, forward=0.25, unit_bytes=2, network=PlainNetwork((0, 0, 1, 1)), cpu=cpu)
    found = [simulate(plan, build(ScheduleSpec(plan)), costs, num_steps=n).iteration_s for n in (2, 3, 6)]
    assert found == [5.0, 5.0, 5.0]


def test_a_rendezvous_begins_at_the_later_post_a_buffered_send_at_once() -> None:
    plan = pipeline(2, 2)
    lists = {
        0: parse_actions("0F0 0SEND_F0@1[0:1] 0F1 0SEND_F1@1[1:2]"),
        1: parse_actions("1RECV_F0@0[0:1] 1F0 1RECV_F1@0[1:2] 1F1"),
    }
    seconds = {0: 1.0, 1: 4.0}
    for cpu in (True, False):
        costs = {"forward": lambda rank, i, rows: seconds[rank], "row_bytes": 3, "cpu": cpu}
        rendezvous = run(plan, lists, **costs, network=PlainNetwork(range(2)))
        assert spans_of(rendezvous, 1, "receive") == [
            (1.0, 4.0, "1RECV_F0@0[0:1]"),
            (8.0, 11.0, "1RECV_F1@0[1:2]"),
        ]
        assert rendezvous.iteration_s == 15.0
        buffered = run(plan, lists, **costs, network=PlainNetwork(range(2)), eager_bytes=3)
        assert spans_of(buffered, 1, "receive")[1] == (4.0, 7.0, "1RECV_F1@0[1:2]")
        assert buffered.iteration_s == 12.0
        assert buffered.ranks[1].exposed_communication_s == 3.0


@BOTH
def test_fewer_bytes_of_gradients_go_back_where_costs_say_so(cpu: bool) -> None:
    costs = {"row_bytes": 3, "network": PlainNetwork(range(2)), "cpu": cpu}
    # F, transfer, F and B; gradients, B.
    assert run(pipeline(2, 1), **costs).iteration_s == 1 + 3 + 1 + 2 + 3 + 2
    assert run(pipeline(2, 1), **costs, gradient_row_bytes=(0, 1)).iteration_s == 1 + 3 + 1 + 2 + 1 + 2


def test_without_a_buffer_a_transfer_of_nothing_waits_for_its_receiver_too() -> None:
    plan = pipeline(2, 1)
    lists = {0: parse_actions("0F0 0SEND_F0@1[0:1]"), 1: parse_actions("1F0")}
    with pytest.raises(DeadlockError):
        run(plan, lists, row_bytes=0)


def test_transfers_that_block_keep_both_ranks_from_computing() -> None:
    plan = pipeline(2, 2)
    lists = {
        0: parse_actions("0F0 0SEND_F0@1[0:1] 0F1 0SEND_F1@1[1:2]"),
        1: parse_actions("1RECV_F0@0[0:1] 1F0 1RECV_F1@0[1:2] 1F1"),
    }
    found = run(plan, lists, row_bytes=3, network=PlainNetwork(range(2)), transfers_block=True)
    # F 1, transfer 3; then both compute for 1 and meet again.
    assert spans_of(found, 0, "compute") == [(0.0, 1.0, "0F0"), (4.0, 5.0, "0F1")]
    assert found.iteration_s == 9.0
    assert [times.exposed_communication_s for times in found.ranks] == [6.0, 6.0]
    assert found.ranks[1].waiting_for_data_s == 1.0
    # What the transport buffers holds up its receiver alone.
    costs = {"row_bytes": 3, "network": PlainNetwork(range(2)), "transfers_block": True}
    eager = run(plan, lists, **costs, eager_bytes=3)
    assert spans_of(eager, 0, "compute") == [(0.0, 1.0, "0F0"), (1.0, 2.0, "0F1")]
    assert spans_of(eager, 1, "compute") == [(4.0, 5.0, "1F0"), (7.0, 8.0, "1F1")]
    assert eager.iteration_s == 8.0
    assert run(plan, lists, **costs, eager_bytes=2).iteration_s == found.iteration_s


def test_edges_that_wrap_around_go_through_host_memory_on_devices() -> None:
    plan = pipeline(2, 1, ministages=2)
    network = PlainNetwork(range(2), rate=1.0, host_rate=2.0)
    assert run(plan, row_bytes=2, network=network, cpu=True).iteration_s == 12 + 6 * 2
    # Each way once over the wrapping edge: a copy off the device and one onto it, 1 s each.
    assert run(plan, row_bytes=2, network=network).iteration_s == 12 + 6 * 2 + 2 * 2


# -- collectives -------------------------------------------------------------------------------


@BOTH
def test_a_collective_waits_for_the_slowest_rank(cpu: bool) -> None:
    plan = one_group(2, 2, zero=0)
    found = run(plan, forward=lambda rank, i, rows: 1.0 + rank, unit_bytes=4, cpu=cpu)
    # The slow rank computes for 12 s; an all-reduce of two carries all of the bytes on each edge.
    assert found.iteration_s == 12 + 4
    assert spans_of(found, 0, "reduce") == [(12.0, 16.0, "0REDUCE_GRAD")]
    assert found.ranks[0].exposed_communication_s == 6 + 4
    assert found.ranks[1].exposed_communication_s == 4


@BOTH
def test_units_compute_as_they_are_gathered(cpu: bool) -> None:
    plan = one_group(1, 1)
    found = run(plan, forward=3.0, backward=4.0, unit_bytes=2, num_units=3, cpu=cpu)
    # A gather of a unit takes 1 s, one third of the forward too. The parameters stay for the backward, and
    # the reduction takes as long as the gather.
    assert spans_of(found, 0, "compute")[:3] == [(1.0, 2.0, "0F0"), (2.0, 3.0, "0F0"), (3.0, 4.0, "0F0")]
    assert found.iteration_s == 1 + 3 + 4 + 3


@BOTH
def test_the_next_ministage_is_gathered_while_one_computes(cpu: bool) -> None:
    plan = one_group(2, 2, ministages=2)
    found = run(plan, forward=1.0, backward=1.0, unit_bytes=4, cpu=cpu)
    # Gathers and reductions take 2 s each, a ministage's forward and its backward 2 s; the first gather
    # and the last reduction show, and on a CPU the one before it.
    exposed_s = 2 + 2 + (2 if cpu else 0)
    assert found.iteration_s == 8 + exposed_s
    assert found.ranks[0].busy_s == 8 and found.ranks[0].exposed_communication_s == exposed_s


@BOTH
@pytest.mark.parametrize("grad_reduce, num_reductions", [("once", 1), ("microbatch", 3)])
def test_reductions_after_every_microbatch(grad_reduce: GradReduce, num_reductions: int, cpu: bool) -> None:
    found = run(one_group(3, 1, grad_reduce=grad_reduce), unit_bytes=4, cpu=cpu)
    # The rank with one microbatch joins the reductions of the other's.
    assert found.bytes_by_link["node 0, out"] == 2 + 2 * num_reductions
    # A device goes on beside each but the last.
    assert found.iteration_s == 2 + 3 + 6 + 2 * (num_reductions if cpu else 1)


def test_a_reduction_waits_for_the_one_before_it() -> None:
    """So that whole gradients of no more than two ministages are there."""
    plan = one_group(1, 1, ministages=3)
    found = run(plan, forward=1.0, backward=1.0, unit_bytes=16, update=1.0)
    reductions = [span[:2] for span in spans_of(found, 0, "reduce")]
    assert all(stop - start == 8 for start, stop in reductions)
    assert all(later[0] >= before[1] for before, later in pairwise(reductions))
    backwards = [span[:2] for span in spans_of(found, 0, "compute") if "B" in span[2]]
    assert backwards[1][0] < reductions[0][1] <= backwards[2][0], "compute waits before its third"
    assert found.iteration_s == reductions[-1][1] + 1


@pytest.mark.parametrize("zero", [0, 2])
def test_a_device_waits_for_reductions_where_the_plan_says_so(zero: int) -> None:
    plan = one_group(1, 1, ministages=3, zero=zero, overlap_grad_reduce=False)
    found = run(plan, forward=1.0, backward=1.0, unit_bytes=16, update=1.0)
    reductions = [span[:2] for span in spans_of(found, 0, "reduce")]
    backwards = [span[:2] for span in spans_of(found, 0, "compute") if "B" in span[2]]
    assert len(reductions) == 3
    assert all(later[0] >= before[1] for before, later in zip(reductions, backwards[1:], strict=False))
    beside = run(replace(plan, groups=(replace(plan.groups[0], overlap_grad_reduce=True),)), unit_bytes=16)
    assert found.iteration_s > beside.iteration_s
    on_cpus = [run(own, unit_bytes=16, cpu=True).iteration_s for own in (plan, one_group(1, 1, ministages=3))]
    assert zero == 0 or on_cpus[0] == on_cpus[1]


def test_zero_3_hides_gathers_and_reductions_of_a_device_behind_other_units() -> None:
    plan = one_group(1, 1, zero=3)
    # Two units of 6 s of backward and 3 s of forward each; a collective of a unit takes 2 s.
    found = run(plan, forward=6.0, backward=12.0, unit_bytes=4, num_units=2)
    # Gather 2, forward; in the backward the first gather waits only for the unit ahead; the last
    # unit's reduction shows.
    assert spans_of(found, 0, "gather")[:2] == [(0.0, 2.0, "0F0"), (2.0, 4.0, "0F0")]
    assert found.iteration_s == 2 + 6 + 12 + 2
    # Communication that is longer than computation: all gathers, then the last unit computes.
    found = run(plan, forward=1.0, backward=2.0, unit_bytes=8, num_units=2)
    assert [stop for _, stop, _ in spans_of(found, 0, "compute")][:2] == [4.5, 8.5]


def test_with_zero_3_a_backward_waits_for_the_update_before_it() -> None:
    """It reduces inside, and first gives back the gradients that the update used."""
    plan = one_group(1, ministages=2, zero=3)
    in_forward, in_backward = 2 * 1.0, 2 * 2.0
    assert run(plan, update=1.0).iteration_s == in_forward + in_backward + 2 * 1.0
    assert run(replace(plan, groups=(replace(plan.groups[0], zero=2),)), update=1.0).iteration_s == 7.0


def test_zero_3_on_a_cpu_gathers_and_reduces_in_turn() -> None:
    plan = one_group(1, 1, zero=3)
    found = run(plan, forward=6.0, backward=12.0, unit_bytes=4, num_units=2, cpu=True)
    # Two gathers in each, and the reductions of two units, none beside computation.
    assert found.iteration_s == 4 + 6 + 4 + 12 + 4
    # The last unit is gathered once the slow rank has come to it.
    found = run(plan, forward=lambda rank, i, rows: 6.0 + 6 * rank, unit_bytes=4, num_units=2, cpu=True)
    assert spans_of(found, 0, "compute")[:2] == [(2.0, 5.0, "0F0"), (10.0, 13.0, "0F0")]
    assert spans_of(found, 1, "compute")[:2] == [(2.0, 8.0, "0F0"), (10.0, 16.0, "0F0")]


@BOTH
def test_zero_3_dummies_join_the_collectives(cpu: bool) -> None:
    found = run(one_group(3, 1, zero=3), unit_bytes=4, cpu=cpu)
    assert found.bytes_by_link["node 0, out"] == 3 * (2 + 2 + 2)
    assert found.ranks[1].busy_s == 3


@BOTH
def test_norm_waits_for_all_ranks(cpu: bool) -> None:
    plan = pipeline(2, 2)
    lists = build(ScheduleSpec(plan, defer_steps=True))
    network = PlainNetwork(range(2), latency_s=0.5, rate=1e99)
    found = run(plan, lists, update=1.0, network=network, cpu=cpu)
    # Two microbatches through two stages with a latency each way, the sum over the ranks, the update.
    assert found.iteration_s == pytest.approx(9 + 2 * 0.5 + 0.5 + 1)
    assert spans_of(found, 0, "update")[0][:2] == pytest.approx((10.5, 11.5))


@BOTH
def test_a_computation_is_slower_while_its_rank_communicates(cpu: bool) -> None:
    plan = one_group(2, 2, ministages=2)
    found = run(plan, forward=4.0, backward=8.0, unit_bytes=4, overlap_slowdown=2.0, cpu=cpu)
    # The second ministage's gather of 2 s takes 1 s of the first forward's work.
    assert spans_of(found, 0, "compute")[0][:2] == (2.0, 7.0)
    # The same again where the first one is gathered for its backward, beside all of the second one's.
    # On a device the last backward beside the second one's reduction too.
    assert found.iteration_s == 2 + (8 + 1) + (8 + 16 + 1) + 16 + 2 + (2 if cpu else 1)


# -- host copies -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["params", "optimizer", "activations"])
def test_offload_is_hidden_by_a_fast_host_link_and_shows_on_a_slow_one(what: str) -> None:
    plain, offloading = (one_group(3, ministages=3, offload=offload) for offload in ((), (what,)))
    sizes = {"shard_bytes": 4, "state_bytes": 8, "gradient_shard_bytes": 4, "activation_bytes_per_row": 4}

    def iteration(plan: Plan, host_rate: float) -> Simulation:
        network = PlainNetwork((0,), host_rate=host_rate)
        costs = make_costs(plan, update=0.1, network=network, sizes=sizes)
        return simulate(plan, build(ScheduleSpec(plan, masters=True)), costs)

    base = iteration(plain, 1.0)
    fast, slow = iteration(offloading, 100.0), iteration(offloading, 0.25)
    assert base.iteration_s == pytest.approx(27.1)
    assert fast.iteration_s == pytest.approx(base.iteration_s, abs=0.3)
    assert fast.ranks[0].exposed_copies_s < 0.3
    assert slow.iteration_s > base.iteration_s + 5
    assert slow.ranks[0].exposed_copies_s == pytest.approx(slow.iteration_s - base.iteration_s, abs=0.3)


def test_a_cpu_rank_copies_in_its_thread() -> None:
    plan = one_group(3, ministages=2, offload=("activations",))
    found = run(plan, row_bytes=2, cpu=True)
    # Those of the first ministage leave and come back, of the second none: each goes backward at once.
    assert found.iteration_s == 18 + 3 * 2 * 2
    assert found.ranks[0].exposed_copies_s == 12


def test_of_a_single_ministage_no_activations_are_copied() -> None:
    plan = one_group(3, offload=("activations",))
    assert run(plan, row_bytes=2, cpu=True).iteration_s == 9


# -- tied weights ------------------------------------------------------------------------------


@BOTH
def test_a_tied_weight_goes_to_its_owner_and_back(cpu: bool) -> None:
    plan = pipeline(2, 2)
    found = run(
        plan,
        build(ScheduleSpec(plan, ties=[(0, 1)])),
        update=1.0,
        tie_bytes={(0, 1): 2},
        tie_gradient_bytes={(0, 1): 4},
        cpu=cpu,
    )
    # The last backward of the borrower is over after 7 s, of the owner after 9 s. The owner's thread comes
    # to the exchange after its backward; the host of a device is there before.
    start = 9.0 if cpu else 7.0
    assert spans_of(found, 0, "receive") == [(start, start + 4, "0TIE_GRAD")]
    assert spans_of(found, 0, "update")[0][0] == start + 4
    assert found.iteration_s == start + 4 + 1 + 2
    assert found.bytes_by_link == {
        "node 0, out": 2.0,
        "node 0, in": 4.0,
        "node 1, out": 4.0,
        "node 1, in": 2.0,
    }


# -- a real network ----------------------------------------------------------------------------


def test_a_transfer_takes_what_the_cluster_s_link_says() -> None:
    link = Link(2e9, 1e-3, points=((1e3, 1e8), (1e9, 2e9)))
    cluster = Cluster(
        nodes=tuple(Node(name=name, devices=("T4",), nic=Link(4e9)) for name in "ab"), default_link=link
    )
    plan = pipeline(2, 1)
    network = make_network(cluster, cluster.place_ranks(plan))
    found = run(plan, row_bytes=10**6, network=network)
    assert found.iteration_s == pytest.approx(6 + 2 * (link.latency_s + 10**6 / link.rate(10**6)))
    assert found.bytes_by_link["node a, out"] == 10**6


# -- results -----------------------------------------------------------------------------------


def test_money_is_device_hours_and_egress() -> None:
    plan = fan_out()
    network = PlainNetwork((0, 1, 1))
    found = run(
        plan,
        row_bytes=3_000_000_000,
        network=network,
        forward=1e10,
        price_per_hour=3.6,
        egress_price_per_gb={(0, 1): 0.25},
    )
    # Two rows go to the other node; their gradients come back for nothing.
    assert found.egress_cost == 2 * 3 * 0.25
    assert found.cost == pytest.approx(found.iteration_s * 0.001 + found.egress_cost)


def test_memory_is_that_of_the_walk_with_context_and_allocator() -> None:
    plan = one_group(2)
    found = run(plan, row_bytes=10, context_bytes=(1000,), allocator_share=0.5)
    assert found.peak_bytes == (1000 + 15,)
    over_time = found.memory_over_time(0)
    assert [at for at, _ in over_time] == sorted(at for at, _ in over_time)
    assert max(num_bytes for _, num_bytes in over_time) == 1015
    assert len(found.memory) == 1 and next(iter(found.memory)).device_peak_bytes == 1010


def test_times_of_actions() -> None:
    found = run(one_group(1), update=0.5)
    assert found.action_times is not None
    texts = [action.text for action in build(ScheduleSpec(one_group(1)))[0]]
    at = dict(zip(texts, found.action_times[0], strict=True))
    assert (at["0F0"], at["0B0"], at["0STEP"]) == ((0.0, 1.0), (1.0, 3.0), (3.0, 3.5))
    assert at["0RESHARD"] == (3.0, 3.0)


def test_without_record_nothing_is_kept() -> None:
    plan = one_group(1)
    found = simulate(plan, build(ScheduleSpec(plan)), make_costs(plan))
    assert found.spans == () and found.action_times is None


def test_nothing_of_a_simulation_is_left_for_the_garbage_collector() -> None:
    plan = pipeline(2, 4, ministages=2)
    costs = make_costs(plan, row_bytes=1, unit_bytes=1)
    lists = build(ScheduleSpec(plan))
    gc.collect()
    gc.disable()
    try:
        simulate(plan, lists, costs, record=True)
        assert not [left for left in gc.get_objects() if type(left) is Tasks]
    finally:
        gc.enable()


# -- deadlocks ---------------------------------------------------------------------------------


def test_a_receive_that_nobody_sends_is_found() -> None:
    plan = pipeline(2, 1)
    lists = build(ScheduleSpec(plan))
    lists[0] = [action for action in lists[0] if action.kind is not Kind.SEND_F]
    with pytest.raises(DeadlockError) as caught:
        run(plan, lists)
    message = str(caught.value)
    assert "rank 1 at action 1, 1RECV_F0@0[0:1] waits for a transfer from rank 0 to rank 1" in message
    assert "rank 0 at action 2, 0RECV_B0@1[0:1] waits for" in message


def test_collectives_in_opposite_order_are_found() -> None:
    plan = one_group(1, 1, ministages=2)
    lists = build(ScheduleSpec(plan))
    turned = parse_actions("1UNSHARD 0UNSHARD")
    lists[1][:2] = turned
    with pytest.raises(DeadlockError, match=r"a collective that not all of ranks \[0, 1\] have reached"):
        run(plan, lists, unit_bytes=1)


def test_a_wire_that_carries_nothing_is_found() -> None:
    plan = pipeline(2, 1)
    with pytest.raises(DeadlockError, match=r"bytes between ranks \[0, 1\] that do not move"):
        run(plan, row_bytes=1, network=PlainNetwork(range(2), rate=0.0))


def test_copies_that_never_end_are_found_in_the_step_that_needs_them() -> None:
    plan = one_group(2, ministages=2, offload=("optimizer",))
    costs = make_costs(plan, sizes={"state_bytes": 4}, network=PlainNetwork((0,), host_rate=0.0))
    with pytest.raises(DeadlockError, match=r"rank 0 at .* waits for copies that do not end"):
        simulate(plan, build(ScheduleSpec(plan)), costs)
