"""`--dry-run`: describes a run without devices and processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.assembly import CompiledPlan, count_parameters
from zorselike.schedule.actions import Action
from zorselike.text.units import GIB
from zorselike.text.wording import count
from zorselike.train.auto.files import AutoFiles
from zorselike.train.auto.plan import MOST_ROWS
from zorselike.train.config.config import Config
from zorselike.train.config.model import TrainedModel
from zorselike.train.data.sources import Section, find_files
from zorselike.train.report.metrics import work_of_step

_MAX_ACTIONS = 40
"""Longest list of actions that is shown completely."""

_BYTES_KEPT = 3 * 4
"""Bytes that a parameter keeps between steps: its value and Adam's two moments, in fp32."""

_BYTES_HALF = 2

_BYTES_KEPT_HALF = _BYTES_HALF + _BYTES_KEPT
"""The same for a parameter in half precision with an fp32 master."""


def describe_run(config: Config, plan: Plan, compiled: CompiledPlan, model: TrainedModel) -> str:
    """Plan, model, each rank's parameters and actions, and the checker's result."""
    work = work_of_step(model, plan, seq_len=config.training.seq_len)
    flops = f"{work.model_flops / 1e12:,.3f} TFLOP per step"
    if work.hardware_flops != work.model_flops:
        flops += f" ({work.hardware_flops / 1e12:,.3f} with recomputation)"
    lines = [
        plan.explain().rstrip(),
        "",
        f"model {model.name}: {model.size}, {work.num_tokens:,} tokens and {flops}",
    ]
    if config.training.mixed_precision_param == "auto":
        lines.append(
            'mixed_precision_param = "auto": bfloat16 is shown; with a card older than Ampere it is float16, '
            "and all updates wait for the end of the step"
        )
    lines += _list_data(config)
    lines += ["", *_list_parameters(plan, compiled), ""]
    lines.append("one step, rank by rank (ministage, action, microbatch, @peer[rows]):")
    lines += [f"  rank {rank}: {_abbreviate(actions)}" for rank, actions in compiled.step_actions.items()]
    lines += [
        "",
        f"checked: {compiled.report.num_actions} actions; every row once forward and backward per ministage, "
        "collectives in one order, no deadlock",
        *_list_buffered_edges(compiled.report.buffered_edges),
    ]
    return "\n".join(lines)


def check_data(config: Config) -> None:
    """Raises `ConfigError` where a run here would end for want of data."""
    for section in _list_sections(config):
        find_files(config, section)


def _list_sections(config: Config) -> list[Section]:
    """Of the recipe, that read data."""
    return ["training", "validation"] if config.validation.enable else ["training"]


def _list_data(config: Config) -> list[str]:
    """What there is of the data that a run reads; what is missing may still be to come, or be elsewhere."""
    lines = []
    for section in _list_sections(config):
        try:
            source, files = find_files(config, section)
            lines.append(f"data: {source}, {count(len(files), 'file')}")
        except ConfigError as error:
            lines.append(f"data: a run would end with this: {error}")
    return lines


def describe_planning(config: Config, model: TrainedModel, files: AutoFiles) -> str:
    """What a run with `[hetero] plan = "auto"` does before its first step, if there is no plan yet."""
    training, hetero = config.training, config.hetero
    rows = min(MOST_ROWS, training.global_batch_size)
    profile = "exists: what it lacks is added" if files.profile.exists() else "new"
    cluster = "exists: kept" if files.cluster.exists() else "new"
    return "\n".join(
        [
            f"no plan yet for {model.name} ({model.size}); a run",
            f"  measures each kind of layer, up to {count(rows, 'row')} of {training.seq_len} tokens in "
            f"{training.mixed_precision_param},",
            "  updates, copies to the host, links and collectives, on all devices that run",
            f"    into {files.profile} ({profile})",
            f"    and {files.cluster} ({cluster})",
            f"  plans for {count(training.global_batch_size, 'row')} a step, in at most {hetero.plan_budget}",
            f"    into {files.plan}, which later runs use again",
            f"  trains for {count(training.steps, 'step')}",
            *_list_data(config),
        ]
    )


def _list_parameters(plan: Plan, compiled: CompiledPlan) -> list[str]:
    num_bytes = _BYTES_KEPT_HALF if compiled.spec.masters else _BYTES_KEPT
    kept = "half precision, with fp32 masters and" if compiled.spec.masters else "fp32, with"
    lines = [
        f"parameters of each rank's ministages, how many of them it keeps, and their size in {kept} Adam's "
        "moments,\nwhich frozen ones lack (gradients, gathered parameters and activations come on top):"
    ]
    for rank, number in sorted(plan.group_of_rank.items()):
        group = plan.groups[number]
        ministages = plan.ministages_of_rank(rank)
        whole = sum(count_parameters(compiled.parts[index].module) for index in ministages)
        share = whole if group.zero == 0 else -(-whole // len(group.flat_ranks))
        parameters = [p for index in ministages for p in compiled.parts[index].module.parameters()]
        frozen_bytes = [_BYTES_HALF if compiled.spec.masters else p.itemsize for p in parameters]
        kept_bytes = sum(
            p.numel() * (num_bytes if p.requires_grad else frozen)
            for p, frozen in zip(parameters, frozen_bytes, strict=True)
        )
        names = ", ".join(map(str, ministages))
        kept_share = "all" if share == whole else f"about {share:,}"
        lines.append(
            f"  rank {rank}: {'ministage' if len(ministages) == 1 else 'ministages'} {names}, "
            f"{whole:,} parameters, keeps {kept_share}, {kept_bytes * share / max(1, whole) / GIB:,.3f} GiB"
        )
    return lines


def _list_buffered_edges(edges: Iterable[tuple[int, int, str]]) -> list[str]:
    words = {"F": "activations", "B": "gradients"}
    listed = [f"  {source} -> {target}, {words[kind]}" for source, target, kind in sorted(edges)]
    heading = "sends that use Gloo on GPUs too, since a blocking send could close a cycle of waits:"
    return [heading, *listed] if listed else []


def _abbreviate(actions: Sequence[Action]) -> str:
    texts = [action.text for action in actions]
    if len(texts) > _MAX_ACTIONS:
        half = _MAX_ACTIONS // 2
        texts = [*texts[:half], f"... {len(texts) - 2 * half} more ...", *texts[-half:]]
    return " ".join(texts)
