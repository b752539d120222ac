"""What of a model and of a caller's context is refused, or made no part of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RunRanks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zorselike import ConfigError, HeteroPipeline
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.assembly import compile_plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.model import export, partition

pytestmark = pytest.mark.pooled

LEARNING_RATE = 0.1


def make_plan(*modules: tuple[str, ...], zero: int = 2) -> Plan:
    """Two ranks of one group, microbatches of one row."""
    microbatches = tuple(Microbatch(row % 2, row, row + 1) for row in range(4))
    return Plan(4, (Group((0, 1), microbatches, zero=zero),), tuple(Ministage(0, own) for own in modules))


def sum_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def count_rows(targets: Tensor) -> int:
    return len(targets)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)  # type: ignore[arg-type]


def train(
    rank: int, world_size: int, make: Callable[[], nn.Module], plan: Plan, cast: bool = False
) -> dict[str, Tensor]:
    """Three steps' weights; `cast`: inside a caller's autocast."""
    model, (inputs, targets) = make(), batch(model_dtype=next(make().parameters()).dtype)
    with (
        torch.autocast("cpu", enabled=cast),
        HeteroPipeline(model, plan, optimizer=sgd, loss_fn=sum_squares, count_fn=count_rows) as pipe,
    ):
        for _ in range(3):
            pipe.step_global(inputs, targets)
        return pipe.full_state_dict()


def train_alone(
    rank: int, world_size: int, make: Callable[[], nn.Module], cast: bool = False
) -> dict[str, Tensor]:
    """The same without a plan, microbatch by microbatch."""
    model, (inputs, targets) = make(), batch(model_dtype=next(make().parameters()).dtype)
    optimizer = sgd(model.parameters())
    for _ in range(3):
        for row in range(4):
            with torch.autocast("cpu", enabled=cast, cache_enabled=False):
                loss = sum_squares(model(inputs[row : row + 1]), targets[row : row + 1]) / 4
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def batch(model_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(4, 6, generator=generator, dtype=torch.float64).to(model_dtype),
        torch.randn(4, 6, generator=generator, dtype=torch.float64).to(model_dtype),
    )


# -- memory that is given back -----------------------------------------------------------------


class Beside(nn.Module):
    """Hands on a view of a parameter beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.scale.expand(len(x), -1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        hidden: Tensor = self.layer(pair[0] * pair[1])
        return hidden


def hands_on_a_view() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Beside(), Scaled()).double()


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("modules", [(("0", "1"),), (("0",), ("1",))])
def test_a_view_of_a_parameter_outlasts_its_unit(
    modules: tuple[tuple[str, ...], ...], zero: int, run_ranks: RunRanks
) -> None:
    """Gathered parameters are given back while the next layer still reads what it was handed."""
    (expected,) = run_ranks(train_alone, 1, hands_on_a_view)
    found = run_ranks(train, 2, hands_on_a_view, make_plan(*modules, zero=zero))[0]
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def in_float32() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.parametrize("zero", [2, 3])
def test_a_callers_autocast_casts_each_microbatch_s_weights(zero: int, run_ranks: RunRanks) -> None:
    """Its cache would hand the first microbatch's casts, and where their gradients go, to the others."""
    (expected,) = run_ranks(train_alone, 1, in_float32, True)
    found = run_ranks(train, 2, in_float32, make_plan(("0", "1", "2"), zero=zero), True)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=5e-4)
    assert torch.is_autocast_cache_enabled()


# -- what is refused ---------------------------------------------------------------------------


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def hook_root(model: nn.Sequential) -> None:
    model.register_forward_hook(lambda module, args, output: output * 2)


def hook_weight(model: nn.Sequential) -> None:
    model[1].weight.register_hook(lambda gradient: gradient * 0)


def hook_accumulated(model: nn.Sequential) -> None:
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def set_embedding(model: nn.Sequential, **settings: object) -> None:
    model[0] = nn.Embedding(5, 6, **settings)  # type: ignore[arg-type]


