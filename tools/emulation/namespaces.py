"""Nodes as network namespaces of the kernel, each behind a network card of limited rate (`tbf`).

Needs root, `ip` and `tc`, and a kernel with network namespaces, bridges and `tbf`. The namespaces
are this process's own and are deleted with `close`, or by the next that finds them left over.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from zorselike.plan.cluster.cluster import Cluster

_CLONE_NEWNET = 0x40000000
_PREFIX = "zemu"
_MTU = 1500
_FRAME_SHARE = (_MTU - 52) / (_MTU + 14)
"""Share of a frame that is payload: the rest are headers of Ethernet, IP and TCP."""
_BURST_BYTES = 3_100
"""What may pass at once after a pause, for nothing: two packets."""
_QUEUE_BYTES = 4_000_000
"""Enough that nothing is dropped."""
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": "4096 8192 8192",
    "tcp_wmem": "4096 8192 8192",
}
"""How connections share: the default of some machines (bbr) first feels for the rate; each connection has at
most about a window on its way, and equal windows share a queue equally. With larger ones messages of 100 kB,
as they are here, would pass one after the other as they were posted, where network cards take turns."""


class NamespaceError(RuntimeError):
    """This machine cannot limit links in its kernel."""


def find_obstacle() -> str:
    """Why this machine cannot have namespaces with `tbf`; empty if it can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program `{program}` (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_PREFIX}{os.getpid()}try"
    try:
        _run(f"ip netns add {name}")
    except NamespaceError as error:
        return str(error)
    try:
        _run(f"ip -n {name} link add name card type veth peer name port")
        _run(f"ip -n {name} link add name switch type bridge")
        _limit(name, "card", 1e6)
    except NamespaceError as error:
        return str(error)
    finally:
        _run(f"ip netns delete {name}")
    return ""


class Namespaces:
    """One namespace a node of a cluster and one with the switch between them."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises `NamespaceError` where the machine does not allow it, or the cluster has links that a
        node's card does not describe."""
        _refuse_other_limits(cluster)
        self._cluster = cluster
        self._name = f"{_PREFIX}{os.getpid()}"
        self._made: list[str] = []

    def __enter__(self) -> Namespaces:
        if obstacle := find_obstacle():
            raise NamespaceError(f"the kernel cannot limit links here: {obstacle}; use the sleeping limit")
        try:
            self._build()
        except NamespaceError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, node: int) -> None:
        """Moves this process, which has one thread yet, to a node."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self._name}n{node}").open("rb") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise NamespaceError(f"setns: {os.strerror(ctypes.get_errno())}")
        os.environ["GLOO_SOCKET_IFNAME"] = "card"

    def close(self) -> None:
        """Deletes the namespaces, and with them all that is in them."""
        while self._made:
            _run(f"ip netns delete {self._made.pop()}")

    def _build(self) -> None:
        hub = self._add("hub")
        _run(f"ip -n {hub} link add name switch mtu {_MTU} type bridge")
        _run(f"ip -n {hub} link set switch up")
        for number, node in enumerate(self._cluster.nodes):
            name, port = self._add(f"n{number}"), f"port{number}"
            _run(f"ip link add name card netns {name} type veth peer name {port} netns {hub}")
            _run(f"ip -n {hub} link set {port} master switch")
            assert node.nic is not None
            for place, card in ((name, "card"), (hub, port)):
                # Large packets would pass a bucket as one.
                _run(f"ip -n {place} link set {card} mtu {_MTU} gso_max_size {_MTU} up")
                _limit(place, card, node.nic.bandwidth_bytes_per_s)
            _run(f"ip -n {name} address add 10.213.0.{number + 1}/24 dev card")
            _run(f"ip -n {name} link set lo up")
            for key, value in _TCP.items():
                write = f"echo '{value}' > /proc/sys/net/ipv4/{key}"
                _run(f"ip netns exec {name} sh -c {shlex.quote(write)}")

    def _add(self, suffix: str) -> str:
        name = f"{self._name}{suffix}"
        _run(f"ip netns add {name}")
        self._made.append(name)
        return name


def _limit(namespace: str, card: str, bytes_per_s: float) -> None:
    rate = f"{8 * bytes_per_s / _FRAME_SHARE:.0f}bit"
    bucket = f"tbf rate {rate} burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
    _run(f"ip netns exec {namespace} tc qdisc replace dev {card} root {bucket}")


def _refuse_other_limits(cluster: Cluster) -> None:
    for node in cluster.nodes:
        if node.nic is None:
            raise NamespaceError(f"the kernel limits cards, and node {node.name} has no nic; give it one")
    slowest = min(node.nic.bandwidth_bytes_per_s for node in cluster.nodes if node.nic is not None)
    links = [*cluster.node_links.values(), *cluster.zone_links.values(), *cluster.region_links.values()]
    if cluster.shared_links or any(link.bandwidth_bytes_per_s < slowest for link in links):
        raise NamespaceError(
            "the kernel limits cards only, and this cluster has links that are slower; use the sleeping limit"
        )


def _run(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise NamespaceError(f"`{command}` says: {reason[-1] if reason else done.returncode}")
