"""Log lines and numbers for files: TorchTitan's names, and `hetero/...` for what it lacks.

Two things differ from TorchTitan because devices differ: tokens per second and TFLOP/s are those of
the whole job, and utilization is over the sum of the devices' peaks.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from zorselike.plan.plan import Plan
from zorselike.runtime.result import StepResult
from zorselike.text.units import GIB
from zorselike.text.wording import count, first_line
from zorselike.train.config.config import Metrics as MetricsConfig
from zorselike.train.config.model import TrainedModel
from zorselike.train.report import colors
from zorselike.train.report.estimates import RankFacts
from zorselike.train.report.memory import count_out_of_memory, read_footprint, read_peak, reset_peak
from zorselike.train.report.writers import VALIDATION_LOSS, CsvWriter, Writer

logger = logging.getLogger("zorselike")

T = TypeVar("T")


@dataclass(frozen=True)
class StepWork:
    """One optimizer step over the global batch, over all ranks."""

    num_tokens: int
    model_flops: int
    """FLOPs without recomputation."""
    hardware_flops: int
    """FLOPs with the plan's recomputation."""


def work_of_step(model: TrainedModel, plan: Plan, *, seq_len: int) -> StepWork:
    """The work of a step of `plan.global_batch` rows of `seq_len` tokens."""
    num_tokens = plan.global_batch * seq_len
    forward = model.forward_flops(seq_len)
    again = sum(
        forward[name]
        for ministage in plan.ministages
        if plan.groups[ministage.group].recompute == "layer"
        for name in ministage.modules
        if name in model.layers
    )
    once = 3 * sum(forward.values()) - model.frozen_flops  # The backward is twice the forward.
    return StepWork(num_tokens, num_tokens * once, num_tokens * (once + again))


@dataclass(frozen=True)
class RankReport:
    """One rank's numbers of an interval between two log lines."""

    rank: int
    memory_bytes: int
    memory_percent: float
    data_s: float
    busy_percent: float
    """Share of the interval's last step in which the rank computed."""
    num_ooms: int


