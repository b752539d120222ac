"""The state of a ministage by name: values and what the optimizer keeps, as boxes that no plan changes.

Values are those of the fp32 master weights where there are any. Who borrows a tied weight knows it by its
owner's name, fills it, and never gives it away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zorselike.errors import ConfigError
from zorselike.plan.holdings import VALUE, Box
from zorselike.runtime.memory.host_backed import HostBackedParts, Located
from zorselike.runtime.ministage.ministage import ShardedMinistage
from zorselike.runtime.ministage.plain_values import from_plain, to_plain
from zorselike.runtime.ministage.sharding import like_sharded, local_tensor

_MEMBERS = frozenset(("params", "param_names"))
"""Entries of an optimizer's group that say whose it is."""
_OF_DEVICES = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Options that say how it computes, not what: those of this run count."""
_ADVICE = "save with model_only=True"

BoxesOf = Callable[[str, str, tuple[int, ...]], Sequence[Box]]
"""Of a tensor by name, kind and shape, this rank's boxes: one, or one of each of its pieces."""

Read = Callable[[Box], Tensor]
"""The values of a box, on the CPU, in the dtype in which they were saved."""


class Part(NamedTuple):
    """What this rank holds of a tensor."""

    held: Box
    written: Box
    """The part of it for which this rank answers, perhaps none of it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    locate: Callable[[], Located]
    """Where this rank's values are: the live tensor, or the host copy of what is offloaded. Between steps."""


