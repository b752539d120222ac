"""One rank's list: complete, in dependency order, within the memory that its ZeRO stage promises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from zorselike.schedule.actions import HOST_COPIES, NEEDED_BY, Action, Kind
from zorselike.schedule.checker.residency import Fault, HostResidence, Residency
from zorselike.schedule.checker.steps import NONE, Step
from zorselike.schedule.errors import error_at, name_place
from zorselike.schedule.spec import ScheduleSpec


def check_order(
    spec: ScheduleSpec, actions: Mapping[int, Sequence[Action]], rank: int, steps: Sequence[Step]
) -> None:
    """Raises `ScheduleError` at the first fault in a rank's list.

    Proves that the rank computes each of its rows once, forward and backward, out of rows that
    it has or receives; that it reduces, exchanges tied weights and steps after that; and that
    it gathers and frees as its ZeRO stage says.
    """
    order = _RankOrder(spec, rank, steps)
    position = 0
    try:
        for position, step in enumerate(steps):  # noqa: B007
            order.checks[step.kind](step)
        position = len(steps)
        order.finish()
    except Fault as fault:
        place = (rank, position)
        raise error_at(actions, f"{name_place(actions, place)}: {fault}", place) from None


class _RankOrder:
    """The state of a rank while its list is read once, front to back."""

    def __init__(self, spec: ScheduleSpec, rank: int, steps: Sequence[Step]) -> None:
        group = spec.group_of_rank(rank)
        self._spec = spec
        self._ministages = spec.plan.ministages_of_rank(rank)
        self._rows = tuple((m.start, m.stop) for m in spec.plan.microbatches_of_rank(rank))
        self._zero = group.zero
        self._reduces_once = not group.reduces_per_microbatch
        self._most = group.max_microbatches
        self._num_computed = self._most if group.zero == 3 else len(self._rows)
        """Microbatches of each ministage that run, dummies of ZeRO 3 among them."""
        self._norm_due = spec.defer_steps and spec.has_backward
        returns = spec.plan.bounds_in_flight and spec.has_backward and len(self._ministages) > 1
        self._residency = Residency(group, spec.lowest_backward, returns=returns)
        self._host = HostResidence(group, self._ministages, masters=spec.masters)
        self._following_backward = _following_backward(steps)
        self._done: set[tuple[Kind, int, int]] = set()
        """All so far of the kinds that come once for a (ministage, microbatch)."""
        self._num_done: defaultdict[tuple[Kind, int], int] = defaultdict(int)
        self._max_in_flight = group.max_in_flight
        self._num_in_flight = 0
        """Microbatches with rows that are forward and not yet backward, of all ministages."""
        self._is_shared = spec.plan.has_replicas
        self._positions = spec.positions_of(rank) if self._is_shared else (0, 1)
        """Of the sequence, those that this rank has; without replicas nobody tells them apart."""
        self._received: defaultdict[tuple[Kind, int, int], list[tuple[int, ...]]] = defaultdict(list)
        """Rows and positions."""
        self.checks: dict[Kind, Callable[[Step], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.UNSHARD: self._gather,
            Kind.RESHARD: self._release,
            Kind.REDUCE_GRAD: self._reduce,
            Kind.TIE_GRAD: self._tie_grad,
            Kind.NORM: self._norm,
            Kind.STEP: self._step,
            Kind.TIE_VALUE: lambda step: self._tie_new_values(step, self._spec.owners),
            Kind.TIE_FETCH: lambda step: self._tie_new_values(step, self._spec.borrowers),
            **dict.fromkeys(HOST_COPIES, self._copy),
        }

    def _gather(self, step: Step) -> None:
        self._residency.gather(step.ministage)
        self._host.read_shards(step.ministage)

    def _release(self, step: Step) -> None:
        self._residency.release(step.ministage)
        self._num_done[Kind.RESHARD, step.ministage] += 1
        is_first = self._num_done[Kind.RESHARD, step.ministage] == 1
        if not self._rows and not (is_first and self._is_gathered_twice_running(step.ministage)):
            self._host.check_shards_left(step.ministage, updates_next=False)

    def _is_gathered_twice_running(self, ministage: int) -> bool:
        """Whether its forward and its backward, which gather one after the other, follow each other."""
        return self._zero == 2 and ministage == self._ministages[-1] and self._spec.has_backward

    def _copy(self, step: Step) -> None:
        """Between device and host."""
        ministage, microbatch = step.ministage, step.microbatch
        match step.kind:
            case Kind.LOAD | Kind.OFFLOAD if microbatch != NONE:
                if (Kind.F, ministage, microbatch) not in self._done or microbatch >= len(self._rows):
                    raise Fault(f"{ministage}F{microbatch} must come first")
                if (Kind.B, ministage, microbatch) in self._done or ministage < self._spec.lowest_backward:
                    raise Fault(f"no backward of ministage {ministage} needs it any more")
                self._host.move_activations(ministage, microbatch, load=step.kind is Kind.LOAD)
            case Kind.LOAD | Kind.OFFLOAD:
                self._host.move_shards(ministage, load=step.kind is Kind.LOAD)
            case Kind.LOAD_STATE | Kind.OFFLOAD_STATE:
                self._check_trains(ministage)
                self._host.move_state(ministage, load=step.kind is Kind.LOAD_STATE)
            case _:
                self._check_gradients_final(ministage)
                self._host.move_gradients(ministage, load=step.kind is Kind.LOAD_GRAD)

    # -- computation -----------------------------------------------------------------------

    def _forward(self, step: Step) -> None:
        self._compute(step, step.ministage - 1, Kind.RECV_F)
        if step.ministage >= self._spec.lowest_backward and step.microbatch < len(self._rows):
            self._num_in_flight += 1
            if self._max_in_flight is not None and self._num_in_flight > self._max_in_flight:
                raise Fault(
                    f"{self._num_in_flight} microbatches would be in flight, and the plan's max_in_flight is "
                    f"{self._max_in_flight}: a backward must come first"
                )

    def _backward(self, step: Step) -> None:
        ministage, microbatch = step.ministage, step.microbatch
        if ministage < self._spec.lowest_backward:
            raise Fault(f"ministage {ministage} runs no backward: nothing trains in it or below it")
        if (Kind.F, ministage, microbatch) not in self._done:
            raise Fault(f"{ministage}F{microbatch} must come first")
        if self._num_done[Kind.B, ministage] == 0:
            self._residency.start_backward(ministage, self._following_backward.get(ministage))
        self._compute(step, ministage + 1, Kind.RECV_B)
        self._num_in_flight -= step.microbatch < len(self._rows)
        if self._spec.trains[ministage]:
            if (Kind.REDUCE_GRAD, ministage, NONE if self._reduces_once else microbatch) in self._done:
                raise Fault("its gradients were already reduced")
            self._residency.make_gradients(ministage, microbatch)

    def _compute(self, step: Step, source: int, receive: Kind) -> None:
        """What both directions share; rows or their gradients come from ministage `source`."""
        kind, ministage, microbatch = step.kind, step.ministage, step.microbatch
        self._record(step)
        if microbatch >= self._num_computed:
            raise Fault(f"this rank computes {self._num_computed} microbatches of a ministage")
        self._residency.use(ministage)
        self._use_host_copies(step, is_first=self._num_done[kind, ministage] == 1)
        is_dummy = microbatch >= len(self._rows)
        if is_dummy or not 0 <= source < self._spec.plan.num_ministages:
            return
        if self._spec.remote_neighbour(ministage, source - ministage) is not None:
            self._check_received(receive, ministage, microbatch)
        elif (kind, source, microbatch) not in self._done:
            raise Fault(f"{source}{kind.value}{microbatch} must come first")

    def _use_host_copies(self, step: Step, *, is_first: bool) -> None:
        """With ZeRO 0 and 3 a computation gathers by itself; with the others shards have gone by then."""
        kind, ministage = step.kind, step.ministage
        gathers = self._zero == 3 or (self._zero == 0 and kind is Kind.F and is_first)
        if gathers:
            self._host.read_shards(ministage)
        if not gathers and not (kind is Kind.F and self._is_gathered_twice_running(ministage)):
            updates_next = kind is Kind.B or self._num_done[Kind.B, ministage] > 0
            self._host.check_shards_left(ministage, updates_next=updates_next)
        if kind is Kind.B:
            self._host.read_activations(ministage, step.microbatch)

    def _check_received(self, receive: Kind, ministage: int, microbatch: int) -> None:
        start, stop = self._rows[microbatch]
        brought = sorted(self._received.pop((receive, ministage, microbatch), ()))
        missing = _find_missing(brought, (start, stop), self._positions)
        if missing is None:
            return
        wanted, since = f"rows [{start}:{stop})", f"{missing[0]}"
        if self._is_shared:
            wanted += " at positions [{}:{})".format(*self._positions)
            since += f", position {missing[1]},"
        raise Fault(
            f"it needs {wanted}, and no {receive.value} ahead of it brings those from {since} on exactly once"
        )

    # -- transfers -------------------------------------------------------------------------

    def _send(self, step: Step) -> None:
        forward = step.kind is Kind.SEND_F
        compute = Kind.F if forward else Kind.B
        self._check_transfer(step, 1 if forward else -1)
        if (compute, step.ministage, step.microbatch) not in self._done:
            raise Fault(f"{step.ministage}{compute.value}{step.microbatch} must come first")
        if not forward and step.ministage <= self._spec.lowest_backward:
            raise Fault(f"ministage {step.ministage - 1} runs no backward and takes no gradients")

    def _receive(self, step: Step) -> None:
        compute = NEEDED_BY[step.kind]
        self._check_transfer(step, -1 if compute is Kind.F else 1)
        if (compute, step.ministage, step.microbatch) in self._done:
            raise Fault(f"it comes after {step.ministage}{compute.value}{step.microbatch}, which needs it")
        positions = self._positions if step.first == NONE else (step.first, step.last)
        self._received[step.kind, step.ministage, step.microbatch].append((step.start, step.stop, *positions))

    def _check_transfer(self, step: Step, direction: int) -> None:
        """The peer belongs to the neighbouring ministage's group, the rows to the microbatch."""
        plan = self._spec.plan
        neighbour = step.ministage + direction
        group = self._spec.remote_neighbour(step.ministage, direction)
        if group is None:
            raise Fault(f"no other group owns ministage {neighbour}: nothing travels there")
        if plan.group_of_rank[step.peer] != group:
            ranks = list(plan.groups[group].flat_ranks)
            raise Fault(f"rank {step.peer} does not compute ministage {neighbour}, ranks {ranks} do")
        if step.microbatch >= len(self._rows):
            raise Fault(f"this rank has {len(self._rows)} microbatches with rows")
        start, stop = self._rows[step.microbatch]
        if not start <= step.start < step.stop <= stop:
            raise Fault(f"microbatch {step.microbatch} has rows [{start}:{stop})")
        first, last = self._positions
        if step.first != NONE and not first <= step.first < step.last <= last:
            raise Fault(f"this rank has positions [{first}:{last})")

    # -- gradients and updates -------------------------------------------------------------

    def _reduce(self, step: Step) -> None:
        ministage, microbatch = step.ministage, step.microbatch
        self._check_trains(ministage)
        if self._zero == 3:
            raise Fault("with ZeRO 3 every B reduces by itself")
        if self._reduces_once != (microbatch == NONE):
            raise Fault("the plan reduces " + ("once" if self._reduces_once else "after every microbatch"))
        if self._reduces_once and self._num_done[Kind.B, ministage] < self._num_computed:
            raise Fault(f"a backward of ministage {ministage} is still to come")
        if microbatch >= self._most:
            raise Fault(f"the group has {self._most} microbatches at most")
        if 0 <= microbatch < len(self._rows) and (Kind.B, ministage, microbatch) not in self._done:
            raise Fault(f"{ministage}B{microbatch} must come first")
        self._record(step)
        # The reducing pass touches every parameter: were they freed, FSDP would gather unseen.
        self._residency.use(ministage)
        if self._zero == 0 and not self._rows:
            self._host.read_shards(ministage)
        self._residency.reduce(ministage)

    def _check_reduced(self, ministage: int) -> None:
        if self._zero == 3:
            reduced = self._num_done[Kind.B, ministage] == self._num_computed
        else:
            due = 1 if self._reduces_once else self._most
            reduced = self._num_done[Kind.REDUCE_GRAD, ministage] == due
        if not reduced:
            raise Fault(f"ministage {ministage} must be reduced first")

    def _tie_grad(self, step: Step) -> None:
        self._record(step)
        if step.ministage not in self._spec.tied:
            raise Fault(f"ministage {step.ministage} has no tied weight")
        self._check_reduced(step.ministage)

    def _norm(self, step: Step) -> None:
        self._record(step)
        if not self._norm_due:
            raise Fault("no update waits for a norm")
        for ministage in self._ministages:
            if self._spec.trains[ministage]:
                self._check_gradients_final(ministage)

    def _step(self, step: Step) -> None:
        self._record(step)
        self._check_trains(step.ministage)
        self._check_gradients_final(step.ministage)
        if self._norm_due and (Kind.NORM, NONE, NONE) not in self._done:
            raise Fault("updates wait for NORM, which must come first")
        self._host.update(step.ministage)

    def _check_gradients_final(self, ministage: int) -> None:
        self._check_reduced(ministage)
        if ministage in self._spec.tied and (Kind.TIE_GRAD, ministage, NONE) not in self._done:
            raise Fault(f"{ministage}TIE_GRAD must come first")

    def _tie_new_values(self, step: Step, ends: frozenset[int]) -> None:
        self._record(step)
        if step.ministage not in ends:
            raise Fault(f"ministage {step.ministage} is not that end of a tied weight")
        if (Kind.STEP, step.ministage, NONE) not in self._done:
            raise Fault(f"{step.ministage}STEP must come first")

    def _check_trains(self, ministage: int) -> None:
        if not self._spec.trains[ministage]:
            raise Fault(f"nothing trains in ministage {ministage}")

    # -- the end ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Raises `Fault` for what the list has left out."""
        spec = self._spec
        for ministage in self._ministages:
            trains, backward = spec.trains[ministage], ministage >= spec.lowest_backward
            reduces = (NONE,) if self._reduces_once else range(self._most)
            self._expect(Kind.F, ministage, range(self._num_computed))
            self._expect(Kind.B, ministage, range(self._num_computed) if backward else ())
            self._expect(Kind.REDUCE_GRAD, ministage, reduces if trains and self._zero != 3 else ())
            self._expect(Kind.TIE_GRAD, ministage, (NONE,) if ministage in spec.tied else ())
            self._expect(Kind.STEP, ministage, (NONE,) if trains else ())
            self._expect(Kind.TIE_VALUE, ministage, (NONE,) if ministage in spec.owners else ())
            self._expect(Kind.TIE_FETCH, ministage, (NONE,) if ministage in spec.borrowers else ())
        if self._norm_due:
            self._expect(Kind.NORM, NONE, (NONE,))
        if self._residency.gathered:
            raise Fault(f"{min(self._residency.gathered)}RESHARD is missing")
        self._host.finish()

    def _expect(self, kind: Kind, ministage: int, microbatches: Sequence[int]) -> None:
        for microbatch in microbatches:
            if (kind, ministage, microbatch) not in self._done:
                missing = Action(
                    kind,
                    None if ministage == NONE else ministage,
                    None if microbatch == NONE else microbatch,
                )
                raise Fault(f"{missing} is missing")

    def _record(self, step: Step) -> None:
        key = (step.kind, step.ministage, step.microbatch)
        if key in self._done:
            raise Fault("it was already done")
        self._done.add(key)
        self._num_done[step.kind, step.ministage] += 1


def _find_missing(
    brought: Iterable[tuple[int, ...]], rows: tuple[int, int], positions: tuple[int, int]
) -> tuple[int, int] | None:
    """The first row and position that parts `(start, stop, first, last)` in order do not bring exactly once;
    None if there is none. Of one range of rows all positions come before the next range."""
    row, position, end = rows[0], positions[0], rows[0]
    for start, stop, first, last in brought:
        if (start, first) != (row, position) or (position > positions[0] and stop != end):
            return min((row, position), (start, first))
        end = stop
        row, position = (row, last) if last < positions[1] else (stop, positions[0])
    return None if row == rows[1] else (row, position)


def _following_backward(steps: Sequence[Step]) -> dict[int, int]:
    """For each ministage with a backward, the ministage whose first backward comes next."""
    order = dict.fromkeys(step.ministage for step in steps if step.kind is Kind.B)
    return dict(pairwise(order))
