"""Sizes, bandwidths and times with their units, as people write them: `256GiB`, `25Gb/s`, `10us`.

A number without a unit is refused everywhere, since bits and bytes, and GB and GiB, get mixed up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from zorselike.errors import FileError
from zorselike.text.wording import show_value

GIB = 2**30
"""Bytes."""
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": GIB, "Ti": 2**40}

_SIZES: Mapping[str, float] = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_TIMES: Mapping[str, float] = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BYTE_RATES: Mapping[str, float] = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
_BIT_RATES: Mapping[str, float] = {
    f"{prefix}{bits}": factor / 8 for prefix, factor in _DECIMAL.items() for bits in ("b/s", "bit/s", "bps")
}
_RATES = {**_BYTE_RATES, **_BIT_RATES}

_SHORT = 7
"""Characters of a number that is easy to read."""

_ANY_CASE_SIZES = {unit.upper(): factor for unit, factor in _SIZES.items()}


def parse_size(text: str) -> float | None:
    """Bytes of `24GiB` or `80 gb`; None if the text is no size. Case makes no difference, but `80Gb` is
    none: it would be bits."""
    unit = text.strip().lstrip("-0123456789. ")
    says_bits = unit.endswith("b") and unit != unit.lower()
    return None if says_bits else _parse(text.upper(), _ANY_CASE_SIZES)


def read_size(value: object, where: str) -> float:
    """Bytes; `FileError` for what is no size."""
    parsed = parse_size(value) if isinstance(value, str) else None
    if parsed is None:
        raise FileError(f'{where} is {show_value(value)}; write a size with its unit, such as "256GiB"')
    return parsed


def read_memory(value: object, where: str) -> int:
    """Whole bytes; `FileError` for what is no size."""
    return int(read_size(value, where))


def read_rate(value: object, where: str) -> float:
    """Bytes per second; `FileError` for what is no bandwidth. `Gb/s` are bits, `GB/s` are bytes."""
    parsed = _parse(value, _RATES) if isinstance(value, str) else None
    if parsed is None:
        raise FileError(
            f"{where} is {show_value(value)}; write a bandwidth with its unit: "
            '"25Gb/s" for bits or "3GB/s" for bytes'
        )
    return parsed


def parse_time(text: str) -> float | None:
    """Seconds of `10us`; None if the text is no time."""
    return _parse(text, _TIMES)


def read_time(value: object, where: str) -> float:
    """Seconds; `FileError` for what is no time."""
    parsed = parse_time(value) if isinstance(value, str) else None
    if parsed is None:
        raise FileError(f'{where} is {show_value(value)}; write a time with its unit, such as "10us"')
    return parsed


def show_size(num_bytes: float) -> str:
    """`256GiB`; what `parse_size` reads back equal."""
    decimal = _show(num_bytes, {unit: factor for unit, factor in _SIZES.items() if "i" not in unit})
    binary = _show(num_bytes, {unit: factor for unit, factor in _SIZES.items() if "i" in unit or unit == "B"})
    return min(binary, decimal, key=len)


def show_rate(bytes_per_s: float) -> str:
    """`3.125GB/s`; what `read_rate` reads back equal."""
    return _show(bytes_per_s, {unit: f for unit, f in _BYTE_RATES.items() if "i" not in unit})


def show_time(seconds: float) -> str:
    """`10us`; what `read_time` reads back equal."""
    return _show(seconds, {unit: factor for unit, factor in _TIMES.items() if unit != "µs"})


def _parse(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]+)\s*", text)
    factor = units.get(match[2]) if match else None
    if match is None or factor is None:
        return None
    value = _times(match[1], factor)
    return value if math.isfinite(value) else None


def _times(number: str, factor: float) -> float:
    # Products of decimals such as 10 * 1e-6 are one rounding off what 1e-5 says.
    return float(number) * factor if factor >= 1 else float(number) / round(1 / factor)


def _show(value: float, units: Mapping[str, float]) -> str:
    """A text that is read back equal: in the largest unit of which it is some short number, else the
    shortest."""
    texts = []
    if not value:
        units = {unit: factor for unit, factor in units.items() if factor == 1}
    for unit, factor in sorted(units.items(), key=lambda item: -item[1]):
        number = _number(value / factor if factor >= 1 else value * round(1 / factor))
        if _times(number, factor) != value:
            continue
        texts.append(number + unit)
        if len(number) <= _SHORT and not number.startswith(("0.", "-0.")) and "e" not in number:
            return texts[-1]
    return min(texts, key=len)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
