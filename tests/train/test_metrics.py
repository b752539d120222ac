"""What a run says of itself."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks

from zorselike import Group, Microbatch, Ministage, Plan
from zorselike.models import flops_per_token, get_config
from zorselike.train.config.config import Metrics
from zorselike.train.report import metrics
from zorselike.train.report.metrics import MetricsLog, StepWork, sum_peak_flops, work_of_step

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
    work = work_of_step(model, plan, seq_len=32)
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
    log = MetricsLog(
        Metrics(log_freq=3),
        rank=1 - rank,  # The plan's rank, not the launcher's.
        steps=7,
        work=StepWork(num_tokens=1000, model_flops=10**9, hardware_flops=13 * 10**8),
        peak_flops=peak,
        device=torch.device("cpu"),
        group=group,
        events_folder=folder if rank == 0 else None,
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
    log.close()
    return lines, read_events(folder) if rank == 0 else {}


def read_events(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [point.value for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_lines_and_events(run_ranks: RunRanks, tmp_path: Path) -> None:
    (lines, events), (others, _) = run_ranks(log_steps, 2, tmp_path, 1e9, 1.0, None)
    assert not others
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
