"""How well curves predict measurements that they have not seen: the layer times of Zorse's authors.

    python tools/check_curves.py --json figures.json

`--data` is the folder with `model_latencies.json`, or one above it. Every list of times of one layer against
rows, forward and backward, is predicted in two ways: every other point from the ones between
(interpolation), and the second half from the first (extrapolation). Values that look typed in by hand
(`tools/published/zorse_times.py`) are left out. Errors are relative (0.01 is 1 %), against what was
measured, repaired nowhere. The exit status is 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from published.json_files import read_object
from published.zorse_times import (
    PREFIX,
    SUSPECT_MS,
    SUSPECT_ROWS,
    SUSPECT_SEQUENCE,
    TIMES_FILE,
)

from zorselike.cost.curves import CurveWarning, fit_curve
from zorselike.errors import ProfileError

DATA = Path(__file__).parents[2] / "shared" / "data"

MIN_POINTS = 4
"""Shorter lists leave nothing to fit to and to predict."""

LIMITS = {
    "interpolation_median_error": 0.01,
    "interpolation_p90_error": 0.05,
    "extrapolation_median_error": 0.02,
}


@dataclass(frozen=True)
class Series:
    """Milliseconds of one layer's forward or backward, by rows."""

    model: str
    gpu: str
    sequence: str
    dtype: str
    direction: str
    points: tuple[tuple[int, float], ...]

    @property
    def name(self) -> str:
        return f"{self.direction} of {self.model} on {self.gpu} ({self.dtype}, {self.sequence} tokens)"


@dataclass(frozen=True)
class Prediction:
    """One point that was held out."""

    series: str
    rows: int
    predicted: float
    measured: float
    method: str

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Summary:
    """What is found over all lists."""

    num_series: int
    num_suspect: int
    """Values left out."""
    num_repaired: int
    """Fits to times that fall while rows rise."""
    num_interpolated: int
    interpolation_median_error: float
    interpolation_p90_error: float
    num_extrapolated: int
    extrapolation_median_error: float
    extrapolation_p90_error: float
    methods: Mapping[str, int]
    """How many of the interpolated points each way of fitting predicted."""


def main() -> int:
    args = _read_arguments()
    try:
        path = find_times(args.data)
        found = read_object(path)
    except ProfileError as error:
        print(error, file=sys.stderr)
        return 2
    summary, worst = check(list(list_series(found)), num_suspect=count_suspect(found))
    print(format_summary(summary, worst))
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    missed = [name for name, limit in LIMITS.items() if getattr(summary, name) > limit]
    if missed:
        print(f"above the limit: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the authors' files")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def find_times(folder: Path) -> Path:
    """The file of times in a folder or in its `zorse`; `ProfileError` if it is in neither."""
    for path in (folder / TIMES_FILE, folder / "zorse" / TIMES_FILE):
        if path.is_file():
            return path
    raise ProfileError(f"{folder}: has no {TIMES_FILE}; give --data the folder with the authors' files")


# -- their file ----------------------------------------------------------------------------


def list_series(found: Mapping[str, Any]) -> Iterator[Series]:
    """Every list of measured times, suspect values left out; fits and bare numbers are no measurements."""
    for model, gpu, sequence, dtype, entry in _list_entries(found):
        for direction, times in zip(("forward", "backward"), entry[2:], strict=True):
            points = tuple(
                (rows, float(ms))
                for rows, ms in enumerate(times, start=1)
                if ms > 0 and not is_suspect(model, gpu, sequence, direction, rows, ms)
            )
            yield Series(model, gpu, sequence, dtype, direction, points)


def count_suspect(found: Mapping[str, Any]) -> int:
    """How many values look typed in."""
    return sum(
        is_suspect(model, gpu, sequence, direction, rows, ms)
        for model, gpu, sequence, _, entry in _list_entries(found)
        for direction, times in zip(("forward", "backward"), entry[2:], strict=True)
        for rows, ms in enumerate(times, start=1)
    )


