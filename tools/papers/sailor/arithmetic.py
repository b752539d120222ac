"""The arithmetic of Sailor's published simulator (their runtime_simulator.py), and its tables.

A step of one pipeline whose stages all have D replicas, each of one machine, takes, with
m = ceil(batch / (rows D)):

    (m - 1) max(comp + p2p) + sum(comp) + sum(p2p) + max(update) + max(sync).

It is kept as published, oddities included: the last stage is charged twice its gradient and never its
activation, the first twice its activation with more than three stages; a gradient has the size of what the
stage's own first layer gives; sizes are those of one GPU without tensor parallelism; fits of bandwidth are
extrapolated. Times that the profiles lack count as 0 in theirs, and as not available here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, log2
from typing import Any

from zorselike.errors import ClusterError, ProfileError

from ..data import read_object
from .library import Library
from .links import MACHINES_FILE, Place, read_egress_prices

FLOAT_BYTES = 4
BUCKET_BYTES = 500_000_000.0
BYTES_PER_PARAMETER = 24
"""Weights, gradients, two moments, a communication copy and the one that DeepSpeed makes at the start."""
MEMORY_GIB: Mapping[str, int] = {"A100-40": 40, "V100-16": 16, "A100-80": 80, "GH-96": 96}
DOLLARS_PER_HOUR: Mapping[str, float] = {"A100-40": 3.673385, "V100-16": 2.859998, "GH-96": 11.06}
GPUS_PER_VM = 4

_GIB = 1024**3


Pairs = tuple[tuple[tuple[Place, Place], int], ...]
"""Sender and receiver, and how many of them there are."""


def count_pairs(sources: Sequence[Place], targets: Sequence[Place]) -> Pairs:
    """Replicas send to those of the same number."""
    return tuple(Counter(zip(sources, targets, strict=True)).items())


@dataclass(frozen=True)
class Ring:
    """The replicas of a stage as they reduce gradients."""

    degree: int
    tensor_parallel: int
    """The least of any replica; the gradients are in so many parts."""
    neighbours: Pairs
    closing: tuple[Place, Place]
    """The link from the last replica to the first."""


def make_ring(replicas: Sequence[Place]) -> Ring:
    return Ring(
        degree=len(replicas),
        tensor_parallel=min(place.tensor_parallel for place in set(replicas)),
        neighbours=count_pairs(replicas[:-1], replicas[1:]),
        closing=(replicas[-1], replicas[0]),
    )


@dataclass(frozen=True)
class SailorStage:
    """Pseudo-layers `start` to `stop` - 1, and its replicas in order."""

    start: int
    stop: int
    replicas: tuple[Place, ...]


@dataclass(frozen=True)
class SailorPlan:
    """A plan of one pipeline."""

    rows: int
    """Rows of a microbatch."""
    global_batch: int
    stages: tuple[SailorStage, ...]

    @property
    def degree(self) -> int:
        return len(self.stages[0].replicas)

    @property
    def used(self) -> dict[str, int]:
        """GPUs by `type_zone`."""
        found: dict[str, int] = {}
        for stage in self.stages:
            for place in stage.replicas:
                key = f"{place.gpu}_{place.zone}"
                found[key] = found.get(key, 0) + place.tensor_parallel
        return found

    def to_json(self) -> dict[str, Any]:
        """The plan in Sailor's form."""
        return {
            "mbs": self.rows,
            "gbs": self.global_batch,
            "used_gpus": self.used,
            "pipeline_list": [
                {
                    "num_stages": len(self.stages),
                    "layers_per_stage": [list(range(stage.start, stage.stop)) for stage in self.stages],
                    "tmp_per_stage": [
                        [[[[r.gpu, GPUS_PER_VM, r.zone]], r.tensor_parallel] for r in stage.replicas]
                        for stage in self.stages
                    ],
                    "dp": [len(stage.replicas) for stage in self.stages],
                }
            ],
        }


@dataclass(frozen=True)
class SailorFigures:
    """What their simulator says of a plan."""

    iteration_s: float
    rent: float
    """Dollars for the GPUs that are used."""
    egress: float
    fits: bool

    @property
    def throughput(self) -> float:
        return 1 / self.iteration_s