def set_weight(model: nn.Sequential, value: Tensor) -> None:
    model[1].extra = nn.Parameter(value)


def compile_in_place(model: nn.Sequential, name: str) -> None:
    model.get_submodule(name).compile()


def script_layer(model: nn.Sequential) -> None:
    model[1] = torch.jit.script(model[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (script_layer, "'1' is compiled by torch.jit"),
        (partial(compile_in_place, name=""), "the Sequential itself is compiled in place"),
        (partial(compile_in_place, name="1"), "'1' is compiled in place"),
        (hook_root, "the Sequential itself has hooks"),
        (hook_weight, "'1.weight' has a gradient hook"),
        (hook_accumulated, "'1.weight' has a gradient hook"),
        (partial(set_embedding, max_norm=1.0), "'0' is an embedding with max_norm"),
        (partial(set_embedding, scale_grad_by_freq=True), "'0' is an embedding with scale_grad_by_freq"),
        (partial(set_embedding, sparse=True), "'0' is an embedding with sparse"),
        (partial(set_weight, value=torch.ones(())), "'1.extra' is a scalar"),
        (partial(set_weight, value=torch.ones(2, dtype=torch.complex64)), "'1.extra' is of torch.complex64"),
        (partial(set_weight, value=torch.ones(0, 3)), "'1.extra' is trained and has no elements"),
        (partial(set_weight, value=torch.ones(2, 3).t()), "'1.extra' is not contiguous"),
    ],
)
def test_models_that_would_not_train_as_alone_are_refused(
    change: Callable[[nn.Sequential], None], said: str
) -> None:
    model, plan = linears(), make_plan(("0",), ("1", "2"))
    compile_plan(model, plan)
    change(model)
    with pytest.raises(ConfigError, match=said):
        compile_plan(model, plan)


def use_twice(rank: int, world_size: int, zero: int) -> str:
    model, plan = linears(), make_plan(("0", "1", "2"), zero=zero)
    HeteroPipeline(model, plan).close()
    with pytest.raises(ConfigError) as refused:
        HeteroPipeline(model, plan)
    return str(refused.value)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_that_another_pipeline_has_is_refused(zero: int, run_ranks: RunRanks) -> None:
    for said in run_ranks(use_twice, 2, zero):
        assert "'0' is sharded already, by another pipeline" in said


def test_a_hook_of_the_model_runs_once_where_there_is_one_ministage() -> None:
    model = linears()
    hook_root(model)
    compile_plan(model, make_plan(("0", "1", "2")))


def construct_wrongly(rank: int, world_size: int, arguments: dict[str, Any]) -> str:
    given = {"plan": make_plan(("0", "1", "2")), **arguments}
    with pytest.raises(ConfigError) as refused:
        HeteroPipeline(linears(), given.pop("plan"), **given)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plan": None}, "plan is a NoneType; give a zorselike.Plan"),
        ({"plan": {"version": 1}}, "plan is a dict; give a zorselike.Plan"),
        ({"max_norm": "1"}, "max_norm = '1' is no number"),
        ({"max_norm": float("nan")}, "max_norm = nan clips nothing"),
        ({"max_norm": float("inf")}, "max_norm = inf clips nothing"),
        ({"max_norm": 0}, "max_norm = 0 clips nothing"),
        ({"clip": "ministage"}, "clip = 'ministage' clips nothing without max_norm"),
        ({"seed": "x"}, "seed = 'x' is no whole number"),
        ({"seed": 1.5}, "seed = 1.5 is no whole number"),
        ({"silence_s": "never"}, "silence_s = 'never'; give seconds above 0"),
        ({"silence_s": 0}, "silence_s = 0; give seconds above 0"),
        ({"device": "mps"}, "device = 'mps': ranks compute on 'cpu' or 'cuda'"),
        ({"device": "gpu"}, "device = 'gpu': ranks compute on 'cpu' or 'cuda'"),
        ({"loss_fn": "mse"}, "loss_fn = 'mse' is no function"),
        ({"count_fn": 4}, "count_fn = 4 is no function"),
        ({"unpack": 0}, "unpack = 0 is no function"),
        ({"optimizer": "adamw"}, "optimizer is of type str; give what makes one of a ministage's parameters"),
    ],
)
def test_arguments_of_other_types_are_refused(
    arguments: dict[str, Any], said: str, run_ranks: RunRanks
) -> None:
    (message,) = run_ranks(construct_wrongly, 1, arguments)
    assert message.startswith(said)


