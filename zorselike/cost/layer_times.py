"""Seconds of a workload's layers on devices: as measured, or from what was measured nearest to it."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

from zorselike.cost.catalogue import CATALOGUE, DeviceSpec, find_device
from zorselike.cost.curves import Curve, fit_curve
from zorselike.cost.parameter_bytes import FP32_BYTES, ParameterBytes
from zorselike.cost.profile import LayerTimes, Profile
from zorselike.errors import ClusterError, ProfileError
from zorselike.plan.plan import Recompute
from zorselike.plan.workload import LayerKind, Workload
from zorselike.text.wording import count

REACHED_OF_PEAK = 0.45
"""What layers reach of the catalogue's peak FLOP/s where nothing was measured on a device."""

_IMPOSSIBLE, _IDLE, _LONG_S = 20.0, 1e-3, 5.0
"""Shares of the catalogue's peak that no layer reaches, with TF32 in place of fp32 too, and that every layer
does which takes so many seconds: a small one may wait for its kernels' launches most of the time."""

REACHED_OF_WHOLE = 0.95
"""Of a layer's speed on one device what its parts reach, for each doubling of the tensor-parallel degree,
where they were not measured. In Sailor's profiles of V100, A100 and GH200 the largest microbatches reach
0.90, 0.80 and 0.79 at degrees 2, 4 and 8 (medians), with collectives, which are counted apart here."""

REACHED_OF_MEMORY = 0.7
"""What an optimizer's update reaches of the catalogue's memory bandwidth."""

Pass = Literal["forward", "backward"]

_Key = tuple[str, str, Recompute, int]
"""Kind, device, recomputation, tensor-parallel degree."""


class _Asked(NamedTuple):
    """One pass of one layer."""

    which: Pass
    kind: str
    device: str
    rows: int
    recompute: Recompute
    tensor_parallel: int


_Curves = dict[Pass, Curve]
"""One entry of a profile."""


