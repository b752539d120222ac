"""Small cases of which all plans can be tried, and how near to the best of them the search comes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from itertools import islice

from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.workload import Workload
from zorselike.planner.answer import NothingFitsError, PlanAnswer
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.simulator.simulated_plan import SimulatedPlan

from .clusters import DOLLARS_PER_HOUR
from .every_plan import Options, list_shapes
from .optimum import Optimum, find_optimum, list_sizes
from .profiles import draw_profile
from .trials import describe_error
from .workloads import make_chain

MAX_PLANS = 2000
MIN_PLANS = 8
TYPES = ("A100-80", "A100-40", "V100-32", "RTX4090", "T4")
RATES = (1e9, 4e9, 16e9, 64e9, 256e9)


@dataclass(frozen=True)
class SmallCase:
    """A question with its options fixed."""

    problem: PlanProblem
    options: Options


def draw_case(seed: int, *, max_plans: int = MAX_PLANS) -> SmallCase:
    """At most 4 devices, 6 layers and 8 rows, and so many plans; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        case = _draw(rng)
        num_sizes = len(list_sizes(case.problem, case.options))
        num_plans = num_sizes * sum(1 for _ in islice(list_shapes(case.problem), max_plans + 1))
        if MIN_PLANS <= num_plans <= max_plans:
            return case


def _draw(rng: random.Random) -> SmallCase:
    workload = _draw_workload(rng)
    zero = rng.choice([0, 1, 2, 2, 2, 3])
    options = Options(
        zero=zero,
        grad_reduce="microbatch" if zero == 3 or (zero == 2 and rng.random() < 0.2) else "once",
        recompute=rng.choice(["none", "layer"]),
        offload=rng.choice([(), (), (), (), ("params",), ("params", "optimizer"), ("activations",)]),
        rows_per_microbatch=rng.choice([1, 1, 2, 3]),
    )
    cluster = _draw_cluster(rng, workload)
    types = sorted({device for node in cluster.nodes for device in node.devices})
    problem = PlanProblem(
        workload=workload,
        cluster=cluster,
        profile=draw_profile(rng, workload, types, most_rows=False),
        global_batch=rng.randint(2, 8),
        objective="cost" if cluster.nodes[0].price_per_hour else "throughput",
        fixed=Fixed(
            zero=options.zero,
            grad_reduce=options.grad_reduce,
            overlap_grad_reduce=options.overlap_grad_reduce,
            recompute=options.recompute,
            offload=options.offload,
            rows_per_microbatch=options.rows_per_microbatch,
            bounds_in_flight=False,
        ),
    )
    return SmallCase(problem, options)


def _draw_workload(rng: random.Random) -> Workload:
    """Layers alike, the first light and the last heavy, or each of a weight of its own."""
    number = rng.randint(2, 6)
    weights = [1.0] * number
    match rng.choice(["alike", "ends", "all"]):
        case "ends":
            weights[0], weights[-1] = 0.05, rng.uniform(0.3, 2.0)
        case "all":
            weights = [rng.choice([0.25, 0.5, 1.0, 1.5, 3.0]) for _ in weights]
    return make_chain(
        weights,
        width=rng.choice([512, 1024, 4096]),
        tokens=rng.choice([128, 1024]),
        dtype=rng.choice(["float16", "float32"]),
    )


def _draw_cluster(rng: random.Random, workload: Workload) -> Cluster:
    """One to three nodes; in one case of four devices that cannot hold the whole model, in one of eight
    prices, and with them the question for the least money."""
    types = rng.sample(TYPES, rng.randint(1, 3))
    left = rng.randint(2, 4)
    has_prices = rng.random() < 0.125
    total_bytes = 20 * workload.num_parameters
    memory_bytes = int(total_bytes * rng.uniform(0.4, 1.2)) if rng.random() < 0.25 else None
    nodes: list[Node] = []
    while left:
        size = rng.randint(1, left)
        left -= size
        devices = tuple(rng.choices(types, k=size)) if rng.random() < 0.3 else (rng.choice(types),) * size
        nodes.append(
            Node(
                name=f"n{len(nodes)}",
                devices=devices,
                memory_bytes=() if memory_bytes is None else (memory_bytes,) * size,
                price_per_hour=sum(DOLLARS_PER_HOUR[device] for device in devices) if has_prices else 0.0,
                fabric=Link(rng.choice(RATES)) if size > 1 else None,
                nic=Link(rng.choice(RATES)) if rng.random() < 0.5 else None,
            )
        )
    return Cluster(
        nodes=tuple(nodes), default_link=Link(rng.choice(RATES), rng.choice([0.0, 5e-5]))
    ).validate()


@dataclass(frozen=True)
class Comparison:
    """The search beside the best of all plans."""

    seed: int
    case: SmallCase = field(repr=False)
    optimum: Optimum
    found: SimulatedPlan | None = field(repr=False)
    """The search's plan; None where it says that nothing fits."""
    answer: PlanAnswer | None = field(repr=False)
    search_s: float
    error: str = ""
    """The error of a search that failed."""

    @property
    def score(self) -> float | None:
        return None if self.found is None else _score(self.case.problem, self.found)

    @property
    def best_score(self) -> float | None:
        """Seconds of the best of all plans, or its money."""
        return None if self.optimum.case is None else _score(self.case.problem, self.optimum.case)

    @property
    def excess(self) -> float | None:
        """By how much the search is worse, as a share; below 0 where it found what is not among all plans,
        such as microbatches of several sizes. None where nothing fits by either of both."""
        if self.score is None or self.best_score is None:
            return None
        return self.score / self.best_score - 1

    @property
    def fault(self) -> str | None:
        """What is wrong whatever the times are."""
        if self.error:
            return self.error
        if self.optimum.case is not None and self.found is None:
            return "the search says that nothing fits, and a plan does"
        if self.answer is not None and self.found is not None:
            bound_s, step_s = self.answer.progress.bound_s, self.found.simulation.iteration_s
            if bound_s > step_s * (1 + 1e-9):
                return f"the bound of {bound_s:.4g} s is above the step of {step_s:.4g} s"
            if self.optimum.case is not None:
                best_s = self.optimum.case.simulation.iteration_s
                if bound_s > best_s * (1 + 1e-9):
                    return f"the bound of {bound_s:.4g} s is above the best plan's step of {best_s:.4g} s"
        return None


def _score(problem: PlanProblem, case: SimulatedPlan) -> float:
    return case.simulation.cost if problem.objective == "cost" else case.simulation.iteration_s


def compare(seed: int, *, budget_s: float, max_plans: int = MAX_PLANS) -> Comparison:
    """Searches one case and tries all its plans."""
    case = draw_case(seed, max_plans=max_plans)
    begin_s = time.perf_counter()
    answer: PlanAnswer | None = None
    error = ""
    try:
        answer = search_plans(case.problem, budget_s=budget_s, top=1)
    except NothingFitsError:
        pass
    except Exception as failure:
        error = describe_error(failure)
    search_s = time.perf_counter() - begin_s
    return Comparison(
        seed=seed,
        case=case,
        optimum=find_optimum(case.problem, case.options),
        found=None if answer is None else answer.best.case,
        answer=answer,
        search_s=search_s,
        error=error,
    )
