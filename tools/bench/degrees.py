"""What tensor-parallel degrees are worth where a node's fabric is far faster than its network: the best plan
that a search finds with them beside the best without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zorselike.cost.profile import Overheads, Profile, Source
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.planner.answer import Planned
from zorselike.planner.explain.plans import describe_groups
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search.search import search_plans

from planner_oracle.workloads import REAL_DECODERS, make_workload

GIGABIT = 1e9 / 8
HEADS = 32
"""Of keys and values, so that layers can be cut into as many parts."""
FABRICS = {"A100-40": 300e9, "V100-16": 150e9, "H100-SXM": 450e9, "A100-80": 300e9}
"""Of a node, bytes per second between two of its cards."""
CONTEXT_BYTES, COMMUNICATOR_BYTES = 2**29, 100 * 2**20


@dataclass(frozen=True)
class Question:
    """Nodes of cards of one type each, on a slow network."""

    name: str
    nodes: tuple[tuple[str, int], ...]
    """Type and number of cards of each."""
    gigabits: float
    model: str
    global_batch: int


QUESTIONS = (
    Question("4 x 8 A100, 7B", (("A100-40", 8),) * 4, 10, "llama 7b", 64),
    Question("4 x 8 A100, 7B, large batch", (("A100-40", 8),) * 4, 10, "llama 7b", 512),
    Question("4 x 8 A100, 13B", (("A100-40", 8),) * 4, 25, "llama 13b", 128),
    Question(
        "2 x 8 V100 + 4 single A100, 7B", (("V100-16", 8),) * 2 + (("A100-80", 1),) * 4, 10, "llama 7b", 64
    ),
    Question("8 x 8 V100, 13B", (("V100-16", 8),) * 8, 25, "llama 13b", 128),
)


@dataclass(frozen=True)
class Worth:
    """Two answers to a question."""

    question: Question
    without_s: float
    with_s: float
    degrees: str
    groups: str

    @property
    def faster(self) -> float:
        """By so much of its time a step without is longer."""
        return self.without_s / self.with_s - 1


def find_worths(questions: Iterable[Question], budget_s: float) -> Iterator[Worth]:
    """Of questions, each searched twice."""
    for question in questions:
        problem = ask(question)
        best, single = (
            search_plans(replace(problem, fixed=fixed), budget_s=budget_s, top=1).best
            for fixed in (Fixed(), Fixed(tensor_parallel=1))
        )
        yield Worth(question, _step_s(single), _step_s(best), _describe_degrees(best), describe_groups(best))


def ask(question: Question) -> PlanProblem:
    """With the catalogue's times."""
    shape = next(own for own in REAL_DECODERS if own.name == question.model)
    workload = make_workload(shape, sequence_length=2048, dtype="float16")
    link = Link(question.gigabits * GIGABIT, 2e-5)
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=(device,) * number,
            host_memory_bytes=2**39,
            fabric=Link(FABRICS[device], 5e-6),
            nic=link,
        )
        for i, (device, number) in enumerate(question.nodes)
    )
    overheads = Overheads(
        context_bytes=CONTEXT_BYTES,
        communicator_bytes=COMMUNICATOR_BYTES,
        allocator_share=0.05,
        source=Source("given", note="assumed"),
    )
    return PlanProblem(
        workload=replace(workload, max_tensor_parallel=HEADS),
        cluster=Cluster(nodes=nodes, default_link=link),
        profile=Profile(model=workload.model, overheads=overheads),
        global_batch=question.global_batch,
        defer_updates=True,
    )


def _step_s(planned: Planned) -> float:
    return planned.case.simulation.iteration_s


def _describe_degrees(planned: Planned) -> str:
    degrees = [max(replica.degree for replica in group.replicas) for group in planned.case.plan.groups]
    return "/".join(map(str, degrees))


def format_worth(own: Worth) -> str:
    """A line."""
    return (
        f"{own.question.name:<32}{own.question.gigabits:>8g}{own.without_s:>12.3f}{own.with_s:>10.3f}"
        f"{own.faster:>9.1%}  {own.degrees:<12} {own.groups}"
    )


HEADING = f"{'cluster':<32}{'Gbit/s':>8}{'without, s':>12}{'with, s':>10}{'faster':>9}  degrees"


def list_misses(worths: list[Worth]) -> list[str]:
    """Questions on which plans with degrees lose, and whether they win nowhere."""
    misses = [f"{own.question.name}: {own.faster:.1%}" for own in worths if own.faster < -0.01]
    if worths and max(own.faster for own in worths) < 0.05:
        misses.append("tensor parallelism is worth 5 % nowhere")
    return misses
