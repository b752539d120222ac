"""A job's members in virtual time: real membership machines, simulated links, processes and training threads.

Links keep the order of messages and delay them. A killed process is seen as dead by whoever can reach its
node; one that sleeps, or is cut off, falls silent. `check` holds after every event.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from zorselike.elastic.contract import Generation, Member
from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.machine import Membership
from zorselike.elastic.membership.round import Settings

Decide = Callable[["Process", e.AskDecision], e.Event]
UNREACHED_S = 0.001


@dataclass
class Process:
    """One member's process."""

    machine: Membership
    is_alive: bool = True
    is_asleep: bool = False
    slept_s: float = 0.0
    side: int = 0
    inbox: list[e.Event] = field(default_factory=list)
    links: set[str] = field(default_factory=set)
    most_links: int = 0
    opening: dict[str, list[msg.Message]] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)
    generation: Generation | None = None
    has_formed: bool = False
    runs: bool = False
    step: int = 0
    gate: int | None = None
    gate_step: int | None = None
    is_held: bool = False
    interrupts: int = 0
    over: str | None = None

    @property
    def id(self) -> str:
        return self.machine.me.id


def decide_all(process: Process, ask: e.AskDecision) -> e.Event:
    """Everybody who stays is a rank."""
    leaving = {member.id for member in ask.request.leaving}
    ranks = tuple(id for id in ask.request.offers if id not in leaving)
    return e.Decided(ask.number, ask.attempt, ranks, {"number": ask.number})


