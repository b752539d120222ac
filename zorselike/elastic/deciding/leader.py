"""The leader's part: keeps who sits where in the job's plan, and decides for everybody at each meeting."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from zorselike.elastic.contingency import Contingencies, pays_back
from zorselike.elastic.contract import Generation, Json, Member, Request
from zorselike.elastic.deciding.decisions import (
    Placement,
    Situation,
    Source,
    describe_change,
    find_givers,
    find_source,
    is_out_of_memory,
    keep_groups,
    refuse_lost_state,
    relieve,
    relieve_running,
    seat,
    without_zero_3,
)
from zorselike.errors import ClusterError, PlanError
from zorselike.plan.plan import Plan

logger = logging.getLogger("zorselike")

_NUM_TRIES = 3
"""Plans that members may refuse in one meeting."""
_NUM_TRIES_TO_FIT = 2
"""So often who has come may run out of memory before it has done a step."""


class Leader:
    """What any member must know to lead: the plan that the job wants, and who has which of its ranks."""

    def __init__(
        self, plan: Plan, contingencies: Contingencies | None = None, *, payback_s: float = 600.0
    ) -> None:
        """`contingencies`: of a planner that takes its time; None: the rule that keeps the groups decides.
        `payback_s`: within which a better plan must have paid for going over to it."""
        self.contingencies, self._payback_s = contingencies, payback_s
        self.step_s: float | None = None
        self._compare: Callable[[], None] = lambda: None
        """Of the plan that runs, as measured."""
        self.switch_s = 2.0
        """What going over to another plan takes: a guess, until it has happened."""
        self.base = plan
        """The plan when everybody is there."""
        self.seats: tuple[str | None, ...] = ()
        """Ids by rank of it, once the job runs."""
        self.plan: Plan | None = None
        """What runs."""
        self.ranks: tuple[str, ...] = ()
        self.members: tuple[Member, ...] = ()
        self.slower: dict[str, float] = {}
        """By id: how many times longer members compute than they did at first."""
        self._drifted: set[str] = set()
        """Ids of who has become slower in this generation."""
        self.exhausted: dict[str, int] = {}
        """By id: how often a member's memory did not suffice."""
        self._ask: Callable[[], object] | None = None
        """Asks for a decision; of who leads a generation that runs."""
        self._namesakes: set[str] = set()
        """Names that several machines seem to have; said so."""
        self.number = 0
        self.job = ""
        """What tells this job from all others, once it runs."""
        self.wanted: Plan | None = None
        """What a person, or a search, has found to be better."""

    def note(self, generation: Generation) -> None:
        """A generation has been delivered: whoever leads next goes on from what it says."""
        decision = generation.decision
        self.job = decision["job"]
        self.base = Plan.parse(decision["base"])
        self.plan = Plan.parse(decision["plan"])
        self.seats = tuple(decision["seats"])
        self.slower, self._drifted = dict(decision["slower"]), set()
        self.exhausted, self._ask = dict(decision["exhausted"]), None
        self.ranks, self.number = generation.ranks, generation.number
        self.members = generation.members
        if self.wanted == self.base:
            self.wanted = None

    def note_slower(self, id: str, factor: float) -> bool:
        """A member computes so many times longer than when this generation began; whether that is news."""
        if id in self._drifted:
            return False
        self._drifted.add(id)
        self.slower = {**self.slower, id: self.slower.get(id, 1.0) * factor}
        return True

    def decide(self, request: Request) -> tuple[tuple[str, ...], Json] | None:
        """See `Worker.decide`.

        Raises:
            ClusterError: Nobody can go on.
        """
        self._say_namesakes(request.members)
        is_planned = not (request.lost or request.failed) and request.reason in (
            "notice",
            "arrival",
            "change",
        )
        if is_planned and not request.leaving and len(request.refused) >= _NUM_TRIES:
            self.wanted = None
            logger.warning("elastic: all go on as before, as a change was refused: %s", request.refused[-1])
            return None
        short = [id for id, error in request.failed.items() if is_out_of_memory(error)]
        counts = {**self.exhausted, **{id: self.exhausted.get(id, 0) + 1 for id in short}}
        newcomers = _find_newcomers(request)
        waiting = {id for id in newcomers if counts.get(id, 0) >= _NUM_TRIES_TO_FIT}
        if said := [member for member in request.members if member.id in waiting and member.id in short]:
            self._say_waiting(said, "its memory did not suffice for its first step")
        members, refused = self._list_members(request)
        situation = self._describe([member for member in members if member.id not in waiting], refused)
        situation = replace(situation, exhausted=counts)
        short = [id for id in short if id not in newcomers]
        try:
            situation = self._relieve(situation, short)
            placement = self._place(situation, short)
        except PlanError as error:
            raise ClusterError(f"no plan for who is left: {error}") from None
        if is_planned and not request.leaving and not self._is_worth_it(situation, placement):
            self._keep_waiting(request.arrived, situation)
            return None
        source = None if is_planned else find_source(request.offers)
        checkpoint = next((o["checkpoint"] for o in request.offers.values() if o.get("checkpoint")), None)
        if source is None and not is_planned:
            refuse_lost_state(request.offers, checkpoint)
        seats = self._list_seats(situation, placement)
        decision: Json = {
            "job": self.job or uuid.uuid4().hex,
            "plan": placement.plan.format(),
            "base": situation.plan.format(),
            "seats": seats,
            "generation": self.number,
            "slower": self.slower,
            "exhausted": dict(situation.exhausted),
            "source": source,
            "givers": list(self.ranks) if is_planned else find_givers(request.offers, source),
            "sums": _find_sums(request, source),
            "checkpoint": checkpoint if source is None and not is_planned else None,
            "is_orphaned": request.has_run and not any(o.get("has_begun") for o in request.offers.values()),
            "summary": describe_change(
                self.plan,
                placement,
                source,
                num_spares=len(situation.members) - len(placement.ids),
            ),
        }
        return placement.ids, decision

    def _list_members(self, request: Request) -> tuple[list[Member], Sequence[str]]:
        """All who stay, in the order of joining, and what was refused; but for who has come and has refused
        plans too often that those who run did not: they wait, and what they refused counts no more."""
        stay = [member for member in request.members if member not in request.leaving]
        refused, refusing = request.refused, request.refusing
        while len(refusing) >= _NUM_TRIES and self.ranks:
            waiting = {id for ids in refusing[:_NUM_TRIES] if not {*ids} & {*self.ranks} for id in ids}
            if not waiting:
                break
            logger.warning("elastic: who has come waits as a spare: %s", refused[_NUM_TRIES - 1])
            stay = [member for member in stay if member.id not in waiting]
            refused, refusing = refused[_NUM_TRIES:], refusing[_NUM_TRIES:]
        return sorted(stay, key=lambda member: member.number), refused

    def _describe(self, members: Sequence[Member], refused: Sequence[str]) -> Situation:
        base = self.wanted or self.base
        by_id = {member.id: member for member in members}
        if not self.seats:
            players = seat(base, members)
        elif self.wanted is not None:
            there = [by_id[id] for id in self.ranks if id in by_id]
            others = [member for member in members if member not in there]
            players = seat(base, [*there, *others])
        else:
            players = tuple(by_id.get(id or "") for id in self.seats)
        seated = {player.id for player in players if player is not None}
        spares = tuple(member for member in members if member.id not in seated)
        return Situation(base, players, spares, tuple(refused), dict(self.slower), dict(self.exhausted))

    def _relieve(self, situation: Situation, short: Sequence[str]) -> Situation:
        """The situation once the memory of some did not suffice. Raises `PlanError` if less is impossible."""
        try:
            return relieve(situation, short)
        except PlanError:
            if self.contingencies is None:  # Else another plan runs, and may leave room.
                raise
        return situation

    def _place(self, situation: Situation, short: Sequence[str] = ()) -> Placement:
        """What the planner says; after a refusal with settings that fewer models refuse. The plan that ran
        out of memory is not tried again: a planner that takes its time has yet to hear of it."""
        refused = situation.refused
        if len(refused) >= _NUM_TRIES:
            raise ClusterError(f"members refuse every plan for who is left: {refused[-1]}")
        place = keep_groups if self.contingencies is None or self.wanted else self.contingencies.place
        are_all_there = {*self.ranks} <= {member.id for member in situation.members}
        if short and self.plan and self.contingencies is not None and are_all_there and not refused:
            placement = relieve_running(self.plan, self.ranks, short)
        else:
            placement = place(situation)
        if refused:
            placement = Placement(without_zero_3(placement.plan), placement.ids)
        if len(refused) > 1:
            groups = tuple(replace(group, recompute="layer") for group in placement.plan.groups)
            placement = Placement(replace(placement.plan, groups=groups), placement.ids)
        return placement

    def _list_seats(self, situation: Situation, placement: Placement) -> list[str | None]:
        """Where that plan is the job's own, its ranks; else who sat somewhere, and who came."""
        if placement.plan.num_ranks == situation.plan.num_ranks:
            return list(placement.ids)
        seats = [None if player is None else player.id for player in situation.players]
        playing = [id if id in placement.ids else None for id in seats]
        newcomers = [id for id in placement.ids if id not in playing]
        return [id or (newcomers.pop(0) if newcomers else None) for id in playing]

    def _is_worth_it(self, situation: Situation, placement: Placement) -> bool:
        """Whether all should go over to a plan, though who runs now could go on."""
        if self.plan is None or placement == Placement(self.plan, self.ranks):
            return False
        if self.contingencies is None or self.wanted is not None:
            return True
        return self.contingencies.find(situation) is not None and self._pays_back(placement)

    def _pays_back(self, placement: Placement) -> bool:
        assert self.plan is not None
        old_s = self.step_s or self.plan.estimates.iteration_s
        new_s = placement.plan.estimates.iteration_s
        return bool(old_s and new_s) and pays_back(old_s or 0.0, new_s or 0.0, self.switch_s, self._payback_s)

    def foresee(self) -> Iterator[Plan]:
        """What the loss of each member, and of each node, would bring, as far as this process knows; in any
        member, while a generation runs."""
        nodes = [member.node for member in self.members]
        losses = [{member.id} for member in self.members]
        losses += [
            {member.id for member in self.members if member.node == node}
            for node in dict.fromkeys(nodes)
            if 1 < nodes.count(node) < len(nodes)
        ]
        for lost in losses:
            left = [member for member in self.members if member.id not in lost]
            with suppress(PlanError):
                yield self._place(self._describe(left, ())).plan

    def look_ahead(self, ask: Callable[[], object]) -> None:
        """In the leader, once a generation runs: has plans looked for, for who is there and for who may be
        left; `ask`: asks for a decision, where a better plan pays back."""
        self._ask = ask
        self._consider(self._describe(sorted(self.members, key=lambda member: member.number), ()))

    def _consider(self, situation: Situation, arrived: Sequence[Member] = ()) -> None:
        """Has plans looked for, for who is there and for who may be left, if a planner takes its time; says
        for who has arrived why they wait on, if they do."""
        contingencies, ask = self.contingencies, self._ask
        if contingencies is None or ask is None:
            return

        def compare() -> None:
            found = contingencies.find(situation)
            if ask is not self._ask:
                return  # Of a generation that is over.
            if found is not None and self._is_worth_it(situation, found):
                ask()
            elif self.step_s is not None:
                self._say_spares(arrived, situation)

        self._compare = compare
        contingencies.prepare(situation, compare)

    def _keep_waiting(self, arrived: Sequence[Member], situation: Situation) -> None:
        """Says why those who came wait as spares, and has a plan with them looked for."""
        self._say_spares(arrived, situation)
        if self.contingencies is not None and not self.contingencies.knows(situation):
            self._consider(situation, arrived)

    def _say_spares(self, arrived: Sequence[Member], situation: Situation) -> None:
        if self.contingencies is None:
            why = "the plan's ranks are all there"
        elif not self.contingencies.knows(situation):
            why = "a plan with it is being looked for"
        elif (found := self.contingencies.find(situation)) is None:
            why = "no plan with it was found"
        else:
            seconds = found.plan.estimates.iteration_s
            why = "the best plan with it" + (f" ({seconds:.3g} s a step)" if seconds else "")
            why += f" does not pay back within {self._payback_s:g} s"
        self._say_waiting(arrived, why)

    def _say_namesakes(self, members: Sequence[Member]) -> None:
        """Says once where machines seem to have one name; all these members live, so that none is another's
        replacement."""
        first: dict[tuple[str, int], Member] = {}
        for member in members:
            other = first.setdefault((member.node, member.local_rank), member)
            if other.host != member.host and member.node not in self._namesakes:
                self._namesakes.add(member.node)
                logger.warning(
                    "elastic: members at %s and %s are both local rank %d of node %s and count as one "
                    "machine: if they are two, give each a ZORSELIKE_NODE of its own, so that copies of "
                    "state are on both",
                    f"{other.host}:{other.port}",
                    f"{member.host}:{member.port}",
                    member.local_rank,
                    member.node,
                )

    def _say_waiting(self, members: Sequence[Member], why: str) -> None:
        for member in members:
            where = f"{member.node} local rank {member.local_rank}"
            logger.warning("elastic: %s waits as a spare: %s", where, why)  # Who leads need not be rank 0.

    def note_step_time(self, step_s: float | None) -> None:
        """What a step of this generation takes; a plan that was found before anybody knew is compared now."""
        is_news = self.step_s is None and step_s is not None
        self.step_s = step_s
        if is_news:
            self._compare()


def _find_newcomers(request: Request) -> set[str]:
    """Ids of who has done no step yet, where somebody who stays has. If the memory of these does not suffice
    the others need not hold less, for whom it did."""
    new = {id for id, offer in request.offers.items() if not offer.get("has_begun")}
    return new if any(m.id not in new for m in request.members if m not in request.leaving) else set()


def _find_sums(request: Request, source: Source | None) -> list[float] | None:
    """Loss, targets and gradient norm of the step from which all go on."""
    said = [offer["sums"] for offer in request.offers.values() if offer.get("sums")]
    return next((sums for step, sums in said if source is not None and step == source.step), None)
