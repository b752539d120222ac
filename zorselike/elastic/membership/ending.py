"""How a member is out: the job ends, it fails for good, or it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zorselike.elastic.contract import Member
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.roster import UNKNOWN, Roster
from zorselike.elastic.membership.round import Round

if TYPE_CHECKING:
    from zorselike.elastic.membership.machine import Membership


class Ending:
    """A member's end, and that of its job."""

    def __init__(self, machine: Membership) -> None:
        self._machine = machine
        self._end = msg.End(0, "")
        self._is_done = False

    def fail(self, reason: str, step: int, *, may_recur: bool) -> None:
        machine = self._machine
        machine.failed = reason
        if (reason, step) in machine.failures and not may_recur:
            place = f"{machine.me.node} local rank {machine.me.local_rank}"
            machine.fatal = f"{place} failed twice at step {step}: {reason}"
        machine.failures.add((reason, step))
        machine.say(msg.Report(failed=(msg.Text(machine.me.id, reason),), fatal=machine.fatal))

    def say_goodbye(self) -> None:
        machine = self._machine
        known = [roster.number for roster in (machine.committed, *machine.agreed) if roster is not None]
        machine.do(*(e.Send(id, msg.Bye(max(known, default=UNKNOWN))) for id in machine.linked))
        self.finish("this member has finished", has_failed=False)

    def tell_done(self, done: msg.Done, teller: str = "") -> None:
        """Passes on, once, that the job has done its last step."""
        machine = self._machine
        if self._is_done or (machine.committed is not None and done.number < machine.committed.number):
            return
        self._is_done = True
        machine.do(*(e.Send(id, done) for id in machine.linked if id != teller), e.Done())

    def finish(self, reason: str, *, has_failed: bool = True, may_return: bool = False) -> None:
        """This member is out; `may_return`: the job may go on, without it."""
        machine = self._machine
        if machine.over is None:
            if has_failed:
                machine.interrupt(())
            machine.over = reason
            machine.round = None
            machine.do(e.Over(reason, may_return))

    def end_job(self, reason: str, *, may_go_on: bool = False) -> None:
        """Ends the job, as its leader, for all that can be reached; others may go on, where this is said."""
        machine = self._machine
        tree = machine.tree or Roster(0, (machine.me,))
        machine.seen += 1
        self.spread(msg.End(machine.seen, reason, may_go_on), root=tree)

    def spread(self, end: msg.End, root: Roster | None = None) -> None:
        machine = self._machine
        tree = root or machine.tree
        if end.number < machine.promised[0] or (machine.round is not None and machine.round.phase == "end"):
            return
        if tree is None or machine.me.id not in tree:
            self.finish(end.reason, may_return=end.may_go_on)
            return
        machine.seen = max(machine.seen, end.number)
        parent = None if root is not None else tree.parent(machine.me.id, machine.settings.fan_out)
        meet = msg.Meet(end.number, "loss", True, 0, tree, (), ())
        children = self._reachable(tree, machine.me.id)
        arrivals = [] if root is None else [m for id, m in machine.arrivals.items() if id not in tree]
        machine.round = Round(meet, parent.id if parent else None, [*children, *arrivals])
        self._end = end
        machine.expect("end")
        machine.round.is_own_missing = False
        for member in machine.round.children:
            machine.send(member, end)
        machine.set_timer(
            "end",
            machine.settings.end_s * 0.9 ** tree.depth(machine.me.id, machine.settings.fan_out),
        )
        machine.interrupt(())
        machine._check_answers()

    def _reachable(self, tree: Roster, id: str) -> Sequence[Member]:
        """Who is below a member, and in place of those that are gone who is below them."""
        machine = self._machine
        found: list[Member] = []
        for child in tree.children(id, machine.settings.fan_out):
            found += self._reachable(tree, child.id) if machine.is_gone(child.id) else [child]
        return found

    def acknowledge(self, round: Round) -> None:
        machine = self._machine
        if round.parent is not None and round.parent in machine.linked:
            machine.do(e.Send(round.parent, msg.Up(round.number, "end", 0, msg.Results())))
        self.finish(self._end.reason, may_return=self._end.may_go_on)

    def leave_behind(self, id: str, number: int) -> None:
        """A member has finished: nothing is amiss, but it is there no more. `number`: of its last generation,
        which may be one that this member does not know of."""
        machine = self._machine
        if machine.round is not None:
            machine.lose(id, number)
            return
        machine.linked.pop(id, None)
        machine.dead[id] = number
        machine.arrivals.pop(id, None)
