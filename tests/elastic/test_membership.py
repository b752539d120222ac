"""Membership alone, in virtual time: random orders of everything that can happen."""

from __future__ import annotations

import random

import pytest
import volume
from simulated_members import Job, Process, decide_all

from zorselike.elastic.membership import events as e
from zorselike.elastic.membership import messages as msg
from zorselike.elastic.membership.roster import Roster
from zorselike.elastic.membership.round import Settings

CASES_PER_BLOCK = 200


def decide_somehow(rng: random.Random) -> object:
    """All kinds of answers: a part of the members, none, no change."""

    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        chance = rng.random()
        if chance < 0.1 and ask.request.reason in ("arrival", "change"):
            return e.Kept(ask.number, ask.attempt)
        if chance < 0.02:
            return e.Undecided(ask.number, ask.attempt, "no plan")
        event = decide_all(process, ask)
        if isinstance(event, e.Decided) and chance < 0.4:
            ranks = event.ranks[: rng.randint(1, len(event.ranks))]
            return e.Decided(ask.number, ask.attempt, ranks, event.decision)
        return event

    return decide


def disturb(job: Job, rng: random.Random) -> None:
    """One thing that can happen."""
    living = [process.id for process in job.living()]
    if not living:
        return
    id = rng.choice(living)
    process = job.processes[id]
    kinds = "kill kill kill_two kill_leader sleep wake cut heal leave arrive change fail lost"
    match rng.choice(kinds.split()):
        case "kill":
            job.kill(id)
        case "kill_two":
            for each in rng.sample(living, min(2, len(living))):
                job.kill(each)
        case "kill_leader":
            if process.machine.leader in job.processes:
                job.kill(process.machine.leader)
        case "sleep":
            job.sleep(id)
        case "wake":
            for each in living:
                job.wake(each)
        case "cut":
            job.cut(set(rng.sample(living, rng.randint(0, len(living)))))
        case "heal":
            job.heal()
        case "leave":
            job.tell(process, e.Leave(id))
        case "arrive":
            job.arrive(id)
        case "change":
            job.tell(process, e.Change())
        case "fail":
            if process.runs and not process.is_asleep:
                job.tell(process, e.Failed("it broke", process.step))
        case "lost":
            if process.runs and process.generation is not None and not process.is_asleep:
                other = rng.choice(process.generation.ranks)
                if other != id and not job.reaches(id, other):
                    job.tell(process, e.Lost((other,)))


def play(seed: str) -> Job:
    rng = random.Random(seed)
    settings = Settings(fan_out=rng.choice([2, 3, 128]), silence_s=4.0, phase_limit_s=200, start_limit_s=60)
    job = Job(
        rng.randint(1, 9),
        settings=settings,
        seed=rng.randrange(1 << 30),
        latency_s=rng.choice([0.001, 0.05]),
        work_s=rng.choice([0.0, 0.1, 3.0]),
        decide=decide_somehow(rng),
    )
    job.run(rng.choice([0.0, 0.1, 3.0]))
    for _ in range(rng.randint(1, 8)):
        disturb(job, rng)
        job.run(rng.choice([0.0, 0.01, 0.05, 0.1, 0.3, 1.0, 3.0, 6.0]))
    job.heal()
    for process in job.living():
        job.wake(process.id)
    job.run()
    job.check_settled()
    return job


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(10))
def test_it_settles_and_never_two_sides_go_on(block: int) -> None:
    for seed in volume.part(range(CASES_PER_BLOCK)):
        try:
            play(f"{block}/{seed}")
        except Exception as error:
            error.add_note(f"seed {block}/{seed}")
            raise


# -- one thing at a time -----------------------------------------------------------------------


def start(num_members: int, *, seed: int = 0, **options: object) -> Job:
    job = Job(num_members, seed=seed, **options)  # type: ignore[arg-type]
    job.run(5)
    assert list(job.ran) == [1] and len(job.living()) == num_members
    return job


def runs_with(job: Job, *ids: str) -> bool:
    """Whether these and no others run the same generation."""
    running = [process for process in job.living() if process.runs and not process.is_asleep]
    numbers = {process.generation.number for process in running if process.generation}
    return sorted(process.id for process in running) == sorted(ids) and len(numbers) == 1


