"""The training program whose processes are killed, told to leave and come: the losses of a run that never
failed, in one log."""

from __future__ import annotations

import csv
import multiprocessing
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import debug_llama
import pytest
import torch
from ranks import RankExit, RunRanks, free_port

from zorselike.checkpoint import lease
from zorselike.checkpoint.folder import list_steps
from zorselike.elastic.meeting.asking import ask
from zorselike.train import trainer
from zorselike.train.__main__ import main
from zorselike.train.config.config import Config
from zorselike.train.config.model import TrainedModel, find_model
from zorselike.train.elastic import program
from zorselike.train.elastic.pipeline import ProgramPipeline

STEPS = 8
PLAN = """
version = 1
global_batch = 6
[[groups]]
ranks = [0, 1]
zero = 2
shares = [[0, 4, 2], [1, 2, 1]]
[[groups]]
ranks = [2]
shares = [[2, 6, 3]]
[[ministages]]
group = 0
modules = ["tok_embeddings", "layers.0"]
[[ministages]]
group = 1
modules = ["layers.1", "norm", "output"]
"""
ALONE = """
version = 1
global_batch = 6
[[groups]]
ranks = [0]
shares = [[0, 6, 3]]
[[ministages]]
group = 0
modules = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
"""
RECIPE = """
[model]
flavor = "debug"
override = ["dim=16", "num_layers=2", "num_heads=2", "num_kv_heads=1", "ffn_hidden=24", "vocab_size=256"]
[hetero]
plan = "plan.toml"
device = "cpu"
[training]
dataset_path = "text.txt"
seq_len = 16
steps = 8
mixed_precision_param = "float32"
dataloader.num_workers = 0
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 3
total_steps = 8
[validation]
enable = true
dataset_path = "held_out.txt"
freq = 3
[metrics]
log_freq = 1
enable_tensorboard = false
"""
LOSSES = ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/loss")

Faults = Sequence[tuple[int, int, tuple[int, ...], int]]
"""From which step on, with how many ranks, which of them at once, and the signal."""


def enter_and_count(
    enter: Callable[[Any], None], left: list[int], act: Callable[[], None], action: Any
) -> None:
    """Acts after so many actions."""
    enter(action)
    left[0] -= 1
    if left[0] == -1:
        act()


@pytest.fixture(scope="module", autouse=True)
def what_ranks_inherit() -> None:
    debug_llama.warm_up()


def find_model_in_fp64(config: Config) -> TrainedModel:
    model = find_model(config)
    return replace(model, build=lambda: model.build().double())


def start(rank: int, world_size: int, port: int, arguments: list[str], faults: Faults, marks: Path) -> None:
    """What `zorselike run` does for one worker, without its nanny; things happen to it once."""
    torch.set_num_threads(1)
    trainer.find_model = program.find_model = find_model_in_fp64
    os.environ.update(ZORSELIKE_JOB_TOKEN="token", LOCAL_RANK=str(rank), ZORSELIKE_NODE=f"node{rank % 2}")
    address = f"127.0.0.1:{port}"
    if rank == 0:
        os.environ.update(ZORSELIKE_FOUND=address, ZORSELIKE_MEMBERS=str(world_size))
    else:
        os.environ.update(ZORSELIKE_JOIN=address)
    step = ProgramPipeline.step

    def step_to_its_fault(pipe: ProgramPipeline, *rows: Any, **keywords: Any) -> Any:
        own = marks / f"{os.getpid()}"
        own.write_text(str(os.getpid()))
        own.rename(marks / f"rank{pipe.rank}")  # At once: another may be reading it.
        for at, num_ranks, who, number in faults:
            mark = marks / f"{at}-{num_ranks}-{who[-1]}"
            is_due = pipe.num_steps >= at and (pipe.plan.num_ranks, pipe.rank) == (num_ranks, who[-1])
            if is_due and not mark.exists():
                mark.touch()
                inner: Any = pipe.pipe
                executor = inner._executor
                kill = partial(send, number, [marks / f"rank{rank}" for rank in who])
                executor.enter = partial(enter_and_count, executor.enter, [7 + who[-1]], kill)
        return step(pipe, *rows, **keywords)

    ProgramPipeline.step = step_to_its_fault  # type: ignore[method-assign]
    sys.argv = ["train", *arguments]
    sys.exit(main())


