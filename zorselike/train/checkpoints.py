"""`[checkpoint]`: when a run is saved, from what it goes on, and what is kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zorselike.checkpoint.adapters import export_adapters, export_merged
from zorselike.checkpoint.export import export
from zorselike.checkpoint.folder import (
    Checkpoint,
    check_all_files,
    check_files_here,
    examine,
    list_steps,
    prune,
    remove_step,
    set_aside,
)
from zorselike.checkpoint.layout import model_folder, step_folder
from zorselike.checkpoint.read import read_manifest
from zorselike.checkpoint.upload import check_target, upload
from zorselike.errors import CheckpointError, OtherCheckpointError
from zorselike.hf import find_parts
from zorselike.hf.adapters import take_adapters
from zorselike.runtime.checkpoints import Loaded
from zorselike.runtime.pipeline import HeteroPipeline
from zorselike.runtime.processes.processes import Peers
from zorselike.runtime.state.save import Save
from zorselike.text.wording import list_few
from zorselike.train.config.config import Config
from zorselike.train.config.model import TrainedModel
from zorselike.train.data.rows import Rows
from zorselike.train.parts import take_weights

logger = logging.getLogger("zorselike")

_SAY_AFTER_S = 60.0
"""Whoever waits so long for a save is told for which."""
_EXPORT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class RunCheckpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        config: Config,
        pipe: HeteroPipeline,
        world: Peers,
        model: TrainedModel,
        module: nn.Module,
        rows: Rows,
    ) -> None:
        """`module`: what `model` has built, of which `pipe` is made."""
        self._config, self._settings = config, config.checkpoint
        self._pipe, self._world = pipe, world
        self._origin, self._take_weights = model.folder, partial(take_weights, pipe, model, module)
        self._facts = {
            "model": model.name,
            "data": rows.fingerprint(),
            "seq_len": str(config.training.seq_len),
            "seed": str(config.debug.seed),
        }
        """What a run that goes on must have alike, for people to read."""
        self.folder = checkpoint_folder(config)
        self._on_its_way: tuple[Save, dict[str, Any]] | None = None
        """And the best validation once it is there."""
        self._best: dict[str, Any] = {}
        """Step and loss of the best validation that is saved, as far as this rank knows."""
        self._lowest: dict[str, Any] = {}
        """The same as one validation has found it: alike on every rank, so that all begin to save by it."""
        self._rejected: set[Path] = set()
        """Checkpoints that could not be loaded."""
        self._saved_step: int | None = None
        """The newest that is saved."""
        self.run: dict[str, str] = {}
        """Job and folder of an elastic run: what was loaded says of which it is, what is saved is of this."""
        self.owes_validation = False
        """Whether a signal has stopped the run before the validation that is due after its step."""

    # -- at the start ----------------------------------------------------------------------

    def claim(self, *, job: str = "") -> None:
        """Makes this run the one that saves into its folder, for whoever leads `job`, if it has a name;
        collective. `CheckpointError` on every rank: another one does, or nothing can be written there."""
        try:
            self._pipe.claim_checkpoints(self.folder, job=job)
        except CheckpointError as error:
            raise CheckpointError(f"[checkpoint] folder: {error}") from error

    @property
    def saved(self) -> tuple[int, dict[str, Any]] | None:
        """The newest step that is saved, and the best validation that is; None: none yet."""
        if self._on_its_way is not None and self._on_its_way[0].finished.is_set():
            self._report()
        return None if self._saved_step is None else (self._saved_step, self._best)

    def remember(self, saved: tuple[int, dict[str, Any]]) -> None:
        """What `saved` was elsewhere, for a pipeline that goes on where another one stopped."""
        self._saved_step, self._best = saved
        self._lowest = self._best

    def go_on(self, *, claims: bool = True, must_load: bool = False) -> None:
        """Loads what the run goes on from: its own newest checkpoint, or what it is told to begin with, if
        there is either; `claims`: and the folder, if it saves. `must_load`: it has trained, and has saved
        checkpoints. Collective.

        Raises:
            CheckpointError: There are checkpoints, and none of them can be loaded, or there are none any
                more; or going on from an older one would write over newer ones. On every rank alike.
        """
        settings = self._settings
        lora = self._config.lora
        if not settings.enable or lora.enable:  # Checkpoints of adapters have no other weights.
            self._take_weights()
        if not settings.enable:
            self._take_adapters()
            return
        if claims:
            self.claim()  # Now, not at the first save.
        if settings.upload:
            self._world.from_first(lambda: check_target(settings.upload))
        steps = self._pipe.checkpoint_steps(self.folder)
        if settings.load_step >= 0:
            if settings.load_step not in steps:
                raise CheckpointError(
                    f"[checkpoint] load_step = {settings.load_step}: {self.folder} has "
                    f"{list_few([str(step) for step in steps]) if steps else 'no checkpoint'}"
                )
            newer = [step for step in steps if step > settings.load_step]
            if newer:
                raise CheckpointError(
                    f"[checkpoint] load_step = {settings.load_step}, but {self.folder} has newer ones (step "
                    f"{newer[0]}): move them away, or branch off into another [checkpoint] folder with "
                    f'initial_load_path = "{self.folder.absolute() / step_folder(settings.load_step)}" and '
                    "initial_load_model_only = false"
                )
            self._take(self._pipe.load(self.folder / step_folder(settings.load_step), options=False))
        elif steps:
            try:
                self._take(self._pipe.load(self.folder, options=False))
            except OtherCheckpointError as error:
                raise OtherCheckpointError(
                    f"{error}; a run of its own needs another [checkpoint] folder or [job] dump_folder"
                ) from error
        elif must_load:
            raise CheckpointError(
                f"{self.folder}: too many ranks were lost at once, and the checkpoints that this run has "
                "saved are there no more; bring them back (is a disk away?), and start it again"
            )
        elif settings.initial_load_path:
            path = Path(settings.initial_load_path).expanduser()
            loaded = self._pipe.load(path, model_only=settings.initial_load_model_only, options=False)
            if settings.initial_load_model_only:
                logger.info("begins with the model of %s (step %d)", loaded.path, loaded.step)
            else:
                self._take(loaded)
        elif lora.enable:
            self._take_adapters()
        else:
            self._take_weights()

    def _take_adapters(self) -> None:
        """Begins with adapters that peft has saved, if the run is told to."""
        if self._config.lora.initial_load_path:
            path = Path(self._config.lora.initial_load_path).expanduser()
            take_adapters(self._pipe, path)
            logger.info("begins with the adapters of %s", path)

    def _take(self, loaded: Loaded) -> None:
        for path, reason in loaded.skipped:
            logger.warning("passed over: %s", reason)
            self._rejected.add(path)
        for key, value in self._facts.items() if self._pipe.rank == 0 else ():
            saved = loaded.extra.get(key, value)
            if saved != value:
                logger.warning("%s: %s was %s there and is %s here", loaded.path, key, saved, value)
        if loaded.path.parent == self.folder:
            self._best = self._lowest = dict(loaded.extra.get("best", {}))
            self._saved_step = loaded.step
            self.owes_validation = bool(loaded.extra.get("owes_validation", False))
            self.run = dict(loaded.extra.get("run", {}))
        logger.info(
            "goes on from %s: step %d, %s rows seen", loaded.path, loaded.step, f"{self._pipe.rows_seen:,}"
        )

    # -- between steps ---------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a save begins after so many steps."""
        settings = self._settings
        first = settings.enable_first_step_checkpoint and step == 1
        return settings.enable and (first or step % settings.interval == 0)

    def save_if_due(self, step: int, *, validation_loss: float, is_owed: bool = False) -> None:
        """Begins a save, and says how the last one ended; collective. A save that fails is no reason to stop.
        `validation_loss`: of a validation after this step; nan if there was none. `is_owed`: one that was due
        earlier has come to nothing."""
        if not self._settings.enable:
            return
        if self._on_its_way is not None and self._on_its_way[0].finished.is_set():
            self._report()
        is_best = self._settings.keep_best and not math.isnan(validation_loss)
        if is_best:
            # What is saved or on its way: a step that came to nothing is no mark for those after it. Ranks
            # learn at different times how a save ended.
            self._lowest = self._world.from_first(lambda: (self._on_its_way or (None, self._best))[1])
            is_best = validation_loss < self._lowest.get("loss", math.inf)
        if is_best:
            self._lowest = {"step": step, "loss": validation_loss}
        if step == self._saved_step:
            self._best = self._lowest if is_best else self._best
            return
        if step == self._config.training.steps:
            return  # `save_last` saves it, or the model alone.
        if is_best or is_owed or self.is_due(step):
            self._begin(waits=self._settings.async_mode == "disabled")
            if self._settings.async_mode == "disabled":
                self._report()

    def save_last(self, *, is_finished: bool) -> None:
        """Saves at the end of a run, or where a signal stopped it, unless that step is saved; collective.

        Raises:
            CheckpointError: It could not be saved; on every rank alike.
        """
        if not self._settings.enable:
            return
        if self._on_its_way is not None:
            self._report()
        is_new = self._saved_step != self._pipe.num_steps
        hands_on = is_finished and self._settings.last_save_model_only and not self.is_finished()
        alone = hands_on and is_new and self._lowest.get("step") != self._pipe.num_steps
        alone = alone and not self._config.lora.enable  # It is small, and more can be made of it.
        if is_new:
            self._begin(waits=True, prunes=not alone)
            self._report(must_succeed=True)
        if hands_on:
            self._world.from_first(lambda: self._export(alone=alone))

    def hand_on(self) -> None:
        """Exports the model of the last step, if it is wanted and the run that saved that step was ended
        before it did; collective.

        Raises:
            CheckpointError: It could not be exported; on every rank alike.
        """
        if self._saved_step == self._config.training.steps:
            self.save_last(is_finished=True)

    def is_finished(self) -> bool:
        """Whether a run has taken all steps and handed the model on; collective."""
        settings = self._settings
        if not (settings.enable and settings.last_save_model_only):
            return False
        return any(self._world.gather(self._exported_at(self._config.training.steps).is_dir()))

    def _begin(self, *, waits: bool, prunes: bool = True) -> None:
        """Begins a save, unless another is on its way. `prunes`: it is to stay, in place of an older one."""
        step = self._pipe.num_steps
        best = self._lowest if self._lowest.get("step") == step else self._best
        path = self.folder / step_folder(step)
        if path in self._rejected:
            with suppress(OSError):  # Another rank may have been first.
                set_aside(path)
        save = self._pipe.save(
            self.folder,
            extra={**self._facts, "best": best, "owes_validation": self.owes_validation, "run": self.run}
            if self._pipe.rank == 0
            else {},
            wait=False,
            copy=not waits,
            after=partial(self._tidy, best=best, prunes=prunes),
        )
        if save is None:
            logger.warning(
                "step %d is not saved, since the save before it is still on its way: a larger [checkpoint] "
                "interval or a faster disk helps",
                step,
            )
        else:
            self._on_its_way = save, best

    def _report(self, *, must_succeed: bool = False) -> None:
        """Waits for the save on its way, and says how it ended."""
        assert self._on_its_way is not None
        (save, best), self._on_its_way = self._on_its_way, None
        if not save.finished.wait(_SAY_AFTER_S) and self._pipe.rank == 0:
            logger.warning(
                "waits for the save of step %d, still on its way into %s, where older ones are as they were: "
                "a disk of some node is slow, or does not answer",
                save.step,
                save.folder,
            )
        try:
            path = save.wait()
        except CheckpointError as error:
            if must_succeed:
                newest = (
                    "nothing is saved, and the same command begins anew"
                    if self._saved_step is None
                    else f"the newest is step {self._saved_step}, from which the same command goes on"
                )
                raise CheckpointError(
                    f"the run ended after step {save.step}, which could not be saved: {error}; {newest}"
                ) from error
            if self._pipe.rank == 0:
                logger.warning("step %d is not saved, older ones are as they were: %s", save.step, error)
            return
        self._saved_step, self._best = save.step, best
        mebibytes = save.num_bytes / 2**20
        logger.info("saved %s: %.1f MiB by rank 0, in %.1f s", path, mebibytes, save.seconds)
        for warning in save.warnings:
            logger.warning("%s: %s", path, warning)

    def _export(self, *, alone: bool) -> None:
        """Writes the newest checkpoint's model as one would hand it on; `alone`: and deletes the rest."""
        path, target = (
            self.folder / step_folder(self._pipe.num_steps),
            self._exported_at(self._pipe.num_steps),
        )
        dtype, lora = _EXPORT_DTYPES[self._settings.export_dtype], self._config.lora
        try:
            if lora.save_merged:
                export_merged(path, target, like=self._origin)
            elif lora.enable:
                export_adapters(path, target, dtype=dtype, like=self._origin)
            else:
                origin = self._origin
                parts = None if origin is None else find_parts(read_manifest(path), origin)
                export(path, target, dtype=dtype, aliases=origin is None, like=origin, parts=parts)
            if alone:
                remove_step(path)
        except OSError as error:
            raise CheckpointError(f"{error.filename or target}: {error.strerror}") from error
        logger.info(
            "exported %s%s",
            target,
            f", the model alone: {path.name} is deleted (last_save_model_only)" if alone else "",
        )

    # -- in the thread that saves ----------------------------------------------------------

    def _tidy(self, path: Path, *, best: Mapping[str, Any], prunes: bool) -> None:
        """Deletes what need not be kept, if it `prunes`, and copies the new one to where it is wanted.
        `best`: of what is saved by now."""
        settings = self._settings
        if settings.keep_latest_k and prunes:
            step = best.get("step")
            holds_all = isinstance(examine(path), Checkpoint)  # Else nodes do not share a disk.
            prune(
                self.folder,
                keep_latest=settings.keep_latest_k,
                keep_every=settings.keep_every or None,
                keep=() if step is None else (self.folder / step_folder(step),),
                check=check_all_files if holds_all else check_files_here,
            )
        if settings.upload:
            upload(path, settings.upload)

    def _exported_at(self, step: int) -> Path:
        return self.folder / model_folder(step)


def checkpoint_folder(config: Config) -> Path:
    """The folder of a job's checkpoints, which all its runs share."""
    return Path(config.job.dump_folder) / config.checkpoint.folder


def will_load(config: Config) -> bool:
    """Whether a run of this recipe begins with a checkpoint, as far as this rank sees."""
    settings = config.checkpoint
    return settings.enable and bool(settings.initial_load_path or list_steps(checkpoint_folder(config)))
