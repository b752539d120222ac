"""Cuts a causal LM of `transformers` between its own modules, and proves it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime.model.boundaries import compare_calls, name_ministage, run_module, run_parts
from zorselike.runtime.model.causal_lm import attend_plainly, find_decoder, is_causal_lm, keep_rotations
from zorselike.runtime.model.decoder_part import MinistageForward, make_ministage
from zorselike.runtime.model.decoder_probe import (
    Flow,
    FlowRecorder,
    with_light_layers,
    with_one_layer_of_each_class,
)
from zorselike.runtime.model.part import Keywords, ModelPart
from zorselike.runtime.model.pruning import find_units, prune, separate_units
from zorselike.runtime.model.signature import KwargSpecs, Signature, TensorSpec, make_kwargs
from zorselike.runtime.model.tracing import Recorder, Skeleton, fake_copies
from zorselike.text.wording import list_few, show_modules

_GUESSED_SEQUENCE = 8
_TRACEABLE_EXPERTS = "batched_mm"
"""Of the ways in which `transformers` computes experts, one whose shapes do not depend on values."""
_OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Asks for what layers of all ministages compute."""
_LAYER_DROPS = ("layerdrop", "decoder_layerdrop")
"""By these keys of a configuration layers are left out at random."""
_ADDS_TO_LOSS = ("output_router_logits", "z_loss_coefficient")
"""By these keys of a configuration the loss that a model computes itself has more than tokens."""


class CannotCut(Exception):
    """This model cannot be cut by its structure; the message says why."""


def list_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that a plan lists for a causal LM of `transformers`, in the order they run in.

    The model may be on the meta device. Raises `ConfigError`, with the reason, for one that is not made of
    decoder layers, or does not run on token ids alone.
    """
    try:
        return tuple(_DecoderSkeleton(model).flow.order)
    except CannotCut as error:
        raise ConfigError(
            f"model: {type(model).__name__} is not made of decoder layers: {error}{_way_to_text(model)}"
        ) from error


def _way_to_text(model: nn.Module) -> str:
    """Of a model for images and the like too, how to have that for text alone; else nothing."""
    causal: Any = model
    if not is_causal_lm(model) or causal.config.get_text_config() is causal.config:
        return ""
    decoder = next((name for name, module in model.named_modules() if module is causal.get_decoder()), "")
    return decoder and (
        "; it has more parts than that for text, which alone can be cut; make a folder of it: "
        "model = AutoModelForCausalLM.from_pretrained(DIR); "
        "text = AutoModelForCausalLM.from_config(model.config.get_text_config()); "
        f"text.model = model.{decoder}; text.lm_head = model.lm_head; text.save_pretrained(FOLDER); and copy "
        "the tokenizer"
    )


def cut_causal_lm(model: nn.Module, plan: Plan, unpack: Callable[[Any], Any] | None) -> list[ModelPart]:
    """The plan's ministages of a causal LM, each with the model's own forward over its modules.

    `unpack`: of the model's output; its logits if None. Raises `CannotCut` where the model's forward needs
    more at a cut than the hidden states, `PlanError` where the plan lists its modules in another order than
    they run in, and `ConfigError` for a model that recomputes layers itself.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "model: gradient checkpointing is on, and what is recomputed is the plan's to say: call "
            'model.gradient_checkpointing_disable() and set recompute = "layer" in the plan\'s groups'
        )
    config: Any = model.config
    for key in _LAYER_DROPS:
        if share := getattr(config, key, 0):
            raise ConfigError(
                f"model: config.{key} = {share} leaves out layers at random, and a ministage cannot know "
                "what others left out; set it to 0 before the model is built"
            )
    if unpack is None:
        _refuse_losses_of_its_own(config)
    skeleton = _DecoderSkeleton(model, plan.sequence_length)
    flow = skeleton.flow
    dealt = _deal(flow, plan)
    for index, own in enumerate(dealt[1:], start=1):
        if flow.order.index(own[0]) < flow.first_cut:
            raise PlanError(
                f"{name_ministage(plan, index)} begins before the first decoder layer; put "
                f"{list_few(flow.order[: flow.first_cut])} into one ministage"
            )
    skeleton.starts = tuple(own[0] for own in dealt[1:])
    try:
        skeleton.require_cuts(flow)
    except CannotCut:
        skeleton.refuse_what_all_layers_compute({})  # This may be why.
        raise
    parts, light = [], []
    for index, (own, following) in enumerate(zip_longest(dealt, dealt[1:])):
        module = make_ministage(model, own, flow, skeleton.forms)
        light.append(with_light_layers(module, skeleton.decoder, skeleton.forms))
        accepts = Keywords.of(module.forward)
        for copy in (module, light[index]):
            _set_forward(
                copy,
                flow,
                entry=own[0] if index else None,
                exit=following[0] if following else None,
                unpack=unpack,
            )
        units = separate_units(module, find_units(module, plan.ministages[index].modules))
        parts.append(ModelPart(index, module, units, accepts, name_ministage(plan, index), skeleton))
    skeleton.model_parts = parts
    whole = with_light_layers(model, skeleton.decoder, skeleton.forms)
    skeleton.make_copies(_set_forward(whole, flow, unpack=unpack), light)
    return parts


