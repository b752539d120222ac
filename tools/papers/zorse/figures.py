"""Figures 3 and 8 to 11 of Zorse's paper, simulated from the authors' layer times.

The paper gives them as pictures without numbers, and leaves some settings open; what is taken is in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zorselike.plan.cluster.cluster import Place

from .paper import GBIT, PaperCluster, keep_types, make_cluster, make_nodes, sum_peaks
from .plans import Options
from .runs import Outcome, Setup, fit_plan, list_options, make_setup, run_plan, search
from .study import Study


@dataclass(frozen=True)
class Panel:
    """A group of bars, or a block of a table: a row a label, a column a series."""

    title: str
    labels: tuple[str, ...]
    series: Mapping[str, tuple[float | None, ...]]
    """None: it does not fit."""


@dataclass(frozen=True)
class Figure:
    """What stands in for one figure of the paper."""

    key: str
    title: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()


def make_figures(study: Study) -> list[Figure]:
    """All of them."""
    return [make(study) for make in (_figure_3, _figure_8, _figure_9, _figure_10, _figure_11)]


# -- Fig. 3: PP with ZeRO 2 and with ZeRO 3 ------------------------------------------------


def _figure_3(study: Study) -> Figure:
    nodes = make_nodes(1, "V100-16", 8, nic=25 * GBIT) + make_nodes(1, "T4", 8, nic=25 * GBIT)
    paper = _homemade("3", nodes, 512, ((0,), (1,)))
    models = ("tiny", "3b", "7b", "13b")
    tflops: dict[str, list[float | None]] = {"ZeRO 2": [], "ZeRO 3": []}
    memory: dict[str, list[float | None]] = {"ZeRO 2": [], "ZeRO 3": []}
    notes = ["1F1B, a group a node, 512 tokens, no offloading; tiny is 1.3B"]
    for model in models:
        study.say(f"figure 3: Llama {model}")
        setup = make_setup(study.folder, model, paper)
        for zero in (2, 3):
            base = Options(1, 1, zero=zero, offload=(), order="1f1b")
            outcome = search(setup, list_options((1,), (1, 2, 4), base))
            tflops[f"ZeRO {zero}"].append(_tflops(outcome))
            memory[f"ZeRO {zero}"].append(None if outcome is None else outcome.memory_share)
        notes += [f"{model}: {line}" for line in setup.clock.assumptions if "nothing was measured" in line]
    return Figure(
        "figure_3",
        "PP with ZeRO 2 and with ZeRO 3 on 8 V100 and 8 T4",
        (
            Panel("TFLOP/s", models, _freeze(tflops)),
            Panel("memory of the fullest GPU, share", models, _freeze(memory)),
        ),
        tuple(notes),
    )


# -- Fig. 8: cards added step by step ------------------------------------------------------

STEPS: Mapping[str, tuple[str, ...]] = {
    "A": ("A100-80", "H100-NVL"),
    "B": ("T4", "V100-16", "A10G", "A100-40"),
    "C": ("T4", "V100-16", "A10G"),
}
"""Device types of each cluster from the slowest."""


def _figure_8(study: Study) -> Figure:
    panels = []
    for name, types in STEPS.items():
        paper = study.clusters[name]
        parts = [keep_types(paper, set(types[: i + 1])) for i in range(len(types))]
        largest = study.largest(parts[0])
        if largest is None:
            continue
        outcomes = [study.fitting(part, largest[0]) for part in parts]
        labels = tuple("+".join(types[: i + 1]) for i in range(len(types)))
        panels.append(
            Panel(
                f"cluster {name}, Llama {largest[0]}",
                labels,
                {
                    "PFLOP/s": tuple(None if o is None else o.tflops / 1e3 for o in outcomes),
                    "HFU": tuple(
                        None if o is None else o.tflops / part.peak_tflops
                        for o, part in zip(outcomes, parts, strict=True)
                    ),
                },
            )
        )
    return Figure(
        "figure_8",
        "cards added step by step",
        tuple(panels),
        ("the largest model of Table 5 that fits on the slowest cards by our memory model",),
    )


# -- Fig. 9: mixed against alone -----------------------------------------------------------


def _figure_9(study: Study) -> Figure:
    panels, notes = (
        [],
        ["the largest model of Table 5 that fits on the cluster, alone the same where it fits"],
    )
    for name, types in STEPS.items():
        paper = study.clusters[name]
        largest = study.largest(paper)
        if largest is None:
            continue
        model, mixed = largest
        alone: list[float | None] = []
        for device in types:
            part = keep_types(paper, {device})
            outcome = study.fitting(part, model)
            if outcome is None:
                smaller = study.largest(part)
                if smaller is not None:
                    notes.append(
                        f"cluster {name}, {device} alone: Llama {smaller[0]}, since {model} does not fit"
                    )
                    outcome = smaller[1]
            alone.append(None if outcome is None else outcome.hfu_of(device))
        panels.append(
            Panel(
                f"cluster {name}, Llama {model}",
                types,
                {"mixed": tuple(mixed.hfu_of(device) for device in types), "alone": tuple(alone)},
            )
        )
    return Figure("figure_9", "HFU by type of card, mixed against alone", tuple(panels), tuple(notes))


# -- Fig. 10: ministages -------------------------------------------------------------------

INTERLEAVED: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "A100-40": ("7b", (1, 2, 4, 8, 16)),
    "A10G": ("3b", (1, 2, 4, 7, 13)),
}
"""By type of card, the model and the ministages of each GPU, up to one a layer."""


def _figure_10(study: Study) -> Figure:
    panels = []
    for device, (model, ministages) in INTERLEAVED.items():
        study.say(f"figure 10: {device}")
        paper = _homemade("10", make_nodes(2, device, 8, nic=25 * GBIT), 1024, ((0,), (1,)))
        setup = make_setup(study.folder, model, paper)
        options = [Options(number, 2) for number in ministages]
        labels = [str(number) for number in ministages]
        for zero in (2, 3):
            options.append(replace(options[0], zero=zero, offload=("activations",)))
            labels.append(f"PP + ZeRO {zero}")
        outcomes = [_run_by_speed(setup, choice) for choice in options]
        base = outcomes[0]
        panels.append(
            Panel(
                f"16 {device}, Llama {model}",
                tuple(labels),
                {
                    "throughput": tuple(o.tflops / base.tflops for o in outcomes),
                    "memory": tuple(_peak(o) / _peak(base) for o in outcomes),
                },
            )
        )
    return Figure(
        "figure_10",
        "ministages for each GPU, relative to one",
        tuple(panels),
        (
            "two nodes of 8, a group a node, 1024 tokens, 2 rows a microbatch; the models are our choice",
            "PP + ZeRO 2 and 3 in the same order with one ministage; activations are offloaded there too",
        ),
    )


# -- Fig. 11: ablation ---------------------------------------------------------------------


def _figure_11(study: Study) -> Figure:
    """Llama 65B on cluster A: base, activation offloading, interleaving, groups by node."""
    paper = study.clusters["A"]
    by_node = make_setup(study.folder, "65b", paper)
    places = by_node.places
    by_four = replace(by_node, groups=tuple(_slices(places, 4)))
    one, many = Options(1, 1, offload=()), Options(8, 1)
    steps: tuple[tuple[str, Setup, Options], ...] = (
        ("base", by_four, one),
        ("+O", by_four, replace(one, offload=("activations",))),
        ("+O +I", by_four, many),
        ("+O +I +H", by_node, many),
    )
    tflops, fastest, memory = [], [], []
    for label, setup, options in steps:
        study.say(f"figure 11: {label}")
        fitting = fit_plan(setup, options)
        tflops.append(None if fitting is None else run_plan(setup, options, fitting).tflops)
        unbounded = _run_by_speed(setup, options)
        fastest.append(unbounded.tflops)
        memory.append(unbounded.memory_share)
    return Figure(
        "figure_11",
        "ablation on Llama 65B, cluster A",
        (
            Panel(
                "TFLOP/s",
                tuple(label for label, _, _ in steps),
                {"that fits": tuple(tflops), "layers by speed alone": tuple(fastest)},
            ),
            Panel(
                "memory of the fullest GPU with layers by speed alone, share",
                tuple(label for label, _, _ in steps),
                {"memory": tuple(memory)},
            ),
        ),
        (
            "base: five groups of four, ZeRO 2, one ministage; +O offloads activations; +I eight ministages, "
            "whose parameters are offloaded and which are updated one by one; +H a group a node",
        ),
    )


# -- what they share -----------------------------------------------------------------------


def _homemade(
    name: str, nodes: list[Any], sequence_length: int, groups: tuple[tuple[int, ...], ...]
) -> PaperCluster:
    cluster = make_cluster(name, nodes, nic=25 * GBIT)
    return PaperCluster(name, cluster, sequence_length, groups, sum_peaks(cluster))


def _run_by_speed(setup: Setup, options: Options) -> Outcome:
    """Whether it fits or not."""
    plan = fit_plan(setup, options, bounded=False)
    assert plan is not None, "every group has layers"
    return run_plan(setup, options, plan)


def _slices(places: Sequence[Place], size: int) -> list[tuple[Place, ...]]:
    return [tuple(places[i : i + size]) for i in range(0, len(places), size)]


def _peak(outcome: Outcome) -> int:
    return max(outcome.peak_bytes)


def _tflops(outcome: Outcome | None) -> float | None:
    return None if outcome is None else outcome.tflops


def _freeze(series: Mapping[str, Sequence[float | None]]) -> dict[str, tuple[float | None, ...]]:
    return {name: tuple(values) for name, values in series.items()}
