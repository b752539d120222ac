"""What a run says of itself."""

from __future__ import annotations

import csv
import logging
import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks

from zorselike import ConfigError, Group, Microbatch, Ministage, Plan
from zorselike.models import flops_per_token, get_config
from zorselike.train.config.config import Config, Job, Metrics, Validation
from zorselike.train.config.model import find_model
from zorselike.train.report import metrics
from zorselike.train.report.metrics import MetricsLog, StepWork, sum_peak_flops, work_of_step
from zorselike.train.report.writers import CsvWriter, Writer, check_writers, open_writers

LAYERS = tuple(f"layers.{number}" for number in range(6))


@dataclass(frozen=True)
class Result:
    loss: float = 2.5
    grad_norm: float = 0.75
    is_skipped: bool = False


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def sum_two(rank: int, world_size: int) -> tuple[float | None, float | None]:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return sum_peak_flops(1.0 + rank, group=group), sum_peak_flops(None if rank else 1.0, group=group)


def test_one_unknown_peak_makes_the_sum_unknown(run_ranks: RunRanks) -> None:
    assert run_ranks(sum_two, 2) == [(3.0, None)] * 2


def test_recomputation_counts_for_the_hardware_only() -> None:
    rows = (Microbatch(0, 0, 4),)
    plan = Plan(
        global_batch=4,
        groups=(
            Group(ranks=(0,), microbatches=rows, recompute="layer"),
            Group(ranks=(1,), microbatches=(Microbatch(1, 0, 4),)),
        ),
        ministages=(
            Ministage(0, ("tok_embeddings", *LAYERS[:2])),
            Ministage(1, (*LAYERS[2:], "norm", "output")),
        ),
    )
    model = get_config("llama", "debug")
    work = work_of_step(find_model(Config()), plan, seq_len=32)
    assert work.num_tokens == 128
    assert work.model_flops == 128 * flops_per_token(model, 32)
    whole = 128 * (flops_per_token(model, 32, recompute=True) - flops_per_token(model, 32))
    assert work.hardware_flops - work.model_flops == pytest.approx(whole * 2 / 6)


def log_steps(
    rank: int,
    world_size: int,
    folder: Path,
    peak: float | None,
    estimate: float | None,
    skipped: tuple[int, ...] | None,
) -> tuple[list[str], dict[str, list[float]]]:
    clock = Clock()
    metrics.time = clock  # type: ignore[attr-defined]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    metrics.logger.handlers = [handler]
    metrics.logger.setLevel(logging.INFO)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    sent: list[tuple[int, dict[str, float]]] = []
    finished: list[bool] = []
    writers: list[Writer] = []
    if rank == 0:
        settings = Metrics(enable_wandb=True)
        config = Config(Job(description="mine"), metrics=settings, validation=Validation(True))
        sys.modules["wandb"] = stand_in(sent, finished)
        writers = open_writers(config, folder=folder, rank=1, launcher_rank=0)
    log = MetricsLog(
        Metrics(log_freq=3),
        rank=1 - rank,  # The plan's rank, not the launcher's.
        steps=7,
        work=StepWork(num_tokens=1000, model_flops=10**9, hardware_flops=13 * 10**8),
        peak_flops=peak,
        device=torch.device("cpu"),
        group=group,
        writers=writers,
        estimated_step_s=estimate,
    )
    log.restart()
    for step in range(1, 8):
        log.begin_step()
        log.end_step(Result(is_skipped=step in (skipped or ())))

        def batches() -> object:
            clock.now += 0.5
            yield None

        log.wait_for_data(iter(batches()))  # type: ignore[call-overload]
        clock.now += 1.5
        if log.is_due(step):
            scale = None if skipped is None else 65536.0
            log.log(step, lr=0.1, busy_s=0.5 if rank else 1.0, loss_scale=scale)
        if step in (3, 5):
            with log.excluding():
                clock.now += 100.0
            log.log_validation(step, 1.0 + step, num_batches=1, seconds=100.0)
    log.close()
    if rank == 0:
        check_copies(folder, sent, finished)
    return lines, read_events(folder / "tb") if rank == 0 else {}


