"""A steady run between the end of one step and the end of the next, for drawings.

A rank that is done early begins the next step early, and copies of a step run on under the next one. What
a simulated step does before its beginning or after its end the steps beside it do inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zorselike.simulator.result import Simulation, Span


def fold_spans(simulation: Simulation) -> Iterator[Span]:
    """The spans with those of the steps before and after, cut to `[0, iteration_s]`."""
    period_s = simulation.iteration_s
    for span in simulation.spans:
        for shift_s in (-period_s, 0.0, period_s):
            start_s = max(0.0, span.start_s + shift_s)
            stop_s = min(period_s, span.stop_s + shift_s)
            if stop_s > start_s:
                is_whole = (start_s, stop_s) == (span.start_s, span.stop_s)
                yield span if is_whole else replace(span, start_s=start_s, stop_s=stop_s)
