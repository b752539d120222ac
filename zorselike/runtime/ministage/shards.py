"""Where the parameter shards of one ministage are: on the device, or on the host between uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from zorselike.runtime.memory.host_backed import Mirror
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.pending_offloads import Departures
from zorselike.runtime.memory.streams import Event, Stream
from zorselike.runtime.ministage.sharding import local_tensor

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class _UnitMirrors:
    """The shards of one FSDP unit, those that updates change apart from the frozen ones."""

    changing: Mirror
    frozen: Mirror

    def __iter__(self) -> Iterator[Mirror]:
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
        departures: Departures,
    ) -> None:
        """`units`: sharded parameters of each FSDP unit by global name, all of them on the device;
        `kept`: those that stay there. If `offload`, the others leave now."""
        self._departures = departures
        self._updated: Event | None = None
        self._units: list[_UnitMirrors] = []
        compute = memory.streams.compute
        mirrored: set[str] = set()
        for unit in units:
            away = [(name, p) for name, p in unit if offload and name not in kept]
            mirrored |= {name for name, _ in away}
            changing, frozen = (
                Mirror(
                    {name: local_tensor(p.detach()) for name, p in away if p.requires_grad is trains},
                    purpose="parameter shards",
                    memory=memory,
                    homes=[compute],
                    inbound=memory.streams.load,
                )
                for trains in (True, False)
            )
            self._units.append(_UnitMirrors(changing, frozen))
            for mirror in (changing, frozen):
                mirror.free(mirror.store(compute.record()))
        staying = [local_tensor(p.detach()) for unit in units for name, p in unit if name not in mirrored]
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in staying)
        memory.ledger.hold("parameter shards", "device", num_bytes)

    @property
    def _mirrors(self) -> list[Mirror]:
        return [mirror for unit in self._units for mirror in unit]

    @property
    def are_away(self) -> bool:
        """Whether what updates change is on the host."""
        return any(not unit.changing.is_on_device for unit in self._units)

    def load(self) -> None:
        """Starts their way to the device, in the order of the layers."""
        for mirror in self._mirrors:
            mirror.load()

    def arrive(self, unit: int, stream: Stream) -> None:
        """Makes `stream` wait for one unit's."""
        for mirror in self._units[unit]:
            mirror.arrive(stream)

    def arrive_all(self, stream: Stream, *, on_host_too: bool = False) -> None:
        """Makes `stream` wait for all; where streams that nobody outside FSDP2 knows read them, the
        calling thread waits too."""
        for mirror in self._mirrors:
            mirror.arrive(stream, on_host_too=on_host_too)

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
            for mirror in self._mirrors:
                mirror.free(last_use)
            return
        updated, self._updated = self._updated, None
        changed = [unit.changing for unit in self._units]
        gone = updated
        for mirror in changed:
            gone = mirror.store(updated)
        self._departures.add(changed, gone)
        for unit in self._units:
            if unit.frozen.is_on_device:
                unit.frozen.free(last_use)

    def on_host(self, name: str, like: Tensor) -> Tensor | None:
        """The host's values of a shard that looks like `like`; None if it is on the device."""
        for mirror in self._mirrors:
            if name in mirror and not mirror.is_on_device:
                return mirror.host_copy(name, like)
        return None

    def recover(self, last_use: Event) -> None:
        """After an unfinished step: to the host with what is on the device."""
        for mirror in self._mirrors:
            if mirror.is_on_device:
                mirror.free(mirror.store(last_use))
        self._updated = None
