"""Pipelines for plans that come and go: drawn ahead, before anything is torn down for them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from zorselike.cost.memory import walk_memory
from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime._compat import settle_device_guard
from zorselike.runtime.alarm.watch import OnLoss
from zorselike.runtime.arguments import refuse_with_replicas
from zorselike.runtime.assembly import CompiledPlan, compile_plan
from zorselike.runtime.comm.agreement import SETTINGS, digest_parameters
from zorselike.runtime.crossing import trace_plan
from zorselike.runtime.host_checks import measure_parts
from zorselike.runtime.loss import CountFn, LossFn, Unpack
from zorselike.runtime.memory.host_room import find_host_memory
from zorselike.runtime.ministage.updates import Clip, OptimizerFactory, defers_updates
from zorselike.runtime.model.boundaries import StepInputs, Traces
from zorselike.runtime.model.partition import Split
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.device import ParamDtype, computes_in_fp16
from zorselike.runtime.processes.world import base_version
from zorselike.runtime.state.dtypes import dtype_name, named_dtype
from zorselike.runtime.tensor_parallel.styles import TensorParallelPlan
from zorselike.text.units import GIB
from zorselike.version import __version__

MAX_DRAWN = 9
"""Plans that are drawn at a time; models on the meta device are small, but not nothing."""
MAX_CUTS = 32
"""Of so many ways to cut the model what was traced is kept."""
Cut = tuple[tuple[str, ...], ...]
"""The modules of each ministage."""


@dataclass(frozen=True)
class Options:
    """What every pipeline of a job is built with; see `HeteroPipeline`."""

    optimizer: OptimizerFactory | None = None
    loss_fn: LossFn | None = None
    count_fn: CountFn | None = None
    unpack: Unpack | None = None
    split: Split | None = None
    param_dtype: ParamDtype = None
    compile: bool = False
    max_norm: float | None = None
    clip: Clip = "global"
    seed: int = 0
    dynamic_shapes: bool = False
    forbid_nonfinite_loss: bool = False
    silence_s: float | Literal["auto"] | None = "auto"
    tp_plan: TensorParallelPlan | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the caller's own, in which all processes must be alike, as text."""


class _Drawn(NamedTuple):
    model: nn.Module
    compiled: CompiledPlan


