"""A module that FSDP2 gathers and reduces as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from zorselike.errors import ConfigError
from zorselike.runtime._compat import give_zero_gradients
from zorselike.runtime.memory.activation_offload import ActivationOffload
from zorselike.runtime.ministage.random_numbers import RandomNumbers
from zorselike.runtime.model.decoder_probe import hidden_states, with_hidden_states
from zorselike.runtime.model.nested import map_tensors, tensors_in

Forward = Callable[..., Any]

EVERY_HOOK = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module has what is called when it is."""


class Unit:
    """Replaces the module's `forward` by one that recomputes, keeps activations on the host, and
    can pretend to compute so that FSDP2 reduces."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        nested: Sequence[nn.Module],
        *,
        recompute: bool,
        compiles: bool = False,
        activations: ActivationOffload | None = None,
        random: RandomNumbers | None = None,
        random_name: str = "",
    ) -> None:
        """`random_name`: under which it draws random numbers, if they are to be seeded."""
        inside_others = {id(m) for other in nested for m in other.modules()}
        self.name = name
        self.module = module
        self._has_units_inside = bool(nested)
        self._own_modules = [m for m in module.modules() if id(m) not in inside_others]
        self.find_slots()
        self.anchors_real_forwards = False
        self.is_anchor_pass = False
        self.is_source = False
        """Whether nothing that it is given carries a gradient."""
        self.recomputes = recompute
        self._activations = activations
        self._random, self._random_name = random, random_name or name
        forward: Forward = module.forward
        # One graph a row count: of graphs that fit several, a layer might be computed again by another
        # than computed it, which may save other tensors or in another order.
        self._run: Forward = torch.compile(forward, dynamic=False) if compiles else forward
        self._pass_through: Callable[[Tensor], Tensor] = lambda x: x
        self._enter: Forward = self._compute
        self.takes: Callable[[Tensor], Tensor] | None = None
        """What becomes of the hidden states that it is given, if anything does."""
        self._enclosing: tuple[Unit, ...] = ()
        self._is_nested = False
        module.forward = self._forward

    def find_slots(self) -> None:
        """Once more, after parameters have been taken out."""
        self._slots = [
            (owner, key)
            for owner in self._own_modules
            for key, value in owner._parameters.items()
            if value is not None
        ]
        self.owns_parameters = bool(self._slots)
        self.trains = any(p.requires_grad for p in self.parameters())

    def enclose(self, units: Sequence[Unit]) -> None:
        """Makes calls pass through `units`, outermost first, before this module computes: FSDP2's hooks of
        each then stand round it. All of them return one tensor, in an anchor pass too, since FSDP2 gathers
        for a backward in the order in which modules have returned what it begins with."""
        self._enclosing = tuple(units)
        for unit in (self, *units):
            unit._is_nested = True
        for outer, inner in pairwise((self, *units)):
            outer._enter = outer._pass_through = inner.module
        units[-1]._enter = self._compute

    def slots(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Where the unit's own parameters are registered, and what is registered there now."""
        for owner, key in self._slots:
            parameter = owner._parameters[key]
            if parameter is not None:
                yield owner, key, parameter

    def parameters(self) -> list[nn.Parameter]:
        """The unit's own parameters as they are registered now: whole while gathered."""
        return [parameter for _, _, parameter in self.slots()]

    def trainable_parameters(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad]

    def chain(self, units: Sequence[Unit]) -> None:
        """Makes an anchor pass through this unit (a ministage's root) pass through `units` in order; beside
        each other through sources, since FSDP2 reduces what got no gradient to hand on after all others."""

        def pass_through(x: Tensor) -> Tensor:
            entered = x
            for unit in units:
                if unit.is_source and x is not entered:
                    x = x + unit.module(entered.detach())
                else:
                    x = unit.module(x)
            return x

        self._pass_through = pass_through

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_anchor_pass and self._is_nested:
            return self._pass_through(self._anchor(args[0].clone(), give=self._give_zeros))
        if self.is_anchor_pass:
            # A copy: FSDP warns of modules that return a view, or their input itself.
            return self._anchor(self._pass_through(args[0]).clone(), give=self._give_zeros)
        if not self.name:
            # A ministage may change what enters it, unlike leaves and what FSDP2 makes of them.
            args = map_tensors(args, _apart)
        if self.takes is not None:
            args, kwargs = with_hidden_states(args, kwargs, self.takes(hidden_states(args, kwargs)))
        # Of units inside each other an anchor pass gives the inner ones what carries a gradient, and FSDP2
        # reduces these earlier for it: so must a real forward, where nothing else carries one.
        anchors = self.anchors_real_forwards or (self._is_nested and self.is_source)
        anchors = anchors and torch.is_grad_enabled()
        if anchors and self._is_nested:
            hidden = self._anchor(hidden_states(args, kwargs))
            args, kwargs = with_hidden_states(args, kwargs, hidden)
        outputs = self._without_parameters(self._enter(*args, **kwargs))
        outputs = map_tensors(outputs, partial(self._hand_on, given=(args, kwargs)))
        if anchors and not self._is_nested:
            return self._anchor(outputs)
        return outputs

    def _without_parameters(self, outputs: Any) -> Any:
        """The same, with copies of what shares memory with parameters, which is given back while others still
        read what they were handed."""
        shared = [t for t in tensors_in(outputs) if t._is_view() or isinstance(t, nn.Parameter)]
        if not shared:
            return outputs
        own = {parameter.untyped_storage()._cdata for parameter in self.parameters()}
        if not any(tensor.untyped_storage()._cdata in own for tensor in shared):
            return outputs
        return map_tensors(outputs, lambda t: t.clone() if t.untyped_storage()._cdata in own else t)

    def _hand_on(self, output: Tensor, *, given: Any) -> Tensor:
        """An output as something of whose backward FSDP2 hears: who changes a view in place (`x =
        self.linear(x); x += y`) takes its hooks away. A view of what was given is left to autograd."""
        # Where a unit inside and the module around it return the same tensor, FSDP2 gathers the unit first
        # for a backward, and in an anchor pass the module around.
        is_inner = self._has_units_inside and self.owns_parameters and bool(output._backward_hooks)
        if not is_inner and not output._is_view():
            return output
        storage = output.untyped_storage()._cdata
        is_given = self.name and any(
            tensor.untyped_storage()._cdata == storage for tensor in tensors_in(given)
        )
        return output if is_given else _apart(output)

    def _anchor(self, x: Any, *, give: Callable[[], None] | None = None) -> Any:
        return anchor_zero_gradients(x, self.trainable_parameters(), give)

    def _give_zeros(self) -> None:
        """To parameters for which there is no gradient yet, on the stream of this moment. Autograd would do
        it on that of a forward whose graph still lives, for which who reads them does not wait."""
        give_zero_gradients(as_fsdp(self.module))

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        if self._random is not None:
            self._random.enter(self._random_name)
        activations = self._activations
        if activations is None or not activations.is_keeping:
            if self.recomputes:
                # The random numbers that it restores are those of devices of positional arguments alone.
                run = partial(_run_beside, _Again(self._run))
                return checkpoint(run, tensors_in(kwargs), *args, use_reentrant=False, **kwargs)
            return self._run(*args, **kwargs)
        parameters = [p for unit in (self, *self._enclosing) for p in unit.parameters()]
        with activations.leaving_out([*parameters, *self._buffers()]):
            if not self.recomputes:
                return self._run(*args, **kwargs)
            restore = activations.save_inputs((args, kwargs))
            # The marker tells the checkpoint which device's random numbers to restore; the inputs
            # themselves must not be its arguments, or it would hold them on the device.
            run = partial(_run_saved, _Again(self._run), [(args, kwargs)], restore)
            return checkpoint(run, activations.device_marker, use_reentrant=False)

    def _buffers(self) -> list[Tensor]:
        found = (buffer for module in self._own_modules for buffer in module._buffers.values())
        return [buffer for buffer in found if buffer is not None]


