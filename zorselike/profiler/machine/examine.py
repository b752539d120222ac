"""What this process can say of its machine: interfaces, limits, paths, number formats."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from zorselike.profiler.machine.health import Health
from zorselike.runtime.processes.device import lacks_bf16
from zorselike.runtime.processes.world import ProcessInfo

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def examine(info: ProcessInfo, *, data: Sequence[str]) -> Health:
    """This process's health; `data`: paths that it is to read."""
    return Health(
        info=info,
        has_bf16=not lacks_bf16(info),
        interfaces=tuple(_interfaces()),
        host_address=_host_address(),
        named_interfaces=tuple(
            (name, os.environ[name]) for name in _INTERFACE_VARIABLES if name in os.environ
        ),
        locked_bytes=_locked_bytes(),
        shared_bytes=_shared_bytes(),
        data=tuple((path, why_unreadable(Path(path))) for path in data),
    )


def why_unreadable(path: Path) -> str:
    """Why a file, or every file of a folder, cannot be read; empty if it can."""
    try:
        if path.is_dir():
            if not any(path.iterdir()):
                return "the folder is empty"
        else:
            with path.open("rb") as file:
                file.read(1)
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    return ""


def _interfaces() -> list[tuple[str, str]]:
    """Name and IPv4 address of what is up."""
    found = ((name, _address_of(name)) for _, name in socket.if_nameindex())
    return [(name, address) for name, address in found if address]


def _address_of(interface: str) -> str:
    """Its IPv4 address; empty if it has none, or on a system other than Linux."""
    try:
        import fcntl
        import struct

        get_address = 0x8915  # SIOCGIFADDR of linux/sockios.h
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), get_address, request)[20:24])
    except (ImportError, OSError):
        return ""


def _host_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _locked_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared_bytes() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
