"""What Poplar's paper says of its evaluation: clusters, models, results, read from `paper.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.text.dataclass_tables import read_dataclass

from ..zorse.paper import GB, GBIT, make_cluster

TOKENS_PER_STEP = 2**21
"""Global batch: 2 million tokens."""
PCIE_BYTES_PER_S = 10 * GB
"""Between two GPUs of a machine: an assumption."""
NETWORK_BYTES_PER_S = 25 * GBIT
"""Between the two machines of a cluster: an assumption."""


@dataclass(frozen=True, kw_only=True)
class PoplarCluster:
    """A cluster of Table 1: a machine of each of two types of GPU."""

    name: str
    strong: str
    weak: str
    num_strong: int
    num_weak: int
    models: tuple[str, ...]
    sequence_length: int
    dtype: str
    times: Literal["measured", "catalogue"]
    """Where layer times are from: Zorse's authors, or the peaks of the device catalogue."""
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    tokens_per_step: int = TOKENS_PER_STEP

    def with_numbers(self, num_strong: int, num_weak: int) -> PoplarCluster:
        """The cluster with other numbers of GPUs; 0 leaves a machine out."""
        return replace(self, num_strong=num_strong, num_weak=num_weak)

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self.tokens_per_step // self.sequence_length

    @property
    def cluster(self) -> Cluster:
        """The strong machine first."""
        network = Link(self.network_bytes_per_s)
        counts = [(self.strong, self.num_strong), (self.weak, self.num_weak)]
        nodes = [
            Node(
                name=device.lower(),
                devices=(device,) * number,
                fabric=Link(PCIE_BYTES_PER_S) if number > 1 else None,
                nic=network,
            )
            for device, number in counts
            if number
        ]
        return make_cluster(self.name, nodes, nic=self.network_bytes_per_s)

    def describe(self) -> str:
        """`4 A100-80 + 4 A100-40`."""
        counts = [(self.num_strong, self.strong), (self.num_weak, self.weak)]
        return " + ".join(f"{number} {device}" for number, device in counts if number)


_TABLES: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))
CLUSTERS = tuple(read_dataclass(PoplarCluster, own) for own in _TABLES["clusters"])
"""Table 1."""
NUMBERS = tuple((strong, weak) for strong, weak in _TABLES["numbers"])
"""Strong and weak GPUs of Fig. 5."""
SPEEDUP_RANGE: tuple[float, float] = tuple(_TABLES["speedup_range"])
LLAMA_OVER: Mapping[str, float] = _TABLES["llama_over"]
ASSUMPTIONS: tuple[str, ...] = tuple(_TABLES["assumptions"])

MODELS = {"0.5b": ("tiny", 6), "tiny": ("tiny", None), "7b": ("7b", None)}
"""A model of the paper by one that Zorse's authors measured, and how many of its layers; None: all."""
STAND_INS = {"A100-80": "A100-40"}
"""Whose layer times stand for a device's where only the other was measured: the two compute equally fast
(the paper: "equal compute capabilities")."""
