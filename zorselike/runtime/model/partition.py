"""How a model becomes ministages: by its structure, by its convention, by the user, or by export.

Whatever the way, a part's parameters and buffers keep the names that they have in the model, and
parts share them with the model: nothing is copied.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.plan.validate import validate_modules
from zorselike.runtime.model.boundaries import compare_calls, name_ministage, run_module, run_parts
from zorselike.runtime.model.causal_lm import is_causal_lm, keeps_cache
from zorselike.runtime.model.decoder_cut import CannotCut, cut_causal_lm, list_modules, take_whole
from zorselike.runtime.model.decoder_part import logits_of
from zorselike.runtime.model.export import Exporter
from zorselike.runtime.model.part import Keywords, ModelPart
from zorselike.runtime.model.pruning import (
    find_units,
    is_above,
    is_sequential,
    loose_parameters,
    plan_module,
    prune,
    separate_units,
    sequential_order,
)
from zorselike.runtime.model.signature import KwargSpecs, Signature, TensorSpec, make_kwargs
from zorselike.runtime.model.tracing import Recorder, Skeleton, fake_copies
from zorselike.text.wording import count, first_line, list_few, show_modules

Split = Callable[[nn.Module, tuple[str, ...]], nn.Module] | Literal["decoder", "export"]
"""`(model, module names of one ministage) -> nn.Module`, or the way to insist on."""

_GUESSED_SEQUENCE = 8


@dataclass(frozen=True)
class Tie:
    """One parameter in two ministages of a plan."""

    owner_fqn: str
    borrower_fqn: str
    owner_ministage: int
    borrower_ministage: int


def partition(
    model: nn.Module,
    plan: Plan,
    *,
    split: Split | None = None,
    unpack: Callable[[Any], Any] | None = None,
    is_proven: bool = False,
) -> list[ModelPart]:
    """Divides a model into the plan's ministages, all of them.

    Without `split`, a plan of one ministage takes the model as it is; an `nn.Sequential`, nested ones too, is
    cut between its children; a causal LM of `transformers` between its decoder layers; a model on
    TorchTitan's convention, where missing parts are `None` and their input passes through, loses what other
    ministages have (tried out on fake token ids, and proven to call what the whole model calls); any other is
    cut by `torch.export` when its inputs are known. `split="decoder"` and `split="export"` insist on one of
    the last two; a callable makes each ministage's module itself, with parameters under their global names.
    Modules are planned in the order in which the model runs them. `unpack` turns the model's output into a
    tensor or a tuple of tensors. `is_proven`: this model in these ministages was tried out before, and needs
    no export.

    Raises `PlanError` where plan and model disagree, `ConfigError` where the model cannot be
    trained in pieces or `split` is wrong.
    """
    if not callable(split) and split not in (None, "decoder", "export"):
        raise ConfigError(f"split = {split!r} is neither 'decoder', 'export' nor a function")
    if isinstance(split, nn.Module):
        raise ConfigError(
            f"split is a {type(split).__name__}; pass a function that is given the model and the names of a "
            "ministage's modules, and returns that ministage's nn.Module"
        )
    refuse_batch_statistics(model.named_modules())
    if split is None and is_causal_lm(model):
        return _split_causal_lm(model, plan, unpack)
    loose = loose_parameters(model, plan)
    alone = len(plan.ministages) == 1
    disorder = _check_modules(model, plan, allow_loose=alone or split != "decoder")
    if callable(split):
        return _split_by_user(model, plan, split, unpack)
    if split == "export":
        return _split_by_export(model, plan, unpack, why_needed="")
    if split == "decoder":
        if is_causal_lm(model):
            raise ConfigError(
                f"split='decoder' is for models that skip missing modules, which {type(model).__name__} does "
                "not; leave split out: a causal LM of transformers is cut between its decoder layers"
            )
        return _split_by_pruning(model, plan, unpack, skeleton=_Decoder(plan, mend=_LEAVE_OUT))
    if alone:
        return _split_by_pruning(model, plan, unpack, skeleton=Skeleton())
    order = sequential_order(model, plan)
    if order is not None:
        if disorder is not None:
            raise disorder
        return _make_parts(model, prune(model, order), plan, Skeleton(), unpack=unpack, packs=True)
    # Whoever runs modules in another order than that in which they are registered may well be right.
    doubt = "" if disorder is None else str(disorder)
    if loose:
        reason = doubt or f"'{loose[0]}' belongs to no ministage"
        return _split_by_export(model, plan, unpack, why_needed=reason)
    decoder = _Decoder(plan)
    parts = _split_by_pruning(model, plan, unpack, skeleton=decoder)
    tried = None if is_proven else decoder.try_tokens()
    if tried is not None and disorder is not None and decoder.runs_otherwise:
        raise disorder
    return parts if tried is None else _split_by_export(model, plan, unpack, why_needed=doubt or tried)


def find_ties(model: nn.Module, plan: Plan) -> tuple[Tie, ...]:
    """Parameters that several ministages share, one entry for each ministage but the owner.

    The lowest ministage owns; of several names in one ministage the first counts. Sharing within
    one ministage is not listed: it ends up in one FSDP unit, which keeps it by itself.
    """
    holders: dict[int, dict[int, str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        module = plan_module(fqn, plan.ministage_of)
        if module is not None:
            holders.setdefault(id(parameter), {}).setdefault(plan.ministage_of[module], fqn)
    ties = []
    for names in holders.values():
        (owner, owner_fqn), *borrowers = sorted(names.items())
        ties += [Tie(owner_fqn, fqn, owner, ministage) for ministage, fqn in borrowers]
    return tuple(ties)


BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d


def refuse_batch_statistics(named_modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises `ConfigError` for a layer whose result depends on how the batch is cut."""
    for name, module in named_modules:
        is_batch, is_instance = isinstance(module, BATCH_NORMS), isinstance(module, INSTANCE_NORMS)
        kind = type(module).__name__.removeprefix("FSDP")
        mends = "put it in eval mode, or use GroupNorm or LayerNorm"
        if is_batch and (module.training or module.running_mean is None):
            raise ConfigError(
                f"model: '{name}' is a {kind} in training mode: its statistics are those "
                f"of a microbatch, so results would depend on the plan; {mends}"
            )
        if is_instance and module.training and module.track_running_stats:
            raise ConfigError(
                f"model: '{name}' is a {kind} that tracks running statistics, which "
                f"would depend on the plan; set track_running_stats=False, {mends}"
            )


