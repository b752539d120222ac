"""`zorselike plan`: from files and options to a question, and from an answer to a page and a plan.

The search itself is in place only where a test says so: elsewhere `searched.py` answers at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
from searched import CLUSTER, WORKLOAD, measure, search_by_shares

from zorselike.cli import main
from zorselike.cli.plan import search as plan_search
from zorselike.cli.plan.progress import describe_progress, show_count
from zorselike.cost.profile import Profile
from zorselike.plan.cluster.cluster import Cluster, Link, Node
from zorselike.plan.plan import Plan
from zorselike.planner.answer import PlanAnswer, Progress
from zorselike.planner.problem import Fixed, PlanProblem
from zorselike.planner.search import search
from zorselike.simulator.inputs import SimulationInputs

Asked = list[tuple[PlanProblem, dict[str, Any]]]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    CLUSTER.save(tmp_path / "cluster.toml")
    measure("A100-40", "T4").save(tmp_path / "profile.json")
    WORKLOAD.save(tmp_path / "workload.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(files: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the planner is asked, which answers with plans by proportion."""
    return _answer_with(search_by_shares, monkeypatch)


def _answer_with(answer: Callable[..., PlanAnswer], monkeypatch: pytest.MonkeyPatch) -> Asked:
    found: Asked = []

    def search_plans(problem: PlanProblem, **how: Any) -> PlanAnswer:
        found.append((problem, how))
        return answer(problem, **how)

    monkeypatch.setattr(search, "search_plans", search_plans)
    return found


KNOWN = ["--cluster", "cluster.toml", "--profile", "profile.json", "--workload", "workload.json"]
EIGHT = [*KNOWN, "--global-batch", "8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(("plan", *arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(("plan", *arguments)) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


# -- what is asked -----------------------------------------------------------------------------


def test_a_hugging_face_folder_is_a_model(
    asked: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=40).save_pretrained(tmp_path / "tiny")
    sizes = ("--cluster", "cluster.toml", "--global-batch", "8")
    run(capsys, *sizes, "--hf", "tiny", "--seq-len", "32")
    workload = asked[0][0].workload
    assert (workload.model, workload.sequence_length, workload.dtype) == ("hf tiny", 32, "float16")
    names = [f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "h.2", "ln_f")]
    assert [name for name, _ in workload.layers] == [*names, "lm_head"]
    assert workload.ties == (("transformer.wte", "lm_head"),)
    assert "--hf tiny has no sequence length; give --seq-len" in fail(capsys, *sizes, "--hf", "tiny")
    assert "give its folder by --hf" in fail(capsys, *sizes, "--lora-rank", "4")
    assert "tiny has 1024 positions" in fail(capsys, *sizes, "--hf", "tiny", "--seq-len", "1025")
    assert "at least 1" in fail(capsys, *sizes, "--hf", "tiny", "--lora-rank", "0")
    assert "give --lora-rank 16" in fail(capsys, *sizes, "--hf", "tiny", "--lora-targets", "c_attn")
    assert "leave out --family" in fail(capsys, *sizes, "--hf", "tiny", "--family", "gpt")
    assert "has no config.json" in fail(capsys, *sizes, "--hf", "none", "--seq-len", "32")


def test_adapters_are_all_that_trains(
    asked: Asked, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=40).save_pretrained(tmp_path / "tiny")
    sizes = ("--cluster", "cluster.toml", "--global-batch", "8")
    targets = ("--lora-rank", "4", "--lora-targets", "c_attn")
    text = run(capsys, *sizes, "--hf", "tiny", "--seq-len", "32", *targets)
    workload = asked[0][0].workload
    assert workload.model == "hf tiny lora 4"
    assert workload.num_trainable == 3 * 4 * (16 + 48)
    assert (
        f"hf tiny lora 4: {workload.num_trainable:,} of {workload.num_parameters:,} parameters train" in text
    )
    layer, head, embedding = (workload.kinds[kind] for kind in ("layer", "head", "embedding"))
    assert 1 < layer.backward_flops / layer.forward_flops_per_row < 1.5
    assert head.backward_flops == head.forward_flops_per_row
    assert (head.num_borrowed, head.borrowed_trainable) == (40 * 16, 0)
    assert not embedding.trains and not head.trains
    shown = run(capsys, *sizes, "--hf", "tiny", "--seq-len", "32", *targets, "--launch")
    named = "--model.name hf --model.path tiny --lora.enable --lora.rank 4 --lora.target_modules c_attn"
    assert f"-m zorselike.train {named} --hetero.plan plan.toml" in shown
    simulated = ("simulate", "plan.toml", "--cluster", "cluster.toml")
    assert main((*simulated, "--hf", "tiny", *targets)) == 0
    assert f"hf tiny lora 4 ({workload.num_trainable:,} of" in capsys.readouterr().out
    assert main(simulated) == 2
    assert "give --hf tiny --lora-rank 4, with the path of that folder" in capsys.readouterr().err


