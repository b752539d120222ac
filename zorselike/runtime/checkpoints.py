"""Checkpoints of a pipeline: what a run has counted, saved and loaded with its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zorselike.checkpoint.folder import list_steps
from zorselike.checkpoint.layout import step_folder, step_of
from zorselike.checkpoint.manifest import Base, check_json
from zorselike.errors import CheckpointError, ConfigError, OtherCheckpointError
from zorselike.runtime.assembly import Assembly
from zorselike.runtime.ministage.updates import LossScale
from zorselike.runtime.state.load import Loader
from zorselike.runtime.state.pretrained import NameOf, PretrainedWeights, find_fingerprint
from zorselike.runtime.state.save import AfterCommit, RunFacts, Save, Saver
from zorselike.runtime.state.save_history import SaveHistory
from zorselike.runtime.state.schedulers import LRSchedulers
from zorselike.runtime.state.together import gather_by_rank


@dataclass(frozen=True)
class Loaded:
    """What a pipeline has been filled with."""

    path: Path
    step: int
    extra: Mapping[str, Any]
    """What `save` was given."""
    skipped: tuple[tuple[Path, str], ...] = ()
    """Newer checkpoints beside it that were passed over, and why."""


class Checkpoints:
    """Saves and loads one pipeline."""

    def __init__(self, assembly: Assembly, scale: LossScale | None, seed: int, *, must_load: bool) -> None:
        self._assembly, self._scale, self._seed = assembly, scale, seed
        self._saver: Saver | None = None
        self._schedulers: LRSchedulers | None = None
        self._schedule: Mapping[str, Any] | None = None
        """Loaded before there were schedulers."""
        self.num_steps = 0
        """Optimizer steps taken, those of the run that was loaded included."""
        self.rows_seen = 0
        """Rows trained on, counted in the same way."""
        self.must_load = must_load
        """Whether parameters have no values: a load that had begun to fill has failed, or none has begun."""
        self.history: SaveHistory | None = None
        """Of a job that may do steps again."""
        self._job = ""

    def belong_to(self, job: str, history: SaveHistory) -> None:
        """Saves are those of a job of this name, which may do steps again, and whose leaders hand its folders
        on; before the first."""
        self._job, self.history = job, history

    def count_step(self) -> None:
        """A step has been taken."""
        self.num_steps += 1
        self.rows_seen += self._assembly.plan.global_batch

    def make_schedulers(self, factory: Callable[[Optimizer], LRScheduler]) -> LRSchedulers:
        """One scheduler an optimizer, where a loaded run's were."""
        states = self._assembly.state.ministages
        groups = [group for own in states.values() if own.optimizer for group in own.optimizer.param_groups]
        for group in groups:
            if isinstance(group.get("lr"), Tensor):  # One that all have would be changed by each scheduler.
                group["lr"] = group["lr"].clone()
        options = [dict(group) for group in groups]
        self._schedulers = LRSchedulers(states, factory)
        if self._schedule is not None:
            for group, loaded in zip(groups, options, strict=True):
                group.update(loaded)  # A new scheduler sets rates and momenta to where they begin.
            self._schedulers.load_state_dict(self._schedule)
        return self._schedulers

    def claim(self, folder: Path, *, job: str = "") -> None:
        """Makes this pipeline the one that saves into a folder; collective.

        Raises:
            CheckpointError: On every rank alike: another process does, or nothing can be written there.
        """
        self._make_saver().claim(folder.absolute(), job=job)

    def _make_saver(self) -> Saver:
        if self._saver is None:
            assembly = self._assembly
            group = assembly.groups.make(range(assembly.plan.num_ranks), "gloo")
            assert group is not None
            self._saver = Saver(assembly.state, assembly.resources.memory, group, job=self._job)
        return self._saver

    def save(
        self,
        folder: Path,
        *,
        extra: Mapping[str, Any],
        model_only: bool,
        stages: bool,
        after: AfterCommit | None,
    ) -> Save | None:
        """None if an earlier save is still on its way; what is there if the step was saved before it was done
        again. Collective."""
        folder, saver = folder.absolute(), self._make_saver()
        if not saver.is_idle():
            return None
        if self.history is not None:
            path = folder / step_folder(self.num_steps)
            is_there = self.history.has(path, model_only=model_only)
            if any(gather_by_rank(self._assembly.state, is_there)):
                return Save.made(path, self.num_steps)
        failure: CheckpointError | ConfigError | None = None
        try:
            facts = self.facts(extra, model_only=model_only)
        except (CheckpointError, ConfigError) as error:
            failure, facts = error, replace(self.facts({}, model_only=True), model_only=model_only)
        note = None if self.history is None else partial(self.history.note, model_only=model_only)
        return saver.start(folder, facts, stages=stages, after=after, failure=failure, note=note)

    def facts(self, extra: Mapping[str, Any], *, model_only: bool = False) -> RunFacts:
        """What is to be kept beside the tensors. `CheckpointError` or `ConfigError` for what JSON cannot
        say."""
        check_json(extra, "extra")
        return RunFacts(
            step=self.num_steps,
            rows_seen=self.rows_seen,
            seed=self._seed,
            loss_scale=None if self._scale is None else self._scale.state_dict(),
            schedule=None if self._schedulers is None or model_only else self._schedulers.state_dict(),
            extra=deepcopy(dict(extra)),  # The caller goes on changing its own.
            model_only=model_only,
        )

    def load(self, path: Path, *, model_only: bool, options: bool) -> Loaded:
        """Fills the pipeline from a step's folder, or from the newest of a folder of them that is complete;
        collective.

        Raises:
            CheckpointError: On every rank alike.
        """
        if self._saver is not None:
            self._saver.wait()
        candidates = self._find(path)
        skipped: list[tuple[Path, str]] = []
        for candidate in candidates:
            try:
                loader = Loader(self._assembly.state, candidate, model_only=model_only)
                self.must_load = True
                loader.load()
                self.must_load = False
            except OtherCheckpointError:
                raise
            except CheckpointError as error:
                if len(candidates) == 1:
                    raise
                skipped.append((candidate, str(error)))
                continue
            if loader.manifest.base is None:  # Frozen weights are the checkpoint's own now.
                self._assembly.state.base = None
            self._take_over(loader, options=options)
            return Loaded(candidate, loader.manifest.step, loader.manifest.extra, tuple(skipped))
        raise CheckpointError(f"no checkpoint can be loaded: {'; '.join(reason for _, reason in skipped)}")

    def load_pretrained(
        self,
        folder: Path,
        *,
        name_of: NameOf,
        ignored: Sequence[str],
        adapter: Mapping[str, Any] | None,
        only_trained: bool,
    ) -> int:
        """Fills the model from a folder of safetensors files; returns the bytes that this rank has read.
        Collective.

        Raises:
            CheckpointError: On every rank alike.
        """
        if self._saver is not None:
            self._saver.wait()
        state, kept, base = self._assembly.state, frozenset[str](), None
        trained = frozenset(name for name, known in state.inventory.all_tensors.items() if known.trains)
        if only_trained:
            kept, base = frozenset(state.inventory.all_tensors) - trained, state.base
        elif adapter is not None:
            kept = trained
            base = Base(str(folder.absolute()), find_fingerprint(state, folder), adapter)
        weights = PretrainedWeights(state, folder, name_of=name_of, ignored=ignored, kept=kept)
        self.must_load = True
        weights.load()
        self.must_load, state.base = False, base
        return weights.num_bytes_read

    def list_steps(self, folder: Path) -> list[int]:
        """Steps of a folder's checkpoints, complete or not, that any rank sees, newest first; collective."""
        own, error = [], None
        try:
            own = [step_of(path.name) for path in list_steps(folder)]
        except CheckpointError as found:
            error = str(found)
        everyone = gather_by_rank(self._assembly.state, (own, error))
        for _, error in everyone:
            if error is not None:
                raise CheckpointError(error)
        return sorted({step for steps, _ in everyone for step in steps}, reverse=True)

    def close(self) -> None:
        """Waits for a save on its way."""
        if self._saver is not None:
            self._saver.close()

    def abandon(self) -> None:
        """Gives up a save on its way."""
        if self._saver is not None:
            self._saver.abandon()

    def _find(self, path: Path) -> list[Path]:
        """The step's folder itself, or those in the folder that any rank sees, newest first."""
        return [path / step_folder(step) for step in self.list_steps(path)] or [path]

    def _take_over(self, loader: Loader, *, options: bool) -> None:
        manifest = loader.manifest
        if loader.model_only:
            return
        if options:
            loader.load_options()
            self._schedule = None
        self.take_over(
            step=manifest.step,
            rows_seen=manifest.rows_seen,
            loss_scale=manifest.loss_scale,
            schedule=manifest.schedule if options else None,
        )

    def take_over(
        self,
        *,
        step: int,
        rows_seen: int,
        loss_scale: Mapping[str, float] | None,
        schedule: Mapping[str, Any] | None,
    ) -> None:
        """Goes on counting where another pipeline has stopped, whose tensors this one has now."""
        self.must_load = False
        self.num_steps, self.rows_seen = step, rows_seen
        if self._scale is not None and loss_scale is not None:
            self._scale.load_state_dict(loss_scale)
        if schedule is not None:
            self._schedule = schedule
            if self._schedulers is not None:
                self._schedulers.load_state_dict(schedule)


