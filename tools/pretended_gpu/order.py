"""What the ranks of a scene asked of NCCL, by their logs: does it match, and would it end on real cards?

On a pretended card every call is over at once. Here calls of a communicator must come in the same order on
all its ranks, with the same sizes, and none may be made in steps (from `note built` to `note ended`). Then
streams and threads of all ranks are replayed as queues in which a call is over only when all its ranks have
come to it, so that what would wait for ever does. Threads that wait for each other or for Gloo are not in
the log: a deadlock that is found is one, and others may be missed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_POINT_TO_POINT = {"send", "recv"}


@dataclass(frozen=True)
class Call:
    """Of NCCL."""

    name: str
    count: str
    dtype: str

    def matches(self, other: Call) -> bool:
        if {self.name, other.name} & _POINT_TO_POINT and {self.name, other.name} != _POINT_TO_POINT:
            return False
        names_match = self.name == other.name or self.name in _POINT_TO_POINT
        return names_match and (self.count, self.dtype) == (other.count, other.dtype)

    def __str__(self) -> str:
        return f"{self.name} of {self.count} (dtype {self.dtype})"


@dataclass(frozen=True)
class _Item:
    """Of a queue: is over once all of `needs` are, and a call of NCCL once all its ranks have come to it."""

    name: object
    needs: tuple[object, ...] = ()
    call: tuple[str, int] | None = None
    """Communicator, and which of its calls on this rank."""


@dataclass
class Process:
    """One log."""

    rank: int
    calls: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Of each communicator."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Ranks of each communicator."""
    late: list[str] = field(default_factory=list)
    """Communicators made in a step."""
    queues: dict[str, list[_Item]] = field(default_factory=lambda: defaultdict(list))
    """What each stream and each thread does, in order."""


def read_logs(folder: Path) -> list[Process]:
    """Of all processes that ranks of a scene had: `log.RANK.PID`."""
    paths = sorted(folder.glob("log.*"))
    return [read_log(int(path.name.split(".")[1]), path.read_text().splitlines()) for path in paths]


def read_log(rank: int, lines: Sequence[str]) -> Process:
    process = Process(rank)
    queues, recorded, is_built = process.queues, dict[str, object](), False
    for number, line in enumerate(lines):
        words = line.split()
        thread = f"thread {words[-1]}"
        match words:
            case ["note", what]:
                is_built = what == "built" or (is_built and what != "ended")
            case ["nccl", "init", name, "rank", _, "of", size, *_]:
                process.calls[name] = []
                process.sizes[name] = int(size)
                if is_built:
                    process.late.append(name)
            case ["nccl", what, name, count, dtype, "stream", stream, "tid", _]:
                calls = process.calls[name]
                _issue(process, stream, thread, _Item(number, call=(name, len(calls))))
                calls.append(Call(what, count, dtype))
            case ["rec", event, stream, "tid", _]:
                recorded[event] = number
                _issue(process, stream, thread, _Item(number))
            case ["wait", event, stream, "tid", _] if event in recorded:
                _issue(process, stream, thread, _Item(number, (recorded[event],)))
            case ["sync", "event", event, "tid", _] if event in recorded:
                queues[thread].append(_Item(number, (recorded[event],)))
            case ["sync", "stream", stream, "tid", _]:
                queues[thread].append(_Item(number, _last_names(queues, f"stream {stream}")))
            case ["sync", "device", "tid", _]:
                queues[thread].append(_Item(number, _last_names(queues, "stream ")))
    return process


def _last_names(queues: dict[str, list[_Item]], prefix: str) -> tuple[object, ...]:
    """What must be over for these queues to be empty."""
    return tuple(queue[-1].name for name, queue in queues.items() if name.startswith(prefix))


def _issue(process: Process, stream: str, thread: str, item: _Item) -> None:
    """A thread puts an item on a stream."""
    issued = ("issued", item.name)
    process.queues[thread].append(_Item(issued))
    process.queues[f"stream {stream}"].append(replace(item, needs=(*item.needs, issued)))


def compare(processes: Sequence[Process], *, is_cut: bool = False) -> list[str]:
    """Faults of calls; `is_cut`: ranks were lost or broke off, and their calls only begin alike."""
    faults = [
        f"rank {process.rank} makes communicator {name} in a step"
        for process in processes
        for name in process.late
    ]
    for name in sorted({name for process in processes for name in process.calls}):
        members = [process for process in processes if name in process.calls]
        first, *others = members
        if len(members) != first.sizes.get(name, 1) and not is_cut:
            faults.append(f"{len(members)} ranks have communicator {name} of {first.sizes[name]} ranks")
        if first.sizes.get(name, 1) > 2 and any(call.name in _POINT_TO_POINT for call in first.calls[name]):
            continue  # Which pairs send is not in the log.
        for other in others:
            faults += _compare_calls(name, first, other, is_cut)
    return faults


def _compare_calls(name: str, first: Process, other: Process, is_cut: bool) -> Iterator[str]:
    pair = f"communicator {name}: ranks {first.rank} and {other.rank}"
    ours, theirs = first.calls[name], other.calls[name]
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if not a.matches(b):
            yield f"{pair} differ in call {place}: {a}, {b}"
            return
    if len(ours) != len(theirs) and not is_cut:
        yield f"{pair} make {len(ours)} and {len(theirs)} calls"


def find_deadlock(processes: Sequence[Process]) -> list[str]:
    """Where every queue stands that does not end; empty if all do."""
    ranks = [_Replay(process) for process in processes]
    members = Counter(name for process in processes for name, calls in process.calls.items() if calls)
    has_moved = True
    while has_moved:
        has_moved = sum(rank.advance() for rank in ranks) > 0
        for name in {name for rank in ranks for name in rank.at_calls}:
            standing = [rank for rank in ranks if name in rank.at_calls]
            if len(standing) == members[name]:
                has_moved = True
                for rank in standing:
                    rank.end_call(name)
    return [line for rank in ranks for line in rank.describe_rest()]


class _Replay:
    """Of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._places = dict.fromkeys(process.queues, 0)
        self._over: set[object] = set()
        self._num_calls: Counter[str] = Counter()
        self.at_calls: dict[str, str] = {}
        """Of each communicator whose next call a queue stands at: the queue."""

    def advance(self) -> bool:
        """Goes on as far as this process can alone; whether it could."""
        has_moved = False
        for name, queue in self._process.queues.items():
            while self._places[name] < len(queue):
                item = queue[self._places[name]]
                if not self._over.issuperset(item.needs):
                    break
                if item.call is not None:
                    communicator, number = item.call
                    if number == self._num_calls[communicator]:
                        self.at_calls[communicator] = name
                    break
                self._over.add(item.name)
                self._places[name] += 1
                has_moved = True
        return has_moved

    def end_call(self, communicator: str) -> None:
        queue = self.at_calls.pop(communicator)
        self._over.add(self._process.queues[queue][self._places[queue]].name)
        self._places[queue] += 1
        self._num_calls[communicator] += 1

    def describe_rest(self) -> Iterator[str]:
        for name, queue in self._process.queues.items():
            rest = queue[self._places[name] :]
            if rest:
                yield f"deadlock: rank {self._process.rank}, {name} stands at {self._describe(rest[0])}"

    def _describe(self, item: _Item) -> str:
        if item.call is None:
            return "a wait"
        communicator, number = item.call
        return f"call {number} of communicator {communicator}, {self._process.calls[communicator][number]}"
