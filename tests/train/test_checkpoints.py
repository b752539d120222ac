"""Runs that end and go on: under other plans, after damage, to a model one can hand on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import debug_llama
import pytest
import ranks
from ranks import RankExit, RunRanks
from safetensors import safe_open
from trained import SHORT, read_column, train

from zorselike.checkpoint.folder import list_steps
from zorselike.checkpoint.layout import step_folder
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.read import read_manifest
from zorselike.errors import CheckpointError
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.state.save import Save
from zorselike.train import checkpoints as checkpoints_of_runs
from zorselike.train.checkpoints import RunCheckpoints
from zorselike.train.config.config import Checkpoint, Config, Job, Training

LOSS = "loss_metrics/global_avg_loss"
STEPS = ("--model.override", "num_layers=3", "--lr_scheduler.total_steps", "6", *SHORT)
SAVES = ("--checkpoint.enable", "--checkpoint.interval", "2")
PLAN = """
version = 1
global_batch = 16
[[groups]]
ranks = [1]
shares = [[1, 16, 8]]
[[groups]]
ranks = [0]
offload = ["optimizer", "params"]
shares = [[0, 16, 4]]
[[ministages]]
group = 0
modules = ["tok_embeddings", "layers.0"]
[[ministages]]
group = 1
modules = ["layers.1"]
[[ministages]]
group = 0
modules = ["layers.2", "norm", "output"]
"""
OTHER_PLAN = """
version = 1
global_batch = 16
[[groups]]
ranks = [0, 1]
zero = 2
shares = [[0, 10, 5], [1, 6, 6]]
[[groups]]
ranks = [2]
shares = [[2, 16, 8]]
[[ministages]]
group = 0
modules = ["tok_embeddings", "layers.0"]
[[ministages]]
group = 1
modules = ["layers.1", "layers.2", "norm", "output"]
"""


@pytest.fixture(scope="module", autouse=True)
def what_ranks_inherit() -> None:
    debug_llama.warm_up()


def run(
    run_ranks: RunRanks,
    folder: Path,
    *arguments: str,
    steps: int,
    number: int,
    plan: str = PLAN,
    is_stopped: bool = False,
) -> tuple[list[RankExit], list[float]]:
    """One of several runs that share checkpoints; how its ranks ended, and its losses. `is_stopped`: by a
    signal, soon."""
    own = folder / str(number)
    own.mkdir(parents=True)
    path = own / "given.plan.toml"
    path.write_text(plan)
    given = ("--hetero.plan", str(path), "--training.steps", str(steps))
    arguments = (*given, "--checkpoint.folder", "../checkpoints", *arguments)
    ends = train(
        run_ranks,
        "debug_cpu.toml",
        *STEPS,
        *SAVES,
        *arguments,
        folder=own,
        num_ranks=2 if plan == PLAN else 3,
        signal_at=own if is_stopped else None,
    )
    is_trained = any(LOSS in path.read_text() for path in own.glob("*/metrics.csv"))
    return ends, read_column(own, LOSS) if is_trained else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of two ranks that has saved its steps 2 and 3, and the losses of one that goes on to step 5."""
    folder = tmp_path_factory.mktemp("whole")
    never = ("--checkpoint.no-enable",)
    ends, expected = run(ranks.run_ranks, folder, *never, steps=5, number=0)
    assert [end.code for end in ends] == [0] * 2, ends[0].stderr
    _, losses = run(ranks.run_ranks, folder, steps=3, number=1)
    assert losses == expected[:3]
    return folder / "checkpoints", expected


@pytest.fixture
def begun(whole: tuple[Path, list[float]], tmp_path: Path) -> Path:
    """Where that run has saved, for a test of its own."""
    return shutil.copytree(whole[0], tmp_path / "checkpoints")


