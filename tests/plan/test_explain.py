from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from plans import plans

from zorselike.plan import Device, Estimates, Group, Microbatch, Ministage, Plan, PlanError, expand_shares

PLAN = Plan(
    global_batch=9,
    groups=(
        Group(ranks=(0, 1, 2), microbatches=expand_shares([(0, 6, 4), (1, 3, 2), (2, 0, 1)], 9)),
        Group(
            ranks=(3,), microbatches=(Microbatch(3, 0, 9),), zero=3, offload=("params",), recompute="layer"
        ),
    ),
    ministages=(
        Ministage(0, ("tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3")),
        Ministage(1, ("layers.4", "layers.5", "norm", "output")),
    ),
)


def test_explain_shows_who_computes_what():
    assert (
        PLAN.explain()
        == f"""\
plan {PLAN.fingerprint}: 9 rows per step, 4 ranks in 2 groups, 2 ministages

group 0: ranks 0-2; ZeRO 2; gradients reduced once per step; offload none; recompute none
  rank  rows   share  microbatches
     0     6  66.7 %  1 x 4 rows, 1 x 2 rows
     1     3  33.3 %  1 x 2 rows, 1 x 1 row
     2     0   0.0 %  none
  ministage  modules
          0  tok_embeddings, layers.0 .. layers.3

group 1: rank 3; ZeRO 3; gradients reduced per microbatch; offload params; recompute layer
  rank  rows    share  microbatches
     3     9  100.0 %  1 x 9 rows
  ministage  modules
          1  layers.4, layers.5, norm, output"""
    )


def test_explain_says_that_reductions_are_waited_for_where_they_need_not_be():
    waiting = replace(PLAN, groups=tuple(replace(g, overlap_grad_reduce=False) for g in PLAN.groups))
    lines = waiting.explain().splitlines()
    assert "gradients reduced once per step and waited for;" in next(x for x in lines if "group 0:" in x)
    assert "gradients reduced per microbatch;" in next(x for x in lines if "group 1:" in x)


def test_explain_shows_devices_and_estimates_where_the_plan_has_them():
    plan = replace(
        PLAN,
        devices=tuple(Device(rank, "node", rank, "A100") for rank in range(4)),
        estimates=Estimates(iteration_s=1.25, peak_memory_bytes=(2**30,) * 4, cost_per_iteration=0.01),
        model="llama-debug",
        sequence_length=128,
        cluster_fingerprint="abc",
        workload_fingerprint="def",
    )
    lines = plan.explain().splitlines()
    assert lines[1:6] == [
        "model: llama-debug",
        "sequence length: 128",
        "cluster: abc",
        "workload: def",
        "estimated: 1.25 s per step, cost 0.01 per step",
    ]
    assert lines[8] == "  rank  rows   share  microbatches            device       estimated peak"
    assert lines[9] == "     0     6  66.7 %  1 x 4 rows, 1 x 2 rows  node:0 A100  1.00 GiB"


def test_ranks_of_a_large_cluster_that_are_alike_share_a_line():
    """There was one for each of a thousand."""
    ranks = tuple(range(100))
    microbatches = tuple(Microbatch(rank, 2 * rank, 2 * rank + 2) for rank in ranks)
    devices = tuple(Device(rank, f"n{rank // 8}", rank % 8, "T4" if rank < 96 else "V100") for rank in ranks)
    plan = Plan(200, (Group(ranks, microbatches),), (Ministage(0, ("all",)),), devices=devices)
    assert [line.split() for line in plan.explain().splitlines()[3:6]] == [
        ["rank", "rows", "share", "microbatches", "device"],
        ["0-95", "2", "1.0", "%", "1", "x", "2", "rows", "T4"],
        ["96-99", "2", "1.0", "%", "1", "x", "2", "rows", "V100"],
    ]


def test_explain_shows_replicas():
    group = Group(ranks=((0, 1), 2), microbatches=(Microbatch(0, 0, 5), Microbatch(2, 5, 9)))
    stages = (Ministage(0, ("layers.0",)),)
    lines = Plan(global_batch=9, groups=(group,), ministages=stages, sequence_length=8).explain().splitlines()
    assert lines[3].startswith("group 0: ranks (0, 1), 2; tensor parallelism 2 and 1; ZeRO 2;")
    assert [line.split(maxsplit=2) for line in lines[5:8]] == [
        ["0", "5", "55.6 %  1 x 5 rows"],
        ["1", "with", "rank 0"],
        ["2", "4", "44.4 %  1 x 4 rows"],
    ]


def test_explain_tells_how_many_microbatches_may_be_in_flight():
    bounds = (3, 1)
    groups = tuple(replace(g, offload=(), max_in_flight=m) for g, m in zip(PLAN.groups, bounds, strict=True))
    lines = replace(PLAN, groups=groups).explain().splitlines()
    assert [line for line in lines if "in flight" in line] == [
        "  at most 3 microbatches of a rank in flight",
        "  at most 1 microbatch of a rank in flight",
    ]


def test_a_plan_that_contradicts_itself_is_not_explained():
    with pytest.raises(PlanError, match="global_batch is 0"):
        replace(PLAN, global_batch=0).explain()


@given(plans())
def test_explain_names_every_rank_and_ministage(plan):
    cells = [line.split() for line in plan.explain().splitlines()]
    for rank in range(plan.num_ranks):
        rows = sum(m.num_rows for m in plan.microbatches_of_rank(rank))
        assert any(line[:2] == [str(rank), str(rows)] for line in cells)
    for s, ministage in enumerate(plan.ministages):
        assert any(
            line[:1] == [str(s)] and line[1].strip(",") == ministage.modules[0] for line in cells[1:] if line
        )
