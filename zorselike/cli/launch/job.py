"""A plan as a job: the kinds of nodes that it needs, and the program that each of its processes runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import join
from textwrap import wrap

from zorselike.cost.catalogue import CPU
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Device, Plan
from zorselike.text.wording import count, list_few

PORT = 29500
"""Where nodes meet, unless something else says a port."""
RECIPE = "RECIPE.toml"
"""Stands for a recipe that the user must name."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a process runs, beside its plan."""

    config: str | None = None
    """Path of a recipe, which then says everything but the plan."""
    model: tuple[str, ...] = ()
    """Options that name the model to the trainer; empty if a recipe or script must name it."""
    dtype: str = "auto"
    defer_updates: bool = False

    def list_arguments(self, plan: Plan, *, path: str, config: str | None = None) -> tuple[str, ...]:
        """Of `python -m zorselike.train`, with the plan at `path`, and the recipe at `config` if not where it
        is."""
        named = config or self.config
        if named is not None:
            return ("--config", named, "--hetero.plan", path)
        words = [*(self.model or ("--config", RECIPE)), "--hetero.plan", path]
        if plan.sequence_length is not None:
            words += ["--training.seq_len", str(plan.sequence_length)]
        words += ["--training.mixed_precision_param", self.dtype]
        if all(is_cpu(device) for device in plan.devices):
            words += ["--hetero.device", "cpu"]
        if not self.defer_updates:
            words += ["--hetero.clip", "ministage"]
        return tuple(words)


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes of which the plan wants the same: as many devices of the same types, in the same zone."""

    nodes: tuple[str, ...]
    local_ranks: tuple[int, ...]
    """Those that the plan uses on each, ascending."""
    types: tuple[str, ...]
    """Device type of each of them."""
    zone: str = ""
    """Empty where nobody said."""

    @property
    def num_processes(self) -> int:
        """On each node."""
        return len(self.local_ranks)

    @property
    def is_cpu(self) -> bool:
        return all(device.casefold() == CPU.casefold() for device in self.types)

    @property
    def leaves_some_out(self) -> bool:
        """Whether local ranks are not 0, 1, 2, ..."""
        return self.local_ranks != tuple(range(self.num_processes))

    @property
    def name(self) -> str:
        """`4-a100-40`, `4-a100-40-central-a`: letters, digits and hyphens."""
        types = "-".join(dict.fromkeys(self.types))
        return make_label(f"{self.num_processes}-{types}" + (f"-{self.zone}" if self.zone else ""))

    def describe(self) -> str:
        """`2 nodes (a, b) with 4 A100-40 each in zone z`."""
        devices = " + ".join(f"{number} {device}" for device, number in Counter(self.types).items())
        each = " each" if len(self.nodes) > 1 else ""
        where = f" in zone {self.zone}" if self.zone else ""
        return f"{count(len(self.nodes), 'node')} ({list_few(self.nodes)}) with {devices}{each}{where}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan that names its devices, and what its processes run."""

    plan: Plan
    path: str
    """Path of the plan's file."""
    program: Program
    cluster: Cluster | None = None
    """For the zones and regions of nodes."""

    def __post_init__(self) -> None:
        if not self.plan.devices:
            raise ConfigError(
                f"launch: {self.path} has no [[devices]], so that nothing says which nodes it is for; "
                "plan with `zorselike plan`, or add them as in recipes/multi_node.plan.toml"
            )

    @property
    def name(self) -> str:
        return name_job(self.path)

    @cached_property
    def devices_of(self) -> Mapping[str, Sequence[Device]]:
        """The devices of each node, nodes by their first rank."""
        nodes: dict[str, list[Device]] = {}
        for device in sorted(self.plan.devices, key=lambda device: device.rank):
            nodes.setdefault(device.node, []).append(device)
        return nodes

    @cached_property
    def kinds(self) -> tuple[NodeKind, ...]:
        """Kinds of nodes, by their first rank."""
        found: dict[tuple[tuple[int, ...], tuple[str, ...], str], list[str]] = {}
        for node, devices in self.devices_of.items():
            own = sorted(devices, key=lambda device: device.local_rank)
            local_ranks = tuple(device.local_rank for device in own)
            zone = self._places.get(node, ("", ""))[1]
            found.setdefault((local_ranks, tuple(device.type for device in own), zone), []).append(node)
        return tuple(
            NodeKind(nodes=tuple(nodes), local_ranks=local_ranks, types=types, zone=zone)
            for (local_ranks, types, zone), nodes in found.items()
        )

    @property
    def regions(self) -> frozenset[str]:
        """Of the plan's nodes; empty where nobody said."""
        found = (self._places.get(node, ("", ""))[0] for node in self.devices_of)
        return frozenset(filter(None, found))

    @property
    def num_nodes(self) -> int:
        return len(self.devices_of)

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, str]]:
        """Region and zone by node."""
        return {} if self.cluster is None else {n.name: (n.region, n.zone) for n in self.cluster.nodes}

    def write_program(self, *, path: str | None = None, config: str | None = None) -> str:
        """`-m zorselike.train ...` as shell words, with the plan and the recipe at these paths."""
        return f"-m zorselike.train {join(self.list_arguments(path=path, config=config))}"

    def list_arguments(self, *, path: str | None = None, config: str | None = None) -> tuple[str, ...]:
        return self.program.list_arguments(self.plan, path=path or self.path, config=config)

    def describe(self) -> str:
        """`plan 0123456789ab of plan.toml, 4 ranks on 2 nodes`."""
        ranks = f"{count(self.plan.num_ranks, 'rank')} on {count(self.num_nodes, 'node')}"
        return f"plan {self.plan.fingerprint} of {self.path}, {ranks}"

    def list_notes(self) -> list[str]:
        """What a user must know, a sentence each without its full stop."""
        notes = []
        if self.program.config is None and not self.program.model:
            notes.append(f"{RECIPE}, or your own script in its place, names the model (README, Your model)")
        if self.program.config is None and not self.program.defer_updates:
            notes.append(
                "clip = ministage updates each ministage at once, as the plan assumes; to clip by the norm "
                "of all gradients plan with --defer-updates"
            )
        return notes

    def check_goes_along(self, launcher: str) -> None:
        """Raises `ConfigError` unless plan and recipe are inside the working directory, which goes along."""
        for path in filter(None, (self.path, self.program.config)):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ConfigError(
                    f"launch: {launcher} brings along the folder that it is started in, and {path} is not "
                    "named as a file in it; start in a folder with all files, and give their names from there"
                )


def name_job(path: str) -> str:
    """By the plan's file, of letters, digits and hyphens; first a letter, for Kubernetes."""
    stem = Path(path).name.removesuffix(".toml").removesuffix(".plan")
    label = make_label(stem) or "train"
    return label if label[0].isalpha() else make_label(f"plan-{label}")


def is_cpu(device: Device) -> bool:
    return device.type.casefold() == CPU.casefold()


def write_comment(*sentences: str, prefix: str = "# ", width: int = 100) -> list[str]:
    """Lines of a comment, each sentence on lines of its own."""
    return [
        line
        for sentence in sentences
        for line in wrap(
            sentence, width, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False
        )
    ]


def make_label(text: str) -> str:
    """Lower-case letters, digits and single hyphens, 63 at most: a name for Kubernetes, SkyPilot and DNS."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-")
