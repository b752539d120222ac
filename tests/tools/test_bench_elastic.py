"""What the benchmark of elastic jobs counts, and that pieces of it add up."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.elastic import bench
from tools.elastic.bench import main, merge
from tools.elastic.diary import Diary, Entered, Writer
from tools.elastic.faults import list_cells, make_plan
from tools.elastic.injection import Fault
from tools.elastic.jobs import Job, JobFailedError, Outcome, _check_woken
from tools.elastic.matrix import Found, list_settings, percentile
from tools.elastic.ranks import Lease
from tools.elastic.scenarios import describe_cycles
from tools.elastic.virtual import EVENTS, describe_virtual, measure
from zorselike.elastic.contract import Generation


def make_diary(member: int, first: int, last: int, *, generation: int = 1, at_s: float = 0.0) -> Diary:
    """Of a process that has done these steps, a second each."""
    diary = Diary(member, 100 + member, f"id{member}", ran={generation})
    diary.entered = [Entered(generation, at_s, "loss", False, ("id0", "id1"))]
    for step in range(first, last):
        diary.finished.append((step + 1, at_s + step, generation))
        diary.losses.append((step, at_s + step, 1.0 / (step + 1)))
    return diary


def make_outcome(*diaries: Diary, happened: tuple[tuple[float, int, str, int], ...] = ()) -> Outcome:
    return Outcome((), diaries, happened, ())  # type: ignore[arg-type]


def test_losses_of_those_who_were_lost_later_count() -> None:
    """Once every process that saw a step has been replaced, its loss was taken for never seen."""
    outcome = make_outcome(make_diary(0, 0, 3), make_diary(1, 3, 6, generation=2))
    expected = [1.0 / (step + 1) for step in range(6)]
    assert outcome.find_error(expected) == 0.0
    assert outcome.find_error([*expected[:2], 0.0, *expected[3:]]) == pytest.approx(1 / 3)
    with pytest.raises(JobFailedError, match=r"losses of steps \[6\]"):
        outcome.find_error([*expected, 0.1])


def test_a_loss_that_one_process_alone_saw_otherwise_is_found() -> None:
    other = make_diary(1, 0, 3)
    other.losses[1] = (1, 1.0, 7.0)
    assert make_outcome(make_diary(0, 0, 3), other).find_error([1.0, 0.5, 1 / 3]) == 6.5


def test_a_recovery_lasts_until_the_slowest_survivor_has_done_a_step() -> None:
    first, second = make_diary(0, 0, 3), make_diary(1, 0, 3)
    first.finished += [(4, 5.0, 2)]
    second.finished += [(4, 6.5, 2)]
    outcome = make_outcome(first, second, make_diary(2, 0, 3), happened=((2.5, 102, "kill", 0),))
    assert outcome.recoveries() == [4.0]


def test_a_generation_begins_with_the_state_of_its_source_and_no_other() -> None:
    """A step that was lost before it was mirrored, and was done again by another plan, is no source."""
    diary = make_diary(0, 0, 3)
    diary.entered += [
        Entered(2, 3.0, "loss", False, ("id0",), (1, 2)),
        Entered(3, 4.0, "loss", False, (), (2, 3)),
    ]
    sums = [(1, 2, 0, 2, 5), (1, 2, 1, 2, 6), (1, 3, 0, 2, 7), (1, 3, 1, 2, 8)]  # Step 3 was lost.
    again = [(2, 2, 0, 1, 11), (2, 3, 0, 1, 99), (3, 3, 0, 1, 99)]
    job = replace(make_outcome(diary), sums=(*sums, *again))  # type: ignore[arg-type]
    assert job.check_states() == 2
    other = [(2, 2, 0, 1, 11), (2, 3, 0, 1, 99), (3, 3, 0, 1, 15)]
    with pytest.raises(
        JobFailedError, match="generation 3 does not begin with the state that generation 2 had"
    ):
        replace(job, sums=(*sums, *other)).check_states()  # type: ignore[arg-type]


def test_who_trains_after_it_was_gone_on_without_is_found() -> None:
    sleeper, other = make_diary(0, 0, 3), make_diary(1, 0, 3)
    sleeper.losses.append((3, 30.0, 0.25))
    _check_woken({100: 20.0}, [sleeper, other])  # It woke before anybody had gone on.
    other.entered.append(Entered(2, 25.0, "loss", False, ("id1",)))
    other.ran.add(2)
    _check_woken({100: 20.0}, [sleeper, other])
    other.entered[-1] = other.entered[-1]._replace(at_s=15.0)
    with pytest.raises(JobFailedError, match=r"member 0 was gone on without, and has done steps \[3\]"):
        _check_woken({100: 20.0}, [sleeper, other])


def test_generations_that_failed_by_themselves_are_retries() -> None:
    diaries = [make_diary(0, 0, 3), make_diary(1, 0, 3)]
    for diary in diaries:
        diary.entered.append(Entered(2, 10.0, "loss", False, ("id0", "id1")))
        diary.ran.add(3)
    killed_before = (9.0, 101, "kill", 0)  # It was not known of.
    raised_before, raised_after = (9.0, 101, "raise", 0), (11.0, 101, "raise", 0)
    elsewhere = (11.0, 105, "kill", 0)
    faults = [Fault(2, 1, "raise")]
    for fault, retries in ((killed_before, []), (raised_after, []), (raised_before, [2]), (elsewhere, [2])):
        assert make_outcome(*diaries, happened=(fault,)).retries(faults) == retries
    # As it left the generation before: the others had no word of it.
    assert (
        make_outcome(*diaries, happened=(raised_before,)).retries([Fault(2, 1, "raise", 0.5, "abandon")])
        == []
    )
    # A planned change waits for its step, and who is to leave then gives its state until it comes.
    for diary in diaries:
        diary.entered[-1] = Entered(2, 10.0, "notice", True, ("id0",), (1, 3))
    leaves, fails = (9.0, 101, "term", 0), (10.5, 101, "exit", 1)
    terms = [Fault(2, 1, "term"), Fault(3, 1, "exit")]
    assert make_outcome(*diaries, happened=(leaves,)).retries(terms) == [2]
    assert make_outcome(*diaries, happened=(leaves, fails)).retries(terms) == []
    for diary in diaries:
        diary.ran.remove(3)  # The job was done before it could run.
    assert make_outcome(*diaries, happened=(elsewhere,)).retries([Fault(2, 1, "raise")]) == []


def test_a_planned_change_costs_what_its_step_is_longer() -> None:
    diary = make_diary(0, 0, 5)
    diary.entered.append(Entered(2, 4.5, "arrival", True, ("id0",)))
    diary.finished += [(6, 6.5, 2), (7, 7.5, 2)]
    assert make_outcome(diary, make_diary(1, 0, 5)).pauses() == [("arrival", 1.5)]


def test_a_diary_is_read_as_it_was_written_but_for_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "diary3"
    writer = Writer(path, 3, "me")
    decision = {"source": None, "generation": 3}
    writer.enter(Generation(4, (), (), ("me", "you"), "", 0, "notice", decision, 7))
    writer.form(4, 0.25)
    writer.run(4)
    writer.finish(8, 4)
    writer.lose(7, 0.1)
    with path.open("a") as file:
        file.write('["loss", 1')
    diary = Diary.read(path)
    assert (diary.member, diary.id, diary.formed_s, diary.ran) == (3, "me", {4: 0.25}, {4})
    assert [(e.number, e.reason, e.is_planned, e.ids, e.source) for e in diary.entered] == [
        (4, "notice", True, ("me", "you"), (3, 7))
    ]
    assert [step for step, _, _ in diary.finished] == [8] and diary.losses[0][::2] == (7, 0.1)


def test_pieces_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = []
    for number, retries in ((1, 0), (2, 1)):
        found = Found(recoveries_s=[number, 2.0], retries=retries, largest_error=number * 1e-15, num_jobs=1)
        found.happened["fill kill"] += number
        found.cells["fill kill 0"] += 1
        found.asked["fill kill"] += number
        content = {"found": {"matrix": found.to_json(), "seconds": 2.0, "loads": [number]}}
        pieces.append(tmp_path / f"{number}.json")
        pieces[-1].write_text(json.dumps(content))
    whole = tmp_path / "whole.json"
    assert main(["--merge", *map(str, pieces), "--json", str(whole)]) == 1  # Fewer than 500, and a retry.
    figures = json.loads(whole.read_text())["figures"]
    assert (figures["faults"], figures["retries"], figures["seconds"]) == (3, 1, 4.0)
    assert figures["recovery_median_s"] == 2.0 and figures["largest_error"] == pytest.approx(2e-5)
    assert "fill kill           3 of 3" in capsys.readouterr().out
    assert merge([]) == {"seconds": 0.0, "loads": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing is asked for; give --faults, --cycles"),
        (["--merge", "no.json"], "no.json is no --json of an earlier run: [Errno 2]"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it starts from any folder, as a script."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    path = Path(bench.__file__)
    ended = subprocess.run(
        [sys.executable, str(path), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2 and message in ended.stderr


def test_the_lease_is_of_the_newest_generation_alone(tmp_path: Path) -> None:
    """Every process held it: who woke after the others had gone on could go on, too."""
    mine, other = Lease(tmp_path), Lease(tmp_path)
    assert mine.is_held(0)
    mine.pass_on(4)
    other.pass_on(7)
    mine.pass_on(5)  # It came late.
    assert other.is_held(7) and not mine.is_held(4) and mine.is_held(8)


def test_what_grows_is_said() -> None:
    column = [50, 60, 70, *[72] * 90, *[90] * 10]
    found = {"files": column, "threads": column, "resident_mib": column}
    from tools.elastic.scenarios import _find_growth

    grown = {name: _find_growth(values) for name, values in found.items()}
    table = {**found, "grown": grown, "count": 100, "steps_lost": 0, "recoveries_s": [1.0]}
    verdicts = {figure.name: figure.is_met for figure in describe_cycles(table)}
    assert grown["files"] == 18
    assert verdicts["cycles"] and not verdicts["cycles_files_grown"]
    assert not verdicts["cycles_resident_mib_grown"]


def test_membership_in_virtual_time_is_measured() -> None:
    found = {"members": 40, "events": {event: measure(40, event) for event in EVENTS}}
    figures = {figure.name: figure for figure in describe_virtual(found)}
    assert all(figure.is_met is not False for figure in figures.values())
    assert all(1 < each["messages_a_member"] < 20 for each in found["events"].values())
    assert 39 <= figures["virtual_most_links"].value <= 41  # With a fan-out beyond that all are the leader's.


def test_the_matrix_has_every_rank_in_every_phase() -> None:
    cells = list_cells()
    assert len(set(cells)) == len(cells) == 10 * 6 * 4 + 5 * 4 + 5
    plan, num_layers = make_plan(random.Random(0), (2, 2))
    assert any(name.startswith("ZeRO") for name in list_settings(Job(plan, num_layers, 1)))
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([1.0], 0.95) == 1.0
