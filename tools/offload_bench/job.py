"""What one process is asked to do, and what it hands back; both travel as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

OFFLOAD_OF = {
    "a": (),
    "b": ("params", "activations"),
    "c": ("params", "optimizer", "activations"),
}
"""What our variants keep in host memory."""
CPU_OFFLOADING = ("d", "d_kept")
"""Variants of FSDP2 with `CPUOffloadPolicy`."""
VARIANTS = {
    "a": "zorselike, all resident",
    "b": "zorselike, offload params + activations",
    "c": "zorselike, offload everything",
    "d": "FSDP2 with CPUOffloadPolicy",
    "d_kept": "FSDP2 with CPUOffloadPolicy, weights kept for the step",
    "e": "FSDP2",
}
FAILURES = ("device memory", "host memory", "time", "other")


@dataclass(frozen=True)
class Shape:
    """A Llama, and the rows it is trained on."""

    num_layers: int = 16
    dim: int = 4096
    num_heads: int = 32
    ffn_hidden: int = 11_008
    vocab_size: int = 32_000
    sequence: int = 4096
    microbatch_rows: int = 1


@dataclass(frozen=True)
class Job:
    """One process's work: `train` (time steps), `trace` (where its copies are), or `machine` (what
    the device and its link can do)."""

    kind: str
    shape: Shape = field(default_factory=Shape)
    device: str = "cuda"
    variant: str = "a"
    num_tokens: int = 65_536
    """Of a step."""
    num_ministages: int = 8
    num_warm_up: int = 2
    num_steps: int = 5
    init: str = "tile"
    holds_most: bool = False
    """FSDP2 only: gathers and reduces for every microbatch, which holds most layers and is slower."""
    compiles: bool = False
    """Ours only: `torch.compile` of each layer."""
    trace_file: str = ""
    """Where the Chrome trace of a `trace` is kept."""

    @property
    def num_rows(self) -> int:
        rows = self.num_tokens // self.shape.sequence
        if rows < 1 or self.num_tokens % self.shape.sequence:
            raise ValueError(f"--tokens {self.num_tokens} is no multiple of --sequence {self.shape.sequence}")
        return rows

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "shape": Shape(**values["shape"])})


@dataclass(frozen=True)
class Measurement:
    """Timed steps of one variant in one process."""

    variant: str
    num_tokens: int
    num_ministages: int
    num_layers: int
    num_parameters: int
    step_s: tuple[float, ...]
    wall_s: float
    """Of all timed steps until the device was idle."""
    loss: float
    """Of the last step."""
    device_bytes: int | None
    """The most that was allocated on the device during the timed steps; None: not counted."""
    reserved_bytes: int | None
    """The same with what the allocator kept."""
    host_bytes: int | None
    """Host memory of the offloading."""
    set_up_s: float
    device_name: str
    memory: str = ""
    """The memory report as a table."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.median_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"median_s": self.median_s, "tokens_per_s": self.tokens_per_s}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Measurement:
        known = {key: values[key] for key in cls.__dataclass_fields__}
        return cls(**{**known, "step_s": tuple(values["step_s"])})


@dataclass(frozen=True)
class Outcome:
    """What came of a job: values, or why there are none."""

    values: dict[str, Any] | None = None
    failure: str = ""
    """One of `FAILURES`; empty if there are values."""
    reason: str = ""

    @property
    def measurement(self) -> Measurement | None:
        return None if self.values is None else Measurement.of(self.values)


def spell_bytes(count: float) -> str:
    """In GiB, or in MiB where that is little."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


def merge(measurements: list[Measurement]) -> Measurement:
    """Repetitions of one measurement as one: all steps, the largest peak."""
    first = measurements[0]
    return Measurement(
        **{
            **vars(first),
            "step_s": tuple(seconds for m in measurements for seconds in m.step_s),
            "wall_s": sum(m.wall_s for m in measurements),
            "device_bytes": _largest([m.device_bytes for m in measurements]),
            "reserved_bytes": _largest([m.reserved_bytes for m in measurements]),
            "host_bytes": _largest([m.host_bytes for m in measurements]),
        }
    )


def _largest(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if known else None
