"""`ElasticPipeline`: `HeteroPipeline`'s contract for a job whose ranks die, come and go."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zorselike.elastic.contingency import Contingencies
from zorselike.elastic.contract import Control, LeftError, Worker
from zorselike.elastic.deciding.decisions import Planner
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.drawing import Drawings, Options
from zorselike.elastic.drift.naming import name_drifts
from zorselike.elastic.mirror_rules import check_mirroring
from zorselike.elastic.replicas import Replicas
from zorselike.elastic.result import ElasticResult, known
from zorselike.elastic.running import Running, backend_of, nodes_of
from zorselike.elastic.schedules import ElasticSchedulers
from zorselike.elastic.switch import Arrived
from zorselike.elastic.worker import ElasticWorker
from zorselike.errors import ConfigError
from zorselike.plan.plan import Plan
from zorselike.runtime.alarm.failure import reason_of
from zorselike.runtime.checkpoints import Loaded
from zorselike.runtime.loss import CountFn, LossFn, Unpack
from zorselike.runtime.memory_report import MemoryReport
from zorselike.runtime.ministage.updates import Clip, OptimizerFactory
from zorselike.runtime.model.partition import Split
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.device import ParamDtype, use_device
from zorselike.runtime.result import StepResult
from zorselike.runtime.state.save import Save
from zorselike.runtime.tensor_parallel.styles import TensorParallelPlan

logger = logging.getLogger("zorselike")

Meet = Callable[[Worker], Control]


class ElasticPipeline:
    """Trains as `HeteroPipeline` does, and goes on in the same process when ranks are lost, leave or come.

    Every process of the job makes one, with the same arguments; `torch.distributed` is this object's affair.
    A step that ranks are lost in raises nothing: it returns a result that is not `is_done`, and the next step
    is that of `rows_seen`, under another plan. So a training loop asks for the rows at each step:

        while pipe.wait() and pipe.num_steps < 1000:
            inputs = data.rows(pipe.rows_seen, pipe.input_rows)     # a function of rows seen alone
            targets = data.rows(pipe.rows_seen, pipe.target_rows)
            result = pipe.step(inputs, targets)
            if result.is_done:                                      # else: the same again, or one before
                schedulers.step()
                print(pipe.num_steps, result.loss, result.generation)
        pipe.close()

    `step_global` repeats a step by itself. A process that is no rank now waits in `wait`, which is False for
    one that has left. With `mirror_share` of the time for mirrors, at most `at_most_lost` steps that were
    done are to be done again after a loss: none where that is 0.

    Args:
        model_factory: gives the model anew, best on the meta device; called ahead, in a thread.
        plan: of the ranks that the job starts with, each of which takes one in the order of joining, or as
            the plan's devices say.
        meeting: makes this process's membership, which asks the worker that it is given: for instance
            `partial(from_environment, device_type="cpu", memory_bytes=2**34)`.
        planner: finds the best plan for who is there, such as a `SearchPlanner`; asked beforehand for the
            loss of each node, in a thread of the leader. By default groups and ministages stay, who is lost
            is replaced by a spare, or else by the others of its group.
        payback_s: within which a better plan must have paid for the pause of going over to it.
        begin: fills a pipeline where nobody has a state to give, such as `lambda pipe:
            pipe.load_pretrained(folder)` or `lambda pipe: pipe.load(folder)`, whose `extra` is then this
            one's; with it, parameters are not initialised. Collective; a job that goes back to a checkpoint
            of its own calls it, too, before.
        mirror_share: share of the time in which mirrors may be on their way.
        mirror_every: steps from one mirror to the next, in place of that.
        replan_on_drift: with a planner: goes over to another plan where a card that has become slower makes
            that pay back. Such cards are named in any case.
        settings: of the caller's own, by name, in which all processes must be alike, as text: the learning
            rate, say.

    The other arguments are those of `HeteroPipeline`.

    Raises:
        ClusterError: From any call: the job has ended, or has gone on without this process.
        ConfigError: From `wait`: this process was given other settings than the job that it has joined.
    """

    def __init__(
        self,
        model_factory: Callable[[], nn.Module],
        plan: Plan | str | Path,
        *,
        meeting: Meet,
        planner: Planner | None = None,
        payback_s: float = 600.0,
        begin: Callable[[HeteroPipeline], object] | None = None,
        mirror_share: float = 0.1,
        mirror_every: int | None = None,
        replan_on_drift: bool = False,
        settings: Mapping[str, object] | None = None,
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
        forbid_nonfinite_loss: bool = False,
        silence_s: float | Literal["auto"] | None = "auto",
        tp_plan: TensorParallelPlan | None = None,
    ) -> None:
        check_mirroring(mirror_share, mirror_every)
        if replan_on_drift and planner is None:
            raise ConfigError("replan_on_drift: there is no planner to ask; give planner=SearchPlanner(...)")
        self._begin, self._name_drifts = begin, partial(name_drifts, replans=replan_on_drift)
        gc.collect()
        gc.freeze()  # What is imported need not be looked through each time that a generation is left.
        self._mirror_share, self._mirror_every = mirror_share, mirror_every
        self.device = use_device(device)
        options = Options(
            optimizer=optimizer,
            loss_fn=loss_fn,
            count_fn=count_fn,
            unpack=unpack,
            split=split,
            param_dtype=param_dtype,
            compile=compile,
            max_norm=max_norm,
            clip=clip,
            seed=seed,
            dynamic_shapes=dynamic_shapes,
            forbid_nonfinite_loss=forbid_nonfinite_loss,
            silence_s=silence_s,
            tp_plan=tp_plan,
            settings=settings or {},
        )
        first = plan if isinstance(plan, Plan) else Plan.load(plan)
        self._drawings = Drawings(model_factory, options, self.device)
        ahead = planner and Contingencies(planner, draw=lambda found: self._drawings.draw_ahead(found.plan))
        leader = Leader(first.validate(), ahead, payback_s=payback_s)
        self.worker = ElasticWorker(leader, self._drawings)
        """What membership asks of this process."""
        self._control = self.worker.control = meeting(self.worker)
        self._running: Running | None = None
        self._schedulers = ElasticSchedulers(lambda: self.num_steps)
        self._has_caught_up = False
        self._is_leaving, self.why_left = False, ""
        self.extra: dict[str, Any] = {}
        """Whatever JSON can say and is to go with the state to who comes new, as it is when a step ends."""
        self.num_lost = 0
        """Steps that were done and had to be done again."""
        self.num_failed_starts = 0
        """Generations that ended before they ran."""

    # -- training --------------------------------------------------------------------------

    def wait(self) -> bool:
        """Whether this process is a rank: waits as a spare until it is one, or is out (`why_left`)."""
        while not self.why_left and (self._running is None or self._running.rank is None):
            self._enter_next()
        return not self.why_left

    def step(self, inputs: Any, targets: Any, /, **kwargs: Any) -> ElasticResult:
        """As `HeteroPipeline.step`; what is not `is_done` when ranks were lost."""
        return self._step(lambda pipe: pipe.step(inputs, targets, **kwargs))

    def step_global(self, inputs: Any, targets: Any, /, **kwargs: Any) -> ElasticResult:
        """`step` for callers that hold the whole global batch on every rank; does it again where ranks were
        lost in it, unless a step before is to be done again, too, or this process is no rank any more."""
        before = self.num_steps
        while True:
            result = self._step(lambda pipe: pipe.step_global(inputs, targets, **kwargs))
            if result.is_done or self.num_steps != before or self.pipe is None:
                return result

    def evaluate(self, inputs: Any, targets: Any, /, **kwargs: Any) -> ElasticResult:
        """As `HeteroPipeline.evaluate`; what is not `is_done` when ranks were lost."""
        return self._try(lambda pipe: pipe.evaluate(inputs, targets, **kwargs))

    def evaluate_global(self, inputs: Any, targets: Any, /, **kwargs: Any) -> ElasticResult:
        """`evaluate` for callers that hold the whole global batch on every rank."""
        return self._try(lambda pipe: pipe.evaluate_global(inputs, targets, **kwargs))

    @property
    def pipe(self) -> HeteroPipeline | None:
        """The pipeline of this generation; None where this process is no rank."""
        return None if self._running is None else self._running.pipe

    @property
    def generation(self) -> int:
        """Number of the generation that runs; 0 before the first."""
        return 0 if self._running is None else self._running.number

    @property
    def plan(self) -> Plan:
        """That runs, or, before, that is to run first."""
        leader = self.worker.leader
        return leader.plan or leader.base

    @property
    def rank(self) -> int | None:
        """Of that plan; None where this process is none."""
        return None if self._running is None else self._running.rank

    @property
    def rows(self) -> list[int]:
        """As `HeteroPipeline.rows`; may be others after each result."""
        return self._own().rows

    @property
    def input_rows(self) -> list[int]:
        """As `HeteroPipeline.input_rows`."""
        return self._own().input_rows

    @property
    def target_rows(self) -> list[int]:
        """As `HeteroPipeline.target_rows`."""
        return self._own().target_rows

    @property
    def num_steps(self) -> int:
        """Steps taken; fewer than before where some are to be done again."""
        return self.worker.num_steps

    @property
    def rows_seen(self) -> int:
        """Rows trained on, counted in the same way: where data goes on."""
        return self.worker.rows_seen

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """As `HeteroPipeline.optimizers`: of this generation."""
        return self._own().optimizers

    @property
    def at_most_lost(self) -> int:
        """How many steps that were done a loss can undo at most."""
        replicas = None if self._running is None else self._running.replicas
        return 0 if replicas is None or replicas.interval == 1 else replicas.interval

    def lr_schedulers(self, factory: Callable[[Optimizer], LRScheduler]) -> ElasticSchedulers:
        """As `HeteroPipeline.lr_schedulers`; they outlast the generation. Before the first step."""
        self._schedulers.use(factory, self.pipe)
        return self._schedulers

    @property
    def summary(self) -> str:
        """What the leader has decided for this generation, in one line."""
        return "" if self._running is None else self._running.summary

    def memory_report(self) -> MemoryReport:
        """As `HeteroPipeline.memory_report`, with copies and mirrors in host memory."""
        report, running = self._own().memory_report(), self._running
        return report if running is None or running.replicas is None else running.replicas.report(report)

    # -- coming and going ------------------------------------------------------------------

    def change_plan(self, plan: Plan) -> None:
        """Asks for another plan, which all go over to between two steps; every rank calls it, with the same
        one."""
        self.worker.leader.wanted = plan.validate()
        self._control.request_change()

    def leave(self) -> None:
        """Asks to leave between two steps, with nothing lost; `wait` is False then."""
        self._is_leaving = True
        self._control.leave()

    def close(self) -> None:
        """Ends this process's part, when the job has done its last step; collective among ranks."""
        running, self._running = self._running, None
        is_done = running is not None and running.rank is not None
        if running is not None:
            try:
                if running.replicas is not None:
                    running.replicas.wait()
                running.leave_together()
            except Exception as error:  # Ranks were lost after the last step: there is nothing to go on with.
                running.leave_alone(error)
            self.worker.stash(running)
        self._control.close(is_done=is_done)
        self.worker.forget_copies()
        self.worker.let_go()
        self._drawings.close()

    def __enter__(self) -> ElasticPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        if error is None:
            self.close()
            return
        if self._running is not None:
            self._running.leave_alone(error, is_own=True)
        self._drawings.close()

    # -- checkpoints -----------------------------------------------------------------------

    def save(self, folder: str | Path, *, wait: bool = True, model_only: bool = False) -> Save | None:
        """As `HeteroPipeline.save`, with `extra`. None also where ranks were lost before it was done: the
        checkpoints that are there stay. Where too many are lost at once, the job goes back to the newest. A
        step that is done again is not saved again."""
        pipe, running = self._here()
        try:
            with running.inside():
                save = pipe.save(folder, extra=self.extra, model_only=model_only, wait=wait)
        except Exception as error:
            if running.is_the_callers(error):
                raise
            self._recover(error)
            return None
        if save is not None and not model_only:
            self.worker.note_save(save)
        return save

    def full_state_dict(self) -> dict[str, Tensor]:
        """As `HeteroPipeline.full_state_dict`; asks again where ranks were lost meanwhile."""
        while True:
            pipe, running = self._here()
            try:
                with running.inside():
                    return pipe.full_state_dict()
            except Exception as error:
                if running.is_the_callers(error):
                    raise
                self._recover(error)

    # -- internal --------------------------------------------------------------------------

    def _here(self) -> tuple[HeteroPipeline, Running]:
        running = self._running
        if running is None or running.pipe is None:
            raise ConfigError("this process is no rank of the job now; call wait() before each step")
        return running.pipe, running

    def _own(self) -> HeteroPipeline:
        return self._here()[0]

    def _try(self, call: Callable[[HeteroPipeline], StepResult]) -> ElasticResult:
        """What all ranks do together between two steps."""
        pipe, running = self._here()
        try:
            with running.inside():
                return ElasticResult.of(call(pipe), running.number)
        except Exception as error:
            if running.is_the_callers(error):
                raise
            self._recover(error)
        return ElasticResult.lost(self.generation)

    def _step(self, call: Callable[[HeteroPipeline], StepResult]) -> ElasticResult:
        (pipe, running), wanted = self._here(), self.num_steps + 1
        result: StepResult | None = None
        try:
            if not self._has_caught_up:
                self._schedulers.catch_up(pipe.assembly.control)
                self._has_caught_up = True
            with running.inside():
                result = call(pipe)
                self._after_step(running, pipe, result)
        except Exception as error:
            if result is None and running.is_the_callers(error):
                raise
            self._recover(error)
        if self.num_steps < wanted:
            self.num_lost += wanted - 1 - self.num_steps
            return ElasticResult.lost(self.generation)
        if (sums := self.worker.sums) is not None and sums[0] == wanted:
            return ElasticResult(known(sums[1]), generation=self.generation)
        assert result is not None
        return ElasticResult.of(result, self.generation)

    def _after_step(self, running: Running, pipe: HeteroPipeline, result: StepResult) -> None:
        """Has the new state mirrored if that is due, and changes the generation if that is planned."""
        replicas, step = running.replicas, pipe.num_steps
        assert replicas is not None
        if replicas.interval == 1:  # All wait for all in any case.
            self.worker.sums = step, result.read_sums()
        self.worker.note_counts(pipe)
        if replicas.is_due(step):  # Before the loop's calls of schedulers.
            replicas.take(self.extra, busy=pipe.assembly.busy.reading())
            self._name_drifts(running, replicas.list_busy_s(), self.worker.leader, self._control)
        self._schedulers.forget_before(replicas.mirrored or 0)
        self.worker.leader.note_step_time(replicas.step_s)
        self.worker.note_step(running)
        if self._control.step_done(step):
            replicas.take(self.extra, mirrors=False)
            running.leave_together()
            self._enter_next()

    def _recover(self, error: BaseException) -> None:
        """Leaves a generation that has ended unplanned, and enters the next."""
        assert self._running is not None
        self._leave_alone(self._running, error)
        self._enter_next()

    def _leave_alone(self, running: Running, error: BaseException) -> None:
        is_own = running.is_own(error)
        if is_own:
            logger.warning("this process has failed at step %d: %s", self.num_steps, reason_of(error))
        with running.inside():
            running.leave_alone(error, is_own=is_own)
        if is_own:
            self.worker.fail(error)

    def _enter_next(self) -> None:
        """Waits for the next generation, and for its successors until one is whole."""
        while True:
            if self._running is not None:
                self._running.leave_alone()
                self.worker.stash(self._running)
            try:
                generation = self._control.next_generation()
            except LeftError as left:
                logger.info("%s", left)
                self.why_left = str(left)
                return
            if other := self.worker.take_settings(generation.decision):
                self._running = None
                raise ConfigError(f"{other}: start it with the same versions, arguments, model and data")
            running = self._running = Running(generation, self._control.id)
            self.worker.enter(running)
            try:
                with running.inside():
                    self._enter(running)
                return
            except Exception as error:
                self.num_failed_starts += not self._is_leaving
                self._leave_alone(running, error)

    def _enter(self, running: Running) -> None:
        generation, worker = running.generation, self.worker
        worker.leader.note(generation)
        plan, decision = self.plan, generation.decision
        source = worker.source_of(generation)
        fills = source is not None or decision["checkpoint"] is not None or self._begin is not None
        running.form(
            backend_of(self.device),
            lambda on_loss: self._drawings.build(plan, on_loss, skip_init=fills),
            worker.hear_of_losses,
        )
        self._schedulers.attach(running.pipe)
        self._control.formed()
        if running.pipe is not None:
            running.pipe.checkpoints.belong_to(worker.leader.job, worker.save_history)
        if source is not None:
            arrived = running.fill(decision["givers"], worker.copies_of(source))
            if arrived is not None and running.pipe is not None:
                worker.note_counts(running.pipe)
                self._take_over(running.pipe, arrived)
        elif running.pipe is not None:
            self._begin_anew(running.pipe, decision["checkpoint"])
            worker.refuse_lost_state(generation, running.pipe.num_steps)
        if running.pipe is not None:
            worker.note_counts(running.pipe)
            if decision["sums"] is not None:
                worker.sums = worker.num_steps, tuple(decision["sums"])
            self._hold(running)
        self._control.filled()
        worker.forget_copies()
        self._has_caught_up = False
        worker.begin(running)

    def _take_over(self, pipe: HeteroPipeline, arrived: Arrived) -> None:
        self.extra = dict(arrived.extra)
        self._schedulers.return_to(arrived.step, arrived.num_calls)
        self._schedulers.catch_up(pipe.assembly.control)

    def _begin_anew(self, pipe: HeteroPipeline, checkpoint: str | None) -> None:
        begun = None if self._begin is None else self._begin(pipe)
        if checkpoint is not None:  # One of adapters has no other weights: these `begin` brings.
            begun = pipe.load(checkpoint)
        if isinstance(begun, Loaded):
            self.extra = dict(begun.extra)
            if self.worker.checkpoint is None and begun.step == pipe.num_steps:  # Not of the model alone.
                self.worker.checkpoint = str(begun.path)
        self._schedulers.begin_anew()

    def _hold(self, running: Running) -> None:
        """Copies and mirrors the state that a generation begins with; collective among its ranks."""
        assert running.pipe is not None
        if running.replicas is None:
            nodes, share, every = nodes_of(running.generation), self._mirror_share, self._mirror_every
            running.replicas = Replicas(running.pipe, running.number, nodes, share=share, interval=every)
        running.replicas.take(self.extra, num_calls=self._schedulers.num_made)