class Job:
    """All processes, the links between them, and a clock that jumps from event to event."""

    def __init__(
        self,
        num_members: int,
        *,
        settings: Settings | None = None,
        seed: int = 0,
        latency_s: float = 0.05,
        work_s: float = 0.0,
        decide: Decide = decide_all,
        holds_lease: bool | None = None,
        step_s: float = 0.2,
    ) -> None:
        self.rng = random.Random(seed)
        self.settings = settings or Settings()
        self.now = 0.0
        self.latency_s, self.work_s, self.step_s = latency_s, work_s, step_s
        self.decide, self.holds_lease = decide, holds_lease
        self.processes: dict[str, Process] = {}
        self.num_messages = 0
        self.kinds: Counter[str] = Counter()
        self.ran: dict[int, Generation] = {}
        self.is_checked = num_members <= 64
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrives: dict[tuple[str, str], float] = {}
        self._names = itertools.count()
        self._late: list[Callable[[], bool]] = []
        founder = self.add()
        self.tell(founder, e.Found(num_members))
        for _ in range(num_members - 1):
            self.arrive(founder.id)

    # -- clock ---------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def run(self, for_s: float | None = None, *, max_events: int = 100_000) -> None:
        """Until nothing is left to happen, or for so long."""
        until = None if for_s is None else self.now + for_s
        for _ in range(max_events):
            if not self._queue or (until is not None and self._queue[0][0] > until):
                if until is not None:
                    self.now = until
                return
            self.now, _, action = heapq.heappop(self._queue)
            action()
        raise AssertionError(f"never settles: {self.describe()}")

    # -- processes -----------------------------------------------------------------------------

    def add(self) -> Process:
        name = f"m{next(self._names)}"
        member = Member(name, -1, "host", 1, f"node-{name}", 0, "cpu", 0)
        process = self.processes[name] = Process(Membership(member, self.settings))
        return process

    def arrive(self, contact: str) -> Process:
        process = self.add()
        self._do(process, e.Open(self.processes[contact].machine.me))
        return process

    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if process.is_alive and process.over is None]

    def kill(self, id: str) -> None:
        process = self.processes[id]
        if not process.is_alive:
            return
        process.is_alive = False
        self._leave(process)
        for peer in sorted(process.links):
            self._break(peer, id)

    def _break(self, id: str, dead: str) -> None:
        """A process sees that another one ended: soon, or silence if the network hides it."""
        process = self.processes[id]

        def look() -> None:
            if dead not in process.links:
                return
            if process.side == self.processes[dead].side:
                process.links.discard(dead)
                self.tell(process, e.Dead(msg.Gone(dead)))

        after_s = self._arrives.get((dead, id), 0.0) - self.now  # What it sent before comes first.
        self.at(max(self._delay(), after_s), look)

    def sleep(self, id: str) -> None:
        process = self.processes[id]
        if process.is_alive and not process.is_asleep:
            process.is_asleep, process.slept_s = True, self.now
            self._watch_silence(process)

    def wake(self, id: str) -> None:
        process = self.processes[id]
        if not process.is_alive or not process.is_asleep:
            return
        process.is_asleep = False
        inbox, process.inbox = process.inbox, []
        if self.now - process.slept_s > self.settings.silence_s / 2:
            self.tell(process, e.Slept())
        for event in inbox:
            self.tell(process, event)
        self._retry()

    def cut(self, ids: set[str]) -> None:
        """A network without links between these and the others."""
        for process in self.processes.values():
            process.side = int(process.id in ids)
        for process in list(self.processes.values()):
            self._watch_silence(process)

    def heal(self) -> None:
        for process in self.processes.values():
            process.side = 0
        for process in self.processes.values():
            if process.is_alive:
                for peer in sorted(process.links):
                    if not self.processes[peer].is_alive or self.processes[peer].over is not None:
                        self._break(process.id, peer)
        self._retry()

    def reaches(self, one: str, other: str) -> bool:
        first, second = self.processes[one], self.processes[other]
        return (
            first.side == second.side
            and first.is_alive
            and second.is_alive
            and not (first.is_asleep or second.is_asleep)
        )

    def _watch_silence(self, process: Process) -> None:
        """Tells both ends of each link that is broken from now on, if it stays so."""
        for peer in sorted(process.links):
            for id, other in ((process.id, peer), (peer, process.id)):
                if not self.reaches(id, other):
                    jitter = self.rng.uniform(0, 0.2)
                    self.at(
                        self.settings.silence_s / 2 + jitter, lambda a=id, b=other: self._fall(a, b, e.Quiet)
                    )
                    self.at(
                        self.settings.silence_s + jitter, lambda a=id, b=other: self._fall(a, b, e.Silent)
                    )

    def _fall(self, id: str, other: str, kind: type[e.Quiet] | type[e.Silent]) -> None:
        process = self.processes[id]
        if other not in process.links or self.reaches(id, other) or not process.is_alive:
            return
        if process.is_asleep:
            return  # It notices when it wakes: see `_retry`.
        if kind is e.Silent:
            process.links.discard(other)
            self._late.append(lambda: self._notice(other, id))
        self.tell(process, kind(other))

    def _notice(self, id: str, other: str) -> bool:
        """The far end of a link that was given up notices once it can; whether it has."""
        process = self.processes[id]
        if not process.is_alive or process.over is not None or process.is_asleep:
            return not process.is_asleep
        if other in process.links:
            process.links.discard(other)
            there = self.processes[other]
            if process.side != there.side or there.is_asleep:
                self.tell(process, e.Silent(other))
            elif not there.is_alive or there.over is not None:
                self.tell(process, e.Dead(msg.Gone(other)))
            else:
                process.links.add(other)
                there.links.add(id)
                self.tell(there, e.Opened(process.machine.me))
                self.tell(process, e.Relinked(other))
        return True

    def _retry(self) -> None:
        for process in list(self.processes.values()):
            for peer in sorted(process.opening):
                self.at(self._delay(), lambda p=process, q=peer: self._connect(p, q))
        for process in list(self.processes.values()):
            for peer in sorted(process.links):
                if self.reaches(process.id, peer):
                    self.at(2 * self._delay(), lambda p=process, q=peer: self._hear(p, q))
        self._late = [look for look in self._late if not look()]

    def _hear(self, process: Process, peer: str) -> None:
        if peer in process.links and self.reaches(process.id, peer):
            self.tell(process, e.Heard(peer))

    def _delay(self) -> float:
        return self.latency_s * self.rng.uniform(0.5, 1.0)

    # -- events and effects --------------------------------------------------------------------

    def tell(self, process: Process, event: e.Event) -> None:
        if not process.is_alive or process.over is not None:
            return
        if process.is_asleep:
            process.inbox.append(event)
            return
        for effect in process.machine.handle(event):
            self._do(process, effect)
        if self.is_checked:
            self.check()

    def _do(self, process: Process, effect: e.Effect) -> None:
        id = process.id
        match effect:
            case e.Send(to, message):
                if to in process.opening:
                    process.opening[to].append(message)
                elif to in process.links:
                    self._carry(id, to, message)
            case e.Open(member):
                if member.id in process.links:
                    self.tell(process, e.Opened(self.processes[member.id].machine.me))
                else:
                    process.opening.setdefault(member.id, [])
                    self.at(2 * self._delay(), lambda: self._connect(process, member.id))
                    self.at(self.settings.silence_s, lambda: self._miss(process, member.id))
            case e.Close(peer):
                if peer in process.links:
                    process.links.discard(peer)
                    self._carry(id, peer, None)
            case e.SetTimer(timer, number, delay_s):
                process.timers[timer] = token = next(self._order)
                self.at(delay_s, lambda: self._ring(process, timer, number, token))
            case e.AskOffer(number):
                self._later(process, lambda: e.Offered(number, {"step": process.step}))
            case e.AskDecision():
                self._later(process, lambda: self.decide(process, effect))
            case e.AskPrepare(number, attempt, _, _, keeps):
                self._later(process, lambda: self._prepare(process, number, attempt, keeps))
            case e.AskLease(number):
                self._later(process, lambda: e.Lease(number, self.holds_lease))
            case e.Gate(number, attempt, step):
                past = process.step if process.runs and process.step >= step else -1
                process.gate_step = None if past >= 0 else step
                self.tell(process, e.Gated(number, attempt, past))
            case e.Ungate():
                process.gate_step = None
            case e.Hold(holds):
                process.is_held = holds
            case e.Interrupt():
                process.interrupts += 1
                self._leave(process)
            case e.Deliver(generation):
                self._deliver(process, generation)
            case e.ReleaseFormed(number):
                self._later(process, lambda: e.Filled(number))
            case e.ReleaseFilled(number):
                self._begin(process, number)
            case e.Over(reason):
                process.over = reason
                self._leave(process)
                for peer in sorted(process.links):
                    self._break(peer, id)
            case _:
                raise AssertionError(effect)
        process.most_links = max(process.most_links, len(process.links))

    def _prepare(self, process: Process, number: int, attempt: int, keeps: bool) -> e.Event:
        host, port = ("store", 1) if keeps else ("", 0)
        return e.Prepared(number, attempt, process.step if process.runs else -1, host, port)

    def _later(self, process: Process, make: Callable[[], e.Event]) -> None:
        delay_s = self.work_s * self.rng.random()
        if delay_s:
            self.at(delay_s, lambda: self.tell(process, make()))
        else:
            self.at(0, lambda: self.tell(process, make()))

    def _carry(self, sender: str, to: str, message: msg.Message | None) -> None:
        """In order; across a cut or to a sleeper once it is over, unless the link was given up before."""
        self.num_messages += 1
        self.kinds[type(message).__name__] += 1
        arrives = max(self._arrives.get((sender, to), 0.0), self.now + self._delay())
        self._arrives[sender, to] = arrives
        self.at(arrives - self.now, lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: str, to: str, message: msg.Message | None) -> None:
        process = self.processes[to]
        if self.processes[sender].side != process.side:
            self._late.append(lambda: self._arrive_late(sender, to, message))
        elif message is None:
            if sender in process.links:
                process.links.discard(sender)
                self.tell(process, e.Closed(sender))
        elif sender in process.links or process.is_asleep:
            self.tell(process, e.Received(sender, message))

    def _arrive_late(self, sender: str, to: str, message: msg.Message | None) -> bool:
        if self.processes[sender].side != self.processes[to].side:
            return False
        if sender in self.processes[to].links and self.processes[sender].is_alive:
            self._arrive(sender, to, message)
        return True

    def _connect(self, process: Process, peer: str) -> None:
        other = self.processes[peer]
        is_there = process.is_alive and not process.is_asleep and process.over is None
        if peer not in process.opening or not is_there:
            return
        if process.side != other.side or (other.is_alive and other.is_asleep):
            return
        messages = process.opening.pop(peer)
        if not other.is_alive or other.over is not None:
            self.tell(process, e.Dead(msg.Gone(peer)))
            return
        process.links.add(peer)
        other.links.add(process.id)
        other.most_links = max(other.most_links, len(other.links))
        mine = other.opening.pop(process.id, [])
        self.tell(process, e.Opened(other.machine.me))
        self.tell(other, e.Opened(process.machine.me))
        for message in messages:
            self._carry(process.id, peer, message)
        for message in mine:
            self._carry(peer, process.id, message)

    def _miss(self, process: Process, peer: str) -> None:
        if peer in process.opening and not process.is_asleep:
            del process.opening[peer]
            self.tell(process, e.Silent(peer))

    def _ring(self, process: Process, timer: str, number: int, token: int) -> None:
        if process.timers.get(timer) == token:
            self.tell(process, e.Rang(timer, number))

    # -- the thread that trains ----------------------------------------------------------------

    def _deliver(self, process: Process, generation: Generation) -> None:
        if process.runs and generation.after_step is not None:
            assert process.step <= generation.after_step, "trained past the boundary"
            assert process.gate_step == generation.after_step
            process.step = generation.after_step
        self._leave(process)
        process.generation, process.gate_step = generation, None
        self._later(process, lambda: e.Formed(generation.number))

    def _begin(self, process: Process, number: int) -> None:
        assert process.generation is not None and process.generation.number == number
        known = self.ran.setdefault(number, process.generation)
        assert known == process.generation, f"generation {number} is two: {known} {process.generation}"
        process.runs = True
        if process.generation.after_step is not None:
            process.step = max(process.step, process.generation.after_step)
        if self.step_s:
            self.at(self.step_s, lambda: self._step(process, number))

    def _step(self, process: Process, number: int) -> None:
        """One step of a generation, while it runs."""
        is_current = process.generation is not None and process.generation.number == number
        if not process.runs or not is_current or process.step > 60:
            return
        if (
            not process.is_asleep
            and not process.is_held
            and (process.gate_step is None or process.step < process.gate_step)
        ):
            process.step += 1
        self.at(self.step_s * self.rng.uniform(0.9, 1.1), lambda: self._step(process, number))

    def _leave(self, process: Process) -> None:
        process.runs = False

    # -- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        """At most one generation has all its ranks free to train."""
        free: Counter[int] = Counter()
        for process in self.processes.values():
            generation = process.generation
            if process.runs and not process.is_asleep and not process.is_held and generation is not None:
                free[generation.number] += process.id in generation.ranks
        complete = [number for number, num in free.items() if num == len(self.ran[number].ranks)]
        assert len(complete) <= 1, f"two sides run: {[self.ran[number] for number in complete]}"

    def check_settled(self) -> None:
        """All who live run the same generation, or wait for it as arrivals, or are told why not."""
        numbers = {p.machine.committed.number for p in self.living() if p.runs and p.machine.committed}
        assert len(numbers) <= 1, self.describe()
        for process in self.living():
            is_waiting = process.machine.book is None or process.id not in process.machine.book
            assert process.runs or (is_waiting and numbers), self.describe()
        for process in self.processes.values():
            assert process.over != ""

    def describe(self) -> str:
        lines = []
        for process in list(self.processes.values())[:20]:
            machine, round = process.machine, process.machine.round
            phase = round and (round.number, round.phase, sorted(round.awaited))
            lines += [
                f"{process.id} #{machine.me.number} {process.is_alive=} {process.is_asleep=} {process.over=}",
                f"  {process.runs=} {process.is_held=} {machine.committed and machine.committed.number=}",
                f"  agreed={[roster.number for roster in machine.agreed]} {machine.promised=} {phase=}",
                f"  {machine.leader=} {machine.leading.stage=}",
                f"  {machine.dead=} {machine.silent=} {process.links=}",
            ]
        return "\n".join(lines)
