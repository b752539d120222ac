"""Learning-rate schedulers of a pipeline: one an optimizer, stepped together; their state by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zorselike.errors import ConfigError
from zorselike.runtime.ministage.named_state import NamedState
from zorselike.runtime.ministage.plain_values import from_plain, to_plain

_OF_GROUPS = frozenset(
    ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas")
)
"""Entries of a torch scheduler's state that are lists with one value a parameter group."""
_ADVICE = "save with model_only=True, or use another scheduler"


class LRSchedulers:
    """One learning-rate scheduler per local optimizer, stepped together."""

    def __init__(self, states: Mapping[int, NamedState], factory: Callable[[Optimizer], LRScheduler]) -> None:
        self._states = {i: state for i, state in states.items() if state.optimizer is not None}
        self.schedulers = {
            i: factory(state.optimizer) for i, state in self._states.items() if state.optimizer is not None
        }

    def step(self, *values: Any) -> None:
        """Steps every scheduler once; `values`: what some want, such as the loss of a validation."""
        for scheduler in self.schedulers.values():
            scheduler.step(*values)

    def get_last_lr(self) -> list[float]:
        """The learning rates of the first local optimizer's groups; [] on a rank without one."""
        for scheduler in self.schedulers.values():
            return [float(rate) for rate in scheduler.get_last_lr()]
        return []

    def state_dict(self) -> dict[str, Any]:
        """What this rank's schedulers have counted, which is the same for all, and, by a parameter's name,
        what is its group's; JSON can say it. `ConfigError` if it cannot."""
        common: dict[str, Any] = {}
        of: dict[str, dict[str, Any]] = {}
        for i, scheduler in self.schedulers.items():
            for path, value in _flatten(scheduler.state_dict()):
                plain = to_plain(value, f"the learning-rate scheduler's {path}", advice=_ADVICE)
                if not _is_of_groups(path):
                    common[path] = plain
                    continue
                for number, names in enumerate(self._states[i].group_names()):
                    for name in names:
                        of.setdefault(name, {})[path] = plain[number]
        kinds = {_kind_of(scheduler) for scheduler in self.schedulers.values()}
        return {"kind": " or ".join(sorted(kinds)), "common": common, "of": of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave, and the learning rates that were last set. `ConfigError` if that
        is of other schedulers."""
        for kind in map(_kind_of, self.schedulers.values()):
            if state.get("kind", kind) != kind:
                raise ConfigError(
                    f"the checkpoint's learning rates were scheduled by {state['kind']}, and this job has "
                    f"{kind}: use that one, or load with options=False"
                )
        for i, scheduler in self.schedulers.items():
            groups = self._states[i].group_names()
            own: list[Mapping[str, Any]] = [
                next((state["of"][name] for name in names if name in state["of"]), {}) for names in groups
            ]
            loaded = {path: from_plain(value) for path, value in state["common"].items()}
            for path, values in _flatten(scheduler.state_dict()):
                if _is_of_groups(path):  # A group of parameters that did not train then keeps its own.
                    loaded[path] = [
                        from_plain(entries[path]) if path in entries else value
                        for entries, value in zip(own, values, strict=True)
                    ]
            scheduler.load_state_dict(_unflatten(loaded))
            for group, rate in zip(scheduler.optimizer.param_groups, loaded["_last_lr"], strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(float(rate))
                else:
                    group["lr"] = float(rate)


def merge_schedules(states: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """What the schedulers of all ranks have in common, and what each says of its parameters; None where there
    are none."""
    found = [state for state in states if state is not None and state["of"]]
    if not found:
        return None
    of = {name: entries for state in found for name, entries in state["of"].items()}
    return {"kind": found[0]["kind"], "common": found[0]["common"], "of": of}


def _kind_of(scheduler: LRScheduler) -> str:
    """Its class, with those of schedulers inside it."""
    inner = ", ".join(map(_kind_of, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({inner})" if inner else type(scheduler).__name__


def _is_of_groups(path: str) -> bool:
    return path.rpartition(".")[2] in _OF_GROUPS


def _flatten(state: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Entries, those of schedulers within schedulers too, by dotted path."""
    for key, value in state.items():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                yield from _flatten(inner, f"{before}{key}.{number}.")
        else:
            yield before + key, value


def _unflatten(entries: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path, value in entries.items():
        place, (*parts, key) = state, path.split(".")
        for scheduler, number in zip(parts[::2], parts[1::2], strict=True):
            inner = place.setdefault(scheduler, [])
            inner += [{} for _ in range(int(number) + 1 - len(inner))]
            place = inner[int(number)]
        place[key] = value
    return state
