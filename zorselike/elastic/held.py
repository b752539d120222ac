"""The state of one rank after one step, whole, in the host memory of some process: its own or a mirror."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import Tensor

from zorselike.checkpoint.manifest import Base
from zorselike.elastic.contract import Json
from zorselike.plan.holdings import Box
from zorselike.runtime.checkpoints import Checkpoints
from zorselike.runtime.state.dtypes import dtype_name, named_dtype
from zorselike.runtime.state.pipeline_state import PipelineState
from zorselike.runtime.state.snapshot import Saved, lay_out


class Origin(NamedTuple):
    """Whose state, and of when."""

    generation: int
    step: int
    rank: int
    """In that generation's plan,"""
    num_ranks: int
    """which has so many."""


@dataclass(frozen=True)
class Held:
    """What a rank answers for, and what is known beside it."""

    origin: Origin
    saved: Sequence[Sequence[Saved]]
    """Of each of its ministages, in the order of `buffers`; of frozen ones and others apart."""
    buffers: Sequence[Tensor]
    facts: Json

    def tensors(self) -> Iterator[tuple[Saved, Tensor]]:
        """Its boxes and what they hold."""
        for saved, buffer in zip(self.saved, self.buffers, strict=True):
            yield from zip(saved, lay_out(saved, buffer), strict=True)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def collect_facts(state: PipelineState, checkpoints: Checkpoints, extra: Json, num_calls: int) -> Json:
    """What a rank knows beside its tensors, between two steps, but for what its optimizers have counted."""
    run = checkpoints.facts(extra)
    return {
        "rows_seen": run.rows_seen,
        "loss_scale": run.loss_scale,
        "schedule": run.schedule,
        "num_calls": num_calls,
        "extra": run.extra,
        "aliases": dict(state.inventory.aliases),
        "base": None if state.base is None else asdict(state.base),
    }


def write_saved(saved: Sequence[Saved]) -> list[Json]:
    """As JSON; `read_saved` is the inverse."""
    return [
        {
            "name": one.box.name,
            "kind": one.box.kind,
            "starts": list(one.box.starts),
            "stops": list(one.box.stops),
            "shape": list(one.shape),
            "dtype": dtype_name(one.dtype),
        }
        for one in saved
    ]


def read_saved(described: Sequence[Mapping[str, object]]) -> list[Saved]:
    """The inverse of `write_saved`."""
    return [
        Saved(
            Box(entry["name"], entry["kind"], tuple(entry["starts"]), tuple(entry["stops"])),  # type: ignore
            tuple(entry["shape"]),  # type: ignore[arg-type]
            named_dtype(entry["dtype"]),  # type: ignore[arg-type]
        )
        for entry in described
    ]


def read_base(described: object) -> Base | None:
    """The folder beside whose weights something trains, as `collect_facts` gives it."""
    return None if described is None else Base.from_table(described)