def count_wrongly(rank: int, world_size: int, counted: object) -> str:
    group = Group((0,), tuple(Microbatch(0, row, row + 1) for row in range(4)))
    plan = Plan(4, (group,), (Ministage(0, ("0", "1", "2")),))
    with (
        HeteroPipeline(
            in_float32(), plan, optimizer=sgd, loss_fn=sum_squares, count_fn=lambda _: counted
        ) as pipe,
        pytest.raises(ConfigError) as refused,
    ):
        pipe.step_global(*batch(torch.float32))
    return str(refused.value)


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        (torch.ones(3), "a tensor of shape [3]"),
        (None, "a NoneType"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (-1, "-1"),
    ],
)
def test_a_count_that_is_no_number_of_targets_is_refused(
    counted: object, said: str, run_ranks: RunRanks
) -> None:
    (message,) = run_ranks(count_wrongly, 1, counted)
    assert (
        message == f"count_fn must return one number, how many targets loss_fn sums over; it returned {said}"
    )


def train_in_inference_mode(rank: int, world_size: int) -> tuple[float, float, str]:
    """Losses without and with a caller's inference mode, and what is said to a model that was made in it."""
    losses = []
    for mode in (False, True):
        model, (inputs, targets) = in_float32(), batch(torch.float32)
        with torch.inference_mode(mode):
            pipe = HeteroPipeline(
                model, make_plan(("0", "1", "2")), optimizer=sgd, loss_fn=sum_squares, count_fn=count_rows
            )
            pipe.step_global(inputs, targets)
            losses.append(pipe.step_global(inputs, targets).loss)
            pipe.close()
    with torch.inference_mode(), pytest.raises(ConfigError) as refused:
        HeteroPipeline(in_float32(), make_plan(("0", "1", "2")))
    return losses[0], losses[1], str(refused.value)


def test_a_callers_inference_mode_is_no_part_of_a_pipeline(run_ranks: RunRanks) -> None:
    for plain, inside, said in run_ranks(train_in_inference_mode, 2):
        assert inside == plain
        assert said.startswith("model: '0.weight' was made in torch.inference_mode")


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


rounded = Rounded.apply
"""Bound once, as many libraries write it."""


