"""What is decided of a candidate before rows and layers are shared out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zorselike.planner.candidate.modes import Mode
from zorselike.planner.groups.replicas import Degrees

Groups = tuple[tuple[int, ...], ...]
"""Devices of each group, in the order in which the pipeline visits them."""
IN_FLIGHT_FACTORS = (1.0, 1.5, 2.0, 3.0)
"""Microbatches in flight, in those that 1F1B needs."""


@dataclass(frozen=True)
class GroupChoice:
    """What is decided of a group before rows and layers are shared out."""

    devices: tuple[int, ...]
    mode: Mode
    microbatches_per_device: int
    """Microbatches of a replica, about: its rows are cut into so many."""
    may_wait: bool = True
    """Whether reductions are waited for where memory has no room for them beside what follows."""
    degrees: Degrees = ()
    """Into which tensor-parallel replicas its devices are cut."""
    first_share: float = 1.0
    """Layers of the first of its several ministages, in those that it has if all are about even."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, as of `CandidateGroup`."""
        numbers = self.microbatches_per_device, self.may_wait, self.first_share
        return hash((self.devices, self.mode, *numbers))


@dataclass(frozen=True)
class Choice:
    """Groups in the order in which the pipeline visits them, and how often."""

    groups: tuple[GroupChoice, ...]
    num_ministages: int
    """In all; groups are visited in turn."""
    in_flight_factor: float | None = None
    """Microbatches in flight, in those 1F1B needs, interleaved with several ministages a group; None: all
    forward first."""

    @classmethod
    def alike(
        cls,
        groups: Groups,
        mode: Mode,
        microbatches_per_device: int,
        num_ministages: int,
        in_flight_factor: float | None = None,
        *,
        may_wait: bool = True,
        degrees: Sequence[Degrees] | None = None,
    ) -> Choice:
        """The same for all groups, but for their `degrees`."""
        choices = tuple(
            GroupChoice(devices, mode, microbatches_per_device, may_wait, own)
            for devices, own in zip(groups, degrees or [()] * len(groups), strict=True)
        )
        return cls(choices, num_ministages, in_flight_factor)

    @property
    def returns(self) -> bool:
        """Whether groups come back to several ministages each again and again."""
        return self.in_flight_factor is not None and self.num_ministages > len(self.groups)

    def bound(self, in_flight_factor: float | None, num_ministages: int) -> Choice:
        """With so many microbatches in flight and ministages in all; groups that then return to their
        ministages keep them gathered, which is ZeRO 1 in place of 2."""
        bound = replace(self, in_flight_factor=in_flight_factor, num_ministages=num_ministages)
        if bound.returns:
            for g, group in enumerate(bound.groups):
                if not group.mode.may_return:
                    bound = bound.change(g, mode=replace(group.mode, zero=1))
        return bound

    def change(self, group: int, **changes: object) -> Choice:
        """The same but for one group."""
        return self.change_all([group], **changes)

    def change_all(self, changed: Iterable[int], **changes: object) -> Choice:
        """The same but for these groups."""
        groups = list(self.groups)
        for group in changed:
            groups[group] = replace(groups[group], **changes)  # type: ignore[arg-type]
        return replace(self, groups=tuple(groups))


_WANTED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 192, 384, 768, 1536, 3072, 6144)
"""Numbers of microbatches; few rows at once may be all that fits of a batch of thousands."""


def list_microbatch_counts(most_rows: int) -> tuple[int, ...]:
    """Numbers of microbatches worth trying for devices with at most so many rows: rising, those that cut the
    rows into microbatches of other sizes, ever wider apart."""
    sizes = {-(-most_rows // wanted) for wanted in _WANTED}
    return tuple(sorted({-(-most_rows // size) for size in sizes}))


def find_nearest(numbers: Sequence[float], wanted: float) -> int:
    """Position of the number nearest to the one that is wanted."""
    return min(range(len(numbers)), key=lambda i: abs(numbers[i] - wanted))
