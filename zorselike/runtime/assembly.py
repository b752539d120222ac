"""Puts a pipeline together: from model and plan to ministages, channels and action lists."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime.arguments import check_model
from zorselike.runtime.comm.ranks import Groups, ProcessGroup, Ranks
from zorselike.runtime.comm.transport import Transport, edges_of
from zorselike.runtime.loss import Unpack
from zorselike.runtime.meshes import Meshes, backend_for
from zorselike.runtime.ministage.gradients import HALF
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.norm_sums import NormGroup
from zorselike.runtime.ministage.settings import MinistageSettings, RankResources
from zorselike.runtime.ministage.ties import TiedWeights, borrowed_names, tied_names
from zorselike.runtime.ministage.updates import Clip, LossScale, OptimizerFactory, Updates
from zorselike.runtime.model.boundaries import StepInputs, Trace, Traces, trainable_ministages
from zorselike.runtime.model.initialize import initialize_unit
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.partition import Split, Tie, find_ties, partition
from zorselike.runtime.model.pruning import plan_module
from zorselike.runtime.processes.world import ProcessInfo, check_world, describe_process, gather_world
from zorselike.runtime.state.inventory import Inventory
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.runtime.tensor_parallel.cut_plan import CutPlan, cut_model
from zorselike.runtime.tensor_parallel.styles import TensorParallelPlan
from zorselike.schedule.actions import Action, Edge
from zorselike.schedule.build import build
from zorselike.schedule.checker.check import CheckReport, check
from zorselike.schedule.contract import find_crowded
from zorselike.schedule.spec import ScheduleSpec
from zorselike.text.wording import count

logger = logging.getLogger("zorselike")


@dataclass(frozen=True)
class CompiledPlan:
    """Ministages, schedules and their proof, from model and plan alone; the same on every rank."""

    plan: Plan
    parts: tuple[ModelPart, ...]
    ties: tuple[Tie, ...]
    spec: ScheduleSpec
    """The step's schedule options: what trains, what is tied, when updates run."""
    step_actions: dict[int, list[Action]]
    evaluate_actions: dict[int, list[Action]]
    report: CheckReport
    state: tuple[dict[str, Tensor], ...]
    """Parameters and persistent buffers of each ministage as the model was given, by global name, on the meta
    device."""
    traces: Traces = field(default_factory=Traces, compare=False)
    """What is known of this model in these ministages."""
    cut: CutPlan = field(default_factory=CutPlan)
    """What tensor-parallel replicas have in pieces."""


def compile_plan(
    model: nn.Module,
    plan: Plan,
    *,
    split: Split | None = None,
    unpack: Unpack | None = None,
    defer_steps: bool = False,
    param_dtype: torch.dtype | None = None,
    traces: Traces | None = None,
    tp_plan: TensorParallelPlan | None = None,
) -> CompiledPlan:
    """Divides the model, builds the schedules and proves them; needs no process group. `tp_plan`: how layers
    are cut over the ranks of a replica, by default as the model itself says.

    `traces`: of the same model in the same ministages; what it was tried out for is not tried again.

    Raises `PlanError` where plan and model disagree and `ConfigError` where nothing trains or
    this runtime lacks something that the plan asks for.
    """
    plan.validate()
    traces = traces or Traces()
    check_model(model, plan, is_copied=not callable(split))
    parts = tuple(partition(model, plan, split=split, unpack=unpack, is_proven=traces.is_proven))
    traces.is_proven = parts[0].skeleton.takes_any_shape
    ties = tuple(find_ties(model, plan))
    _refuse_mixed_dtypes(parts)
    _refuse_uneven_sharing(plan, parts)
    tied = [name for tie in ties for name in (tie.owner_fqn, tie.borrower_fqn)]
    cut = cut_model(model, plan, parts, tp_plan, tied=tied)
    trainable = trainable_ministages(parts)
    if not any(trainable):
        raise ConfigError("no parameter of the model requires a gradient; nothing would be trained")
    spec = ScheduleSpec(
        plan,
        trainable=trainable,
        ties=tuple(
            (tie.owner_ministage, tie.borrower_ministage)
            for tie in ties
            if model.get_parameter(tie.owner_fqn).requires_grad
        ),
        defer_steps=defer_steps,
        masters=have_masters(model, param_dtype),
    )
    step_actions = build(spec)
    report = check(spec, step_actions)
    evaluation_spec = replace(spec, forward_only=True)
    evaluate_actions = build(evaluation_spec)
    evaluation = check(evaluation_spec, evaluate_actions)
    return CompiledPlan(
        plan=plan,
        parts=parts,
        ties=ties,
        spec=spec,
        step_actions=step_actions,
        evaluate_actions=evaluate_actions,
        report=replace(
            report,
            buffered_edges=report.buffered_edges | evaluation.buffered_edges,
            cycles=report.cycles + evaluation.cycles,
            early=report.early + evaluation.early,
        ),
        state=tuple(
            {name: t.detach().to("meta") for name, t in part.module.state_dict().items()} for part in parts
        ),
        traces=traces,
        cut=cut,
    )


