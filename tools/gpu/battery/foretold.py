"""Is it foretold: a profile of a 1B Llama, and plans simulated with it beside runs of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from zorselike.cost.profile import Profile
from zorselike.models.llama import Llama
from zorselike.models.workload import make_workload
from zorselike.plan.plan import OFFLOAD_KINDS, RECOMPUTE, Plan
from zorselike.plan.workload import Workload
from zorselike.profiler import tasks as profiler
from zorselike.profiler.layers.probes import find_probes
from zorselike.profiler.machine.device_memory import CudaMemory
from zorselike.profiler.session import found_cluster, make_memory
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.processes.processes import Processes, join_processes
from zorselike.simulator.inputs import SimulationInputs
from zorselike.simulator.report.measured_trace import read_measured
from zorselike.simulator.simulated_plan import SimulatedPlan

from ...bench.forked import run_forked
from ...report import Figure
from ..child import time_steps
from ..job import TINY_SHAPE, Job, Shape, spell_bytes
from ..trainers import OurTrainer, config_of, make_plan
from .gaps import describe_gaps, find_gaps
from .part import Record, Settings
from .trace import TRACE, compare_orders, find_exposure, number_starts, record_step
from .training import TINY, Outcome, Training, device_of, in_line, train

_SHAPE = Shape(num_layers=16, dim=2048, num_heads=16, ffn_hidden=5504, microbatch_rows=2)
"""0.94 billion parameters."""
STEP_ERROR, MEMORY_ERROR = 0.08, 0.05
_ORDER_TOLERANCE = 0.01
"""Of a step: starts nearer than that are no order."""


@dataclass(frozen=True)
class Case:
    """One of the plans."""

    variant: str
    num_ministages: int
    recomputes: bool = True


CASES = {
    "resident": Case("a", 1, recomputes=False),
    "recomputed": Case("a", 4),
    "offloaded_4": Case("c", 4),
    "offloaded_8": Case("c", 8),
}


def make_job(settings: Settings, case: Case) -> Job:
    """64k tokens a step."""
    small = settings.is_small
    return Job(
        replace(TINY_SHAPE, num_layers=6) if small else _SHAPE,
        device=settings.device,
        variant=case.variant,
        num_tokens=64 if small else 65_536,
        num_ministages=case.num_ministages,
        recomputes=case.recomputes,
        num_warm_up=1 if small else 3,
        num_steps=1 if small else 5,
    )


def _workload(shape: Shape) -> Workload:
    return make_workload(config_of(shape), sequence_length=shape.sequence, dtype="bfloat16", model="llama 1b")


@contextmanager
def _joined(settings: Settings) -> Iterator[Processes]:
    """This process alone, as the profiler wants it."""
    if settings.device == "cpu":
        torch.set_num_threads(1)
    with join_processes(device_of(settings.device), timeout=timedelta(seconds=60)) as processes:
        yield processes


def run_profile(record: Record) -> None:
    """Layers, updates, copies and the program itself, by the functions behind `zorselike profile`."""
    small, shape = record.is_small, make_job(record.settings, CASES["resident"]).shape
    workload = _workload(shape)

    def build() -> Llama:
        with torch.device("meta"):
            return Llama(config_of(shape))

    job = profiler.Job(
        workload=workload,
        build=build,
        num_tokens=shape.vocab_size,
        loss_fn=token_cross_entropy,
        most_rows=2 if small else 4,
        repeats=1 if small else 3,
        probes=find_probes(build, workload),
        recompute=RECOMPUTE,
        stages=(),
        parts=frozenset({"layers", "update", "host_link", "program"}),
        largest_message_bytes=2**20,
        again=True,
    )
    with _joined(record.settings) as processes:
        tasks = profiler.make_tasks(job, processes, make_memory(processes, None))
        empty = Profile(model=workload.model, workload_fingerprint=workload.fingerprint)
        profile = profiler.run_tasks(tasks, empty, processes, _profile_path(record.settings))
    record.put("overheads", profile.overheads)
    own = profile.overheads
    mib = [num_bytes / 2**20 for num_bytes in (own.context_bytes, own.pools_bytes, own.communicator_bytes)]
    record.say(
        f"beside tensors, MiB: {mib[0]:.0f} of the process, {mib[1]:.0f} of its pools, {mib[2]:.0f} for "
        "a communicator (on one card that is assumed)"
    )
    record.keep(_profile_path(record.settings), "C-profile.json")
    unknown = [task.name for task in tasks if not task.is_known(profile)]
    record.check("everything was measured", not unknown, ", ".join(unknown))
    for times in profile.layers:
        spent = ", ".join(
            f"{rows}: {1e3 * forward:.2f} + {1e3 * backward:.2f} ms"
            for rows, forward, backward in zip(times.rows, times.forward_s, times.backward_s, strict=True)
        )
        record.say(f"{times.kind}, recompute {times.recompute}; rows: forward + backward: {spent}")


def _profile_path(settings: Settings) -> Path:
    return settings.work / "profile.json"


def run_case(record: Record) -> None:
    """The plan by the name of the part, simulated and run."""
    name, settings = record.part.name, record.settings
    job = make_job(settings, CASES[name])
    with _joined(settings) as processes:
        simulated = _simulate(record, job, processes)
        trainer = OurTrainer(job)
        for _ in range(job.num_warm_up):
            trainer.step()
        is_cuda = job.device == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        found_s = statistics.median(time_steps(trainer, job))
        busy = trainer.pipe.busy_s / found_s
        allocated = torch.cuda.max_memory_allocated() if is_cuda else None
        reserved = torch.cuda.max_memory_reserved() if is_cuda else None
        context = CudaMemory(processes.device).context_bytes() if is_cuda else 0
        events = record_step(trainer.step, settings.work / name, job.device)
        exposure = find_exposure(events, on_gpu=is_cuda)
        if name == "offloaded_4":
            record.keep(settings.work / name / TRACE, f"C-{name}-trace.json.gz")
        record.put("found", {"step_s": found_s, "busy": busy, "allocated": allocated, "reserved": reserved})
        record.put("context_bytes", context)
        record.put("exposure", exposure)
        record.say(f"found: step {found_s:.4f} s, busy {busy:.3f}, {exposure.describe()}")
        if is_cuda:
            for line in describe_gaps(find_gaps(events)):
                record.say(line)
        record.say(str(trainer.pipe.memory_report()))
        if simulated is not None:
            peak = None if reserved is None else reserved + context
            _compare(record, simulated, found_s=found_s, busy=busy, peak_bytes=peak)
            share = exposure.exposed_s / found_s
            foretold = simulated.simulation.ranks[0].exposed_copies_s / simulated.simulation.iteration_s
            record.say(f"exposed copies: {foretold:.4f} of the step foretold, {share:.4f} found")
            _compare_order(record, simulated)
        trainer.pipe.close()


def _simulate(record: Record, job: Job, processes: Processes) -> SimulatedPlan | None:
    path = _profile_path(record.settings)
    if not path.exists():
        record.leave_out("what is foretold", "there is no profile")
        return None
    profile = Profile.load(path)
    inputs = SimulationInputs(
        workload=_workload(job.shape), cluster=found_cluster(processes, profile), profile=profile
    )
    simulated = inputs.simulate(make_plan(job).validate(), record=True)
    times = simulated.simulation.ranks[0]
    record.put("foretold", {"times": times, "peak_bytes": simulated.peak_bytes[0]})
    record.say(
        f"foretold: step {simulated.simulation.iteration_s:.4f} s, forwards and backwards "
        f"{times.forward_s + times.backward_s:.4f} s, peak {spell_bytes(simulated.peak_bytes[0])}"
    )
    return simulated


def _compare(
    record: Record,
    simulated: SimulatedPlan,
    *,
    found_s: float,
    busy: float,
    peak_bytes: int | None,
) -> None:
    name, step_s = record.part.name, simulated.simulation.iteration_s
    times = simulated.simulation.ranks[0]
    note = f"{step_s:.4f} s foretold, {found_s:.4f} s found"
    record.figure(
        Figure(f"{name}_step_error", abs(step_s / found_s - 1), STEP_ERROR, at_most=True, note=note)
    )
    foretold_busy = (times.forward_s + times.backward_s) / step_s
    record.figure(
        Figure(
            f"{name}_busy_error",
            abs(foretold_busy - busy),
            note=f"{foretold_busy:.3f} foretold, {busy:.3f} found",
        )
    )
    if peak_bytes is None:
        record.leave_out("peak memory", "a CPU's allocator does not count")
        return
    foretold = simulated.peak_bytes[0]
    note = f"{spell_bytes(foretold)} foretold, {spell_bytes(peak_bytes)} found"
    record.figure(
        Figure(f"{name}_memory_error", abs(foretold / peak_bytes - 1), MEMORY_ERROR, at_most=True, note=note)
    )


def _compare_order(record: Record, simulated: SimulatedPlan) -> None:
    """Starts of actions in the traced step and in the simulated one: on the device where there is one."""
    simulation = simulated.simulation
    assert simulation.action_times is not None
    times = Counter(action.text for action in simulated.actions[0])
    if record.is_small:  # The host does one thing after the other, copies too.
        pairs = zip(simulated.actions[0], simulation.action_times[0], strict=True)
        foretold = [(action.text, start) for action, (start, _) in pairs]
    else:
        foretold = [(span.action.text, span.start_s) for span in simulation.spans]
    found = [
        (event["name"], event["ts"] / 1e6)
        for event in read_measured(record.settings.work / record.part.name, first_pid=0)
        if event.get("ph") == "X" and (event["tid"] > 0) is not record.is_small
    ]
    tolerance_s = _ORDER_TOLERANCE * simulation.iteration_s
    order = compare_orders(
        number_starts(foretold, times), number_starts(found, times), tolerance_s=tolerance_s
    )
    record.put("order", order)
    record.say(
        f"order of {order.num_compared} actions: {order.agreement:.2%} of the pairs as simulated; "
        f"first inversion: {order.first_inversion or 'none'}"
    )
    record.check("the trace has actions of the simulated step", order.num_compared > 2, str(order))


def run_shared(record: Record) -> None:
    """Three ranks on one card, over Gloo: what they cost each other is not simulated, only that it runs."""
    training = TINY if record.is_small else Training(dtype=torch.bfloat16)
    plan = in_line(training, (2, 1), offload=OFFLOAD_KINDS)
    found = run_forked(_train_shared, 3, record.settings.device, training, plan, timeout_s=record.patience_s)
    losses = found[0].losses
    record.check("three ranks on one card train", all(own.losses == losses for own in found), str(losses))
    record.say(f"losses {losses}; most allocated by rank: {[spell_bytes(own.peak_bytes) for own in found]}")


def _train_shared(rank: int, kind: str, training: Training, plan: Plan) -> Outcome:
    return train(training, plan, device_of(kind))
