"""Every place in the runtime's sources that orders work: a wait, a synchronisation, a recorded event."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

from stream_work import Frames, Order, Record, Work

import zorselike.runtime

_ROOT = Path(zorselike.runtime.__file__).parent
_RECORDS = frozenset({"record", "record_event"})
_ORDERING = _RECORDS | {"wait", "wait_event", "wait_stream", "synchronize"}
_OTHERS = {
    "alarm": "its threads wait for each other and for sockets, never for a stream",
    "memory/streams.py": "what the others wait with",
}
"""Not looked at, and why."""


@cache
def ordering_places() -> dict[tuple[str, int, bool], str]:
    """What orders at a file's line, an event that is recorded apart: `file: function: call`, numbered where a
    function has the same twice."""
    places = {}
    for path in sorted(_ROOT.rglob("*.py")):
        file = path.relative_to(_ROOT).as_posix()
        if not file.startswith(tuple(_OTHERS)):
            seen: Counter[str] = Counter()
            for function, call in _ordering_calls(ast.parse(path.read_text()), ""):
                text = f"{file}: {function}: {ast.unparse(call)}"
                seen[text] += 1
                places[str(path), call.lineno, _name(call) in _RECORDS] = (
                    text if seen[text] == 1 else f"{text} ({seen[text]})"
                )
    return places


def place_of(work: Work) -> str | None:
    """Where the runtime ordered this; None if it was FSDP2, a test, or whatever orders nothing."""
    return _place_of(work.frames, isinstance(work, Record)) if isinstance(work, Order) else None


@cache
def _place_of(frames: Frames, records: bool) -> str | None:
    return ordering_places().get((*frames[0][:2], records)) if frames else None


def _ordering_calls(node: ast.AST, function: str) -> list[tuple[str, ast.Call]]:
    found = []
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{function}.{child.name}" if function else child.name
        elif isinstance(child, ast.Call) and _name(child) in _ORDERING:
            found.append((function, child))
        found += _ordering_calls(child, inner)
    return found


def _name(call: ast.Call) -> str:
    """Of what is called, without whose it is."""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
