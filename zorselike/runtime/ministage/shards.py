"""Where the parameter shards of one ministage are: on the device, or on the host between uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from zorselike.cost.purposes import Purpose
from zorselike.runtime.memory.host_backed import HostBackedTensors, PendingOffloads
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.ministage.sharding import local_tensor

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class _UnitShards:
    """The shards of one FSDP unit, those that updates change apart from the frozen ones."""

    changing: HostBackedTensors
    frozen: HostBackedTensors

    def __iter__(self) -> Iterator[HostBackedTensors]:
        return iter((self.changing, self.frozen))


class Shards:
    """The shards of one ministage, layer by layer."""

    def __init__(
        self,
        units: Sequence[NamedParameters],
        *,
        kept: Collection[str],
        offload: bool,
        memory: Memory,
        pending: PendingOffloads,
    ) -> None:
        """`units`: sharded parameters of each FSDP unit by global name, all of them on the device;
        `kept`: those that stay there. If `offload`, the others leave now."""
        self._pending = pending
        self._updated: Event | None = None
        self._units: list[_UnitShards] = []
        compute = memory.streams.compute
        leaving: set[str] = set()
        for unit in units:
            away = [(name, p) for name, p in unit if offload and name not in kept]
            leaving |= {name for name, _ in away}
            changing, frozen = (
                HostBackedTensors(
                    {name: local_tensor(p.detach()) for name, p in away if p.requires_grad is trains},
                    purpose=Purpose.PARAMETER_SHARDS,
                    memory=memory,
                    homes=[compute],
                    inbound=memory.streams.load,
                )
                for trains in (True, False)
            )
            self._units.append(_UnitShards(changing, frozen))
            for tensors in (changing, frozen):
                tensors.free(tensors.store(compute.record()))
        staying = [local_tensor(p.detach()) for unit in units for name, p in unit if name not in leaving]
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in staying)
        memory.ledger.hold(Purpose.PARAMETER_SHARDS, "device", num_bytes)

    @property
    def _host_backed(self) -> list[HostBackedTensors]:
        return [tensors for unit in self._units for tensors in unit]

    @property
    def are_away(self) -> bool:
        """Whether what updates change is on the host."""
        return any(not unit.changing.is_on_device for unit in self._units)

    def load(self) -> None:
        """Starts their way to the device, in the order of the layers."""
        for tensors in self._host_backed:
            tensors.load()

    def arrive(self, unit: int, stream: Stream) -> None:
        """Makes `stream` wait for one unit's."""
        for tensors in self._units[unit]:
            tensors.arrive(stream)

    def arrive_all(self, stream: Stream, *, on_host_too: bool = False) -> None:
        """Makes `stream` wait for all; where streams that nobody outside FSDP2 knows read them, the
        calling thread waits too."""
        for tensors in self._host_backed:
            tensors.arrive(stream, on_host_too=on_host_too)

    def make_room(self, stream: Stream) -> None:
        """Storage for an update to write all of them."""
        for unit in self._units:
            if not unit.changing.is_on_device:
                unit.changing.make_room(stream)

    def note_update(self, updated: Event) -> None:
        """They have other values once `updated` is over."""
        self._updated = updated

    def offload(self, last_use: Event) -> None:
        """Frees them after `last_use`; what an update has changed goes to the host first."""
        if self._updated is None:
            for tensors in self._host_backed:
                tensors.free(last_use)
            return
        updated, self._updated = self._updated, None
        changed = [unit.changing for unit in self._units]
        gone = updated
        for tensors in changed:
            gone = tensors.store(updated)
        self._pending.add(changed, gone)
        for unit in self._units:
            if unit.frozen.is_on_device:
                unit.frozen.free(last_use)

    def on_host(self, name: str, like: Tensor) -> Tensor | None:
        """The host's values of a shard that looks like `like`; None if it is on the device."""
        for tensors in self._host_backed:
            if name in tensors and not tensors.is_on_device:
                return tensors.host_copy(name, like)
        return None

    def recover(self, last_use: Event) -> None:
        """After an unfinished step: to the host with what is on the device."""
        for tensors in self._host_backed:
            if tensors.is_on_device:
                tensors.free(tensors.store(last_use))
        self._updated = None
