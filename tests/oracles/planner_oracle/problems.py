"""Questions to the planner drawn at random: clusters, models, batches, constraints, things that are fixed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zorselike.cost.catalogue import find_device
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.workload import Workload
from zorselike.planner.problem import Fixed, PlanProblem

from .clusters import DOLLARS_PER_HOUR, WIDE, Limits, draw_cluster, draw_number
from .profiles import draw_overheads, draw_profile
from .workloads import REAL_DECODERS, Decoder, make_workload

BYTES_PER_PARAMETER = 16
"""Training memory: weight, gradient and two moments in fp32."""


@dataclass(frozen=True)
class Drawn:
    """A question, and whether it is so small that all its plans can be tried."""

    problem: PlanProblem
    is_tiny: bool


def draw_problem(seed: int, limits: Limits = WIDE) -> Drawn:
    """The same for the same seed. One in six is tiny, with memory at the border of what fits."""
    rng = random.Random(seed)
    if rng.random() < 1 / 6:
        return Drawn(_draw_tiny(rng), is_tiny=True)
    return Drawn(_allow_replicas(seed, _draw_large(rng, limits)), is_tiny=False)


def _draw_large(rng: random.Random, limits: Limits) -> PlanProblem:
    dtype = rng.choice(["float16", "float16", "bfloat16", "float32"])
    types = [device for device in DOLLARS_PER_HOUR if dtype in find_device(device).peak_flops]
    cluster = draw_cluster(rng, types, limits)
    workload = _draw_workload(rng, cluster, dtype, limits.max_layers)
    return _ask(rng, workload, cluster, _draw_profile(rng, workload, cluster))


def _allow_replicas(seed: int, problem: PlanProblem) -> PlanProblem:
    """The same question of a model whose layers can be cut, in most; in some the degree is fixed. A generator
    of its own leaves what else is drawn as it was without."""
    rng = random.Random(f"replicas {seed}")
    most = rng.choice([1, 2, 3, 4, 8, 8, 16, 32])
    fixed = problem.fixed
    if rng.random() < 0.15:
        fixed = replace(fixed, tensor_parallel=rng.choice([d for d in (1, 2, 4, 8) if d <= most]))
    workload = replace(problem.workload, max_tensor_parallel=most)
    return replace(problem, workload=workload, fixed=fixed)


# -- model and times -----------------------------------------------------------------------


def _draw_workload(rng: random.Random, cluster: Cluster, dtype: str, max_layers: int) -> Workload:
    """A real model that may fit the cluster, or one of a width by which it takes from a thousandth of all
    memory to more than there is."""
    memory_bytes = count_memory(cluster)
    sequence_length = rng.choice([128, 512, 1024, 2048])
    num_moments = rng.choice([2, 2, 2, 1, 0])
    real = [
        shape
        for shape in REAL_DECODERS
        if shape.num_layers <= max_layers
        and BYTES_PER_PARAMETER * shape.num_layers * shape.layer_parameters < 1.5 * memory_bytes
    ]
    if real and rng.random() < 0.3:
        shape = rng.choice(real)
    else:
        share = math.exp(rng.uniform(math.log(1e-3), math.log(0.9)))
        shape = _draw_decoder(rng, memory_bytes, share=share, max_layers=min(48, max_layers))
    return make_workload(
        shape,
        sequence_length=sequence_length,
        dtype=dtype,
        num_frozen=rng.randint(1, shape.num_layers) if rng.random() < 0.1 else 0,
        num_moments=num_moments,
    )


def _draw_decoder(rng: random.Random, memory_bytes: int, *, share: float, max_layers: int) -> Decoder:
    """Layers that take a share of the memory for training."""
    num_layers = draw_number(rng, max_layers)
    width = math.isqrt(int(share * memory_bytes / (BYTES_PER_PARAMETER * num_layers * 12)))
    return Decoder(
        name="random decoder",
        num_layers=num_layers,
        width=max(64, width // 64 * 64),
        inner=max(64, width // 64 * 64) * 8 // 3,
        num_words=rng.choice([1_000, 32_000]),
        ties_head=rng.random() < 0.2,
    )


def count_memory(cluster: Cluster) -> int:
    """Memory of all devices."""
    return sum(
        node.memory_bytes[i] if node.memory_bytes else find_device(device).memory_bytes or 0
        for node in cluster.nodes
        for i, device in enumerate(node.devices)
    )


def _draw_profile(rng: random.Random, workload: Workload, cluster: Cluster) -> Profile:
    """Measured times, or none, which leaves the catalogue's."""
    if rng.random() < 0.4:
        return Profile(model=workload.model, overheads=draw_overheads(rng))
    types = sorted({device for node in cluster.nodes for device in node.devices})
    return draw_profile(rng, workload, types, most_rows=rng.random() < 0.2)


# -- questions -----------------------------------------------------------------------------


def _ask(rng: random.Random, workload: Workload, cluster: Cluster, profile: Profile) -> PlanProblem:
    num_devices = cluster.num_devices
    usable = None
    if rng.random() < 0.15:
        usable = tuple(sorted(rng.sample(range(num_devices), rng.randint(1, num_devices))))
    problem = PlanProblem(
        workload=workload,
        cluster=cluster,
        profile=profile,
        global_batch=max(1, int(num_devices * math.exp(rng.uniform(math.log(0.3), math.log(16.0))))),
        devices=usable,
        max_devices=rng.randint(1, num_devices) if rng.random() < 0.15 else None,
        spans_regions=rng.random() < 0.2,
        defer_updates=rng.random() < 0.2,
    )
    problem = _ask_for_money(rng, problem)
    if rng.random() < 0.1:
        problem = replace(problem, min_throughput=rng.choice([0.01, 0.2, 0.6, 1.5]) / find_ideal_s(problem))
    if rng.random() < 0.25:
        problem = replace(problem, fixed=_draw_fixed(rng, problem))
    return problem