class Net(nn.Module):
    """Cut by export alone."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.what = what
        if what == "module":
            self.a.register_full_backward_hook(lambda module, given, taken: None)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.a(x) * 2
        if self.what == "function":
            hidden = Rounded.apply(hidden)  # type: ignore[no-untyped-call]
        if self.what == "bound":
            hidden = rounded(hidden)
        if self.what == "tensor" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        found: Tensor = self.b(hidden)
        return found


def refuse_alone(rank: int, world_size: int, what: str) -> str:
    group = Group((0,), tuple(Microbatch(0, row, row + 1) for row in range(4)))
    plan = Plan(4, (group,), (Ministage(0, ("a",)), Ministage(0, ("b",))))
    apply, register = torch.autograd.Function.apply, Tensor.register_hook
    with pytest.raises(ConfigError) as caught:
        train(rank, world_size, partial(Net, what), plan)
    assert torch.autograd.Function.apply == apply and Tensor.register_hook is register
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("function", "the backward of Rounded, an autograd.Function, would be lost"),
        ("bound", "the backward of Rounded, an autograd.Function, would be lost"),
        ("tensor", "a tensor's gradient hook, registered in a forward, would be lost"),
        ("module", "'a' has a backward hook, which would be lost"),
    ],
)
def test_backwards_that_export_would_lose_are_refused(what: str, said: str, run_ranks: RunRanks) -> None:
    (message,) = run_ranks(refuse_alone, 1, what)
    assert said in message and "torch.export cannot cut this model" in message


def train_by_export(rank: int, world_size: int) -> str:
    """A function whose backward loses nothing, and another thread meanwhile."""
    group = Group((0,), tuple(Microbatch(0, row, row + 1) for row in range(4)))
    plan = Plan(4, (group,), (Ministage(0, ("a",)), Ministage(0, ("b",))))
    name = f"{Rounded.__module__}.{Rounded.__qualname__}"
    with mock.patch.object(export, "_SAME_BACKWARD", frozenset({name})):
        train(rank, world_size, partial(Net, "function"), plan)
    with export._refusing_own_backwards(nn.Linear(1, 1)), ThreadPoolExecutor(1) as thread:
        x = torch.ones(2, requires_grad=True)
        assert thread.submit(Rounded.apply, x).result().requires_grad
        thread.submit(x.register_hook, lambda gradient: gradient).result()
        with pytest.raises(export.CannotCut):
            Rounded.apply(x)  # type: ignore[no-untyped-call]
    with pytest.raises(export.CannotCut, match="the model has a backward hook"):
        layer = nn.Linear(1, 1)
        layer.register_full_backward_hook(lambda module, given, taken: None)
        with export._refusing_own_backwards(layer):
            pass
    return "trained"


def test_what_export_keeps_and_what_others_compute_meanwhile(run_ranks: RunRanks) -> None:
    assert run_ranks(train_by_export, 1) == ["trained"]


class Loose(nn.Module):
    """Has a parameter beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x) * self.scale)
        return found


def unfreeze_loose(rank: int, world_size: int) -> str:
    group = Group((0,), (Microbatch(0, 0, 4),))
    plan = Plan(4, (group,), (Ministage(0, ("a",)), Ministage(0, ("b",))))
    inputs, targets = batch(torch.float32)
    with HeteroPipeline(Loose(), plan, optimizer=sgd, loss_fn=sum_squares, count_fn=count_rows) as pipe:
        pipe.step_global(inputs, targets)
        for ministage in pipe._assembly.ministages.values():
            if isinstance(ministage.module._parameters.get("scale"), nn.Parameter):
                ministage.module.scale.requires_grad_(True)
        with pytest.raises(ConfigError) as caught:
            pipe.step_global(inputs, targets)
        return str(caught.value)


