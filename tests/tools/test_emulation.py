"""The emulated cluster: its wires, its scenarios and mutations, and one tiny run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tools import check_emulated
from tools.bench.forked import run_forked
from tools.emulation.comparison import MUTATIONS, Comparison, MemoryPair, pair_memory, score
from tools.emulation.constants import GlooTimes, HostConstants, uniform_profile, uniform_workload
from tools.emulation.emulation import Emulation, run
from tools.emulation.namespaces import NamespaceError, Namespaces
from tools.emulation.noise import Moment, is_busy, straighten
from tools.emulation.predict import Prediction, host_network, predict_emulation
from tools.emulation.scenarios import MIN_SLEEP_S, RUNS, SLEEP_PER_RANK_S, Scenario, find_shortest_s, set_up
from tools.report import num_cores
from zorselike.cost.assemble import make_costs
from zorselike.cost.profile import Overheads
from zorselike.plan.cluster.cluster import Cluster, Link, Node, Place
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

from slow_links.buckets import Buckets, BucketWires, lay_buckets, order_ring
from slow_links.buckets import Path as Way

CHECKED = RUNS["sleeping"] + RUNS["kernel"] + RUNS["computing"]
ACTIONS = Overheads(
    action_s=(("F", 4e-4), ("B", 4e-4), ("STEP", 1e-3)),
    unit_s=(("F", 5e-4), ("B", 5e-4)),
    shared_unit_s=(("F", 1e-3), ("B", 2e-3)),
)
CONSTANTS = HostConstants(
    sleep_overshoot_s=1e-4,
    after_sleep=ACTIONS,
    awake=ACTIONS,
    gloo=tuple(
        GlooTimes(op, count, (4_096, 524_288), (1e-4 * count, 2e-4 * count))
        for op in ("all_gather", "reduce_scatter", "all_reduce", "transfer")
        for count in (2, 4, 8)
    ),
)


# -- wires ---------------------------------------------------------------------------------


@pytest.fixture
def shared_card() -> Iterator[BucketWires]:
    """Bucket 0 carries 10 bytes a second, bucket 1 one; a message of rank 0 passes 0, one of rank 1 both."""
    buckets = Buckets(
        ("card", "narrow link"),
        (10.0, 1.0),
        {(0, 2): Way((0,), 0.0, 0.1), (1, 2): Way((0, 1), 0.0, 0.1)},
    )
    wires = BucketWires(buckets, (Place(0, 0), Place(0, 1), Place(1, 0)))
    yield wires
    wires.close()


def move_together(wires: BucketWires, ways: list[Way], chunks: int, seconds: float) -> list[float]:
    """Bytes of each message after so long, if each asks for its next chunk as soon as the last is through."""
    start_s = 1e6  # Later than now, so that nothing is slept.
    at_s, moved = [start_s] * len(ways), [0.0] * len(ways)
    while min(at_s) < start_s + seconds:
        turn = at_s.index(min(at_s))
        at_s[turn] = wires.take(ways[turn], ways[turn].chunk_bytes, at_s[turn])
        moved[turn] += ways[turn].chunk_bytes
    return moved


def test_messages_in_one_bucket_take_turns(shared_card: BucketWires) -> None:
    wide = Way((0,), 0.0, 0.1)
    assert move_together(shared_card, [wide, wide], 0, 10.0) == pytest.approx([50.0, 50.0], rel=0.01)


def test_what_a_narrow_bucket_holds_up_leaves_its_turns_to_others(shared_card: BucketWires) -> None:
    wide, narrow = Way((0,), 0.0, 0.1), Way((0, 1), 0.0, 0.1)
    assert move_together(shared_card, [wide, narrow], 0, 10.0) == pytest.approx([90.0, 10.0], rel=0.02)


def test_messages_and_collectives_arrive_when_their_buckets_say(shared_card: BucketWires) -> None:
    carry = shared_card.post(0, 2, 1)
    assert carry(0.0) - carry(0.0) < 0  # The second time it queues behind the first: 0.1 s later.
    assert shared_card.delays_collective((0, 1)) and not shared_card.delays_collective((0,))


def _meet(rank: int, wires: BucketWires) -> list[float]:
    """The end of three meetings, each rank's edge ending at its own time."""
    return [wires._meet(rank, (0, 1, 2), number, number + rank / 10) for number in range(3)]


def test_a_collective_ends_with_its_slowest_edge_on_every_rank(shared_card: BucketWires) -> None:
    assert run_forked(_meet, 3, shared_card) == [[0.2, 1.2, 2.2]] * 3


