"""Real jobs of CPU ranks that are killed, stopped, made to fail and told to leave, and go on to the losses of
one to which nothing happens. (`python -m tools.elastic.bench` does much more of it.)"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import volume
from device_problems import make_nodes, make_profile

from tools.elastic.faults import deal_cells, make_matrix_job, make_plan, make_replica_job, make_small
from tools.elastic.jobs import Fault, Job, JobFailedError, Outcome, run, run_alone
from zorselike.checkpoint import lease
from zorselike.elastic.contingency import Contingencies, SearchPlanner
from zorselike.elastic.contract import Member
from zorselike.elastic.deciding.decisions import Situation
from zorselike.plan.cluster.cluster import Cluster, Link
from zorselike.plan.plan import Plan
from zorselike.plan.workload import LayerKind, Workload

pytestmark = pytest.mark.usefixtures("forks_inherit")


def check(job: Job, outcome: Outcome, *, num_lost: int = 0) -> None:
    assert len(outcome.happened) == len(job.faults)
    assert outcome.find_error(run_alone(job)) <= 1e-10
    assert all(report.num_lost <= num_lost for report in outcome.reports), outcome.reports


@volume.parametrize("seed", range(40), share=40)
def test_faults_in_any_phase_lose_nothing(seed: int) -> None:
    job = make_matrix_job(seed, list(deal_cells(2, seed)))
    outcome = run(job)
    assert outcome.find_error(run_alone(job)) <= (1e-10 if job.param_dtype is None else 0.1)
    assert outcome.retries(job.faults) == []
    assert all(report.num_lost == 0 for report in outcome.reports)
    same_states = outcome.check_states()
    assert same_states or all(fault.kind == "pause" for fault in job.faults)
    assert len(outcome.happened) == len(job.faults)


@volume.parametrize("seed", range(27), share=27)
def test_recoveries_across_degrees_lose_nothing(seed: int) -> None:
    """Replicas that lose a rank go on as smaller ones, and as they were once somebody like it comes."""
    job = make_replica_job(seed)
    outcome = run(job)
    check(job, outcome)
    # Who is lost before its mirror is whole takes the step's state along: others do that step again.
    if not any(fault.phase == "mirror" and fault.kind != "term" for fault in job.faults):
        assert outcome.check_states()
    degrees = [list_degrees(Plan.parse(text)) for report in outcome.reports for text in report.plans]
    assert list_degrees(job.plan) in degrees
    losses = [fault for fault in job.faults if fault.kind != "raise"]
    assert len({*map(str, degrees)}) > 1 or job.replaces or not losses


def list_degrees(plan: Plan) -> list[list[int]]:
    return [[replica.degree for replica in group.replicas] for group in plan.groups]


def test_a_rank_that_leaves_gives_what_it_has() -> None:
    job = make_small(Fault(2, 0, "leave", 0.5))
    outcome = run(job)
    check(job, outcome)
    assert len({report.diary.finished[-1][0] for report in outcome.reports}) == 2  # One ended earlier.


def test_who_leads_after_a_loss_saves_on_though_the_holder_of_the_lease_was_on_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No save succeeded for the ten minutes after which such a lease is taken over."""
    monkeypatch.setattr(lease, "_is_gone", lambda *_: False)  # As far as is to be seen there.
    job = replace(make_small(Fault(3, 0, "kill", 0.5)), saves_at=(2, 4))
    outcome = run(job)
    check(job, outcome)
    assert all(report.saved[-1] == 4 for report in outcome.reports)


def test_a_spare_takes_the_place_of_who_is_lost_and_another_ends_with_the_job() -> None:
    job = replace(make_small(Fault(2, 1, "kill", 0.5)), num_spares=2)
    outcome = run(job)
    check(job, outcome)
    # Whoever joined last were the spares.
    assert max(report.diary.finished[0][0] for report in outcome.reports if report.diary.finished) >= 3
    assert sum(not report.diary.finished for report in outcome.reports) == 1


def test_another_plan_is_gone_over_to() -> None:
    job = make_small(num_steps=8)
    other: Plan | None = None
    seed = 0
    while other is None:
        found, num_layers = make_plan(random.Random(seed), (1, 2), offload=False)
        other = found if num_layers == job.num_layers else None
        seed += 1
    job = replace(job, plans=((2, other),))
    outcome = run(job)
    check(job, outcome)
    assert all(report.diary.finished[-1][2] > report.diary.finished[0][2] for report in outcome.reports)
    assert all(report.switch_s not in (0.0, 2.0) for report in outcome.reports)  # No guess any more.


def test_memory_that_did_not_suffice_changes_the_plan() -> None:
    job = make_small(Fault(2, 1, "memory", 0.5))
    outcome = run(job)
    check(job, outcome)
    assert len(outcome.reports) == job.plan.num_ranks  # Nobody has gone.
    summaries = [report.summaries[-1] for report in outcome.reports]
    assert set(summaries) == {"a plan for 3 ranks in groups of 2 + 1, from step 2"}  # Not the same.


def test_memory_that_does_not_suffice_again_changes_the_plan_again() -> None:
    """With the same words at the same step: that is no reason to end the job while a plan may need less."""
    job = make_small(Fault(2, 1, "memory", 0.5), Fault(2, 1, "memory", 0.4))
    outcome = run(job)
    check(job, outcome)
    for report in outcome.reports:
        largest = [
            max(m.num_rows for g in plan.groups for m in g.microbatches)
            for plan in map(Plan.parse, report.plans)
        ]
        assert report.plans[0] != report.plans[-1] and largest[-1] <= largest[0]