def have_masters(model: nn.Module, param_dtype: torch.dtype | None) -> bool:
    """Whether all that trains computes in half precision, and so has fp32 master weights."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return all((param_dtype or p.dtype) in HALF for p in trained)


def check_unit_order(compiled: CompiledPlan, trace: Trace) -> None:
    """With ZeRO 3 gathers happen as layers are called, and ranks without a microbatch join them in
    the plan's order: raises `ConfigError` for a ministage that calls its layers otherwise."""
    for index, (part, calls) in enumerate(zip(compiled.parts, trace.unit_calls, strict=True)):
        group = compiled.plan.group_of(index)
        if group.zero == 3 and len(group.flat_ranks) > 1 and calls != part.units:
            found, listed = next(
                pair
                for pair in zip_longest(calls, part.units, fillvalue="nothing more")
                if pair[0] != pair[1]
            )
            mend = "list them in that order, or " if sorted(calls) == sorted(part.units) else ""
            raise ConfigError(
                f"ministage {index} calls '{found}' where the plan lists '{listed}'; zero = 3 needs each "
                f"module of it called once, in the plan's order: {mend}set zero = 2 in "
                f"groups[{compiled.plan.ministages[index].group}]"
            )


def _refuse_uneven_sharing(plan: Plan, parts: Sequence[ModelPart]) -> None:
    """With ZeRO 3 a rank with fewer microbatches runs backwards of none of its rows, in which FSDP2 reduces
    modules that share a weight in another order than where there are rows: collectives would not match."""
    for i, part in enumerate(parts):
        group = plan.group_of(i)
        if group.zero != 3 or not group.has_uneven_counts:
            continue
        names: dict[int, str] = {}
        for fqn, parameter in part.module.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), fqn)
            if first != fqn and parameter.requires_grad:
                raise PlanError(
                    f"groups[{plan.ministages[i].group}].zero is 3, its ranks have different numbers of "
                    f"microbatches, and ministage {i} holds '{first}' and '{fqn}', which are one weight; use "
                    "zero = 2, as many microbatches on every rank, or cut the two into different ministages"
                )


def _refuse_mixed_dtypes(parts: Sequence[ModelPart]) -> None:
    """FSDP2 gathers and reduces a unit's parameters as one flat tensor."""
    for part in parts:
        dtypes: dict[str, dict[torch.dtype, str]] = {}
        for fqn, parameter in part.module.named_parameters():
            if parameter.requires_grad:
                unit = plan_module(fqn, part.units) or ""
                dtypes.setdefault(unit, {}).setdefault(parameter.dtype, fqn)
        for unit, names in dtypes.items():
            where = f"module '{unit}'" if unit else part.name
            if len(names) > 1:
                found = " and ".join(
                    f"{str(dtype).removeprefix('torch.')} ('{fqn}')" for dtype, fqn in names.items()
                )
                raise ConfigError(
                    f"{where} has trainable parameters of {found}, which cannot be sharded as "
                    "one: build the model in float32; param_dtype=torch.bfloat16 is what layers compute in"
                )