def test_parameters_beside_layers_stay_frozen_too(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(unfreeze_loose, 1)
    assert message.startswith("'scale' was frozen")


def change_later(rank: int, world_size: int) -> list[str]:
    """What some changes between steps say."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 6)).double()
    model[0].requires_grad_(False)
    group = Group((0,), (Microbatch(0, 0, 4),))
    said = []
    inputs, targets = batch(torch.float64)
    with HeteroPipeline(
        model,
        Plan(4, (group,), (Ministage(0, ("0", "1", "2")),)),
        optimizer=sgd,
        loss_fn=sum_squares,
        count_fn=count_rows,
    ) as pipe:
        model.train()
        pipe.evaluate_global(inputs, targets)  # In eval mode whatever it was.
        model.eval()
        for change, back in (
            (model.train, model.eval),
            (partial(model[0].requires_grad_, True), partial(model[0].requires_grad_, False)),
            (partial(model[2].requires_grad_, False), partial(model[2].requires_grad_, True)),
        ):
            pipe.step_global(inputs, targets)
            change()
            with pytest.raises(ConfigError) as caught:
                pipe.step_global(inputs, targets)
            said.append(str(caught.value))
            back()
        model[2].requires_grad_(False)  # As peft does to adapters that it switches off for a time.
        pipe.evaluate_global(inputs, targets)
        model[2].requires_grad_(True)
        pipe.step_global(inputs, targets)
    return said


def test_what_may_not_change_between_steps(run_ranks: RunRanks) -> None:
    ((norm, frozen, trained),) = run_ranks(change_later, 1)
    assert "'1' is a BatchNorm1d in training mode" in norm
    assert "'0.weight' was frozen when this pipeline was made" in frozen
    assert "'2.weight' was trained when this pipeline was made, and now requires no gradient" in trained


def test_a_batch_norm_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'1' is a BatchNorm1d in training mode"):
        partition.refuse_batch_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).named_modules())


def refuse_optimizer(rank: int, world_size: int, optimizer: Callable[[object], Any]) -> str:
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("0", "1", "2")),))
    with pytest.raises(ConfigError) as caught:
        HeteroPipeline(in_float32(), plan, optimizer=optimizer)
    return str(caught.value)


def of_others(named_parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(own.shape)) for _, own in named_parameters])


def with_an_empty_group(named: Any) -> torch.optim.Optimizer:
    vectors = [pair for pair in named if pair[1].dim() < 1]
    return torch.optim.SGD([{"params": named}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.Adafactor, "torch.optim.Adafactor does not step on sharded parameters"),
        (print, "returned a NoneType, and no torch.optim.Optimizer"),
        (of_others, "the SGD that was made has none of the parameters that it was given"),
        (
            with_an_empty_group,
            "of its groups for ministage 0 some have (name, parameter) pairs and others do",
        ),
    ],
)
def test_what_cannot_step_on_shards_is_refused(
    optimizer: Callable[[object], Any], said: str, run_ranks: RunRanks
) -> None:
    for message in run_ranks(refuse_optimizer, 1, optimizer):
        assert said in message


def train_none(rank: int, world_size: int) -> None:
    plan = Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("0", "1", "2")),))
    HeteroPipeline(
        in_float32(), plan, optimizer=lambda _: torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    ).close()


def test_what_is_held_in_place_of_no_parameter_is_no_mistake(run_ranks: RunRanks) -> None:
    run_ranks(train_none, 1)


class Before(nn.Module):
    """Activates what it is given in place."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.activate, self.layer = nn.SiLU(inplace=inplace), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.activate(x))
        return hidden


def refuse_in_place(rank: int, world_size: int) -> str:
    group = Group((0,), tuple(Microbatch(0, row, row + 1) for row in range(4)))
    plan = Plan(4, (group,), (Ministage(0, ("0", "1")), Ministage(0, ("2",))))

    def make(inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), Before(inplace=inplace), nn.Linear(6, 6))

    train(rank, world_size, partial(make, False), plan)
    with pytest.raises(ConfigError) as caught:
        train(rank, world_size, partial(make, True), plan)
    return str(caught.value)