def test_memory_that_never_suffices_ends_the_job_with_its_reason() -> None:
    faults = [Fault(2, 1, "memory", 0.5) for _ in range(8)]
    with pytest.raises(JobFailedError, match=r"no plan for who is left: .* row by row and recomputes"):
        run(make_small(*faults))


def test_mirrors_of_every_third_step_lose_no_more_than_three() -> None:
    job = replace(make_small(Fault(5, 1, "kill", 0.9), num_steps=8), mirror_every=3)
    outcome = run(job)
    check(job, outcome, num_lost=3)
    assert any(report.num_lost for report in outcome.reports)


def test_a_step_that_is_done_again_is_not_saved_again() -> None:
    outcome = run(replace(make_small(Fault(5, 1, "kill", 0.5)), mirror_every=3, saves_at=(4,)))
    assert all(report.num_lost for report in outcome.reports)
    assert [report.saved for report in outcome.reports] == [[4, 4]] * len(outcome.reports)


def test_two_losses_at_once_lose_nothing_where_a_third_has_their_mirrors() -> None:
    job = make_small(Fault(2, 0, "kill", 0.5, others=(2,)))  # All of node 0.
    outcome = run(job)
    check(job, outcome)
    assert [report.summaries[-1] for report in outcome.reports] == [
        "a plan for 1 rank in groups of 1, from step 2"
    ]


def test_two_losses_at_once_beyond_mirrors_go_back_to_the_checkpoint() -> None:
    job = replace(make_small(Fault(4, 0, "kill", 0.5, others=(1,))), saves_at=(2,))
    outcome = run(job)
    check(job, outcome, num_lost=2)
    assert [report.num_lost for report in outcome.reports] == [2]


def test_two_losses_at_once_beyond_mirrors_end_a_job_without_checkpoint() -> None:
    with pytest.raises(JobFailedError, match="no step up to 4 is whole in the memory of those who are left"):
        run(make_small(Fault(4, 0, "kill", 0.5, others=(1,))))


def make_planner(job: Job) -> SearchPlanner:
    """For nodes of unequal devices, which all compute faster than these processes."""
    names = [name for ministage in job.plan.ministages for name in ministage.modules]
    kind = LayerKind(
        name="layer",
        num_parameters=1000,
        forward_flops_per_row=1e4,
        input_elements_per_row=32,
        output_elements_per_row=32,
        activation_bytes_per_row=10_000,
    )
    layers = tuple((name, "layer") for name in names)
    workload = Workload(
        model="small", sequence_length=4, dtype="float32", layers=layers, kinds={"layer": kind}
    )
    profile = make_profile(workload, **{"A100-40": 4e4, "T4": 1e4})
    nodes = (*make_nodes("node", "A100-40"), *make_nodes("node", "T4", copies=3)[1:])
    cluster = Cluster(nodes=nodes, default_link=Link(10e9))
    return SearchPlanner(workload, cluster, profile, job.plan.global_batch, budget_s=2.0)


def test_a_better_plan_is_gone_over_to_and_those_for_losses_are_known_before() -> None:
    job = make_small(Fault(5, 1, "kill", 0.5), num_steps=8, num_nodes=3)
    job = replace(job, planner=make_planner(job))
    outcome = run(job)
    check(job, outcome)
    for report in outcome.reports:
        first, *others = report.estimated_s
        assert first is None and len(others) == 2
        before, after = others
        assert before is not None and after is not None and before < after  # With fewer devices.


def test_machines_that_the_cluster_file_has_not_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A saved `plan = "auto"` on other machines: no plan was ever found, and nobody said so."""
    job = make_small()
    planner = make_planner(job)

    def meet(*nodes: str) -> Situation:
        members = (Member(f"id{i}", i, "h", 0, node, 0, "cpu", 2**34) for i, node in enumerate(nodes))
        return Situation(job.plan, tuple(members), ())

    contingencies = Contingencies(planner)
    contingencies.prepare(meet("x", "y"))
    assert contingencies.wait(60) and contingencies.find(meet("x", "y")) is None
    assert planner(meet("node0", "x")).ids == ("id0",)
    assert caplog.messages == [
        "elastic: no plan was found for who is there, and groups stay: the cluster file has nodes node0, "
        "node1 and node2, and not x local rank 0 and y local rank 0",
        "elastic: no plan is looked for with x local rank 0: not in the cluster file",
    ]


def test_a_card_that_becomes_slower_is_named_and_given_less() -> None:
    job = make_small(num_steps=30, num_nodes=3)
    job = replace(job, planner=make_planner(job), slows=(0, 15, 0.03))
    outcome = run(job)
    check(job, outcome)
    first, *others = max((report.plans for report in outcome.reports), key=len)
    assert min(count_rows(plan, "node0") for plan in others) < count_rows(first, "node0")


def count_rows(text: str, node: str) -> int:
    """Rows times layers of one node's ranks."""
    plan = Plan.parse(text)
    ranks = {device.rank for device in plan.devices if device.node == node}
    return sum(
        microbatch.num_rows * len(ministage.modules)
        for ministage in plan.ministages
        for microbatch in plan.groups[ministage.group].microbatches
        if microbatch.rank in ranks
    )
