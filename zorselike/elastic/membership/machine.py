"""Membership of one process: what it does about each event, as a member and, in `leading`, as the leader."""

from __future__ import annotations

from collections.abc import Iterable

from zorselike.elastic.contract import Generation, Member
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.ending import Ending
from zorselike.elastic.membership.leading import Leading
from zorselike.elastic.membership.roster import Roster
from zorselike.elastic.membership.round import Round, Settings
from zorselike.elastic.membership.seeking import Seeking
from zorselike.elastic.membership.touch import Touch


class Membership:
    """A state machine; `handle` takes each event and returns what is to be done, in order.

    A member promises each meeting's number to one leader and joins no earlier one afterwards. Whoever is
    filled agrees to be of the new generation (`agreed`) and tells every later leader so; a generation runs
    once all have agreed (`committed`). A leader goes on only with enough members of the last committed
    generation and of each one that a voter has agreed to since (`roster.may_go_on`).
    """

    def __init__(self, me: Member, settings: Settings | None = None) -> None:
        self.me = me
        self.settings = settings or Settings()
        self.committed: Roster | None = None
        self.agreed: list[Roster] = []
        self.promised = (0, "")
        self.seen = 0
        self.leader: str | None = None
        self.is_running = False
        self.round: Round | None = None
        self.book: Roster | None = None
        """Of the last meeting that this member took part in."""
        self.arrivals: dict[str, Member] = {}
        self.dead: dict[str, int] = {}
        self.silent: set[str] = set()
        self.quiet: set[str] = set()
        self.expelled: set[str] = set()
        self.linked: dict[str, Member] = {}
        self.opening: set[str] = set()
        self.generation: Generation | None = None
        self.over: str | None = None
        self.wants_to_leave = False
        self.wants_change = False
        self.failed = ""
        self.fatal = ""
        self.failures: set[tuple[str, int]] = set()
        self.leading = Leading(self)
        self.seeking = Seeking(self)
        self.touch = Touch(self)
        self.ending = Ending(self)
        self._delivered = False
        self._holds = False
        self._effects: list[e.Effect] = []

    # -- in and out ----------------------------------------------------------------------------

    def handle(self, event: e.Event) -> list[e.Effect]:
        if self.over is None:
            self._handle(event)
            if self._holds != self.touch.must_hold():
                self._holds = not self._holds
                self.do(e.Hold(self._holds))
        effects, self._effects = self._effects, []
        return effects

    def _handle(self, event: e.Event) -> None:
        match event:
            case e.Received(sender, message):
                self._receive(sender, message)
            case e.Opened(member):
                self.touch.open(member)
            case e.Closed(id):
                self.touch.close(id)
            case e.Relinked(id):
                self.touch.mend(id)
            case e.Dead(gone):
                self.lose(gone.id, gone.last)
            case e.Silent(id):
                self.lose(id, None)
            case e.Quiet(id):
                self.quiet.add(id)
                if id == self.leader:
                    self.seeking.look_around()
            case e.Heard(id):
                self.touch.ask_again(id)
            case e.Slept():
                self.quiet |= set(self.linked)
            case e.Rang(timer, number):
                self._ring(timer, number)
            case e.Formed(number):
                self.answer(number, "form", 0, msg.Results())
            case e.Filled(number):
                self._agree(number)
            case e.Offered(number, offer):
                self._vote(number, offer)
            case e.Prepared(number, attempt, step, host, port):
                self.answer(number, "prepare", attempt, msg.Results(host=host, port=port, step=step))
            case e.Refused(number, attempt, reason):
                refused = (msg.Text(self.me.id, reason),)
                self.answer(number, "prepare", attempt, msg.Results(refused=refused))
            case e.Gated(number, attempt, past):
                self.answer(number, "stop", attempt, msg.Results(step=past))
            case e.Lost(ids):
                self.say(msg.Report(silent=ids))
            case e.Failed(reason, step, may_recur):
                self.ending.fail(reason, step, may_recur=may_recur)
            case e.Change():
                self.wants_change = True
                self.say(msg.Report(change=True))
            case e.Leave(id):
                self.wants_to_leave |= id == self.me.id
                self.say(msg.Report(leaving=(id,)))
            case e.Finish(is_done):
                if is_done and self.committed is not None:
                    self.ending.tell_done(msg.Done(self.committed.number))
                self.ending.say_goodbye()
            case e.Stranded(reason):
                self.ending.finish(reason)
            case _:
                self.leading.handle(event)

    def do(self, *effects: e.Effect) -> None:
        self._effects += effects

    def open(self, to: Member) -> None:
        """Opens a link where there is none."""
        if to.id not in self.linked and to.id not in self.opening:
            self.opening.add(to.id)
            self.do(e.Open(to))

    def send(self, to: Member, message: msg.Message) -> None:
        self.open(to)
        self.do(e.Send(to.id, message))

    def set_timer(self, timer: str, delay_s: float) -> None:
        self.do(e.SetTimer(timer, self.seen, delay_s))

    # -- who is there --------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return self.leader == self.me.id

    @property
    def tree(self) -> Roster | None:
        """By which messages travel now."""
        return self.round.book if self.round else self.committed

    def rosters(self) -> list[Roster]:
        """All whose members may have a say."""
        return [roster for roster in (self.committed, *self.agreed, self.book) if roster is not None]

    def find(self, id: str) -> Member | None:
        for roster in self.rosters():
            if id in roster:
                return roster.members[roster.places[id]]
        return self.linked.get(id) or self.arrivals.get(id)

    def is_member(self, id: str) -> bool:
        return any(id in roster for roster in self.rosters())

    def is_gone(self, id: str) -> bool:
        return id in self.dead or id in self.silent

    def lose(self, id: str, last: int | None) -> None:
        """A member is dead, or silent where nobody knows a last generation."""
        self.linked.pop(id, None)
        self.opening.discard(id)
        if id in self.dead or id == self.me.id:
            if id in self.dead and last is not None and last > self.dead[id]:
                self.dead[id] = last
                if self.is_leader:
                    self.leading.recount()
                else:
                    self.say(self.report_of(id))
            return
        if last is None:
            self.quiet.add(id)
            self.silent.add(id)
        else:
            self.silent.discard(id)
            self.dead[id] = last
        if self.is_leader:
            self.leading.lose(id)
        elif id == self.leader or self.leader is None:
            self.seeking.lose_leader()
        elif (tree := self.tree) is not None and id in tree and self.me.id in tree:
            parent = tree.parent(self.me.id, self.settings.fan_out)
            if parent is not None and parent.id == id:
                self.seeking.await_call(self.settings.silence_s / 2)  # The leader hears of it, and calls.
            else:
                self.say(self.report_of(id))
                self.drop_child(id)

    def report_of(self, id: str) -> msg.Report:
        if id in self.dead:
            return msg.Report(dead=(msg.Gone(id, self.dead[id]),))
        return msg.Report(silent=(id,))

    # -- messages ------------------------------------------------------------------------------

    def _receive(self, sender: str, message: msg.Message) -> None:
        if sender in self.expelled and not isinstance(message, msg.Expel | msg.Join):
            self.touch.refute(sender)
            return
        if sender in self.silent:
            self.silent.discard(sender)
            if self.is_leader and self.leading.stage == "meet":
                self.leading.start_meeting(urgent=True)
        round = self.round
        match message:
            case msg.Meet():
                self._meet(sender, message)
            case msg.Run():
                self.begin(message)
            case msg.End():
                self.ending.spread(message)
            case msg.Prepare() | msg.Stop() | msg.Form() | msg.Fill() | msg.Keep():
                if round is not None and round.number == message.number and sender == round.parent:
                    self.pass_down(message)
            case msg.Up(number, phase, attempt, results):
                if round is not None and round.expects(number, phase, attempt):
                    round.add(sender, results)
                    self._check_answers()
            case msg.Report():
                if self.is_leader or self.touch.is_child(sender):
                    self.say(message)
            case msg.Refuse(number, leader):
                self.seen = max(self.seen, number)
                if round is not None and round.parent is not None:
                    self.do(e.Send(round.parent, message))
                elif self.is_leader:
                    self.leading.be_refused(leader)
            case msg.Seek():
                if self.is_member(sender) or sender in self.arrivals:
                    self.seeking.be_sought(sender, message)
                else:
                    self.touch.refute(sender)
            case msg.Redirect(member):
                self.seeking.redirect(member)
            case msg.Join(member):
                self.seeking.let_join(member)
            case msg.Welcome(roster):
                self.seeking.be_welcome(sender, roster)
            case msg.Expel(number, reason):
                if self.committed is None or number >= self.committed.number:
                    self.ending.finish(reason, may_return=True)
            case msg.Still():
                self.touch.answer(sender, message)
            case msg.Bye(number):
                self.ending.leave_behind(sender, number)
            case msg.Done():
                self.ending.tell_done(message, sender)

    def say(self, report: msg.Report) -> None:
        """Brings a report to the leader."""
        if self.is_leader:
            self.leading.hear(report)
            return
        tree = self.tree
        parent = None
        if tree is not None and self.me.id in tree:
            parent = tree.parent(self.me.id, self.settings.fan_out)
        if parent is not None and parent.id in self.linked:
            self.do(e.Send(parent.id, report))
        elif self.leader is not None and self.leader in self.linked:
            self.do(e.Send(self.leader, report))
        # Otherwise this member is about to meet, and its vote says what it wants itself.

    # -- a meeting -----------------------------------------------------------------------------

    def _meet(self, sender: str, meet: msg.Meet) -> None:
        leader = meet.book.root
        if self.committed is not None and self.is_started and not self.is_member(leader.id):
            self.touch.refute(sender)
            return
        self.dead |= {gone.id: gone.last for gone in meet.dead}
        if (current := self._find_rightful(leader)) is not None and not meet.insists:
            self.do(e.Send(sender, msg.Refuse(self.seen, current)))
            return
        # A leader may give up its own meeting for another's of the same number: it alone could go on with it.
        gives_up = self.leading.stage == "meet" and self.is_leader and leader.number < self.me.number
        least = self.promised[0] if gives_up else self.promised[0] + 1
        if meet.number < least and (meet.number, leader.id) != self.promised:
            self.do(e.Send(sender, msg.Refuse(self.seen)))
            return
        self.leading.stage = ""
        self.enter(meet, sender)

    def _find_rightful(self, leader: Member) -> Member | None:
        """Who leads and is heard, this member perhaps, and has a lower number than one who calls."""
        current = self.me if self.is_leader else self.find(self.leader or "")
        if current is None or current.number >= leader.number or self.is_gone(current.id):
            return None
        is_heard = current.id in self.linked and current.id not in self.quiet
        return current if self.is_leader or is_heard else None

    @property
    def is_started(self) -> bool:
        """Whether this member has been, or agreed to be, of a generation."""
        return bool(self.agreed) or (self.generation is not None and self.committed is not None)

    def enter(self, meet: msg.Meet, parent: str | None) -> None:
        """Takes part in a meeting."""
        self.promised = (meet.number, meet.book.root.id)
        self.seen = max(self.seen, meet.number)
        self.leader = meet.book.root.id
        self.book = meet.book
        self.me = meet.book.members[meet.book.places[self.me.id]]
        self.seeking.num_seeks = 0
        if meet.reason == "start":
            self.committed = Roster(meet.base, meet.book.members)
        children = meet.book.children(self.me.id, self.settings.fan_out)
        self.round = Round(meet, parent, list(children))
        self.expect("meet")
        for child in children:
            self.send(child, meet)
        if meet.urgent:
            self.interrupt(meet.lost)  # Before what it has is asked for: that stays then.
        self.do(e.AskOffer(meet.number))
        for child in children:
            if child.id in self.dead:
                self.say(self.report_of(child.id))
                self.drop_child(child.id)

    def expect(self, phase: str, attempt: int = 0) -> None:
        """From here on answers to this phase are gathered."""
        assert self.round is not None
        self.round.expect(phase, attempt)
        depth = self.round.book.depth(self.me.id, self.settings.fan_out)
        self.set_timer("phase", self.settings.phase_limit_s * 0.9**depth)

    def answer(self, number: int, phase: str, attempt: int, results: msg.Results) -> None:
        """This member's own part of a phase is done."""
        if self.round is not None and self.round.expects(number, phase, attempt):
            self.round.add_own(results)
            self._check_answers()

    def drop_child(self, id: str) -> None:
        """Expects no answer from a member that is gone."""
        if self.round is not None:
            self.round.drop(id)
            self._check_answers()

    def _check_answers(self) -> None:
        round = self.round
        if round is None or not round.is_complete():
            return
        results = round.gathered.result()
        if round.phase == "end":
            self.ending.acknowledge(round)
        elif round.parent is None:
            self.leading.complete(round.phase, results)
        else:
            self.do(e.Send(round.parent, msg.Up(round.number, round.phase, round.attempt, results)))

    def interrupt(self, lost: Iterable[Member]) -> None:
        self.is_running = False
        if self._delivered:
            self._delivered = False
            self.do(e.Interrupt(tuple(lost)))

    def _vote(self, number: int, offer: dict[str, object]) -> None:
        round = self.round
        if round is None:
            return
        bases = (*([self.committed] if self.committed else []), *self.agreed)
        if self.committed is not None and self.committed.number == round.meet.base:
            bases = bases if self.agreed else ()
        vote = msg.Vote(
            self.me.id,
            offer,
            bases,
            bool(self.quiet),
            self.wants_to_leave,
            self.failed,
            self.fatal,
        )
        self.answer(number, "meet", 0, msg.Results(votes=(vote,)))

    def pass_down(self, message: msg.Downward) -> None:
        """Does what the leader says, and tells those below."""
        round = self.round
        assert round is not None
        match message:
            case msg.Prepare(number, attempt, ranks, decision, keeper):
                self.expect("prepare", attempt)
                self._spread(message)
                self.do(e.AskPrepare(number, attempt, ranks, decision, keeper == self.me.id))
            case msg.Stop(number, attempt, step):
                self.expect("stop", attempt)
                self._spread(message)
                self.do(e.Gate(number, attempt, step))
            case msg.Form():
                self.expect("form")
                round.form = message
                self._spread(message)
                self._deliver(round, message)
            case msg.Fill(number):
                self.expect("fill")
                self._spread(message)
                self.do(e.ReleaseFormed(number))
            case msg.Keep():
                self._spread(message)
                self.round = None
                self.wants_change = False
                self.book = self.committed
                self.do(e.Ungate())
                if self.is_leader:
                    self.leading.look_ahead()

    def _spread(self, message: msg.Downward) -> None:
        assert self.round is not None
        self.do(*(e.Send(child.id, message) for child in self.round.children))

    def _deliver(self, round: Round, form: msg.Form) -> None:
        roster = form.staying or round.book
        self.generation = Generation(
            number=form.number,
            members=roster.members,
            leaving=form.leaving,
            ranks=form.ranks,
            host=form.host,
            port=form.port,
            reason=form.reason,
            decision=form.decision,
            after_step=form.after_step if form.after_step >= 0 else None,
        )
        self._delivered = True
        self.is_running = False
        self.do(e.Deliver(self.generation))

    def _agree(self, number: int) -> None:
        """From here on this member counts as one of the new generation, whether it ever runs or not."""
        round = self.round
        if round is None or round.form is None or not round.expects(number, "fill", 0):
            return
        if not any(roster.number == number for roster in self.agreed):
            self.agreed.append(round.form.staying or round.book)
        self.answer(number, "fill", 0, msg.Results())

    def begin(self, run: msg.Run) -> None:
        roster = next((roster for roster in self.agreed if roster.number == run.number), None)
        if roster is not None:
            self.committed = roster
            self.agreed = [other for other in self.agreed if other.number > run.number]
        round = self.round
        if roster is None or round is None or round.number != run.number:
            return  # Known to have run, but this member is in a later meeting.
        self._spread(run)
        leaving = {member.id for member in round.form.leaving} if round.form else set()
        for id in self.linked:
            if id in round.book and id not in roster and id not in leaving:
                self.touch.refute(id)
        self.round, self.book = None, roster
        self.leader = roster.root.id
        self.is_running = True
        self.wants_change, self.failed = False, ""
        self.dead.clear()
        self.silent.clear()
        self.quiet &= set(self.linked)
        self.do(e.ReleaseFilled(run.number))
        if self.me.id not in roster:
            self.ending.finish(e.LEFT, has_failed=False)
            return
        self.touch.tidy(roster)
        for id in sorted(self.quiet):
            self.touch.ask_again(id)
        if self.is_leader:
            self.leading.begin(roster)
        elif self.wants_to_leave:
            self.say(msg.Report(leaving=(self.me.id,)))

    # -- time ----------------------------------------------------------------------------------

    def _ring(self, timer: str, number: int) -> None:
        round = self.round
        match timer:
            case "seek":
                self.seeking.seek_again()
            case "join":
                self.seeking.check_welcome()
            case "phase":
                if round is not None and round.phase != "end":
                    round.give_up(self.me.id)
                    self._check_answers()
            case "end":
                if round is not None and round.phase == "end":
                    self.ending.acknowledge(round)
            case _:
                self.leading.ring(timer, number)
