"""What one transfer of a size reaches on a link: points over the logarithm of the size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from zorselike.errors import ClusterError

_MEGABYTE = 1e6
_GIGABYTE = 1e9


def interpolate_rate(
    points: Sequence[tuple[float, float]], num_bytes: float, *, max_bytes_per_s: float
) -> float:
    """Bytes per second that one transfer of this size reaches on a link.

    Linear in the logarithm of the size between points `(bytes, bytes_per_s)`, constant outside them.
    """
    if not points:
        return max_bytes_per_s
    after = bisect_right(points, num_bytes, key=lambda point: point[0])
    if after == 0:
        rate = points[0][1]
    elif after == len(points):
        rate = points[-1][1]
    else:
        (size, low), (next_size, high) = points[after - 1], points[after]
        share = math.log(num_bytes / size) / math.log(next_size / size)
        rate = low + share * (high - low)
    return min(rate, max_bytes_per_s)


def tabulate_fit(
    coefficients: Sequence[float], *, max_bytes_per_s: float, smallest_bytes: float, largest_bytes: float
) -> tuple[tuple[float, float], ...]:
    """Points `(bytes, bytes_per_s)` of a fit `GB/s = a log2(MB)^2 + b log2(MB) + c`, for a `Link`.

    Such fits stand in Sailor's tables of providers; MB and GB are powers of ten. They are points at
    every doubling from the smallest to the largest size that the fit was made for, and at both ends, in
    whole bytes per second; what the fit gives above the maximum is cut to it.

    Raises:
        ClusterError: The range is empty, or the fit is not positive somewhere in it.
    """
    a, b, c = coefficients
    if not 0 < smallest_bytes < largest_bytes:
        raise ClusterError(
            f"a fit from {smallest_bytes:g} to {largest_bytes:g} bytes has no range; give the smallest "
            "size that was fitted and then the largest"
        )
    num_steps = max(1, math.ceil(math.log2(largest_bytes / smallest_bytes)))
    sizes = [*(smallest_bytes * 2.0**step for step in range(num_steps)), largest_bytes]
    points = []
    for size in sizes:
        x = math.log2(size / _MEGABYTE)
        rate = min((a * x * x + b * x + c) * _GIGABYTE, max_bytes_per_s)
        if not rate >= 1:  # Or no number.
            raise ClusterError(
                f"the fit {a:g} x^2 + {b:g} x + {c:g} gives {rate:g} bytes/s for {size:g} bytes; "
                "narrow its range to the sizes that were fitted"
            )
        points.append((float(size), float(round(rate))))
    return tuple(points)
