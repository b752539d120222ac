"""What the benchmark runs, section by section."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from zorselike.models.flops import flops_per_token, num_parameters
from zorselike.runtime.memory.host_room import find_host_room

from ..report import Figure
from .job import COMPARED, VARIANTS, Job, Measurement, Outcome, Shape, Updates, merge, spell_bytes
from .trainers import config_of

Measured = Mapping[tuple[str, int], Measurement]
"""Measurements by variant and tokens a step."""
PAPER_MEMORY, PAPER_THROUGHPUT = 0.6, 0.8
"""Zorse, Fig. 10: with most ministages 40 % less memory for 20 % less throughput, against one."""
_LARGE = 65_536


def find_ratios(measured: Measured, *, has_targets: bool = True) -> list[Figure]:
    """All ratios of which both sides were measured: at the most tokens under their plain names, at fewer with
    the count added. Without `has_targets` (another device) they are only reported."""
    found: list[Figure] = []
    for num_tokens in (sizes := sorted({n for _, n in measured}, reverse=True)):
        suffix = "" if num_tokens == sizes[0] else f"_{num_tokens}"
        own = {variant: m for (variant, n), m in measured.items() if n == num_tokens}
        for name, value, target, at_most, note in _list_ratios(own, is_large=num_tokens >= _LARGE):
            found.append(Figure(name + suffix, value, target if has_targets else None, at_most, note))
    return found


def _list_ratios(
    own: Mapping[str, Measurement], *, is_large: bool
) -> Iterator[tuple[str, float, float | None, bool, str]]:
    """Name, value, target, whether the target is a most, and note."""
    throughputs: tuple[tuple[str, str, float | None], ...] = (
        ("b", "a", 0.99 if is_large else None),
        ("c", "a", 0.97 if is_large else 0.95),
        ("c", "d", 3.0),
        ("a", "e", 0.98),
    )
    for top, bottom, target in throughputs:
        if top in own and bottom in own:
            speeds = own[top].tokens_per_s, own[bottom].tokens_per_s
            note = f"{speeds[0]:,.0f} / {speeds[1]:,.0f} tokens/s"
            yield f"{top}_over_{bottom}", speeds[0] / speeds[1], target, False, note
    resident = own["a"].device_bytes if "a" in own else None
    for variant, target in (("b", None), ("c", 0.45)):
        offloaded = own[variant].device_bytes if variant in own else None
        if resident and offloaded is not None:
            note = f"{spell_bytes(offloaded)} / {spell_bytes(resident)}"
            yield f"peak_memory_{variant}_over_a", offloaded / resident, target, True, note


def search_largest(
    try_layers: Callable[[int], str | None], *, guess: int, highest: int, resolution: int
) -> dict[int, str]:
    """Finds the most layers in 1 ... `highest` that train, to `resolution`.

    `try_layers` says why so many do not train, `""` if they do, and None if there is no time to try; more
    layers than ones that do not train are never tried. Starts at `guess` and doubles its stride until the
    answer lies between two trials.

    Returns:
        What was tried, with the reason why it did not train.
    """
    reasons: dict[int, str] = {}
    good, bad = 0, highest + 1
    stride = max(resolution, guess // 8)
    layers = min(max(guess, 1), highest)
    while bad - good > resolution or good == 0:
        reason = try_layers(layers)
        if reason is None:
            break
        reasons[layers] = reason
        good, bad = (good, layers) if reason else (layers, bad)
        if bad <= 1 or good >= highest or bad - good <= 1:
            break
        if bad > highest:
            layers = min(good + stride, highest)
        elif good == 0:
            layers = max(bad - stride, 1)
        else:
            layers = (good + bad) // 2
        stride *= 2
    return reasons


Key = TypeVar("Key", bound=tuple[Any, Any])
_JOB_S = 900.0
"""The longest that one process may take."""
_SHORTEST_JOB_S = 20.0
_HOST_BYTES = {"c": 14.0, "d": 16.0}
"""Host memory per parameter: weights and optimizer state, with FSDP2 gradients too."""
_HOST_SHARE = 0.9
"""Share of the free host memory that a trial may plan to take: beyond, the system ends processes."""


@dataclass
class GpuBench:
    """Runs jobs within a time limit and keeps what came of them."""

    shape: Shape
    run: Callable[[Job, float], Outcome]
    device: str = "cuda"
    tokens: tuple[int, ...] = (32_768, 65_536)
    num_ministages: int = 8
    is_quick: bool = False
    max_layers: int = 128
    seconds: float | None = None
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    measured: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    """Measurements by variant and tokens a step, repetitions merged."""
    sweep: list[Measurement] = field(default_factory=list)
    deferred: dict[tuple[str, str], Measurement] = field(default_factory=dict)
    """Measurements by variant and when updates come."""
    largest: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
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
        known = (m.device_name for m in [*self.measured.values(), *self.sweep, *self.deferred.values()])
        return next(known, self.device)

    def job(self, variant: str = "c", **changes: Any) -> Job:
        """A job as the options have it, at the most tokens."""
        usual = Job(
            self.shape,
            device=self.device,
            variant=variant,
            num_tokens=max(self.tokens),
            num_ministages=self.num_ministages,
            num_warm_up=1 if self.is_quick else 2,
            num_steps=2 if self.is_quick else 5,
        )
        return replace(usual, **changes)

    def do(self, job: Job) -> Outcome | None:
        """Runs a job; None if there is no time for it. Says why one has no measurement."""
        if self.left_s < _SHORTEST_JOB_S:
            self.say("  no time left")
            return None
        outcome = self.run(job, min(_JOB_S, self.left_s))
        if outcome.failure:
            what = f"{job.variant}, {job.shape.num_layers} layers, {job.num_tokens} tokens"
            self.failures.append(f"{what}: {outcome.failure}: {outcome.reason}")
            self.say(f"  {self.failures[-1]}")
            self.is_sound = self.is_sound and outcome.failure != "other"
        return outcome

    def measure(self, job: Job) -> Measurement | None:
        """Runs a job and says how fast it was."""
        outcome = self.do(job)
        if outcome is None or outcome.measurement is None:
            return None
        self.say(f"  {describe(outcome.measurement, job)}")
        return outcome.measurement


def describe(measured: Measurement, job: Job) -> str:
    """One line of one measurement."""
    flops_per_s = count_flops(job.shape) * measured.tokens_per_s
    reserved = measured.reserved_bytes
    device = spell_bytes(measured.device_bytes)
    device += "" if reserved is None else f" ({spell_bytes(reserved)} reserved)"
    host = "" if measured.host_bytes is None else f", host {spell_bytes(measured.host_bytes)}"
    name = VARIANTS[measured.variant] + (" compiled" if job.compiles else "")
    name += " with deterministic kernels" if job.is_deterministic else ""
    updates = "" if job.updates == "at once" else f", updates {job.updates}"
    return (
        f"{name}{updates}, {measured.num_tokens} tokens, x {measured.num_ministages}: "
        f"{measured.median_s:.3f} s a step, {measured.tokens_per_s:,.0f} tokens/s, "
        f"{flops_per_s / 1e12:.1f} TFLOP/s with recomputation, device {device}{host}, "
        f"loss {measured.loss:.6f}, set up in {measured.set_up_s:.0f} s"
    )


def count_flops(shape: Shape) -> int:
    """Floating-point operations per token of a step that computes its layers' forwards twice."""
    return flops_per_token(config_of(shape), shape.sequence, recompute=True)


