from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plans, random_plan, with_bounds, with_replicas

from zorselike.plan import (
    Device,
    Estimates,
    Group,
    Microbatch,
    Ministage,
    Plan,
    PlanError,
    validate_degrees,
    validate_modules,
)


@given(plans())
def test_valid_plans_pass(plan):
    assert plan.validate() is plan


@given(plans(round_robin=False))
def test_any_order_of_groups_passes(plan):
    plan.validate()


# One change to a valid plan each, and what the error must say.

Mutation = Callable[[Plan, random.Random], tuple[Plan, str] | None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


def with_group(plan: Plan, g: int, **changes: Any) -> Plan:
    groups = list(plan.groups)
    groups[g] = replace(groups[g], **changes)
    return replace(plan, groups=tuple(groups))


def with_ministage(plan: Plan, s: int, **changes: Any) -> Plan:
    ministages = list(plan.ministages)
    ministages[s] = replace(ministages[s], **changes)
    return replace(plan, ministages=tuple(ministages))


def with_microbatch(plan: Plan, g: int, i: int, **changes: Any) -> Plan:
    microbatches = list(plan.groups[g].microbatches)
    microbatches[i] = replace(microbatches[i], **changes)
    return with_group(plan, g, microbatches=tuple(microbatches))


def with_devices(plan: Plan) -> Plan:
    return replace(plan, devices=tuple(Device(rank, "n", rank, "cpu") for rank in range(plan.num_ranks)))


def with_device(plan: Plan, i: int, **changes: Any) -> Plan:
    devices = list(with_devices(plan).devices)
    devices[i] = replace(devices[i], **changes)
    return replace(plan, devices=tuple(devices))


def any_group(plan: Plan, rng: random.Random) -> int:
    return rng.randrange(len(plan.groups))


def any_microbatch(plan: Plan, rng: random.Random) -> tuple[int, int]:
    g = any_group(plan, rng)
    return g, rng.randrange(len(plan.groups[g].microbatches))


@mutation
def rows_missing(plan, rng):
    g, i = any_microbatch(plan, rng)
    gone = plan.groups[g].microbatches[i]
    rows = f"row {gone.start}" if gone.num_rows == 1 else f"rows {gone.start} to {gone.stop - 1}"
    left = tuple(m for m in plan.groups[g].microbatches if m != gone)
    return with_group(plan, g, microbatches=left), f"^group {g}: no rank computes {rows}; every row"


@mutation
def rows_doubled(plan, rng):
    g, i = any_microbatch(plan, rng)
    double = plan.groups[g].microbatches[i]
    rank = rng.choice(plan.groups[g].flat_ranks)
    more = (*plan.groups[g].microbatches, replace(double, rank=rank))
    ranks = (
        f"rank {rank} twice"
        if rank == double.rank
        else rf"ranks ({rank} and {double.rank}|{double.rank} and {rank})"
    )
    return with_group(
        plan, g, microbatches=more
    ), rf"^group {g}: computed more than once: rows? {double.start}\b.* by {ranks}"


@mutation
def microbatch_longer(plan, rng):
    g, i = any_microbatch(plan, rng)
    changed = with_microbatch(plan, g, i, stop=plan.groups[g].microbatches[i].stop + 1)
    return (
        changed,
        rf"^group {g}: (computed more than once: row \d+ by|rank \d+ has row {plan.global_batch}, but)",
    )


@mutation
def microbatch_beyond_the_batch(plan, rng):
    g, i = any_microbatch(plan, rng)
    rank = plan.groups[g].microbatches[i].rank
    changed = with_microbatch(plan, g, i, stop=plan.global_batch + 2)
    n = plan.global_batch
    return (
        changed,
        f"^group {g}: rank {rank} has rows {n} to {n + 1}, but the last of global_batch = {n} is row {n - 1}",
    )


@mutation
def microbatch_before_row_0(plan, rng):
    g, i = any_microbatch(plan, rng)
    return with_microbatch(
        plan, g, i, start=-1
    ), rf"^groups\[{g}\].microbatches\[{i}\].start is -1; give 0 or more"


@mutation
def microbatch_without_rows(plan, rng):
    g, i = any_microbatch(plan, rng)
    m = plan.groups[g].microbatches[i]
    changed = with_microbatch(plan, g, i, stop=m.start)
    return changed, rf"^groups\[{g}\].microbatches\[{i}\] of rank {m.rank} has no rows"


@mutation
def microbatch_of_a_foreign_rank(plan, rng):
    g, i = any_microbatch(plan, rng)
    rank = rng.choice([r for r in range(plan.num_ranks + 1) if r not in plan.groups[g].flat_ranks])
    changed = with_microbatch(plan, g, i, rank=rank)
    return changed, rf"^groups\[{g}\].microbatches\[{i}\] is for rank {rank}, which is not in the group"


@mutation
def microbatch_with_a_float(plan, rng):
    g, i = any_microbatch(plan, rng)
    changed = with_microbatch(plan, g, i, stop=float(plan.groups[g].microbatches[i].stop))
    return changed, rf"^groups\[{g}\].microbatches\[{i}\].stop is [\d.]+; it must be an integer"


@mutation
def microbatch_as_a_tuple(plan, rng):
    g = any_group(plan, rng)
    changed = with_group(plan, g, microbatches=((plan.groups[g].flat_ranks[0], 0, plan.global_batch),))
    return changed, rf"^groups\[{g}\].microbatches\[0\] is \(.*\); it must be of type Microbatch"


@mutation
def global_batch_larger(plan, rng):
    n = plan.global_batch
    return replace(plan, global_batch=n + 1), f"^group 0: no rank computes row {n}; every row"


@mutation
def global_batch_smaller(plan, rng):
    message = (
        "^global_batch is 0; give 1 or more"
        if plan.global_batch == 1
        else "^group 0: rank .* but the last of"
    )
    return replace(plan, global_batch=plan.global_batch - 1), message


@mutation
def rank_in_two_groups(plan, rng):
    if len(plan.groups) < 2:
        return None
    a, b = sorted(rng.sample(range(len(plan.groups)), 2))
    rank = rng.choice(plan.groups[a].flat_ranks)
    changed = with_group(plan, b, ranks=(*plan.groups[b].ranks, rank))
    return changed, f"^rank {rank} is in group {a} and in group {b}; a rank belongs to one group"


@mutation
def rank_twice_in_a_group(plan, rng):
    g = any_group(plan, rng)
    rank = rng.choice(plan.groups[g].flat_ranks)
    changed = with_group(plan, g, ranks=(*plan.groups[g].ranks, rank))
    return changed, f"^rank {rank} is twice in group {g}"


@mutation
def rank_skipped(plan, rng):
    n = plan.num_ranks
    g = any_group(plan, rng)
    changed = with_group(plan, g, ranks=(*plan.groups[g].ranks, n + 1))
    return (
        changed,
        f"^the plan has {n + 1} ranks, so they must be 0 to {n}, "
        f"but rank {n + 1} is in group {g} and rank {n} in none",
    )


@mutation
def rank_negative(plan, rng):
    g = any_group(plan, rng)
    changed = with_group(plan, g, ranks=(-1, *plan.groups[g].ranks))
    return changed, rf"^groups\[{g}\].ranks\[0\] is -1; give 0 or more"


@mutation
def group_without_ranks(plan, rng):
    g = any_group(plan, rng)
    return with_group(
        plan, g, ranks=()
    ), rf"^groups\[{g}\].ranks is empty; give the group a rank or remove it"


@mutation
def empty_replica(plan, rng):
    g = any_group(plan, rng)
    return with_group(
        plan, g, ranks=((), *plan.groups[g].ranks)
    ), rf"^groups\[{g}\].ranks\[0\] is empty; give the replica a rank"


@mutation
def microbatch_inside_a_replica(plan, rng):
    g = any_group(plan, rng)
    replica = plan.groups[g].flat_ranks
    if len(replica) < 2:
        return None
    microbatches = tuple(replace(m, rank=replica[1]) for m in plan.groups[g].microbatches)
    changed = replace(with_group(plan, g, ranks=(replica,), microbatches=microbatches), sequence_length=64)
    return (
        changed,
        rf"^groups\[{g}\].microbatches\[0\] is for rank {replica[1]}, inside a replica; name .* {replica[0]}",
    )


@mutation
def zero_wrong(plan, rng):
    g = any_group(plan, rng)
    zero, mend = rng.choice(
        [(4, "give one of 0, 1, 2, 3"), (-1, "give one of"), (True, "it must be an"), ("2", "it must be an")]
    )
    return with_group(plan, g, zero=zero, grad_reduce="once"), rf"^groups\[{g}\].zero is .*; {mend}"


@mutation
def grad_reduce_unknown(plan, rng):
    g = any_group(plan, rng)
    changed = with_group(plan, g, grad_reduce="microbatches")
    return changed, rf"^groups\[{g}\].grad_reduce is 'microbatches'; give .*; did you mean 'microbatch'\?"


@mutation
def grad_reduce_needs_sharded_gradients(plan, rng):
    g = any_group(plan, rng)
    zero = rng.randint(0, 1)
    changed = with_group(plan, g, zero=zero, grad_reduce="microbatch")
    return changed, rf"^groups\[{g}\].grad_reduce is 'microbatch' with zero = {zero},"


@mutation
def recompute_unknown(plan, rng):
    g = any_group(plan, rng)
    return with_group(
        plan, g, recompute="all"
    ), rf"^groups\[{g}\].recompute is 'all'; give one of 'none', 'layer'"


@mutation
def offload_unknown(plan, rng):
    g = any_group(plan, rng)
    changed = with_group(plan, g, offload=("param",))
    return changed, rf"^groups\[{g}\].offload\[0\] is 'param'; give one of .*; did you mean 'params'\?"


@mutation
def offload_twice(plan, rng):
    g = any_group(plan, rng)
    return with_group(plan, g, offload=("params", "params")), rf"^groups\[{g}\].offload names 'params' twice"


@mutation
def no_groups(plan, rng):
    return replace(plan, groups=()), r"^groups is empty; a plan needs at least one \[\[groups\]\]"


@mutation
def no_ministages(plan, rng):
    return replace(plan, ministages=()), r"^ministages is empty; a plan needs at least one"


@mutation
def group_without_ministages(plan, rng):
    n = plan.num_ranks
    extra = Group(ranks=(n,), microbatches=(Microbatch(n, 0, plan.global_batch),))
    g = len(plan.groups)
    return replace(
        plan, groups=(*plan.groups, extra)
    ), f"^group {g} owns no ministage; give it one or remove the group"


@mutation
def ministage_of_no_group(plan, rng):
    s = rng.randrange(plan.num_ministages)
    group = rng.choice([-1, len(plan.groups)])
    return with_ministage(plan, s, group=group), rf"^ministages\[{s}\].group is {group}; "


@mutation
def ministage_without_modules(plan, rng):
    s = rng.randrange(plan.num_ministages)
    return with_ministage(plan, s, modules=()), rf"^ministages\[{s}\].modules is empty"


@mutation
def modules_as_a_string(plan, rng):
    s = rng.randrange(plan.num_ministages)
    return with_ministage(
        plan, s, modules="norm"
    ), rf"^ministages\[{s}\].modules is 'norm'; it must be a tuple"


@mutation
def module_twice(plan, rng):
    a, b = sorted(rng.choices(range(plan.num_ministages), k=2))
    name = plan.ministages[a].modules[0]
    changed = with_ministage(plan, b, modules=(*plan.ministages[b].modules, name))
    place = f"twice in ministage {a}" if a == b else f"in ministages {a} and {b}"
    return changed, f"^module '{name}' is {place}"


@mutation
def module_within_another(plan, rng):
    a, b = rng.choices(range(plan.num_ministages), k=2)
    whole = plan.ministages[a].modules[0]
    part = f"{whole}.attention.wq"
    changed = with_ministage(plan, b, modules=(part, *plan.ministages[b].modules))
    return (
        changed,
        f"^module '{part}' in ministage {b} is part of '{whole}' in ministage {a}; name the whole",
    )


@mutation
def module_badly_named(plan, rng):
    s = rng.randrange(plan.num_ministages)
    name = rng.choice(["", ".layers", "layers.", "layers..0"])
    changed = with_ministage(plan, s, modules=(name,))
    return changed, rf"^ministages\[{s}\].modules\[0\] is '{name}'; give a dotted name"


@mutation
def device_missing(plan, rng):
    devices = list(with_devices(plan).devices)
    gone = devices.pop(rng.randrange(len(devices)))
    if not devices:
        return None
    return replace(
        plan, devices=tuple(devices)
    ), f"^devices lacks rank {gone.rank}; give a device for every rank"


@mutation
def device_of_no_rank(plan, rng):
    i, n = rng.randrange(plan.num_ranks), plan.num_ranks
    return with_device(plan, i, rank=n), rf"^devices\[{i}\].rank is {n}; the plan has ranks 0 to {n - 1}"


@mutation
def device_rank_twice(plan, rng):
    if plan.num_ranks < 2:
        return None
    a, b = sorted(rng.sample(range(plan.num_ranks), 2))
    return with_device(
        plan, b, rank=a
    ), rf"^devices\[{a}\] and devices\[{b}\] are both rank {a}; give each rank one"


@mutation
def device_place_twice(plan, rng):
    if plan.num_ranks < 2:
        return None
    a, b = sorted(rng.sample(range(plan.num_ranks), 2))
    changed = with_device(plan, b, local_rank=a)
    return (
        changed,
        rf"^devices\[{a}\] and devices\[{b}\] are both local rank {a} of node n; give each device one rank",
    )


@mutation
def device_without_a_node(plan, rng):
    i = rng.randrange(plan.num_ranks)
    return with_device(plan, i, node=""), rf"^devices\[{i}\].node is empty; give the hostname"


@mutation
def estimates_wrong(plan, rng):
    estimates, message = rng.choice(
        [
            (Estimates(iteration_s=float("nan")), "estimates.iteration_s is nan; give a finite number"),
            (Estimates(cost_per_iteration=-1.0), "estimates.cost_per_iteration is -1.0; give a finite"),
            (Estimates(iteration_s="1"), "estimates.iteration_s is '1'; it must be a number"),
            (Estimates(peak_memory_bytes=(1,) * (plan.num_ranks + 1)), "estimates.peak_memory_bytes has"),
            (Estimates(peak_memory_bytes=(1.5,)), r"estimates.peak_memory_bytes\[0\] is 1.5"),
            (Estimates(peak_memory_bytes=[1]), "estimates.peak_memory_bytes is .* it must be a tuple"),
            (Estimates(share_of_ideal=float("inf")), "estimates.share_of_ideal is inf; give a finite"),
            (Estimates(limited_by=("a", 1)), r"estimates.limited_by\[1\] is 1; it must be a string"),
            (None, "estimates is None; it must be of type Estimates"),
        ]
    )
    return replace(plan, estimates=estimates), f"^{message}"


@mutation
def header_wrong(plan, rng):
    change, message = rng.choice(
        [
            ({"sequence_length": 0}, "sequence_length is 0; give 1 or more"),
            ({"model": 3}, "model is 3; it must be a string"),
            ({"global_batch": 8.0}, "global_batch is 8.0; it must be an integer"),
            ({"groups": list(plan.groups)}, "groups is .* it must be a tuple"),
            ({"ministages": (None,)}, r"ministages\[0\] is None; it must be of type Ministage"),
        ]
    )
    return replace(plan, **change), f"^{message}"


@pytest.mark.parametrize("name", MUTATIONS)
@given(plan=plans(), rng=st.randoms(use_true_random=False))
def test_any_single_mistake_is_refused(name, plan, rng):
    mutated = MUTATIONS[name](plan, rng)
    if mutated is None:  # the plan is too small for this mistake
        return
    wrong, message = mutated
    with pytest.raises(PlanError, match=message) as error:
        wrong.validate()
    assert "\n" not in str(error.value)


@given(plans(max_ministages_per_group=3), st.randoms(use_true_random=False))
def test_bounds_on_microbatches_in_flight_pass(plan, rng):
    with_bounds(plan, rng).validate()


def bounded_plan() -> Plan:
    plan = random_plan(random.Random(0), max_ministages_per_group=1)
    assert len(plan.groups) > 1
    for g in range(len(plan.groups)):
        plan = with_group(plan, g, max_in_flight=None, offload=("optimizer",))
    return with_group(plan, 0, max_in_flight=3).validate()


@pytest.mark.parametrize(
    "bound, message",
    [
        (0, r"groups\[0\].max_in_flight is 0; give 1 or more"),
        (True, r"groups\[0\].max_in_flight is True; it must be an integer"),
        (2.0, r"groups\[0\].max_in_flight is 2.0; it must be an integer"),
    ],
)
def test_wrong_bounds_on_microbatches_in_flight_are_refused(bound, message):
    with pytest.raises(PlanError, match=f"^{message}$"):
        with_group(bounded_plan(), 0, max_in_flight=bound).validate()


def test_a_group_that_returns_to_its_ministages_keeps_no_whole_gradients_with_zero_2():
    plan = bounded_plan()
    more = replace(plan, ministages=(*plan.ministages, Ministage(1, ("one.more",))))
    second = next(s for s, ministage in enumerate(plan.ministages) if ministage.group == 1)
    message = (
        rf"^groups\[0\].max_in_flight is 3, but group 1 owns ministages {second} and {len(plan.ministages)} "
        'and returns .*: set zero = 1 or 3, or grad_reduce = "microbatch", or remove max_in_flight$'
    )
    with pytest.raises(PlanError, match=message):
        with_group(more, 1, zero=2, grad_reduce="once").validate()
    for zero, grad_reduce in ((0, "once"), (1, "once"), (2, "microbatch"), (3, "once")):
        with_group(more, 1, zero=zero, grad_reduce=grad_reduce).validate()


@pytest.mark.parametrize("g", [0, 1])
@pytest.mark.parametrize("kind", ["params", "activations"])
def test_where_microbatches_in_flight_are_bounded_the_optimizer_alone_is_offloaded(g, kind):
    wrong = with_group(bounded_plan(), g, offload=("optimizer", kind))
    message = (
        rf"^groups\[0\].max_in_flight is 3, but groups\[{g}\].offload names '{kind}'; .*: remove the others"
    )
    with pytest.raises(PlanError, match=message):
        wrong.validate()


REPLICAS = Plan(
    global_batch=4,
    groups=(
        Group(ranks=((0, 1), 2), microbatches=(Microbatch(0, 0, 3), Microbatch(2, 3, 4))),
        Group(ranks=((3, 4, 5, 6), (7, 8), 9), microbatches=(Microbatch(7, 0, 4),)),
    ),
    ministages=(Ministage(0, ("embed", "layers.0")), Ministage(1, ("layers.1", "norm"))),
    sequence_length=4,
)


@given(plans(max_groups=3), st.randoms(use_true_random=False))
def test_replicas_pass(plan, rng):
    plan = with_replicas(plan, rng).validate()
    assert plan.has_replicas == any(group.degree > 1 for group in plan.groups)
    for group in plan.groups:
        for replica in group.replicas:
            assert len({group.microbatches_by_rank[rank] for rank in replica.ranks}) == 1
            assert all(plan.replica_of(rank) == replica for rank in replica.ranks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ranks": ((3, 4, 5), (6, 7), 8, 9)},
            r"groups\[1\].ranks\[1\] is a replica of 2 ranks beside one of 3, .* every replica 1 or 3 ranks",
        ),
        (
            {"sequence_length": None},
            r"groups\[1\].ranks holds a tensor-parallel replica.* the plan has no sequence_length; give it",
        ),
        (
            {"sequence_length": 3},
            r"sequence_length is 3, and groups\[1\].ranks holds a replica of 4 ranks, .* give longer rows",
        ),
        (
            {"devices": {4: ("far", "A100")}},
            r"groups\[1\].ranks\[0\] .* across nodes: rank 3 is on 'near' and rank 4 on 'far'; keep a",
        ),
        (
            {"devices": {4: ("near", ""), 5: ("near", "T4")}},
            r"groups\[1\].ranks\[0\] .* unlike devices: rank 3 is 'A100' and rank 5 'T4'; .* of one type",
        ),
        ({"devices": {2: ("far", "T4"), 9: ("far", "V100")}}, None),
    ],
)
def test_what_replicas_must_be_like(change, message):
    plan = REPLICAS
    if "ranks" in change:
        plan = with_group(plan, 1, ranks=change["ranks"])
    if "sequence_length" in change:
        plan = replace(plan, sequence_length=change["sequence_length"])
    if "devices" in change:
        places = {**dict.fromkeys(range(10), ("near", "A100")), **change["devices"]}
        devices = tuple(Device(rank, node, rank, type_) for rank, (node, type_) in places.items())
        plan = replace(plan, devices=devices)
    if message is None:
        plan.validate()
        return
    with pytest.raises(PlanError, match=f"^{message}"):
        plan.validate()


