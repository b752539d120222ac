"""What would break a long job, found in what every process says of itself. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zorselike.cost.profile import LinkTimes
from zorselike.cost.wires import fit_link
from zorselike.plan.plan import Plan
from zorselike.runtime.memory.host_room import HOST_MEMORY_VARIABLE
from zorselike.runtime.processes.world import ProcessInfo, find_mistakes
from zorselike.text.layout import align_columns
from zorselike.text.units import GIB
from zorselike.text.wording import list_few

LEAST_HOST_BYTES = 2 * GIB
"""Free host memory for each process: Python, torch and CUDA take about as much."""
LEAST_LOCKED_BYTES = 64 * 2**20
"""What network cards that read memory by themselves register."""
LEAST_SHARED_BYTES = 2**28
"""Of `/dev/shm` for each GPU of a node with several: NCCL's buffers for a few neighbours."""
SLOW = 4
"""A link is slow if it carries less than the others' median over this."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What one process says of its machine."""

    info: ProcessInfo
    has_bf16: bool
    """Whether its device computes in bfloat16 in hardware."""
    interfaces: tuple[tuple[str, str], ...] = ()
    """Network interfaces that are up and their IPv4 addresses."""
    host_address: str = ""
    """What its own host name means there; empty: nothing."""
    named_interfaces: tuple[tuple[str, str], ...] = ()
    """Variables that name an interface, and what they say."""
    locked_bytes: int | None = None
    """Memory that a process may lock; None: no limit."""
    shared_bytes: int | None = None
    """What `/dev/shm` holds; None: unknown."""
    data: tuple[tuple[str, str], ...] = ()
    """Each path that it is to read, and what is wrong with it; empty: nothing."""

    @property
    def outward(self) -> tuple[str, ...]:
        """Interfaces that other nodes may reach."""
        return tuple(name for name, address in self.interfaces if not address.startswith("127."))


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    severity: Literal["breaks", "warns"]
    text: str
    """Names the node and the mend."""


def find_problems(
    healths: Sequence[Health], *, plan: Plan | None = None, dtype: str = "bfloat16", device: str | None = None
) -> list[Finding]:
    """Everything that would break a job of these processes, or slow it down; the worst first.

    Args:
        healths: of all processes, by rank.
        plan: what is to run, if it is known.
        dtype: what layers are to compute in; `auto`: whatever all can.
        device: `cuda` or `cpu`, if the caller has named it for all of them.
    """
    infos = [health.info for health in healths]
    breaks = [str(error) for error in find_mistakes(infos, plan, device=device)]
    breaks += [*_shared_gpus(infos), *_precision(healths, dtype), *_network(healths), *_data(healths)]
    return [Finding("breaks", text) for text in breaks] + [
        Finding("warns", text) for text in _memory(healths)
    ]


def find_slow_links(links: Sequence[LinkTimes]) -> list[Finding]:
    """Pairs of nodes that carry far less than the others; a node whose every link is slow is named itself."""
    rates = {entry.between: fit_link(entry).bandwidth_bytes_per_s for entry in links}
    between = {pair: rate for pair, rate in rates.items() if pair[0] != pair[1]}
    if len(between) < 3:
        return []
    usual = statistics.median(between.values())
    slow = [pair for pair, rate in between.items() if rate * SLOW < usual]
    nodes = sorted({node for pair in between for node in pair})
    whole = [node for node in nodes if all(pair in slow for pair in between if node in pair)]
    found = [
        f"node {node}: all its links carry less than {usual / SLOW / 1e9:.3g} GB/s, others "
        f"{usual / 1e9:.3g}; look at its network card, cable and GLOO_SOCKET_IFNAME"
        for node in whole
    ]
    found += [
        f"nodes {pair[0]} and {pair[1]}: {between[pair] / 1e9:.3g} GB/s between them, others carry "
        f"{usual / 1e9:.3g}; look at the switch between them"
        for pair in slow
        if not set(pair) & set(whole)
    ]
    return [Finding("warns", text) for text in found]


def _shared_gpus(infos: Sequence[ProcessInfo]) -> Iterator[str]:
    users: dict[str, list[ProcessInfo]] = {}
    for info in infos:
        if info.gpu:
            users.setdefault(info.gpu, []).append(info)
    for own in users.values():
        if len(own) > 1:
            ranks = list_few([info.rank for info in own], "rank")
            yield (
                f"node {own[0].node}: {ranks} have one {own[0].device_name} together; start one process a "
                "GPU, or give each its own by CUDA_VISIBLE_DEVICES"
            )


def _precision(healths: Sequence[Health], dtype: str) -> Iterator[str]:
    without = [health for health in healths if health.info.device == "cuda" and not health.has_bf16]
    for node, own in _by_node(without if dtype == "bfloat16" else ()).items():
        names = sorted({health.info.device_name for health in own})
        yield (
            f"node {node}: {list_few(names)} cannot compute in bfloat16; set mixed_precision_param to "
            '"float16" or "auto"'
        )


