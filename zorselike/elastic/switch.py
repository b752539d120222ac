"""A new pipeline takes its state from the memory of those who had the old one, whatever their plans.

By the engine that resumes from checkpoints: who has what and who wants what give the copies
(`plan.holdings`), and these are exchanged ministage by ministage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zorselike.elastic.contract import Json
from zorselike.elastic.held import Held, Origin, read_base, read_saved, write_saved
from zorselike.elastic.wire import Wire
from zorselike.errors import ClusterError
from zorselike.plan.holdings import VALUE, Box, copies
from zorselike.runtime.checkpoints import Stateful
from zorselike.runtime.ministage.named_state import OptimizerFacts
from zorselike.runtime.state.exchange import collect, find_uncovered, part_of
from zorselike.runtime.state.save import read_optimizers
from zorselike.runtime.state.schedulers import merge_schedules
from zorselike.text.wording import list_few


@dataclass(frozen=True)
class Arrived:
    """What a pipeline has been filled with, beside its tensors."""

    step: int
    extra: Mapping[str, Any]
    num_calls: int
    """Of schedulers, after that step, which their state has in it."""


@dataclass(frozen=True)
class _Told:
    """What all who give have said."""

    step: int
    boxes: Mapping[int, Sequence[Box]]
    """By giver."""
    dtypes: Mapping[tuple[str, str], torch.dtype]
    """By name and kind."""
    facts: Sequence[Json]

    @classmethod
    def of(cls, said: Sequence[Json]) -> _Told:
        saved = {
            giver: [one for entry in own["held"] for one in read_saved(entry["saved"])]
            for giver, own in enumerate(said)
        }
        entries = [entry for own in said for entry in own["held"]]
        return cls(
            step=Origin(*entries[0]["origin"]).step if entries else 0,
            boxes={giver: [one.box for one in own] for giver, own in saved.items()},
            dtypes={(one.box.name, one.box.kind): one.dtype for own in saved.values() for one in own},
            facts=[entry["facts"] for entry in entries],
        )

    def kinds(self) -> dict[str, list[str]]:
        """Those that there are of each tensor, its values first."""
        found: dict[str, list[str]] = {}
        for name, kind in sorted(self.dtypes, key=lambda key: (key[1] != VALUE, key)):
            found.setdefault(name, []).append(kind)
        return found

    def optimizers(self) -> OptimizerFacts:
        """Of all parameters."""
        found = [read_optimizers(facts["optimizers"]) for facts in self.facts]
        return OptimizerFacts(
            next((own.kind for own in found if own.kind), ""),
            {name: options for own in found for name, options in own.options.items()},
            {name: numbers for own in found for name, numbers in own.numbers.items()},
        )

    def renamed(self, names: Mapping[str, str]) -> _Told:
        """The same with other names of tensors."""

        def rename(table: Mapping[str, Any]) -> dict[str, Any]:
            return {names.get(name, name): value for name, value in table.items()}

        def rename_facts(facts: Json) -> Json:
            optimizers, schedule = facts["optimizers"], facts["schedule"]
            parts = {key: rename(optimizers[key]) for key in ("of", "numbers")}
            if schedule is not None:
                schedule = {**schedule, "of": rename(schedule["of"])}
            return {**facts, "optimizers": {**optimizers, **parts}, "schedule": schedule}

        return replace(
            self,
            boxes={
                giver: [replace(box, name=names.get(box.name, box.name)) for box in own]
                for giver, own in self.boxes.items()
            },
            dtypes={(names.get(name, name), kind): dtype for (name, kind), dtype in self.dtypes.items()},
            facts=list(map(rename_facts, self.facts)),
        )


def fill(pipe: Stateful | None, held: Sequence[Held], wire: Wire) -> Arrived:
    """Gives what this member holds to whom it belongs now, and fills the pipeline, if it has one; collective.

    Raises:
        ClusterError: Nobody holds something that this member wants. Others then wait for it.
    """
    said = wire.gather({"held": list(map(_tell, held)), "names": _list_names(pipe)})
    told = _under_new_names(_Told.of(said), said[0]["names"])
    kinds = told.kinds()
    optimizers = told.optimizers()
    own_wants = _list_wanted(pipe, kinds)
    wanted = [_read_wanted(own) for own in wire.gather(_write_wanted(own_wants))]
    num_ministages = max((1 + max(own, default=-1) for own in wanted), default=0)
    due = [
        list(copies(told.boxes, {member: own.get(i, []) for member, own in enumerate(wanted)}))
        for i in range(num_ministages)
    ]
    for i, boxes in own_wants.items():
        missing = find_uncovered(due[i], boxes, wire.rank)
        if missing:
            raise ClusterError(f"nobody holds {list_few([box.name for box in missing])} any more")
    read = _read_held(held, told.boxes[wire.rank])
    for i, copied in enumerate(due):
        found = collect(
            copied,
            own_wants.get(i, ()),
            wire,
            read=read,
            dtype_of=lambda box: told.dtypes[box.name, box.kind],
        )
        if pipe is not None and i in pipe.assembly.state.ministages:
            named = pipe.assembly.state.ministages[i]
            named.fill(found.__getitem__, lambda name: kinds.get(name, (VALUE,)), optimizers)
    return _take_over(pipe, told, optimizers)


def _tell(held: Held) -> Json:
    saved = [one for own in held.saved for one in own]
    return {"origin": list(held.origin), "saved": write_saved(saved), "facts": held.facts}


def _list_names(pipe: Stateful | None) -> list[str]:
    return [] if pipe is None else list(pipe.assembly.state.inventory.all_tensors)


def _under_new_names(told: _Told, names: Sequence[str]) -> _Told:
    """Which of its names a tied weight is known by depends on the plan."""
    here, there = set(names), {name for name, _ in told.dtypes}
    aliases = {alias: own for facts in told.facts for alias, own in facts["aliases"].items()}
    missing = {name: aliases.get(name) for name in names if name not in there}
    return told.renamed({old: new for new, old in missing.items() if old and old not in here})


def _list_wanted(pipe: Stateful | None, kinds: Mapping[str, Sequence[str]]) -> dict[int, list[Box]]:
    """By ministage."""
    if pipe is None:
        return {}
    state = pipe.assembly.state
    return {
        i: state.inventory.wanted(state.plan, i, kinds, process_of=state.ranks.process_of)[state.ranks.rank]
        for i in state.ministages
    }


def _write_wanted(wanted: Mapping[int, Sequence[Box]]) -> Json:
    return {
        str(i): [[box.name, box.kind, list(box.starts), list(box.stops)] for box in boxes]
        for i, boxes in wanted.items()
    }


def _read_wanted(said: Json) -> dict[int, list[Box]]:
    return {
        int(i): [Box(name, kind, tuple(starts), tuple(stops)) for name, kind, starts, stops in boxes]
        for i, boxes in said.items()
    }


def _read_held(held: Sequence[Held], boxes: Sequence[Box]) -> Callable[[Box], Tensor]:
    """Gives the part of what this member holds; `boxes`: that, by its new names."""
    of_tensor: dict[tuple[str, str], list[tuple[Box, Tensor]]] = {}
    tensors = [values for own in held for _, values in own.tensors()]
    for box, values in zip(boxes, tensors, strict=True):
        of_tensor.setdefault((box.name, box.kind), []).append((box, values))

    def read(part: Box) -> Tensor:
        for box, values in of_tensor[part.name, part.kind]:
            if box.intersect(part) == part:
                return part_of(part, box, values)
        raise AssertionError(f"{part} is to come from where it is not")

    return read


def _take_over(pipe: Stateful | None, told: _Told, optimizers: OptimizerFacts) -> Arrived:
    facts = told.facts[0]
    if pipe is not None:
        state = pipe.assembly.state
        for named in state.ministages.values():
            named.fill_options(optimizers)
        state.base = read_base(facts["base"])
        pipe.checkpoints.take_over(
            step=told.step,
            rows_seen=facts["rows_seen"],
            loss_scale=facts["loss_scale"],
            schedule=merge_schedules([own["schedule"] for own in told.facts]),
        )
    return Arrived(told.step, facts["extra"], facts["num_calls"])
