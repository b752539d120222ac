"""Shapes found once for all ranks of all tests: half of what building a small pipeline costs.

Ranks find them alike, from the model and the plan alone. The first that needs them runs the runtime's own
code and leaves what it found in a folder; the others take it from there. So it is for the models below, whose
code no test changes; any other model, or one with something of its own, is traced as ever. With `--nightly`
every model is, on every rank.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import volume
from torch import nn

_MODULES = ("tiny", "tools.elastic.ranks", "torch.nn.modules.", "zorselike.models.")
"""Where models are from whose code stays what it is."""
_VARIABLE = "ZORSELIKE_TESTS_SHAPES"
_PLAIN = (int, float, str, bool, tuple, type(None), torch.dtype)
_LONGEST_WAIT_S = 5.0
"""For the rank that finds them now; it may have been stopped."""


@functools.cache
def _make_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="shapes")


def folder() -> Path:
    """Of this run of the tests, all processes of `-n` together; made in the process that collects or starts
    them, whose end removes it."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = _make_folder().name
    return Path(os.environ[_VARIABLE])


@contextmanager
def sharing(folder: Path) -> Iterator[None]:
    """Inside, processes that are forked look up what was found before."""
    from zorselike.runtime import crossing
    from zorselike.runtime.model.partition import _Decoder

    with (
        mock.patch.object(crossing, "trace_step", crossing.trace_step),
        mock.patch.object(crossing, "refuse_mixed_positions", crossing.refuse_mixed_positions),
        mock.patch.object(_Decoder, "try_tokens", _Decoder.try_tokens),
    ):
        if not volume.is_full():
            share(folder)
        yield


def share(folder: Path) -> None:
    """In a rank: what was found before is looked up from now on."""
    crossing = sys.modules.get("zorselike.runtime.crossing")
    if crossing is None:
        return
    from zorselike.runtime.model.partition import _Decoder
    from zorselike.runtime.model.tracing import Skeleton

    trace_step, refuse = crossing.trace_step, crossing.refuse_mixed_positions
    try_tokens = _Decoder.try_tokens

    def describe(skeleton: Any, step: Any) -> str | None:
        # `torch.export` makes graphs where a skeleton of its own is traced.
        is_plain = type(skeleton) in (Skeleton, _Decoder) and not step.kwargs
        return _describe(skeleton.whole) if is_plain else None

    def trace_once(parts: Any, plan: Any, step: Any, **options: Any) -> Any:
        whole = describe(parts[0].skeleton, step)
        what = whole and ("trace", whole, plan.ministages, step, sorted(options.items()))
        return _once(folder, what, functools.partial(trace_step, parts, plan, step, **options))

    def refuse_once(parts: Any, blocks: Any, step: Any) -> None:
        whole = describe(parts[0].skeleton, step)
        what = whole and ("positions", whole, [part.units for part in parts], sorted(blocks.items()), step)
        _once(folder, what, functools.partial(refuse, parts, blocks, step))

    def try_once(decoder: Any) -> Any:
        whole, plan = _describe(decoder.whole), decoder._plan
        what = whole and ("try", whole, plan.ministages, plan.sequence_length)
        found, decoder._proven = _once(folder, what, lambda: (try_tokens(decoder), decoder._proven))
        return found

    crossing.trace_step = trace_once
    crossing.refuse_mixed_positions = refuse_once
    _Decoder.try_tokens = try_once  # type: ignore[method-assign]


def _describe(model: nn.Module) -> str | None:
    """All that a model's shapes depend on; None for one that is not to be looked up."""
    if torch.is_autocast_enabled("cpu"):
        return None
    found: list[object] = [torch.get_default_dtype()]
    for name, module in model.named_modules():
        kind, forward = type(module), type(module).forward
        if not all(getattr(code, "__module__", "").startswith(_MODULES) for code in (kind, forward)):
            return None
        found.append((name, kind.__module__, kind.__qualname__))
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                found += [(key, n, id(t), *_facts(t)) for n, t in value.items() if t is not None]
            elif isinstance(value, _PLAIN) or type(value).__module__.startswith(_MODULES[2:]):
                found.append((key, value))
            elif key != "_modules" and value:
                return None
    return repr(_without_ids(found))


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device


def _without_ids(found: list[Any]) -> list[object]:
    """Tensors by the order in which they are met first: one that is shared has the same number again."""
    numbers: dict[int, int] = {}
    return [
        (entry[0], entry[1], numbers.setdefault(entry[2], len(numbers)), *entry[3:])
        if isinstance(entry, tuple) and entry[0] in ("_parameters", "_buffers")
        else entry
        for entry in found
    ]


def _once(folder: Path, what: object | None, find: Callable[[], Any]) -> Any:
    """What is found is kept under the name of `what`; an error is everybody's own."""
    if what is None:
        return find()
    path = folder / hashlib.sha256(repr(what).encode()).hexdigest()
    if not path.exists():
        with _first_of_all(path.with_suffix(".lock")):
            if not path.exists():
                found = find()
                unfinished = path.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(pickle.dumps(found))
                unfinished.rename(path)
                return found
    return pickle.loads(path.read_bytes())


@contextmanager
def _first_of_all(path: Path) -> Iterator[None]:
    begun_s = time.monotonic()
    with path.open("w") as file:
        while (waited_s := time.monotonic() - begun_s) < _LONGEST_WAIT_S:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002 + waited_s / 10)  # To look costs the others time.
        yield