def test_a_run_goes_on_under_another_plan(
    run_ranks: RunRanks, tmp_path: Path, whole: tuple[Path, list[float]], begun: Path
) -> None:
    """Two ranks have begun, three go on, two end it."""
    folder, expected = begun, whole[1]
    assert [path.name for path in list_steps(folder)] == [step_folder(3), step_folder(2)]
    # The newest is damaged: the one before it serves.
    damaged = folder / step_folder(3) / "optim" / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    only = ("--checkpoint.last_save_model_only", "--checkpoint.export_dtype", "bfloat16")
    often = ("--checkpoint.interval", "1", "--checkpoint.async_mode", "disabled")
    ends, losses = run(run_ranks, tmp_path, *only, *often, steps=4, number=1, plan=OTHER_PLAN)
    assert [end.code for end in ends] == [0] * 3, ends[0].stderr
    assert losses == pytest.approx(expected[2:4], rel=1e-5)
    assert "passed over: " in ends[0].stdout and "optim/rank-00001.safetensors: tensor" in ends[0].stdout
    assert f"goes on from {folder / step_folder(2)}: step 2, 32 rows seen" in ends[0].stdout.replace(
        f"{tmp_path}/1/../checkpoints", str(folder)
    )
    # Of the last step the model alone is left.
    assert [path.name for path in list_steps(folder)] == [step_folder(3), step_folder(2)]
    assert len(list(folder.glob("step-00000003.replaced-*"))) == 1
    with safe_open(folder / f"model-{step_folder(4)}" / "model.safetensors", "pt") as exported:
        assert "layers.1.attention.wq.weight" in exported.keys()  # noqa: SIM118
        assert exported.get_slice("output.weight").get_dtype() == "BF16"
    ends, losses = run(run_ranks, tmp_path, *only, steps=4, number=2)
    assert not losses and "nothing is left to train" in ends[0].stdout
    assert len(list(folder.glob("model-*"))) == 1
    # It can be prolonged all the same.
    ends, losses = run(run_ranks, tmp_path, steps=5, number=3)
    assert losses == pytest.approx(expected[3:], rel=1e-5)


