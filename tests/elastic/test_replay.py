"""Replays of recorded availability."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from device_problems import make_nodes, make_problem
from hypothesis import given
from hypothesis import strategies as st

from zorselike.cli import main
from zorselike.elastic.replay.costs import Costs, find_mirroring
from zorselike.elastic.replay.events import Stretch, read_stretches
from zorselike.elastic.replay.job import Job
from zorselike.elastic.replay.rates import Rates
from zorselike.elastic.replay.rules import Outcome, Replay
from zorselike.errors import ConfigError
from zorselike.plan.cluster.cluster import Cluster

CLUSTER = """
version = 1
default_link = { bandwidth = "10GB/s", latency = "0us" }
[[nodes]]
name = "node-{}"
copies = 3
device = "T4"
count = 2
fabric = { bandwidth = "100GB/s", latency = "0us" }
[[nodes]]
name = "big"
device = "A100-40"
count = 1
"""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.parse(CLUSTER)


def write(folder: Path, text: str) -> str:
    path = folder / "events"
    path.write_text(text)
    return str(path)


def test_columns_count_types_nodes_or_anything(tmp_path: Path, cluster: Cluster) -> None:
    by_type = write(tmp_path, "time_s, t4\n0,6\n10,3\n20,3\n30,6\n")
    assert read_stretches(by_type, cluster) == [
        Stretch(0, 10, (0, 1, 2, 3, 4, 5, 6)),
        Stretch(10, 30, (0, 1, 2, 6)),
    ]
    by_node = write(tmp_path, "time,node-1,big\n5,0,1\n6,1,0\n")
    assert read_stretches(by_node, cluster, 7.0) == [
        Stretch(5, 6, (0, 1, 4, 5, 6)),
        Stretch(6, 7, (0, 1, 2, 4, 5)),
    ]
    records = [{"Time": 0.0, "GPUs": 7}, {"Time": 9.0, "GPUs": 0}, {"Time": 11, "GPUs": 7}]
    anything = write(tmp_path, json.dumps(records))
    assert [each.devices for each in read_stretches(anything, cluster)] == [tuple(range(7)), ()]


def test_numbers_at_even_intervals_are_read_as_skypilot_publishes_them(
    tmp_path: Path, cluster: Cluster
) -> None:
    ticks = {"metadata": {"gap_seconds": 300}, "data": [7, 7, 3, 0]}
    assert read_stretches(write(tmp_path, json.dumps(ticks)), cluster) == [
        Stretch(0, 600, tuple(range(7))),
        Stretch(600, 900, (0, 1, 2)),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no events"),
        ('{"data": [1]}', "'gap_seconds' in its 'metadata'"),
        ("gpus\n1\n", "no column 'time_s'"),
        ("time_s\n1\n", "no column says which devices"),
        ("time_s,t5\n1,1\n", "nor 'gpus'"),
        ("time_s,t4,gpus\n1,1,1\n", "count the same devices twice"),
        ("time_s,t4\n1,7\n2,1\n", "record 1: t4 is 7; the cluster has 6"),
        ("time_s,t4\n1,1\n1,2\n", "record 2 is not later"),
        ("time_s,t4\n1,1\n", "nothing lies between"),
        ("time_s,t4\n1,x\n2,1\n", "record 1: t4 is 'x'"),
        ("[1, 2]", "must hold objects"),
        ("[{", "is no JSON"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, cluster: Cluster, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_stretches(path, cluster)
    assert str(caught.value).startswith(path)


def test_a_file_that_is_not_there_is_told_as_that(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"^nowhere: there is no such file; check the path"):
        read_stretches("nowhere", cluster)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["run", "mirror", "checkpoint", "begin", "stand"]),
            st.floats(0.1, 50),
            st.integers(1, 4),
        ),
        max_size=30,
    )
)
def test_time_and_rows_are_accounted_for(events: list[tuple[str, float, int]]) -> None:
    job = Job(0.0, checkpoint_every_s=40.0, checkpoint_s=1.0)
    for what, number, interval in events:
        if what == "run":
            job.run(job.at_s + number)
        elif what == "mirror":
            job.return_to_mirror()
        elif what == "checkpoint":
            job.return_to_checkpoint()
        elif what == "begin":
            job.begin(number / 10, 8, 2, waits_s=number / 20, interval=interval)
        else:
            job.stand()
    training_s = sum(piece.stop_s - piece.start_s for piece in job.pieces if piece.rows_per_s)
    trained = sum((piece.stop_s - piece.start_s) * piece.rows_per_s for piece in job.pieces)
    kept = job.trained + job.steps * job.rows
    assert job.paused_s + job.stood_s + training_s == pytest.approx(job.at_s)
    assert kept + job.lost_rows == pytest.approx(trained)
    assert -1e-6 <= job.saved <= kept + 1e-6


@pytest.fixture(scope="module")
def rates() -> Rates:
    """A job on three nodes of two cards and a card alone."""
    problem = make_problem(make_nodes("t", "T4 T4", copies=3), make_nodes("a", "T4"), global_batch=56)
    return Rates(problem, budget_s=0.2)


EVERYBODY = tuple(range(7))
COSTS = Costs(recovery_s=5.0, switch_s=2.0, restart_s=120.0, checkpoint_every_s=100.0, payback_s=1e6)


def replay(
    rates: Rates, costs: Costs, *devices: tuple[int, ...], each_s: float = 1000.0
) -> dict[str, Outcome]:
    stretches = [Stretch(i * each_s, (i + 1) * each_s, there) for i, there in enumerate(devices)]
    record = Replay(stretches, rates, costs)
    outcomes = {outcome.name: outcome for outcome in record.run_rules()}
    for outcome in outcomes.values():
        assert outcome.pieces[-1].stop_s == pytest.approx(each_s * len(devices))
        if outcome.name != "whole replicas":  # Whose batch shrinks.
            assert outcome.rows <= record.ideal_rows * (1 + 1e-9)
    return outcomes


def test_where_nothing_happens_only_mirrors_cost(rates: Rates) -> None:
    best = rates.find_best(EVERYBODY)
    assert best is not None
    outcomes = replay(rates, COSTS, EVERYBODY)
    assert outcomes["restart"].rows == pytest.approx(1000 * best.rows_per_s)
    assert outcomes["never re-planned"].rows == pytest.approx(1000 * best.rows_per_s)
    own = outcomes["zorselike, elastic"].rows
    assert own * (1 + COSTS.mirror_share) >= 1000 * best.rows_per_s * (1 - 1e-9)
    assert own < 1000 * best.rows_per_s


def test_a_node_that_goes_and_comes(rates: Rates) -> None:
    without = tuple(device for device in EVERYBODY if device not in (2, 3))
    full, part = rates.find_best(EVERYBODY), rates.find_best(without)
    assert full is not None and part is not None and part.step_s > full.step_s
    outcomes = replay(rates, COSTS, EVERYBODY, without, EVERYBODY)
    own, restart, never = (outcomes[name] for name in ("zorselike, elastic", "restart", "never re-planned"))
    assert own.lost_rows <= full.plan.global_batch
    assert own.num_changes == 2 and own.paused_s < 2 * COSTS.recovery_s + 1
    assert restart.lost_rows <= full.rows_per_s * COSTS.checkpoint_every_s * (1 + 1e-9)
    assert restart.paused_s == pytest.approx(2 * COSTS.restart_s)
    assert never.stood_s == pytest.approx(1000.0)
    assert never.rows == pytest.approx((2000 - COSTS.restart_s) * full.rows_per_s - never.lost_rows)


def test_what_has_no_mirror_left_comes_from_the_checkpoint(rates: Rates) -> None:
    best = rates.find_best(EVERYBODY)
    assert best is not None
    mirroring = find_mirroring(best, rates.problem.workload, rates.problem.cluster, 0.1)
    assert all(mirroring.survives({device}) for device in mirroring.holder_of)
    device, holder = next(iter(mirroring.holder_of.items()))
    assert not mirroring.survives({device, holder})
    left = tuple(other for other in EVERYBODY if other not in (device, holder))
    costs = replace(COSTS, checkpoint_every_s=300.0)
    one, two = (replay(rates, costs, EVERYBODY, there) for there in ((*left, holder), left))
    assert two["zorselike, elastic"].lost_rows > 50 * best.rows_per_s > one["zorselike, elastic"].lost_rows


def test_nobody_there_is_waited_for(rates: Rates) -> None:
    outcomes = replay(rates, COSTS, EVERYBODY, (), EVERYBODY)
    for outcome in outcomes.values():
        assert outcome.stood_s == pytest.approx(1000.0)
        assert outcome.paused_s >= COSTS.restart_s


def test_the_command_prints_a_page_and_writes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = write(tmp_path, "time_s,t4\n0,6\n600,5\n1200,6\n")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    command = [
        "replay",
        events,
        "--cluster",
        str(tmp_path / "cluster.toml"),
        "--model",
        "llama",
        "--flavor",
        "debug",
    ]
    written = ["--csv", str(tmp_path / "out.csv"), "--json", str(tmp_path / "out.json")]
    assert main([*command, "--seq-len", "64", "--global-batch", "16", "--budget", "0.2s", *written]) == 0
    page = capsys.readouterr().out
    table = json.loads((tmp_path / "out.json").read_text())
    assert table["duration_s"] == 1200 and f"{table['rules']['restart']['share_of_ideal']:.1%}" in page
    assert (tmp_path / "out.csv").read_text().startswith("rule,start_s,stop_s,rows_per_s,devices\n")
    assert main([*command, "--global-batch", "16", "--restart", "two"]) == 2
    assert "--restart is 'two'" in capsys.readouterr().err
    assert main([*command, "--global-batch", "16", "--csv", events]) == 2
    assert "which is read too; name another file" in capsys.readouterr().err
