"""What one parameter takes in each of its forms, and over how many ranks parameters are divided.

Half precision follows FSDP2 with fp32 master weights: gradients are added up and reduced in fp32, and the
optimizer keeps fp32 masters and moments; in fp32 and fp64 all have the parameter's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from zorselike.plan.workload import Workload

FP32_BYTES = 4


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter."""

    weight: int
    """In the dtype in which it is gathered and computes."""
    num_moments: int = 0
    """Averages that the optimizer keeps of it (AdamW: 2)."""

    @classmethod
    def of(cls, workload: Workload) -> ParameterBytes:
        """Of any parameter of a workload's model."""
        return cls(workload.itemsize, workload.num_moments)

    @property
    def masters(self) -> bool:
        """Whether updates change an fp32 master weight, from which the weight is rounded."""
        return self.weight < FP32_BYTES

    @property
    def gradient(self) -> int:
        """Its gradient as it is added up and reduced."""
        return max(self.weight, FP32_BYTES)

    @property
    def state(self) -> int:
        """What the optimizer keeps of it: moments, and the master weight if there is one."""
        return self.num_moments * self.gradient + FP32_BYTES * self.masters


def count_shards(zero: int, num_replicas: int) -> int:
    """How many replicas of a group share its parameters, gradients and optimizer state."""
    return 1 if zero == 0 else num_replicas


def largest_shard(number: int, num_shards: int) -> int:
    """The most elements that one of them holds of so many."""
    return -(-number // num_shards)