def test_a_layer_that_changes_its_input_in_place_is_refused(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(refuse_in_place, 1)
    assert "'1' changes its input in place" in message and "inplace=True" in message


def lose(rank: int, world_size: int) -> list[str]:
    """What is said of losses that are more than a number, or none."""
    said = []
    plan = Plan(4, (Group((0,), (Microbatch(0, 0, 4),)),), (Ministage(0, ("0",)),))
    for given in (lambda loss: (loss, 0), lambda loss: {"loss": loss}, lambda loss: loss.repeat(2), float):
        with HeteroPipeline(
            nn.Sequential(nn.Linear(6, 6)),
            plan,
            optimizer=sgd,
            loss_fn=lambda outputs, targets, given=given: given(sum_squares(outputs, targets)),
            count_fn=count_rows,
        ) as pipe:
            with pytest.raises(ConfigError) as caught:
                pipe.step_global(*batch(torch.float32))
            said.append(str(caught.value))
    return said


def test_a_loss_that_is_no_number_is_refused(run_ranks: RunRanks) -> None:
    (said,) = run_ranks(lose, 1)
    for text, given in zip(said, ("a tuple", "a dict", "a tensor of shape [2]", "a float"), strict=True):
        assert text == (
            "loss_fn must return one number, the sum of the losses (reduction='sum'); it returned " + given
        )


def count(rank: int, world_size: int) -> str:
    """What is said of targets in a dictionary, with a loss of the caller's own."""
    inputs, targets = batch(torch.float32)
    plan = Plan(4, (Group((0,), (Microbatch(0, 0, 4),)),), (Ministage(0, ("0",)),))
    model, loss_fn = nn.Sequential(nn.Linear(6, 6)), lambda outputs, own: sum_squares(outputs, own["y"])
    with HeteroPipeline(model, plan, optimizer=sgd, loss_fn=loss_fn) as pipe:
        with pytest.raises(ConfigError) as caught:
            pipe.step_global(inputs, {"y": targets})
        return str(caught.value)


def test_targets_in_a_dictionary_ask_for_a_count(run_ranks: RunRanks) -> None:
    (said,) = run_ranks(count, 1)
    assert said.startswith("targets is a dict, ") and said.endswith(
        "pass count_fn, which returns how many targets loss_fn sums over"
    )


class KnowsTargets(nn.Module):
    """Returns the logits of all positions where it is given targets, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.tok(inputs)
        if targets is None:
            return self.head(hidden[:, -1:]), None
        logits = self.head(hidden)
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_with_targets(rank: int, world_size: int) -> list[float]:
    """The loss of an evaluation and of a step, and that which the model computes by itself."""
    torch.manual_seed(3)
    model, tokens = KnowsTargets(), torch.arange(12).view(4, 3) % 6
    own = model(tokens, tokens)[1].item()
    with HeteroPipeline(model, make_plan(("tok", "head")), optimizer=sgd, unpack=itemgetter(0)) as pipe:
        return [
            own,
            pipe.evaluate_global(tokens, tokens, targets=tokens).loss,
            pipe.step_global(tokens, tokens, targets=tokens).loss,
        ]


def test_a_model_may_name_an_argument_targets(run_ranks: RunRanks) -> None:
    for own, *losses in run_ranks(train_with_targets, 2):
        assert losses == pytest.approx([own, own], rel=1e-6)


def test_outputs_that_token_cross_entropy_cannot_take() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"are \[2, 1, 6\] and targets \[2, 3\].*logits of all positions"):
        token_cross_entropy(torch.zeros(2, 1, 6), tokens)
    with pytest.raises(ConfigError, match=r"returns a tuple.*unpack=.*loss_fn="):
        token_cross_entropy((torch.zeros(2, 3, 6), None), tokens)  # type: ignore[arg-type]


class Noted(nn.Module):
    """Says on its parameters which are to decay, as state-space models do; its head is tied to its start."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.c.weight = self.a.weight
        for linear in (self.a, self.b):
            linear.weight.no_decay = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


def look_at_notes(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}

    def make(named: Any) -> torch.optim.Optimizer:
        found.update({name: getattr(parameter, "no_decay", False) for name, parameter in named})
        return sgd(parameter for _, parameter in named)

    with torch.device(arguments.get("device", "cpu")):
        model = nn.Sequential(OrderedDict(a=nn.Linear(6, 6), m=Noted(), z=nn.Linear(6, 6)))
    plan = make_plan(("a", "m"), ("z",), zero=arguments.get("zero", 2))
    HeteroPipeline(model, plan, optimizer=make, param_dtype=arguments.get("dtype")).close()
    return found


@pytest.mark.parametrize("arguments", [{}, {"dtype": torch.bfloat16, "device": "meta"}, {"zero": 0}])
def test_what_a_model_notes_on_parameters_reaches_the_optimizer(
    arguments: dict[str, Any], run_ranks: RunRanks
) -> None:
    for found in run_ranks(look_at_notes, 2, arguments):
        assert [name for name, noted in found.items() if noted] == ["m.a.weight", "m.b.weight"]
        assert len(found) == 9