def test_options_are_the_planners_question(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    more = "--objective cost --max-cost-per-iteration 2.5 --min-tokens-per-s 40 --max-devices 3"
    run(
        capsys,
        *EIGHT,
        *more.split(),
        "--budget",
        "500ms",
        "--seed",
        "7",
        "--top",
        "2",
        "--defer-updates",
        "--elastic",
    )
    ((problem, how),) = asked
    assert (problem.workload, problem.cluster) == (WORKLOAD, CLUSTER)
    assert problem.profile == Profile.load("profile.json")
    assert (problem.global_batch, problem.objective, problem.max_cost_per_iteration) == (8, "cost", 2.5)
    assert problem.min_throughput == pytest.approx(40 / 800)
    assert (problem.max_devices, problem.devices, problem.defer_updates) == (3, None, True)
    assert problem.is_mirrored
    assert {key: how[key] for key in ("budget_s", "seed", "top")} == {"budget_s": 0.5, "seed": 7, "top": 2}


def test_without_options_nothing_is_limited(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    run(capsys, *EIGHT)
    ((problem, how),) = asked
    assert (problem.objective, problem.max_cost_per_iteration) == ("throughput", inf)
    assert (problem.min_throughput, problem.max_devices, problem.devices) == (0.0, None, None)
    assert problem.fixed == Fixed() and not problem.spans_regions and not problem.defer_updates
    assert how["budget_s"] == 30.0


@pytest.mark.parametrize(
    ("quotas", "devices"),
    [
        (["T4=1"], (0, 1)),
        (["t4=0"], (0,)),
        (["a100-40=0", "T4=5"], (1, 2)),
        (["y/T4=1"], (0, 1)),
        (["r/T4=2", "T4=1"], (0, 1)),
        (["x/T4=0"], (0, 1, 2)),
    ],
)
def test_quotas_are_devices(
    capsys: pytest.CaptureFixture[str], asked: Asked, quotas: list[str], devices: tuple[int, ...]
) -> None:
    run(capsys, *EIGHT, "--quota", *quotas)
    assert asked[0][0].devices == devices


def test_whole_nodes_go_before_parts(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    small, large = CLUSTER.nodes[1], replace(CLUSTER.nodes[1], name="c", devices=("T4",) * 4)
    replace(CLUSTER, nodes=(large, small)).save("two.toml")
    run(capsys, "--cluster", "two.toml", *EIGHT[2:], "--quota", "T4=3")
    assert asked[0][0].devices == (0, 4, 5)


@pytest.mark.parametrize(
    ("words", "fixed"),
    [
        (["zero=3", "recompute=layer"], Fixed(zero=3, recompute="layer")),
        (["offload=none", "ministages=4"], Fixed(offload=(), ministages=4)),
        (["offload=params,optimizer"], Fixed(offload=("params", "optimizer"))),
        (["rows_per_microbatch=2", "grad_reduce=once"], Fixed(rows_per_microbatch=2, grad_reduce="once")),
        (["overlap_grad_reduce=false"], Fixed(overlap_grad_reduce=False)),
        (["overlap_grad_reduce=true"], Fixed(overlap_grad_reduce=True)),
        (["in_flight=bounded"], Fixed(bounds_in_flight=True)),
        (["in_flight=unbounded"], Fixed(bounds_in_flight=False)),
        (["tensor_parallel=1"], Fixed(tensor_parallel=1)),
        (["tensor_parallel=auto"], Fixed()),
        (["groups=type"], Fixed(groups=((0,), (1, 2)))),
        (["groups=node"], Fixed(groups=((0,), (1, 2)))),
        (["groups=zone"], Fixed(groups=((0,), (1, 2)))),
        (["groups=b/a"], Fixed(groups=((1, 2), (0,)))),
        (["groups=b:1,a/b:0"], Fixed(groups=((2, 0), (1,)))),
        (["groups=b:0-1"], Fixed(groups=((1, 2),))),
        (["groups=*"], Fixed(groups=((0, 1, 2),))),
    ],
)
def test_what_is_fixed(
    capsys: pytest.CaptureFixture[str], asked: Asked, words: list[str], fixed: Fixed
) -> None:
    run(capsys, *EIGHT, "--fix", *words)
    assert asked[0][0].fixed == fixed


def test_words_may_come_in_several_options(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    run(capsys, *EIGHT, "--fix", "zero=1", "--quota", "T4=1", "--fix", "ministages=2", "--quota", "A100-40=1")
    problem, _ = asked[0]
    assert problem.fixed == Fixed(zero=1, ministages=2) and problem.devices == (0, 1)


def test_groups_of_a_type_stay_in_a_region(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    far = replace(CLUSTER.nodes[1], name="c", zone="z", region="far")
    replace(CLUSTER, nodes=(*CLUSTER.nodes, far)).save("far.toml")
    known = ["--cluster", "far.toml", *EIGHT[2:], "--fix", "groups=type"]
    run(capsys, *known)
    run(capsys, *known, "--span-regions")
    assert [problem.fixed.groups for problem, _ in asked] == [((0,), (1, 2), (3, 4)), ((0,), (1, 2, 3, 4))]


def test_a_profile_brings_its_cluster(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    Path("measured").mkdir()
    Path("profile.json").rename("measured/profile.json")
    Path("cluster.toml").rename("measured/cluster.toml")
    shown = run(
        capsys,
        "--from-profile",
        "measured/profile.json",
        "--workload",
        "workload.json",
        "--global-batch",
        "8",
    )
    assert asked[0][0].cluster == CLUSTER and "NOT MEASURED" not in shown


def test_without_a_profile_that_is_said_first(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    known = ["--cluster", "cluster.toml", "--family", "llama", "--flavor", "debug", "--seq-len", "64"]
    shown = run(capsys, *known, "--global-batch", "8")
    assert shown.startswith("NOT MEASURED: without --profile devices are assumed to reach 45%")
    assert "computes in float16 with loss scaling: updates wait" in shown  # T4s have no bfloat16.
    ((problem, _),) = asked
    assert (problem.workload.model, problem.workload.dtype) == ("llama debug", "float16")
    assert problem.defer_updates and problem.profile.overheads.context_bytes == 2**30


def test_devices_left_out_do_not_choose_the_dtype(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    known = ["--cluster", "cluster.toml", "--family", "llama", "--flavor", "debug", "--seq-len", "64"]
    run(capsys, *known, "--global-batch", "8", "--quota", "T4=0")
    assert asked[0][0].workload.dtype == "bfloat16"


# -- what is said ------------------------------------------------------------------------------


def test_the_best_plan_is_written_and_shown(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    shown = run(capsys, *EIGHT, "-o", "best.toml")
    plan = Plan.load("best.toml")
    answer = search_by_shares(asked[0][0])
    assert plan == answer.best.case.plan and plan.estimates.iteration_s is not None
    table, plans, proven, assumed, wrote = shown.strip().split("\n\n")[-5:]
    assert shown.startswith(plan.explain()) and table in plan.explain()
    heading, columns, *lines = plans.partition("In all of them: ")[0].splitlines()
    alike = " ".join(plans.partition("In all of them: ")[2].split())
    assert heading == "The best 3 plans, of different structure each:"
    assert columns.split()[:9] == ["s", "per", "step", "tokens/s", "USD", "per", "step", "of", "ideal"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    best = answer.best.case
    assert lines[0].split()[1:3] == [f"{best.simulation.iteration_s:.4g}", f"{best.tokens_per_s:,.0f}"]
    assert "recompute none" in alike and "ZeRO" not in alike
    assert f"A step takes at most {answer.gap:.1%} more than the fastest possible" in " ".join(proven.split())
    assert assumed.startswith("Not measured, so assumed:\n- A100-40: updates were not measured")
    assert wrote == "wrote best.toml"
    assert max(map(len, shown.splitlines())) <= 110


def test_the_plan_is_what_simulate_takes(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    run(capsys, *EIGHT)
    assert main(("simulate", "plan.toml", *KNOWN)) == 0
    assert "another cluster" not in capsys.readouterr().out


def test_an_interrupted_search_says_so(
    capsys: pytest.CaptureFixture[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _answer_with(partial(search_by_shares, ending="interrupted"), monkeypatch)
    shown = run(capsys, *EIGHT, "--explain")
    assert "INTERRUPTED: this is the best so far; 3 candidates estimated, 3 simulated" in shown
    assert Path("plan.toml").exists()
    assert len(asked) == 1  # Nobody who ends a search waits for more.


def test_a_search_that_ran_out_of_time_says_so(
    capsys: pytest.CaptureFixture[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answer_with(partial(search_by_shares, ending="budget", notes=["node c is not joined"]), monkeypatch)
    shown = run(capsys, *EIGHT, "--budget", "2s")
    assert shown.startswith("node c is not joined\n")
    assert "The time budget of 2 s ended the search, a longer one may find more" in shown


def test_the_page(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    shown = " ".join(run(capsys, *EIGHT, "--explain", "--budget", "4s").split())
    answer = search_by_shares(asked[0][0])
    assert "1 x A100-40 alone" in shown and "even shares" in shown and "rank device group computes" in shown
    assert "All devices' time: computing " in shown
    assert shown.count("Not measured, so assumed:") == 1
    # Planned again without each kind, with the rest of the time.
    assert [problem.usable for problem, _ in asked] == [(0, 1, 2), (1, 2), (0,)]
    assert [how["budget_s"] for _, how in asked] == [4.0, 1.0, 1.0]
    with_all = answer.best.case.simulation.iteration_s
    for them, (problem, _) in zip(("The one A100-40 adds", "The 2 T4 add"), asked[1:], strict=True):
        without = search_by_shares(problem).best.case.simulation.iteration_s
        assert f"{them} {without / with_all - 1:.1%}: without, a step takes {without:.4g} s" in shown
    assert "The next best plan (" in shown
    share = re.search(r"share of the ideal: [\d.]+% \([\d.]+ s", shown)
    assert main(("simulate", "plan.toml", *KNOWN)) == 0
    assert share is not None and share[0] in " ".join(capsys.readouterr().out.split())


def test_others_are_compared(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    shown = run(capsys, *EIGHT, "--compare")
    table = shown.split("Other systems on the same devices:\n")[1].split("\n\n")[0].splitlines()
    assert table[0].split()[:3] == ["s", "per", "step"] and table[1].startswith("  this plan")
    assert any(line.startswith("  even shares") for line in table[2:])
    assert any("x as fast" in line for line in table[2:])


def test_each_node_has_its_line(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    shown = run(capsys, *EIGHT, "--launch")
    lines = [line for line in shown.splitlines() if "torchrun" in line]
    where = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:29500 --rdzv-id train"
    assert lines[0].startswith(f"ZORSELIKE_NODE=a torchrun {where} --nproc-per-node 1 -m zorselike.train ")
    assert lines[1].startswith(f"ZORSELIKE_NODE=b torchrun {where} --nproc-per-node 2 -m zorselike.train ")
    assert all("--config RECIPE.toml --hetero.plan plan.toml" in line for line in lines)
    assert "# RECIPE.toml" in shown


def test_one_line_starts_a_model_of_ours(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    """The configuration that the line means is one that a run takes with this plan."""
    from zorselike.train.config.checks import load_plan
    from zorselike.train.config.config import Model
    from zorselike.train.config.file import parse_command_line

    known = ["--cluster", "cluster.toml", "--family", "llama", "--flavor", "debug", "--seq-len", "64"]
    known += ["--override", "vocab_size=512"]
    more = ["--quota", "T4=0", "--launch"]
    shown = run(capsys, *known, "--global-batch", "8", *more)
    (line,) = (line for line in shown.splitlines() if "torchrun" in line)
    assert line.startswith("ZORSELIKE_NODE=a torchrun --standalone --nproc-per-node 1 -m zorselike.train ")
    config = parse_command_line(line.partition("-m zorselike.train ")[2].split()).config
    assert load_plan(config) == Plan.load("plan.toml")
    assert config.model == Model("llama", flavor="debug", override=("vocab_size=512",))
    assert (config.training.mixed_precision_param, config.hetero.clip) == ("bfloat16", "ministage")
    run(capsys, *known, "--global-batch", "8", *more[:2], "--defer-updates")


def test_a_line_hides_devices_that_the_plan_leaves_out(
    capsys: pytest.CaptureFixture[str], asked: Asked
) -> None:
    two = Node(name="desk", devices=("T4", "A100-40"), fabric=Link(1e9))
    Cluster(nodes=(two,)).save("desk.toml")
    known = ["--cluster", "desk.toml", *EIGHT[2:], "--quota", "T4=0", "--launch"]
    line = "CUDA_VISIBLE_DEVICES=1 ZORSELIKE_LOCAL_RANKS=1 ZORSELIKE_NODE=desk torchrun --standalone"
    assert line in run(capsys, *known)


@pytest.mark.parametrize("launcher", ["slurm", "jobset", "skypilot", "ray"])
def test_a_job_file_has_the_plan_s_name(
    capsys: pytest.CaptureFixture[str], asked: Asked, launcher: str
) -> None:
    shown = run(capsys, *EIGHT, "-o", "mine.toml", "--launch", "torchrun", launcher)
    told = next(line for line in shown.splitlines() if line.startswith("wrote mine."))
    written = Path(told.split()[1].removesuffix(":"))
    assert "--hetero.plan" in written.read_text() and "torchrun --nnodes 2" in shown
    assert shown.endswith("wrote mine.toml\n")


def test_a_launcher_that_cannot_start_the_plan_says_why(
    capsys: pytest.CaptureFixture[str], asked: Asked
) -> None:
    two = Node(name="desk", devices=("T4", "A100-40"), fabric=Link(1e9))
    Cluster(nodes=(two,)).save("desk.toml")
    shown = run(capsys, "--cluster", "desk.toml", *EIGHT[2:], "--launch", "jobset", "slurm")
    assert "no file for jobset: Kubernetes asks for GPUs of one type on a node, and node desk has" in shown
    assert "wrote plan.sbatch: sbatch plan.sbatch" in shown and shown.endswith("wrote plan.toml\n")


def test_a_page_shows_the_plan_with_its_search(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    pytest.importorskip("bokeh", reason="Bokeh is not installed (pip install 'zorselike[html]')")
    shown = run(capsys, *EIGHT, "--compare", "--html", "page.html")
    assert "wrote page.html: open it in a browser\n" in shown
    page = Path("page.html").read_text()
    step = f"{Plan.load('plan.toml').estimates.iteration_s:.4g} s"
    assert f"<b>{step}</b>" in page and "Plans found, against time" in page and "TorchTitan-Het" in page
    assert "Plans found" not in page.partition("<body>")[0]


def test_a_page_that_cannot_be_made_is_said_before_the_search(
    capsys: pytest.CaptureFixture[str], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert "pip install 'zorselike[html]'" in fail(capsys, *EIGHT, "--html", "page.html")
    assert "--html is none/p.html, in a folder that does not exist" in fail(
        capsys, *EIGHT, "--html", "none/p.html"
    )
    assert not asked


# -- the search itself -------------------------------------------------------------------------


def test_what_the_search_finds_is_what_simulate_finds(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    shown = run(capsys, *EIGHT, "--budget", "1s", "--fix", "zero=1", "offload=none")
    plan = Plan.load("plan.toml")
    assert plan.explain() in shown and {group.zero for group in plan.groups} == {1}
    setting = SimulationInputs(workload=WORKLOAD, cluster=CLUSTER, profile=Profile.load("profile.json"))
    simulation = setting.simulate(plan).simulation
    assert plan.estimates.iteration_s == pytest.approx(simulation.iteration_s)
    assert plan.estimates.cost_per_iteration == pytest.approx(simulation.cost)
    # Better than the plan by proportion, and not better than what is possible.
    problem = PlanProblem(
        workload=WORKLOAD, cluster=CLUSTER, profile=Profile.load("profile.json"), global_batch=8
    )
    by_shares = search_by_shares(problem).best
    assert by_shares.ideal_s <= simulation.iteration_s <= by_shares.case.simulation.iteration_s


def test_of_parts_that_nothing_joins_the_better_one_is_planned(
    capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    replace(CLUSTER, default_link=None).save("parts.toml")
    shown = run(capsys, "--cluster", "parts.toml", *EIGHT[2:], "--budget", "1s")
    # The A100 takes 9.6 s for the eight rows, the two T4 twice as long.
    assert shown.startswith("no link joins node b (2 devices) to the 1 device of the part that is planned")
    assert [device.node for device in Plan.load("plan.toml").devices] == ["a"]
    assert main(("simulate", "plan.toml", "--cluster", "parts.toml", *KNOWN[2:])) == 0


@pytest.mark.parametrize("quota", [[], ["--quota", "GTX1080Ti=0"]])
def test_what_cannot_compute_in_a_dtype_is_not_explained_or_compared(
    capsys: pytest.CaptureFixture[str], files: Path, quota: list[str]
) -> None:
    old = Node(name="old", devices=("GTX1080Ti",))
    new = Node(name="new", devices=("RTX3090",))
    Cluster(nodes=(old, new), default_link=Link(1e9)).save("mixed.toml")
    model = ["--family", "llama", "--flavor", "debug", "--seq-len", "64", "--dtype", "bfloat16"]
    asked = ["--cluster", "mixed.toml", *model, "--global-batch", "4", "--budget", "0.5s", *quota]
    shown = " ".join(run(capsys, *asked, "--explain", "--compare").split())
    assert ("GTX1080Ti left out: profile: no times of layer on GTX1080Ti" in shown) is not bool(quota)
    assert "no plan of the 1 device that may be used" in shown and "worth it" not in shown
    assert "TorchTitan-Het" in shown and "this plan" in shown


def test_ctrl_c_gives_the_best_so_far(
    capsys: pytest.CaptureFixture[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed: list[Progress] = []

    def press(progress: Progress) -> None:
        if progress.best_s is not None and not pressed:
            pressed.append(progress)
            raise KeyboardInterrupt

    monkeypatch.setattr(plan_search, "show_progress", lambda *_: nullcontext(press))
    assert "INTERRUPTED: this is the best so far" in run(capsys, *EIGHT)
    assert Plan.load("plan.toml").num_ranks


# -- by proportion -----------------------------------------------------------------------------


def test_a_plan_by_proportion_needs_no_search(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    shown = run(capsys, *EIGHT, "--shares", "--ministages", "2", "--zero", "1", "-o", "quick.toml")
    assert not asked and shown.endswith("wrote quick.toml; memory was not checked\n")
    plan = Plan.load("quick.toml")
    assert plan.num_ministages == 4 and {group.zero for group in plan.groups} == {1}


# -- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--cluster is missing; give a cluster file (examples: recipes/clusters), or --from-profile"),
        (["--shares"], "--cluster is missing"),
        (["--cluster", "c", "--profile", "p", "--from-profile", "q"], "both given; keep one"),
        (["--cluster", "c"], "--global-batch is 0; give the number of rows of a step"),
        (
            ["--cluster", "c", "--profile", "p", "--profile=q"],
            "plan: --profile is given twice; keep one, or measure into one file with `zorselike profile -o`",
        ),
        (["--cluster", "c", "--global-batch", "8"], "c: there is no such file"),
        (["--cluster", "c", "--global-batch", "8", "-o", "no/plan.toml"], "in a folder that does not exist"),
        (["--cluster", "c", "--global-batch", "8", "-o", "."], "a folder; name a file"),
        (
            ["--cluster", "c", "--global-batch", "8", "-o", "a" * 300],
            "cannot be written: File name too long;",
        ),
        (
            ["--from-profile", f"{'a' * 300}/p.json", "--global-batch", "8"],
            "cannot be read: File name too long",
        ),
        (["--cluster", "c", "--global-batch", "8", "-o", "./c"], "--output is ./c, which is read too; name"),
        (["--from-profile", "p", "--global-batch", "8", "-o", "cluster.toml"], "which is read too"),
        (
            ["--cluster", "c.sbatch", "--global-batch", "8", "-o", "c.toml", "--launch", "ray", "slurm"],
            "--launch slurm's file, named after --output, is c.sbatch, which is read too; name another file",
        ),
        (
            ["--cluster", "c", "--global-batch", "8", "--html", "./plan.toml"],
            "--html is ./plan.toml, which is --output's too; name another file",
        ),
        (["--cluster", "cluster.toml", "--global-batch", "8"], "cluster.toml names no model; give --family"),
        (
            ["--cluster", "cluster.toml", "--global-batch", "8", "--family", "llama", "--flavor", "debug"],
            "cluster.toml has no sequence length; give --seq-len",
        ),
        (
            ["--from-profile", "p/profile.json", "--global-batch", "8"],
            "p/cluster.toml, which `zorselike profile` writes beside it, does not exist",
        ),
        ([*EIGHT, "--budget", "30"], "--budget is '30'; write a time with its unit, such as 30s"),
        ([*EIGHT, "--budget", "0s"], "--budget is 0s; give more than 0s"),
        ([*EIGHT, "--top", "0"], "--top is 0"),
        ([*EIGHT, "--zero", "1"], "go with --shares; for the search give such settings as --fix zero=2"),
        ([*EIGHT, "--recompute", "none"], "go with --shares"),
        ([*EIGHT, "--zero", "2", "--ministages", "1"], "go with --shares"),
        ([*EIGHT, "--shares", "--explain"], "--shares plans without a search"),
        ([*EIGHT, "--shares", "--quota", "T4=1"], "--shares plans without a search"),
        ([*EIGHT, "--quota", "T4=0", "A100-40=0"], "no devices may be used (all quotas are 0?)"),
        ([*EIGHT, "--quota", "T4"], "--quota 'T4' is not a quota; write it as T4=4"),
        ([*EIGHT, "--quota", "T4=-1"], "--quota 'T4=-1' is not a quota"),
        ([*EIGHT, "--quota", "T44=1"], "the cluster has no device 'T44'; did you mean 'T4'?"),
        ([*EIGHT, "--quota", "q/T4=1"], "the cluster has no zone or region 'q'; it has r, x, y"),
        ([*EIGHT, "--quota", "T4=1", "--quota", "t4=2"], "--quota T4 is given twice"),
        ([*EIGHT, "--max-devices", "0"], "at most 0 devices; allow at least 1"),
        ([*EIGHT, "--max-cost-per-iteration", "0"], "at most 0 USD an iteration"),
        ([*EIGHT, "--min-throughput", "-1"], "at least -1 iterations/s"),
        ([*EIGHT, "--min-throughput", "1", "--min-tokens-per-s", "1"], "both given; keep one"),
        ([*EIGHT, "--fix", "zero=4"], "--fix zero=4: give 0 to 3"),
        ([*EIGHT, "--fix", "zeroo=2"], "--fix 'zeroo=2' is not a setting; did you mean 'zero'?"),
        ([*EIGHT, "--fix", "zero"], "--fix 'zero' is not a setting; write it as zero=2"),
        ([*EIGHT, "--fix", "zero"], "keys are groups, zero, recompute"),
        ([*EIGHT, "--fix", "zero=1", "--fix", "zero=2"], "--fix zero is given twice"),
        ([*EIGHT, "--fix", "recompute=some"], "--fix recompute=some: give none or layer"),
        ([*EIGHT, "--fix", "offload=weights"], "give none, or any of params, optimizer, activations"),
        ([*EIGHT, "--fix", "offload=params,params"], "--fix offload=params,params: name each once"),
        ([*EIGHT, "--fix", "ministages=many"], "--fix ministages=many: give a whole number"),
        ([*EIGHT, "--fix", "ministages=9"], "9 ministages are fixed; chain has 4 layers"),
        ([*EIGHT, "--fix", "zero=3", "grad_reduce=once"], "ZeRO 3 reduces after every microbatch"),
        ([*EIGHT, "--fix", "in_flight=4"], "--fix in_flight=4: give bounded or unbounded"),
        ([*EIGHT, "--fix", "tensor_parallel=3"], "--fix tensor_parallel=3: give 1 or 2 or 4 or 8 or auto"),
        ([*EIGHT, "--fix", "tensor_parallel=4"], "4 ranks; layers of chain cannot be cut"),
        (
            [
                *EIGHT,
                "--fix",
                "in_flight=bounded",
                "groups=node",
                "ministages=4",
                "zero=2",
                "grad_reduce=once",
            ],
            "fixed are ZeRO 2, reductions once and 4 ministages, and there are 2 groups",
        ),
        ([*EIGHT, "--fix", "in_flight=bounded", "offload=params"], "offload nothing but optimizer"),
        ([*EIGHT, "--fix", "in_flight = bounded", "ministages=1"], "two ministages or more; fixed is 1"),
        ([*EIGHT, "--quota", "T4=0", "--fix", "in_flight=bounded"], "two groups or more, and there is one"),
        ([*EIGHT, "--fix", "rows_per_microbatch=9"], "a microbatch has no more rows than a step"),
        ([*EIGHT, "--fix", "groups="], "--fix groups= is empty; give type, node, zone, or nodes"),
        ([*EIGHT, "--fix", "groups=nodes"], "the cluster has no node 'nodes'"),
        ([*EIGHT, "--fix", "groups=b:x"], "'b:x' is not valid; write local ranks as b:0-3"),
        (
            [*EIGHT, "--fix", "groups=b:1-2"],
            "b:1-2 includes devices that do not exist or that quotas exclude",
        ),
        ([*EIGHT, "--fix", "groups=a,b/b:1"], "have a device twice"),
        ([*EIGHT, "--fix", "groups=a/b", "ministages=1"], "2 groups are fixed, with 1 ministage at most"),
        ([*EIGHT, "--fix", "groups=a/b", "--max-devices", "2"], "the fixed groups have 3 devices"),
        ([*EIGHT, "--fix", "groups=b", "--quota", "T4=1"], None),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], asked: Asked, arguments: list[str], message: str | None
) -> None:
    if message is None:
        run(capsys, *arguments)
    else:
        assert message in fail(capsys, *arguments)
        assert not Path("plan.toml").exists()


def test_a_profile_that_lacks_a_device_is_refused(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    measure("A100-40").save("part.json")
    known = ["--cluster", "cluster.toml", "--profile", "part.json", "--workload", "workload.json"]
    said = fail(capsys, *known, "--global-batch", "8")
    assert "part.json: nothing was measured on T4, which the cluster has" in said and "--quota T4=0" in said
    run(capsys, *known, "--global-batch", "8", "--quota", "T4=0")


def test_money_needs_prices(capsys: pytest.CaptureFixture[str], asked: Asked) -> None:
    free = replace(CLUSTER, nodes=tuple(replace(node, price_per_hour=0.0) for node in CLUSTER.nodes))
    free.save("free.toml")
    known = ["--cluster", "free.toml", *EIGHT[2:]]
    assert "no node of the cluster has a price" in fail(capsys, *known, "--objective", "cost")
    assert "no node of the cluster has a price" in fail(capsys, *known, "--max-cost-per-iteration", "1")
    assert "USD per step" not in run(capsys, *known)
    a, b = CLUSTER.nodes
    replace(CLUSTER, nodes=(a, replace(b, price_per_hour=0.0))).save("free.toml")
    assert "no price_per_hour, so free: node b" in run(capsys, *known, "--objective", "cost")
    assert "so free" not in run(capsys, *known)
    assert "so free" not in run(capsys, *EIGHT, "--objective", "cost")


def test_where_nothing_fits_the_change_that_would_is_said(
    capsys: pytest.CaptureFixture[str], asked: Asked
) -> None:
    heavy = replace(WORKLOAD.kinds["layer"], activation_bytes_per_row=2**35)
    replace(WORKLOAD, kinds={"layer": heavy}).save("heavy.json")
    known = ["--cluster", "cluster.toml", "--profile", "profile.json", "--workload", "heavy.json"]
    assert "nothing fits; with 1.0 GiB more on each T4" in fail(capsys, *known, "--global-batch", "8")
    assert not Path("plan.toml").exists()


# -- while it works ----------------------------------------------------------------------------


class Terminal(StringIO):
    """Standard error as people have it."""

    def isatty(self) -> bool:
        return True


def test_the_bar_says_how_good_the_best_is(
    capsys: pytest.CaptureFixture[str], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(("plan", *EIGHT, "--explain")) == 0
    progress = search_by_shares(asked[0][0]).progress
    shown = terminal.getvalue()
    assert f"best {progress.best_s:.4g} s/step" in shown and "% above the bound, 3 simulated" in shown
    assert "planning" in shown and "without T4" in shown
    assert "best" not in capsys.readouterr().err


def test_progress_without_a_plan_says_that() -> None:
    progress = Progress(
        elapsed_s=1.0, num_estimated=7, num_simulated=0, best_s=None, best_cost=None, bound_s=2.0
    )
    assert describe_progress(progress) == "nothing fits yet, 7 estimated"
    found = replace(progress, best_s=2.5, best_cost=0.25, num_simulated=4)
    assert describe_progress(found) == "best 2.5 s/step, 0.25 a step, 25 % above the bound, 4 simulated"


def test_what_is_compared_is_counted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_count("comparing", "system") as tell:
        tell("Whale")
        tell("Cephalo-like on 4 T4")
    assert "comparing: system 2, 00:00, Cephalo-like on 4 T4" in terminal.getvalue()