def test_two_losses_at_once_the_leader_among_them() -> None:
    job = start(5)
    job.kill("m0")
    job.kill(job.processes["m1"].machine.committed.members[1].id)  # Who would lead next.
    job.run(5)
    assert runs_with(job, *(process.id for process in job.living())) and len(job.living()) == 3


def test_a_pair_goes_on_alone_when_the_other_has_certainly_ended() -> None:
    job = start(2)
    job.kill("m0")
    job.run(3)
    assert runs_with(job, "m1")
    assert job.processes["m1"].interrupts == 1


@pytest.mark.parametrize("asleep", ["m0", "m2"])
def test_a_sleeper_is_expelled_and_told_so_when_it_wakes(asleep: str) -> None:
    job = start(3)
    job.sleep(asleep)
    job.run(30)
    others = [id for id in ("m0", "m1", "m2") if id != asleep]
    assert runs_with(job, *others)
    job.wake(asleep)
    job.run()
    assert "gone on without" in str(job.processes[asleep].over)
    assert runs_with(job, *others)


def test_a_sleeper_is_told_though_its_link_was_given_up_before() -> None:
    """The alarm may hold it for lost while the link still stands: what it says must not stay unanswered."""
    job = start(3)
    job.sleep("m2")
    job.run(30)
    machine = job.processes["m1"].machine
    assert not machine.is_member("m2") and "m2" not in machine.linked
    sleeper = job.processes["m2"].machine
    book = Roster(2, tuple(sorted(sleeper.committed.members, key=lambda member: member.id != "m2")))
    for call in (msg.Meet(2, "loss", True, 1, book, (), ()), msg.Seek(1, (), ()), msg.Still(1, asks=True)):
        (answer,) = machine.handle(e.Received("m2", call))
        assert isinstance(answer, e.Send) and answer.to == "m2"
        assert isinstance(answer.message, msg.Expel) and "gone on without" in answer.message.reason


@pytest.mark.parametrize("num_cut", [1, 2, 3])
def test_one_side_of_a_partition_goes_on_and_the_other_says_why_not(num_cut: int) -> None:
    job = start(5)
    cut = {member.id for member in job.processes["m0"].machine.committed.members[-num_cut:]}
    rest = set(job.processes) - cut
    job.cut(cut)
    job.run(60)
    goes_on, ends = (rest, cut) if num_cut < 3 else (cut, rest)
    assert runs_with(job, *goes_on)
    for id in ends:
        assert "this side ends, so that never two go on" in str(job.processes[id].over)


def test_of_two_halves_the_one_with_the_first_member_goes_on() -> None:
    job = start(4)
    half = {"m0", job.processes["m0"].machine.committed.members[3].id}
    job.cut(half)
    job.run(60)
    assert runs_with(job, *half)


def test_a_minority_that_holds_the_lease_goes_on() -> None:
    job = start(3, holds_lease=True)
    job.cut({"m1", "m2"})
    for id in ("m1", "m2"):
        job.kill(id)
    job.run(60)
    assert runs_with(job, "m0")


def test_a_majority_that_does_not_hold_the_lease_any_more_ends() -> None:
    """It slept, perhaps, while a minority went on that had the lease then."""
    job = start(2, holds_lease=False)
    job.sleep("m1")
    job.run(60)
    assert "this side ends" in str(job.processes["m0"].over)


def test_in_doubt_a_nanny_s_word_that_the_dead_were_of_this_generation_is_enough() -> None:
    """Whoever was out of touch does not know whether the dead had gone on without it before they died."""
    for word in (False, True):
        job = start(2)
        job.sleep("m0")
        job.run(job.settings.silence_s * 0.7)  # The other is in doubt by now.
        job.kill("m0")
        job.run(0.2)
        if word:
            job.tell(job.processes["m1"], e.Dead(msg.Gone("m0", 1)))
        job.run(30)
        if word:
            assert runs_with(job, "m1")
        else:
            assert "this side ends" in str(job.processes["m1"].over)