def test_buckets_of_a_cluster() -> None:
    fabric = Link(100.0)
    west, east = (
        Node(name=name, devices=("T4", "T4"), region=region, fabric=fabric, nic=Link(nic))
        for name, region, nic in (("a", "west", 10.0), ("b", "east", 20.0))
    )
    cluster = Cluster((west, east), default_link=Link(30.0, 0.5), shared_links={("east", "west"): 5.0})
    buckets = lay_buckets(cluster, cluster.places)
    across = {buckets.names[i]: buckets.bytes_per_s[i] for i in buckets.paths[0, 2].buckets}
    assert across == {"a to b": 30.0, "a, out": 10.0, "b, in": 20.0, "west to east": 5.0}
    assert buckets.paths[0, 2].latency_s == 0.5
    inside = {buckets.names[i] for i in buckets.paths[0, 1].buckets}
    assert inside == {"fabric of a, 0 out", "fabric of a, 1 in"}


def test_a_ring_enters_each_node_once() -> None:
    places = (Place(1, 0), Place(0, 0), Place(1, 1), Place(0, 1))
    assert order_ring(places, (0, 1, 2, 3)) == (1, 3, 0, 2)


def test_the_kernel_limits_cards_only() -> None:
    card = Node(name="a", devices=("T4",), nic=Link(10.0))
    for cluster in (
        Cluster((replace(card, nic=None),)),
        Cluster((card,), shared_links={("x", "y"): 1.0}),
        Cluster((card, replace(card, name="b")), node_links={("a", "b"): Link(1.0)}),
    ):
        with pytest.raises(NamespaceError):
            Namespaces(cluster)


# -- scenarios -----------------------------------------------------------------------------


def test_the_runs_cover_what_they_must() -> None:
    runs = CHECKED
    assert len(runs) >= 30 and len({own.name for own in runs}) == len(runs)
    assert len(RUNS["kernel"]) == len(RUNS["computing"]) == 10
    assert {own.num_ranks for own in RUNS["sleeping"]} == {4, 6, 8, 12, 16}
    assert {len({*own.types}) for own in runs} == {2, 3, 4}
    assert {len(own.groups) for own in runs} == {1, 2, 3, 4}
    assert {own.ministages for own in runs} == {1, 2, 3, 4}
    assert {zero for own in runs for zero in (own.zero if isinstance(own.zero, tuple) else (own.zero,))} == {
        0,
        1,
        2,
        3,
    }
    assert {kind for own in runs for kind in own.offload} == {"params", "optimizer", "activations"}
    assert {own.recompute for own in runs} == {"none", "layer"}
    assert {stress for own in runs for stress in own.stresses} == {own.stress for own in MUTATIONS}


@pytest.mark.parametrize("scenario", CHECKED, ids=lambda own: own.name)
def test_sleeps_leave_room_for_all_ranks(scenario: Scenario) -> None:
    own = set_up(scenario, num_steps=1)
    shortest = find_shortest_s(own.plan, own.workload, own.cluster, own.profile)
    assert shortest == pytest.approx(max(MIN_SLEEP_S, SLEEP_PER_RANK_S * scenario.num_ranks))


def predict_offline(scenario: Scenario) -> Prediction:
    """As a run over links that the transport sleeps, with made-up constants."""
    return predict_emulation(set_up(replace(scenario, limit="sleep"), num_steps=1), CONSTANTS)


