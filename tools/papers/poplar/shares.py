"""Ways to deal a step's rows that Poplar's paper compares, ours, and what is one row away from a way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, zip_longest
from time import process_time

from zorselike.cost.catalogue import find_device
from zorselike.errors import PlanError
from zorselike.plan.shares import apportion
from zorselike.planner.rows.microbatch_sums import pick_sizes, sum_microbatches
from zorselike.planner.rows.share_rows import RankCosts, share_once, share_per_microbatch

from ..zorse.plans import cut_evenly
from .algorithms import share_in_equal_rounds, share_in_proportion
from .runs import Job, deal_rounds

ROUND_OFF = 1e-9
"""Gains that are smaller are none."""

Sizes = tuple[tuple[int, ...], ...]
"""Rows of each rank's microbatches."""


@dataclass(frozen=True)
class Run:
    """A simulated step."""

    sizes: Sizes
    iteration_s: float
    tflops: float
    planning_s: float
    """Processor seconds to deal the rows, from curves and memory limits to the simulated answer."""

    @property
    def rows_at_once(self) -> tuple[int, ...]:
        """The largest microbatch of each rank."""
        return tuple(max(own, default=0) for own in self.sizes)


@dataclass(frozen=True)
class Neighbours:
    """What is one row away from a run."""

    number: int
    best_gain: float
    """Throughput of the best of them over the run's, less one."""


def run_even(job: Job) -> Run | None:
    """Equal rows, as DeepSpeed has it; None where a row does not fit on every card."""
    return _run(job, lambda fresh: _share_by_weight(fresh, [1.0] * len(fresh.cards)))


def run_whale(job: Job) -> Run | None:
    """Rows by peak FLOP/s; None where a row does not fit on every card."""
    peaks = [find_device(device).peak_flops[job.workload.dtype] for device in job.devices]
    return _run(job, lambda fresh: _share_by_weight(fresh, peaks))


def run_poplar(job: Job) -> Run | None:
    """Algorithm 2, its printed slips corrected; None where no row fits on any card."""

    def share(fresh: Job) -> Sizes:
        if not fresh.has_rounds:
            return share_in_proportion(fresh.cards, fresh.num_rows)
        return share_in_equal_rounds(fresh.cards, fresh.num_rows, collective_s=fresh.round_s.alone)

    return _run(job, share)


def run_ours(job: Job) -> Run | None:
    """The exact shares; None where no row fits on any card."""

    def share(fresh: Job) -> Sizes:
        if not fresh.has_rounds:
            return share_once(fresh.cards, fresh.num_rows)
        _, exposed_s, hidden_s = fresh.round_s
        return share_per_microbatch(fresh.cards, fresh.num_rows, collective_s=exposed_s, hidden_s=hidden_s)

    return _run(job, share)


def try_neighbours(job: Job, run: Run) -> Neighbours:
    """Simulates all of them: the check that Poplar's authors made of their algorithm's answers."""
    found = {sizes for sizes in list_neighbours(job, run.sizes) if sizes != run.sizes}
    times = [job.simulate(deal_rounds(sizes)).simulation.iteration_s for sizes in found]
    gain = run.iteration_s / min(times) - 1 if times else 0.0
    return Neighbours(len(times), 0.0 if abs(gain) < ROUND_OFF else gain)


# -- shares --------------------------------------------------------------------------------