def _apart(x: Tensor) -> Tensor:
    """The same values in the same memory, neither a leaf nor a view to autograd."""
    return _Apart.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call, no-any-return]


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Again:
    """A forward that is run once, and then computed again: torch ends that by an error of its own once all is
    there that a backward reads, and TorchScript makes another of it."""

    def __init__(self, run: Forward) -> None:
        self._run = run
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs = self._run(*args, **kwargs)
        except RuntimeError as error:
            if not (self._has_run and str(error).startswith(_ENDED_IN_SCRIPT)):
                raise
            return None  # Torch compares what was saved with what was before.
        self._has_run = True
        return outputs


_ENDED_IN_SCRIPT = "The following operation failed in the TorchScript interpreter"


def _run_beside(run: Forward, _beside: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _run_saved(run: Forward, live: list[Any], restore: Callable[[], Any], _marker: Tensor) -> Any:
    """The first time on the inputs as they came, when recomputing on what was offloaded."""
    args, kwargs = live.pop() if live else restore()
    return run(*args, **kwargs)


class CallOrder:
    """Watches the calls of units that own parameters, forward by forward: each once, in one order. A
    rank that leaves a layer out must not meet the others in another layer's gather."""

    def __init__(self, units: Sequence[Unit], *, meets_dummies: bool = False) -> None:
        """`meets_dummies`: ranks without a microbatch go backward through all units beside the others."""
        self._units = [unit for unit in units if unit.owns_parameters]
        self._next = 0
        self._notes_returned = meets_dummies
        self._returned: dict[str, set[Any]] = {}
        """Of the first forward: by unit, what the backwards of what it returned begin with."""
        for position, unit in enumerate(self._units):
            unit.module.register_forward_pre_hook(partial(self._check, position), prepend=True)
            if meets_dummies:
                unit.module.register_forward_hook(partial(self._note, unit))

    def begin(self) -> None:
        """Starts a forward."""
        self._next = 0

    def end(self) -> None:
        """Ends it; raises `ConfigError` if the last units were left out."""
        if self._next < len(self._units):
            raise self._out_of_order(len(self._units))

    def check_reached(self, nodes: Sequence[Any]) -> None:
        """Raises `ConfigError` if a backward from these, what a forward has ended with, goes past a unit."""
        if not self._notes_returned:
            return
        self._notes_returned = False
        reached: set[Any] = set()
        ahead = [*nodes]
        while ahead:
            if (node := ahead.pop()) not in reached:
                reached.add(node)
                ahead += [following for following, _ in node.next_functions if following is not None]
        returned, self._returned = self._returned, {}
        for unit in self._units:
            begins = returned.get(unit.name, set())
            if (unit.trains or begins) and not begins & reached:
                raise ConfigError(
                    f"the loss does not depend on what '{unit.name}' returns; zero = 3 reduces in the order "
                    "of a backward, and ranks with fewer microbatches cannot know that it is not in it: set "
                    "zero = 2 for this group, or plan as many microbatches on each of its ranks"
                )

    def _note(self, unit: Unit, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._notes_returned and not unit.is_anchor_pass:
            tensors = tensors_in(output)
            self._returned[unit.name] = {t.grad_fn for t in tensors if t.grad_fn is not None}

    def _check(self, position: int, *_: Any) -> None:
        if position != self._next:
            raise self._out_of_order(position)
        self._next += 1

    def _out_of_order(self, called: int) -> ConfigError:
        due = self._next
        what = f"left out '{self._units[due].name}'" if due < called else "called a layer twice"
        return ConfigError(
            f"a forward {what}; zero = 3 gathers layer by layer, so each must be called once for every "
            "microbatch, in one order: set zero = 2 for this group"
        )


def as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), f"{type(module).__name__} is not sharded"
    return module


class ZeroGradientAnchor(torch.autograd.Function):
    """The identity on its first argument whose backward gives parameters a zero gradient, or calls `give`.

    Unlike `x + sum(p.sum() * 0)` it reads no parameter, so it costs nothing and neither
    overflows in half precision nor spreads a non-finite weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, give: Callable[[], None] | None, *parameters: Tensor) -> Tensor:
        ctx.parameters, ctx.give = parameters, give
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.give is not None:
            ctx.give()
            return (grads[0], None, *(None for _ in ctx.parameters))
        needed = [p.requires_grad and p.grad is None for p in ctx.parameters]
        # Without memory.
        zeros = [p.new_zeros(()).expand_as(p) if needed[i] else None for i, p in enumerate(ctx.parameters)]
        return (grads[0], None, *zeros)


def anchor_zero_gradients(x: Any, parameters: list[Tensor], give: Callable[[], None] | None) -> Any:
    """`x` (a tensor, or a tuple whose first floating-point tensor is taken) tied to `parameters`."""
    if not parameters:
        return x
    if isinstance(x, Tensor):
        return ZeroGradientAnchor.apply(x, give, *parameters)  # type: ignore[no-untyped-call]
    position = next(i for i, entry in enumerate(x) if isinstance(entry, Tensor) and entry.is_floating_point())
    anchored = ZeroGradientAnchor.apply(x[position], give, *parameters)  # type: ignore[no-untyped-call]
    entries = (*x[:position], anchored, *x[position + 1 :])
    return type(x)(*entries) if hasattr(x, "_fields") else type(x)(entries)


class Enter(torch.autograd.Function):
    """A ministage's input whose gradient goes to a stand-in without memory.

    Autograd holds the leaves of a graph until its backward; this leaf is a single number,
    expanded, so that the input itself can wait on the host.
    """

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def enter(value: Tensor) -> tuple[Tensor, Tensor]:
    """`(stand-in leaf, input)`: the leaf's `grad` is what the backward leaves of the input's."""
    stand_in = value.detach().new_zeros(()).expand(value.shape).requires_grad_()
    entered: Tensor = Enter.apply(stand_in, value.detach())  # type: ignore[no-untyped-call]
    return stand_in, entered