@pytest.mark.parametrize(
    ("scenario", "stress"),
    [(own, stress) for own in RUNS["sleeping"] + RUNS["kernel"] for stress in own.stresses],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_each_wrong_model_says_something_else_where_it_matters(scenario: Scenario, stress: str) -> None:
    prediction = predict_offline(scenario)
    mutation = next(own for own in MUTATIONS if own.stress == stress)
    assert abs(mutation.step_s(prediction) / prediction.step_s - 1) > 0.05


# -- predictions and figures ---------------------------------------------------------------


def test_gloo_times_between_what_was_measured() -> None:
    assert CONSTANTS.gloo_s("all_gather", 4, 4_096) == pytest.approx(4e-4)
    assert CONSTANTS.gloo_s("all_gather", 6, 4_096) == pytest.approx(6e-4)
    assert CONSTANTS.gloo_s("transfer", 2, (4_096 + 524_288) / 2) == pytest.approx(3e-4)


def test_this_machine_adds_to_every_collective_and_transfer() -> None:
    own = set_up(RUNS["sleeping"][0], num_steps=1)
    network = make_costs(own.plan, own.workload, own.cluster, own.profile).network
    hosted = host_network(network, CONSTANTS)
    (before, *_), (after, *_) = (each.collective("all_gather", (0, 1), 4_096) for each in (network, hosted))
    assert after.latency_s - before.latency_s == pytest.approx(2e-4)
    assert hosted.transfer(0, 2, 4_096).latency_s > network.transfer(0, 2, 4_096).latency_s


def comparison(name: str, predicted_s: float, measured_s: float, **mutated_s: float) -> Comparison:
    return Comparison(
        scenario=replace(RUNS["sleeping"][0], name=name),
        measured_s=(measured_s, measured_s, 10 * measured_s),
        predicted_s=predicted_s,
        mutated_s=mutated_s,  # type: ignore[arg-type]
        cpu_share=0.1,
        memory=(MemoryPair(0, "activations", "device", 11, 10), MemoryPair(0, "activations", "host", 10, 10)),
    )


def test_scores_are_means_and_worst_of_all_runs() -> None:
    scores = score([comparison("a", 0.98, 1.0, ring=1.5), comparison("b", 2.2, 2.0, ring=2.2)])
    assert scores.time_mean_error == pytest.approx(0.06)
    assert scores.time_max_error == pytest.approx(0.1)
    assert scores.memory_mean_error == pytest.approx(0.05)
    assert scores.memory_max_error == pytest.approx(0.1)
    assert scores.mutation_errors == {"a wrong ring factor": pytest.approx(0.3)}


def test_a_busy_machine_is_told_from_an_idle_one() -> None:
    assert is_busy([0.5, 0.4, 0.0]) and not is_busy([0.5, 0.02, 0.0]) and not is_busy([None])
    before, after = Moment(0.0, 10.0, 3.0), Moment(10.0, 10.0 + 4 * num_cores(), 3.0 + 3 * num_cores())
    assert after.others_share(before) == pytest.approx(0.1)
    assert Moment(10.0, None, 0.0).others_share(before) is None


def test_more_bytes_take_no_less_time() -> None:
    assert straighten([3.0, 1.0, 2.0]) == (1.0, 1.0, 2.0)


def test_without_namespaces_those_runs_sleep_in_the_transport() -> None:
    everything = check_emulated.choose(check_emulated.parse([]), kernel_works=False)
    assert not any(own.limit == "kernel" for own in everything)
    few = check_emulated.choose(check_emulated.parse(["--runs", "6"]), kernel_works=True)
    assert len(few) == 6 and {own.limit for own in few} >= {"sleep", "kernel"}
    named = check_emulated.choose(check_emulated.parse(["--only", "ZeRO 3"]), kernel_works=True)
    assert named and all("ZeRO 3" in own.name for own in named)


def test_targets_that_are_missed_are_listed() -> None:
    found = [comparison("a", 0.98, 1.0, ring=1.04), comparison("b", 2.4, 2.0)]
    check = check_emulated.Check(2, CONSTANTS, found, ["c: rank 1 ended with code 1"])
    misses = check_emulated.list_misses(score(found), check)
    assert [miss.split()[0] for miss in misses] == ["time_mean_error", "time_max_error", "a", "c:"]


# -- a run ---------------------------------------------------------------------------------

SLEEP_S = 0.01


def tiny() -> tuple[Emulation, float]:
    """Two nodes of one rank, two ministages each; and the seconds that each rank sleeps in a step."""
    workload = uniform_workload(4, elements=64, num_parameters=512)
    names = [name for name, _ in workload.layers]
    plan = Plan(
        global_batch=4,
        groups=tuple(Group((rank,), (Microbatch(rank, 0, 2), Microbatch(rank, 2, 4))) for rank in (0, 1)),
        ministages=tuple(Ministage(i % 2, (names[i],)) for i in range(4)),
    ).validate()
    nodes = tuple(Node(name=name, devices=("CPU",), nic=Link(1e6)) for name in "ab")
    cluster = Cluster(nodes, default_link=Link(1e6, 1e-3))
    profile = uniform_profile(workload, SLEEP_S)
    emulation = Emulation(plan=plan, workload=workload, cluster=cluster, profile=profile, num_steps=2)
    return emulation, 2 * 2 * 2 * SLEEP_S


def test_a_tiny_run_sleeps_and_holds_what_the_model_says() -> None:
    emulation, slept_s = tiny()
    measured = run(emulation, records=True)
    prediction = predict_emulation(emulation, CONSTANTS)
    assert len(measured.step_s) == 2
    for busy_s, step_s in zip(measured.busy_s, (measured.median_s,) * 2, strict=True):
        assert slept_s <= busy_s <= step_s + slept_s
    for rank, own in enumerate(measured.ranks):
        pairs = pair_memory(rank, own.memory, prediction.simulation.memory[rank])
        assert {pair.purpose for pair in pairs} >= {"gathered parameters", "optimizer state"}
        assert [pair.error for pair in pairs] == [0.0] * len(pairs)
        assert [time.action for time in own.actions[0]] == prediction.actions[rank]
