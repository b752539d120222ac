"""What one rank holds whole: gathered parameters and unreduced gradients, as its ZeRO stage allows.

For ZeRO 2: Zorse, section 4.1.
"""

from __future__ import annotations

from collections import defaultdict

from zorselike.plan.plan import Group

MAX_GATHERED = 2
"""Ministages gathered at once with ZeRO 2: the current one and the one being prefetched."""


class Fault(Exception):
    """What is wrong with an action of one rank's list."""


class Residency:
    """Which ministages are gathered and which gradients are whole, while a list is read in order."""

    def __init__(self, group: Group, lowest_backward: int) -> None:
        self._zero = group.zero
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
        if self._zero == 2 and len(self.gathered) == MAX_GATHERED:
            raise Fault(
                f"ministages {sorted(self.gathered)} are gathered, and ZeRO 2 allows {MAX_GATHERED}: "
                "a RESHARD must come first"
            )
        most = 2 if self._zero == 2 and ministage >= self._lowest_backward else 1
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
