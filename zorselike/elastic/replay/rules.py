"""What a job does when devices come and go: zorselike's rule, and what others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zorselike.elastic.contingency import pays_back
from zorselike.elastic.replay.costs import Costs, Mirroring, find_mirroring
from zorselike.elastic.replay.events import Stretch
from zorselike.elastic.replay.job import Job, Piece
from zorselike.elastic.replay.rates import Devices, Rates, Running
from zorselike.elastic.replay.replicas import choose_replicas


@dataclass(frozen=True)
class Outcome:
    """How a job fared by one rule."""

    name: str
    how: str
    rows: float
    """Trained and kept."""
    lost_rows: float
    """Trained and lost."""
    paused_s: float
    stood_s: float
    num_changes: int
    """Plans after the first."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Replay:
    """A record of availability, and what a job is judged with."""

    stretches: Sequence[Stretch]
    rates: Rates
    costs: Costs

    @property
    def duration_s(self) -> float:
        return self.stretches[-1].stop_s - self.stretches[0].start_s

    @cached_property
    def ideal_rows(self) -> float:
        """What the best plan at every moment would train, without a pause or a loss."""
        found = 0.0
        for stretch in self.stretches:
            best = self.rates.find_best(stretch.devices)
            found += (stretch.stop_s - stretch.start_s) * (best.rows_per_s if best is not None else 0.0)
        return found

    def run_rules(self) -> list[Outcome]:
        """Of every rule, zorselike's first."""
        costs = self.costs
        rules: list[tuple[str, str, Callable[[], Job]]] = [
            (
                "zorselike, elastic",
                f"same processes; mirrors take at most {costs.mirror_share:.0%} of the time",
                lambda: _Elastic(self).run(),
            ),
            (
                "restart",
                f"new processes, checkpoints every {costs.checkpoint_every_s:g} s, the best plan each time",
                self._restart,
            ),
            (
                "whole replicas",
                "equal shares; one that loses a device is out until it is back, and its rows are left out",
                self._keep_replicas,
            ),
            (
                "never re-planned",
                "the first plan, from its checkpoint, whenever all its devices are there",
                self._never_replan,
            ),
        ]
        return [_sum_up(name, how, rule()) for name, how, rule in rules]

    def begin_job(self) -> Job:
        return Job(self.stretches[0].start_s, self.costs.checkpoint_every_s, self.costs.checkpoint_s)

    def _restart(self) -> Job:
        job, costs = self.begin_job(), self.costs
        running: Running | None = None
        for i, stretch in enumerate(self.stretches):
            best = self.rates.find_best(stretch.devices)
            is_lost = running is not None and not {*running.devices} <= {*stretch.devices}
            if is_lost:
                job.return_to_checkpoint()
            if best is None:
                if is_lost:
                    job.stand()
                    running = None
            elif (
                running is None
                or is_lost
                or pays_back(running.step_s, best.step_s, costs.restart_s, costs.payback_s)
            ):
                if not is_lost:
                    job.save()
                _begin(job, best, waits_s=costs.restart_s if i else 0.0)
                running = best
            job.run(stretch.stop_s)
        return job

    def _never_replan(self) -> Job:
        job = self.begin_job()
        plan = self.rates.find_best(self.stretches[0].devices)
        runs = False
        for i, stretch in enumerate(self.stretches):
            is_there = plan is not None and {*plan.devices} <= {*stretch.devices}
            if runs and not is_there:
                job.return_to_checkpoint()
                job.stand()
            elif plan is not None and is_there and not runs:
                _begin(job, plan, waits_s=self.costs.restart_s if i else 0.0)
            runs = is_there
            job.run(stretch.stop_s)
        return job

    def _keep_replicas(self) -> Job:
        job, costs = self.begin_job(), self.costs
        replicas = choose_replicas(self.rates, self.stretches[0].devices)
        alive: tuple[int, ...] = ()
        for i, stretch in enumerate(self.stretches):
            before = alive
            alive = () if replicas is None else replicas.list_alive(stretch.devices)
            if before and not {*before} <= {*alive}:
                if {*before} & {*alive}:
                    job.return_to_mirror()  # The others have the whole model: they lose the step that runs.
                else:
                    job.return_to_checkpoint()
            if replicas is not None and alive and alive != before:
                goes_on = bool({*before} & {*alive})
                waits_s = costs.recovery_s if goes_on else costs.restart_s
                job.begin(
                    replicas.step_s(alive),
                    replicas.rows(alive),
                    replicas.num_devices(alive),
                    waits_s=waits_s if i else 0.0,
                )
            elif not alive:
                job.stand()
            job.run(stretch.stop_s)
        return job


