"""What one process is asked to measure, and what it hands back."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

OFFLOAD_OF = {
    "a": (),
    "b": ("params", "activations"),
    "c": ("params", "optimizer", "activations"),
    "o": ("optimizer",),
    "p": ("params",),
    "s": ("activations",),
}
"""What our variants keep in host memory."""
VARIANTS = {
    "a": "zorselike, all resident",
    "b": "zorselike, offload params + activations",
    "c": "zorselike, offload everything",
    "o": "zorselike, offload optimizer",
    "p": "zorselike, offload params",
    "s": "zorselike, offload activations",
    "d": "FSDP2 with CPUOffloadPolicy",
    "e": "FSDP2",
}
COMPARED = ("a", "b", "c", "d", "e")
"""Those of the throughput benchmark."""
Updates = Literal["at once", "at once, clipped", "deferred"]
Failure = Literal["", "device memory", "host memory", "time", "other"]


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


TINY_SHAPE = Shape(
    num_layers=4, dim=64, num_heads=4, ffn_hidden=192, vocab_size=256, sequence=16, microbatch_rows=2
)
"""For a CPU."""


@dataclass(frozen=True)
class Job:
    """One process's work: so many timed steps."""

    shape: Shape = field(default_factory=Shape)
    device: str = "cuda"
    variant: str = "a"
    num_tokens: int = 65_536
    """Tokens of a step."""
    num_ministages: int = 8
    num_warm_up: int = 2
    num_steps: int = 5
    holds_most: bool = False
    """FSDP2 only: gathers and reduces for every microbatch, which holds most layers and is slower."""
    compiles: bool = False
    """Ours only: `torch.compile` of each layer."""
    is_fused: bool = True
    """Whether AdamW is one kernel for many tensors."""
    recomputes: bool = True
    """Ours only: each layer in its backward."""
    is_deterministic: bool = False
    """Only kernels that add in one order: those of attention's backward do not, so that on a GPU no run is
    bit for bit another. It is slower."""
    updates: Updates = "at once"
    """Ours only: without clipping, clipped by each ministage's norm, or by the norm of all gradients."""

    @property
    def num_rows(self) -> int:
        rows = self.num_tokens // self.shape.sequence
        if rows < 1 or self.num_tokens % self.shape.sequence:
            raise ValueError(f"--tokens {self.num_tokens} is no multiple of --sequence {self.shape.sequence}")
        return rows


@dataclass(frozen=True)
class Measurement:
    """Timed steps of one variant."""

    variant: str
    num_tokens: int
    num_ministages: int
    num_layers: int
    num_parameters: int
    step_s: tuple[float, ...]
    loss: float
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
    planned_bytes: int | None = None
    """Device memory as our plan foretells it."""
    bytes_by_stream: Mapping[str, int] = field(default_factory=dict)
    """What the allocator keeps for each stream at the end."""
    num_retries: int = 0
    """How often the allocator gave everything back and asked again."""
    host_us: Mapping[str, float] = field(default_factory=dict)
    """Ours only: microseconds that the host takes for an action, by kind."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.median_s


@dataclass(frozen=True)
class Outcome:
    """What came of a job: a measurement, or why there is none."""

    measurement: Measurement | None = None
    failure: Failure = ""
    reason: str = ""


def merge(measurements: Sequence[Measurement]) -> Measurement:
    """Repetitions of one measurement as one: all steps, the largest peaks."""

    def largest(name: str) -> int | None:
        return max((n for m in measurements if (n := getattr(m, name)) is not None), default=None)

    return replace(
        measurements[0],
        step_s=tuple(seconds for m in measurements for seconds in m.step_s),
        device_bytes=largest("device_bytes"),
        reserved_bytes=largest("reserved_bytes"),
        host_bytes=largest("host_bytes"),
    )


def spell_bytes(count: float | None) -> str:
    """Bytes in GiB, or in MiB where that is little."""
    if count is None:
        return "-"
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