def _list_entries(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, Sequence[Any]]]:
    for model, by_gpu in found.items():
        for gpu, by_sequence in by_gpu.items():
            for sequence, by_dtype in by_sequence.items():
                for dtype, entry in by_dtype.items():
                    if (
                        isinstance(entry, list)
                        and len(entry) == 4
                        and all(isinstance(x, list) for x in entry)
                    ):
                        yield model, gpu, sequence, dtype, entry


def is_suspect(model: str, gpu: str, sequence: str, direction: str, rows: int, milliseconds: float) -> bool:
    """Whether a value is one of those that look typed in."""
    known = SUSPECT_MS.get((model.removeprefix(PREFIX), gpu))
    if known is None or sequence != str(SUSPECT_SEQUENCE) or rows != SUSPECT_ROWS:
        return False
    return milliseconds == known[0 if direction == "forward" else 1]


# -- predicting ----------------------------------------------------------------------------


def check(series: Sequence[Series], *, num_suspect: int) -> tuple[Summary, list[Prediction]]:
    """The figures, and the interpolated points that were missed by most."""
    usable = [one for one in series if len(one.points) >= MIN_POINTS]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CurveWarning)
        between = [found for one in usable for found in predict_between(one)]
        beyond = [found for one in usable for found in predict_beyond(one)]
    near, far = ([found.error for found in group] for group in (between, beyond))
    summary = Summary(
        num_series=len(usable),
        num_suspect=num_suspect,
        num_repaired=sum(issubclass(warning.category, CurveWarning) for warning in caught),
        num_interpolated=len(near),
        interpolation_median_error=statistics.median(near),
        interpolation_p90_error=find_p90(near),
        num_extrapolated=len(far),
        extrapolation_median_error=statistics.median(far),
        extrapolation_p90_error=find_p90(far),
        methods=dict(Counter(found.method for found in between).most_common()),
    )
    return summary, sorted(between, key=lambda found: -found.error)


def predict_between(series: Series) -> list[Prediction]:
    """Every other point, from the ones before and after it."""
    known, held_out = series.points[::2], series.points[1::2]
    return _predict(series, known, [point for point in held_out if point[0] < known[-1][0]])


def predict_beyond(series: Series) -> list[Prediction]:
    """The second half from the first."""
    middle = (len(series.points) + 1) // 2
    return _predict(series, series.points[:middle], series.points[middle:])


def _predict(
    series: Series, known: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]
) -> list[Prediction]:
    curve = fit_curve([rows for rows, _ in known], [ms / 1e3 for _, ms in known], name=series.name)
    return [
        Prediction(series.name, rows, 1e3 * curve(rows), milliseconds, curve.method)
        for rows, milliseconds in held_out
    ]


def find_p90(errors: Sequence[float]) -> float:
    """The error that nine of ten are below."""
    return statistics.quantiles(errors, n=10, method="inclusive")[-1]


def format_summary(summary: Summary, worst: Sequence[Prediction]) -> str:
    lines = [
        f"{summary.num_series} lists of times; {summary.num_suspect} values that look typed in left out; "
        f"{summary.num_repaired} fits to times that fall while rows rise, repaired",
        f"every other point: median error {summary.interpolation_median_error:.2%}, 90th percentile "
        f"{summary.interpolation_p90_error:.2%} ({summary.num_interpolated} points)",
        f"second half from the first: median error {summary.extrapolation_median_error:.2%}, 90th percentile "
        f"{summary.extrapolation_p90_error:.2%} ({summary.num_extrapolated} points)",
        "points predicted by " + ", ".join(f"{method} {count}" for method, count in summary.methods.items()),
        "missed by most (ms):",
        *(
            f"  {found.error:6.1%}  {found.rows:3d} rows: {found.predicted:.2f}, measured "
            f"{found.measured:.2f}: {found.series}"
            for found in worst[:5]
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