class _Elastic:
    """As `ElasticPipeline` does with a planner: after a loss the plan that was drawn beforehand, or the rule
    that keeps the groups until the planner has found a better one; others are gone over to where they pay."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self._rates, self._costs = replay, replay.rates, replay.costs
        self._job = replay.begin_job()
        self._running: Running | None = None
        self._mirroring: Mirroring | None = None
        self._found: tuple[float, Running] | None = None
        """A plan, and when the planner will have found it."""

    def run(self) -> Job:
        before: Devices = ()
        for i, stretch in enumerate(self._replay.stretches):
            self._meet(before, stretch.devices, is_first=i == 0)
            if self._found is not None and self._found[0] < stretch.stop_s:
                self._job.run(max(self._found[0], self._job.at_s))
                self._consider(self._found[1])
                self._found = None
            self._job.run(stretch.stop_s)
            before = stretch.devices
        return self._job

    def _meet(self, before: Devices, there: Devices, *, is_first: bool) -> None:
        """Who is there changes."""
        best = self._rates.find_best(there)
        running, self._found = self._running, None
        lost = set() if running is None else {*running.devices} - {*there}
        if running is None:
            if best is not None:
                self._begin(best, waits_s=0.0 if is_first else self._costs.restart_s)
            return
        if not lost:
            if best is not None:
                self._found = (self._job.at_s + self._rates.budget_s, best)
            return
        assert self._mirroring is not None
        if self._mirroring.survives(lost):
            self._job.return_to_mirror()
        else:
            self._job.return_to_checkpoint()
        if best is None:
            self._job.stand()
            self._running = None
            return
        drawn = best if self._was_drawn(before, there) else self._rates.keep_groups(running, tuple(lost))
        if drawn is None:  # Nobody goes on before the planner has found something.
            self._begin(best, waits_s=self._costs.recovery_s + self._rates.budget_s)
            return
        self._begin(drawn, waits_s=self._costs.recovery_s)
        if drawn is not best:
            self._found = (self._job.at_s + self._rates.budget_s, best)

    def _was_drawn(self, before: Devices, there: Devices) -> bool:
        """Whether one whole node has gone and nothing else has changed: for that a plan is drawn ahead."""
        places = self._rates.problem.cluster.places
        gone = {*before} - {*there}
        nodes = {places[device].node for device in gone}
        whole = {device for device in before if places[device].node in nodes}
        return len(nodes) == 1 and whole == gone and {*there} <= {*before}

    def _consider(self, best: Running) -> None:
        assert self._running is not None
        switch_s = self._costs.switch_s + self._find_mirroring(best).mirror_s
        if pays_back(self._running.step_s, best.step_s, switch_s, self._costs.payback_s):
            self._begin(best, waits_s=self._costs.switch_s)

    def _begin(self, running: Running, *, waits_s: float) -> None:
        """`waits_s`: beside what filling takes, for which nearly all of the state is moved."""
        is_first = self._running is None and not self._job.pieces
        mirroring = self._find_mirroring(running)
        self._running, self._mirroring = running, mirroring
        self._job.begin(
            running.step_s + mirroring.mirror_s / mirroring.interval,
            running.plan.global_batch,
            len(running.devices),
            waits_s=0.0 if is_first else waits_s + mirroring.mirror_s,
            interval=mirroring.interval,
        )

    def _find_mirroring(self, running: Running) -> Mirroring:
        problem = self._rates.problem
        return find_mirroring(running, problem.workload, problem.cluster, self._costs.mirror_share)


def _begin(job: Job, running: Running, *, waits_s: float) -> None:
    job.begin(running.step_s, running.plan.global_batch, len(running.devices), waits_s=waits_s)


def _sum_up(name: str, how: str, job: Job) -> Outcome:
    return Outcome(
        name=name,
        how=how,
        rows=job.trained + job.steps * job.rows,
        lost_rows=job.lost_rows,
        paused_s=job.paused_s,
        stood_s=job.stood_s,
        num_changes=max(0, job.num_changes - 1),
        pieces=tuple(job.pieces),
    )
