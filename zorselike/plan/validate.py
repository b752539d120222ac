"""Proof that a plan is consistent, with itself and with a model's modules.

Every failure is a `PlanError` that names the group, rank or module and the mend. Places are
written as in the file: `groups[1].zero`, `ministages[0].modules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from zorselike.errors import FileError, PlanError
from zorselike.plan.parts import OFFLOAD_IN_FLIGHT, Device, Group, Ministage
from zorselike.text.dataclass_tables import check_dataclass
from zorselike.text.wording import list_few, show_rows, suggest

if TYPE_CHECKING:
    from zorselike.plan.plan import Plan


def validate_plan(plan: Plan) -> None:
    """Raises `PlanError` unless the plan is consistent in itself.

    Then every row of the global batch is computed exactly once by each group, ranks are
    0, 1, ... each in one group, every group owns a ministage, and no module is planned twice.
    A group's tensor-parallel degrees divide its largest one, and a replica's devices are alike, in one node.
    """
    try:
        check_dataclass(plan)
    except FileError as error:
        raise PlanError(str(error)) from None
    for g, group in enumerate(plan.groups):
        _validate_settings(f"groups[{g}]", group)
    _validate_ranks(plan.groups)
    _validate_replicas(plan)
    for g, group in enumerate(plan.groups):
        _validate_microbatches(f"groups[{g}]", group)
        _validate_rows(f"group {g}", group, plan.global_batch)
    _validate_ministages(plan.ministages, num_groups=len(plan.groups))
    _validate_in_flight(plan)
    _validate_devices(plan.devices, plan.num_ranks)
    peaks = plan.estimates.peak_memory_bytes
    if peaks and len(peaks) != plan.num_ranks:
        raise PlanError(
            f"estimates.peak_memory_bytes has {len(peaks)} numbers; give one for each of the "
            f"{plan.num_ranks} ranks, or none"
        )


def validate_modules(plan: Plan, names: Sequence[str], owners: Sequence[str]) -> None:
    """Raises `PlanError` unless the plan's modules are those of a model, in its order.

    Args:
        plan: a valid plan.
        names: all module names of the model, in model order, as `named_modules()` gives them
            for a model that registers its parts in the order in which they run.
        owners: those of `names`, in the same order, that own parameters themselves, not
            through a submodule. Each must be in the plan, or below a module in the plan.

    Raises:
        PlanError: A module that the model lacks (names the nearest), modules out of order, or
            parameters that no ministage holds.
    """
    position = {name: i for i, name in enumerate(names)}
    planned = [(s, name) for s, ministage in enumerate(plan.ministages) for name in ministage.modules]
    for s, name in planned:
        if name not in position:
            raise PlanError(
                f"ministages[{s}].modules: the model has no module {name!r}"
                f"{_suggest_module(name, names) or f'; it has {list_few(names)}'}"
            )
    for (_, before), (s, name) in pairwise(planned):
        if position[name] < position[before]:
            raise PlanError(
                f"ministages[{s}].modules: {name!r} comes after {before!r} in the plan and before it in the "
                "model; modules must be in model order, within a ministage and from one to the next"
            )

    covered = {name for _, name in planned}
    missing = [
        owner for owner in owners if not any(prefix in covered for prefix in (owner, *_parents(owner)))
    ]
    if "" in missing:
        raise PlanError(
            "the model itself owns parameters, outside any module, so no ministage can hold them; "
            "move them into a submodule and name that in the plan"
        )
    if missing:
        # A forgotten layer is one name, not those of all its linears.
        split = {parent for _, name in planned for parent in _parents(name)}
        forgotten = list(
            dict.fromkeys(
                next(name for name in (*_parents(owner), owner) if name not in split) for owner in missing
            )
        )
        earlier = [(s, name) for s, name in planned if position[name] < position[missing[0]]]
        s, place = (earlier[-1][0], f"after {earlier[-1][1]!r}") if earlier else (0, "first")
        owning = "which owns parameters" if len(forgotten) == 1 else "which own parameters"
        raise PlanError(
            f"no ministage has {list_few(map(repr, forgotten), 'module')}, {owning} of the model; "
            f"add {forgotten[0]!r} to ministages[{s}].modules, {place}, or to the next ministage"
        )


def validate_degrees(plan: Plan, num_units: Mapping[str, int]) -> None:
    """Raises `PlanError` unless the plan's tensor-parallel degrees fit a model's weights.

    Args:
        plan: a valid plan.
        num_units: of each module that tensor parallelism cuts, by its name, into how many pieces at most: as
            many as the weight of it with the fewest units has (whole heads of keys and values, features of
            the feed-forward). Others are not cut and allow any degree.
    """
    for s, ministage in enumerate(plan.ministages):
        group = plan.groups[ministage.group]
        if group.degree == 1:
            continue
        for name in ministage.modules:
            inside = {
                cut: units
                for cut, units in num_units.items()
                if cut == name or cut.startswith(f"{name}.") or name.startswith(f"{cut}.")
            }
            cut = min(inside, key=lambda cut: inside[cut], default=None)
            if cut is not None and inside[cut] < group.degree:
                raise PlanError(
                    f"groups[{ministage.group}].ranks has a replica of {group.degree} ranks, and {cut!r} of "
                    f"ministages[{s}] can be cut into {inside[cut]} at most (whole heads of keys and values, "
                    f"features of the feed-forward): let no replica have more than {inside[cut]} ranks"
                )


def _suggest_module(name: str, names: Sequence[str]) -> str:
    """`; did you mean 'transformer.h.0'?` for `h.0` and for `layers.0`; nothing if no module is near."""
    number = name.rpartition(".")[2]
    alike = [known for known in names if known.endswith(f".{name}")]
    if not alike and number.isdigit():
        numbered = [known for known in names if known.rpartition(".")[2] == number]
        depth = min((known.count(".") for known in numbered), default=0)
        alike = [known for known in numbered if known.count(".") == depth]
    return f"; did you mean {alike[0]!r}?" if len(alike) == 1 else suggest(name, names)


def _validate_settings(where: str, group: Group) -> None:
    if group.grad_reduce == "microbatch" and group.zero < 2:
        raise PlanError(
            f"{where}.grad_reduce is 'microbatch' with zero = {group.zero}, which keeps whole gradients "
            'until the end; use grad_reduce = "once", or zero = 2 or 3'
        )
    for i, kind in enumerate(group.offload):
        if kind in group.offload[:i]:
            raise PlanError(f"{where}.offload names {kind!r} twice; name it once")


def _validate_ranks(groups: Sequence[Group]) -> None:
    """Ranks are 0, 1, ... each in one group."""
    group_of: dict[int, int] = {}
    for g, group in enumerate(groups):
        for rank in group.flat_ranks:
            if rank in group_of:
                other = group_of[rank]
                place = f"twice in group {g}" if other == g else f"in group {other} and in group {g}"
                raise PlanError(f"rank {rank} is {place}; a rank belongs to one group, once")
            group_of[rank] = g
    num_ranks = len(group_of)
    outside = sorted(rank for rank in group_of if rank >= num_ranks)
    if outside:
        missing = [rank for rank in range(num_ranks) if rank not in group_of]
        raise PlanError(
            f"the plan has {num_ranks} ranks, so they must be 0 to {num_ranks - 1}, but "
            f"rank {outside[0]} is in group {group_of[outside[0]]} and {list_few(missing, 'rank')} "
            "in none; number the ranks without gaps"
        )


def _validate_replicas(plan: Plan) -> None:
    """What tensor-parallel replicas must be like; single ranks may be anything."""
    for g, group in enumerate(plan.groups):
        for i, replica in enumerate(group.replicas):
            if group.degree % replica.degree:
                fitting = [degree for degree in range(1, group.degree + 1) if group.degree % degree == 0]
                raise PlanError(
                    f"groups[{g}].ranks[{i}] is a replica of {replica.degree} ranks beside one of "
                    f"{group.degree}, which has the pieces that weights are cut into; give every replica "
                    f"{' or '.join(map(str, fitting))} ranks"
                )
    if not plan.has_replicas:
        return
    most, g = max((group.degree, -g) for g, group in enumerate(plan.groups))
    if plan.sequence_length is None:
        raise PlanError(
            f"groups[{-g}].ranks holds a tensor-parallel replica, whose ranks share the positions of a row, "
            "and the plan has no sequence_length; give it the number of tokens of a row"
        )
    if plan.sequence_length < most:
        raise PlanError(
            f"sequence_length is {plan.sequence_length}, and groups[{-g}].ranks holds a replica of {most} "
            "ranks, each of which needs a position; give longer rows or smaller replicas"
        )
    check_replicas(plan, {device.rank: (device.node, device.type) for device in plan.devices})


def check_replicas(plan: Plan, device_of: Mapping[int, tuple[str, str]]) -> None:
    """Raises `PlanError` unless the devices of each replica, `(node, type)` by rank as far as they are known,
    are alike and in one node: its ranks meet four times a layer, and each waits for the slowest. A type may
    be unknown."""
    for g, group in enumerate(plan.groups):
        for i, replica in enumerate(group.replicas):
            devices = [(rank, *device_of[rank]) for rank in replica.ranks if rank in device_of]
            _check_alike(f"groups[{g}].ranks[{i}]", devices)


def _check_alike(where: str, devices: Sequence[tuple[int, str, str]]) -> None:
    for (rank, node, _), (other, its_node, _) in pairwise(devices):
        if node != its_node:
            raise PlanError(
                f"{where} is a tensor-parallel replica across nodes: rank {rank} is on {node!r} and rank "
                f"{other} on {its_node!r}; keep a replica inside a node, and let replicas of a group be on "
                "different ones"
            )
    for (rank, _, type_), (other, _, its_type) in pairwise(device for device in devices if device[2]):
        if type_.casefold() != its_type.casefold():
            raise PlanError(
                f"{where} is a tensor-parallel replica of unlike devices: rank {rank} is {type_!r} and rank "
                f"{other} {its_type!r}; a replica shares its work evenly, so give it devices of one type"
            )


def _validate_microbatches(where: str, group: Group) -> None:
    # A replica's microbatches are computed by all of its ranks and booked under its first.
    ranks = set(group.flat_ranks)
    for i, microbatch in enumerate(group.microbatches):
        place = f"{where}.microbatches[{i}]"
        if microbatch.rank not in ranks:
            raise PlanError(
                f"{place} is for rank {microbatch.rank}, which is not in the group; "
                f"its {list_few(sorted(ranks), 'rank')}"
            )
        first = group.replica_of(microbatch.rank).first
        if microbatch.rank != first:
            raise PlanError(
                f"{place} is for rank {microbatch.rank}, inside a replica; name the replica's first, {first}"
            )
        if microbatch.start >= microbatch.stop:
            raise PlanError(
                f"{place} of rank {microbatch.rank} has no rows ({microbatch.start} to {microbatch.stop}); "
                "leave it out, or let stop be larger than start"
            )


def _validate_rows(name: str, group: Group, global_batch: int) -> None:
    """Every row of the global batch is in exactly one microbatch of the group."""
    missing: list[tuple[int, int]] = []
    doubled: list[str] = []
    reach, last = 0, -1
    for microbatch in sorted(group.microbatches, key=lambda m: (m.start, m.stop)):
        if microbatch.stop > global_batch:
            raise PlanError(
                f"{name}: rank {microbatch.rank} has "
                f"{show_rows(max(microbatch.start, global_batch), microbatch.stop)}, but the last of "
                f"global_batch = {global_batch} is row {global_batch - 1}; end its microbatch there"
            )
        if microbatch.start > reach:
            missing.append((reach, microbatch.start))
        elif microbatch.start < reach:
            ranks = f"rank {last} twice" if last == microbatch.rank else f"ranks {last} and {microbatch.rank}"
            doubled.append(f"{show_rows(microbatch.start, min(reach, microbatch.stop))} by {ranks}")
        if microbatch.stop > reach:
            reach, last = microbatch.stop, microbatch.rank
    if reach < global_batch:
        missing.append((reach, global_batch))
    wrong = []
    if missing:
        wrong.append(f"no rank computes {list_few(show_rows(*interval) for interval in missing)}")
    if doubled:
        wrong.append(f"computed more than once: {list_few(doubled)}")
    if wrong:
        raise PlanError(
            f"{name}: {'; '.join(wrong)}; every row must be in exactly one microbatch of each group"
        )


def _validate_ministages(ministages: Sequence[Ministage], *, num_groups: int) -> None:
    holder: dict[str, int] = {}
    for s, ministage in enumerate(ministages):
        where = f"ministages[{s}]"
        if ministage.group >= num_groups:
            raise PlanError(f"{where}.group is {ministage.group}; the plan has groups 0 to {num_groups - 1}")
        for i, name in enumerate(ministage.modules):
            if not all(name.split(".")):
                raise PlanError(f"{where}.modules[{i}] is {name!r}; give a dotted name such as 'layers.0'")
            if name in holder:
                other = holder[name]
                place = f"twice in ministage {s}" if other == s else f"in ministages {other} and {s}"
                raise PlanError(f"module {name!r} is {place}; a module belongs to one ministage, once")
            holder[name] = s
    for name, s in holder.items():
        for parent in _parents(name):
            if parent in holder:
                raise PlanError(
                    f"module {name!r} in ministage {s} is part of {parent!r} in ministage {holder[parent]}; "
                    "name the whole or its parts"
                )
    owners = {ministage.group for ministage in ministages}
    for g in range(num_groups):
        if g not in owners:
            raise PlanError(f"group {g} owns no ministage; give it one or remove the group")


def _validate_in_flight(plan: Plan) -> None:
    """What all groups must be like for the order that bounds microbatches in flight."""
    if not plan.bounds_in_flight:
        return
    bounds = [group.max_in_flight for group in plan.groups]
    first = next(g for g, bound in enumerate(bounds) if bound is not None)
    why = f"groups[{first}].max_in_flight is {bounds[first]}"
    for g, group in enumerate(plan.groups):
        owned = plan.ministages_of_group(g)
        if len(owned) > 1 and group.zero == 2 and not group.reduces_per_microbatch:
            raise PlanError(
                f"{why}, but group {g} owns {list_few(owned, 'ministage')} and returns to each again and "
                'again, which zero = 2 with grad_reduce = "once" is not for: set zero = 1 or 3, or '
                'grad_reduce = "microbatch", or remove max_in_flight'
            )
        unfit = [kind for kind in group.offload if kind not in OFFLOAD_IN_FLIGHT]
        if unfit:
            raise PlanError(
                f"{why}, but groups[{g}].offload names {list_few(map(repr, unfit))}; where microbatches in "
                'flight are bounded only "optimizer" can be offloaded: remove the others, or max_in_flight'
            )


def _validate_devices(devices: Sequence[Device], num_ranks: int) -> None:
    entry_of_rank: dict[int, int] = {}
    entry_of_place: dict[tuple[str, int], int] = {}
    for i, device in enumerate(devices):
        where = f"devices[{i}]"
        if device.rank >= num_ranks:
            raise PlanError(f"{where}.rank is {device.rank}; the plan has ranks 0 to {num_ranks - 1}")
        if device.rank in entry_of_rank:
            raise PlanError(
                f"devices[{entry_of_rank[device.rank]}] and {where} are both rank {device.rank}; "
                "give each rank one device"
            )
        place = (device.node, device.local_rank)
        if place in entry_of_place:
            raise PlanError(
                f"devices[{entry_of_place[place]}] and {where} are both local rank {device.local_rank} of "
                f"node {device.node}; give each device one rank"
            )
        entry_of_rank[device.rank] = entry_of_place[place] = i
    missing = [rank for rank in range(num_ranks) if rank not in entry_of_rank]
    if devices and missing:
        raise PlanError(
            f"devices lacks {list_few(missing, 'rank')}; give a device for every rank or for none"
        )


def _parents(name: str) -> list[str]:
    """`a` and `a.b` for `a.b.c`; none for a name without a dot."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
