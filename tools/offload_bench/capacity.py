"""The largest model that trains: a search over the number of layers that really tries each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Trials:
    """What was tried, and how it went: the reason by number of layers, empty where it trained."""

    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def largest(self) -> int | None:
        """The most layers that trained; None if none did."""
        return max((n for n, reason in self.reasons.items() if not reason), default=None)

    @property
    def limit(self) -> str:
        """Why one more step of the search did not train; empty if the search ended before."""
        failed = [n for n, reason in self.reasons.items() if reason]
        return f"{min(failed)} layers: {self.reasons[min(failed)]}" if failed else ""


def search(
    try_layers: Callable[[int], str | None], *, guess: int, lowest: int, highest: int, resolution: int
) -> Trials:
    """Finds the most layers in `lowest` ... `highest` that train, to `resolution`.

    `try_layers` gives the reason why so many do not, `""` if they do, and None if there is no time
    to try; more layers than ones that do not train are never tried. Starts at `guess` and doubles
    its stride until the answer is between two trials.
    """
    trials = Trials()
    good, bad = lowest - 1, highest + 1
    stride = max(resolution, guess // 8)
    layers = min(max(guess, lowest), highest)
    while bad - good > resolution or trials.largest is None:
        reason = try_layers(layers)
        if reason is None:
            break
        trials.reasons[layers] = reason
        if reason:
            bad = layers
        else:
            good = layers
        if bad <= lowest or good >= highest or bad - good <= 1:
            break
        if bad > highest:
            layers = min(good + stride, highest)
        elif good < lowest:
            layers = max(bad - stride, lowest)
        else:
            layers = (good + bad) // 2
        stride *= 2
    return trials


def guess_layers(
    room_bytes: float, bytes_per_parameter: float, layer_parameters: int, other_parameters: int
) -> int:
    """How many layers some memory holds by arithmetic, at least one."""
    left = room_bytes / bytes_per_parameter - other_parameters
    return max(1, int(left // layer_parameters))
