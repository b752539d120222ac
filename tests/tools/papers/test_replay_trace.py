"""A job along a trace of availability: periods, what is planned in each, and the sums."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from made_up_sailor import NUM_LAYERS, write, write_library
from paper_data import DATA, needs_data

from tools.papers.replay_trace import A100, V100, Event, Period, Policy, Replay, read_trace, replay
from tools.papers.sailor.arithmetic import SailorArithmetic, SailorFigures, SailorPlan, SailorStage
from tools.papers.sailor.cases import Planned, lay_even_mesh
from tools.papers.sailor.library import Library
from tools.papers.sailor.links import Place
from tools.papers.sailor.pipelines import Quotas
from zorselike.errors import ConfigError, ProfileError

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "papers" / "replay_trace.py"
ZONE = "us-central1-a"


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return write_library(tmp_path, zones=(ZONE,))


@pytest.fixture
def arithmetic(library: Library) -> SailorArithmetic:
    return SailorArithmetic(library, "Tiny", (A100, V100))


def test_entries_of_as_many_gpus_are_one_period(tmp_path: Path) -> None:
    entries = [(0, 4), (63, 4), (126, 2), (189, 4), (252, 4)]
    write(tmp_path / "trace.json", [{"Time": time, "GPUs": gpus} for time, gpus in entries])
    found = read_trace(tmp_path / "trace.json")
    assert found == (Period(0, 126, 4), Period(126, 189, 2), Period(189, 252, 4))


def test_a_change_at_the_end_has_no_length(tmp_path: Path) -> None:
    write(tmp_path / "trace.json", [{"Time": 0.0, "GPUs": 4}, {"Time": 63.0, "GPUs": 5}])
    assert read_trace(tmp_path / "trace.json") == (Period(0, 63, 4), Period(63, 63, 5))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "expected a list"),
        ([], "no entries"),
        ([{"Time": 0}], "needs a Time and GPUs"),
        ([{"Time": 5, "GPUs": 1}, {"Time": 5, "GPUs": 2}], "times must rise"),
        ([{"Time": 5, "GPUs": 1}, {"Time": 6, "GPUs": -2}], "give 0 or more"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, entries: object, message: str) -> None:
    write(tmp_path / "trace.json", entries)
    with pytest.raises(ProfileError, match=f"trace.json.*{message}"):
        read_trace(tmp_path / "trace.json")


TRACE = (Period(0, 100, 4), Period(100, 300, 1), Period(300, 400, 3))


def test_ours_is_never_slower_than_simpler_ways(arithmetic: SailorArithmetic) -> None:
    found = replay("t", TRACE, arithmetic, num_v100=3)
    assert found.policies == ("ours", "cheaper", "A100 alone", "V100 alone", "even mesh", "never replanned")
    for event in found.events:
        ours = event.planned["ours"]
        assert ours is not None and ours.figures.fits
        assert ours.num_gpus <= event.period.num_gpus + 3
        for policy in found.policies:
            other = event.planned[policy]
            assert other is None or other.figures.throughput <= ours.figures.throughput * (1 + 1e-9)
        cheaper = event.planned["cheaper"]
        assert cheaper is not None and cheaper.dollars <= ours.dollars * (1 + 1e-9)
        assert cheaper.figures.throughput >= 0.9 * ours.figures.throughput * (1 - 1e-9)
        kept = event.planned["never replanned"]
        assert kept is not None and kept.plan.used.get(f"{A100}_{ZONE}", 0) <= 1
    assert found.events[0].planned["ours"] != found.events[1].planned["ours"]


def test_a_trace_of_one_type_has_no_others_beside_it(arithmetic: SailorArithmetic) -> None:
    assert "V100 alone" not in replay("t", TRACE, arithmetic).policies
    with pytest.raises(ConfigError, match="no GPUs at some time"):
        replay("t", (Period(0, 1, 0),), arithmetic)


def test_an_even_mesh_has_equal_stages(arithmetic: SailorArithmetic) -> None:
    quotas = Quotas({(A100, ZONE): 3, (V100, ZONE): 2})
    found = lay_even_mesh(arithmetic, quotas, 64)
    assert found is not None and found.figures.fits
    stages = found.plan.stages
    assert {(len(s.replicas), s.replicas[0].tensor_parallel) for s in stages} == {
        (found.plan.degree, stages[0].replicas[0].tensor_parallel)
    }
    sizes = [stage.stop - stage.start for stage in stages]
    assert sum(sizes) == NUM_LAYERS and max(sizes) - min(sizes) <= 1
    assert all(a.stop == b.start for a, b in pairwise(stages))
    assert all(found.plan.used.get(f"{gpu}_{zone}", 0) <= n for (gpu, zone), n in quotas.of.items())


def make_planned(throughput: float, rent: float, egress: float, rows: int) -> Planned:
    plan = SailorPlan(rows, 8, (SailorStage(0, 5, (Place(A100, ZONE, 1),)),))
    return Planned(plan, SailorFigures(1 / throughput, rent, egress, fits=True), search_s=rows / 10)


FAST, SLOW = make_planned(2.0, 0.5, 0.25, rows=1), make_planned(1.0, 0.5, 0.0, rows=2)


def make_replay(*ours: Planned | None) -> Replay:
    planned: list[dict[Policy, Any]] = [{"ours": each, "never replanned": SLOW} for each in ours]
    events = [Event(Period(10 * i, 10 * i + 10, 1), each) for i, each in enumerate(planned)]
    return Replay("t", 0, tuple(events))


def test_iterations_and_dollars_add_up() -> None:
    total = make_replay(FAST, SLOW, None, FAST).add_up("ours")
    assert (total.iterations, total.seconds, total.num_changes) == (50, 40, 1)
    assert total.dollars == 40 * 0.75 + 10 * 0.5
    assert total.throughput == 50 / 40 and total.dollars_per_iteration == 35 / 50
    assert total.plan_s == (0.1, 0.2, 0.1)


def test_a_pause_costs_iterations_and_rent_but_no_egress() -> None:
    total = make_replay(FAST, SLOW, FAST, FAST).add_up("ours", pause_s=4)
    assert total.num_changes == 2
    assert total.iterations == 20 + 6 + 12 + 20
    assert total.dollars == 60 * 0.5 + 10 * 0.5 + (20 + 12 + 20) * 0.25


def test_changes_pay_until_they_take_too_long() -> None:
    """Twenty iterations ahead after the first period, two changes at 1 and 2 iterations a second."""
    limit_s = make_replay(FAST, SLOW, FAST).break_even_s()
    assert limit_s == pytest.approx((50 - 30) / 3, abs=0.1)
    assert make_replay(FAST, FAST).break_even_s() is None


def run(*given: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *map(str, given)], capture_output=True, text=True)


def test_the_tool_prints_and_writes_every_trace(library: Library, tmp_path: Path) -> None:
    entries = [{"Time": 0, "GPUs": 2}, {"Time": 60, "GPUs": 1}, {"Time": 120, "GPUs": 1}]
    write(tmp_path / "sailor" / "traces" / "a100_trace_small.json", entries)
    out = tmp_path / "figures.json"
    done = run("--data", tmp_path, "--model", "Tiny", "--v100", 1, "--pause", 5, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "a100_trace_small: A100 by the trace\n" in done.stdout
    assert "a100_trace_small: A100 by the trace and 1 V100\n" in done.stdout
    found = json.loads(out.read_text())
    alone, beside = found["totals"]
    assert [total["policy"] for total in alone] == ["ours", "cheaper", "even mesh", "never replanned"]
    assert beside[0]["iterations"] >= alone[0]["iterations"] * (1 - 5 / 60)
    assert [event["period"]["num_gpus"] for event in found["replays"][0]["events"]] == [2, 1]


def test_without_traces_or_data_the_tool_says_so(library: Library, tmp_path: Path) -> None:
    none = run("--data", tmp_path / "none")
    assert none.returncode == 2 and "no sailor/Planner/llm_info.json of" in none.stderr
    missing = run("--data", tmp_path, "--model", "Tiny")
    assert missing.returncode == 2 and "no sailor/Controller/trace_based of" in missing.stderr
    (tmp_path / "sailor" / "traces").mkdir()
    empty = run("--data", tmp_path, "--model", "Tiny")
    assert empty.returncode == 2 and "no a100_trace_*.json in it" in empty.stderr


@needs_data
def test_the_recorded_traces_are_read() -> None:
    folder = Library(DATA).find("traces")
    for name, num_periods, most in (("a100_trace_16", 28, 14), ("a100_trace_original", 12, 16)):
        found = read_trace(folder / f"{name}.json")
        assert len(found) == num_periods and max(period.num_gpus for period in found) == most
        assert all(0 <= period.seconds < inf for period in found)