def _network(healths: Sequence[Health]) -> Iterator[str]:
    by_node = {health.info.node: health for health in healths}
    for node, health in by_node.items():
        names = [name for name, _ in health.interfaces if len(by_node) == 1 or name in health.outward]
        for variable, value in health.named_interfaces:
            wanted = value.lstrip("^=").split(",")
            if not value.startswith("^") and not any(name.startswith(w) for name in names for w in wanted):
                yield (
                    f"node {node}: {variable} is {value}, but its interfaces are "
                    f"{list_few(names) or 'none'}; name one of these there"
                )
        if len(by_node) < 2:
            continue
        if not names:
            yield (
                f"node {node}: it has no network interface but loopback, so no other node reaches it; "
                "connect it, or give its container the host's network"
            )
        elif health.host_address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in dict(
            health.named_interfaces
        ):
            yield (
                f"node {node}: its own name means {health.host_address}, where no other node reaches it; "
                f"mend /etc/hosts there, or set GLOO_SOCKET_IFNAME={names[0]}"
            )


def _memory(healths: Sequence[Health]) -> Iterator[str]:
    for node, own in _by_node(healths).items():
        free = min(health.info.host_room_bytes for health in own)
        if free < LEAST_HOST_BYTES * len(own):
            yield (
                f"node {node}: {free / GIB:.1f} GiB of host memory are free for {len(own)} processes "
                f"({own[0].info.host_room_limit}); end what else runs there, raise the container's limit, or "
                f"set {HOST_MEMORY_VARIABLE} if there is more"
            )
        limits = [health.locked_bytes for health in own if health.locked_bytes is not None]
        if limits and min(limits) < LEAST_LOCKED_BYTES and any(health.info.gpu for health in own):
            yield (
                f"node {node}: a process may lock {min(limits) / 2**20:.0f} MiB, too little for InfiniBand; "
                "set ulimit -l unlimited there"
            )
        on_gpu = [health for health in own if health.info.gpu]
        shared = [health.shared_bytes for health in on_gpu if health.shared_bytes is not None]
        if len(on_gpu) > 1 and shared and min(shared) < LEAST_SHARED_BYTES * len(on_gpu):
            wanted = LEAST_SHARED_BYTES * len(on_gpu) // 2**20
            yield (
                f"node {node}: /dev/shm holds {min(shared) / 2**20:.0f} MiB, by which NCCL connects GPUs "
                "that do not reach each other's memory; give the container "
                f"{wanted} MiB (docker run --shm-size)"
            )


def _data(healths: Sequence[Health]) -> Iterator[str]:
    said: dict[tuple[str, str, str], list[int]] = {}
    for health in healths:
        for path, problem in health.data:
            if problem:
                said.setdefault((health.info.node, path, problem), []).append(health.info.rank)
    for (node, path, problem), ranks in said.items():
        yield (
            f"node {node}: {list_few(ranks, 'rank')} cannot read {path} ({problem}); copy it there, or mount "
            "the shared folder"
        )


def _by_node(healths: Iterable[Health]) -> dict[str, list[Health]]:
    found: dict[str, list[Health]] = {}
    for health in healths:
        found.setdefault(health.info.node, []).append(health)
    return found


def describe_nodes(healths: Sequence[Health]) -> str:
    """A table, a line a node."""
    table = [("node", "ranks", "device", "torch", "bf16", "host free", "lockable", "interfaces")]
    for node, own in _by_node(healths).items():
        names = sorted({health.info.device_name or health.info.device for health in own})
        locked = own[0].locked_bytes
        addresses = [f"{name} {address}" for name, address in own[0].interfaces if name in own[0].outward]
        table.append(
            (
                node,
                str(len(own)),
                ", ".join(names),
                own[0].info.torch,
                "yes" if all(health.has_bf16 for health in own) else "no",
                f"{min(health.info.host_room_bytes for health in own) / GIB:.1f} GiB",
                "unlimited" if locked is None else f"{locked / GIB:.2f} GiB",
                ", ".join(addresses) or "none",
            )
        )
    return "\n".join(align_columns(table, left=range(len(table[0]))))


def describe_links(links: Sequence[LinkTimes]) -> str:
    """A table, a line a pair of nodes."""
    table = [("between, over Gloo", "GB/s", "latency, us")]
    for entry in links:
        link = fit_link(entry)
        where = f"inside {entry.between[0]}" if len(set(entry.between)) == 1 else " - ".join(entry.between)
        table.append((where, f"{link.bandwidth_bytes_per_s / 1e9:.3g}", f"{1e6 * link.latency_s:.0f}"))
    return "\n".join(align_columns(table, left=range(len(table[0]))))