def take_whole(model: nn.Module, plan: Plan, unpack: Callable[[Any], Any] | None) -> list[ModelPart]:
    """The one ministage of a causal LM that cannot be cut."""
    (names,) = (ministage.modules for ministage in plan.ministages)
    (module,) = prune(model, [names])
    accepts = Keywords.of(module.forward)
    _set_forward(module, Flow(), unpack=unpack)
    skeleton = Skeleton()
    skeleton.make_copies(model, [module])
    units = separate_units(module, find_units(module, names))
    return [ModelPart(0, module, units, accepts, name_ministage(plan, 0), skeleton)]


def _refuse_losses_of_its_own(config: Any) -> None:
    """Raises `ConfigError` where the loss that a model computes itself is more than that of its logits."""
    text = getattr(config, "get_text_config", lambda: config)()
    for name in _ADDS_TO_LOSS:
        if value := getattr(text, name, None):
            raise ConfigError(
                f"model: config.{name} = {value} adds to the loss of transformers what is left out here; set "
                f"model.config.{name} = {type(value)()}, in a folder in its config.json"
            )


def _set_forward(
    module: nn.Module,
    flow: Flow,
    *,
    entry: str | None = None,
    exit: str | None = None,
    unpack: Callable[[Any], Any] | None = None,
) -> nn.Module:
    module.forward = MinistageForward(  # type: ignore[method-assign]
        module, entry=entry, exit=exit, embedding_width=flow.embedding_width, unpack=unpack
    )
    return module


def _deal(flow: Flow, plan: Plan) -> list[list[str]]:
    """The model's modules by ministage; what the plan names may contain several."""
    order = f"this model runs its modules in the order {show_modules(flow.order)}"
    dealt: list[list[str]] = [[] for _ in plan.ministages]
    current = 0
    for name in flow.order:
        found = [m for planned, m in plan.ministage_of.items() if f"{name}.".startswith(f"{planned}.")]
        if not found:
            raise CannotCut(f"the plan does not name '{name}' as one module")
        if found[0] < current:
            raise PlanError(f"'{name}' is in ministage {found[0]}, before what it follows; {order}")
        current = found[0]
        dealt[current].append(name)
    planned = [name for name in plan.ministage_of if name in flow.order]
    if planned != sorted(planned, key=flow.order.index):
        raise PlanError(f"{name_ministage(plan, 0)} and those after it list modules out of order; {order}")
    empty = [name_ministage(plan, index) for index, own in enumerate(dealt) if not own]
    if empty:
        raise CannotCut(f"{empty[0]} has no module with parameters")
    return dealt


