"""`zorselike plan`: searches for the best plan and prints the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from zorselike.cli.options import find_width
from zorselike.cli.plan.fixed import read_fixed
from zorselike.cli.plan.inputs import load_cluster, load_inputs
from zorselike.cli.plan.page import PlanPage
from zorselike.cli.plan.progress import show_count, show_progress
from zorselike.cli.plan.quotas import choose_devices, read_quotas
from zorselike.cost.layer_times import LayerTimeModel
from zorselike.errors import ConfigError, FileError
from zorselike.planner.answer import OnProgress, PlanAnswer, Progress
from zorselike.planner.devices.choose import leave_out_unknown
from zorselike.planner.explain.answer import format_answer
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search import search
from zorselike.planner.search.helpers import count_cores
from zorselike.text.layout import wrap_prose
from zorselike.text.units import read_time
from zorselike.text.wording import list_few

if TYPE_CHECKING:
    from zorselike.cli.plan.command import PlanCommand, SearchOptions
    from zorselike.planner.explain.kinds import Addition
    from zorselike.simulator.simulated_plan import Baseline

_OF_KINDS = 0.5
"""Additional time of `--explain`, for all kinds of devices together, as a share of the budget."""
_LEAST_BUDGET_S = 0.5


def print_best_plan(command: PlanCommand) -> None:
    """Searches, writes the best plan, and prints what the options ask for.

    Raises:
        ConfigError, ClusterError, ProfileError, PlanError: an option or file is missing or wrong.
        NothingFitsError: no plan fits; names the smallest change that would help.
    """
    budget_s = _read_budget(command.search.budget)
    if command.search.top < 1:
        raise ConfigError(f"plan: --top is {command.search.top}; it must be at least 1")
    if command.search.workers is not None and command.search.workers < 1:
        raise ConfigError(f"plan: --workers is {command.search.workers}; it must be at least 1")
    problem, notes = _make_problem(command)
    problem.check()
    problem, left_out = leave_out_unknown(problem, LayerTimeModel(problem.profile, problem.workload))
    notes = (*notes, *left_out)
    width = find_width()
    page = None if command.search.html is None else PlanPage(command.search.html)
    answer = _search(problem, command.search, budget_s, "planning", None if page is None else page.follow)
    _save(command, answer)
    additions: tuple[Addition, ...] = ()
    if command.search.explain and answer.ending != "interrupted":
        answer, additions = _find_additions(command, problem, answer, budget_s)
        _save(command, answer)
    sections = format_answer(
        answer, problem, budget_s=budget_s, notes=notes, tells_limits=not command.search.explain
    )
    explained = (
        _explain(problem, answer, additions, width) if command.search.explain else _list_assumptions(answer)
    )
    for section in chain(sections, explained):
        print(f"{wrap_prose(section, width)}\n", flush=True)
    baselines = _plan_baselines(command, problem, answer)
    for section in _compare(answer, baselines):
        print(f"{wrap_prose(section, width)}\n", flush=True)
    for line in _launch(command, problem, answer):
        print(line)
    if page is not None:
        page.write(problem, answer, baselines, notes=(*notes, *answer.notes))
        print(f"wrote {page.path}: open it in a browser")
    print(f"wrote {command.search.output}")


def _save(command: PlanCommand, answer: PlanAnswer) -> None:
    answer.best.case.plan.save(command.search.output)


def _read_budget(text: str) -> float:
    try:
        budget_s = read_time(text, "plan: --budget")
    except FileError:
        raise ConfigError(f"plan: --budget is '{text}'; write a time with its unit, such as 30s") from None
    if budget_s <= 0:
        raise ConfigError(f"plan: --budget is {text}; give more than 0s")
    return budget_s


# -- the problem -------------------------------------------------------------------------------


def _make_problem(command: PlanCommand) -> tuple[PlanProblem, tuple[str, ...]]:
    """The planner's problem, and notes for the reader."""
    options = command.problem
    cluster = load_cluster("plan", command)
    quotas = read_quotas([*chain(*options.quota)], cluster)
    devices = choose_devices(cluster, quotas)
    fixed = read_fixed([*chain(*options.fix)], cluster, devices, spans_regions=options.span_regions)
    types = {cluster.device_type(cluster.places[device]) for device in devices}
    inputs = load_inputs("plan", command, cluster, types)
    workload = inputs.workload
    if fixed.rows_per_microbatch is not None and fixed.rows_per_microbatch > command.global_batch:
        raise ConfigError(
            f"plan: --fix rows_per_microbatch={fixed.rows_per_microbatch} of a --global-batch of "
            f"{command.global_batch}; a microbatch has no more rows than a step"
        )
    limit = options.max_cost_per_iteration
    problem = PlanProblem(
        workload=workload,
        cluster=cluster,
        profile=inputs.profile,
        global_batch=command.global_batch,
        objective=options.objective,
        max_cost_per_iteration=inf if limit is None else limit,
        min_throughput=_find_min_throughput(command, workload.sequence_length),
        max_devices=options.max_devices,
        devices=devices if quotas else None,
        spans_regions=options.span_regions,
        defer_updates=options.defer_updates or workload.dtype == "float16",
        is_mirrored=options.elastic,
        fixed=fixed,
    )
    frozen = [f"{workload.model}: {told}" for told in [workload.describe_frozen()] if told]
    return problem, (*frozen, *inputs.notes, *_describe_updates(command, problem), *_list_free(problem))


