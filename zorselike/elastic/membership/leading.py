"""What the leader does: calls meetings, counts who takes part, has the next generation decided and begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zorselike.elastic.contract import Json, Member, Reason, Request
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.roster import Roster, have_all_ended, may_go_on

if TYPE_CHECKING:
    from zorselike.elastic.membership.machine import Membership


class Leading:
    """The leader's part of a member's machine; empty while another one leads."""

    def __init__(self, machine: Membership) -> None:
        self._machine = machine
        self.stage = ""
        """Phase of the meeting that this member leads; empty while a generation runs or another one leads."""
        self.num_founding = 0
        """Members with which the job starts; 0 where it has started, or another one founds it."""
        self._considered: set[str] = set()
        self._leaving: set[str] = set()
        self._votes: dict[str, msg.Vote] = {}
        self._request: Request | None = None
        self._ranks: tuple[str, ...] = ()
        self._decision: Json = {}
        self._staying: tuple[Member, ...] = ()
        self._expelled: list[Member] = []
        self._refused: list[str] = []
        self._refusing: list[tuple[str, ...]] = []
        self._attempt = 0
        self._step = -1
        self._store = ("", 0)

    # -- what happens --------------------------------------------------------------------------

    def handle(self, event: e.Event) -> None:
        machine = self._machine
        match event:
            case e.Found(num_members):
                machine.leader = machine.me.id
                self.num_founding = num_members
                machine.committed = Roster(0, (replace(machine.me, number=0),))
                machine.set_timer("start", machine.settings.start_limit_s)
                self.look_ahead()
            case e.Decided(number, attempt, ranks, decision) if self._is_asked(number, attempt):
                self._prepare(ranks, decision)
            case e.Kept(number, attempt) if self._is_asked(number, attempt):
                self._keep()
            case e.Undecided(number, attempt, reason) if self._is_asked(number, attempt):
                machine.ending.end_job(reason)
            case e.Lease(number, held) if self.stage == "lease" and number == machine.promised[0]:
                if self._holds(may_go_on) if held is None else held:
                    self._decide()
                else:
                    self._end_side()
            case _:
                pass

    def _is_asked(self, number: int, attempt: int) -> bool:
        return self.stage == "decide" and (number, attempt) == (self._machine.promised[0], self._attempt)

    def hear(self, report: msg.Report) -> None:
        """A member's report, or this one's own."""
        machine = self._machine
        if machine.over is not None:
            return
        if report.fatal:
            machine.ending.end_job(report.fatal)
            return
        for gone in report.dead:
            machine.lose(gone.id, gone.last)
        for id in report.silent:
            machine.lose(id, None)
        self._leaving |= set(report.leaving)
        machine.wants_change |= report.change
        if (report.failed and machine.is_running) or (report.failed and self.stage in ("form", "fill")):
            self.start_meeting(urgent=True)
        else:
            self.look_ahead()

    def lose(self, id: str) -> None:
        """A member is gone."""
        machine = self._machine
        machine.arrivals.pop(id, None)
        round = machine.round
        if (self.num_founding and self.stage == "") or (round is not None and round.phase == "end"):
            machine.drop_child(id)
            return
        tree = machine.tree
        if tree is None or id not in tree:
            return
        if self.num_founding and id in machine.silent:
            machine.ending.end_job(f"{describe(machine.find(id))} fell silent before the job had started")
        elif self.num_founding or round is None or not round.meet.urgent or self.stage != "meet":
            self.start_meeting(urgent=True)
        elif tree.children(id, machine.settings.fan_out):
            self.start_meeting(urgent=True)  # Those below it need another way.
        else:
            machine.drop_child(id)

    def welcome(self, member: Member) -> None:
        """Somebody wants to join."""
        machine = self._machine
        if machine.round is not None and machine.round.phase == "end":
            return
        machine.expelled.discard(member.id)
        if member.id not in machine.linked or (machine.committed and member.id in machine.committed):
            return
        machine.arrivals[member.id] = member
        assert machine.committed is not None
        machine.do(e.Send(member.id, msg.Welcome(machine.committed)))
        self.look_ahead()

    def be_refused(self, other: Member | None) -> None:
        """This member's meeting came too late, or some still hear a leader of a lower number."""
        machine = self._machine
        if self.stage == "" or machine.round is None or machine.round.phase == "end":
            return
        if other is None or other.id in machine.dead:
            self.start_meeting(urgent=True)
        elif other.id != machine.me.id:
            self.stage = ""
            machine.set_timer("insist", machine.settings.silence_s)

    def ring(self, timer: str, number: int) -> None:
        machine = self._machine
        match timer:
            case "arrivals":
                if (
                    machine.is_leader
                    and machine.is_running
                    and machine.round is None
                    and self._new_arrivals()
                ):
                    self.start_meeting(urgent=False)
            case "insist":
                if machine.is_leader and self.stage == "" and machine.promised[0] == number:
                    self.start_meeting(urgent=True, insists=True)
            case "word":
                if self.stage == "word" and machine.is_leader:
                    self._ask_for_lease()
            case "start":
                if self.num_founding:
                    num = 1 + len(machine.arrivals)
                    machine.ending.end_job(
                        f"{num} of {self.num_founding} members came to {machine.me.host}:{machine.me.port} "
                        f"within {machine.settings.start_limit_s:g} s: {describe_all(machine)}; look at what "
                        "the others printed, and whether they can reach this address"
                    )
            case _:
                pass

    def look_ahead(self) -> None:
        """Calls a meeting if something waits for one."""
        machine = self._machine
        if not machine.is_leader or machine.round is not None or machine.over is not None:
            return
        if self.num_founding:
            if 1 + len(machine.arrivals) >= self.num_founding:
                self.start_meeting(urgent=False)
        elif not machine.is_running:
            return
        elif machine.wants_change or machine.wants_to_leave or self._leavers():
            self.start_meeting(urgent=False)
        elif self._new_arrivals():
            machine.set_timer("arrivals", machine.settings.arrivals_s)

    def _leavers(self) -> bool:
        roster = self._machine.committed
        return roster is not None and any(id in roster for id in self._leaving)

    def _new_arrivals(self) -> bool:
        return any(id not in self._considered for id in self._machine.arrivals)

    # -- a meeting -----------------------------------------------------------------------------

    def start_meeting(self, *, urgent: bool, insists: bool = False) -> None:
        """Calls everybody that is known to live."""
        machine = self._machine
        urgent = urgent or not machine.is_running
        assert machine.committed is not None
        machine.leader = machine.me.id
        machine.seen += 1
        self.stage = "meet"
        self._votes, self._refused, self._refusing, self._attempt = {}, [], [], 0
        people = self._list_people()
        if self.num_founding and len(people) < self.num_founding:
            self.stage = ""
            machine.round = None
            machine.interrupt(())
            return
        base = machine.committed
        book = Roster(machine.seen, people)
        reason: Reason = "start" if self.num_founding else "loss" if urgent else "change"
        lost = tuple(member for member in base.members if machine.is_gone(member.id))
        dead = tuple(msg.Gone(id, last) for id, last in machine.dead.items())
        number = machine.seen - 1 if self.num_founding else base.number
        machine.enter(msg.Meet(book.number, reason, urgent, number, book, dead, lost, insists), None)

    def _list_people(self) -> tuple[Member, ...]:
        """This member, those who have a say by their numbers, those who arrived, with new numbers."""
        machine = self._machine
        assert machine.committed is not None
        settled: dict[str, Member] = {}
        for roster in (*machine.agreed, machine.committed):
            settled |= {member.id: member for member in roster.members}
        others = dict(machine.arrivals)
        if machine.book is not None:
            others |= {member.id: member for member in machine.book.members}
        next_number = 1 + max(member.number for member in settled.values())
        living = [
            member
            for member in settled.values()
            if not machine.is_gone(member.id) and member.id != machine.me.id
        ]
        living.sort(key=lambda member: member.number)
        newcomers = [
            member
            for id, member in others.items()
            if id not in settled and not machine.is_gone(id) and id not in machine.expelled
        ]
        me = settled.get(machine.me.id)
        if me is None:
            newcomers = [machine.me, *(member for member in newcomers if member.id != machine.me.id)]
        numbered = [replace(member, number=next_number + i) for i, member in enumerate(newcomers)]
        if me is None:
            me = numbered.pop(0)
        return (me, *living, *numbered)

    def complete(self, phase: str, results: msg.Results) -> None:
        """All answered in a phase, or are gone."""
        machine = self._machine
        if results.late:
            for id in results.late:
                if id == machine.me.id:
                    machine.ending.finish(f"this member was not ready for its part in '{phase}' in time")
                    return
                machine.silent.add(id)
            self.start_meeting(urgent=True)
            return
        match phase:
            case "meet":
                self._count(results)
            case "prepare":
                self._prepared(results)
            case "stop":
                self._stopped(results)
            case "form":
                self.stage = "fill"
                machine.pass_down(msg.Fill(machine.promised[0]))
            case "fill":
                machine.begin(msg.Run(machine.promised[0]))
            case _:
                pass

    def _count(self, results: msg.Results) -> None:
        """Whether those who voted may go on."""
        machine = self._machine
        assert machine.committed is not None and machine.round is not None
        self._votes = {vote.id: vote for vote in results.votes if not machine.is_gone(vote.id)}
        fatal = next((vote.fatal for vote in results.votes if vote.fatal), "")
        if fatal:
            machine.ending.end_job(fatal)
            return
        if not self.num_founding and not self._learn_bases():
            return
        if self._holds(have_all_ended):
            self._decide()
        elif self._holds(may_go_on) or any(
            machine.is_gone(id) and id not in machine.dead for id in self._find_missing()
        ):
            self._ask_for_lease()  # Of many, too: so few may have gone on by it that these do not know of.
        else:
            self.stage = "word"  # All have certainly ended; their nannies may know in which generation.
            machine.set_timer("word", machine.settings.word_s)

    def _find_missing(self) -> list[str]:
        """Who has a say and did not vote."""
        machine = self._machine
        rosters = [roster for roster in (machine.committed, *machine.agreed) if roster is not None]
        return [m.id for roster in rosters for m in roster.members if m.id not in self._votes]

    def _holds(self, rule: Callable[..., bool]) -> bool:
        """Whether a rule does of each generation from which one could go on."""
        machine = self._machine
        assert machine.committed is not None
        in_doubt = any(vote.in_doubt for vote in self._votes.values())
        bases = [] if self.num_founding else [machine.committed, *machine.agreed]
        return all(rule(base, self._votes, machine.dead, in_doubt=in_doubt) for base in bases)

    def recount(self) -> None:
        """More is known of the dead."""
        if self.stage == "word" and self._holds(may_go_on):
            self._decide()

    def _ask_for_lease(self) -> None:
        self.stage = "lease"
        self._machine.do(e.AskLease(self._machine.promised[0]))

    def _learn_bases(self) -> bool:
        """Takes over what voters know of later generations; whether this meeting still stands."""
        machine = self._machine
        assert machine.committed is not None
        known = {roster.number: roster for roster in (machine.committed, *machine.agreed)}
        first = machine.committed
        for vote in self._votes.values():
            for i, roster in enumerate(vote.bases):
                known.setdefault(roster.number, roster)
                if i == 0 and roster.number > first.number:
                    first = roster
        before = {member.id for roster in machine.rosters() for member in roster.members}
        machine.committed = first
        machine.agreed = [known[number] for number in sorted(known) if number > first.number]
        is_counted = any(machine.me.id in roster for roster in (first, *machine.agreed))
        if not is_counted and any(member.id not in machine.dead for member in first.members):
            machine.ending.finish(f"the job has gone on without this member as generation {first.number}")
            return False
        after = {member.id for roster in machine.rosters() for member in roster.members}
        if any(id not in before and not machine.is_gone(id) for id in after):
            self.start_meeting(urgent=True)  # They take part too.
            return False
        return True

    def _end_side(self) -> None:
        machine = self._machine
        assert machine.committed is not None
        num = sum(member.id in self._votes for member in machine.committed.members)
        missing = [m for m in machine.committed.members if m.id not in self._votes]
        machine.ending.end_job(
            f"{num} of the {len(machine.committed.members)} members of generation "
            f"{machine.committed.number} can reach each other, and the others "
            f"({', '.join(map(describe, missing[:4]))}{', ...' if len(missing) > 4 else ''}) may go on: this "
            "side ends, so that never two go on; if the others ended too, start from the last checkpoint",
            may_go_on=True,
        )

    def _decide(self) -> None:
        machine = self._machine
        round = machine.round
        assert machine.committed is not None and round is not None
        self.stage = "decide"
        base = Roster(-1, ()) if self.num_founding else machine.committed
        bases = [] if self.num_founding else [machine.committed, *machine.agreed]
        present = tuple(member for member in round.book.members if member.id in self._votes)
        leaving = self._leaving | {vote.id for vote in self._votes.values() if vote.leaving}
        self._staying = tuple(member for member in present if member.id not in leaving)
        self._expelled = [
            member
            for roster in (*bases, round.book)
            for member in roster.members
            if member.id not in self._votes and member.id not in machine.dead
        ]
        machine.expelled |= {member.id for member in self._expelled}
        if not self._staying:
            machine.ending.end_job(e.ALL_LEAVE)
            return
        arrived = tuple(member for member in present if member.id not in base)
        self._considered |= {member.id for member in arrived}
        request = Request(
            reason="change",
            members=present,
            lost=tuple(member for member in base.members if member.id not in self._votes),
            leaving=tuple(member for member in present if member.id in leaving),
            arrived=arrived,
            failed={vote.id: vote.failed for vote in self._votes.values() if vote.failed},
            offers={id: vote.offer for id, vote in self._votes.items()},
            refused=tuple(self._refused),
            refusing=tuple(self._refusing),
            has_run=base.number > 0,
        )
        self._request = replace(request, reason=self._find_reason(request, round.meet.urgent))
        machine.do(e.AskDecision(machine.promised[0], self._attempt, self._request))

    def _find_reason(self, request: Request, urgent: bool) -> Reason:
        if self.num_founding:
            return "start"
        if urgent:
            return "loss"
        return "notice" if request.leaving else "arrival" if request.arrived else "change"

    def _keep(self) -> None:
        machine = self._machine
        assert machine.round is not None
        if machine.round.meet.urgent:
            machine.ending.end_job(
                "no decision was made about how to go on, though the running generation is over"
            )
        else:
            self.stage = ""
            machine.wants_change = False
            machine.pass_down(msg.Keep(machine.promised[0]))

    def _prepare(self, ranks: Sequence[str], decision: Json) -> None:
        machine = self._machine
        wrong = [id for id in ranks if id not in self._votes]
        if wrong or len(set(ranks)) < len(ranks) or not ranks:
            machine.ending.end_job(
                f"the decision gives ranks to {list(ranks)}, of whom {wrong} do not take part"
            )
            return
        self.stage = "prepare"
        self._ranks, self._decision, self._store = tuple(ranks), decision, ("", 0)
        keeper = min(self._staying, key=lambda member: member.number).id
        machine.pass_down(msg.Prepare(machine.promised[0], self._attempt, self._ranks, decision, keeper))

    def _prepared(self, results: msg.Results) -> None:
        machine = self._machine
        assert machine.round is not None
        if results.refused:
            # One a decision, however many refuse it: who decides counts them.
            first, *others = results.refused
            also = f" (and {len(others)} others refuse it)" if others else ""
            self._refused.append(f"{describe(machine.find(first.id))}: {first.text}{also}")
            self._refusing.append(tuple(one.id for one in results.refused))
            self._attempt += 1
            if self._attempt < machine.settings.num_attempts:
                self._decide()
            elif machine.round.meet.urgent:
                machine.ending.end_job(
                    "every decision was refused: " + "; ".join(dict.fromkeys(self._refused))
                )
            else:
                self._keep()
            return
        self._store = (results.host, results.port)
        if machine.round.meet.urgent:
            self._form(-1)
        else:
            self._attempt = 0
            self._stop(results.step + 2)

    def _stop(self, step: int) -> None:
        self.stage = "stop"
        self._step = step
        self._machine.pass_down(msg.Stop(self._machine.promised[0], self._attempt, step))

    def _stopped(self, results: msg.Results) -> None:
        if results.step >= 0:
            self._attempt += 1
            self._stop(results.step + 2**self._attempt)
        else:
            self._form(self._step)

    def _form(self, after_step: int) -> None:
        machine = self._machine
        assert machine.round is not None and self._request is not None
        self.stage = "form"
        book = machine.round.book
        staying = None
        if len(self._staying) < len(book.members):
            staying = Roster(book.number, tuple(sorted(self._staying, key=lambda member: member.number)))
        machine.pass_down(
            msg.Form(
                book.number,
                self._request.reason,
                self._ranks,
                self._decision,
                *self._store,
                after_step,
                self._request.leaving,
                staying,
            )
        )

    def begin(self, roster: Roster) -> None:
        """A generation runs, and this member leads it."""
        machine = self._machine
        self.stage = ""
        self.num_founding = 0
        self._leaving = {id for id in self._leaving if id in roster}
        machine.arrivals = {id: m for id, m in machine.arrivals.items() if id not in roster}
        self._considered &= set(machine.arrivals)
        for member in {member.id: member for member in self._expelled}.values():
            machine.touch.expel(member)
        self._expelled = []
        for id in machine.arrivals:
            machine.do(e.Send(id, msg.Welcome(roster)))
        self.look_ahead()


def describe(member: Member | None) -> str:
    return "a member" if member is None else f"{member.node} local rank {member.local_rank}"


def describe_lost(lost: Sequence[Member]) -> str:
    return ": lost " + ", ".join(map(describe, lost)) if lost else ""


def describe_all(machine: Membership) -> str:
    return ", ".join(describe(member) for member in (machine.me, *machine.arrivals.values()))
