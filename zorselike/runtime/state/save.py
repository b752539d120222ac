"""Saves a pipeline's state, beside the steps that follow: no rank has all of it, and no disk need be shared.

A thread a rank copies what its rank answers for, writes it into a folder that nothing reads, and tells the
leader (rank 0) what it has written. The leader writes the manifest and renames the folder: until then there
is no checkpoint, from then on there is one. Where a node does not see the leader's folder, its ranks write
into one of the same name on their own disk, which the first of them completes.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zorselike.checkpoint.folder import (
    check_all_files,
    check_files_here,
    commit,
    make_partial,
    remove_partial,
    remove_partials,
)
from zorselike.checkpoint.layout import slices_file
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.manifest import Manifest, TensorRecord
from zorselike.checkpoint.slices import Slice, SlicesWriter
from zorselike.errors import CheckpointError, ConfigError
from zorselike.plan.holdings import VALUE
from zorselike.runtime.comm.device_thread import DeviceThread
from zorselike.runtime.comm.ranks import ProcessGroup
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.ministage.named_state import NamedState, OptimizerFacts
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.state.dtypes import bytes_of, dtype_name
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.runtime.state.schedulers import merge_schedules
from zorselike.runtime.state.snapshot import Snapshot
from zorselike.text.wording import first_line
from zorselike.version import __version__

_LEADER = 0
_SHARED = ".leader"
"""Made in a partial folder by the leader: who sees it writes to the same disk."""

AfterCommit = Callable[[Path], None]


@dataclass(frozen=True)
class RunFacts:
    """What a run knows beside its tensors."""

    step: int
    rows_seen: int
    seed: int
    loss_scale: Mapping[str, float] | None = None
    schedule: Mapping[str, Any] | None = None
    """Of this rank's learning-rate schedulers."""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder
        self.path: Path | None = None
        """Of the checkpoint, once it is there."""
        self.error: str | None = None
        """Why there is none."""
        self.warnings: list[str] = []
        """What went wrong after it was there."""
        self.num_bytes = 0
        """That this rank has written."""
        self.seconds = 0.0
        self.finished = threading.Event()
        """Set when it has succeeded or failed, as far as this rank knows."""

    def wait(self) -> Path:
        """Waits until it is done, and returns the checkpoint's folder.

        Raises:
            CheckpointError: Something could not be written; there is no checkpoint of this step, and older
                ones are as they were.
        """
        self.finished.wait()
        if self.path is None:
            raise CheckpointError(self.error or "nothing was saved")
        return self.path