def _find_min_throughput(command: PlanCommand, sequence_length: int) -> float:
    """Steps per second."""
    steps, tokens = command.problem.min_throughput, command.problem.min_tokens_per_s
    if steps is not None and tokens is not None:
        raise ConfigError("plan: --min-throughput and --min-tokens-per-s are both given; keep one")
    if tokens is not None:
        return tokens / (command.global_batch * sequence_length)
    return steps or 0.0


def _describe_updates(command: PlanCommand, problem: PlanProblem) -> list[str]:
    if problem.workload.dtype != "float16" or command.problem.defer_updates:
        return []
    return ["computes in float16 with loss scaling: updates wait for the end of the step"]


def _list_free(problem: PlanProblem) -> list[str]:
    """Nodes that may be used and have no price, where money decides."""
    cluster = problem.cluster
    usable = sorted({cluster.places[device].node for device in problem.usable})
    free = [cluster.nodes[i].name for i in usable if not cluster.nodes[i].price_per_hour]
    return (
        [f"no price_per_hour, so free: {list_few(free, 'node')}"] if free and problem.asks_for_money else []
    )


def _search(
    problem: PlanProblem,
    options: SearchOptions,
    budget_s: float,
    what: str,
    also: OnProgress | None = None,
) -> PlanAnswer:
    """`also` is told of progress as the bar is."""
    with show_progress(budget_s, what) as show:

        def tell(progress: Progress) -> None:
            show(progress)
            if also is not None:
                also(progress)

        return search.search_plans(
            problem,
            budget_s=budget_s,
            top=options.top,
            seed=options.seed,
            on_progress=tell,
            all_devices=options.all_devices,
            workers=count_cores() if options.workers is None else options.workers,
        )


# -- further output ---------------------------------------------------------------------------


def _find_additions(
    command: PlanCommand, problem: PlanProblem, answer: PlanAnswer, budget_s: float
) -> tuple[PlanAnswer, tuple[Addition, ...]]:
    """Searches without each kind of device, to find what it adds."""
    from zorselike.planner.explain.kinds import find_additions

    share_s = max(_LEAST_BUDGET_S, _OF_KINDS * budget_s / len({*answer.best.case.device_types}))
    return find_additions(problem, answer, lambda rest, what: _search(rest, command.search, share_s, what))


def _list_assumptions(answer: PlanAnswer) -> Iterator[str]:
    costs = answer.best.case.costs
    if costs.assumptions:
        yield "\n".join(["Not measured, so assumed:", *(f"- {each}" for each in costs.assumptions)])
    if costs.memory_corrections:
        yield "\n".join(f"Memory as measured: {each}" for each in costs.memory_corrections)


def _explain(
    problem: PlanProblem, answer: PlanAnswer, additions: Sequence[Addition], width: int
) -> Iterator[str]:
    """The page: the step as `simulate` shows it, what each kind of device adds, and what the next best plan
    would trade."""
    from zorselike.planner.explain.kinds import describe_additions
    from zorselike.planner.explain.plans import describe_trade, drop_alike
    from zorselike.planner.explain.step import describe_page

    yield describe_page(answer.best, problem, width=width)
    sentences = describe_additions(problem, answer.best, additions, ending=answer.ending)
    sentences += [describe_trade(answer.best, other) for other in drop_alike(answer.plans)[1:2]]
    if sentences:
        yield "\n".join(sentences)


def _plan_baselines(
    command: PlanCommand, problem: PlanProblem, answer: PlanAnswer
) -> Sequence[Baseline] | None:
    """What `--compare` asks for."""
    if not command.search.compare:
        return None
    from zorselike.planner.baselines.subsets import plan_best_on_subsets
    from zorselike.planner.baselines.systems import plan_baselines

    places = problem.cluster.places
    used = [places.index(place) for place in answer.best.case.costs.places]
    with show_count("comparing", "system") as tell:
        baselines = plan_baselines(problem, tell)
        return *baselines, plan_best_on_subsets(problem, baselines, used, tell)


def _compare(answer: PlanAnswer, baselines: Sequence[Baseline] | None) -> Iterator[str]:
    if baselines is None:
        return
    from zorselike.planner.explain.step import tabulate_baselines

    table = tabulate_baselines(answer.best, baselines)
    yield "\n".join(["Other systems on the same devices:", *(f"  {line}" for line in table)])


def _launch(command: PlanCommand, problem: PlanProblem, answer: PlanAnswer) -> Iterator[str]:
    """Writes what `--launch` asks for; lines for the user."""
    from zorselike.cli.launch.job import Job, Program
    from zorselike.cli.launch.launchers import write_launch

    if command.search.launch is None:
        return
    program = Program(
        model=command.model.list_options(problem.workload.model),
        dtype=problem.workload.dtype,
        defer_updates=problem.defer_updates,
    )
    path, plan = command.search.output, answer.best.case.plan
    job = Job(plan=plan, path=path, program=program, cluster=problem.cluster)
    for launcher in command.search.launch or ("torchrun",):
        try:
            yield from write_launch(job, launcher)
        except ConfigError as error:  # The plan is found and kept, whatever can start it.
            yield f"no file for {launcher}: {str(error).removeprefix('launch: ')}"
        yield ""