class SailorArithmetic:
    """Their tables of one model."""

    def __init__(self, library: Library, model: str, gpus: Sequence[str]) -> None:
        if model not in library.shapes:
            raise ProfileError(f"no model {model} among the sizes; there are {', '.join(library.shapes)}")
        self.shapes = library.shapes[model]
        self.num_layers = len(self.shapes[1])
        self._before = {
            degree: (
                tuple(accumulate((shape.num_parameters for shape in shapes), initial=0)),
                tuple(accumulate((shape.activation_bytes for shape in shapes), initial=0)),
            )
            for degree, shapes in self.shapes.items()
        }
        """Parameters and bytes of activations of a row before each layer, by tensor-parallel degree."""
        self._profiles = {gpu: read_object(library.find_profile(model, gpu)) for gpu in gpus}
        self._fits = read_object(library.find(f"providers/{MACHINES_FILE}"))
        self._egress = read_egress_prices(library.find("providers/communication_cost.json"))
        self.link = lru_cache(maxsize=None)(self._link)

    def rows(self) -> list[int]:
        """Microbatch sizes of which any profile has times."""
        return sorted({int(rows) for profile in self._profiles.values() for rows in profile})

    def has(self, gpu: str, rows: int, tensor_parallel: int) -> bool:
        """Whether there are times and sizes."""
        times = self._profiles[gpu].get(str(rows), {})
        return str(tensor_parallel) in times and tensor_parallel in self.shapes

    def layer_s(self, place: Place, rows: int, layer: int) -> float:
        """Forward and backward."""
        forward, backward, _ = self._times(place, rows, layer)
        return forward + backward

    def update_s(self, place: Place, rows: int, layer: int) -> float:
        return self._times(place, rows, layer)[2]

    def _times(self, place: Place, rows: int, layer: int) -> Sequence[float]:
        times: Sequence[float] = self._profiles[place.gpu][str(rows)][str(place.tensor_parallel)][str(layer)]
        return times

    def output_bytes(self, layer: int, rows: int) -> float:
        return float(self.shapes[1][layer].output_elements * FLOAT_BYTES * rows)

    def send_s(self, source: Place, target: Place, num_bytes: float) -> float:
        """Between stages: all GPUs of a replica send at once."""
        return num_bytes / 1e9 / self.rate(source, target, num_bytes)

    def rate(self, source: Place, target: Place, num_bytes: float) -> float:
        """GB/s by the fit."""
        a, b, c = self.link(source, target)
        x = log2(num_bytes / 1e6)
        return a * x * x + b * x + c

    def _link(self, source: Place, target: Place) -> tuple[float, float, float]:
        try:
            found = self._fits[source.zone][source.gpu][str(source.tensor_parallel)]
            a, b, c = found[target.zone][target.gpu][str(target.tensor_parallel)][0]
        except KeyError as error:
            raise ClusterError(f"{MACHINES_FILE}: no {error} between {source} and {target}") from None
        return a, b, c

    def reduce_s(self, ring: Ring, num_bytes: float) -> float:
        """All-reduce of so many bytes over a ring without its closing link, by its slowest link."""
        links = {pair for pair, _ in ring.neighbours}
        return max((self._reduce_over(pair, num_bytes, ring.degree) for pair in links), default=0.0)

    def _reduce_over(self, pair: tuple[Place, Place], num_bytes: float, degree: int) -> float:
        source, target = (replace(place, tensor_parallel=1) for place in pair)
        seconds, remaining = 0.0, num_bytes
        while remaining > 0:
            part = min(BUCKET_BYTES, remaining) / degree
            seconds += 2 * (degree - 1) * (part / 1e9) / self.rate(source, target, part)
            remaining -= BUCKET_BYTES
        return seconds

    def gradient_bytes(self, ring: Ring, start: int, stop: int) -> float:
        """What each of a stage's rings reduces."""
        return self.parameter_bytes(start, stop) / ring.tensor_parallel

    def parameter_bytes(self, start: int, stop: int) -> float:
        parameters = self._before[1][0]
        return float((parameters[stop] - parameters[start]) * FLOAT_BYTES)

    def memory_bytes(self, place: Place, rows: int, start: int, stop: int, depth: int) -> float:
        """Memory of one GPU with `depth` - 1 stages after its own."""
        parameters, activations = self._before[place.tensor_parallel]
        overhead = 2e9 if place.tensor_parallel == 1 else 3e9
        return (
            BYTES_PER_PARAMETER * (parameters[stop] - parameters[start])
            + (activations[stop] - activations[start]) * rows * depth
            + overhead
        )

    def fits(self, place: Place, rows: int, start: int, stop: int, depth: int) -> bool:
        return self.memory_bytes(place, rows, start, stop, depth) <= MEMORY_GIB[place.gpu] * _GIB

    def egress_dollars(self, source: Place, target: Place, num_bytes: float) -> float:
        return self._egress.get((source.zone, target.zone), 0.0) * num_bytes / 1e9

    def score(self, plan: SailorPlan) -> SailorFigures:
        """Time, money and whether it fits, of a plan as a whole."""
        stages, rows, last = plan.stages, plan.rows, len(plan.stages) - 1
        m = ceil(plan.global_batch / (rows * plan.degree))
        compute = [
            max(
                sum(self.layer_s(place, rows, i) for i in range(s.start, s.stop)) for place in set(s.replicas)
            )
            for s in stages
        ]
        sends = [self._sends_s(plan, i) for i in range(len(stages))]
        iteration_s = (
            (m - 1) * max(c + p for c, p in zip(compute, sends, strict=True))
            + sum(compute)
            + sum(sends)
            + max(self.update_s(place, rows, s.start) for s in stages for place in set(s.replicas))
            + max(self.reduce_s(r, self.gradient_bytes(r, *span)) for r, span in _rings(stages))
        )
        rate = sum(DOLLARS_PER_HOUR[p.gpu] / 3600 * p.tensor_parallel for s in stages for p in s.replicas)
        fits = all(
            self.fits(place, rows, s.start, s.stop, last - i + 1)
            for i, s in enumerate(stages)
            for place in set(s.replicas)
        )
        return SailorFigures(iteration_s, rate * iteration_s, self._egress_of(plan, m), fits)

    def _sends_s(self, plan: SailorPlan, i: int) -> float:
        stages, last = plan.stages, len(plan.stages) - 1
        forward = backward = 0.0
        if i < last:
            size = self.output_bytes(stages[i].stop - 1, plan.rows)
            forward = self.worst_send_s(count_pairs(stages[i].replicas, stages[i + 1].replicas), size)
        if i > 0:
            size = self.output_bytes(stages[i].start, plan.rows)
            backward = self.worst_send_s(count_pairs(stages[i].replicas, stages[i - 1].replicas), size)
        if i == last:
            return 2 * backward
        return (2 if i == 0 and len(stages) > 3 else 1) * forward + backward

    def worst_send_s(self, pairs: Pairs, num_bytes: float) -> float:
        return max(self.send_s(a, b, num_bytes) for (a, b), _ in pairs)

    def _egress_of(self, plan: SailorPlan, m: int) -> float:
        dollars = 0.0
        for s, t in zip(plan.stages, plan.stages[1:], strict=False):
            size = self.output_bytes(s.stop - 1, plan.rows)
            dollars += m * self.boundary_dollars(count_pairs(s.replicas, t.replicas), size)
        return dollars + sum(self.reduce_dollars(ring, *span) for ring, span in _rings(plan.stages))

    def boundary_dollars(self, pairs: Pairs, num_bytes: float) -> float:
        """Egress of one microbatch of every replica, there and back."""
        return sum(
            n * (self.egress_dollars(a, b, num_bytes) + self.egress_dollars(b, a, num_bytes))
            for (a, b), n in pairs
        )

    def reduce_dollars(self, ring: Ring, start: int, stop: int) -> float:
        """Egress of the whole gradients around the closed ring."""
        part = self.parameter_bytes(start, stop) / ring.degree * 2 * (ring.degree - 1)
        links = (*ring.neighbours, (ring.closing, 1))
        return sum(n * self.egress_dollars(a, b, part) for (a, b), n in links)


def _rings(stages: Sequence[SailorStage]) -> list[tuple[Ring, tuple[int, int]]]:
    return [(make_ring(stage.replicas), (stage.start, stage.stop)) for stage in stages]
