"""What one rank holds while its list is read in order: parameters and gradients that are whole, as its ZeRO
stage allows (for ZeRO 2: Zorse, section 4.1), and what is on its device of what its group offloads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from zorselike.plan.plan import Group

MAX_GATHERED = 2
"""Ministages gathered at once with ZeRO 2: the current one and the one being prefetched."""

MAX_ON_DEVICE = 2
"""Ministages whose offloaded shards, or optimizer state, are on the device at once."""


class Fault(Exception):
    """What is wrong with an action of one rank's list."""


class Residency:
    """Which ministages are gathered and which gradients are whole, while a list is read in order."""

    def __init__(self, group: Group, lowest_backward: int, *, returns: bool = False) -> None:
        """`returns`: whether the group comes back to its ministages again and again, so that ZeRO 2 too keeps
        each gathered from first use to last."""
        self._zero = group.zero
        self._returns = returns
        self._gathers = group.zero in (1, 2)
        self._reduces_per_microbatch = group.reduces_per_microbatch
        self._lowest_backward = lowest_backward
        self.gathered: set[int] = set()
        self._num_gathers: defaultdict[int, int] = defaultdict(int)
        self.unreduced: set[tuple[int, int]] = set()
        """(ministage, microbatch) of each backward whose gradients are not reduced yet."""

    def gather(self, ministage: int) -> None:
        if not self._gathers:
            raise Fault(f"ZeRO {self._zero} gathers no ministage by UNSHARD")
        if ministage in self.gathered:
            raise Fault(f"ministage {ministage} is gathered already")
        if self._zero == 2 and not self._returns and len(self.gathered) == MAX_GATHERED:
            raise Fault(
                f"ministages {sorted(self.gathered)} are gathered, and ZeRO 2 allows {MAX_GATHERED}: "
                "a RESHARD must come first"
            )
        most = 2 if self._zero == 2 and not self._returns and ministage >= self._lowest_backward else 1
        if self._num_gathers[ministage] == most:
            often = "twice" if most == 2 else "once"
            raise Fault(f"ZeRO {self._zero} gathers ministage {ministage} {often} a step")
        self._num_gathers[ministage] += 1
        self.gathered.add(ministage)

    def release(self, ministage: int) -> None:
        if ministage not in self.gathered:
            raise Fault(f"ministage {ministage} is not gathered")
        self.gathered.remove(ministage)

    def use(self, ministage: int) -> None:
        """Parameters are read: by a computation, or by the pass that reduces."""
        if self._gathers and ministage not in self.gathered:
            raise Fault(f"ministage {ministage} is not gathered: {ministage}UNSHARD must come first")

    def start_backward(self, ministage: int, following: int | None) -> None:
        """The first backward of a ministage, `following` being the one whose backward comes next."""
        if self._zero != 2:
            return
        if following is not None and following not in self.gathered:
            raise Fault(
                f"{following}UNSHARD must come before the first backward of ministage {ministage}: "
                "the next ministage is gathered while this one computes"
            )
        if self.unreduced:
            raise Fault(
                f"ministage {min(self.unreduced)[0]} must be reduced first: "
                "ZeRO 2 keeps whole gradients of one ministage only"
            )

    def make_gradients(self, ministage: int, microbatch: int) -> None:
        """A backward of a ministage that trains."""
        if self._zero == 3:
            return
        if self._reduces_per_microbatch and self.unreduced:
            last = "{}B{}".format(*min(self.unreduced))
            raise Fault(f"{last} must be reduced first: the plan reduces after every microbatch")
        self.unreduced.add((ministage, microbatch))

    def reduce(self, ministage: int) -> None:
        self.unreduced = {item for item in self.unreduced if item[0] != ministage}


_NAMES = {"params": "parameter shards", "optimizer": "optimizer state"}


