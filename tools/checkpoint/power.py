"""Power is lost: only what was synced is sure to be on the disk.

The calls of a save are recorded, and then for every moment disks are made as a file system may leave them: a
file holds what it held when it was last synced, or some of what was written since; a folder has the names of
when it was last synced and some first part of the changes since, in their order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zorselike.checkpoint.folder import find_newest
from zorselike.checkpoint.layout import LEASE

from .calls import disturbed
from .subject import NEW, Share, Subject, Tally, copies_of, find_fault_after, make_base

_Names = dict[str, "_File | _Folder"]
_Change = Callable[[_Names], None]

_NUM_RANDOM = 2
"""Random disks of each moment, beside that which kept least and that which kept all names."""


@dataclass
class _File:
    content: bytes
    synced: bytes


@dataclass
class _Folder:
    synced: _Names = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)
    """Since it was synced."""

    def names(self, num_changes: int | None = None) -> _Names:
        names = dict(self.synced)
        for change in self.changes[:num_changes]:
            change(names)
        return names


class _Disk:
    """A folder as calls leave it and as the loss of power may."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = self._read(path)

    def _read(self, path: Path) -> _Folder:
        names: _Names = {}
        for inside in path.iterdir():
            if inside.is_dir():
                names[inside.name] = self._read(inside)
            else:
                names[inside.name] = _File(inside.read_bytes(), inside.read_bytes())
        return _Folder(names)

    def find(self, path: str | Path) -> _File | _Folder:
        node: _File | _Folder = self._root
        for name in Path(path).relative_to(self._path).parts:
            assert isinstance(node, _Folder)
            node = node.names()[name]
        return node

    def change(self, path: str | Path, change: Callable[[_Names, str], None]) -> None:
        name = Path(path).name
        folder = self.find(Path(path).parent)
        assert isinstance(folder, _Folder)
        folder.changes.append(lambda names: change(names, name))

    def apply(self, name: str, path: str, other: str, content: bytes) -> None:
        """One call's effect."""
        match name:
            case "mkdir" | "open":
                made = _Folder() if name == "mkdir" else _File(b"", b"")
                self.change(path, lambda names, own: names.__setitem__(own, made))
            case "write":
                file = self.find(path)
                assert isinstance(file, _File)
                file.content += content
            case "fsync":
                node = self.find(path)
                if isinstance(node, _File):
                    node.synced = node.content
                else:
                    node.synced, node.changes = node.names(), []
            case "rename":
                new = Path(other).name
                self.change(path, lambda names, own: names.__setitem__(new, names.pop(own)))
            case "link":
                linked = self.find(path)
                self.change(other, lambda names, own: names.__setitem__(own, linked))
            case "unlink" | "rmdir":
                self.change(path, dict.__delitem__)

    def leave(self, target: Path, choose: Callable[[int], int]) -> None:
        """Makes what is left, `choose` saying how much of so much that is not sure."""
        self._leave(self._root, target, choose)

    def _leave(self, node: _File | _Folder, target: Path, choose: Callable[[int], int]) -> None:
        if isinstance(node, _File):
            unsure = node.content[len(node.synced) :]
            target.write_bytes(node.synced + unsure[: choose(len(unsure))])
            return
        target.mkdir()
        for name, inside in node.names(choose(len(node.changes))).items():
            self._leave(inside, target / name, choose)


def lose_power(subject: Subject, scratch: Path, share: Share) -> Tally:
    """Power is lost after each call of a save."""
    tally = Tally("power")
    folder = next(copies_of(make_base(subject, scratch / "base"), scratch))
    disk = _Disk(folder)
    calls, num_needed = _record(subject, folder)
    rng = random.Random(0)
    cases = set(share.of(range(len(calls))))
    for number, (name, path, other, content) in enumerate(calls):
        disk.apply(name, path, other, content)
        if number not in cases:
            continue
        choices: dict[str, Callable[[int], int]] = {
            "least": lambda most: 0,
            "all names": lambda most: most if most < 64 else 0,
            **{f"random {i}": lambda most: rng.randint(0, most) for i in range(_NUM_RANDOM)},
        }
        for what, choose in choices.items():
            left = scratch / f"left-{number}-{what.replace(' ', '-')}"
            disk.leave(left, choose)
            fault = _find_fault(subject, left, must_be_new=number >= num_needed)
            tally.add(f"power lost after call {number} ({name}), {what} kept", fault)
    return tally


def _find_fault(subject: Subject, folder: Path, *, must_be_new: bool) -> str | None:
    lease = folder / LEASE
    if lease.exists():
        try:
            json.loads(lease.read_text())
        except ValueError:
            return "the lease says nothing"
        lease.unlink()  # Its process, this one, would have ended.
    newest, _ = find_newest(folder)
    if must_be_new and (newest is None or newest.manifest.step != NEW):
        return "what was committed is lost"
    return find_fault_after(subject, folder)


def _record(subject: Subject, folder: Path) -> tuple[list[tuple[str, str, str, bytes]], int]:
    """The calls of a save (name, path, other path, what was written), and the number of that with which it
    was committed."""
    calls: list[tuple[str, str, str, bytes]] = []
    committed = []

    def note(number: int, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = args[0]
        if isinstance(place, int):
            place = _opened(place)
        elif kwargs.get("dir_fd") is not None:
            place = _opened(kwargs["dir_fd"]) / place
        other = str(args[1]) if name in ("rename", "link") else ""
        content = bytes(args[1]) if name == "write" else b""
        result = original(*args, **kwargs)
        written = content[:result] if name == "write" else content
        calls.append((name, str(place), other, written))
        return result

    with disturbed(note):
        subject.save(folder, NEW, lambda: committed.append(len(calls) - 1))
    return calls, committed[0]


def _opened(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()