# -- what every way needs ------------------------------------------------------------------


def _check_modules(model: nn.Module, plan: Plan, *, allow_loose: bool) -> PlanError | None:
    """Raises `PlanError` unless the plan's modules are those of the model. Returns one where they are, in
    another order than that in which the model registers them: the only one that is known before it runs."""
    planned = list(plan.ministage_of)
    modules = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if n]
    names = [name for name, _ in modules]
    owners = [
        name
        for name, module in [*modules, ("", model)]
        if any(True for _ in module.parameters(recurse=False))
        and not (allow_loose and name not in planned and is_above(name, planned))
    ]
    try:
        validate_modules(plan, names, owners)
    except PlanError as error:
        validate_modules(plan, _in_order_of(planned, names), owners)
        return error
    return None


def _in_order_of(planned: Sequence[str], names: Sequence[str]) -> list[str]:
    """All names, those that are planned in the plan's order."""
    known = iter([name for name in planned if name in set(names)])
    return [next(known) if name in set(planned) else name for name in names]


class _Forward:
    """A part's forward between others: several tensors enter as the tuple that they left as, arguments that
    are not given have the defaults of training, and what the model returns is unpacked."""

    def __init__(
        self,
        inner: Callable[..., Any],
        *,
        packs: bool,
        defaults: Mapping[str, Any],
        unpack: Callable[[Any], Any] | None,
    ) -> None:
        self._inner = inner
        self._packs = packs
        self._defaults = defaults
        self._unpack = unpack

    def __call__(self, *tensors: Tensor, **kwargs: Any) -> Any:
        inputs = (tensors,) if self._packs and len(tensors) > 1 else tensors
        output = self._inner(*inputs, **{**self._defaults, **kwargs})
        return output if self._unpack is None else self._unpack(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        inner = copy.deepcopy(self._inner, memo)
        return _Forward(inner, packs=self._packs, defaults=self._defaults, unpack=self._unpack)


def _make_parts(
    model: nn.Module,
    modules: Sequence[nn.Module],
    plan: Plan,
    skeleton: Skeleton,
    *,
    unpack: Callable[[Any], Any] | None,
    packs: bool = False,
) -> list[ModelPart]:
    parts = []
    for index, module in enumerate(modules):
        is_last = index == len(modules) - 1
        accepts = Keywords(()) if packs else Keywords.of(module.forward)
        defaults = {"use_cache": False} if keeps_cache(module) else {}
        if packs or defaults or (is_last and unpack is not None):
            module.forward = _Forward(  # type: ignore[method-assign]
                module.forward, packs=packs, defaults=defaults, unpack=unpack if is_last else None
            )
        units = separate_units(module, find_units(module, plan.ministages[index].modules))
        parts.append(ModelPart(index, module, units, accepts, name_ministage(plan, index), skeleton))
    skeleton.make_copies(model, modules)
    return parts


# -- a model as it is ----------------------------------------------------------------------


def _split_by_pruning(
    model: nn.Module, plan: Plan, unpack: Callable[[Any], Any] | None, *, skeleton: Skeleton
) -> list[ModelPart]:
    modules = prune(model, [ministage.modules for ministage in plan.ministages])
    parts = _make_parts(model, modules, plan, skeleton, unpack=unpack, packs=is_sequential(model))
    if isinstance(skeleton, _Decoder):
        skeleton.model_parts = parts
    return parts


# -- a causal LM of transformers -----------------------------------------------------------


def _split_causal_lm(model: nn.Module, plan: Plan, unpack: Callable[[Any], Any] | None) -> list[ModelPart]:
    try:
        _check_modules(model, plan, allow_loose=True)
    except PlanError as error:
        raise PlanError(f"{error}{_name_modules(model)}") from error
    try:
        return cut_causal_lm(model, plan, unpack)
    except CannotCut as error:
        if len(plan.ministages) == 1:
            return take_whole(model, plan, unpack)
        return _split_by_export(model, plan, unpack or logits_of, why_needed=str(error))


def _name_modules(model: nn.Module) -> str:
    try:
        return f"; in the order they run in, this model has {show_modules(list_modules(model))}"
    except ConfigError as error:
        return f"; {error}"


# -- TorchTitan's convention ---------------------------------------------------------------


_LEAVE_OUT = "; leave split='decoder' out, and torch.export cuts the model if it can"


class _Decoder(Skeleton):
    """Proves that the pruned copies compute together what the whole model computes."""

    def __init__(self, plan: Plan, *, mend: str = "") -> None:
        """`mend`: what to do where a part fails."""
        super().__init__()
        self._plan = plan
        self._mend = mend
        self.model_parts: list[ModelPart] = []
        self.runs_otherwise = False
        """Whether the whole model was seen to call modules of a ministage after those of a later one."""
        self._proven: tuple[Signature, KwargSpecs] | None = None

    def try_tokens(self) -> str | None:
        """Runs on guessed token ids; returns why the model does not follow the convention, if so."""
        length = self._plan.sequence_length or _GUESSED_SEQUENCE
        try:
            with torch.enable_grad():
                self.bind(Signature((TensorSpec((length,), torch.int64),)), {}, None)
        except Exception as error:
            return first_line(error)
        return None

    def bind(self, inputs: Signature, kwargs: KwargSpecs, param_dtype: torch.dtype | None) -> None:
        """Raises `ConfigError` where the parts do something else than the model."""
        if self._proven == (inputs, kwargs):
            return
        whole, *modules = fake_copies([self.whole, *self.parts], self.mode, all_trainable=True)
        rows = self.probe_rows[0]
        recorder = Recorder({n: whole.get_submodule(n) for part in self.model_parts for n in part.units})
        with self.mode:
            tensors = inputs.zeros(rows)
            run_module(whole, tensors, make_kwargs(kwargs, rows), "the model", recorder)
        home = {name: part.index for part in self.model_parts for name in part.units}
        called = [home[call.name] for call in recorder.calls]
        self.runs_otherwise = called != sorted(called)
        try:
            _, records = run_parts(
                self.model_parts, modules, inputs, kwargs, rows, mode=self.mode, all_trainable=True
            )
        except ConfigError as error:
            raise ConfigError(f"{error}{self._mend}") from error
        hint = (
            "split='decoder' needs a forward that skips missing parts (None) and does nothing else, and a "
            "plan in the order in which modules run"
        )
        compare_calls(self.model_parts, recorder, records, hint)
        outside = sum((r.outside for r in records), Counter())
        for name in recorder.outside.keys() | outside.keys():
            if outside[name] != recorder.outside[name]:
                raise ConfigError(
                    f"outside the modules of the plan the model computes '{name}' "
                    f"{count(recorder.outside[name], 'time')}, its ministages together "
                    f"{count(outside[name], 'time')}; {hint}"
                )
        self._proven = (inputs, kwargs)


# -- the user's own ------------------------------------------------------------------------


def _split_by_user(
    model: nn.Module,
    plan: Plan,
    split: Callable[[nn.Module, tuple[str, ...]], nn.Module],
    unpack: Callable[[Any], Any] | None,
) -> list[ModelPart]:
    modules: list[nn.Module] = []
    for index, ministage in enumerate(plan.ministages):
        module = split(model, ministage.modules)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"split= returned a {type(module).__name__} for {name_ministage(plan, index)}; "
                "return an nn.Module"
            )
        if any(module is other for other in modules):
            raise ConfigError(f"split= returned the same module again for {name_ministage(plan, index)}")
        modules.append(module)
    _check_split(model, plan, modules)
    return _make_parts(model, modules, plan, Skeleton(), unpack=unpack)


