"""What the benchmark runs, section by section, and the benchmark in progress."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from zorselike.runtime.memory.host_memory import find_host_room

from .capacity import Trials, guess_layers, search
from .figures import (
    PAPER_MEMORY,
    PAPER_THROUGHPUT,
    compare_ministages,
    exposed_shares,
    is_same_loss,
)
from .job import VARIANTS, Job, Measurement, Outcome, Shape, merge, spell_bytes
from .llama import config_of, count_flops, count_parameters

_JOB_S = 900.0
"""The longest that one process may take."""
_SHORTEST_JOB_S = 20.0
_DEVICE_BYTES = {"e": 16.0}
"""Device memory per parameter of what keeps all of it there: fp32 weights, gradients and moments."""
_HOST_BYTES = {"c": 14.0, "d": 16.0}
"""Host memory per parameter: weights and optimizer state, with FSDP2 gradients too."""
_HOST_SHARE = 0.9
"""Of the free host memory, that a trial may plan to take: beyond, the system ends processes."""


@dataclass
class OffloadBench:
    """Runs jobs within a time limit and keeps what came of them."""

    shape: Shape
    run: Callable[[Job, float], Outcome]
    device: str = "cuda"
    tokens: tuple[int, ...] = (32_768, 65_536)
    num_ministages: int = 8
    init: str = "tile"
    rounds: int = 2
    num_steps: int = 5
    is_quick: bool = False
    max_layers: int = 128
    trace_file: str = ""
    seconds: float | None = None
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    machine: dict[str, Any] = field(default_factory=dict)
    measured: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    """By variant and tokens a step, repetitions merged."""
    sweep: list[Measurement] = field(default_factory=list)
    exposure: dict[str, Any] | None = None
    largest: dict[str, Any] = field(default_factory=dict)
    extra_figures: list[tuple[str, float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_sound: bool = True
    """Whether no job failed for a reason of its own, and offloading changed no loss."""
    _begin_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def left_s(self) -> float:
        return _JOB_S if self.seconds is None else self.seconds - self.elapsed_s

    @property
    def device_name(self) -> str:
        return str(self.machine.get("device", "")) or next(
            (m.device_name for m in [*self.measured.values(), *self.sweep]), ""
        )

    def job(self, kind: str, variant: str = "c", **changes: Any) -> Job:
        """A job as the options have it, at the most tokens."""
        usual = Job(
            kind,
            self.shape,
            device=self.device,
            variant=variant,
            num_tokens=max(self.tokens),
            num_ministages=self.num_ministages,
            num_warm_up=1 if self.is_quick else 2,
            num_steps=self.num_steps,
            init=self.init,
        )
        return replace(usual, **changes)

    def do(self, job: Job) -> Outcome | None:
        """Runs a job; None if there is no time for it. Says why one has no values."""
        if self.left_s < _SHORTEST_JOB_S:
            self.say("  no time left")
            return None
        outcome = self.run(job, min(_JOB_S, self.left_s))
        if outcome.failure:
            what = f"{job.kind} of {job.variant}, {job.shape.num_layers} layers, {job.num_tokens} tokens"
            self.failures.append(f"{what}: {outcome.failure}: {outcome.reason}")
            self.say(f"  {self.failures[-1]}")
            self.is_sound = self.is_sound and outcome.failure != "other"
        return outcome

    def measure(self, job: Job) -> Measurement | None:
        """Runs a `train` job and says how fast it was."""
        outcome = self.do(job)
        if outcome is None or outcome.measurement is None:
            return None
        self.say(f"  {describe(outcome.measurement, job)}")
        return outcome.measurement

    def to_json(self) -> dict[str, Any]:
        return {
            "measurements": [m.to_json() for m in self.measured.values()],
            "ministages": [m.to_json() for m in self.sweep],
            "exposure": self.exposure,
            "largest": self.largest,
            "link_and_roof": self.machine,
            "failures": self.failures,
        }


def describe(measured: Measurement, job: Job) -> str:
    """One line of one measurement."""
    flops = count_flops(job.shape) * measured.tokens_per_s
    device = "-" if measured.device_bytes is None else spell_bytes(measured.device_bytes)
    if measured.reserved_bytes is not None:
        device += f" ({spell_bytes(measured.reserved_bytes)} reserved)"
    host = "" if measured.host_bytes is None else f", host {spell_bytes(measured.host_bytes)}"
    compiled = " compiled" if job.compiles else ""
    return (
        f"{VARIANTS[measured.variant]}{compiled}, {measured.num_tokens} tokens, x {measured.num_ministages}: "
        f"{measured.median_s:.3f} s a step, {measured.tokens_per_s:,.0f} tokens/s, "
        f"{flops / 1e12:.1f} TFLOP/s with recomputation, device {device}{host}, "
        f"loss {measured.loss:.6f}, set up in {measured.set_up_s:.0f} s"
    )


def run_machine(bench: OffloadBench) -> None:
    """What the link and the cores can do at best."""
    outcome = bench.do(bench.job("machine"))
    if outcome is None or outcome.values is None:
        return
    found = bench.machine = outcome.values
    bench.say(f"  {found['device']}, {found['device_bytes'] / 2**30:.1f} GiB")
    for name in ("to_device", "to_host", "both_to_device", "both_to_host"):
        bench.say(f"  {name.replace('_', ' '):16} {found[name] / 1e9:7.1f} GB/s")
    for name, rate in found["matmuls"].items():
        bench.say(f"  bf16 {name:16} {rate / 1e12:7.1f} TFLOP/s")


def run_throughput(bench: OffloadBench) -> None:
    """All variants at every number of tokens, repetitions interleaved."""
    collected: defaultdict[tuple[str, int], list[Measurement]] = defaultdict(list)
    failed: set[tuple[str, int]] = set()
    for number in range(bench.rounds):
        # Largest first, since its targets are the stricter ones and time may run out.
        for num_tokens in sorted(bench.tokens, reverse=True):
            for variant in VARIANTS:
                # `d_kept` has no target, so once is enough; what failed once fails again.
                if (number and variant == "d_kept") or (variant, num_tokens) in failed:
                    continue
                found = bench.measure(bench.job("train", variant, num_tokens=num_tokens))
                if found is None:
                    failed.add((variant, num_tokens))
                else:
                    collected[variant, num_tokens].append(found)
                    bench.measured[variant, num_tokens] = merge(collected[variant, num_tokens])
    same = is_same_loss(bench.measured)
    if same is not None:
        bench.say(f"  losses with and without offloading are {'equal' if same else 'DIFFERENT'}")
        bench.is_sound = bench.is_sound and same
    _say_bound(bench)
    offloaded = bench.measured.get(("c", max(bench.tokens)))
    if offloaded is not None and offloaded.memory:
        bench.say("  " + offloaded.memory.replace("\n", "\n  "))


def _say_bound(bench: OffloadBench) -> None:
    """What theory says of the measured rates."""
    resident = bench.measured.get(("a", max(bench.tokens)))
    if resident is None or not bench.machine or bench.device == "cpu":
        return
    flops_per_s = count_flops(bench.shape) * resident.tokens_per_s
    shares = exposed_shares(
        flops_per_s, bench.machine["both_to_device"], bench.num_ministages, resident.num_tokens
    )
    bench.say(
        f"  by arithmetic, exposed ends cost {shares[0]:.2%} of a step (the first load alone) to "
        f"{shares[1]:.2%} (optimizer state both ways)"
    )
    bench.say(f"  {flops_per_s / bench.machine['matmul']:.1%} of the matmul roof")


def run_exposed(bench: OffloadBench) -> None:
    """The copies of everything offloaded that no computing hides, from a trace."""
    outcome = bench.do(bench.job("trace", num_steps=2, trace_file=bench.trace_file))
    if outcome is None or outcome.values is None:
        return
    found = bench.exposure = outcome.values["exposure"]
    if found is None:
        bench.say(f"  the trace has {outcome.values['num_events']} events and no kernel among them")
        return
    bench.say(
        f"  a step of {found['step_ms']:.1f} ms: {found['copy_ms']:.1f} ms of copies "
        f"({spell_bytes(found['to_device_bytes'])} in, {spell_bytes(found['to_host_bytes'])} out), "
        f"{found['exposed_ms']:.1f} ms of them exposed ({found['share']:.2%}), "
        f"{found['idle_ms']:.1f} ms in which nothing ran"
    )
    for at_ms, length_ms in found["longest_ms"]:
        bench.say(f"    {length_ms:8.2f} ms exposed, {at_ms:.1f} ms after the first kernel")
    bench.extra_figures.append(("exposed_copy_share", found["share"], f"{found['exposed_ms']:.1f} ms a step"))


def run_ministages(bench: OffloadBench) -> None:
    """Everything offloaded, in more and more ministages."""
    for num_ministages in (1, 2) if bench.is_quick else (1, 2, 4, 8):
        known = bench.measured.get(("c", max(bench.tokens)))
        if known is not None and known.num_ministages == num_ministages:
            bench.sweep.append(known)
            continue
        found = bench.measure(bench.job("train", num_ministages=num_ministages))
        if found is not None:
            bench.sweep.append(found)
    if not bench.sweep:
        return
    bench.say(f"  {'ministages':>10} {'tokens/s':>10} {'of one':>7} {'device':>12} {'of one':>7}")
    for row in compare_ministages(bench.sweep):
        memory = "-" if row.memory is None else f"{row.memory:.3f}"
        held = "-" if row.measurement.device_bytes is None else spell_bytes(row.measurement.device_bytes)
        speed = f"{row.measurement.tokens_per_s:,.0f}"
        bench.say(f"  {row.num_ministages:>10} {speed:>10} {row.throughput:7.3f} {held:>12} {memory:>7}")
    bench.say(
        f"  the paper's Fig. 10, 16 GPUs: throughput {PAPER_THROUGHPUT:.1f} and memory {PAPER_MEMORY:.1f} "
        "of one ministage with the most ministages"
    )


def run_compile(bench: OffloadBench) -> None:
    """Everything offloaded with each layer compiled, against the same without."""
    if bench.device == "cpu":
        bench.say("  left out: compiling for a CPU takes minutes and says nothing")
        return
    most = max(bench.tokens)
    plain = bench.measured.get(("c", most)) or bench.measure(bench.job("train"))
    compiled = bench.measure(bench.job("train", compiles=True))
    if plain is not None and compiled is not None:
        gain = compiled.tokens_per_s / plain.tokens_per_s
        note = f"{compiled.tokens_per_s:,.0f} / {plain.tokens_per_s:,.0f} tokens/s"
        bench.extra_figures.append(("compiled_c_over_c", gain, note))


def run_largest(bench: OffloadBench) -> None:
    """The most layers that train a step: everything offloaded, and FSDP2 alone."""
    if not bench.machine:
        run_machine(bench)
    for variant in ("c", "e", "d"):
        held: dict[int, Measurement] = {}
        trials = _search_largest(bench, variant, held)
        layers = trials.largest
        if layers is None:
            bench.say(f"  {VARIANTS[variant]}: nothing trained; {trials.limit}")
            continue
        found = held[layers]
        bench.largest[variant] = {
            "num_layers": layers,
            "num_parameters": found.num_parameters,
            "tokens_per_s": found.tokens_per_s,
            "limit": trials.limit,
        }
        limit = trials.limit or "no larger one was tried"
        bench.say(
            f"  {VARIANTS[variant]}: {layers} layers, {found.num_parameters / 1e9:.2f} billion parameters, "
            f"{found.tokens_per_s:,.0f} tokens/s; {limit}"
        )
        bench.extra_figures.append((f"largest_{variant}", found.num_parameters / 1e9, "billion parameters"))


def _search_largest(bench: OffloadBench, variant: str, held: dict[int, Measurement]) -> Trials:
    """Tries; keeps the measurements of what trained in `held`."""
    one = count_parameters(replace(bench.shape, num_layers=1))
    layer = config_of(bench.shape).layer_parameters
    on_device = _DEVICE_BYTES.get(variant)
    room = 0.9 * bench.machine.get("device_bytes", 0) if on_device else _host_room()
    guess = guess_layers(room, on_device or _HOST_BYTES[variant], layer, one - layer)
    guess = min(guess, bench.max_layers)
    resolution = max(1, guess // 32)

    def try_layers(num_layers: int) -> str | None:
        shape = replace(bench.shape, num_layers=num_layers)
        needed = _HOST_BYTES.get(variant, 0.0) * count_parameters(shape)
        if needed > _host_room():
            return f"host memory: {needed / 2**30:.1f} GiB by arithmetic, not tried"
        job = bench.job(
            "train",
            variant,
            shape=shape,
            num_tokens=min(bench.tokens),
            # The more of them, the less is on the device at once.
            num_ministages=max(min(bench.num_ministages, num_layers), num_layers // 2),
            num_warm_up=1,
            num_steps=2,
            holds_most=True,
        )
        outcome = bench.do(job)
        if outcome is None or outcome.failure == "time":
            return None
        if outcome.measurement is None:
            return f"{outcome.failure}: {outcome.reason}"
        held[num_layers] = outcome.measurement
        bench.say(f"  {num_layers} layers: {describe(outcome.measurement, job)}")
        return ""

    return search(try_layers, guess=guess, lowest=1, highest=bench.max_layers, resolution=resolution)


def _host_room() -> float:
    return _HOST_SHARE * find_host_room().num_bytes


SECTIONS: dict[str, Callable[[OffloadBench], None]] = {
    "machine": run_machine,
    "throughput": run_throughput,
    "exposed": run_exposed,
    "ministages": run_ministages,
    "compile": run_compile,
    "largest": run_largest,
}
