"""What Poplar's paper says of its evaluation: clusters, models, results (Table 1, Figs. 3 to 5 and the text).

Its figures are plots without numbers; only the ratios that the text names can be compared. How fast the
machines are joined it does not say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zorselike.plan.cluster.cluster import Cluster, Link, Node

from ..zorse.paper import GB, GBIT, make_cluster

TOKENS_PER_STEP = 2**21
"""Global batch: 2 million tokens."""
PCIE_BYTES_PER_S = 10 * GB
"""Between two GPUs of a machine: an assumption."""
NETWORK_BYTES_PER_S = 25 * GBIT
"""Between the two machines of a cluster: an assumption."""

Times = Literal["measured", "catalogue"]


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
    times: Times
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


CLUSTERS = (
    PoplarCluster(
        name="A",
        strong="A100-80",
        weak="A100-40",
        num_strong=4,
        num_weak=4,
        models=("0.5b", "tiny", "7b"),
        sequence_length=1024,
        dtype="float16",
        times="measured",
    ),
    PoplarCluster(
        name="B",
        strong="V100-16",
        weak="T4",
        num_strong=2,
        num_weak=2,
        models=("0.5b", "tiny"),
        sequence_length=512,
        dtype="float32",
        times="measured",
    ),
    PoplarCluster(
        name="C",
        strong="A800-80",
        weak="V100-PCIe-32",
        num_strong=4,
        num_weak=4,
        models=("0.5b", "tiny"),
        sequence_length=1024,
        dtype="float16",
        times="catalogue",
    ),
)
"""Table 1."""

NUMBERS = ((0, 4), (4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (3, 4), (2, 4), (1, 4))
"""Strong and weak GPUs of Fig. 5, on cluster C: one type alone, then 4:1 to 1:4."""


@dataclass(frozen=True)
class Model:
    """A model of the paper, by the layers of one that was measured."""

    measured: str
    """Its name among those of Zorse's authors."""
    num_layers: int | None = None
    """None: all of that."""


MODELS = {"0.5b": Model("tiny", 6), "tiny": Model("tiny"), "7b": Model("7b")}

STAND_INS = {"A100-80": "A100-40"}
"""Whose layer times stand for a device's where only the other was measured: the two compute equally fast
(the paper: "equal compute capabilities")."""

SPEEDUP_RANGE = (1.02, 3.92)
"""Poplar's throughput over the other systems' in all the paper's experiments (abstract)."""
LLAMA_OVER_EVEN = 2.27
"""The most over DeepSpeed with Llama 1.1B (Fig. 4 b, from the text)."""
LLAMA_OVER_WHALE = 1.14
"""The most over Whale with Llama 1.1B (Fig. 4 b, from the text)."""

ASSUMPTIONS = (
    "layer times: those of Zorse's authors, not Poplar's. Poplar measured 0.5B and 1.1B models; here 0.5b is "
    "6 layers of the authors' tiny Llama (hidden size 2048) between its embedding and head, 0.51 B "
    "parameters, and tiny (22 layers, 1.33 B) stands for 1.1B; 7b is larger than what the paper ran",
    "cluster A: 0.5b and tiny at 1024 tokens were measured on the A100-40 only; the A100-80 computes as fast",
    "cluster B: fp32 at 512 tokens; on both GPUs only a linear fit of the times is known",
    "cluster C: nothing measured; 45 % of the catalogue's peak FLOP/s whatever the rows, V100 PCIe 32 GB for "
    "the V100S. So Whale's shares are right on it by construction",
    "a machine of each type; 10 GB/s between GPUs of a machine (PCIe, as all of the paper's runs); between "
    "machines 25 Gb/s unless --network-gbit says otherwise; no latency",
    "rows at once: by our model of memory, fp32 gradients and moments, 17 inputs of a layer kept for its "
    "backward, 1 GB of every GPU for CUDA; where the paper tries it out",
    "as our runtime has it: ZeRO 2 reduces after each microbatch's backward, not beside it, and needs room "
    "for its whole gradients; one microbatch's activations at a time",
    "Poplar's time_communication is what a round's collectives take by themselves; ours tells what of them "
    "hides behind computation. Neither counts what hides of a step's first gather (ZeRO 1)",
    "weak, strong and even: equal rows for each card in as few microbatches as fit; Whale: rows by peak "
    "FLOP/s, the same number of microbatches on each card. Microbatches may differ by a row, which "
    "DeepSpeed's may not: the baselines are a little better than the paper's",
)
