"""The program as people start it: recipes, errors, signals, several nodes."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import debug_llama
import numpy as np
import pytest
import ranks
import torch
from ranks import RankExit, RunRanks, free_port
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trained import RECIPES, SHORT, read_column, read_losses, train

from zorselike import Plan
from zorselike.checkpoint.folder import list_steps
from zorselike.checkpoint.layout import step_folder
from zorselike.errors import ConfigError
from zorselike.plan.plan import Estimates, Group, Microbatch
from zorselike.runtime.assembly import compile_plan
from zorselike.schedule.actions import SENDS, Action
from zorselike.simulator.report.measured_trace import read_measured
from zorselike.train import trainer  # Imported once, before ranks are forked.
from zorselike.train.config.config import Config, Model
from zorselike.train.config.file import load_config, parse_command_line
from zorselike.train.config.model import find_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def what_ranks_inherit() -> None:
    debug_llama.warm_up()


def test_a_model_that_is_none_of_ours_may_be_hugging_faces() -> None:
    with pytest.raises(ConfigError, match="no model 'qwen'; it is one of ours, llama, gpt, or hf: "):
        find_model(Config(model=Model(name="qwen")))


def test_settings_of_a_flavor_may_be_changed() -> None:
    changed = Model(override=("vocab_size=512", "num_layers=3"))
    model = find_model(Config(model=changed))
    assert model.name == "llama debug num_layers=3 vocab_size=512"
    assert model.build().get_submodule("layers").keys() == {"0", "1", "2"}
    assert model.vocab_size == 512
    for wrong, why in (
        (("layers=3",), "llama has no setting 'layers'"),
        (("dim",), "[model] override: 'dim' is not"),
        (("dim=64", "dim=32"), "[model] override: dim is given twice; give it once"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_model(Config(model=Model(override=wrong)))
        assert why in str(caught.value)


FOUR_STEPS = (*SHORT, "--training.steps", "4")


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[RankExit], Path]:
    """A run of four steps without offload but with validation, for several tests, and its folder."""
    folder = tmp_path_factory.mktemp("resident")
    held_out = tmp_path_factory.mktemp("held_out") / "held_out.txt"
    held_out.write_text("a rose is a rose is a rose\n" * 45)  # 37 rows, of which two batches need 32.
    validation = ["--validation.enable", "--validation.dataset_path", str(held_out), "--validation.freq", "3"]
    pins = "--training.dataloader.pin_memory"
    ends = train(ranks.run_ranks, "debug_cpu.toml", *FOUR_STEPS, *validation, pins, folder=folder)
    assert [end.code for end in ends] == [0] * 4, ends[0].stderr
    return ends, folder


def test_a_run_and_what_it_leaves(
    run_ranks: RunRanks, resident: tuple[list[RankExit], Path], tmp_path: Path
) -> None:
    ends, folder = resident
    assert not any(end.stdout for end in ends[1:])
    assert "\x1b" not in ends[0].stdout
    losses = read_losses(folder)
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    assert all(f"{loss:8.5f}" in ends[0].stdout for _, loss in losses)
    assert losses[-1][1] < losses[0][1]
    assert "estimate" not in ends[0].stdout  # The plan has none.
    assert "pin_memory" not in "".join(end.stderr for end in ends)
    (run,) = (entry for entry in folder.iterdir() if entry.name.startswith("debug_cpu-"))
    names = {"config.toml", "plan.toml", "log.txt", "metrics.csv", "tb"}
    assert names == {entry.name for entry in run.iterdir()}
    assert "2 batches of 16 rows; 5 rows at the end fill no batch and are left out" in ends[0].stdout
    validations = read_column(folder, "validation_metrics/loss")
    shown = re.findall(r"validate step: .*?loss: (.{8})", ends[0].stdout)
    assert [f"{loss:8.5f}" for loss in validations] == shown
    assert [step for step, _ in losses] == read_column(folder, "step")
    assert len(validations) == 2 and validations[1] < validations[0]
    assert list((run / "tb").glob("events*"))
    effective = load_config(run / "config.toml")
    assert effective.training.steps == 4
    assert effective.hetero.plan == str(run / "plan.toml")

    # The run's folder repeats the run; and under another plan the losses stay what they were.
    plan = str(RECIPES / "debug_cpu_dp.plan.toml")
    ends = train(run_ranks, str(run / "config.toml"), "--hetero.plan", plan, folder=tmp_path)
    assert ends[0].code == 0, ends[0].stderr
    assert [step for step, _ in read_losses(tmp_path)] == [1, 2, 3, 4]
    for name in ("loss_metrics/global_avg_loss", "validation_metrics/loss"):
        assert read_column(tmp_path, name) == pytest.approx(read_column(folder, name), abs=2e-4)


def test_a_degree_in_place_of_a_plan(
    run_ranks: RunRanks, resident: tuple[list[RankExit], Path], tmp_path: Path
) -> None:
    """The same losses; and the run's folder, which has a plan, repeats the run."""
    degree = ["--parallelism.tensor_parallel_degree", "2", "--training.global_batch_size", "16"]
    first, second = tmp_path / "first", tmp_path / "second"
    expected = read_losses(resident[1])
    for recipe, folder, plan, steps in (
        ("debug_cpu.toml", first, ["--hetero.plan", ""], 2),
        ("", second, ["--training.steps", "1"], 1),
    ):
        path = recipe or str(next(first.glob("*/config.toml")))
        few = ["--training.steps", str(steps), "--lr_scheduler.total_steps", "4"]
        ends = train(run_ranks, path, *SHORT, *few, *degree, *plan, folder=folder)
        assert [end.code for end in ends] == [0] * 4, ends[0].stderr
        for found, known in zip(read_losses(folder), expected[:steps], strict=True):
            assert found == pytest.approx(known, rel=1e-4)
    made = Plan.load(next(first.glob("*/plan.toml")))
    assert [group.ranks for group in made.groups] == [((0, 1), (2, 3))]
    (end,) = train(
        run_ranks, "debug_cpu.toml", *degree, "--hetero.plan", "", "--dry-run", folder=tmp_path, num_ranks=1
    )
    assert end.code == 0 and "ranks (0, 1); tensor parallelism 2" in end.stdout, end.stdout + end.stderr