class Stateful(ABC):
    """A pipeline's state, as its users see it."""

    _assembly: Assembly
    _checkpoints: Checkpoints

    @property
    def assembly(self) -> Assembly:
        """What it runs with, for who moves its state to another pipeline."""
        return self._assembly

    @property
    def checkpoints(self) -> Checkpoints:
        """What it has counted, for the same."""
        return self._checkpoints

    @abstractmethod
    def _alone(self, what: str, *, needs_values: bool = True) -> AbstractContextManager[None]:
        """Inside, all ranks do the same between two steps; a `CheckpointError` is one of all ranks."""

    def lr_schedulers(self, factory: Callable[[Optimizer], LRScheduler]) -> LRSchedulers:
        """One scheduler per local optimizer, stepped together after each step; `save` saves them."""
        return self._checkpoints.make_schedulers(factory)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Collective: `{name: CPU tensor}` of the whole model on rank 0 of the plan (`pipe.rank == 0`),
        `{}` elsewhere. What trains comes from its fp32 master weights where it has them; what is frozen,
        as it computes. For models that rank 0 can hold; `save` needs no such rank."""
        with self._alone("full_state_dict"):
            return self._assembly.state.gather_whole()

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] = MappingProxyType({}),
        model_only: bool = False,
        wait: bool = True,
        copy: bool | None = None,
        after: AfterCommit | None = None,
    ) -> Save | None:
        """Saves everything that the next step depends on into `folder/step-N`, N being the steps taken; any
        plan goes on from it. Collective; the disk need not be shared by nodes.

        Args:
            extra: what to keep beside: whatever JSON can say, the same on all ranks that give something.
            model_only: leave out the optimizer's state.
            wait: until it is on the disk. If not, it is written beside the next steps, and the `Save` says
                when it is done; while one is on its way no other begins: None is returned.
            copy: the state to host memory first, so that the next steps can begin. Unless given, if it does
                not `wait`.
            after: called in a thread on the rank that completed the folder, with its path.

        Raises:
            CheckpointError: With `wait`, on every rank: it could not be written, or optimizer or scheduler
                keep something that cannot be saved. Older ones are as they were.
        """
        with self._alone("save"):
            save = self._checkpoints.save(
                Path(folder).expanduser(),
                extra=extra,
                model_only=model_only,
                stages=not wait if copy is None else copy,
                after=after,
            )
        if save is not None and wait:
            save.wait()
        return save

    def load(self, path: str | Path, *, model_only: bool = False, options: bool = True) -> Loaded:
        """Goes on from a checkpoint that any plan has saved: `folder/step-N`, or the newest in `folder` that
        is complete. Collective. (Weights in safetensors files: `load_pretrained`.)

        Args:
            model_only: take over the model alone, as for a new run.
            options: take over the optimizer's options and the schedulers' state too; without, those of this
                run count.

        Raises:
            CheckpointError: On every rank: it is damaged, or of another model. Where filling had begun,
                nothing else runs until a checkpoint has been loaded.
        """
        with self._alone("load", needs_values=False):
            return self._checkpoints.load(Path(path).expanduser(), model_only=model_only, options=options)

    def load_pretrained(
        self,
        folder: str | Path,
        *,
        name_of: NameOf = str,
        ignored: Sequence[str] = (),
        adapter: Mapping[str, Any] | None = None,
        only_trained: bool = False,
    ) -> int:
        """Takes over the weights of a folder of safetensors files, as `save_pretrained` of `transformers`
        writes it. Every rank reads the rows that it holds, so build the pipeline with a model on the meta
        device and `skip_init=True`. Returns the bytes that this rank has read. Collective; every node must
        see the folder.

        Args:
            folder: with safetensors files, and the index if they are several.
            name_of: what the model calls what the files call so; by default the same. A box of values where
                that is a part of a tensor, such as one expert of all.
            ignored: patterns of names in the files that the model need not have.
            adapter: the settings of adapters, as JSON, where the model has some beside these weights. What
                trains then keeps its values, and what is frozen is left out of checkpoints, which name the
                folder: the next run reads it there again, before it loads one.
            only_trained: take over what trains; what is frozen keeps its values.

        Raises:
            CheckpointError: On every rank: files are missing or damaged, or of another model.
        """
        with self._alone("load_pretrained", needs_values=False):
            return self._checkpoints.load_pretrained(
                Path(folder), name_of=name_of, ignored=ignored, adapter=adapter, only_trained=only_trained
            )

    def checkpoint_steps(self, folder: str | Path) -> list[int]:
        """Steps of the checkpoints in a folder, complete or not, that any rank sees, newest first;
        collective."""
        with self._alone("checkpoint_steps", needs_values=False):
            return self._checkpoints.list_steps(Path(folder).expanduser())

    def claim_checkpoints(self, folder: str | Path, *, job: str = "") -> None:
        """Makes this job the one that saves into a folder, as the first `save` would; makes the folder.
        Collective. `job`: a name that another process may claim it by, once this one leads the job no more.

        Raises:
            CheckpointError: On every rank: another job does, or nothing can be written there.
        """
        with self._alone("claim_checkpoints", needs_values=False):
            self._checkpoints.claim(Path(folder).expanduser(), job=job)

    @property
    def num_steps(self) -> int:
        """Steps taken, those before a checkpoint that was loaded included."""
        return self._checkpoints.num_steps

    @property
    def rows_seen(self) -> int:
        """Rows trained on, counted in the same way: where data goes on."""
        return self._checkpoints.rows_seen