class Saver:
    """All saves of one pipeline, one at a time."""

    def __init__(self, state: PipelineState, memory: Memory, group: ProcessGroup) -> None:
        """`group`: a Gloo group of all ranks, of this object's thread alone."""
        self._state, self._memory, self._group = state, memory, group
        self._rank = state.ranks.rank
        self._thread = DeviceThread("checkpoints", memory.device)
        self._stream = memory.streams.make("checkpoints")
        self._leases: dict[Path, Lease] = {}
        self._newest: Save | None = None

    def claim(self, folder: Path) -> None:
        """Takes a folder's lease; collective, on the main thread.

        Raises:
            CheckpointError: On every rank alike.
        """
        box: list[str | None] = [None]
        if self._rank == _LEADER:
            try:
                self._hold(folder)
            except Exception as error:
                box[0] = self._describe(error)
        process = self._state.ranks.process_of[_LEADER]
        dist.broadcast_object_list(box, process, self._state.control, device=torch.device("cpu"))
        if box[0] is not None:
            raise CheckpointError(box[0])

    def is_idle(self) -> bool:
        """Whether every rank is done with the newest save; collective, on the main thread."""
        is_busy = self._newest is not None and not self._newest.finished.is_set()
        busy = torch.tensor(is_busy, dtype=torch.int32)
        dist.all_reduce(busy, dist.ReduceOp.MAX, group=self._state.control)
        return not busy.item()

    def start(
        self,
        folder: Path,
        facts: RunFacts,
        *,
        model_only: bool,
        stages: bool,
        after: AfterCommit | None,
        failure: ConfigError | None,
    ) -> Save:
        """Begins to save into an absolute path, or where there is a `failure`, to say so; collective. Without
        `stages`, and where the host has no room for copies, it returns when all is written, else when the
        next step may begin. `after` is called in the thread of each rank that completed a folder, with it."""
        save = Save(facts.step, folder)
        try:
            if failure is not None:
                raise failure
            snapshot = self._take(self._state.ministages, model_only=model_only, stages=stages)
        except ConfigError as error:
            snapshot = self._take({}, model_only=model_only, stages=stages)
            snapshot.failure = error
        if stages and not snapshot.is_staged:
            save.warnings.append("this host has no room for a copy of the state: training waits for the disk")
        self._newest = save
        self._thread.submit(lambda: self._save(save, snapshot, facts, model_only=model_only, after=after))
        if not snapshot.is_staged:
            save.finished.wait()
        return save

    def _take(self, states: Mapping[int, NamedState], *, model_only: bool, stages: bool) -> Snapshot:
        return Snapshot(states, self._memory, self._stream, model_only=model_only, stages=stages)

    def wait(self) -> None:
        """Until the newest save is done."""
        if self._newest is not None:
            self._newest.finished.wait()

    def close(self) -> None:
        """Waits for what is on its way."""
        self._thread.close()
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()

    # -- in the thread ---------------------------------------------------------------------

    def _save(
        self,
        save: Save,
        snapshot: Snapshot,
        facts: RunFacts,
        *,
        model_only: bool,
        after: AfterCommit | None,
    ) -> None:
        began = time.perf_counter()
        try:
            if snapshot.is_staged:
                snapshot.take()  # First: updates wait for it.
            self._write_all(save, snapshot, facts, model_only=model_only, after=after)
        except Exception as error:
            # A collective of this thread has failed: another rank has gone.
            save.error = f"saving step {save.step} was interrupted: {first_line(error)}"
        finally:
            snapshot.close()
            save.seconds = time.perf_counter() - began
            save.finished.set()

    def _write_all(
        self,
        save: Save,
        snapshot: Snapshot,
        facts: RunFacts,
        *,
        model_only: bool,
        after: AfterCommit | None,
    ) -> None:
        told = self._broadcast(self._open(save) if self._rank == _LEADER else None)
        if told["error"] is not None:
            save.error = told["error"]
            return
        report: dict[str, Any] = {"rank": self._rank, "error": None, "model_only": model_only}
        partial = save.folder / told["partial"]
        try:
            report |= self._write(partial, snapshot) | {"schedule": facts.schedule}
            save.num_bytes = sum(file.num_bytes for file in report["files"])
        except Exception as error:
            report["error"] = self._describe(error)
        reports = self._gather(report)
        verdict: dict[str, Any] = {}
        if self._rank == _LEADER:
            verdict = self._decide(partial, reports, facts, model_only=model_only)
        verdict = self._broadcast(verdict)
        save.error = verdict["error"]
        if save.error is None:
            save.path = save.folder / verdict["path"]
            self._complete(save, partial, verdict, after)
        else:
            remove_partial(partial)  # The leader's is gone already.

    def _hold(self, folder: Path) -> None:
        """As the leader: makes sure that nobody else saves there."""
        if folder not in self._leases:
            self._leases[folder] = Lease(folder)
            remove_partials(folder)
        self._leases[folder].check()

    def _open(self, save: Save) -> dict[str, Any]:
        """As the leader: the folder to write into."""
        try:
            self._hold(save.folder)
            partial = make_partial(save.folder, save.step)
            (partial / _SHARED).touch()
        except Exception as error:
            return {"error": self._describe(error), "partial": None}
        return {"error": None, "partial": partial.name}

    def _write(self, partial: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Writes this rank's files; returns what the manifest says of them."""
        is_shared = (partial / _SHARED).exists()
        partial.mkdir(parents=True, exist_ok=True)
        if not snapshot.is_staged:
            snapshot.take()
        if snapshot.failure is not None:
            raise snapshot.failure
        described = {
            part: [
                Slice(saved.box, dtype_name(saved.dtype), saved.shape)
                for i in snapshot.order
                for saved in snapshot.saved(i)
                if (saved.box.kind == VALUE) is (part == "model")
            ]
            for part in ("model", "optim")
        }
        with contextlib.ExitStack() as stack:
            writers = {
                part: SlicesWriter(partial, slices_file(part, self._rank), slices)  # type: ignore[arg-type]
                for part, slices in described.items()
                if slices
            }
            for writer in writers.values():
                stack.callback(writer.abort)
            for i in snapshot.order:
                for saved, content in zip(snapshot.saved(i), snapshot.read(i), strict=True):
                    writers["model" if saved.box.kind == VALUE else "optim"].write(bytes_of(content))
                snapshot.release(i)
            files = [writer.finish() for writer in writers.values()]
        identity = find_identity()
        return {
            "files": files,
            "node": identity.node,
            "shared": is_shared,
            "optimizer": [
                (facts.kind, facts.options, facts.numbers)
                for i in snapshot.order
                if self._state.is_first_of(i) and (facts := snapshot.optimizer_facts(i)) is not None
            ],
        }

    def _decide(
        self, partial: Path, reports: Sequence[Mapping[str, Any]], facts: RunFacts, *, model_only: bool
    ) -> dict[str, Any]:
        """As the leader: commits if all ranks have written, else says whose reason stands."""
        failed = [report for report in reports if report["error"] is not None]
        try:
            if len({report["model_only"] for report in reports}) > 1:
                raise CheckpointError("ranks passed different model_only to save; all must pass the same")
            if failed:
                raise CheckpointError(failed[0]["error"])
            manifest = self._make_manifest(reports, facts, model_only=model_only)
            self._leases[partial.parent].check()
            (partial / _SHARED).unlink()
            is_shared = all(report["shared"] for report in reports)
            path = commit(partial, manifest, check=check_all_files if is_shared else check_files_here)
        except Exception as error:
            remove_partial(partial)
            return {"error": str(error) if failed else self._describe(error)}
        foreign = {report["node"]: report["rank"] for report in reversed(reports) if not report["shared"]}
        text = manifest.to_text() if foreign else ""
        return {"error": None, "path": path.name, "manifest": text, "completing": list(foreign.values())}

    def _complete(
        self, save: Save, partial: Path, verdict: Mapping[str, Any], after: AfterCommit | None
    ) -> None:
        """What follows on every disk: the folder of a disk that the leader does not see, and `after`."""
        is_completing = self._rank in verdict["completing"]
        try:
            if is_completing:
                commit(partial, Manifest.from_text(verdict["manifest"]), check=check_files_here)
            if after is not None and (is_completing or self._rank == _LEADER):
                after(save.folder / verdict["path"])
        except Exception as error:
            save.warnings.append(self._describe(error))

    def _make_manifest(
        self, reports: Sequence[Mapping[str, Any]], facts: RunFacts, *, model_only: bool
    ) -> Manifest:
        inventory = self._state.inventory
        optimizers = [OptimizerFacts(*entry) for report in reports for entry in report["optimizer"]]
        return Manifest(
            step=facts.step,
            rows_seen=facts.rows_seen,
            seed=facts.seed,
            tensors={
                name: TensorRecord(
                    known.shape, dtype_name(known.dtype), dtype_name(known.model_dtype), known.trains
                )
                for name, known in inventory.all_tensors.items()
            },
            files=tuple(file for report in reports for file in report["files"]),
            aliases=dict(inventory.aliases),
            optimizer=None if model_only else describe_optimizers(optimizers),
            loss_scale=facts.loss_scale,
            schedule=merge_schedules([report["schedule"] for report in reports]),
            plan=self._state.plan.to_text(),
            extra=facts.extra,
            versions={
                "zorselike": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _describe(self, error: BaseException) -> str:
        """One line: what could not be done, where."""
        if isinstance(error, OSError) and error.filename is not None:
            return f"rank {self._rank} on {find_identity().node}: {error.filename}: {error.strerror}"
        return f"rank {self._rank} on {find_identity().node}: {first_line(error)}"

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        process = self._state.ranks.process_of[_LEADER]
        dist.broadcast_object_list(box, src=process, group=self._group, device=torch.device("cpu"))
        return box[0]

    def _gather(self, value: Any) -> list[Any]:
        """Of all ranks, in order, on the leader."""
        process = self._state.ranks.process_of[_LEADER]
        found: list[Any] | None = None
        if self._rank == _LEADER:
            found = [None] * self._state.ranks.world_size
        dist.gather_object(value, found, dst=process, group=self._group)
        return sorted(found or [], key=lambda report: report["rank"])


def describe_optimizers(optimizers: Sequence[OptimizerFacts]) -> dict[str, Any]:
    """What a manifest says of the optimizers of all ministages: equal options are there once."""
    options: list[Mapping[str, Any]] = []
    of: dict[str, int] = {}
    for facts in optimizers:
        for name, own in facts.options.items():
            if own not in options:
                options.append(own)
            of[name] = options.index(own)
    return {
        "class": optimizers[0].kind if optimizers else "",
        "options": options,
        "of": of,
        "numbers": {name: own for facts in optimizers for name, own in facts.numbers.items()},
    }


def read_optimizers(described: Mapping[str, Any]) -> OptimizerFacts:
    """The inverse, for all parameters."""
    options = described["options"]
    return OptimizerFacts(
        described["class"],
        {name: options[number] for name, number in described["of"].items()},
        described["numbers"],
    )