def _share_by_weight(job: Job, weights: Sequence[float]) -> Sizes:
    """Rows by weight, in as few microbatches as fit, equally many on each card; raises `PlanError` where a
    card has no room."""
    cards = job.cards
    rows = apportion(job.num_rows, weights)
    if not all(card.max_rows for card in cards):
        raise PlanError("not one row fits on some of the cards")
    number = max(-(-own // card.max_rows) for card, own in zip(cards, rows, strict=True))
    return tuple(tuple(cut_evenly(own, number)) for own in rows)


def _run(job: Job, share: Callable[[Job], Sizes]) -> Run | None:
    """A step of what is given out; None where the memory of a card, or of all, is too small."""
    began = process_time()
    fresh = replace(job)  # Nothing is worked out yet.
    try:
        sizes = share(fresh)
    except PlanError:
        return None
    case = fresh.simulate(deal_rounds(sizes))
    if any(case.is_overfull(rank) for rank in range(len(sizes))):
        return None
    return Run(sizes, case.simulation.iteration_s, job.tflops(case), process_time() - began)


# -- neighbours ----------------------------------------------------------------------------


def list_neighbours(job: Job, sizes: Sizes) -> Iterator[Sizes]:
    """Where collectives come once a step, one row of the step moved; else one row of a round moved, and a row
    more or less in one card's microbatches. Some may be listed twice, or be what was given."""
    if not job.has_rounds:
        yield from _move_rows_of_step(job, sizes)
        return
    yield from _move_rows_of_rounds(job, sizes)
    yield from _change_microbatches(job, sizes)


def _pairs(job: Job, sizes: Sizes) -> list[tuple[int, int]]:
    """Two ranks each way, one of every kind: device type and what it computes."""
    first: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, own in enumerate(sizes):
        first.setdefault((job.devices[rank], own), []).append(rank)
    return list(permutations([rank for ranks in first.values() for rank in ranks[:2]], 2))


def _move_rows_of_step(job: Job, sizes: Sizes) -> Iterator[Sizes]:
    """One row of the step from one card to another."""
    cards = job.cards
    rows = [sum(own) for own in sizes]
    tables = {card.seconds: sum_microbatches(card.seconds, max(rows) + 1) for card in cards}
    for source, target in _pairs(job, sizes):
        if not rows[source] or not cards[target].max_rows:
            continue
        moved = list(sizes)
        for rank, number in ((source, rows[source] - 1), (target, rows[target] + 1)):
            seconds = cards[rank].seconds
            moved[rank] = pick_sizes(seconds, tables[seconds], number)
        yield tuple(moved)


def _move_rows_of_rounds(job: Job, sizes: Sizes) -> Iterator[Sizes]:
    """One row of a round from one card to another: in one such round, and in all that are alike."""
    rounds = list(zip_longest(*sizes, fillvalue=0))
    for shape in dict.fromkeys(rounds):
        for source, target in _pairs(job, sizes):
            if not shape[source] or shape[target] >= job.cards[target].max_rows:
                continue
            moved = list(shape)
            moved[source] -= 1
            moved[target] += 1
            once = rounds.index(shape)
            yield _by_rank([tuple(moved) if i == once else own for i, own in enumerate(rounds)])
            yield _by_rank([tuple(moved) if own == shape else own for own in rounds])


def _change_microbatches(job: Job, sizes: Sizes) -> Iterator[Sizes]:
    """A row more or less in the microbatches of one card, or of all of its type, in rounds that are equal
    but for the last."""
    base = [max(own, default=0) for own in sizes]
    by_type = [[rank for rank, own in enumerate(job.devices) if own == device] for device in {*job.devices}]
    for ranks in (*by_type, *([rank] for rank in range(len(base)))):
        for change in (-1, 1):
            own = [each + change * (rank in ranks) for rank, each in enumerate(base)]
            if all(0 <= each <= card.max_rows for each, card in zip(own, job.cards, strict=True)) and any(
                own
            ):
                yield _repeat(job, own)


def _repeat(job: Job, own: Sequence[int]) -> Sizes:
    """Rounds of these rows, and a last one of what is left, as short as can be."""
    number, rest = divmod(job.num_rows, sum(own))
    last: Sizes = ((),) * len(own)
    if rest:
        cards = [RankCosts(card.rank, card.seconds[:most]) for card, most in zip(job.cards, own, strict=True)]
        last = share_in_equal_rounds(cards, rest, collective_s=job.round_s.alone)
    return tuple((most,) * number * (most > 0) + ends for most, ends in zip(own, last, strict=True))


def _by_rank(rounds: Sequence[Sequence[int]]) -> Sizes:
    """Each rank's microbatches, the largest first."""
    return tuple(tuple(sorted((n for n in own if n), reverse=True)) for own in zip(*rounds, strict=True))
