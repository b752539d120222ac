"""`HeteroPipeline`: a model and a plan become one training step on many unequal devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zorselike.errors import CheckpointError, ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime import arguments
from zorselike.runtime._compat import default_store
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.alarm.watch import OnLoss
from zorselike.runtime.assembly import Assembly, CompiledPlan, compile_plan, find_ranks
from zorselike.runtime.auxiliary_loss import weighing
from zorselike.runtime.batch import Batch, RankRows, as_tensors
from zorselike.runtime.checkpoints import Checkpoints, Stateful
from zorselike.runtime.comm.agreement import SETTINGS, check_same
from zorselike.runtime.comm.connections import Connections, allow_many_files
from zorselike.runtime.comm.ranks import Groups
from zorselike.runtime.crossing import Crossing, refuse_fixed_shapes
from zorselike.runtime.executor import Executor
from zorselike.runtime.host_checks import refuse_unfitting_plan
from zorselike.runtime.leaving import forget, leave_alone, leave_together
from zorselike.runtime.loss import (
    CountFn,
    Loss,
    LossFn,
    Unpack,
    check_additive,
    count_targets,
    count_valid_tokens,
    token_cross_entropy,
)
from zorselike.runtime.memory.host_heap import giving_back
from zorselike.runtime.memory_report import MemoryReport, report_memory
from zorselike.runtime.ministage.updates import (
    Clip,
    LossScale,
    OptimizerFactory,
    default_optimizer,
    defers_updates,
)
from zorselike.runtime.model.boundaries import check_kwargs
from zorselike.runtime.model.partition import Split
from zorselike.runtime.processes.device import (
    ParamDtype,
    as_current,
    choose_dtype,
    computes_in_fp16,
    use_device,
)
from zorselike.runtime.result import StepResult, SumOverRanks
from zorselike.runtime.tensor_parallel.styles import TensorParallelPlan
from zorselike.schedule.actions import Action


class HeteroPipeline(Stateful):
    """Trains `model` as `plan` divides it, with the numbers of a single process.

    Every rank constructs it with the same arguments, after `torch.distributed` is initialised
    (Gloo for CPU ranks, `cpu:gloo,cuda:nccl` for CUDA ranks). A model on the meta device is
    initialised from `seed` alone, one unit at a time; one with weights must have the same weights
    on every rank, and its modules are used, not copied.

    Args:
        plan: a `Plan` or the path of one.
        optimizer: called per ministage with `[(global name, parameter)]`; AdamW if None.
        loss_fn: `(outputs, targets) -> sum of losses`; token cross-entropy if None. Before a rank's first
            microbatch it is tried on it and on its halves, without gradients: leave these out of metrics.
        count_fn: `targets -> count` that the loss is divided by, over the global batch.
        unpack: turns the model's output into tensors before `loss_fn` sees it.
        split: `(model, module names) -> nn.Module` for models that need it; "decoder" or "export"
            to insist on one way.
        device: this rank's device; the CUDA device of its local rank where there is one, else the CPU.
        param_dtype: dtype in which layers compute: torch.bfloat16, torch.float16 (with dynamic loss
            scaling), "auto" (fp16 as soon as one card of the job is older than sm_80, else bf16), or
            None for the model's own. Below fp32, shards are in that dtype, reductions are in fp32, and
            the optimizer gets fp32 master parameters.
        compile: `torch.compile` each numbered layer.
        max_norm: clip gradients to this norm: of the whole model with `clip="global"`, which
            defers all updates to the end of the step (as fp16 does), of each ministage with
            `clip="ministage"`.
        seed: of the initialisation, and of dropout, which no plan with the same microbatches on GPUs of the
            same types changes.
        dynamic_shapes: inputs may have another shape in every step: the rank that feeds the first rows
            tells the others at each step's begin. Each new shape is traced once; pad to a few lengths.
        skip_init: leave the parameters of a model on the meta device without values: `load` comes first.
        forbid_nonfinite_loss: end the job where a microbatch's loss is not finite (waits for the
            loss of every microbatch, so not free on a GPU).
        silence_s: a rank that gives no sign of life for this long ends the job; None: never; "auto": 5 s, and
            30 s in a job with GPUs, whose allocator holds Python's lock while it waits for the device.
        on_loss: told in a thread of all ranks that are lost, and how, instead of ending this process. Then a
            rank that fails raises its error, and `interrupt` and `abandon` are what remains to be called.
        compiled: what `compile_plan` has made of this very model and this plan, to be spared it now.
        tp_plan: which layers the plan's tensor-parallel replicas cut, `{"layers.*.attention.wq": "colwise",
            "layers.*.attention.wo": "rowwise", ...}` as Hugging Face has it; by default the model's own.

    Raises `PlanError` or `ConfigError`, on every rank alike, before any work starts.
    """

    @arguments.apart_from_the_caller()
    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str | Path,
        *,
        optimizer: OptimizerFactory | None = None,
        loss_fn: LossFn | None = None,
        count_fn: CountFn | None = None,
        unpack: Unpack | None = None,
        split: Split | None = None,
        device: torch.device | str | None = None,
        param_dtype: ParamDtype = None,
        compile: bool = False,
        max_norm: float | None = None,
        clip: Clip = "global",
        seed: int = 0,
        dynamic_shapes: bool = False,
        skip_init: bool = False,
        forbid_nonfinite_loss: bool = False,
        silence_s: float | Literal["auto"] | None = "auto",
        on_loss: OnLoss | None = None,
        compiled: CompiledPlan | None = None,
        tp_plan: TensorParallelPlan | None = None,
    ) -> None:
        functions = {"loss_fn": loss_fn, "count_fn": count_fn, "unpack": unpack}
        checked = model, plan, max_norm, clip, param_dtype, optimizer
        arguments.check_arguments(*checked, functions=functions, seed=seed, silence_s=silence_s)
        self.plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group first "
                "and start the script with torchrun"
            )
        allow_many_files()
        self._connections = Connections()
        self.device = use_device(device)
        named_device = None if device is None else self.device.type
        ranks, processes = find_ranks(self.plan, self.device, named_device=named_device)
        given = max_norm, clip, seed, param_dtype, dynamic_shapes
        # The members of an elastic job have compared theirs.
        check_same(self.plan, model, {} if on_loss else dict(zip(SETTINGS, given, strict=True)))
        dtype = choose_dtype(param_dtype, processes)
        self._scale = LossScale() if computes_in_fp16(model, dtype) else None
        compiled = compiled or compile_plan(
            model,
            self.plan,
            split=split,
            unpack=unpack,
            defer_steps=defers_updates(max_norm, clip, self._scale),
            param_dtype=dtype,
            tp_plan=tp_plan,
        )
        arguments.refuse_with_replicas(self.plan, dynamic_shapes=dynamic_shapes)
        on_host = any(p.device == "cpu" for p in processes) and all(p.is_meta for p in model.parameters())
        if on_host or any(group.offload for group in self.plan.groups):
            refuse_unfitting_plan(compiled, ranks, processes, param_dtype=dtype)
        if compile and not any(part.units for part in compiled.parts):
            raise ConfigError(
                "compile=True compiles numbered layers, and a model that torch.export cuts has none; leave "
                f"it out, or pass split= for this model. {compiled.parts[0].skeleton.note}".rstrip()
            )
        if dynamic_shapes:
            refuse_fixed_shapes(compiled)
        self._loss_fn = loss_fn or token_cross_entropy
        self._count_fn = count_fn or count_valid_tokens
        self._is_loss_checked = False
        self._forbid_nonfinite = forbid_nonfinite_loss
        self.param_dtype = dtype
        """Dtype in which layers compute; None: the model's own."""
        silence_s = arguments.find_patience(processes) if silence_s == "auto" else silence_s
        self._alarm = Alarm(
            ranks.rank, ranks.world_size, default_store(), silence_s=silence_s, on_loss=on_loss
        )
        self._reports_losses = on_loss is not None
        groups = Groups(ranks)
        try:
            with giving_back():
                self._assembly = Assembly(
                    compiled,
                    groups,
                    processes,
                    model=model,
                    device=self.device,
                    optimizer=optimizer or default_optimizer,
                    param_dtype=dtype,
                    compiles=compile,
                    scale=self._scale,
                    max_norm=max_norm,
                    clip=clip,
                    seed=seed,
                    skip_init=skip_init,
                )
            self._executor = Executor(self._assembly, self._alarm.enter)
        except Exception as error:
            if on_loss is None:
                self._alarm.fail(error)  # The others wait for this rank already.
            else:
                self._alarm.abandon()
                groups.abandon()
            raise
        self._alarm.idle()
        self.rank = ranks.rank
        self._own = RankRows(self.plan, self.rank)
        self.rows: list[int] = self._own.rows
        """Rows of the global batch that this rank computes, ascending."""
        self.input_rows: list[int] = self._own.inputs
        """Rows whose inputs this rank feeds; empty unless it has the first ministage."""
        self.target_rows: list[int] = self._own.targets
        """Rows whose targets this rank compares with; empty unless it has the last ministage."""
        self._checkpoints = Checkpoints(self._assembly, self._scale, seed, must_load=skip_init)
        self._totals = SumOverRanks(self._assembly.totals, self._assembly.resources.memory)
        self._crossing = Crossing(self._assembly, param_dtype=dtype, dynamic=dynamic_shapes)
        self._settled = arguments.Settled(m.module for m in self._assembly.ministages.values())
        self._is_closed = False
        self.is_broken = False
        """Whether a call has failed, or was interrupted, in its middle, so that no other can follow."""
        self._is_loaded = False

    # -- training --------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any, /, **kwargs: Any) -> StepResult:
        """One optimizer step over the global batch; every rank calls it.

        `inputs`: tensor or tuple of tensors `[len(input_rows), ...]`, `targets`: `[len(target_rows), ...]`,
        in the order of these lists; None where a list is empty. `kwargs`: tensors `[len(rows), ...]` on every
        rank, or `Broadcast(value)`; each ministage gets those that its `forward` names.
        """
        return self._run("step", inputs, targets, kwargs)

    def step_global(self, inputs: Any, targets: Any, /, **kwargs: Any) -> StepResult:
        """`step` for callers that hold the whole global batch on every rank."""
        return self._run_global("step", inputs, targets, kwargs)

    def evaluate(self, inputs: Any, targets: Any, /, **kwargs: Any) -> StepResult:
        """The loss over one global batch without training: forward only, modules in eval mode for
        its time, and the next step as it would have been without it."""
        return self._run("evaluate", inputs, targets, kwargs)

    def evaluate_global(self, inputs: Any, targets: Any, /, **kwargs: Any) -> StepResult:
        """`evaluate` for callers that hold the whole global batch on every rank."""
        return self._run_global("evaluate", inputs, targets, kwargs)

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The local optimizers by ministage."""
        return self._assembly.updates.optimizers

    @property
    def busy_s(self) -> float:
        """Seconds of the last step in which this rank computed (`BusyClock`); waits for it on a GPU."""
        return self._assembly.busy.seconds()

    @property
    def loss_scale(self) -> float | None:
        """With fp16, what the next step's losses are multiplied by."""
        return None if self._scale is None else self._scale.value

    # -- state -----------------------------------------------------------------------------

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Inside, all that this rank offloads is on its device, as if nothing were offloaded: for who
        reads or changes the parameters and the state of `optimizers` between two steps. Needs the memory.
        Copy what is to outlast it: outside, these tensors have no memory, and reading one crashes. A
        weight that is tied across ministages reaches its other ends with the next step."""
        self._refuse_unusable()
        with as_current(self.device), ExitStack() as stack:
            for ministage in self._assembly.ministages.values():
                stack.enter_context(ministage.on_device())
            self._is_loaded = True
            try:
                yield
            finally:
                self._is_loaded = False

    @contextmanager
    def watching(self, enter: Callable[[Action], None], leave: Callable[[Action], None]) -> Iterator[None]:
        """Inside, `enter` is told every action of this rank before it runs, and `leave` after it."""
        executor = self._executor
        entered, left = executor.enter, executor.leave

        def enter_both(action: Action) -> None:
            entered(action)
            enter(action)

        executor.enter, executor.leave = enter_both, leave
        try:
            yield
        finally:
            executor.enter, executor.leave = entered, left

    def describe(self) -> str:
        """What runs where and over which transport, as a table."""
        return self._assembly.describe()

    def memory_report(self) -> MemoryReport:
        """This rank's memory by purpose, device and host, as planned and as found so far."""
        return report_memory(self._assembly, self._crossing.last)

    def close(self) -> None:
        """Gives back groups, buffers and threads; collective. The process can build another. What was
        offloaded is gone: the model's parameters must not be read any more."""
        if self._is_closed:
            return
        if self._is_loaded:
            self._refuse_unusable()
        self._is_closed = True
        with as_current(self.device):
            leave_together(self._assembly, self._checkpoints, self._totals, self._alarm)

    def interrupt(self) -> None:
        """Frees this rank's thread from whatever other ranks it waits for: the call that it is in fails, or
        gives what is worthless, and `abandon` comes next. From any thread; NCCL may take seconds to end."""
        self._connections.shut()
        self._assembly.groups.abort()

    def abandon(
        self,
        error: BaseException | None = None,
        *,
        is_own: bool = False,
        beside: Callable[[], object] | None = None,
    ) -> None:
        """`close` without the other ranks, some of which may be gone, in whatever state the last step is. The
        caller can then leave the default group, make another and build another pipeline; keep this one until
        the others have left it as well, for with it go connections that they may be about to send by.

        `error`: what ended the last call, of which nothing is kept; `is_own`: this rank itself has failed by
        it, and the others hear why it leaves; `beside`: called before memory is given back, to end threads of
        the caller's that read this pipeline's state.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if error is not None:
            if is_own:
                self._alarm.fail(error)
            forget(error)
        own = self._assembly, self._checkpoints, self._totals, self._alarm, self._connections
        leave_alone(*own, beside=beside)

    def __enter__(self) -> HeteroPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Closes; after an error tells the other ranks why, and all end (or go on, with `on_loss`)."""
        if isinstance(error, Exception) and not self._is_closed:
            if self._reports_losses:
                self.abandon(error, is_own=True)
            else:
                self._alarm.fail(error)
        elif error is None:
            self.close()

    # -- internal --------------------------------------------------------------------------

    def _run(
        self, call: Literal["step", "evaluate"], inputs: Any, targets: Any, kwargs: dict[str, Any]
    ) -> StepResult:
        train = call == "step"
        with self._locating(call):
            self._refuse_unusable()
            self._settled.check(train=train)
            feeds = as_tensors(inputs, "inputs", train=train) if self.input_rows else None
            self._own.check(feeds, targets, kwargs, train=train)
            check_kwargs(kwargs, self._assembly.compiled.parts)
        self._alarm.begin(call)
        with arguments.apart_from_the_caller(), self._failing_together():
            self._alarm.enter(f"{call}() (before its first action)")
            boundaries = self._crossing.find(feeds, kwargs).boundaries
            if self._assembly.positions is not None and self.target_rows:
                targets = self._assembly.positions.of_targets(targets)
            count = count_targets(self._count_fn, targets) if self.target_rows else 0.0
            batch = Batch(self._own.index, self.device, inputs=feeds, targets=targets, kwargs=kwargs)
            scale = self._scale.value if self._scale is not None else 1.0
            loss = Loss(
                self._additive_loss,
                num_targets=count,
                device=self.device,
                group=self._assembly.loss_group,
                forbid_nonfinite=self._forbid_nonfinite,
                scale=scale,
            )
            updates = self._assembly.updates
            updates.begin()
            in_replica = self._assembly.positions is not None
            added = weighing(scale / self.plan.global_batch, is_in_replica=in_replica)
            with added, self._training() if train else self._assembly.in_eval_mode():
                self._executor.run(batch, loss, boundaries, train=train)
            self._alarm.enter(f"{call}() (after its last action)")
            loss.finish()
            num_targets = torch.full_like(loss.loss_sum, loss.local_targets)
            values = torch.stack((loss.loss_sum, num_targets, updates.squares()))
            result = self._totals.start(values, scaled=train and self._scale is not None)
        if train:
            self._checkpoints.count_step()
        self._alarm.idle()
        return result

    def _run_global(
        self, call: Literal["step", "evaluate"], inputs: Any, targets: Any, kwargs: dict[str, Any]
    ) -> StepResult:
        with self._locating(call):
            own = self._own.select(inputs, targets, kwargs)
        return self._run(call, *own)

    @contextmanager
    def _training(self) -> Iterator[None]:
        random = self._assembly.resources.random
        assert random is not None
        with random.of_step(self._checkpoints.num_steps):
            yield

    @contextmanager
    def _alone(self, what: str, *, needs_values: bool = True) -> Iterator[None]:
        self._refuse_unusable(needs_values=needs_values)
        refused: CheckpointError | None = None
        with torch.inference_mode(False), self._failing_together():
            self._alarm.begin(what)
            self._alarm.enter(what)
            try:
                yield
            except CheckpointError as error:  # The same on every rank: nobody waits for another.
                refused = error
        self._alarm.idle()
        if refused is not None:
            raise refused

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """A rank that fails here leaves the others waiting: it tells them why, and all end."""
        try:
            with as_current(self.device):
                yield
        except BaseException as error:
            self.is_broken = True  # For who catches Ctrl-C, or, with `on_loss`, has to say what it was.
            if self._assembly.ranks.world_size == 1 and not self._reports_losses:
                self._recover(error)
            elif isinstance(error, Exception) and not self._reports_losses:
                self._alarm.fail(error)
            raise

    @contextmanager
    def _locating(self, call: str) -> Iterator[None]:
        """A mistake in a call's arguments is the caller's to catch; if it ends this rank, all learn where."""
        try:
            yield
        except Exception as error:
            self._alarm.locate(error, f"{call}() (its arguments)")
            raise

    def _refuse_unusable(self, *, needs_values: bool = True) -> None:
        if self._is_loaded:
            raise ConfigError("inside `with pipe.loaded():` nothing else runs; leave the block first")
        if self._is_closed:
            raise ConfigError("this pipeline is closed; build another one")
        if not self._assembly.groups.are_there:
            raise ConfigError(
                "torch.distributed.destroy_process_group was called, which destroyed this pipeline's groups "
                "too; build another one"
            )
        if self.is_broken:
            raise ConfigError("this pipeline was broken off in the middle of a step; build another one")
        if self._checkpoints.must_load and needs_values:
            raise ConfigError(
                "this pipeline has no values: it was built with skip_init=True, or a load failed half-way; "
                "load a checkpoint that is complete"
            )

    def _recover(self, error: BaseException) -> None:
        """A rank alone may go on with another step, if FSDP2 lets go of this one."""
        try:
            self._executor.recover()
            self.is_broken = False
        except Exception as failed:
            error.add_note(f"zorselike: this pipeline cannot take another step ({failed}); build another one")

    def _additive_loss(self, outputs: Any, targets: Any) -> Tensor:
        """The user's loss; the first time it is proven additive over rows, as its count is."""
        if not self._is_loss_checked:
            self._is_loss_checked = True
            check_additive(self._loss_fn, self._count_fn, outputs, targets)
            if self._assembly.plan.has_replicas:
                check_additive(self._loss_fn, self._count_fn, outputs, targets, over="positions")
        return self._loss_fn(outputs, targets)