def run_throughput(bench: GpuBench) -> None:
    """All variants at every number of tokens, repetitions interleaved."""
    # Largest first, since its targets are the stricter ones and time may run out.
    keys = [(v, n) for n in sorted(bench.tokens, reverse=True) for v in COMPARED]
    _measure_in_turn(bench, keys, lambda key: bench.job(key[0], num_tokens=key[1]), bench.measured)
    losses = find_losses(bench, {v for v, _ in bench.measured} & {"a", "b", "c"})
    if len(losses) > 1:
        same = len({*losses.values()}) == 1
        bench.say(f"  losses with and without offloading are {'equal' if same else 'DIFFERENT'}")
        bench.is_sound = bench.is_sound and same
    offloaded = bench.measured.get(("c", max(bench.tokens)))
    if offloaded is not None and offloaded.memory:
        bench.say("  " + offloaded.memory.replace("\n", "\n  "))


def find_losses(bench: GpuBench, variants: Collection[str]) -> dict[str, float]:
    """The loss of each variant's third step, with deterministic kernels: only so two runs can be compared bit
    for bit."""
    found = {}
    for variant in sorted(variants):
        job = bench.job(variant, is_deterministic=True, num_warm_up=1, num_steps=2)
        if (measured := bench.measure(job)) is not None:
            found[variant] = measured.loss
    return found


def _measure_in_turn(
    bench: GpuBench, keys: Sequence[Key], make: Callable[[Key], Job], found: dict[Key, Measurement]
) -> None:
    """Every key, all of them again in each round, repetitions merged; what failed once fails again."""
    failed = set()
    for number in range(1 if bench.is_quick else 2):
        for key in keys:
            if key in failed:
                continue
            measured = bench.measure(make(key))
            if measured is None:
                failed.add(key)
            else:
                found[key] = merge([found[key], measured]) if number else measured