def test_who_has_finished_was_of_the_generation_that_it_says() -> None:
    """Not of that of whoever hears it, perhaps long afterwards."""
    job = start(2)
    machine = job.processes["m1"].machine
    machine.handle(e.Received("m0", msg.Bye(7)))
    assert machine.committed.number == 1 and machine.dead == {"m0": 7}


def test_doubt_outlasts_the_link_that_it_came_by() -> None:
    job = start(2)
    job.sleep("m1")
    job.run(job.settings.silence_s * 3)  # The other goes on alone, and ends.
    job.kill("m0")
    process = job.processes["m1"]
    process.is_asleep, process.inbox = False, []
    for event in (e.Slept(), e.Closed("m0"), e.Dead(msg.Gone("m0"))):
        job.tell(process, event)
    job.run(60)
    assert "this side ends" in str(process.over)


def test_who_leaves_gives_what_it_has_and_goes_at_a_step_s_end() -> None:
    for leaving in ("m0", "m2"):  # The leader too.
        job = start(3)
        job.tell(job.processes[leaving], e.Leave(leaving))
        job.run(5)
        others = [id for id in ("m0", "m1", "m2") if id != leaving]
        assert runs_with(job, *others)
        last = job.ran[max(job.ran)]
        assert [member.id for member in last.leaving] == [leaving] and last.reason == "notice"
        assert last.after_step is not None and all(job.processes[id].interrupts == 0 for id in others)
        assert "left the job, as it said" in str(job.processes[leaving].over)


def test_an_arrival_that_is_not_needed_waits_and_is_there_after_a_loss() -> None:
    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        if ask.request.reason == "arrival":
            return e.Kept(ask.number, ask.attempt)
        return decide_all(process, ask)

    job = start(3, decide=decide)
    spare = job.arrive("m1").id  # Not the leader, which it is told of.
    job.run(5)
    assert list(job.ran) == [1] and runs_with(job, "m0", "m1", "m2")
    job.kill("m2")
    job.run(5)
    assert runs_with(job, "m0", "m1", spare)


def test_who_comes_as_all_others_are_lost_is_told_that_the_job_has_run() -> None:
    requests = []

    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        requests.append(ask.request)
        return decide_all(process, ask)

    job = start(1, decide=decide)
    arrival = job.arrive("m0").id
    while len(requests) == 1:
        job.run(0.01)
    job.kill("m0")
    job.run(5)
    assert runs_with(job, arrival)
    first, *_, last = requests
    assert not first.has_run and last.has_run
    assert last.reason == "loss" and last.arrived == last.members


@pytest.mark.parametrize("after_s", [0.0, 3.0, 5.0])
def test_an_arrival_that_is_sent_to_a_leader_that_has_hung_joins_who_goes_on(after_s: float) -> None:
    job = start(3, settings=Settings(silence_s=4.0))
    job.sleep("m0")
    job.run(after_s)
    arrival = job.arrive("m2").id
    job.run(30)
    assert runs_with(job, "m1", "m2", arrival)


def test_a_spare_is_taken_in_at_once_when_the_leader_that_knew_it_is_lost() -> None:
    """Whoever it asks first who leads next."""

    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        if ask.request.reason == "arrival" and len(ask.request.offers) == 4:
            return e.Kept(ask.number, ask.attempt)
        return decide_all(process, ask)

    for seed in range(20):
        job = start(3, seed=seed, decide=decide, settings=Settings(silence_s=60.0))
        spare = job.arrive("m0").id
        job.run(5)
        job.kill("m0")
        job.run(3)
        assert runs_with(job, "m1", "m2", spare), seed


@pytest.mark.parametrize("refusing", [("m1",), ("m1", "m0")])
def test_refused_decisions_are_made_again_and_in_the_end_given_up(refusing: tuple[str, ...]) -> None:
    asked = []

    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        asked.append(ask.request)
        return decide_all(process, ask)

    job = start(2, decide=decide)
    prepare = job._prepare
    job._prepare = lambda process, number, attempt, keeps: (  # type: ignore[method-assign]
        e.Refused(number, attempt, "no room")
        if process.id in refusing
        else prepare(process, number, attempt, keeps)
    )
    del asked[:]
    job.tell(job.processes["m0"], e.Change())
    job.run(30)
    assert list(job.ran) == [1] and runs_with(job, "m0", "m1")  # It may as well stay as it is.
    assert [len(request.refused) for request in asked] == list(range(job.settings.num_attempts))
    assert "no room" in asked[-1].refused[0]
    assert [{*ids} for ids in asked[-1].refusing] == [{*refusing}] * len(asked[-1].refused)
    job.arrive("m0")
    job.tell(job.processes["m1"], e.Failed("it broke", 3))
    job.run(60)
    for process in list(job.processes.values())[:2]:
        assert "every decision was refused: node-m" in str(process.over)
        assert "local rank 0: no room" in str(process.over)