class Numbers(NamedTuple):
    """What an optimizer has counted."""

    plain: dict[str, dict[str, Any]]
    """By parameter and key."""
    on_device: list[tuple[dict[str, Any], Tensor]]
    """Entries of `plain` that lack their value, and where it is."""


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer was given and has counted, by parameter; values are what JSON can say."""

    kind: str
    """Its class."""
    options: Mapping[str, Mapping[str, Any]]
    numbers: Mapping[str, Mapping[str, Any]]


class NamedState:
    """One ministage's, on one rank."""

    def __init__(
        self,
        ministage: ShardedMinistage,
        optimizer: Optimizer | None,
        *,
        held: BoxesOf,
        written: BoxesOf,
        owner_of: Mapping[str, str],
        buffers: Sequence[str],
        gives_buffers: Collection[str],
    ) -> None:
        """`held`, `written`: what this rank holds of a tensor, and what it answers for; `owner_of`: the
        names of borrowed weights by theirs here; `buffers`: those that are part of the state, and of these
        the ones for which this rank answers."""
        self.ministage = ministage
        self.optimizer = optimizer
        self._held, self._written = held, written
        self._owner_of = owner_of
        self._buffers = buffers
        self._gives_buffers = gives_buffers

    def parts(self, *, model_only: bool = False) -> list[Part]:
        """All that this rank holds and owns."""
        parts = []
        for name, parameter, source in self._values():
            if name not in self._owner_of:
                parts.append(self._part(name, VALUE, parameter, source, *self._place(name)))
        if not model_only:
            parts += self._moments()
        for name in self._buffers:
            if name in self._gives_buffers:
                # By name, now: a forward may have put another tensor in its place.
                buffer = self.ministage.module.get_buffer(name)
                # A copy: a forward may change it in place.
                content, whole = buffer.detach().clone(), Box.whole(name, VALUE, buffer.shape)
                parts.append(Part(whole, whole, whole.stops, buffer.dtype, partial(Located, content)))
        return parts

    def options(self) -> dict[str, dict[str, Any]]:
        """What the optimizer was given for each parameter; `ConfigError` for what JSON cannot say."""
        names = self._names()
        return {
            self.ministage.whole_name(names[id(parameter)]): {
                key: to_plain(value, f"the optimizer's option {key}", advice=_ADVICE)
                for key, value in group.items()
                if key not in _MEMBERS
            }
            for group in (self.optimizer.param_groups if self.optimizer is not None else ())
            for parameter in group["params"]
        }

    def numbers(self) -> Numbers:
        """What the optimizer has counted for each parameter, as far as that is numbers. `ConfigError` for
        what JSON cannot say."""
        found = Numbers({}, [])
        for own_name, _, state in self._states():
            name = self.ministage.whole_name(own_name)
            own = found.plain[name] = {}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    continue
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    own[key] = {"tensor": str(value.dtype).removeprefix("torch."), "value": None}
                    found.on_device.append((own[key], value))
                else:
                    own[key] = to_plain(value, f"the optimizer's state '{key}' of {name}", advice=_ADVICE)
        return found

    # -- filling ---------------------------------------------------------------------------

    def fill(
        self,
        read: Read,
        kinds_of: Callable[[str], Sequence[str]],
        facts: OptimizerFacts | None,
        *,
        kept: Collection[str] = (),
    ) -> None:
        """Takes over values, except those of `kept`, and, with `facts`, the optimizer's state, all of it
        read at most once; options are left as they are. Only this ministage is on the device meanwhile."""
        with torch.no_grad(), self.ministage.on_device():
            for name, parameter, source in self._values():
                owner = self._owner_of.get(name, self.ministage.whole_name(name))
                if owner in kept:
                    continue
                box = self._box(self._held, name, VALUE, parameter)
                local_tensor(source.detach()).copy_(read(replace(box, name=owner)))
            for name in self._buffers:
                buffer = self.ministage.module.get_buffer(name)
                buffer.copy_(read(Box.whole(name, VALUE, buffer.shape)))
            if facts is not None and self.optimizer is not None:
                self._fill_numbers(facts)
                for name, parameter in self._optimized():
                    kinds = [kind for kind in kinds_of(self.ministage.whole_name(name)) if kind != VALUE]
                    self._fill_moments(name, parameter, read, kinds)

    def fill_options(self, facts: OptimizerFacts) -> None:
        """Takes over what the optimizer was given: learning rates and the like."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            saved = [facts.options.get(self.ministage.whole_name(name)) for name in self._names_of(group)]
            known = [
                {key: value for key, value in options.items() if key not in _OF_DEVICES}
                for options in saved
                if options is not None
            ]
            if any(options != known[0] for options in known):
                raise ConfigError(
                    f"parameters of one group of the optimizer ({', '.join(self._names_of(group)[:3])}, ...) "
                    "were saved with different options; make the groups as they were"
                )
            for key, value in (known[0] if known else {}).items():
                old, new = group.get(key), from_plain(value)
                if isinstance(old, Tensor):
                    old.copy_(torch.as_tensor(new, device=old.device))
                else:
                    group[key] = tuple(new) if isinstance(old, tuple) else new

    def _fill_numbers(self, facts: OptimizerFacts) -> None:
        """By the optimizer's own `load_state_dict`, which knows where it wants its counters."""
        assert self.optimizer is not None
        state: dict[int, dict[str, Any]] = {}
        numbers: dict[str, int] = {}
        described = self.optimizer.state_dict()
        for group, shown in zip(self.optimizer.param_groups, described["param_groups"], strict=True):
            numbers |= dict(zip(self._names_of(group), shown["params"], strict=True))
        for name, number in numbers.items():
            numbered = facts.numbers.get(self.ministage.whole_name(name))
            if numbered is not None:
                state[number] = {key: from_plain(value) for key, value in numbered.items()}
        self.optimizer.load_state_dict({"state": state, "param_groups": described["param_groups"]})
        # Of the counters it knows "step" alone: others it has cast to their parameter's dtype.
        for name, parameter in self._optimized():
            for key, value in state.get(numbers[name], {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.optimizer.state[parameter][key] = value.to(parameter.device)

    def _fill_moments(self, name: str, parameter: nn.Parameter, read: Read, kinds: Sequence[str]) -> None:
        assert self.optimizer is not None
        local = local_tensor(parameter.detach())
        for kind in kinds:
            content = read(self._box(self._held, name, kind, self.ministage.sharded[name]))
            own = torch.empty_like(local, dtype=content.dtype)
            own.copy_(content)
            self.optimizer.state[parameter][kind] = like_sharded(own, parameter)

    # --------------------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Name here, parameter, and what has its values: its master weights if it has any."""
        for name, parameter in self.ministage.sharded.items():
            yield name, parameter, self.ministage.state.masters.get(name, parameter)

    def _place(self, name: str) -> tuple[Any, Any]:
        state = self.ministage.state
        return (state if name in state.masters else self.ministage.shards), name

    def _part(
        self, name: str, kind: str, parameter: Tensor, source: Tensor, place: HostBackedParts, key: Any
    ) -> Part:
        """`place`: what may have it in host memory, by `key`."""
        part = self.ministage.part_of(name)
        return Part(
            self._box(self._held, name, kind, parameter),
            self._box(self._written, name, kind, parameter),
            tuple(parameter.shape) if part is None else part.shape,
            source.dtype,
            partial(place.locate, key, local_tensor(source.detach())),
        )

    def _box(self, boxes_of: BoxesOf, name: str, kind: str, parameter: Tensor) -> Box:
        """Of a parameter by its name here."""
        part = self.ministage.part_of(name)
        if part is None:
            (box,) = boxes_of(name, kind, tuple(parameter.shape))
            return box
        return boxes_of(part.name, kind, part.shape)[part.place]

    def _moments(self) -> Iterator[Part]:
        for number, (name, parameter, state) in enumerate(self._states()):
            sharded = self.ministage.sharded[name]
            for key, value in state.items():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                if local_tensor(value).shape != local_tensor(parameter.detach()).shape:
                    shape = tuple(sharded.shape)
                    raise ConfigError(
                        f"the optimizer keeps '{key}' of {name} in the shape {tuple(value.shape)}, not as "
                        f"its rows {shape} are dealt to ranks; such a state cannot be saved for another "
                        "plan: save with model_only=True, or use an optimizer such as torch.optim.AdamW"
                    )
                yield self._part(name, key, sharded, value, self.ministage.state, (number, key))

    def _states(self) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
        """What the optimizer keeps of each of its parameters. `ConfigError` for what is of none."""
        names = self._names()
        for parameter, state in self.optimizer.state.items() if self.optimizer is not None else ():
            if id(parameter) not in names:
                what = "a tensor" if isinstance(parameter, Tensor) else repr(parameter)
                raise ConfigError(
                    f"the optimizer keeps a state under {what}, which is no parameter that it was given, "
                    f"and cannot be saved: keep such in its param_groups, or {_ADVICE}"
                )
            yield names[id(parameter)], parameter, state

    def _optimized(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those parameters that the optimizer has: its factory may leave some out."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        held = {id(parameter) for group in groups for parameter in group["params"]}
        yield from ((name, own) for name, own in self.ministage.trained.items() if id(own) in held)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.ministage.trained.items()}

    def group_names(self) -> list[list[str]]:
        """Names of the parameters of each of the optimizer's groups."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        whole = self.ministage.whole_name
        return [list(dict.fromkeys(map(whole, self._names_of(group)))) for group in groups]

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        names = self._names()
        return [names[id(parameter)] for parameter in group["params"]]