def test_sigterm_on_one_rank_ends_all_at_a_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    ends = train(
        run_ranks,
        "debug_cpu.toml",
        *SHORT,
        "--training.steps",
        "100000",
        "--checkpoint.enable",
        folder=tmp_path,
        environment=[{"TORCHELASTIC_RUN_ID": "1"}] * 4,
        signal_at=tmp_path,
    )
    assert [end.code for end in ends] == [128 + signal.SIGTERM] * 4, ends[0].stderr
    stopped = re.search(r"stopped by SIGTERM after (\d+) of 100000 steps", ends[0].stdout)
    assert stopped is not None
    assert [path.name for path in list_steps(tmp_path / "checkpoint")] == [step_folder(int(stopped[1]))]
    assert f"the same command goes on from step {stopped[1]}" in ends[0].stdout
    assert "ended in order: what torchrun prints below" in ends[0].stdout.splitlines()[-1]


def test_nodes_may_come_up_in_any_order(run_ranks: RunRanks, tmp_path: Path) -> None:
    nodes = [
        {"ZORSELIKE_NODE": "node-b", "LOCAL_RANK": "0"},
        {"ZORSELIKE_NODE": "node-a", "LOCAL_RANK": "0"},
        {"ZORSELIKE_NODE": "node-a", "LOCAL_RANK": "1"},
    ]
    short = (*SHORT, "--training.steps", "2")
    ends = train(run_ranks, "multi_node.toml", *short, folder=tmp_path, num_ranks=3, environment=nodes)
    assert [end.code for end in ends] == [0] * 3, ends[0].stderr
    assert len(read_losses(tmp_path)) == 2