class Drawings:
    """Models and what plans make of them, each used once."""

    def __init__(
        self, model_factory: Callable[[], nn.Module], options: Options, device: torch.device
    ) -> None:
        self._factory, self._options, self._device = model_factory, options, device
        settle_device_guard()  # Threads will draw, and end.
        self._lock = threading.Lock()
        self._drawing = threading.Lock()
        self._ahead = threading.Lock()
        self._is_closed = False
        self._drawn: OrderedDict[str, _Drawn] = OrderedDict()
        self._traces: OrderedDict[Cut, Traces] = OrderedDict()
        self.step: StepInputs | None = None
        """What steps are given, once that is known."""
        self._is_light = True
        """Whether the factory's models are on the meta device, so that several may be kept."""
        self.memory_bytes = find_memory(device)
        self._dtype = options.param_dtype
        """Known from the first pipeline on, where the cards of the job decide."""
        self._digest: int | None = None

    def list_settings(self) -> dict[str, str]:
        """In what all processes of a job must be alike, as this one was given it."""
        if self._digest is None:
            self._digest = digest_parameters(self._factory())
        callers = {str(name): str(value) for name, value in self._options.settings.items()}
        given = {name: str(getattr(self._options, name)) for name in SETTINGS}
        own = {"the digest of the model's parameters": f"{self._digest:014x}"}
        # First: another version may have other settings.
        versions = {"zorselike": __version__, "torch": base_version(torch.__version__)}
        return {**versions, **callers, **given, **own}

    @property
    def computes_in(self) -> str | None:
        """The name of the dtype, where the cards of the job decide, and have."""
        is_decided = self._options.param_dtype == "auto" and isinstance(self._dtype, torch.dtype)
        return dtype_name(self._dtype) if is_decided else None  # type: ignore[arg-type]

    def compute_in(self, name: str | None) -> None:
        """Where cards decide, and have before this process came, in what they did."""
        if name is not None and self._dtype == "auto":
            self._dtype = named_dtype(name)

    def draw(self, plan: Plan, rank: int) -> None:
        """Draws it for one of its ranks; from any thread. Not before the cards have said in which dtype they
        compute, where it is for them to say.

        Raises:
            PlanError: The model or the runtime refuses the plan, or this device has no room for it.
            ConfigError: As `HeteroPipeline` would.
        """
        dtype = self._dtype
        if isinstance(dtype, str):
            return
        self._refuse_too_large(self._draw(plan, dtype).compiled, rank, dtype)

    def draw_ahead(self, plan: Plan) -> None:
        """Draws what may be asked for, and traces it, if it is known what steps are given.

        Raises:
            PlanError, ConfigError: As `draw`, but for what this device has.
        """
        dtype = self._dtype
        with self._ahead:
            if not isinstance(dtype, str) and self._is_light and not self._is_closed:
                compiled = self._draw(plan, dtype).compiled
                if self.step is not None and not self._is_closed:
                    trace_plan(compiled, self.step)

    def close(self) -> None:
        """Draws nothing ahead any more; returns when what is being drawn is. A thread that is ended inside
        torch, as Python's end would, aborts the process."""
        self._is_closed = True
        with self._ahead, self._drawing:
            pass

    def _draw(self, plan: Plan, dtype: torch.dtype | None) -> _Drawn:
        with self._drawing:  # Who asks for what is being drawn already waits for it.
            with self._lock:
                drawn = self._drawn.get(plan.fingerprint)
            if drawn is None:
                drawn = self._make(plan, dtype)
            with self._lock:
                self._drawn[plan.fingerprint] = drawn
                self._drawn.move_to_end(plan.fingerprint)
                while len(self._drawn) > (MAX_DRAWN if self._is_light else 1):
                    self._drawn.popitem(last=False)
            return drawn

    def _make(self, plan: Plan, dtype: torch.dtype | None) -> _Drawn:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # The factory may use it; this thread would open the first.
        model, options = self._factory(), self._options
        refuse_with_replicas(plan, dynamic_shapes=options.dynamic_shapes)
        self._is_light = all(parameter.is_meta for parameter in model.parameters())
        scales = computes_in_fp16(model, dtype)
        compiled = compile_plan(
            model,
            without_devices(plan),
            split=options.split,
            unpack=options.unpack,
            defer_steps=defers_updates(options.max_norm, options.clip, scales or None),
            param_dtype=dtype,
            traces=self._traces_of(plan),
            tp_plan=options.tp_plan,
        )
        return _Drawn(model, compiled)

    def _traces_of(self, plan: Plan) -> Traces:
        """Kept from one pipeline to the next: who loses a rank mostly keeps the ministages."""
        cut = tuple(ministage.modules for ministage in plan.ministages)
        with self._lock:
            traces = self._traces.setdefault(cut, Traces())
            self._traces.move_to_end(cut)
            while len(self._traces) > MAX_CUTS:
                self._traces.popitem(last=False)
            return traces

    def _refuse_too_large(self, compiled: CompiledPlan, rank: int, dtype: torch.dtype | None) -> None:
        """Raises `PlanError` where parameters, gradients and master weights alone are more than this device
        has."""
        memory_bytes = self.memory_bytes
        sizes = measure_parts(compiled, rank, dtype)
        walk = walk_memory(compiled.plan, rank, compiled.step_actions[rank], sizes)
        if memory_bytes and walk.device_peak_bytes > memory_bytes:
            raise PlanError(
                f"rank {rank} would hold {walk.device_peak_bytes / GIB:.2f} GiB before activations, and its "
                f"device has {memory_bytes / GIB:.2f} GiB"
            )

    def build(self, plan: Plan, on_loss: OnLoss, *, skip_init: bool) -> HeteroPipeline:
        """The pipeline; collective."""
        with self._lock:
            drawn = self._drawn.pop(plan.fingerprint, None)
        options = self._options
        pipe = HeteroPipeline(
            drawn.model if drawn else self._factory(),
            without_devices(plan),
            optimizer=options.optimizer,
            loss_fn=options.loss_fn,
            count_fn=options.count_fn,
            unpack=options.unpack,
            split=options.split,
            device=self._device,
            param_dtype=self._dtype,
            compile=options.compile,
            max_norm=options.max_norm,
            clip=options.clip,
            seed=options.seed,
            dynamic_shapes=options.dynamic_shapes,
            skip_init=skip_init,
            forbid_nonfinite_loss=options.forbid_nonfinite_loss,
            silence_s=options.silence_s,
            on_loss=on_loss,
            compiled=drawn.compiled if drawn else None,
            tp_plan=options.tp_plan,
        )
        self._dtype = pipe.param_dtype
        return pipe


def find_memory(device: torch.device) -> int:
    """Bytes that a device has in all. Raises `ConfigError` for a GPU where there is none."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch finds no GPU here; leave it out, or give 'cpu'")
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return find_host_memory()


def without_devices(plan: Plan) -> Plan:
    """Who plays which rank is decided by then, and local ranks are those of a generation."""
    return replace(plan, devices=())