def _ask_for_money(rng: random.Random, problem: PlanProblem) -> PlanProblem:
    price = sum(node.price_per_hour for node in problem.cluster.nodes)
    if not price or rng.random() < 0.4:
        return problem
    at_least = price * find_ideal_s(problem) / 3600
    changes: dict[str, Any] = {}
    if rng.random() < 0.6:
        changes["objective"] = "cost"
    if rng.random() < 0.5:
        changes["max_cost_per_iteration"] = at_least * rng.choice([0.3, 1.2, 3.0, 30.0])
    return replace(problem, **changes)


def find_ideal_s(problem: PlanProblem) -> float:
    """A step if all devices that may be used computed all the time, a row at once."""
    clock = LayerTimeModel(problem.profile, problem.workload)
    types = (problem.cluster.device_type(problem.cluster.places[i]) for i in problem.usable)
    speed = sum(1 / clock.model_s(device) for device in types)
    return problem.global_batch / speed


def _draw_fixed(rng: random.Random, problem: PlanProblem) -> Fixed:
    """One or two things, of which plans can be made."""
    num_layers = len(problem.workload.layers)
    kinds = ["groups", "ministages", "rows_per_microbatch", "zero", "grad_reduce", "recompute", "offload"]
    chosen = rng.sample(kinds, rng.choice([1, 1, 2]))
    groups = None
    if "groups" in chosen:
        groups = _draw_groups(rng, problem, most=num_layers)
    zero = rng.choice([0, 1, 2, 3]) if "zero" in chosen else None
    reduces = ["once"] if zero in (0, 1) else ["microbatch"] if zero == 3 else ["once", "microbatch"]
    return Fixed(
        groups=groups,
        ministages=rng.randint(len(groups or "1"), num_layers) if "ministages" in chosen else None,
        rows_per_microbatch=rng.choice([1, 2, 4]) if "rows_per_microbatch" in chosen else None,
        zero=zero,
        grad_reduce=rng.choice(reduces) if "grad_reduce" in chosen else None,  # type: ignore[arg-type]
        recompute=rng.choice(["none", "layer"]) if "recompute" in chosen else None,
        offload=rng.choice([(), ("params",), ("params", "optimizer"), ("activations",)])
        if "offload" in chosen
        else None,
    )


def _draw_groups(
    rng: random.Random, problem: PlanProblem, *, most: int
) -> tuple[tuple[int, ...], ...] | None:
    """Devices that may be used, by node or by type, some groups left out; only where all is connected."""
    cluster = problem.cluster
    if cluster.default_link is None:
        return None
    by_node = rng.random() < 0.5
    found: dict[tuple[str, str], list[int]] = {}
    for i in problem.usable:
        place = cluster.places[i]
        node = cluster.nodes[place.node]
        found.setdefault((node.region, node.name if by_node else cluster.device_type(place)), []).append(i)
    groups = [tuple(own) for own in found.values()]
    rng.shuffle(groups)
    kept = groups[: rng.randint(1, min(most, len(groups)))]
    if problem.max_devices is not None and sum(map(len, kept)) > problem.max_devices:
        return None
    return tuple(kept)


# -- tiny ones -----------------------------------------------------------------------------


def _draw_tiny(rng: random.Random) -> PlanProblem:
    """Two devices at most, four layers and three rows: from far too large for them to small."""
    dtype = rng.choice(["float16", "float32"])
    types = [device for device in DOLLARS_PER_HOUR if dtype in find_device(device).peak_flops]
    cluster = draw_cluster(rng, types, Limits(max_devices=2, max_types=2, max_regions=1))
    share = math.exp(rng.uniform(math.log(0.1), math.log(8.0)))
    shape = _draw_decoder(rng, count_memory(cluster), share=share, max_layers=2)
    shape = replace(shape, num_words=rng.choice([100, 1_000]))
    workload = make_workload(shape, sequence_length=rng.choice([128, 2048]), dtype=dtype)
    return PlanProblem(
        workload=workload,
        cluster=cluster,
        profile=Profile(model=workload.model, overheads=draw_overheads(rng)),
        global_batch=rng.randint(1, 3),
        max_devices=1 if rng.random() < 0.1 else None,
        fixed=_draw_tiny_fixed(rng),
    )


def _draw_tiny_fixed(rng: random.Random) -> Fixed:
    if rng.random() < 0.6:
        return Fixed()
    return rng.choice(
        [Fixed(zero=2), Fixed(offload=()), Fixed(recompute="none"), Fixed(rows_per_microbatch=1)]
    )


def name_cluster(cluster: Cluster, devices: Sequence[int] | None = None) -> str:
    """`7 devices of 2 types on 3 nodes`."""
    used = range(cluster.num_devices) if devices is None else devices
    places = [cluster.places[i] for i in used]
    types = {cluster.device_type(place) for place in places}
    nodes = {place.node for place in places}
    return f"{len(places)} devices of {len(types)} types on {len(nodes)} nodes"