class MetricsLog:
    """Counts steps and writes a log line and numbers every `log_freq` of them.

    Every rank has one and calls the same methods at the same steps; rank 0 prints.
    """

    def __init__(
        self,
        config: MetricsConfig,
        *,
        rank: int,
        steps: int,
        work: StepWork,
        peak_flops: float | None,
        device: torch.device,
        group: dist.ProcessGroup,
        writers: Sequence[Writer],
        estimated_step_s: float | None = None,
    ) -> None:
        """
        Args:
            rank: this process's rank in the plan.
            steps: number of steps of the whole run, for the time left.
            peak_flops: sum over all ranks; `None` if one is unknown.
            group: a Gloo group of all ranks, used between steps only.
            writers: where this rank's numbers go.
            estimated_step_s: the plan's estimate, to compare the run with.
        """
        self._log_freq, self._steps, self._rank = config.log_freq, steps, rank
        self._work, self._peak_flops, self._estimated_step_s = work, peak_flops, estimated_step_s
        self._device, self._group = device, group
        self._has_colors = sys.stdout.isatty() and not config.disable_color_printing
        self._num_skipped = 0
        self._is_steady = False
        """Whether the first interval, which includes start-up, is over."""
        self._num_steady_steps = 0
        self._steady_s = 0.0
        self._footprint_bytes: int | None = None
        self._writers = dict.fromkeys(writers, True)
        """And whether each took the last numbers."""
        self.restart()

    def restart(self) -> None:
        """Starts an interval now."""
        self._results: list[StepResult] = []
        self._data_s = 0.0
        self._began = self._step_began = time.perf_counter()
        reset_peak(self._device)

    def begin_step(self) -> None:
        """Marks the beginning of a step."""
        self._step_began = time.perf_counter()

    def end_step(self, result: StepResult) -> None:
        """Takes a step's result; nothing of it is read, and so waited for, before `log`."""
        self._results.append(result)

    def wait_for_data(self, batches: Iterator[T]) -> T:
        """The next of `batches`; counts the time that it takes."""
        asked = time.perf_counter()
        batch = next(batches)
        self._data_s += time.perf_counter() - asked
        return batch

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """What takes place inside does not count as time of steps."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def is_due(self, step: int) -> bool:
        """Whether a step, counted from 1, is logged."""
        return step == 1 or step % self._log_freq == 0 or step == self._steps

    def log(self, step: int, *, lr: float, busy_s: float, loss_scale: float | None) -> None:
        """Writes the interval that ends with `step`; collective.

        `busy_s`: seconds that this rank computed in that step. `loss_scale`: that of the next step, in fp16.
        """
        result = self._results[-1]
        loss, grad_norm = result.loss, result.grad_norm  # Waits for the step's end.
        self._num_skipped += sum(result.is_skipped for result in self._results)
        now = time.perf_counter()
        interval_s, step_s = now - self._began, now - self._step_began
        self._update_facts(interval_s)
        reports = self._exchange(100 * busy_s / step_s)
        values = self._summarise(reports, interval_s)
        if loss_scale is not None:
            values |= {"hetero/loss_scale": loss_scale, "hetero/num_skipped_steps": self._num_skipped}
        if dist.get_rank() == 0:
            left_s = (self._steps - step) * interval_s / len(self._results)
            self._say(self._format_line(step, loss, grad_norm, values, reports, left_s))
        self.write(step, {"loss_metrics/global_avg_loss": loss, "grad_norm": grad_norm, "lr": lr} | values)
        self.restart()

    def fill_in(self, last: tuple[int, float, float], *, lr: float) -> None:
        """Writes step, loss and gradient norm of a step that was done by others than are there now, where
        nobody has written them. Not collective."""
        step, loss, grad_norm = last
        if not self.is_due(step):
            return
        writers = [writer for writer in self._writers if isinstance(writer, CsvWriter)]
        if any(writer.row.get("step") == step for writer in writers):
            return
        self._say(f"step: {step:2}  loss: {loss:8.5f}  grad_norm: {grad_norm:7.4f}")
        self.write(step, {"loss_metrics/global_avg_loss": loss, "grad_norm": grad_norm, "lr": lr})

    def log_validation(self, step: int, loss: float, *, num_batches: int, seconds: float) -> None:
        """Writes the loss over the validation data after `step`."""
        if dist.get_rank() == 0:
            self._say(
                f"{colors.YELLOW}validate step: {step:2}  "
                f"{colors.GREEN}loss: {loss:8.5f}  "
                f"{colors.RESET}{count(num_batches, 'batch')} in {seconds:.1f} s"
            )
        self.write(step, {VALIDATION_LOSS: loss})

    def facts(self) -> RankFacts:
        """This rank's measurements over all logged steps."""
        step_s = self._steady_s / self._num_steady_steps if self._num_steady_steps else None
        return RankFacts(self._rank, step_s, self._footprint_bytes)

    def close(self) -> None:
        """Flushes and closes what was written."""
        for writer, worked in self._writers.items():
            _works(writer, writer.close, worked=worked)
        self._writers = {}

    def _say(self, line: str) -> None:
        logger.info(line if self._has_colors else colors.remove_colors(line))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Further numbers of a step."""
        for writer, worked in self._writers.items():
            self._writers[writer] = _works(writer, partial(writer.write, step, values), worked=worked)

    def _update_facts(self, interval_s: float) -> None:
        if self._is_steady:
            self._num_steady_steps += len(self._results)
            self._steady_s += interval_s
        self._is_steady = True
        footprint = read_footprint(self._device)
        if footprint is not None:
            self._footprint_bytes = max(footprint, self._footprint_bytes or 0)

    def _exchange(self, busy_percent: float) -> list[RankReport]:
        """The reports of all ranks, by their rank in the plan."""
        peak, num_ooms = read_peak(self._device), count_out_of_memory(self._device)
        report = RankReport(self._rank, peak.num_bytes, peak.percent, self._data_s, busy_percent, num_ooms)
        reports = [report] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, report, group=self._group)
        return sorted(reports, key=lambda each: each.rank)

    def _summarise(self, reports: Sequence[RankReport], interval_s: float) -> dict[str, float]:
        """Everything but loss, gradient norm and learning rate; unknown values are left out."""
        steps_per_s = len(self._results) / interval_s
        fullest = max(reports, key=lambda report: report.memory_percent)
        data_s = max(report.data_s for report in reports)
        values = {
            "throughput(tps)": self._work.num_tokens * steps_per_s,
            "tflops": self._work.model_flops * steps_per_s / 1e12,
            "time_metrics/end_to_end(s)": 1 / steps_per_s,
            "time_metrics/data_loading(s)": data_s / len(self._results),
            "time_metrics/data_loading(%)": 100 * data_s / interval_s,
            "memory/max_reserved(GiB)": fullest.memory_bytes / GIB,
            "memory/max_reserved(%)": fullest.memory_percent,
            "memory/num_ooms": sum(report.num_ooms for report in reports),
        }
        if self._peak_flops is not None:
            values["mfu(%)"] = 100 * self._work.model_flops * steps_per_s / self._peak_flops
            values["hetero/hfu(%)"] = 100 * self._work.hardware_flops * steps_per_s / self._peak_flops
        if self._estimated_step_s is not None:
            values["hetero/step_time_over_estimate"] = 1 / steps_per_s / self._estimated_step_s
        for report in reports:
            where = f"hetero/rank_{report.rank}"
            values[f"{where}/memory(GiB)"] = report.memory_bytes / GIB
            values[f"{where}/data_loading(%)"] = 100 * report.data_s / interval_s
            values[f"{where}/busy(%)"] = report.busy_percent
        return values

    def _format_line(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        values: Mapping[str, float],
        reports: Sequence[RankReport],
        left_s: float,
    ) -> str:
        scaling = hfu = ""
        if "hetero/loss_scale" in values:
            scale, skipped = values["hetero/loss_scale"], values["hetero/num_skipped_steps"]
            scaling = f"scale: {scale:g}  skipped: {skipped:.0f}  "
        mfu = f"{values['mfu(%)']:.2f}%" if "mfu(%)" in values else "n/a"
        if self._peak_flops is not None and self._work.hardware_flops != self._work.model_flops:
            hfu = f"  hfu: {values['hetero/hfu(%)']:.2f}%"
        busy = "/".join(f"{report.busy_percent:.0f}" for report in reports)
        return (
            f"{colors.RED}step: {step:2}  "
            f"{colors.GREEN}loss: {loss:8.5f}  "
            f"{colors.ORANGE}grad_norm: {grad_norm:7.4f}  "
            f"{scaling}"
            f"{colors.TURQUOISE}memory: {values['memory/max_reserved(GiB)']:5.2f}GiB"
            f"({values['memory/max_reserved(%)']:.2f}%)  "
            f"{colors.BLUE}tps: {round(values['throughput(tps)']):,}  "
            f"{colors.CYAN}tflops: {values['tflops']:,.2f}  "
            f"{colors.MAGENTA}mfu: {mfu}{hfu}  "
            + (f"{colors.YELLOW}busy: {busy}%  " if len(reports) <= _MAX_SHOWN else "")
            + f"{colors.RESET}left: {timedelta(seconds=round(left_s))}"
        )


_MAX_SHOWN = 16
"""Most ranks whose busy shares are put into a log line; TensorBoard has all of them."""


def sum_peak_flops(peak: float | None, *, group: dist.ProcessGroup) -> float | None:
    """The sum of all ranks' peaks; `None` where one rank's is unknown."""
    total = torch.tensor(math.nan if peak is None else peak, dtype=torch.float64, device="cpu")
    dist.all_reduce(total, group=group)
    return None if total.isnan() else float(total)


def _works(writer: Writer, act: Callable[[], None], *, worked: bool) -> bool:
    """Does it; a full disk, or a service that is gone, costs numbers there and does not end the run. Says so
    once, until it works again."""
    try:
        act()
    except Exception as error:
        if worked:
            what = type(writer).__name__.removesuffix("Writer")
            logger.warning("no numbers go to %s for now; the log has them: %s", what, first_line(error))
        return False
    return True