def labels_of(trace: Path) -> Counter[str]:
    """The actions of a trace, which also names its rank."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {(event["name"], event["args"].get("name")) for event in events if event["ph"] == "M"}
    rank = trace.name.removeprefix("rank").partition("_")[0]
    assert {("process_name", f"rank {rank} CPU"), ("thread_name", "actions")} <= names
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def check_measured(folder: Path, actions: Mapping[int, Sequence[Action]]) -> None:
    """The step as `zorselike simulate --measured` shows it: one clock, an arrow for every transfer."""
    events = read_measured(folder, first_pid=10)
    shown = Counter((event["pid"] - 10, event["name"]) for event in events if event["ph"] == "X")
    assert shown == Counter((rank, action.text) for rank, own in actions.items() for action in own)
    num_sends = sum(action.kind in SENDS for own in actions.values() for action in own)
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert len(begins) == num_sends and begins.keys() == ends.keys()
    assert all(begins[number] <= ends[number] for number in begins)


def test_offload_changes_no_loss_and_traces_speak_the_schedule_s_words(
    run_ranks: RunRanks, resident: tuple[list[RankExit], Path], tmp_path: Path
) -> None:
    profiling = [
        "--profiling.enable_profiling",
        "--profiling.profile_freq",
        "4",
        "--profiling.profiler_warmup",
        "1",
    ]
    ends = train(run_ranks, "debug_cpu_offload.toml", *FOUR_STEPS, *profiling, folder=tmp_path)
    assert [end.code for end in ends] == [0] * 4, ends[0].stderr
    assert not any("USDT" in end.stderr or "Profiler" in end.stderr for end in ends)
    # Bit for bit, and validation in the other run alone.
    for name in ("loss_metrics/global_avg_loss", "grad_norm"):
        assert read_column(tmp_path, name) == read_column(resident[1], name)

    out = ends[0].stdout
    assert out.count("updates wait for all gradients of a step, since max_norm clips") == 1
    assert re.search(r"group 0 0\.3 MiB in host memory, group 1 0\.4 MiB in host memory", out)
    assert out.count("memory of rank") == 2
    assert out.count("optimizer state") == 2

    plan = Plan.load(RECIPES / "debug_cpu_offload.plan.toml")
    actions = compile_plan(debug_llama.build_on_meta(), plan, defer_steps=True).step_actions
    folder = next(tmp_path.glob("*/profile_traces/iteration_4"))
    assert len(list(folder.iterdir())) == 4
    for rank in range(4):
        labels = labels_of(folder / f"rank{rank}_trace.json.gz")
        expected = Counter(action.text for action in actions[rank])
        assert {label: labels[label] for label in expected} == expected
    check_measured(folder, actions)
    assert {"2LOAD", "2OFFLOAD", "0OFFLOAD_STATE", "0LOAD_GRAD", "0LOAD1"} <= {a.text for a in actions[0]}


def test_fp16_tells_its_scale_and_estimates_are_held_against_facts(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    half = ("--training.mixed_precision_param", "float16", "--training.max_norm", "0")
    plan = replace(
        Plan.load(RECIPES / "debug_cpu.plan.toml"),
        estimates=Estimates(iteration_s=1e6, peak_memory_bytes=(2**30,) * 4),
    )
    plan.save(tmp_path / "plan.toml")
    planned = (*SHORT, "--training.steps", "2", "--hetero.plan", str(tmp_path / "plan.toml"))
    ends = train(run_ranks, "debug_cpu.toml", *planned, *half, folder=tmp_path)
    assert [end.code for end in ends] == [0] * 4, ends[0].stderr
    found = re.findall(r"rank (\d): estimated 1e\+06 s per step, measured \S+ \(-100\.0 %\)", ends[0].stdout)
    assert found == ["0", "1", "2", "3"]
    assert ends[0].stdout.count("estimated 1.0 GiB at most, not measured") == 4
    assert "updates wait for all gradients of a step, since float16 skips a step as a whole" in ends[0].stdout
    assert len(re.findall(r"scale: \d+  skipped: \d", ends[0].stdout)) == 2


def test_without_clipping_nothing_is_deferred(run_ranks: RunRanks, tmp_path: Path) -> None:
    alone = tmp_path / "plan.toml"
    dp = Plan.load(RECIPES / "debug_cpu_dp.plan.toml")
    group = Group((0,), (Microbatch(0, 0, dp.global_batch),))
    replace(dp, groups=(group,)).save(alone)
    at_once = ("--hetero.clip", "ministage", "--training.mixed_precision_param", "auto")
    command = (*SHORT, "--training.steps", "1", "--hetero.plan", str(alone), *at_once)
    (end,) = train(run_ranks, "debug_cpu.toml", *command, folder=tmp_path, num_ranks=1)
    assert end.code == 0, end.stderr
    assert "step:  1" in end.stdout
    assert "updates wait" not in end.stdout and "scale:" not in end.stdout


@pytest.mark.parametrize(
    ("arguments", "dtype", "compiles"),
    [
        ("--training.mixed_precision_param float32", None, False),
        ("--training.mixed_precision_param float16 --compile.enable", torch.float16, True),
        ("--training.mixed_precision_param bfloat16", torch.bfloat16, False),
        ("--training.mixed_precision_param auto", "auto", False),
    ],
)
def test_what_a_recipe_asks_of_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, arguments: str, dtype: object, compiles: bool
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(trainer, "HeteroPipeline", lambda *_, **options: asked.update(options))
    request = parse_command_line(["--config", str(RECIPES / "debug_cpu.toml"), *arguments.split()])
    world = SimpleNamespace(device=torch.device("cpu"), alarm=None)
    plan = Plan.load(request.config.hetero.plan)
    trainer._build_pipeline(request.config, plan, debug_llama.build_on_meta(), world)  # type: ignore[arg-type]
    assert (asked["param_dtype"], asked["compile"]) == (dtype, compiles)


def test_a_dry_run_draws_what_will_run(run_ranks: RunRanks, tmp_path: Path) -> None:
    half = ["--training.max_norm", "0", "--dry-run", "--training.mixed_precision_param"]
    (full,) = train(run_ranks, "debug_cpu.toml", *half, "float32", folder=tmp_path, num_ranks=1)
    assert "NORM" not in full.stdout
    (fp16,) = train(run_ranks, "debug_cpu.toml", *half, "float16", folder=tmp_path, num_ranks=1)
    assert "NORM" in fp16.stdout  # Updates wait until all gradients are known to be finite.
    assert "their size in half precision, with fp32 masters" in fp16.stdout
    (auto,) = train(run_ranks, "debug_cpu.toml", *half, "auto", folder=tmp_path, num_ranks=1)
    assert '"auto": bfloat16 is shown' in auto.stdout
    assert '\ndata: [training] dataset = "stdlib", ' in auto.stdout
    away = [*half, "float32", "--training.dataset_path", "/nowhere"]
    (missing,) = train(run_ranks, "debug_cpu.toml", *away, folder=tmp_path, num_ranks=1)
    assert (
        "\ndata: a run would end with this: [training] dataset_path = /nowhere: there is no" in missing.stdout
    )
    assert "\nchecked: " in missing.stdout
    assert missing.stderr.startswith("error: [training] dataset_path = /nowhere: there is no such file")
    assert missing.code == 2


def make_token_files(folder: Path) -> str:
    """Another file for every rank."""
    for rank in range(4):
        np.arange(rank, 4000 + rank, dtype="uint16").__mod__(250).tofile(folder / f"{rank}.bin")
    return str(folder / "{rank}.bin")


@pytest.mark.parametrize(
    ("kind", "num_ranks", "expected"),
    [
        ("misspelt", 1, "[training] stepz is not a key; did you mean 'steps'?"),
        ("three processes", 3, "is for 4 ranks, but 3 processes run"),
        ("global batch", 1, "global_batch_size = 99, but the plan"),
        ("no data", 4, "contains no .txt, .jsonl or .bin file"),
        ("little to validate", 4, "do not fill the plan's global batch of 16; give more"),
        ("too long", 1, "has 2048 positions"),
        ("other data", 4, "reads other data than the others"),
        ("other seed", 4, "[debug] seed is 1 in process 1 and 0 in process 0: start every node with"),
        ("no such model", 1, "llama has no flavor 'debgu': did you mean 'debug'?"),
        ("no gpu", 4, '[hetero] device = "cuda", but torch finds no GPU here'),
        ("no module", 4, "layers.9"),
        ("row missing", 1, "add up to 15, global_batch is 16"),
    ],
)
def test_bad_input_ends_all_ranks_with_the_mend(
    run_ranks: RunRanks, tmp_path: Path, kind: str, num_ranks: int, expected: str
) -> None:
    recipe = tmp_path / "recipe.toml"
    text = (RECIPES / "debug_cpu.toml").read_text()
    plan = (RECIPES / "debug_cpu.plan.toml").read_text()
    if kind == "misspelt":
        text = text.replace("steps = 100", "stepz = 100")
    if kind == "no module":
        plan = plan.replace("layers.5", "layers.9")
    if kind == "row missing":
        plan = plan.replace("[2, 4, 2]", "[2, 3, 2]")
    recipe.write_text(text)
    (tmp_path / "debug_cpu.plan.toml").write_text(plan)
    (tmp_path / "empty").mkdir()
    little = tmp_path / "little.txt"
    little.write_text("a" * 2000)
    arguments = {
        "global batch": ["--training.global_batch_size", "99"],
        "no data": ["--training.dataset_path", str(tmp_path / "empty")],
        "little to validate": ["--validation.enable", "--validation.dataset_path", str(little)],
        "too long": ["--training.seq_len", "4096"],
        "other data": ["--training.dataset_path", make_token_files(tmp_path)],
        "other seed": ["--debug.seed", "{rank}"],
        "no such model": ["--model.flavor", "debgu"],
        "no gpu": ["--hetero.device", "cuda"],
    }.get(kind, [])
    folder = tmp_path / "outputs"
    # As if each were the first of its node, which alone tells at once.
    nodes = [{"LOCAL_RANK": "0", "ZORSELIKE_NODE": str(rank)} for rank in range(num_ranks)]
    ends = train(run_ranks, str(recipe), *arguments, folder=folder, num_ranks=num_ranks, environment=nodes)
    assert [end.code for end in ends] == [2] * num_ranks, ends[0].stderr
    errors = [line for line in ends[0].stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert expected in errors[0]
    assert not list(folder.glob("*/config.toml"))


@pytest.mark.parametrize(
    "recipe", ["debug_cpu", "debug_cpu_dp", "debug_cpu_offload", "multi_node", "two_gpus"]
)
def test_dry_run_needs_nothing(run_ranks: RunRanks, tmp_path: Path, recipe: str) -> None:
    (end,) = train(run_ranks, f"{recipe}.toml", "--dry-run", folder=tmp_path, num_ranks=1)
    assert end.code == 0, end.stderr
    for part in ("rows per step", "parameters of each rank's ministages", "0F0", "checked: "):
        assert part in end.stdout
    assert max(map(len, end.stdout.splitlines())) < 1500
    assert not list(tmp_path.iterdir())


def test_errors_are_one_line_and_come_before_torch(tmp_path: Path) -> None:
    plan = (RECIPES / "debug_cpu.plan.toml").read_text().replace("[2, 4, 2]", "[2, 3, 2]")
    (tmp_path / "p.toml").write_text(plan)
    command = [
        "-X",
        "importtime",
        "-m",
        "zorselike.train",
        "--hetero.plan",
        str(tmp_path / "p.toml"),
        "--dry-run",
    ]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "| torch" not in done.stderr


def test_a_plan_for_another_model_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    plan = tmp_path / "p.toml"
    plan.write_text(
        (RECIPES / "debug_cpu.plan.toml").read_text().replace('"layers.3", "layers.4"', '"layers.3"')
    )
    arguments = ["--hetero.plan", str(plan), "--dry-run"]
    (end,) = train(run_ranks, "debug_cpu.toml", *arguments, folder=tmp_path, num_ranks=1)
    assert end.code == 2
    assert f"error: {plan}: no ministage has module 'layers.4', which owns parameters" in end.stderr


def test_torchruns_report_says_why(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, "-m", "zorselike.train", "--config", str(tmp_path / "none.toml")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=2, error_file=environment["TORCHELASTIC_ERROR_FILE"]
    )
    report = str(ChildFailedError("train", {0: failure}))
    assert f"traceback : {done.stderr.strip()}" in report


def by_hand(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    script = RECIPES / "train_by_hand.py"
    source = script.read_text()
    short = source.replace("STEPS, SEQ_LEN, LR = 100, 128, 3e-3", "STEPS, SEQ_LEN, LR = 7, 32, 1e-2")
    assert short != source
    exec(compile(short, str(script), "exec"), {"__file__": str(script), "__name__": "__main__"})


def test_train_by_hand(run_ranks: RunRanks) -> None:
    ends = run_ranks(by_hand, 4, free_port(), init=False, allow_exit=True, timeout=90)
    assert [end.code for end in ends] == [0] * 4, ends[0].stderr
    losses = [float(loss) for loss in re.findall(r"loss +(\S+)", ends[0].stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 1
    assert "57 tensors, 328,512 parameters" in ends[0].stdout


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"NGPU": "4"},
            "--nnodes 1 --nproc-per-node 4 --standalone -m zorselike.train --config recipes/debug_cpu.toml",
        ),
        (
            {"NGPU": "2", "NNODES": "2", "RDZV": "node-a:29500", "CONFIG_FILE": "x.toml"},
            "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node-a:29500 --rdzv-id train "
            "-m zorselike.train --config x.toml",
        ),
        ({"LOG_RANK": "0,1"}, "--local-ranks-filter 0,1 --role rank --tee 3"),
        ({}, "--nproc-per-node 4 --standalone -m zorselike.train --config recipes/debug_cpu.toml"),
        ({"CONFIG_FILE": "x.toml"}, "--nproc-per-node gpu --standalone -m zorselike.train --config x.toml"),
    ],
)
def test_run_train_script(tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    command = [bash, str(ROOT / "run_train.sh"), "--training.steps", "10"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert expected in done.stdout
    assert done.stdout.endswith("--training.steps 10\n")


def test_run_train_script_finds_the_environment_beside_it(tmp_path: Path) -> None:
    """README's, where none is active."""
    bash, folder = shutil.which("bash"), tmp_path / ".venv" / "bin"
    if bash is None:
        pytest.skip("needs bash")
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "run_train.sh", tmp_path)
    (folder / "torchrun").write_text("#!/bin/sh\necho beside\n")
    (folder / "torchrun").chmod(0o755)
    command = [bash, str(tmp_path / "run_train.sh")]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "beside\n"), done.stderr


def test_run_train_script_asks_where_nodes_meet() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    environment = {"PATH": os.environ["PATH"], "NNODES": "2"}
    done = subprocess.run(
        [bash, str(ROOT / "run_train.sh")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "say where the nodes meet" in done.stderr
