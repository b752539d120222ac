"""Without a leader: who leads now, how a member or an arrival finds it, and what it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zorselike.elastic.contract import Member
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.roster import Roster

if TYPE_CHECKING:
    from zorselike.elastic.membership.machine import Membership

_MAX_JOINS = 50
"""How often an arrival asks those whom it knows, where none of them takes it in."""


class Seeking:
    """A member's search for its leader."""

    def __init__(self, machine: Membership) -> None:
        self._machine = machine
        self.num_seeks = 0
        self._sought_at = 0
        self._num_joins = 0
        self._welcomed_by: str | None = None

    def lose_leader(self) -> None:
        machine = self._machine
        if machine.book is None or machine.me.id not in machine.book:
            self.join_again()
        else:
            self.num_seeks = 0
            self.choose_leader()

    def join_again(self) -> None:
        """An arrival turns to whoever it knows of the job; who that is may not know yet who leads."""
        machine = self._machine
        others = {m.id: m for roster in machine.rosters() for m in roster.members} | machine.linked
        living = [member for id, member in others.items() if id != machine.me.id and not machine.is_gone(id)]
        self._num_joins += 1
        if not living or self._num_joins > _MAX_JOINS:
            text = "the job that this process wanted to join cannot be reached any more"
            if machine.committed is not None and not machine.committed.number:
                founder = machine.committed.root
                text += (
                    f": its founder, at {founder.host}:{founder.port}, has ended or cannot be reached, and "
                    "not all members that it was to start with had come"
                )
            machine.ending.finish(text, may_return=True)
            return
        first = min(living, key=lambda member: member.number)
        machine.leader = first.id
        machine.send(first, msg.Join(machine.me))
        machine.set_timer("join", machine.settings.silence_s / 2)

    def check_welcome(self) -> None:
        """Who wanted to join asks again, unless the leader has taken it in meanwhile."""
        machine = self._machine
        is_member = machine.book is not None and machine.me.id in machine.book
        if not is_member and (self._welcomed_by is None or self._welcomed_by != machine.leader):
            self.join_again()

    def choose_leader(self) -> None:
        """The living member with the lowest number leads; the others turn to it."""
        machine = self._machine
        living = [m for roster in machine.rosters() for m in roster.members if not machine.is_gone(m.id)]
        first = min(living, key=lambda member: member.number)
        machine.leader = first.id
        if first.id == machine.me.id:
            machine.leading.start_meeting(urgent=True)
            return
        dead = tuple(msg.Gone(id, last) for id, last in machine.dead.items())
        machine.send(first, msg.Seek(machine.seen, dead, tuple(machine.silent)))
        if machine.silent:
            self.look_around()
        self.await_call(machine.settings.silence_s)

    def look_around(self) -> None:
        """Opens links to all who might lead in the leader's place, at once: to find one after the other that
        they cannot be reached would take a silence limit for each."""
        machine = self._machine
        if machine.book is None or machine.me.id not in machine.book:
            return
        lower = [
            m for m in machine.book.members if m.number < machine.me.number and not machine.is_gone(m.id)
        ]
        for member in lower[: machine.settings.fan_out]:
            machine.open(member)

    def await_call(self, delay_s: float) -> None:
        """A meeting should come; if it does not, this member looks for a leader again."""
        machine = self._machine
        self._sought_at = machine.promised[0]
        machine.set_timer("seek", delay_s)

    def seek_again(self) -> None:
        machine = self._machine
        if machine.promised[0] > self._sought_at or machine.book is None or machine.me.id not in machine.book:
            return
        self.num_seeks += 1
        if self.num_seeks > 3:
            machine.ending.finish(
                "this member cannot reach the leader of the job, and the others do not take it in any more; "
                "they go on without it, if they can",
                may_return=True,
            )
        else:
            self.choose_leader()

    def be_sought(self, sender: str, seek: msg.Seek) -> None:
        machine = self._machine
        machine.seen = max(machine.seen, seek.number)
        before = machine.round.number if machine.round else 0
        for gone in seek.dead:
            machine.lose(gone.id, gone.last)
        for id in seek.silent:
            if id not in machine.linked and id != machine.me.id:
                machine.lose(id, None)
        if machine.over is not None:
            return
        if machine.is_leader:
            is_called = (
                machine.round is not None
                and sender in machine.round.book
                and seek.number < machine.round.number
            )
            if not is_called and (machine.round is None or machine.round.number == before):
                machine.leading.start_meeting(urgent=True)
        elif (leader := machine.find(machine.leader or "")) is not None and leader.id != sender:
            machine.do(e.Send(sender, msg.Redirect(leader)))

    def redirect(self, member: Member) -> None:
        machine = self._machine
        is_arrival = machine.book is None or machine.me.id not in machine.book
        if member.id == machine.me.id or machine.is_gone(member.id):
            if is_arrival:  # Who was asked will know soon who leads now.
                machine.set_timer("join", machine.settings.arrivals_s)
            return
        if is_arrival:
            machine.leader = member.id
            machine.send(member, msg.Join(machine.me))
            machine.set_timer("join", machine.settings.silence_s)
        else:
            dead = tuple(msg.Gone(id, last) for id, last in machine.dead.items())
            machine.send(member, msg.Seek(machine.seen, dead, tuple(machine.silent)))

    def let_join(self, member: Member) -> None:
        machine = self._machine
        if machine.is_leader:
            machine.leading.welcome(member)
            return
        leader = machine.find(machine.leader or "")
        if leader is not None and leader.id != member.id:
            machine.do(e.Send(member.id, msg.Redirect(leader)))
        elif not machine.is_member(machine.me.id):
            machine.do(
                e.Send(member.id, msg.Expel(0, "the process that was asked waits itself to join a job"))
            )

    def be_welcome(self, sender: str, roster: Roster) -> None:
        machine = self._machine
        if machine.book is None or machine.me.id not in machine.book:
            machine.leader = self._welcomed_by = sender
            self._num_joins = 0
            machine.committed = roster