class LayerTimeModel:
    """How long layers of each kind take, with a note of everything that was not measured.

    What a profile lacks is put in its place in this order: another setting of recomputation of the same
    layer; the same layer cut into fewer parts; its FLOPs at the speed of the layer that was measured on that
    device at as many rows; its FLOPs at a share of the catalogue's peak.
    """

    def __init__(self, profile: Profile, workload: Workload) -> None:
        """Raises `ProfileError` if the profile is for another workload."""
        profile.check_workload(workload)
        self._workload = workload
        self._times = {
            (times.kind, times.device, times.recompute, times.tensor_parallel): times
            for times in profile.layers
            if times.dtype == workload.dtype and times.sequence_length == workload.sequence_length
        }
        self._updates = {times.device: times for times in profile.updates if times.dtype == workload.dtype}
        self._fitted: dict[_Key, _Curves] = {}
        self._found: dict[_Asked, float] = {}
        self._assumptions: dict[str, None] = {}
        self._reference = cache(self._find_reference)
        self._peak = cache(self._find_peak)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the compute dtype."""
        return self._workload.itemsize

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was asked for and not measured, one line each."""
        return tuple(self._assumptions)

    def forward_s(
        self, kind: str, device: str, rows: int, recompute: Recompute, tensor_parallel: int = 1
    ) -> float:
        """One layer's forward of so many rows at once; raises `ProfileError` where neither the profile nor
        the catalogue says anything about it."""
        return self._find(_Asked("forward", kind, device, rows, recompute, tensor_parallel))

    def backward_s(
        self, kind: str, device: str, rows: int, recompute: Recompute, tensor_parallel: int = 1
    ) -> float:
        """One layer's backward; with recomputation the second forward is in it. Raises `ProfileError`."""
        return self._find(_Asked("backward", kind, device, rows, recompute, tensor_parallel))

    def model_s(self, device: str, rows: int = 1) -> float:
        """Forward and backward of one microbatch through the whole model, nothing recomputed. Raises as
        `forward_s`, and where it takes no time."""
        seconds = sum(
            self.forward_s(kind, device, rows, "none") + self.backward_s(kind, device, rows, "none")
            for _, kind in self._workload.layers
        )
        if seconds <= 0:
            raise ProfileError(
                f"{self._workload.model} takes no time on {device} by the profile; measure it again"
            )
        return seconds

    def update_s(self, device: str, num_parameters: int) -> float:
        """The optimizer's update of so many parameters in one call; 0 for none."""
        if not num_parameters:
            return 0.0
        times = self._updates.get(device)
        if times is not None:
            return times.seconds_per_call + num_parameters * times.seconds_per_parameter
        spec = self._find_spec(device)
        if spec is None:
            self._assume(f"{device}: updates were not measured and take no time")
            return 0.0
        # As AdamW and its like: gradient, weight and moments are read, weight and moments written, in fp32,
        # and the shard in half precision is rounded anew.
        each = ParameterBytes.of(self._workload)
        bytes_each = FP32_BYTES * (3 + 2 * each.num_moments) + each.weight * each.masters
        self._assume(
            f"{device}: updates were not measured; {bytes_each} bytes a parameter at {REACHED_OF_MEMORY:.0%} "
            f"of its memory's {spec.memory_bandwidth_bytes_per_s / 1e9:.0f} GB/s"
        )
        return num_parameters * bytes_each / (REACHED_OF_MEMORY * spec.memory_bandwidth_bytes_per_s)

    def max_rows(self, kind: str, device: str, recompute: Recompute) -> int | None:
        """The most rows at once that were found to fit; None where nobody looked."""
        times = self._times.get((kind, device, recompute, 1))
        return None if times is None else times.max_rows

    @property
    def kept_bytes(self) -> dict[tuple[str, str, Recompute], float]:
        """What was measured that one row of a layer keeps for its backward, by kind, device and
        recomputation, without tensor parallelism."""
        return {
            (kind, device, recompute): times.memory_bytes_per_row
            for (kind, device, recompute, degree), times in self._times.items()
            if degree == 1 and times.memory_bytes_per_row is not None
        }

    # -- what was measured -----------------------------------------------------------------

    def _find(self, asked: _Asked) -> float:
        if asked not in self._found:
            measured = self._measured(asked)
            self._found[asked] = self._by_flops(asked) if measured is None else measured
        return self._found[asked]

    def _measured(self, asked: _Asked) -> float | None:
        """From times of this kind on this device, if there are any."""
        which, kind, device, rows, recompute, tensor_parallel = asked
        own = self._fit((kind, device, recompute, tensor_parallel), rows)
        if own is not None:
            return own[which](rows)
        other: Recompute = "layer" if recompute == "none" else "none"
        near = self._fit((kind, device, other, tensor_parallel), rows)
        if near is None:
            return self._measured_less_cut(asked)
        if which == "forward":
            return near["forward"](rows)
        if recompute == "layer" and not near["backward"](rows):
            return 0.0  # Frozen, with nothing before it that trains: nothing is computed again.
        if recompute == "layer":
            self._assume(f"{kind} on {device}: recomputation was not measured; backward and a second forward")
            return near["backward"](rows) + near["forward"](rows)
        self._assume(f"{kind} on {device}: measured with recomputation only; backward without its forward")
        return max(0.0, near["backward"](rows) - near["forward"](rows))

    def _measured_less_cut(self, asked: _Asked) -> float | None:
        """From what was measured with fewer ranks, the most of these, or with one."""
        degree = asked.tensor_parallel
        for fewer in range(degree // 2, 0, -1):
            if degree % fewer == 0:
                seconds = self._measured(asked._replace(tensor_parallel=fewer))
                if seconds is not None:
                    return self._cut_further(asked, seconds, fewer)
        return None

    def _cut_further(self, asked: _Asked, seconds: float, fewer: int) -> float:
        """A rank's part of what takes so many seconds on each of fewer ranks."""
        degree, parts = asked.tensor_parallel, asked.tensor_parallel // fewer
        reached: float = REACHED_OF_WHOLE ** math.log2(parts)
        self._assume(
            f"{asked.kind} on {asked.device}: not measured at tensor parallelism {degree}; 1/{parts} of its "
            f"time {'on one device' if fewer == 1 else f'at {fewer}'} at {reached:.0%} of the speed"
        )
        return seconds / (parts * reached)

    def _fit(self, key: _Key, rows: int) -> _Curves | None:
        """One entry as curves, if there is one; notes where `rows` are beyond what was measured."""
        times = self._times.get(key)
        if times is None:
            return None
        if len(times.rows) == 1 and rows != times.rows[0]:
            self._assume(
                f"{times.kind} on {times.device}: measured with {count(times.rows[0], 'row')} at once "
                "alone, from which times of other sizes are guessed; measure a few"
            )
        elif rows > times.rows[-1]:
            self._assume(
                f"{times.kind} on {times.device}: more than the {count(times.rows[-1], 'row')} that were "
                "measured; straight on from there"
            )
        if key not in self._fitted:
            name = name_times(times)
            self._fitted[key] = {
                "forward": fit_curve(times.rows, times.forward_s, name=f"forward of {name}"),
                "backward": fit_curve(times.rows, times.backward_s, name=f"backward of {name}"),
            }
        return self._fitted[key]

    # -- what was not ----------------------------------------------------------------------

    def _by_flops(self, asked: _Asked) -> float:
        which, kind, device, rows, recompute, tensor_parallel = asked
        flops = rows * self._flops(which, self._kind(kind), recompute)
        if not flops:
            return 0.0
        if tensor_parallel > 1 and self._is_measured_whole(device, tensor_parallel):
            return self._cut_further(asked, self._find(asked._replace(tensor_parallel=1)), 1)
        reference = self._reference(device, tensor_parallel)
        if reference is None:
            return flops / self._peak(kind, device)
        measured = self._measured(asked._replace(kind=reference.name, recompute="none"))
        reference_flops = rows * self._flops(which, reference, "none")
        assert measured is not None
        self._assume(f"{kind} on {device}: not measured; its FLOPs at the speed of {reference.name}")
        return measured * flops / reference_flops

    def _kind(self, name: str) -> LayerKind:
        kind = self._workload.kinds.get(name)
        if kind is None:
            raise ProfileError(f"workload {self._workload.model}: no layers of kind '{name}'")
        return kind

    @staticmethod
    def _flops(which: Pass, kind: LayerKind, recompute: Recompute) -> float:
        """Per row."""
        if which == "forward":
            return kind.forward_flops_per_row
        again = recompute == "layer" and kind.backward_flops > 0
        return kind.backward_flops + (kind.forward_flops_per_row if again else 0.0)

    def _is_measured_whole(self, device: str, tensor_parallel: int) -> bool:
        """Whether what was measured on a device, if anything, was with one rank and not with so many."""
        degrees = {key[3] for key in self._times if key[1] == device}
        return tensor_parallel not in degrees and (1 in degrees or not degrees)

    def _find_reference(self, device: str, tensor_parallel: int) -> LayerKind | None:
        """The measured kind of a device whose speed others take: `layer`, else the one with most FLOPs;
        None for a device without measurements."""
        on_device = {key for key in self._times if key[1] == device}
        measured = {kind for kind, _, _, degree in on_device if degree == tensor_parallel}
        known = [self._workload.kinds[kind] for kind in sorted(measured) if kind in self._workload.kinds]
        usable = [kind for kind in known if kind.forward_flops_per_row and kind.backward_flops]
        if not usable and on_device:
            degrees = sorted({degree for _, _, _, degree in on_device})
            raise ProfileError(
                f"profile: nothing measured on {device} at tensor parallelism {tensor_parallel}, only at "
                f"{', '.join(map(str, degrees))}, of layers of this workload; measure it there"
            )
        return max(usable, key=lambda kind: (kind.name == "layer", kind.forward_flops_per_row), default=None)

    def _find_peak(self, kind: str, device: str) -> float:
        """FLOP/s that are reached of the catalogue's."""
        spec = self._find_spec(device)
        if spec is None:
            raise ProfileError(
                f"profile: no times of {kind} on {device}, which the device catalogue does not know either; "
                f"measure it (known here: {', '.join(sorted({key[1] for key in self._times})) or 'nothing'})"
            )
        peak = spec.peak_flops.get(self._workload.dtype)
        if not peak:
            raise ProfileError(
                f"profile: no times of {kind} on {device}, and the catalogue has no peak of it for "
                f"{self._workload.dtype}; measure it, or compute in another dtype"
            )
        self._assume(
            f"{device}: nothing was measured on it; FLOPs at {REACHED_OF_PEAK:.0%} of "
            f"{peak / 1e12:.4g} TFLOP/s"
        )
        return REACHED_OF_PEAK * peak

    def _find_spec(self, device: str) -> DeviceSpec | None:
        try:
            return find_device(device)
        except ClusterError:
            return None

    def _assume(self, line: str) -> None:
        self._assumptions[line] = None


def find_implausible(profile: Profile, workload: Workload) -> str | None:
    """What no card can have measured, such as milliseconds that are written as seconds; None if there is
    nothing. Cards that the catalogue does not know, and CPUs, are believed."""
    for times in profile.layers:
        kind, spec = workload.kinds.get(times.kind), CATALOGUE.get(times.device)
        peak = None if spec is None else spec.peak_flops.get(times.dtype)
        rows, seconds = times.rows[-1], times.forward_s[-1]
        if kind is None or not peak or not seconds:
            continue
        share = kind.forward_flops_per_row * rows / times.tensor_parallel / seconds / peak
        if share > _IMPOSSIBLE or (0 < share < _IDLE and seconds > _LONG_S):
            return (
                f"IMPLAUSIBLE: by the profile {name_times(times)} computes {count(rows, 'row')} forward in "
                f"{seconds:.3g} s, {share:.3g} times the peak of the card; are its times in seconds?"
            )
    return None


def name_times(times: LayerTimes) -> str:
    """For messages: `layer on T4 (float16, 512 tokens)`."""
    parts = [times.dtype, f"{times.sequence_length} tokens"]
    parts += ["recomputed"] if times.recompute == "layer" else []
    parts += [f"tensor parallelism {times.tensor_parallel}"] if times.tensor_parallel > 1 else []
    return f"{times.kind} on {times.device} ({', '.join(parts)})"
