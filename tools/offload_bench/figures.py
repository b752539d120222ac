"""The numbers that are held against targets, from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .job import Measurement, spell_bytes

Measured = Mapping[tuple[str, int], Measurement]
"""By variant and tokens a step."""

PAPER_MEMORY, PAPER_THROUGHPUT = 0.6, 0.8
"""Zorse, Fig. 10: with most ministages 40 % less memory for 20 % less throughput, against one."""
_LARGE = 65_536


@dataclass(frozen=True)
class Ratio:
    """One number with its target, None where it is only reported."""

    name: str
    value: float
    target: float | None
    at_most: bool
    note: str


def find_ratios(measured: Measured, *, has_targets: bool = True) -> list[Ratio]:
    """All ratios for which both sides were measured, at the most tokens under their plain names, at
    fewer with the count added. Without `has_targets` (another device) they are only reported."""
    sizes = sorted({num_tokens for _, num_tokens in measured}, reverse=True)
    found = []
    for num_tokens in sizes:
        suffix = "" if num_tokens == sizes[0] else f"_{num_tokens}"
        for top, bottom, target in _throughput_targets(num_tokens):
            pair = measured.get((top, num_tokens)), measured.get((bottom, num_tokens))
            if pair[0] is not None and pair[1] is not None:
                value = pair[0].tokens_per_s / pair[1].tokens_per_s
                note = f"{pair[0].tokens_per_s:,.0f} / {pair[1].tokens_per_s:,.0f} tokens/s"
                wanted = target if has_targets else None
                found.append(Ratio(f"{top}_over_{bottom}{suffix}", value, wanted, False, note))
        found += _memory_ratios(measured, num_tokens, suffix, has_targets)
    return found


def _throughput_targets(num_tokens: int) -> list[tuple[str, str, float | None]]:
    is_large = num_tokens >= _LARGE
    return [
        ("b", "a", 0.99 if is_large else None),
        ("c", "a", 0.97 if is_large else 0.95),
        ("c", "d", 3.0),
        ("c", "d_kept", None),
        ("a", "e", 0.98),
    ]


def _memory_ratios(measured: Measured, num_tokens: int, suffix: str, has_targets: bool) -> list[Ratio]:
    found = []
    resident = measured.get(("a", num_tokens))
    for variant, target in (("b", None), ("c", 0.45)):
        offloaded = measured.get((variant, num_tokens))
        if resident is None or offloaded is None or not resident.device_bytes:
            continue
        if offloaded.device_bytes is None:
            continue
        value = offloaded.device_bytes / resident.device_bytes
        note = f"{spell_bytes(offloaded.device_bytes)} / {spell_bytes(resident.device_bytes)}"
        wanted = target if has_targets else None
        found.append(Ratio(f"peak_memory_{variant}_over_a{suffix}", value, wanted, True, note))
    return found


def is_same_loss(measured: Measured) -> bool | None:
    """Whether offloading changed no loss at all, bit for bit; None if there is nothing to compare."""
    compared = [
        (measured[variant, n].loss, measured["a", n].loss)
        for variant, n in measured
        if variant in ("b", "c") and ("a", n) in measured
    ]
    return all(offloaded == resident for offloaded, resident in compared) if compared else None


@dataclass(frozen=True)
class SweepRow:
    """One number of ministages against one ministage."""

    num_ministages: int
    measurement: Measurement
    throughput: float
    memory: float | None


def compare_ministages(measurements: Sequence[Measurement]) -> list[SweepRow]:
    """Throughput and device memory normalised to the fewest ministages, as in the paper's Fig. 10."""
    ordered = sorted(measurements, key=lambda m: m.num_ministages)
    return [
        SweepRow(
            m.num_ministages,
            m,
            m.tokens_per_s / ordered[0].tokens_per_s,
            m.device_bytes / ordered[0].device_bytes if m.device_bytes and ordered[0].device_bytes else None,
        )
        for m in ordered
    ]


def exposed_shares(
    flops_per_s: float, bytes_per_s: float, num_ministages: int, num_tokens: int
) -> tuple[float, float]:
    """What the ends of a step may cost, as shares of it: if only the first load of a ministage's
    weights is exposed (2 bytes a parameter), and if its optimizer state is too, both ways (26 bytes).
    A parameter takes 8 FLOPs a token, recomputation included."""
    scale = flops_per_s / (bytes_per_s * num_ministages * num_tokens)
    return 0.25 * scale, 3.25 * scale
