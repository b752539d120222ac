"""Numbers that are held against targets, and the search for the largest model that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..report import Figure
from .job import Measurement, spell_bytes

Measured = Mapping[tuple[str, int], Measurement]
"""Measurements by variant and tokens a step."""
PAPER_MEMORY, PAPER_THROUGHPUT = 0.6, 0.8
"""Zorse, Fig. 10: with most ministages 40 % less memory for 20 % less throughput, against one."""
_LARGE = 65_536


def find_ratios(measured: Measured, *, has_targets: bool = True) -> list[Figure]:
    """All ratios of which both sides were measured: at the most tokens under their plain names, at fewer with
    the count added. Without `has_targets` (another device) they are only reported."""
    found: list[Figure] = []
    for num_tokens in (sizes := sorted({n for _, n in measured}, reverse=True)):
        suffix = "" if num_tokens == sizes[0] else f"_{num_tokens}"
        own = {variant: m for (variant, n), m in measured.items() if n == num_tokens}
        for name, value, target, at_most, note in _list_ratios(own, is_large=num_tokens >= _LARGE):
            found.append(Figure(name + suffix, value, target if has_targets else None, at_most, note))
    return found


def _list_ratios(
    own: Mapping[str, Measurement], *, is_large: bool
) -> Iterator[tuple[str, float, float | None, bool, str]]:
    """Name, value, target, whether the target is a most, and note."""
    throughputs: tuple[tuple[str, str, float | None], ...] = (
        ("b", "a", 0.99 if is_large else None),
        ("c", "a", 0.97 if is_large else 0.95),
        ("c", "d", 3.0),
        ("a", "e", 0.98),
    )
    for top, bottom, target in throughputs:
        if top in own and bottom in own:
            speeds = own[top].tokens_per_s, own[bottom].tokens_per_s
            note = f"{speeds[0]:,.0f} / {speeds[1]:,.0f} tokens/s"
            yield f"{top}_over_{bottom}", speeds[0] / speeds[1], target, False, note
    resident = own["a"].device_bytes if "a" in own else None
    for variant, target in (("b", None), ("c", 0.45)):
        offloaded = own[variant].device_bytes if variant in own else None
        if resident and offloaded is not None:
            note = f"{spell_bytes(offloaded)} / {spell_bytes(resident)}"
            yield f"peak_memory_{variant}_over_a", offloaded / resident, target, True, note


def is_same_loss(measured: Measured) -> bool | None:
    """Whether offloading changed no loss at all, bit for bit; None if there is nothing to compare."""
    pairs = [(v, n) for v, n in measured if v in ("b", "c") and ("a", n) in measured]
    return all(measured[v, n].loss == measured["a", n].loss for v, n in pairs) if pairs else None


def search_largest(
    try_layers: Callable[[int], str | None], *, guess: int, highest: int, resolution: int
) -> dict[int, str]:
    """Finds the most layers in 1 ... `highest` that train, to `resolution`.

    `try_layers` says why so many do not train, `""` if they do, and None if there is no time to try; more
    layers than ones that do not train are never tried. Starts at `guess` and doubles its stride until the
    answer lies between two trials.

    Returns:
        What was tried, with the reason why it did not train.
    """
    reasons: dict[int, str] = {}
    good, bad = 0, highest + 1
    stride = max(resolution, guess // 8)
    layers = min(max(guess, 1), highest)
    while bad - good > resolution or good == 0:
        reason = try_layers(layers)
        if reason is None:
            break
        reasons[layers] = reason
        good, bad = (good, layers) if reason else (layers, bad)
        if bad <= 1 or good >= highest or bad - good <= 1:
            break
        if bad > highest:
            layers = min(good + stride, highest)
        elif good == 0:
            layers = max(bad - stride, 1)
        else:
            layers = (good + bad) // 2
        stride *= 2
    return reasons