def test_a_model_alone_takes_the_place_of_no_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Of those that are kept; a run that is prolonged needs one."""
    keeps = ("--checkpoint.keep_latest_k", "1", "--checkpoint.interval", "1")
    only = ("--checkpoint.last_save_model_only", "--checkpoint.async_mode", "disabled")
    ends, _ = run(run_ranks, tmp_path, *keeps, *only, steps=3, number=0)
    assert [end.code for end in ends] == [0] * 2, ends[0].stderr
    left = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()}
    assert left == {step_folder(2), f"model-{step_folder(3)}"}


def test_the_model_is_handed_on_by_the_next_run_where_the_last_one_did_not(
    run_ranks: RunRanks, tmp_path: Path, begun: Path
) -> None:
    """As after a signal in the last step, or a kill between the last save and the export."""
    only = ("--checkpoint.last_save_model_only",)
    ends, losses = run(run_ranks, tmp_path, *only, steps=3, number=1)
    assert [end.code for end in ends] == [0] * 2, ends[0].stderr
    assert not losses and (begun / f"model-{step_folder(3)}" / "model.safetensors").exists()
    ends, _ = run(run_ranks, tmp_path, *only, steps=3, number=2)
    assert [end.code for end in ends] == [0] * 2 and "exported" not in ends[0].stdout


def test_the_best_is_kept_and_a_disk_that_is_full_stops_nothing(run_ranks: RunRanks, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a rose is a rose is a rose\n" * 45)
    best = ("--validation.enable", "--validation.dataset_path", str(held_out), "--validation.freq", "1")
    keeps = ("--checkpoint.keep_best", "--checkpoint.keep_latest_k", "1", "--optimizer.lr", "0.3")
    at_once = ("--checkpoint.async_mode", "disabled")
    ends, _ = run(run_ranks, tmp_path, *best, *keeps, *at_once, steps=4, number=0)
    assert [end.code for end in ends] == [0] * 2, ends[0].stderr
    losses = read_column(tmp_path / "0", "validation_metrics/loss")
    lowest = 1 + losses.index(min(losses))
    kept = {step_folder(lowest), step_folder(4)}
    assert {path.name for path in list_steps(tmp_path / "checkpoints")} == kept
    # The same command once more validates what it has.
    ends, _ = run(run_ranks, tmp_path, *best, *keeps, *at_once, steps=4, number=3)
    assert [end.code for end in ends] == [0] * 2, ends[0].stderr
    assert "nothing is left to train" in ends[0].stdout
    assert read_column(tmp_path / "3", "validation_metrics/loss") == pytest.approx(losses[3:])
    # A best that is better takes the place of the one before.
    falling = (*best, *keeps[:-1], "0.003", *at_once, "--checkpoint.folder", "../falling")
    ends, _ = run(run_ranks, tmp_path, *falling, steps=3, number=4)
    losses = read_column(tmp_path / "4", "validation_metrics/loss")
    assert losses == sorted(losses, reverse=True)
    assert [path.name for path in list_steps(tmp_path / "falling")] == [step_folder(3)]
    # No file may be as large as a checkpoint's.
    with files_no_larger_than(200_000):
        small = ("--training.dataset_path", str(held_out), "--checkpoint.folder", "../full")
        ends, losses = run(run_ranks, tmp_path, *small, steps=3, number=1)
    assert [end.code for end in ends] == [2] * 2
    assert len(losses) == 3
    assert "step 2 is not saved, older ones are as they were: rank " in ends[0].stdout
    assert (
        ends[0].stderr.startswith("error: the run ended after step 3, which could not be saved: rank")
        and "File too large" in ends[0].stderr
    )
    assert not list_steps(tmp_path / "full")
    # Two jobs, one folder.
    lease = Lease(tmp_path / "full")
    ends, losses = run(run_ranks, tmp_path, "--checkpoint.folder", "../full", steps=3, number=2)
    assert [end.code for end in ends] == [2] * 2 and not losses
    assert ends[0].stderr.startswith("error: [checkpoint] folder: rank ")
    assert f"process {os.getpid()} on" in ends[0].stderr and "saves into this folder" in ends[0].stderr
    assert "error: [checkpoint] folder: " in ends[0].stderr
    lease.release()


def test_a_validation_before_which_a_signal_stopped_the_run_is_made_up_for(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """The step was never validated, and never the best."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a rose is a rose is a rose\n" * 45)
    held_out_rows = ("--validation.enable", "--validation.dataset_path", str(held_out))
    keeps = ("--checkpoint.keep_best", "--checkpoint.interval", "100000")
    settings = (*held_out_rows, "--validation.freq", "1", *keeps)
    ends, losses = run(
        run_ranks, tmp_path, *settings, steps=100000, number=0, plan=OTHER_PLAN, is_stopped=True
    )
    assert {end.code for end in ends} == {128 + signal.SIGTERM}, ends[0].stderr
    step, before = len(losses), read_column(tmp_path / "0", "validation_metrics/loss")
    assert len(before) < step  # One may have been stopped in its middle, too.
    ends, losses = run(run_ranks, tmp_path, *settings, steps=step + 1, number=1, plan=OTHER_PLAN)
    assert [end.code for end in ends] == [0] * 3, ends[0].stderr
    validated = read_column(tmp_path / "1", "validation_metrics/loss")
    assert len(losses) == 1 and len(validated) == 2
    best = read_manifest(list_steps(tmp_path / "checkpoints")[0]).extra["best"]
    assert best["loss"] == pytest.approx(min(*validated, *before))
    ends, _ = run(run_ranks, tmp_path, *settings, steps=step + 2, number=2, plan=OTHER_PLAN)
    assert len(read_column(tmp_path / "2", "validation_metrics/loss")) == 1


