"""Links to the members around this one, and the doubt after silence whether the others went on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zorselike.elastic.contract import Member
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.roster import Roster, may_go_on

if TYPE_CHECKING:
    from zorselike.elastic.membership.machine import Membership


class Touch:
    """How this member is in touch with those above and below it in the tree."""

    def __init__(self, machine: Membership) -> None:
        self._machine = machine

    def open(self, member: Member) -> None:
        machine = self._machine
        machine.linked[member.id] = member
        machine.opening.discard(member.id)
        machine.silent.discard(member.id)
        self.ask_again(member.id)
        if machine.book is None and machine.leader is None and not machine.is_leader:
            machine.leader = member.id  # An arrival, and whoever it was told to turn to.
            machine.do(e.Send(member.id, msg.Join(machine.me)))

    def close(self, id: str) -> None:
        machine = self._machine
        machine.linked.pop(id, None)  # If it was quiet, it may have gone on without this member before.
        if machine.round is not None and machine.round.phase == "meet":
            for child in machine.round.children:  # What was sent may have crossed with the closing.
                if child.id == id and id in machine.round.awaited:
                    machine.send(child, machine.round.meet)

    def tidy(self, roster: Roster) -> None:
        machine = self._machine
        fan_out = machine.settings.fan_out
        parent = roster.parent(machine.me.id, fan_out)
        children = roster.children(machine.me.id, fan_out)
        for child in children:
            machine.open(child)
        needed = {child.id for child in children} | ({parent.id} if parent else set())
        for id in [id for id in machine.linked if id in roster and id not in needed]:
            del machine.linked[id]
            machine.quiet.discard(id)
            machine.do(e.Close(id))

    def mend(self, id: str) -> None:
        """Messages to or from a member may be lost: a meeting in which they matter begins anew."""
        machine = self._machine
        if (member := machine.find(id)) is not None:
            machine.linked[id] = member
        round = machine.round
        if round is None:
            machine.quiet.add(id)
            self.ask_again(id)
        elif round.phase == "end":
            return
        elif machine.is_leader:
            if id in round.awaited or any(child.id == id for child in round.children):
                machine.leading.start_meeting(urgent=round.meet.urgent)
        elif id == round.parent and (leader := machine.find(machine.leader or "")) is not None:
            machine.send(leader, msg.Seek(machine.seen, (), ()))

    def ask_again(self, id: str) -> None:
        """Who was quiet is heard: whether it, or this member, has gone on without the other meanwhile."""
        machine = self._machine
        if id in machine.quiet and machine.is_running and machine.committed is not None:
            machine.do(e.Send(id, msg.Still(machine.committed.number, asks=True)))

    def answer(self, sender: str, still: msg.Still) -> None:
        machine = self._machine
        if not machine.is_member(sender):
            self.refute(sender)
        elif (
            machine.is_running and machine.committed is not None and machine.committed.number == still.number
        ):
            if still.asks:
                machine.do(e.Send(sender, msg.Still(still.number)))
            else:
                machine.quiet.discard(sender)

    def must_hold(self) -> bool:
        """Whether those who are heard would be too few to go on, while the generation runs."""
        machine = self._machine
        if (
            not machine.is_running
            or not machine.quiet
            or machine.committed is None
            or machine.me.id not in machine.committed
        ):
            return False
        if machine.is_leader:
            present = (machine.linked.keys() - machine.quiet) | {machine.me.id}
            tree = machine.settings.fan_out
            lost = [
                child for child in machine.committed.children(machine.me.id, tree) if child.id not in present
            ]
            below = {m.id for child in lost for m in self._below(machine.committed, child.id)}
            present = {member.id for member in machine.committed.members} - below
            return not may_go_on(machine.committed, present, machine.dead, in_doubt=True)
        parent = machine.committed.parent(machine.me.id, machine.settings.fan_out)
        return parent is not None and parent.id in machine.quiet

    def _below(self, roster: Roster, id: str) -> list[Member]:
        """A member and all below it in the tree."""
        machine = self._machine
        found = [roster.members[roster.places[id]]]
        for child in roster.children(id, machine.settings.fan_out):
            found += self._below(roster, child.id)
        return found

    def refute(self, id: str) -> None:
        """Tells somebody who has just said something, and is no member any more, so: by the link on which it
        was heard, which this member may have given up when it held the other for lost."""
        if (expel := self._make_expel()) is not None:
            self._machine.do(e.Send(id, expel))

    def expel(self, member: Member) -> None:
        """Tells a member, if it can be reached, that it is none any more."""
        if (expel := self._make_expel()) is not None:
            self._machine.send(member, expel)

    def _make_expel(self) -> msg.Expel | None:
        committed = self._machine.committed
        if committed is None:
            return None
        text = (
            f"this member was silent, and the job has gone on without it as generation {committed.number}; "
            "it may join again as a new process"
        )
        return msg.Expel(committed.number, text)

    def is_child(self, id: str) -> bool:
        machine = self._machine
        tree = machine.tree
        if tree is None or id not in tree or machine.me.id not in tree:
            return False
        parent = tree.parent(id, machine.settings.fan_out)
        return parent is not None and parent.id == machine.me.id