def _check_split(model: nn.Module, plan: Plan, modules: Sequence[nn.Module]) -> None:
    """Raises `ConfigError` unless every parameter is in its ministage, under its global name."""
    known = dict(model.named_parameters(remove_duplicate=False))
    held: dict[str, int] = {}
    for index, module in enumerate(modules):
        where = f"split=: {name_ministage(plan, index)}"
        for fqn, parameter in module.named_parameters(remove_duplicate=False):
            if fqn not in known:
                raise ConfigError(
                    f"{where} has a parameter '{fqn}', which the model lacks; keep global names, such as "
                    f"'{next(iter(known))}'"
                )
            if parameter.shape != known[fqn].shape:
                raise ConfigError(
                    f"{where}: '{fqn}' is {list(parameter.shape)}, and {list(known[fqn].shape)} in the model"
                )
            planned = plan_module(fqn, plan.ministage_of)
            home = index if planned is None else plan.ministage_of[planned]
            if home != index or fqn in held:
                other = held.get(fqn, home)
                raise ConfigError(
                    f"{where} has '{fqn}', which belongs to ministage {other}; give it to one ministage"
                )
            held[fqn] = index
    missing = [fqn for fqn in known if fqn not in held]
    if missing:
        planned = plan_module(missing[0], plan.ministage_of)
        home_name = "any ministage" if planned is None else name_ministage(plan, plan.ministage_of[planned])
        raise ConfigError(
            f"split=: {list_few(map(repr, missing), 'parameter')} not in what split returned for {home_name}"
        )


# -- torch.export --------------------------------------------------------------------------


def _split_by_export(
    model: nn.Module, plan: Plan, unpack: Callable[[Any], Any] | None, *, why_needed: str
) -> list[ModelPart]:
    accepts = Keywords.of(model.forward)
    exporter = Exporter(model, plan, unpack=unpack, why_needed=why_needed)
    exporter.make_copies(model, exporter.modules)
    return [
        ModelPart(index, module, (), accepts, name_ministage(plan, index), exporter)
        for index, module in enumerate(exporter.modules)
    ]
