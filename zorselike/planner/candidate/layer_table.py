"""What a workload's layers take on types of devices, looked up again and again by a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from zorselike.cost.layer_times import LayerTimeModel
from zorselike.cost.replica_times import Part, find_parts, time_in_replica
from zorselike.cost.sizes import GATHERS_PER_LAYER
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import LayerKind, Workload
from zorselike.planner.groups.replicas import Computer, ReplicaKind


class Seconds(NamedTuple):
    """Time of one layer and one microbatch."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class LayerTable:
    """Times of layers by key: layers of one key cost the same. A key is the name of a kind, and says whether
    recomputation is for such layers at all."""

    def __init__(
        self,
        workload: Workload,
        clock: LayerTimeModel,
        exchange_s: Callable[[ReplicaKind, float], float] | None = None,
    ) -> None:
        """`exchange_s`: seconds of an all-gather and a reduce-scatter inside a replica; needed where replicas
        of several devices are asked for."""
        self._clock, self._exchange_s = clock, exchange_s
        self.seconds = cache(self._seconds)
        self.model_s = cache(self._model_s)
        """Seconds of `_model_s`, the same tuple for the same question."""
        self._whole: dict[tuple[Computer, Recompute, int], list[float]] = {}
        self._kind_of_key: dict[str, LayerKind] = {}
        self._parts: dict[str, Part] = {}
        self.workload = workload
        self.modules = tuple(name for name, _ in workload.layers)
        parts = find_parts(workload)
        self.keys = tuple(self._make_key(parts[name], kind) for name, kind in workload.layers)
        """Key of each layer in model order."""
        self.counts = Counter(self.keys)
        self.ties = tuple((self.modules.index(a), self.modules.index(b)) for a, b in workload.ties)
        """Owner and borrower of each tied weight, as layers."""

    def _make_key(self, part: Part, kind: str) -> str:
        key = kind if part == "cut" else f"{kind} (kept)"
        self._kind_of_key[key] = self.workload.kinds[kind]
        self._parts.setdefault(key, part)
        return key

    def kind(self, key: str) -> LayerKind:
        """The kind of a key's layers."""
        return self._kind_of_key[key]

    def recompute(self, key: str, recompute: Recompute) -> Recompute:
        """How layers of a key run in a group that recomputes, or does not."""
        return recompute if self.is_cut(key) else "none"

    def is_cut(self, key: str) -> bool:
        """Whether tensor parallelism cuts layers of a key."""
        return self._parts[key] == "cut"

    def kept_bytes(self, key: str, recompute: Recompute, degree: int = 1) -> float:
        """What one row keeps of a layer for its backward on each device of a replica, as the workload counts
        it."""
        kind = self._kind_of_key[key]
        inputs = kind.input_elements_per_row * self.workload.itemsize
        if self.recompute(key, recompute) == "layer":
            return inputs / degree if degree > 1 else inputs
        if degree == 1:
            return kind.activation_bytes_per_row
        gathered = GATHERS_PER_LAYER * inputs * (1 - 1 / degree) if self.is_cut(key) else 0.0
        return kind.activation_bytes_per_row / degree + gathered

    def _seconds(self, key: str, computer: Computer, rows: int, recompute: Recompute) -> Seconds:
        """One layer, a microbatch of so many rows. Raises `ProfileError` for a device nobody knows."""
        kind, again = self._kind_of_key[key], self.recompute(key, recompute)
        if isinstance(computer, str):
            wanted = kind.name, computer, rows, again
            return Seconds(self._clock.forward_s(*wanted), self._clock.backward_s(*wanted))
        exchange_s = self._exchange_s
        assert exchange_s is not None, "replicas are asked for"
        return Seconds(
            *time_in_replica(
                self._clock,
                kind,
                self._parts[key],
                computer.device,
                rows,
                again,
                degree=computer.degree,
                exchange_s=lambda num_bytes: exchange_s(computer, num_bytes),
            )
        )

    def _model_s(
        self, device: Computer, recompute: Recompute, max_rows: int, unit: int = 1
    ) -> tuple[float, ...]:
        """Forward and backward of microbatches of 1 to `max_rows` rows through the whole model, or of each
        multiple of a unit up to there. Curves do not fall, so neither does their sum but for rounding."""
        found = self._whole.setdefault((device, recompute, unit), [])
        while len(found) < max_rows // unit:
            rows = (len(found) + 1) * unit
            total = sum(
                number * self.seconds(key, device, rows, recompute).both
                for key, number in self.counts.items()
            )
            found.append(max(total, found[-1]) if found else total)
        return tuple(found[: max_rows // unit])

    def most_rows(
        self, device: Computer, recompute: Recompute, keys: Iterable[str] | None = None
    ) -> int | None:
        """Rows at once that were found to fit through all layers, or some; None where nobody looked."""
        if not isinstance(device, str):
            return None
        found = [
            self._clock.max_rows(self.kind(key).name, device, self.recompute(key, recompute))
            for key in (self.counts if keys is None else keys)
        ]
        return min((most for most in found if most is not None), default=None)

    def update_s(self, device: str, num_parameters: int) -> float:
        """An optimizer's update of one ministage's shards."""
        return self._clock.update_s(device, num_parameters)