class _DecoderSkeleton(Skeleton):
    """Copies in which decoder layers do not compute; proves that ministages are given what the modules of the
    whole model are given, and that nothing else crosses."""

    def __init__(self, model: nn.Module, length: int | None = None) -> None:
        """Raises `CannotCut` where guessed token ids show that the model is not made of decoder layers."""
        super().__init__()
        self.model_parts: list[ModelPart] = []
        self.starts: tuple[str, ...] = ()
        """The first module of each ministage but the first."""
        self._proven: tuple[Signature, KwargSpecs] | None = None
        decoder = find_decoder(model)
        if isinstance(decoder, str):
            raise CannotCut(decoder)
        self.decoder = decoder
        self._config: Any = model.config
        probed, self.forms = with_one_layer_of_each_class(model, decoder)
        (fake,) = fake_copies([probed], self.mode)
        keep_rotations(fake)
        attend_plainly(fake)
        fake.eval()  # In training some families leave out layers at random.
        config: Any = fake.config
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = _TRACEABLE_EXPERTS
        _set_forward(fake, Flow())
        tokens = Signature((TensorSpec((length or _GUESSED_SEQUENCE,), torch.int64),))
        try:
            self.flow = self._follow(fake, tokens, {}, Recorder({}))
        except ConfigError as error:
            raise CannotCut(str(error)) from error
        flow, self.sample = self.flow, fake
        if idle := [name for name in (*decoder.layers, *decoder.others) if name not in flow.order]:
            raise CannotCut(f"its forward does not call '{idle[0]}'")
        if odd := [name for name in decoder.others if name not in flow.widths and name != flow.order[-1]]:
            raise CannotCut(f"'{odd[0]}' does not return hidden states")

    def _follow(self, model: nn.Module, inputs: Signature, kwargs: KwargSpecs, recorder: Recorder) -> Flow:
        rows = self.probe_rows[0]
        with self.mode, torch.enable_grad():
            tensors = inputs.zeros(rows)
            follower = FlowRecorder(model, self.decoder, tensors)
            with follower.following(self.forms):
                run_module(model, tensors, make_kwargs(kwargs, rows), "the model", recorder)
        return follower.flow

    def make_copies(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        super().make_copies(model, modules)
        for copy in (self.whole, *self.parts):
            keep_rotations(copy)
            attend_plainly(copy)

    def require_cuts(self, flow: Flow) -> None:
        """Raises `CannotCut` where more than hidden states would have to cross."""
        for name in self.starts:
            if name in flow.broken:
                raise CannotCut(f"it cannot be cut before '{name}': {flow.broken[name]}")

    def refuse_what_all_layers_compute(self, kwargs: KwargSpecs) -> None:
        """Raises `ConfigError` where these arguments, or the model's configuration, ask for it."""
        asked = [name for name in _OF_ALL_LAYERS if kwargs.get(name) or self._is_on_by_default(name, kwargs)]
        if self.starts and asked:
            raise ConfigError(
                f"{asked[0]} asks for what layers of all ministages compute, and each ministage has its own "
                f"layers only; leave it out, and set model.config.{asked[0]} = False"
            )

    def bind(self, inputs: Signature, kwargs: KwargSpecs, param_dtype: torch.dtype | None) -> None:
        """Raises `ConfigError` where the parts do something else than the model."""
        if self._proven == (inputs, kwargs):
            return
        hint = "with these arguments; leave them out, or pass split='export'"
        self.refuse_what_all_layers_compute(kwargs)
        whole, *modules = fake_copies([self.whole, *self.parts], self.mode)
        recorder = Recorder({n: whole.get_submodule(n) for part in self.model_parts for n in part.units})
        flow = self._follow(whole, inputs, kwargs, recorder)
        if flow.order != self.flow.order:
            raise ConfigError(f"the model runs its modules in another order {hint}")
        try:
            self.require_cuts(flow)
        except CannotCut as error:
            raise ConfigError(f"{error} {hint}") from error
        rows = self.probe_rows[0]
        _, records = run_parts(self.model_parts, modules, inputs, kwargs, rows, mode=self.mode)
        compare_calls(self.model_parts, recorder, records, hint)
        self._proven = (inputs, kwargs)

    def _is_on_by_default(self, name: str, kwargs: KwargSpecs) -> bool:
        return kwargs.get(name) is None and bool(getattr(self._config, name, False))