def start_wrong_first(
    rank: int, world_size: int, port: int, arguments: list[str], faults: Faults, marks: Path
) -> None:
    if rank == 1:
        start_wrong(rank, world_size, port, arguments, faults, marks)
    start(rank, world_size, port, arguments, faults, marks)


def start_wrong(rank: int, *others: Any) -> None:
    """In a process of its own, with another recipe than those who are there."""
    world_size, port, arguments, faults, marks = others
    wrong = (rank, world_size, port, [*arguments, "--optimizer.lr", "1"], faults, marks)
    refused = multiprocessing.get_context("fork").Process(target=start, args=wrong)
    refused.start()
    refused.join()
    assert refused.exitcode == 2


def start_in_vain(
    rank: int, world_size: int, port: int, arguments: list[str], faults: Faults, marks: Path
) -> None:
    """The founder alone is left, and told to end while it waits for others."""
    founder = marks / "founder"
    if rank == 0:
        founder.write_text(str(os.getpid()))
        start(rank, world_size, port, arguments, faults, marks)
    start_wrong(rank, world_size, port, arguments, faults, marks)
    while ask("127.0.0.1", port, "token", {"ask": "status"})["status"]["state"] != "waiting":
        time.sleep(0.05)
    time.sleep(0.5)  # A thread of its own frees the one that trains.
    send(signal.SIGTERM, [founder])


def send(number: int, processes: Sequence[Path]) -> None:
    for path in processes:
        os.kill(int(path.read_text()), number)


