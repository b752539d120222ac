"""Saves a pipeline's state, beside the steps that follow: no rank has all of it, and no disk need be shared.

A thread a rank copies what its rank answers for, writes it into a folder that nothing reads, and tells the
leader (rank 0) what it has written. The leader writes the manifest and renames the folder: until then there
is no checkpoint, from then on there is one. Where a node does not see the leader's folder, its ranks write
into one of the same name on their own disk, which the first of them completes.
"""

from __future__ import annotations

import contextlib
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from zorselike.checkpoint.folder import (
    Check,
    check_all_files,
    check_files_here,
    commit,
    make_partial,
    remove_partial,
    remove_partials,
    remove_step,
)
from zorselike.checkpoint.layout import slices_file, step_folder
from zorselike.checkpoint.lease import Lease
from zorselike.checkpoint.manifest import Manifest, TensorRecord
from zorselike.checkpoint.slices import Slice, SlicesWriter
from zorselike.errors import CheckpointError, ConfigError
from zorselike.plan.holdings import VALUE, Box
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
    model_only: bool = False
    """Whether the optimizer's state is left out."""


class Save:
    """A checkpoint on its way to the disk."""

    def __init__(self, step: int, folder: Path, after: AfterCommit | None = None) -> None:
        self.step, self.folder, self.after = step, folder, after
        self.path: Path | None = None
        """Of the checkpoint, once it is there."""
        self.error: str | None = None
        """Why there is none."""
        self.is_interrupted = False
        """Whether another rank was lost in it: it may be there all the same."""
        self.warnings: list[str] = []
        """What went wrong after it was there."""
        self.num_bytes = 0
        """That this rank has written."""
        self.seconds = 0.0
        self.finished = threading.Event()
        """Set when it has succeeded or failed, as far as this rank knows."""

    @classmethod
    def made(cls, path: Path, step: int) -> Save:
        """One that is there already."""
        save = cls(step, path.parent)
        save.path = path
        save.finished.set()
        return save

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

    def __init__(self, state: PipelineState, memory: Memory, group: ProcessGroup, *, job: str = "") -> None:
        """`group`: a Gloo group of all ranks, of this object's thread alone; `job`: whose leases are made, if
        it has a name."""
        self._state, self._memory, self._group, self._job = state, memory, group, job
        self._rank = state.ranks.rank
        self._thread = DeviceThread("checkpoints", memory.device)
        self._stream = memory.streams.make("checkpoints")
        self._leases: dict[Path, Lease] = {}
        self._newest: Save | None = None

    def claim(self, folder: Path, *, job: str = "") -> None:
        """Takes a folder's lease, as that of a `job` if it has a name; collective, on the main thread.

        Raises:
            CheckpointError: On every rank alike.
        """
        box: list[str | None] = [None]
        if self._rank == _LEADER:
            try:
                self._hold(folder, job=job)
            except Exception as error:
                box[0] = self._describe(error)
        process = self._state.ranks.process_of[_LEADER]
        dist.broadcast_object_list(box, process, self._state.control, device=torch.device("cpu"))
        if box[0] is not None:
            raise CheckpointError(box[0])

    def is_idle(self) -> bool:
        """Whether every rank is done with the newest save; collective, on the main thread."""
        is_busy = self._newest is not None and not self._newest.finished.is_set()
        busy = torch.tensor(is_busy, dtype=torch.int32, device="cpu")
        dist.all_reduce(busy, dist.ReduceOp.MAX, group=self._state.control)
        return not busy.item()

    def start(
        self,
        folder: Path,
        facts: RunFacts,
        *,
        stages: bool,
        after: AfterCommit | None,
        failure: CheckpointError | ConfigError | None,
        note: Callable[[Save], None] | None = None,
    ) -> Save:
        """Begins to save into an absolute path, or where there is a `failure`, to say so; collective. Without
        `stages`, and where the host has no room for copies, it returns when all is written, else when the
        next step may begin. `after` is called in the thread of each rank that completed a folder, with it;
        `note` before anything is done."""
        save = Save(facts.step, folder, after)
        if note is not None:
            note(save)
        try:
            if failure is not None:
                raise failure
            snapshot = self._take(self._state.ministages, model_only=facts.model_only, stages=stages)
        except (CheckpointError, ConfigError) as error:
            snapshot = self._take({}, model_only=facts.model_only, stages=stages)
            snapshot.failure = error
        if stages and not snapshot.is_staged:
            save.warnings.append("this host has no room for a copy of the state: training waits for the disk")
        self._newest = save
        self._thread.submit(lambda: self._save(save, snapshot, facts))
        if not snapshot.is_staged:
            save.finished.wait()
        return save

    def _take(self, states: Mapping[int, NamedState], *, model_only: bool, stages: bool) -> Snapshot:
        return Snapshot(
            states,
            self._memory,
            self._stream,
            model_only=model_only,
            stages=stages,
            left_out=self._state.left_out,
        )

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

    def abandon(self) -> None:
        """Gives up what is on its way: other ranks may be gone."""
        self._thread.abandon()
        if self._newest is not None and not self._newest.finished.is_set():
            self._newest.error = f"saving step {self._newest.step} was interrupted: another rank is gone"
            self._newest.is_interrupted = True
            self._newest.finished.set()
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()

    # -- in the thread ---------------------------------------------------------------------

    def _save(self, save: Save, snapshot: Snapshot, facts: RunFacts) -> None:
        began = time.perf_counter()
        try:
            if snapshot.is_staged:
                snapshot.take()  # First: updates wait for it.
            self._write_all(save, snapshot, facts)
        except Exception as error:
            # A collective of this thread has failed: another rank has gone.
            save.error = f"saving step {save.step} was interrupted: {first_line(error)}"
            save.is_interrupted = True
        finally:
            snapshot.close()
            save.seconds = time.perf_counter() - began
            save.finished.set()

    def _write_all(self, save: Save, snapshot: Snapshot, facts: RunFacts) -> None:
        told = self._broadcast(self._open(save) if self._rank == _LEADER else None)
        if told["error"] is not None:
            save.error = told["error"]
            return
        partial = save.folder / told["partial"]
        report = self._report(partial, snapshot, facts)
        save.num_bytes = sum(file.num_bytes for file in report["files"])
        reports = self._gather(report)
        manifest, verdict = self._prepare(reports, facts) if self._rank == _LEADER else (None, None)
        verdict = self._broadcast(verdict)
        is_completing = self._rank in verdict["completing"]
        if is_completing and manifest is None:
            manifest = Manifest.from_text(verdict["text"])
        save.error = verdict["error"] or self._commit_everywhere(
            partial, manifest, check=check_files_here if verdict["text"] else check_all_files
        )
        if save.error is not None:
            remove_partial(partial)
            return
        save.path = save.folder / step_folder(save.step)
        if save.after is not None and is_completing:
            try:
                save.after(save.path)
            except Exception as error:
                save.warnings.append(self._describe(error))

    def _hold(self, folder: Path, *, job: str = "") -> bool:
        """As the leader: makes sure that nobody else saves there; whether what said so was deleted."""
        if folder not in self._leases:
            self._leases[folder] = Lease(folder, job=job or self._job)
            remove_partials(folder)
        return self._leases[folder].keep()

    def _open(self, save: Save) -> dict[str, Any]:
        """As the leader: the folder to write into."""
        try:
            if self._hold(save.folder):
                save.warnings.append("lease.json was deleted from this folder, or all of it; it is made anew")
            partial = make_partial(save.folder, save.step)
            (partial / _SHARED).touch()
        except Exception as error:
            return {"error": self._describe(error), "partial": None}
        return {"error": None, "partial": partial.name}

    def _report(self, partial: Path, snapshot: Snapshot, facts: RunFacts) -> dict[str, Any]:
        """Writes this rank's files; returns what the leader is told."""
        report: dict[str, Any] = {
            "rank": self._rank,
            "error": None,
            "files": [],
            "model_only": facts.model_only,
            # Who gives nothing leaves it to the others.
            "extra": json.dumps(facts.extra, sort_keys=True) if facts.extra else None,
            "schedule": facts.schedule,
        }
        try:
            report |= self._write(partial, snapshot)
        except Exception as error:
            report["error"] = self._describe(error)
        return report

    def _write(self, partial: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Writes this rank's files; returns what the manifest says of them."""
        is_shared = (partial / _SHARED).exists()
        partial.mkdir(parents=True, exist_ok=True)
        if not snapshot.is_staged:
            snapshot.take()
        if snapshot.failure is not None:
            raise snapshot.failure
        described: dict[str, list[Slice]] = {}
        file_of: dict[Box, str] = {}
        num_slices: Counter[tuple[str, str]] = Counter()
        for saved in (one for i in snapshot.order for one in snapshot.saved(i)):
            box = saved.box
            part: Literal["model", "optim"] = "model" if box.kind == VALUE else "optim"
            file_of[box] = slices_file(part, self._rank, num_slices[box.name, box.kind])
            num_slices[box.name, box.kind] += 1
            described.setdefault(file_of[box], []).append(Slice(box, dtype_name(saved.dtype), saved.shape))
        with contextlib.ExitStack() as stack:
            writers = {file: SlicesWriter(partial, file, described[file]) for file in sorted(described)}
            for writer in writers.values():
                stack.callback(writer.abort)
            for i in snapshot.order:
                for saved, content in zip(snapshot.saved(i), snapshot.read(i), strict=True):
                    writers[file_of[saved.box]].write(bytes_of(content))
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

    def _prepare(
        self, reports: Sequence[Mapping[str, Any]], facts: RunFacts
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """As the leader: the manifest, unless a rank has failed; and what all ranks are told: whose reason
        stands, which of them commit, and the manifest's text for those that do not have it."""
        failed = [report for report in reports if report["error"] is not None]
        try:
            for name in ("model_only", "extra"):
                if len({report[name] for report in reports} - {None}) > 1:
                    raise CheckpointError(f"ranks passed different {name} to save; all must pass the same")
            if failed:
                raise CheckpointError(failed[0]["error"])
            manifest = self._make_manifest(reports, facts)
            foreign = {report["node"]: report["rank"] for report in reversed(reports) if not report["shared"]}
            text = manifest.to_text() if foreign else ""
        except Exception as error:
            return None, {"error": str(error) if failed else self._describe(error), "completing": []}
        return manifest, {"error": None, "completing": [_LEADER, *foreign.values()], "text": text}

    def _commit_everywhere(self, partial: Path, manifest: Manifest | None, *, check: Check) -> str | None:
        """Makes it a checkpoint on every disk or on none, the leader's last; why not. `manifest`: of a rank
        that does this for its disk."""
        own = None
        if manifest is not None and self._rank != _LEADER:
            own = self._commit(partial, manifest, check)
        errors = [error for error in self._gather(own) if error is not None]
        if manifest is not None and self._rank == _LEADER:
            own = errors[0] if errors else self._commit(partial, manifest, check)
        error: str | None = self._broadcast(own)
        if error is not None and own is None and manifest is not None:
            remove_step(partial.parent / step_folder(manifest.step))
        return error

    def _commit(self, partial: Path, manifest: Manifest, check: Check) -> str | None:
        """Here; why not."""
        try:
            if self._rank == _LEADER:
                self._leases[partial.parent].check()
                (partial / _SHARED).unlink()
            commit(partial, manifest, check=check)
        except Exception as error:
            return self._describe(error)
        return None

    def _make_manifest(self, reports: Sequence[Mapping[str, Any]], facts: RunFacts) -> Manifest:
        inventory, left_out = self._state.inventory, self._state.left_out
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
                if name not in left_out
            },
            files=tuple(file for report in reports for file in report["files"]),
            aliases={alias: name for alias, name in inventory.aliases.items() if name not in left_out},
            optimizer=None if facts.model_only else describe_optimizers(optimizers),
            loss_scale=facts.loss_scale,
            schedule=merge_schedules([report["schedule"] for report in reports]),
            plan=self._state.plan.to_text(),
            extra=next((json.loads(own) for report in reports if (own := report["extra"])), {}),
            versions={
                "zorselike": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            base=self._state.base,
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
        """Of all ranks, in order, on the leader, [] elsewhere."""
        process = self._state.ranks.process_of[_LEADER]
        found: list[Any] | None = None
        if self._rank == _LEADER:
            found = [None] * self._state.ranks.world_size
        dist.gather_object((self._rank, value), found, dst=process, group=self._group)
        return [own for _, own in sorted(found or [], key=lambda entry: entry[0])]


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
