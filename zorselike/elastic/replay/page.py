"""The page of `zorselike replay`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zorselike.elastic.replay.rules import Outcome, Replay
from zorselike.text.layout import align_columns, wrap_prose
from zorselike.text.wording import count

_HEADER = ("", "tokens/s kept", "of ideal", "lost", "paused", "stood", "changes")


@dataclass(frozen=True)
class Report:
    """What was replayed, and how every rule fared."""

    replay: Replay
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()

    def goodput(self, outcome: Outcome) -> float:
        """Tokens per second, of those that were trained and kept."""
        workload = self.replay.rates.problem.workload
        return outcome.rows * workload.sequence_length / self.replay.duration_s

    def share_of_ideal(self, outcome: Outcome) -> float:
        return outcome.rows / self.replay.ideal_rows if self.replay.ideal_rows else 0.0

    def to_table(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            "duration_s": self.replay.duration_s,
            "rules": {
                outcome.name: {
                    "tokens_per_s": self.goodput(outcome),
                    "share_of_ideal": self.share_of_ideal(outcome),
                    "lost_rows": outcome.lost_rows,
                    "paused_s": outcome.paused_s,
                    "stood_s": outcome.stood_s,
                    "changes": outcome.num_changes,
                }
                for outcome in self.outcomes
            },
        }


def format_page(report: Report, width: int) -> str:
    """The table, what it counts, and what it assumes."""
    return "\n".join(wrap_prose(line, width) for line in _list_lines(report))


def _list_lines(report: Report) -> Iterator[str]:
    replay = report.replay
    numbers = [len(stretch.devices) for stretch in replay.stretches]
    changes = count(len(numbers) - 1, "change")
    problem = replay.rates.problem
    yield (
        f"{problem.workload.model}, {problem.global_batch} rows a step, {_hours(replay.duration_s)} with "
        f"{min(numbers)} to {max(numbers)} devices and {changes}"
    )
    yield ""
    rows = [_HEADER]
    for outcome in report.outcomes:
        whole = outcome.rows + outcome.lost_rows
        rows.append(
            (
                outcome.name,
                f"{report.goodput(outcome):,.0f}",
                f"{report.share_of_ideal(outcome):.1%}",
                f"{outcome.lost_rows / whole:.1%}" if whole else "-",
                _hours(outcome.paused_s),
                _hours(outcome.stood_s),
                str(outcome.num_changes),
            )
        )
    yield from (f" {line}" for line in align_columns(rows, left={0}))
    yield ""
    for outcome in report.outcomes:
        yield f"{outcome.name}: {outcome.how}"
    yield "ideal: the best plan at every moment, without a pause or a loss"
    costs = replay.costs
    yield (
        f"assumed: recovery {costs.recovery_s:g} s, switch {costs.switch_s:g} s, both and the bytes that are "
        f"moved; restart {costs.restart_s:g} s; what a plan keeps in host memory as mirrors is not counted "
        "against it"
    )
    yield from report.notes


def _hours(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"