def stand_in(sent: list[tuple[int, dict[str, float]]], finished: list[bool]) -> Any:
    """A `wandb` that keeps what it is told."""

    def init(**arguments: Any) -> Any:
        assert arguments["project"] == "zorselike" and arguments["notes"] == "mine"
        assert arguments["config"]["metrics"]["enable_wandb"]
        return SimpleNamespace(
            log=lambda values, step: sent.append((step, values)), finish=lambda: finished.append(True)
        )

    return SimpleNamespace(init=init)


def check_copies(folder: Path, sent: list[tuple[int, dict[str, float]]], finished: list[bool]) -> None:
    """The CSV file and wandb have what TensorBoard has, by step."""
    events = read_events(folder / "tb")
    assert finished == [True]
    for name, points in events.items():
        assert [values[name] for _, values in sent if name in values] == pytest.approx(points)
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "3", "5", "6", "7"]
    assert {*rows[0]} == {"step", *events}
    for name, points in events.items():
        assert [float(row[name]) for row in rows if row[name]] == pytest.approx(points)
    assert [row["validation_metrics/loss"] for row in rows] == ["", "4.0", "6.0", "", ""]


def read_events(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [point.value for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_lines_and_events(run_ranks: RunRanks, tmp_path: Path) -> None:
    (lines, events), (others, _) = run_ranks(log_steps, 2, tmp_path, 1e9, 1.0, None)
    assert not others
    validations = [lines.pop(2), lines.pop(2)]
    assert validations[0] == "validate step:  3  loss:  4.00000  1 batch in 100.0 s"
    assert [re.search(r"step: +(\d+)", line)[1] for line in lines] == ["1", "3", "6", "7"]  # type: ignore[index]
    assert re.fullmatch(
        r"step:  3  loss:  2\.50000  grad_norm:  0\.7500  memory: +\d+\.\d\dGiB\(\d+\.\d\d%\)  tps: 500  "
        r"tflops: 0\.00  mfu: 50\.00%  hfu: 65\.00%  busy: 25/50%  left: 0:00:08",
        lines[1],
    )
    assert events["loss_metrics/global_avg_loss"] == [2.5] * 4
    assert events["throughput(tps)"] == pytest.approx([500] * 4)
    assert events["mfu(%)"] == pytest.approx([50] * 4)
    assert events["hetero/hfu(%)"] == pytest.approx([65] * 4)
    assert events["hetero/rank_0/busy(%)"] == pytest.approx([25] * 4)
    assert events["hetero/rank_1/busy(%)"] == pytest.approx([50] * 4)
    assert events["hetero/step_time_over_estimate"] == pytest.approx([2] * 4)
    assert events["time_metrics/end_to_end(s)"] == pytest.approx([2] * 4)
    assert events["time_metrics/data_loading(%)"] == pytest.approx([25] * 4)
    assert {
        "grad_norm",
        "lr",
        "tflops",
        "memory/max_reserved(GiB)",
        "memory/max_reserved(%)",
    } <= events.keys()


def test_a_full_disk_costs_numbers_there_and_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def write(self, step: int, values: Mapping[str, float]) -> None:
            if step != 3:
                raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    written: list[int] = []
    works = Mock(write=lambda step, values: written.append(step))
    log = MetricsLog.__new__(MetricsLog)
    log._writers = {Full(): True, works: True}
    metrics.logger.propagate = True
    for step in (1, 2, 3, 4):
        log.write(step, {})
    log.close()
    assert written == [1, 2, 3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "no numbers go to Full for now; the log has them: OSError: [Errno 28] No space left on device"
    ] * 2


def test_rows_that_were_not_written_whole_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    writer = CsvWriter(path)
    file = writer._file
    for step, room in ((1, 100), (2, 3), (2, 100), (3, 0), (4, 100)):
        writer._file = SimpleNamespace(  # type: ignore[assignment]
            seek=file.seek, truncate=file.truncate, write=lambda own, n=room: file.write(own[:n]), name="x"
        )
        with suppress(OSError):
            writer.write(step, {"loss": 2.5})
    writer._file = file
    writer.close()
    assert path.read_text() == "step,loss\n1,2.5\n2,2.5\n4,2.5\n"


def test_numbers_that_come_later_have_columns_too(tmp_path: Path) -> None:
    """A run that goes on may validate before it logs a step."""
    path = tmp_path / "metrics.csv"
    writer = CsvWriter(path, later=["validation"])
    for step, values in (
        (14, {"validation": 5.5}),
        (20, {"loss": 2.5, "lr": 0.5}),
        (21, {"validation": 4.5}),
        (21, {"loss": 1.5, "speed": 7.0}),
        (30, {"loss": 0.5}),
    ):
        writer.write(step, values)
    writer.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: float(value) for name, value in row.items() if value} for row in rows] == [
        {"step": 14, "validation": 5.5},
        {"step": 20, "loss": 2.5, "lr": 0.5},
        {"step": 21, "validation": 4.5, "loss": 1.5, "speed": 7},
        {"step": 30, "loss": 0.5},
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 9])
def test_a_file_goes_on_after_a_step(tmp_path: Path, after: int) -> None:
    """As another process has left it, which was killed while it wrote."""
    path = tmp_path / "metrics.csv"
    CsvWriter(path, later=["more"], after=4).write(1, {"loss": 2.5})  # Nothing is there yet.
    path.write_text(path.read_text() + "2,1.5,\n3,0.5,7.0\n4,0.")
    writer = CsvWriter(path, later=["more"], after=after)
    assert writer.row.get("step") == (min(after, 3) or None)
    writer.write(after, {"more": 8.0} if after else {"loss": 9.0})
    writer.write(after + 1, {"loss": 4.5})
    writer.close()
    kept = ["1,2.5,", "2,1.5,", "3,0.5,7.0"][:after]
    if after == 9:
        kept.append("9,,8.0")
    elif after:
        kept[-1] = kept[-1].rpartition(",")[0] + ",8.0"
    else:
        kept = ["0,9.0,"]
    assert path.read_text().splitlines() == ["step,loss,more", *kept, f"{after + 1},4.5,"]