def start_alone(rank: int, world_size: int, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    trainer.find_model = find_model_in_fp64
    sys.argv = ["train", *arguments]
    sys.exit(main())


def write_recipe(folder: Path) -> Path:
    (folder / "plan.toml").write_text(PLAN)
    (folder / "alone.toml").write_text(ALONE)
    (folder / "text.txt").write_text(textwrap.dedent(" ".join(map(str, range(900)))))
    (folder / "held_out.txt").write_text(" ".join(map(str, range(900, 960))))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def train(
    run_ranks: RunRanks,
    folder: Path,
    *arguments: str,
    num: int,
    faults: Faults = (),
    name: str = "run",
    start: Callable[..., None] = start,
) -> list[RankExit]:
    port = free_port()
    recipe, marks = folder / "recipe.toml", folder / f"marks-{name}"
    marks.mkdir()
    command = [
        "--config",
        str(recipe),
        "--job.dump_folder",
        str(folder / name),
        "--elastic.enable",
        *arguments,
    ]
    return run_ranks(start, num, port, command, faults, marks, init=False, allow_exit=True)


def train_alone(run_ranks: RunRanks, folder: Path, *arguments: str, name: str) -> None:
    recipe = ["--config", str(folder / "recipe.toml"), "--hetero.plan", str(folder / "alone.toml")]
    command = [*recipe, "--job.dump_folder", str(folder / name), *arguments]
    (end,) = run_ranks(start_alone, 1, command, init=False, allow_exit=True)
    assert end.code == 0, end.stderr


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A folder with the recipe, and what a run has written to which nothing happens, of one process by the
    ordinary loop."""
    import ranks

    folder = tmp_path_factory.mktemp("unbroken")
    write_recipe(folder)
    train_alone(ranks.run_ranks, folder, name="alone")
    return folder, read_rows(folder / "alone")


def read_rows(folder: Path) -> list[dict[str, float]]:
    (path,) = folder.glob("recipe-*/metrics.csv")
    return read_csv(path)


def read_csv(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def read_log(folder: Path) -> str:
    (path,) = folder.glob("recipe-*/log.txt")
    return path.read_text()


def check(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for own, other in zip(found, expected, strict=True):
        for name in LOSSES:
            assert (name in own) == (name in other), (name, own["step"])
            assert own.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-10, abs=1e-10)


def test_a_rank_and_then_the_leader_are_killed(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, expected = unbroken
    faults = ((2, 3, (1,), signal.SIGKILL), (5, 3, (0,), signal.SIGKILL))
    ends = train(run_ranks, folder, num=4, faults=faults)  # One of them a spare.
    assert sorted(end.code for end in ends) == [-signal.SIGKILL] * 2 + [0] * 2, [end.stderr for end in ends]
    rows, log = read_rows(folder / "run"), read_log(folder / "run")
    check(rows, expected)
    lines = [line for line in log.splitlines() if "elastic: lost" in line]
    assert len(lines) == 2
    assert "; now a plan for 3 ranks in groups of 2 + 1" in lines[0].replace("the same plan", "a plan")
    assert [row["elastic/num_lost"] for row in rows if "elastic/num_lost" in row] == [1, 1]
    assert log.count("step:  1  loss:") == 1
    assert f"finished after {STEPS} of {STEPS} steps" in log


def test_what_mirrors_do_not_mend_goes_back_to_a_checkpoint(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, expected = unbroken
    saves = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.async_mode", "disabled")
    train_alone(run_ranks, folder, "--training.steps", "3", *saves, name="saved")
    # A rank and who mirrors it, at once: of three, two are gone.
    faults = ((5, 3, (2, 1), signal.SIGKILL),)
    ends = train(run_ranks, folder, *saves, num=3, faults=faults, name="saved")
    assert sorted(end.code for end in ends) == [-signal.SIGKILL] * 2 + [0], [end.stderr for end in ends]
    (run,) = (path.parent for path in (folder / "saved").glob("*/log.txt") if "elastic" in path.read_text())
    log = (run / "log.txt").read_text()
    assert "goes on from" in log.partition("step:  4")[0]
    (line,) = (line for line in log.splitlines() if "elastic: lost" in line)
    assert "goes on after step 4 from the newest checkpoint" in line
    assert "1 step lost" in line
    rows = read_csv(run / "metrics.csv")
    check(rows, expected[3:])
    steps = [int(path.name.removeprefix("step-")) for path in list_steps(folder / "saved" / "checkpoint")]
    assert steps[0] == STEPS


def start_elsewhere(rank: int, *others: Any) -> None:
    """Each as if on a machine of its own: whether the holder of a lease has ended is not to be seen there."""
    lease._is_gone = lambda *_: False
    start(rank, *others)


def test_a_spare_that_alone_is_left_goes_on_from_the_job_s_checkpoint_in_its_folders(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    """It was refused by the lease of its own job, and had begun another folder of a run."""
    folder, expected = unbroken
    saves = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.async_mode", "disabled")
    faults = ((5, 3, (1, 2, 0), signal.SIGKILL),)
    ends = train(run_ranks, folder, *saves, num=4, faults=faults, name="orphan", start=start_elsewhere)
    assert sorted(end.code for end in ends) == [-signal.SIGKILL] * 3 + [0], [end.stderr for end in ends]
    check(read_rows(folder / "orphan"), expected)
    assert "goes on from" in read_log(folder / "orphan")


def start_where_the_disk_goes(rank: int, *others: Any) -> None:
    """The leader is lost with the disk, which comes back three steps later."""
    arguments = others[2]
    folder = Path(arguments[arguments.index("--job.dump_folder") + 1])
    away, step = folder.with_name(f"{folder.name} away"), ProgramPipeline.step

    def step_where_the_disk_goes(pipe: ProgramPipeline, *rows: Any, **keywords: Any) -> Any:
        if pipe.rank == 0 and pipe.num_steps == 3 and pipe.plan.num_ranks == 3:
            folder.rename(away)
            folder.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if pipe.rank == 0 and pipe.num_steps == 6 and away.exists():
            folder.unlink()
            away.rename(folder)
        return step(pipe, *rows, **keywords)

    ProgramPipeline.step = step_where_the_disk_goes  # type: ignore[method-assign]
    start(rank, *others)


def test_a_rank_is_lost_while_nothing_can_be_written(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    """The new leader could not make the lease of the folder of checkpoints anew, and all ended."""
    folder, expected = unbroken
    saves = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.async_mode", "disabled")
    board = "--metrics.enable_tensorboard"
    ends = train(run_ranks, folder, *saves, board, num=3, name="away", start=start_where_the_disk_goes)
    assert sorted(end.code for end in ends) == [-signal.SIGKILL, 0, 0], [end.stderr for end in ends]
    check(read_rows(folder / "away"), expected[:3])
    steps = [int(path.name.removeprefix("step-")) for path in list_steps(folder / "away" / "checkpoint")]
    assert steps[0] == STEPS and 6 not in steps


def start_where_checkpoints_go(rank: int, *others: Any) -> None:
    arguments, step = others[2], ProgramPipeline.step
    saved = Path(arguments[arguments.index("--job.dump_folder") + 1]) / "checkpoint"

    def step_where_checkpoints_go(pipe: ProgramPipeline, *rows: Any, **keywords: Any) -> Any:
        if pipe.rank == 0 and pipe.num_steps == 5 and pipe.plan.num_ranks == 3:
            saved.rename(saved.with_name("away"))
        return step(pipe, *rows, **keywords)

    ProgramPipeline.step = step_where_checkpoints_go  # type: ignore[method-assign]
    start(rank, *others)


def test_who_would_go_back_to_a_checkpoint_that_is_away_does_not_begin_anew(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    """It began with what a run begins with, or was told of `skip_init`."""
    folder, _ = unbroken
    train_alone(run_ranks, folder, "--training.steps", "1", "--checkpoint.enable", name="first")
    first = str(folder / "first" / "checkpoint" / "step-00000001")
    saves = ("--checkpoint.enable", "--checkpoint.interval", "4", "--checkpoint.initial_load_path", first)
    faults = ((5, 3, (2, 1), signal.SIGKILL),)
    own = {"faults": faults, "name": "none", "start": start_where_checkpoints_go}
    ends = train(run_ranks, folder, *saves, "--checkpoint.async_mode", "disabled", num=3, **own)
    assert [end.code for end in ends if end.code > 0] == [2], [end.stderr for end in ends]
    assert "the checkpoints that this run has saved are there no more" in "".join(end.stderr for end in ends)


def test_who_is_told_to_end_leaves_and_all_who_are_save(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, expected = unbroken
    many = ("--training.steps", "100000", "--checkpoint.enable", "--checkpoint.interval", "100000")
    faults = ((3, 3, (2,), signal.SIGTERM), (9, 2, (0, 1), signal.SIGTERM))
    ends = train(run_ranks, folder, *many, num=3, faults=faults, name="left")
    assert [end.code for end in ends] == [0] * 3, [end.stderr for end in ends]
    assert sum("out of the job after step" in end.stderr for end in ends) == 1
    log = read_log(folder / "left")
    assert "elastic: left: " in log
    assert "no step lost" in log
    (path,) = list_steps(folder / "left" / "checkpoint")
    step = int(path.name.removeprefix("step-"))
    assert f"stopped by SIGTERM after {step} of 100000 steps" in log
    assert f"the same command goes on from step {step}" in log
    before = STEPS - 1  # After the last step the other run has validated.
    check(read_rows(folder / "left")[:before], expected[:before])


def test_a_spare_takes_a_place_where_the_cards_decide_in_which_dtype_they_compute(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    """Those who were there knew the dtype by then, and it did not: that ended the job."""
    folder, _ = unbroken
    dtype = ("--training.mixed_precision_param", "auto")
    ends = train(run_ranks, folder, *dtype, num=4, faults=((2, 3, (1,), signal.SIGKILL),), name="auto")
    assert sorted(end.code for end in ends) == [-signal.SIGKILL, 0, 0, 0], [end.stderr for end in ends]


def test_who_founds_a_job_goes_on_waiting_where_another_recipe_is_refused(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    """The founder ended, by an error that named no key."""
    folder, expected = unbroken
    ends = train(run_ranks, folder, num=3, name="unlike", start=start_wrong_first)
    assert [end.code for end in ends] == [0] * 3, [end.stderr for end in ends]
    assert "[optimizer] lr is 1.0 in this process, and 0.01 in the job" in ends[1].stderr
    check(read_rows(folder / "unlike"), expected)


def test_who_founds_a_job_can_be_ended_where_it_waits_again(
    run_ranks: RunRanks, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, _ = unbroken
    ends = train(run_ranks, folder, num=2, name="vain", start=start_in_vain)
    assert [end.code for end in ends] == [128 + signal.SIGTERM, 0], [end.stderr for end in ends]
    assert "ended before this process was given a part in its job" in ends[0].stderr