def test_a_validation_that_a_signal_has_stopped_is_made_up_for(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step more was taken, which no validation was to follow."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a rose is a rose is a rose\n" * 200)
    settings = ("--validation.enable", "--validation.dataset_path", str(held_out), "--validation.freq", "2")
    evaluate = HeteroPipeline.evaluate

    def end_self(pipe: HeteroPipeline, *batch: Any, **keywords: Any) -> Any:
        if pipe.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # A thread reads it.
        return evaluate(pipe, *batch, **keywords)

    monkeypatch.setattr(HeteroPipeline, "evaluate", end_self)
    ends, losses = run(run_ranks, tmp_path, *settings, steps=5, number=0)
    assert {end.code for end in ends} == {128 + signal.SIGTERM}, ends[0].stderr
    assert len(losses) == 2
    monkeypatch.undo()
    run(run_ranks, tmp_path, *settings, steps=3, number=1)
    assert len(read_column(tmp_path / "1", "validation_metrics/loss")) == 2


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_best_that_is_not_saved_is_no_mark_for_those_after_it(tmp_path: Path, is_begun: bool) -> None:
    """A step that was worse than it, and better than all that are saved, was not kept. `is_begun`: the disk
    is full."""
    settings = Checkpoint(enable=True, keep_best=True, interval=1000)
    config = Config(job=Job(dump_folder=str(tmp_path)), checkpoint=settings, training=Training(steps=100))
    saved: list[int] = []

    def fail() -> None:
        raise CheckpointError("disk full")

    def save(*_: Any, **__: Any) -> Any:
        fails = pipe.num_steps == 2
        if fails and not is_begun:
            return None  # The one before is on its way.
        if not fails:
            saved.append(pipe.num_steps)
        finished = threading.Event()
        finished.set()
        return SimpleNamespace(
            step=pipe.num_steps,
            num_bytes=0,
            seconds=0,
            warnings=(),
            wait=fail if fails else str,
            finished=finished,
        )

    pipe: Any = SimpleNamespace(num_steps=0, rank=0, save=save)
    model: Any = SimpleNamespace(name="m", folder=None)
    rows: Any = SimpleNamespace(fingerprint=str)
    world: Any = SimpleNamespace(from_first=lambda work: work())
    nothing: Any = None
    checkpoints = RunCheckpoints(config, pipe, world, model, nothing, rows)
    for step, loss in ((1, 4.0), (2, 1.0), (3, 2.0), (4, 3.0)):
        pipe.num_steps = step
        checkpoints.save_if_due(step, validation_loss=loss)
    assert saved == [1, 3]


def test_who_waits_for_a_disk_that_does_not_answer_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoints_of_runs, "_SAY_AFTER_S", 0.01)
    monkeypatch.setattr(checkpoints_of_runs.logger, "propagate", True)
    config = Config(job=Job(dump_folder=str(tmp_path)), checkpoint=Checkpoint(enable=True))
    save = Save(7, tmp_path)

    def answer() -> Path:
        save.path = tmp_path
        return tmp_path

    monkeypatch.setattr(save, "wait", answer)
    pipe: Any = SimpleNamespace(num_steps=7, rank=0, save=lambda *_, **__: save)
    model: Any = SimpleNamespace(name="m", folder=None)
    rows: Any = SimpleNamespace(fingerprint=str)
    nothing: Any = None
    checkpoints = RunCheckpoints(config, pipe, nothing, model, nothing, rows)
    checkpoints.save_last(is_finished=False)
    assert f"waits for the save of step 7, still on its way into {tmp_path}, where older" in caplog.text


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """For processes that are forked inside."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_differs_from_the_run_before_is_said_once(
    run_ranks: RunRanks, tmp_path: Path, begun: Path
) -> None:
    ends, _ = run(run_ranks, tmp_path, "--debug.seed", "5", steps=4, number=1)
    assert [end.code for end in ends] == [0] * 2, ends[0].stderr
    assert [end.stdout.count("seed was ") for end in ends] == [1, 0]


def test_branching_off_is_asked_for(run_ranks: RunRanks, tmp_path: Path, begun: Path) -> None:
    ends, _ = run(run_ranks, tmp_path, "--checkpoint.load_step", "2", steps=3, number=1)
    assert [end.code for end in ends] == [2] * 2
    assert "has newer ones (step 3)" in ends[0].stderr
    path = begun / step_folder(2)
    branch = ("--checkpoint.folder", "branch", "--checkpoint.initial_load_path", str(path))
    all_of_it = "--checkpoint.no-initial_load_model_only"
    ends, whole = run(run_ranks, tmp_path, *branch, all_of_it, steps=3, number=2)
    assert len(whole) == 1 and "goes on from" in ends[0].stdout
    ends, alone = run(run_ranks, tmp_path, *branch, "--checkpoint.folder", "new", steps=2, number=3)
    assert len(alone) == 2 and "begins with the model of" in ends[0].stdout
