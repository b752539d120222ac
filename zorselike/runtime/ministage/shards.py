"""Where the parameter shards of one ministage are: on the device, or on the host between uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import nn

from zorselike.cost.purposes import Purpose
from zorselike.runtime.memory.host_backed import HostBackedParts, HostBackedTensors
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.ministage.settings import RankResources
from zorselike.runtime.ministage.sharding import local_tensor

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class _UnitShards(NamedTuple):
    """The shards of one FSDP unit, those that updates change apart from the frozen ones."""

    changing: HostBackedTensors
    frozen: HostBackedTensors


class Shards(HostBackedParts):
    """The shards of one ministage, layer by layer."""

    def __init__(
        self,
        units: Sequence[NamedParameters],
        resources: RankResources,
        *,
        kept: Collection[str],
        offload: bool,
    ) -> None:
        """`units`: sharded parameters of each FSDP unit by global name, all of them on the device;
        `kept`: those that stay there. If `offload`, the others leave now."""
        memory, self._pending = resources.memory, resources.pending_shards
        self._updated: Event | None = None
        self._frozen_changed = False
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

    def host_backed(self) -> list[HostBackedTensors]:
        return [tensors for unit in self._units for tensors in unit]

    @property
    def are_away(self) -> bool:
        """Whether what updates change is on the host."""
        return any(not unit.changing.is_on_device for unit in self._units)

    def arrive_unit(self, unit: int, stream: Stream) -> None:
        """Makes `stream` wait for one unit's."""
        for tensors in self._units[unit]:
            tensors.arrive(stream)

    def make_room(self, stream: Stream) -> None:
        """Storage for an update to write all of them."""
        for unit in self._units:
            if not unit.changing.is_on_device:
                unit.changing.make_room(stream)

    def note_update(self, updated: Event, *, frozen_too: bool = False) -> None:
        """They have other values once `updated` is over."""
        self._updated, self._frozen_changed = updated, frozen_too

    def offload(self, last_use: Event) -> None:
        """Frees them after `last_use`; what an update has changed goes to the host first."""
        if self._updated is None:
            for tensors in self.host_backed():
                tensors.free(last_use)
            return
        updated, self._updated = self._updated, None
        changed = [unit.changing for unit in self._units]
        if self._frozen_changed:
            changed += [unit.frozen for unit in self._units]
        gone = updated
        for tensors in changed:
            gone = tensors.store(updated)
        self._pending.add(changed, gone)
        for unit in self._units if not self._frozen_changed else ():
            if unit.frozen.is_on_device:
                unit.frozen.free(last_use)
        self._frozen_changed = False

    def recover(self, last_use: Event) -> None:
        super().recover(last_use)
        self._updated, self._frozen_changed = None, False