def test_a_models_heads_say_which_degrees_it_allows():
    validate_degrees(REPLICAS, {})
    validate_degrees(REPLICAS, {"layers.0": 2, "layers.1": 4, "layers.2": 1})
    validate_degrees(REPLICAS, {"layers.0.attention": 2, "layers.1.attention": 8})
    for name in ("layers.1", "layers.1.attention"):
        message = (
            rf"^groups\[1\].ranks has a replica of 4 ranks, and '{name}' of ministages\[1\] can be cut "
            "into 2 .*: let no replica have more than 2 ranks"
        )
        with pytest.raises(PlanError, match=message):
            validate_degrees(REPLICAS, {"layers.0": 2, name: 2})


def test_an_enormous_batch_is_checked_at_once():
    group = Group(ranks=(0,), microbatches=(Microbatch(0, 0, 10**15),))
    Plan(global_batch=10**15, groups=(group,), ministages=(Ministage(0, ("layers",)),)).validate()


# The plan against a model.

LAYERS = [name for i in range(3) for name in (f"layers.{i}", f"layers.{i}.wq", f"layers.{i}.act")]
NAMES = ["", "embed", "layers", *LAYERS, "norm", "rope", "output"]
OWNERS = ["embed", *(f"layers.{i}.wq" for i in range(3)), "norm", "output"]