def find_ranks(
    plan: Plan, device: torch.device, *, named_device: str | None
) -> tuple[Ranks, tuple[ProcessInfo, ...]]:
    """Matches processes to the plan's ranks; the same errors on every rank. `named_device`: the
    kind of device that the caller asked for, if any."""
    process = dist.get_rank()
    processes = tuple(gather_world(describe_process(device, rank=process)))
    rank_of = check_world(processes, plan, device=named_device)
    process_of = {rank: other for other, rank in rank_of.items()}
    return Ranks(rank_of[process], tuple(process_of[rank] for rank in range(plan.num_ranks))), processes


class Assembly:
    """Everything one rank runs with; collective to make."""

    def __init__(
        self,
        compiled: CompiledPlan,
        groups: Groups,
        processes: tuple[ProcessInfo, ...],
        *,
        model: nn.Module,
        device: torch.device,
        optimizer: OptimizerFactory,
        param_dtype: torch.dtype | None,
        compiles: bool,
        scale: LossScale | None,
        max_norm: float | None,
        clip: Clip,
        seed: int,
        skip_init: bool,
    ) -> None:
        self.compiled, self.plan = compiled, compiled.plan
        self.groups, ranks = groups, groups.ranks
        if compiled.parts[0].skeleton.note and ranks.rank == 0:
            logger.warning(compiled.parts[0].skeleton.note)
        self.ranks, self.processes, self.device = ranks, processes, device
        everyone = range(self.plan.num_ranks)
        self.control, self.totals, norms = (_member(self.groups.make(everyone, "gloo")) for _ in range(3))
        hosts = [self.groups.make(group.flat_ranks, "gloo") for group in self.plan.groups]
        own = self.plan.group_of_rank[ranks.rank]
        group = self.plan.groups[own]
        self.loss_group = hosts[self.plan.ministages[-1].group]
        """Gloo group of the last ministage's ranks; None elsewhere."""
        self.group_control = _member(hosts[own])
        """Gloo group of the ranks of this rank's group."""
        meshes = Meshes(self.plan, groups, processes, device)
        mesh = meshes.of_group()
        self.resources = RankResources.of(
            device,
            offloads_activations="activations" in group.offload,
            compiles=compiles,
            seed=seed,
        )
        parallel = meshes.of_replicas(compiled.cut, self.resources.busy.waiting)
        self.positions = None if parallel is None else parallel.positions
        """Of the sequence, those that are this rank's; None if it has all."""
        joined = mesh.get_group(0) if dist.get_backend(mesh.get_group(0)) == "nccl" else None
        untie(compiled)
        self.ministages: dict[int, ShardedMinistage] = {}
        for index in self.plan.ministages_of_rank(ranks.rank):
            settings = MinistageSettings(
                group=group,
                mesh=mesh,
                materialise=partial(initialize_unit, seed=seed, device=device, root=model, skips=skip_init),
                modules=self.plan.ministages[index].modules,
                receives_grad=index > compiled.spec.lowest_backward,
                param_dtype=param_dtype,
                compiles=compiles,
                keeps_shards=not self.ministages,
                tied=tied_names(compiled.ties),
                borrowed=borrowed_names(compiled.ties),
                tensor_parallel=parallel,
            )
            part = compiled.parts[index]
            ministage = ShardedMinistage(index, part.module, part.units, settings, self.resources)
            ministage.warm_up()
            self.ministages[index] = ministage
        ties_group = self.groups.make(everyone, "gloo") if compiled.ties else None
        self.ties = TiedWeights(
            compiled.ties, self.plan, self.ministages, ranks, ties_group, self.resources.memory
        )
        self.ties.synchronise()
        self.updates = Updates(
            self.ministages,
            optimizer,
            max_norm=max_norm,
            clip=clip,
            scale=scale,
            counts_replicated=group.flat_ranks[0] == ranks.rank,
            are_cut=self.plan.has_replicas,
            memory=self.resources.memory,
            world=NormGroup(norms, joined if len(group.flat_ranks) == self.plan.num_ranks else None),
            group=NormGroup(self.group_control, joined),
        )
        owner_of = {tie.borrower_fqn: tie.owner_fqn for tie in compiled.ties}
        modules = [part.module for part in compiled.parts]
        self.state = PipelineState(
            self.plan,
            ranks,
            Inventory.of(modules, compiled.state, owner_of, param_dtype, compiled.cut),
            self.ministages,
            self.updates.optimizers,
            owner_of=owner_of,
            names=[name for state in compiled.state for name in state],
            control=self.control,
        )
        edges = edges_of([compiled.step_actions, compiled.evaluate_actions])
        by_host = frozenset(filter(self._goes_by_host, edges))
        by_host |= find_crowded(edge for edge in edges if edge not in by_host)
        streams = self.resources.memory.streams
        processors = [processes[process].num_processors for process in ranks.process_of]
        self.transport = Transport(
            self.groups, edges, by_host=by_host, device=device, streams=streams, processors=processors
        )
        self.busy = self.resources.busy
        self.step_inputs: StepInputs | None = None
        """What steps are given; None before the first, and of several kinds the newest."""

    def take_calls(self, trace: Trace) -> None:
        """Before the first step: refuses what `check_unit_order` does, and prepares for the rest."""
        check_unit_order(self.compiled, trace)
        for index, ministage in self.ministages.items():
            ministage.note_calls(trace.sources[index], trace.changing[index])

    def describe(self) -> str:
        """A table: the plan, the parameters of each ministage, and the transport of this rank's channels."""
        compiled = self.compiled
        lines = [self.plan.explain().rstrip(), "", "ministages:"]
        for index, part in enumerate(compiled.parts):
            group = self.plan.ministages[index].group
            trains = "" if compiled.spec.trains[index] else ", frozen"
            lines.append(
                f"  {index}: group {group}, {count_parameters(part.module):,} parameters"
                f" in {count(len(part.units) or 1, 'FSDP unit')}{trains}"
            )
        lines += [f"  {tie.borrower_fqn} borrows {tie.owner_fqn}" for tie in compiled.ties]
        lines.append(f"rank {self.ranks.rank} on {self.device}:")
        for edge, kind in sorted(self.transport.kinds.items(), key=lambda entry: (entry[0][2] == "B", entry)):
            source, target, direction = edge
            what = "activations" if direction == "F" else "gradients"
            lines.append(f"  {source} -> {target}, {what}: {kind}")
        for cycle in compiled.report.cycles:
            lines.append(f"  a blocking send could close this cycle, so it goes over Gloo: {cycle}")
        for receive in compiled.report.early:
            lines.append(f"  a waiting GPU could hold up its own host, so this goes over Gloo: {receive}")
        return "\n".join(lines)

    @contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Inside, all modules of this rank's ministages are."""
        modules = [m for ministage in self.ministages.values() for m in ministage.module.modules()]
        training = {module: module.training for module in modules}
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, was_training in training.items():
                module.training = was_training

    def _goes_by_host(self, edge: Edge) -> bool:
        """Whether NCCL cannot serve an edge, or a blocking send on it could close a cycle."""
        is_buffered = edge in self.compiled.report.buffered_edges
        blocks = any(self.processes[process].blocks_launches for process in self.ranks.processes(edge[:2]))
        return is_buffered or blocks or backend_for(edge[:2], self.ranks, self.processes) == "gloo"


def count_parameters(module: nn.Module) -> int:
    """Parameters of a module, as a whole model counts them."""
    return sum(parameter.numel() for parameter in module.parameters())


def untie(compiled: CompiledPlan) -> None:
    """Gives every borrower of a tied weight a parameter of its own, under all names that it has
    there: FSDP2 would untie silently."""
    for tie in compiled.ties:
        part = compiled.parts[tie.borrower_ministage].module
        shared = part.get_parameter(tie.borrower_fqn)
        copy = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        for fqn, parameter in list(part.named_parameters(remove_duplicate=False)):
            if parameter is shared:
                owner, _, name = fqn.rpartition(".")
                part.get_submodule(owner).register_parameter(name, copy)


def _member(group: ProcessGroup | None) -> ProcessGroup:
    assert group is not None
    return group
