"""`zorselike simulate`: from files to a page, a drawing, a trace, a picture and estimates."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from searched import LAYERS, WORKLOAD, measure

from zorselike.cli import main
from zorselike.cli.model_choice import choose_model
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan
from zorselike.simulator.inputs import SimulationInputs
from zorselike.text.wording import show_bytes

CLUSTER = Cluster(
    nodes=(
        Node(name="a", devices=("A100-40",), price_per_hour=3.0, host_memory_bytes=2**36),
        Node(name="b", devices=("T4", "T4"), fabric=Link(1e10), price_per_hour=0.6, host_memory_bytes=2**36),
    ),
    default_link=Link(1e9),
    name="home",
)
PROFILE = measure("A100-40", "T4")
PLAN = Plan(
    global_batch=8,
    groups=(
        Group(ranks=(0,), microbatches=tuple(Microbatch(0, i, i + 2) for i in range(0, 8, 2))),
        Group(ranks=(1, 2), microbatches=tuple(Microbatch(1 + i // 2 % 2, i, i + 2) for i in range(0, 8, 2))),
    ),
    ministages=(Ministage(0, LAYERS[:2]), Ministage(1, LAYERS[2:])),
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    PLAN.save(tmp_path / "plan.toml")
    CLUSTER.save(tmp_path / "cluster.toml")
    PROFILE.save(tmp_path / "profile.json")
    WORKLOAD.save(tmp_path / "workload.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MEASURED = ["--cluster", "cluster.toml", "--profile", "profile.json", "--workload", "workload.json"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(("simulate", *arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(("simulate", *arguments)) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_the_page_and_the_drawing(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    shown = run(capsys, "plan.toml", *MEASURED)
    case = SimulationInputs(workload=WORKLOAD, cluster=CLUSTER, profile=PROFILE).simulate(PLAN)
    sections = shown.split("\n\n")
    assert sections[0].startswith(f"plan {PLAN.fingerprint} on cluster home: chain, float32, 8 rows of 100")
    this, fastest, even = sections[1].replace("\n    ", "  ").splitlines()  # Long lines are two.
    assert this.split()[:4] == ["this", "plan", f"{case.simulation.iteration_s:.4g}", "s"]
    assert fastest.startswith("  1 x A100-40 alone") and even.startswith("  even shares")
    assert "x as fast" in fastest and "x as fast" in even
    # 8 rows of a model that takes the A100 1.2 s a row and each T4 4.8.
    assert f"({8 / (1 / 1.2 + 2 / 4.8):.4g} s if all devices" in shown
    assert f"money: {case.simulation.cost:.4g} USD per step" in shown
    assert "NOT MEASURED" not in shown
    rows = [line.split("  ")[0] for line in sections[-2].splitlines()[1:]]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert max(map(len, sections[-2].splitlines())) <= 100


def test_without_a_profile_the_page_begins_with_that(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    replace(
        PLAN,
        model="llama debug",
        sequence_length=64,
        ministages=(
            Ministage(0, ("tok_embeddings", "layers.0", "layers.1")),
            Ministage(1, ("layers.2", "layers.3", "layers.4", "layers.5", "norm", "output")),
        ),
    ).save("debug.toml")
    shown = run(capsys, "debug.toml", "--cluster", "cluster.toml", "--dtype", "float16")
    assert "NOT MEASURED: without --profile devices are assumed to reach 45%" in shown.split("\n\n")[0]
    assert "llama debug, float16, 8 rows of 64 tokens" in shown
    assert "- A100-40: nothing was measured on it; FLOPs at 45% of 312 TFLOP/s" in shown
    same = "debug.toml --cluster cluster.toml --dtype float16 --model llama --flavor debug --seq-len 64"
    assert run(capsys, *same.split()) == shown


def test_a_plan_for_another_cluster_is_told(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    replace(PLAN, cluster_fingerprint="0123456789ab").save("moved.toml")
    assert "The plan was made for another cluster: 0123456789ab" in run(capsys, "moved.toml", *MEASURED)
    replace(PLAN, cluster_fingerprint=CLUSTER.fingerprint).save("own.toml")
    assert "another cluster" not in run(capsys, "own.toml", *MEASURED)


def test_a_plan_that_leaves_out_who_decided_on_the_dtype(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """The T4s had no bfloat16, and are not used."""
    save_plan_of_one(files / "half.toml", dtype="float16")
    simulated = ("simulate", str(files / "half.toml"), "--cluster", str(files / "cluster.toml"))
    assert main(simulated) == 0
    assert main((*simulated, "--dtype", "bfloat16")) == 2
    assert "the plan was made for workload" in capsys.readouterr().err


def test_a_plan_made_for_float32_is_simulated_without_being_told(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """It was refused until --dtype was given again."""
    save_plan_of_one(files / "full.toml", dtype="float32")
    assert "gpt 124m, float32" in run(capsys, "full.toml", "--cluster", "cluster.toml")


def save_plan_of_one(path: Path, *, dtype: str) -> None:
    """One rank, on node a."""
    workload = choose_model("gpt", "124m", ()).measure(sequence_length=256, dtype=dtype)
    plan = Plan(
        global_batch=2,
        groups=(Group(ranks=(0,), microbatches=(Microbatch(0, 0, 2),)),),
        ministages=(Ministage(0, tuple(name for name, _ in workload.layers)),),
        model=workload.model,
        sequence_length=256,
        devices=(Device(0, "a", 0),),
        workload_fingerprint=workload.fingerprint,
    )
    plan.save(path)


def test_a_page_in_one_file(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    pytest.importorskip("bokeh", reason="Bokeh is not installed (pip install 'zorselike[html]')")
    shown = run(capsys, "plan.toml", *MEASURED, "--html", "page.html")
    assert shown.endswith("\npage written to page.html: open it in a browser\n")
    case = SimulationInputs(workload=WORKLOAD, cluster=CLUSTER, profile=PROFILE).simulate(PLAN)
    assert f"<b>{case.simulation.iteration_s:.4g} s</b>" in Path("page.html").read_text()


def test_a_trace_a_picture_and_estimates(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    pytest.importorskip("matplotlib")
    text = Path("plan.toml").read_text()
    Path("plan.toml").write_text(f"# by hand\n{text}")
    more = ["--trace", "step.json", "--png", "step.png", "--write-estimates"]
    shown = run(capsys, "plan.toml", *MEASURED, *more)
    assert shown.splitlines()[-3:] == [
        "trace written to step.json: open it in https://ui.perfetto.dev",
        "picture written to step.png",
        "estimates written to plan.toml",
    ]
    trace = json.loads(Path("step.json").read_text())
    case = SimulationInputs(workload=WORKLOAD, cluster=CLUSTER, profile=PROFILE).simulate(PLAN)
    expected = {action.text for own in case.actions.values() for action in own if action.text[1:3] in "F0B0"}
    assert expected <= {event["name"] for event in trace["traceEvents"]}
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")
    assert Path("plan.toml").read_text().startswith("# by hand\n")
    estimates = Plan.load("plan.toml").estimates
    assert estimates.iteration_s == pytest.approx(case.simulation.iteration_s)
    assert estimates.peak_memory_bytes == case.peak_bytes
    assert estimates.cost_per_iteration == pytest.approx(case.simulation.cost)


def test_a_measured_step_is_shown_beside_the_simulated_one(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    event = {"ph": "X", "cat": "user_annotation", "name": "0F0", "pid": 9, "tid": 9, "ts": 5.0, "dur": 2.0}
    Path("iteration_2").mkdir()
    Path("iteration_2/rank0_trace.json").write_text(json.dumps({"traceEvents": [event]}))
    run(capsys, "plan.toml", *MEASURED, "--trace", "step.json", "--measured", "iteration_2")
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {
        "rank 0 A100-40 simulated",
        "rank 1 T4 simulated",
        "rank 2 T4 simulated",
        "rank 0 measured",
    }
    (measured,) = (
        event for event in events if event["pid"] == names["rank 0 measured"] and event["ph"] == "X"
    )
    assert (measured["name"], measured["ts"], measured["dur"]) == ("0F0", 0.0, 2.0)


def test_a_global_norm_defers_updates(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    run(capsys, "plan.toml", *MEASURED, "--defer-updates", "--trace", "step.json")
    names = {event["name"] for event in json.loads(Path("step.json").read_text())["traceEvents"]}
    assert "NORM" in names
    run(capsys, "plan.toml", *MEASURED, "--trace", "step.json")
    assert "NORM" not in {event["name"] for event in json.loads(Path("step.json").read_text())["traceEvents"]}


def test_copies_and_mirrors_of_an_elastic_job_are_counted(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    assert "mirrored" not in run(capsys, "plan.toml", *MEASURED)
    text = run(capsys, "plan.toml", *MEASURED, "--elastic")
    # Of 12 bytes a parameter two copies, and two of what the other node mirrors.
    assert f"  copied and mirrored to hosts a and b: {show_bytes(96_000)} of 64.0 GiB\n" in text


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_other_orders_are_simulated_too(
    capsys: pytest.CaptureFixture[str], files: Path, schedule: str
) -> None:
    first = Group(ranks=(0,), microbatches=(Microbatch(0, 0, 4), Microbatch(0, 4, 8)))
    own = [(1, 0), (2, 2), (1, 4), (2, 6)]
    second = Group(ranks=(1, 2), microbatches=tuple(Microbatch(rank, i, i + 2) for rank, i in own))
    replace(PLAN, groups=(first, second)).save("even.toml")
    shown = run(capsys, "even.toml", *MEASURED, "--schedule", schedule)
    assert f"schedule {schedule}" in " ".join(shown.split())


def test_a_file_of_torchs_is_simulated_as_the_order_that_wrote_it(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    rows = [(0, 4), (4, 8)]
    groups = tuple(Group((rank,), tuple(Microbatch(rank, *own) for own in rows)) for rank in range(3))
    stages = (Ministage(0, LAYERS[:1]), Ministage(1, LAYERS[1:2]), Ministage(2, LAYERS[2:]))
    Plan(8, groups, stages).save("stages.toml")
    assert main(("show", "stages.toml", "--schedule-csv", "step.csv")) == 0
    assert "step.csv, in the form of torch.distributed.pipelining" in capsys.readouterr().out
    ours, read = (run(capsys, "stages.toml", *MEASURED, "--schedule", own) for own in ("ours", "step.csv"))
    assert read.replace(", schedule step.csv", "") == ours
    Path("step.csv").write_text("0F0,0F1,0B1\n1F0,1F1,1B1,1B0\n2F0,2F1,2B1,2B0\n")
    assert main(("simulate", "stages.toml", *MEASURED, "--schedule", "step.csv")) == 2
    assert (
        "step.csv: rank 0, action 9, 0REDUCE_GRAD: a backward of ministage 0 is still to come"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan.toml", *MEASURED, "--schedule", "2f2b"],
            "there is no schedule '2f2b': give one of ours, 1f1b, interleaved, or a .csv file",
        ),
        (["plan.toml", *MEASURED, "--schedule", "no.csv"], "no.csv: there is no such file"),
        (["plan.toml", *MEASURED, "--model", "llama"], "--workload describes the model completely"),
        (["plan.toml", "--cluster", "cluster.toml"], "plan.toml names no model; give --family llama"),
        (
            ["plan.toml", "--cluster", "cluster.toml", "--family", "llama"],
            "--family and --flavor go together",
        ),
        (
            ["plan.toml", "--cluster", "cluster.toml", "--model", "llama", "--flavor", "debug"],
            "has no sequence length; give --seq-len",
        ),
        (
            ["plan.toml", "--cluster", "cluster.toml", "--seq-len", "0"],
            "--seq-len is 0; it must be at least 1",
        ),
        (["missing.toml", *MEASURED], "missing.toml: there is no such file"),
        (["plan.toml", *MEASURED[2:], "--cluster", "none.toml"], "none.toml"),
        (
            ["plan.toml", *MEASURED, "--schedule", "1f1b"],
            "plan.toml: 1F1B: rank 1 has 2 microbatches and rank 0 has 4",
        ),
        (
            ["plan.toml", *MEASURED, "--schedule", "1f1b", "--write-estimates"],
            "--write-estimates is for runs, which do not use --schedule 1f1b",
        ),
        (["plan.toml", *MEASURED, "--measured", "folder"], "is written into the file of --trace"),
        (["plan.toml", *MEASURED, "--trace", "no/a.json"], "--trace is no/a.json, in a folder that does not"),
        (["plan.toml", *MEASURED, "--trace", "plan.toml"], "--trace is plan.toml, which is read too; name"),
        (["plan.toml", *MEASURED, "--png", "no/a.png"], "--png is no/a.png, in a folder that does not exist"),
        (["plan.toml", *MEASURED, "--trace", "a.json", "--measured", "nowhere"], "there is no such folder"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], files: Path, arguments: list[str], message: str
) -> None:
    assert message in fail(capsys, *arguments)


def test_a_profile_for_another_model_is_refused(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    replace(PROFILE, model="another").save("other.json")
    other = ["--cluster", "cluster.toml", "--profile", "other.json", "--workload", "workload.json"]
    assert "other.json: the profile is of 'another'" in fail(capsys, "plan.toml", *other)


def test_what_a_profile_lacks_is_said_of_its_file(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    """Which of several files it was was not said, and to leave out an option that nobody had given."""
    save_plan_of_one(files / "half.toml", dtype="float16")
    given = ("half.toml", "--cluster", "cluster.toml", "--profile", "profile.json")
    text = "profile.json: the profile is of 'chain', the workload is 'gpt 124m'"
    assert text in fail(capsys, *given)
    replace(PROFILE, model="gpt 124m").save("profile.json")
    text = "profile.json: has no layers for 256 tokens, only for float32 at 100 tokens; measure for that"
    assert text in fail(capsys, *given)
    text = "256 tokens, only for float32 at 100 tokens; leave --dtype out, or measure"
    assert text in fail(capsys, *given, "--dtype", "float16")


def test_a_cluster_without_the_plans_nodes_is_refused(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    elsewhere = tuple(Device(rank=rank, node="c", local_rank=rank) for rank in range(3))
    replace(PLAN, devices=elsewhere).save("elsewhere.toml")
    assert fail(capsys, "elsewhere.toml", *MEASURED).startswith(
        "error: elsewhere.toml on cluster.toml: plan rank 0 is on node c, which the cluster does not have"
    )


def test_a_plan_that_names_no_model_of_ours_needs_a_workload(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    replace(PLAN, model="my own", sequence_length=8).save("own.toml")
    said = fail(capsys, "own.toml", "--cluster", "cluster.toml")
    assert "'my own' is not a built-in model" in said and "give --workload FILE" in said


def test_a_workload_needs_no_torch(files: Path) -> None:
    code = (
        "import sys; from zorselike.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "simulate", "plan.toml", *MEASURED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