def plan_of(*ministages: list[str]) -> Plan:
    group = Group(ranks=(0,), microbatches=(Microbatch(0, 0, 1),))
    stages = tuple(Ministage(0, tuple(modules)) for modules in ministages)
    return Plan(global_batch=1, groups=(group,), ministages=stages).validate()


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(["embed", "layers.0"], ["layers.1", "layers.2", "norm", "output"]),
        plan_of(["embed", "layers"], ["norm", "rope", "output"]),
        plan_of(["embed", "layers.0.wq"], ["layers.0.act", "layers.1"], ["layers.2", "norm", "output"]),
    ],
)
def test_plans_of_the_models_modules_pass(plan):
    validate_modules(plan, NAMES, OWNERS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            plan_of(["embed", "layer.0"]),
            "ministages[0].modules: the model has no module 'layer.0'; did you mean 'layers.0'?",
        ),
        (plan_of(["embed"], ["xyzzy"]), "ministages[1].modules: the model has no module 'xyzzy'"),
        (
            plan_of(["embed", "layers.1"], ["layers.0", "layers.2", "norm", "output"]),
            "ministages[1].modules: 'layers.0' comes after 'layers.1' in the plan and before it in the model",
        ),
        (
            plan_of(["embed", "layers.1", "layers.0", "layers.2", "norm", "output"]),
            "ministages[0].modules: 'layers.0' comes after 'layers.1'",
        ),
        (
            plan_of(["embed", "layers.0"], ["layers.2", "norm", "output"]),
            "no ministage has module 'layers.1', which owns parameters of the model; add 'layers.1' to "
            "ministages[0].modules, after 'layers.0', or to the next ministage",
        ),
        (
            plan_of(["embed", "layers.0", "layers.1.act"], ["layers.2", "norm", "output"]),
            "no ministage has module 'layers.1.wq', which owns parameters of the model; add 'layers.1.wq'",
        ),
        (
            plan_of(["layers.0", "layers.1", "layers.2"]),
            "no ministage has modules 'embed', 'norm' and 'output', which own parameters of the model; "
            "add 'embed' to ministages[0].modules, first",
        ),
    ],
)
def test_plans_of_other_modules_are_refused(plan, message):
    with pytest.raises(PlanError) as error:
        validate_modules(plan, NAMES, OWNERS)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("planned", ["h.0", "layers.0", "model.layers.0"])
def test_the_models_own_name_is_suggested(planned: str) -> None:
    inner = ("transformer.h.0.attn", "transformer.h.0.experts.0", "transformer.h.1.attn")
    names = ["transformer.wte", "transformer.h", "transformer.h.0", *inner, "transformer.h.1", "lm_head"]
    with pytest.raises(PlanError, match=f"no module '{planned}'; did you mean 'transformer.h.0'"):
        validate_modules(plan_of([planned]), names, names)


def test_parameters_of_the_model_itself_are_refused():
    with pytest.raises(PlanError, match="the model itself owns parameters, outside any module"):
        validate_modules(plan_of(["embed", "layers", "norm", "output"]), NAMES, ["", *OWNERS])