def test_wandb_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = Config(metrics=Metrics(enable_wandb=True, enable_tensorboard=False))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'zorselike\[wandb\]'"):
        check_writers(config)

    def fail(**_: object) -> None:
        raise RuntimeError("no API key\nand more")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail))
    with pytest.raises(ConfigError, match=r"does not start: .*no API key; log in by"):
        open_writers(config, folder=tmp_path, rank=0, launcher_rank=0)


def test_a_folder_of_events_that_there_cannot_be_is_named_by_its_key(tmp_path: Path) -> None:
    config = Config(metrics=Metrics(enable_tensorboard=True, save_tb_folder="a" * 300))
    with pytest.raises(ConfigError, match=r"^\[metrics\] save_tb_folder: .*a: File name too long$"):
        open_writers(config, folder=tmp_path, rank=0, launcher_rank=0)


def test_without_known_peaks_there_is_no_mfu(run_ranks: RunRanks, tmp_path: Path) -> None:
    (lines, events), _ = run_ranks(log_steps, 2, tmp_path, None, None, None)
    assert "mfu: n/a  busy" in lines[0]
    assert not {"mfu(%)", "hetero/hfu(%)", "hetero/step_time_over_estimate"} & events.keys()
    assert not any(math.isnan(value) for values in events.values() for value in values)
    assert not {"hetero/loss_scale", "hetero/num_skipped_steps"} & events.keys()


def test_skipped_steps_between_two_lines_count(run_ranks: RunRanks, tmp_path: Path) -> None:
    (lines, events), _ = run_ranks(log_steps, 2, tmp_path, None, None, (1, 2, 5))
    assert events["hetero/num_skipped_steps"] == [1, 2, 3, 3]
    assert events["hetero/loss_scale"] == [65536] * 4
    assert "grad_norm:  0.7500  scale: 65536  skipped: 2  memory:" in lines[1]
