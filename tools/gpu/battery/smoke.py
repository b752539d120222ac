"""Three steps, resident and with everything offloaded: the first thing that must work, and where the host
waits for the device in a step."""

from __future__ import annotations

import math
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zorselike import HeteroPipeline
from zorselike.plan.plan import OFFLOAD_KINDS

from ...bench.forked import run_forked
from .part import Record
from .training import TINY, Outcome, Training, be_deterministic, device_of, one_group, train

ROOT = Path(__file__).parents[3]
_HERE = str(Path(__file__).parent)
_PLANS: dict[str, tuple[str, ...]] = {"resident": (), "all offloaded": OFFLOAD_KINDS}
_ELSEWHERE = " in thread "
_WORDS = "synchronizing CUDA operation"


@contextmanager
def noting_waits(kind: str) -> Iterator[Counter[str]]:
    """Inside, every call that makes the host wait for the device is counted by our line that made it."""
    found: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if _WORDS not in str(message):
            return
        frames = [
            frame
            for frame in traceback.extract_stack()[:-1]
            if frame.filename.startswith(str(ROOT)) and not frame.filename.startswith(sys.prefix)
        ]
        own = [frame for frame in frames if not frame.filename.startswith(_HERE)] or frames
        # A warning from the thread of backwards has no frame of ours.
        where = (
            f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}" if own else f"{filename}:{lineno}"
        )
        line = f"{where} ({own[-1].line})" if own else where
        thread = threading.current_thread()
        found[line if thread is threading.main_thread() else f"{line}{_ELSEWHERE}{thread.name}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        if kind == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if kind == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def run_smoke(record: Record) -> None:
    """Resident and everything offloaded are equal, finite, and the third step waits for nothing."""
    training = TINY if record.is_small else Training(dtype=torch.bfloat16, num_steps=3)
    ((found, waits, reports),) = run_forked(
        _run, 1, record.settings.device, training, timeout_s=record.patience_s
    )
    record.put("waits", waits)
    resident, offloaded = found
    for name, outcome in zip(_PLANS, found, strict=True):
        record.say(f"{name}: losses {', '.join(f'{loss:.6f}' for loss in outcome.losses)}")
        record.check(
            f"{name}: losses are numbers", all(map(math.isfinite, outcome.losses)), str(outcome.losses)
        )
    record.check(
        "offloading changes no bit", not offloaded.differs_from(resident), offloaded.differs_from(resident)
    )
    for name, counts in waits.items():
        record.say(f"calls of {name}'s third step that make the host wait: {sum(counts.values())}")
        record.say("\n".join(f"  {times:4d} x {where}" for where, times in counts.items()))
        own = [where for where in counts if _ELSEWHERE not in where]
        if record.is_small:
            record.leave_out(f"{name}: a step's thread waits for nothing", "there is no device here")
        else:
            record.check(f"{name}: a step's thread waits for nothing", not own, f"{len(own)} lines do")
    record.say(reports)


def _run(rank: int, kind: str, training: Training) -> tuple[list[Outcome], dict[str, dict[str, int]], str]:
    be_deterministic()
    device = device_of(kind)
    plans = {name: one_group(training, offload=kinds) for name, kinds in _PLANS.items()}
    outcomes = [train(training, plan, device) for plan in plans.values()]
    torch.use_deterministic_algorithms(False)  # Those wait more often.
    waits: dict[str, dict[str, int]] = {}
    reports: list[str] = []

    @contextmanager
    def watch(name: str, step: int, pipe: HeteroPipeline) -> Iterator[None]:
        with ExitStack() as noting:
            found = noting.enter_context(noting_waits(kind)) if step == 2 else Counter()
            yield
        if step == 2:
            waits[name] = dict(found)
            reports.append(f"{name}: {pipe.memory_report()}")

    for name, plan in plans.items():
        train(training, plan, device, around_step=partial(watch, name))
    return outcomes, waits, "\n".join(reports)