class HostResidence:
    """Where shards, optimizer state, gradients and activations are: the rules of
    `zorselike/schedule/lowering/host_copies.py`, stated independently of it."""

    def __init__(self, group: Group, ministages: Sequence[int], *, masters: bool) -> None:
        self._offload = frozenset(group.offload)
        self._masters = masters
        self._away = {"params": set(ministages[1:]), "optimizer": set(ministages)}
        """Ministages whose shards, and state, are on the host at the ends of a step."""
        self._here: dict[str, set[int]] = {"params": set(), "optimizer": set()}
        """Those of them that are on the device now."""
        self._gradients_on_host: set[int] = set()
        self._activations_on_host: set[tuple[int, int]] = set()
        self._loaded_activations: set[tuple[int, int]] = set()
        self._updated: set[int] = set()

    # -- what moves ------------------------------------------------------------------------

    def move_shards(self, ministage: int, *, load: bool) -> None:
        self._move("params", ministage, load=load)

    def move_state(self, ministage: int, *, load: bool) -> None:
        if not load and ministage not in self._updated:
            raise Fault(f"{ministage}STEP must come first")
        self._move("optimizer", ministage, load=load)

    def move_gradients(self, ministage: int, *, load: bool) -> None:
        self._check_offloads("optimizer")
        if load:
            if ministage not in self._gradients_on_host:
                raise Fault(f"the gradients of ministage {ministage} are not on the host")
            self._gradients_on_host.remove(ministage)
            return
        if ministage in self._updated or ministage in self._gradients_on_host:
            raise Fault(f"the gradients of ministage {ministage} are not on the device any more")
        self._gradients_on_host.add(ministage)

    def move_activations(self, ministage: int, microbatch: int, *, load: bool) -> None:
        self._check_offloads("activations")
        item = (ministage, microbatch)
        if load:
            if item not in self._activations_on_host:
                raise Fault(f"the activations of microbatch {microbatch} are not on the host")
            self._activations_on_host.remove(item)
            self._loaded_activations.add(item)
            return
        if item in self._activations_on_host or item in self._loaded_activations:
            raise Fault(f"the activations of microbatch {microbatch} were offloaded already")
        self._activations_on_host.add(item)

    def _move(self, kind: str, ministage: int, *, load: bool) -> None:
        self._check_offloads(kind)
        here, what = self._here[kind], _NAMES[kind]
        if ministage not in self._away[kind]:
            raise Fault(f"the {what} of ministage {ministage} stay on the device: it is the rank's first")
        if load == (ministage in here):
            raise Fault(
                f"the {what} of ministage {ministage} are on the {'device' if load else 'host'} already"
            )
        if load:
            self._add(kind, ministage)
        else:
            here.remove(ministage)

    def _add(self, kind: str, ministage: int) -> None:
        here = self._here[kind]
        if len(here) == MAX_ON_DEVICE:
            raise Fault(
                f"the {_NAMES[kind]} of ministages {sorted(here)} are on the device, which holds those of "
                f"{MAX_ON_DEVICE} at once: an offload must come first"
            )
        here.add(ministage)

    def _check_offloads(self, kind: str) -> None:
        if kind not in self._offload:
            raise Fault(f"the group's offload does not name '{kind}'")

    # -- what is used ----------------------------------------------------------------------

    def _is_away(self, kind: str, ministage: int) -> bool:
        away = kind in self._offload and ministage in self._away[kind]
        return away and ministage not in self._here[kind]

    def read_shards(self, ministage: int) -> None:
        if self._is_away("params", ministage):
            raise Fault(
                f"the parameter shards of ministage {ministage} are on the host: LOAD must come first"
            )

    def check_shards_left(self, ministage: int, *, updates_next: bool) -> None:
        """While a ministage computes on gathered parameters, its shards are on the device only if the
        update that follows changes them in place."""
        if ministage in self._here["params"] and not (updates_next and not self._masters):
            raise Fault(f"{ministage}OFFLOAD must come first: the gathered parameters are there")

    def read_activations(self, ministage: int, microbatch: int) -> None:
        if (ministage, microbatch) in self._activations_on_host:
            raise Fault(f"{ministage}LOAD{microbatch} must come first")

    def update(self, ministage: int) -> None:
        """An optimizer update: reads gradients and state, and writes the shards."""
        if ministage in self._gradients_on_host:
            raise Fault(f"{ministage}LOAD_GRAD must come first")
        if self._is_away("optimizer", ministage):
            raise Fault(f"{ministage}LOAD_STATE must come first")
        if self._masters:
            self.check_shards_left(ministage, updates_next=False)
        if self._is_away("params", ministage):
            if not self._masters:
                raise Fault(
                    f"the update changes the shards of ministage {ministage} in place: LOAD must come first"
                )
            self._add("params", ministage)
        self._updated.add(ministage)

    def finish(self) -> None:
        """Raises `Fault` for what a step leaves on the device that belongs on the host."""
        for kind, word in (("params", "OFFLOAD"), ("optimizer", "OFFLOAD_STATE")):
            if self._here[kind]:
                raise Fault(f"{min(self._here[kind])}{word} is missing")
        if self._activations_on_host:
            raise Fault("{}LOAD{} is missing".format(*min(self._activations_on_host)))