def run_ministages(bench: GpuBench) -> None:
    """Everything offloaded, in more and more ministages; relative to the fewest, as in the paper's Fig.
    10."""
    for number in (1, 2) if bench.is_quick else (1, 2, 4, 8):
        known = bench.measured.get(("c", max(bench.tokens)))
        if known is None or known.num_ministages != number:
            known = bench.measure(bench.job(num_ministages=number))
        bench.sweep += [] if known is None else [known]
    if not bench.sweep:
        return
    first = bench.sweep[0]
    bench.say(f"  {'ministages':>10} {'tokens/s':>10} {'of one':>7} {'device':>12} {'of one':>7}")
    for own in bench.sweep:
        held, speed = own.device_bytes, own.tokens_per_s
        share = f"{held / first.device_bytes:.3f}" if held and first.device_bytes else "-"
        bench.say(
            f"  {own.num_ministages:>10} {speed:>10,.0f} {speed / first.tokens_per_s:7.3f} "
            f"{spell_bytes(held):>12} {share:>7}"
        )
    bench.say(
        f"  the paper's Fig. 10, 16 GPUs: throughput {PAPER_THROUGHPUT:.1f} and memory {PAPER_MEMORY:.1f} "
        "of one ministage with the most ministages"
    )


def run_compile(bench: GpuBench) -> None:
    """Each layer compiled, against the same without: all resident, and everything offloaded."""
    most = max(bench.tokens)
    for variant in ("a", "c"):
        plain = bench.measured.get((variant, most)) or bench.measure(bench.job(variant))
        compiled = bench.measure(bench.job(variant, compiles=True))
        if plain is not None and compiled is not None:
            gain = compiled.tokens_per_s / plain.tokens_per_s
            speeds = f"{compiled.tokens_per_s:,.0f} / {plain.tokens_per_s:,.0f} tokens/s"
            note = f"{speeds}, {compiled.set_up_s - plain.set_up_s:.0f} s to compile"
            bench.figures.append(Figure(f"compiled_{variant}_over_{variant}", gain, note=note))


def run_defer(bench: GpuBench) -> None:
    """Updates that wait for the end of the step, against stepping each ministage at once.

    They wait where gradients are clipped by their global norm, and with fp16 always, since a step that
    overflows must change nothing.
    """
    keys = [(variant, updates) for variant in ("a", "o", "c") for updates in get_args(Updates)]
    _measure_in_turn(bench, keys, lambda key: bench.job(key[0], updates=key[1]), bench.deferred)
    for variant, updates in keys:
        pair = bench.deferred.get((variant, updates)), bench.deferred.get((variant, "deferred"))
        if updates != "deferred" and pair[0] is not None and pair[1] is not None:
            name = f"deferred_over_{updates.replace(', ', '_').replace(' ', '_')}_{variant}"
            bench.figures.append(Figure(name, pair[0].median_s / pair[1].median_s))


def run_largest(bench: GpuBench) -> None:
    """The most layers that train a step: everything offloaded, and FSDP2 alone."""
    for variant in ("c", "e", "d"):
        held: dict[int, Measurement] = {}
        reasons = _search_largest(bench, variant, held)
        failed = min((n for n, reason in reasons.items() if reason), default=None)
        limit = "no larger one was tried" if failed is None else f"{failed} layers: {reasons[failed]}"
        if not held:
            bench.say(f"  {VARIANTS[variant]}: nothing trained; {limit}")
            continue
        layers, found = max(held.items())
        billions = found.num_parameters / 1e9
        bench.largest[variant] = {
            "num_layers": layers,
            "num_parameters": found.num_parameters,
            "limit": limit,
        }
        bench.say(
            f"  {VARIANTS[variant]}: {layers} layers, {billions:.2f} billion parameters, "
            f"{found.tokens_per_s:,.0f} tokens/s; {limit}"
        )
        bench.figures.append(Figure(f"largest_{variant}", billions, note="billion parameters"))


def _search_largest(bench: GpuBench, variant: str, held: dict[int, Measurement]) -> dict[int, str]:
    """Tries; keeps the measurements of what trained in `held`."""
    config = config_of(replace(bench.shape, num_layers=1))
    other = num_parameters(config) - config.layer_parameters
    guess = min(bench.shape.num_layers, bench.max_layers)
    if variant in _HOST_BYTES:
        most = _host_room() / _HOST_BYTES[variant]
        guess = min(max(1, int((most - other) // config.layer_parameters)), bench.max_layers)

    def try_layers(num_layers: int) -> str | None:
        shape = replace(bench.shape, num_layers=num_layers)
        needed = _HOST_BYTES.get(variant, 0.0) * num_parameters(config_of(shape))
        if needed > _host_room():
            return f"host memory: {needed / 2**30:.1f} GiB by arithmetic, not tried with {find_host_room()}"
        job = bench.job(
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

    return search_largest(try_layers, guess=guess, highest=bench.max_layers, resolution=max(1, guess // 32))


def _host_room() -> float:
    return _HOST_SHARE * find_host_room().num_bytes


SECTIONS: dict[str, Callable[[GpuBench], None]] = {
    "throughput": run_throughput,
    "ministages": run_ministages,
    "compile": run_compile,
    "defer": run_defer,
    "largest": run_largest,
}