def test_the_same_failure_at_the_same_step_again_ends_the_job_with_its_reason() -> None:
    failed = []

    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        failed.append(dict(ask.request.failed))
        return decide_all(process, ask)

    job = start(3, decide=decide)
    for reason, step in (("out of memory", 7), ("out of memory", 8), ("something else", 8)):
        job.tell(job.processes["m1"], e.Failed(reason, step))
        job.run(5)
        assert runs_with(job, "m0", "m1", "m2") and failed[-1] == {"m1": reason}
    job.tell(job.processes["m1"], e.Failed("out of memory", 8))
    job.run(5)
    for process in job.processes.values():
        assert process.over == "node-m1 local rank 0 failed twice at step 8: out of memory"


def test_what_may_recur_ends_nothing_however_often_it_does() -> None:
    job = start(3)
    for _ in range(4):
        job.tell(job.processes["m1"], e.Failed("out of memory", 7, may_recur=True))
        job.run(5)
        assert runs_with(job, "m0", "m1", "m2")


def test_a_failed_decision_ends_the_job_with_its_reason_on_every_member() -> None:
    def decide(process: Process, ask: e.AskDecision) -> e.Event:
        if ask.request.reason == "loss":
            return e.Undecided(ask.number, ask.attempt, "nobody holds the state of layers.3")
        return decide_all(process, ask)

    job = start(12, decide=decide, settings=Settings(fan_out=2))
    job.kill("m0")
    job.run()
    assert {process.over for process in job.processes.values() if process.is_alive} == {
        "nobody holds the state of layers.3"
    }


def test_who_never_gets_ready_is_left_behind() -> None:
    job = start(4)
    later = job._later

    def never(process: Process, make: object) -> None:
        if process.id != "m2" or process.generation is None or process.generation.number == 1:
            later(process, make)  # type: ignore[arg-type]

    job._later = never  # type: ignore[method-assign]
    job.kill("m3")
    job.run(2 * job.settings.phase_limit_s + 60)
    assert runs_with(job, "m0", "m1")


@pytest.mark.parametrize("event", ["loss of the leader", "loss of a relay", "arrival", "leader leaves"])
def test_many_members_settle_in_two_seconds_over_links_of_50_ms(event: str) -> None:
    """Messages are linear in the members, nobody has more connections than a tree needs. (10,000 of them with
    `--nightly`, a fan-out of 128.)"""
    num, fan_out = (10_000, 128) if volume.is_full() else (300, 18)
    settings = Settings(fan_out=fan_out)
    job = Job(num, settings=settings, latency_s=0.05, step_s=0.0)
    job.rng = Longest()
    job.run(10, max_events=10**7)
    by_number = sorted(job.processes.values(), key=lambda process: process.machine.me.number)
    assert all(process.runs for process in by_number)
    for process in by_number:
        process.most_links = len(process.links)
    before = job.num_messages
    match event:
        case "loss of the leader":
            job.kill(by_number[0].id)
        case "loss of a relay":
            job.kill(by_number[3].id)
        case "arrival":
            job.arrive(by_number[0].id)
        case "leader leaves":
            job.tell(by_number[0], e.Leave(by_number[0].id))
    job.run(2.0, max_events=10**7)
    living = job.living()
    assert len(living) == num + (1 if event == "arrival" else -1)
    assert all(process.runs and process.generation.number > 1 for process in living if process.generation)
    assert job.num_messages - before < 14 * num
    assert max(process.most_links for process in living) <= 3 * fan_out


class Longest(random.Random):
    """Every delay is as long as it can be."""

    def uniform(self, a: float, b: float) -> float:
        return b
