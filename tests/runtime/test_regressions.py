"""Mistakes that the runtime once made: wrong numbers, hangs, and errors that told nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RunRanks
from tiny import DIM, VOCABULARY, Case, Decoder, Layer, adamw, module_names
from torch import Tensor, nn

from zorselike import HeteroPipeline, initialize
from zorselike.plan import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.alarm.failure import State, find_mismatch
from zorselike.runtime.loss import check_additive, token_cross_entropy

pytestmark = pytest.mark.pooled

Make = Callable[[], nn.Module]


def two_groups(*modules: tuple[str, ...], zero: tuple[int, int] = (2, 2)) -> Plan:
    """Ranks 2 and 0, then rank 1; ministages in turn."""
    first = Group((2, 0), (Microbatch(0, 0, 2), Microbatch(2, 2, 5)), zero=zero[0])
    second = Group((1,), (Microbatch(1, 0, 5),), zero=zero[1])
    return Plan(5, (first, second), tuple(Ministage(i % 2, names) for i, names in enumerate(modules)))


def one_group(*modules: tuple[str, ...], zero: int = 2) -> Plan:
    group = Group((1, 0), (Microbatch(0, 0, 2), Microbatch(1, 2, 5)), zero=zero)
    return Plan(5, (group,), tuple(Ministage(0, names) for names in modules))


def batch(step: int) -> tuple[Tensor, Tensor]:
    return Case(one_group(("all",)), 1).batch(step)


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def train_single(rank: int, world_size: int, make: Make) -> tuple[list[float], dict[str, Tensor]]:
    model = initialize(on_meta(make), seed=0)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(3):
        inputs, targets = batch(step)
        loss = token_cross_entropy(model(inputs), targets) / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(
    rank: int, world_size: int, make: Make, plans: Sequence[Plan]
) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for plan in plans:
        pipe = HeteroPipeline(on_meta(make), plan, optimizer=adamw)
        losses = [pipe.step_global(*batch(step)).loss for step in range(3)]
        found.append((losses, pipe.full_state_dict()))
        pipe.close()
    return found


def assert_exact(run_ranks: RunRanks, make: Make, *plans: Plan) -> None:
    """`plans`: over equally many ranks."""
    ((losses, state),) = run_ranks(train_single, 1, make)
    found = run_ranks(train, plans[0].num_ranks, make, plans)[0]
    for plan, (found_losses, found_state) in zip(plans, found, strict=True):
        assert found_losses == pytest.approx(losses, abs=1e-12), plan
        assert found_state.keys() == state.keys(), plan
        for name, tensor in state.items():
            assert torch.allclose(found_state[name], tensor, rtol=0, atol=1e-10), (name, plan)


# -- weights that are used twice -------------------------------------------------------------------


class TwiceTied(nn.Module):
    """Uses one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(DIM, VOCABULARY, bias=False)
        self.v = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(self.w(x), -1) @ self.w.weight + torch.tanh(self.v(x)) @ self.v.weight


def tied_everywhere(is_frozen: bool = False) -> nn.Module:
    """One weight in three modules, two names in one of them; others between layers."""
    layers = [Layer() for _ in range(3)]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, DIM),
        layers[0],
        TwiceTied(),
        *layers[1:],
        nn.Linear(DIM, VOCABULARY, bias=False),
    ).double()
    model[2].w.weight = model[2].v.weight = model[5].weight = model[0].weight  # type: ignore[union-attr,assignment]
    model[4].up.weight = model[1].up.weight  # type: ignore[union-attr]
    model[4].down = model[3].down
    model[0].weight.requires_grad_(not is_frozen)  # type: ignore[operator,union-attr]
    return model


def test_a_weight_under_several_names_in_several_ministages(run_ranks: RunRanks) -> None:
    cuts = (("0",), ("1", "2"), ("3",), ("4", "5"))
    assert_exact(run_ranks, tied_everywhere, *(two_groups(*cuts, zero=z) for z in ((2, 3), (3, 0), (0, 1))))


def test_a_frozen_tie_beside_one_that_trains(run_ranks: RunRanks) -> None:
    plan = two_groups(("0",), ("1", "2"), ("3",), ("4", "5"))
    assert_exact(run_ranks, lambda: tied_everywhere(is_frozen=True), plan)


def test_modules_of_one_ministage_share_weights(run_ranks: RunRanks) -> None:
    names = tuple(module_names(3))
    cuts = ((names,), (names[:3], names[3:]))
    plans = [one_group(*cut, zero=zero) for cut in cuts for zero in range(4)]
    assert_exact(run_ranks, lambda: Decoder(3, tied=True).double(), *plans)


# -- several modules that no gradient leaves ------------------------------------------------------


class TwoEmbeddings(nn.Module):
    """Of tokens and of positions, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(4, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.head is not None else x


def test_zero_3_reduces_several_embeddings_in_one_order(run_ranks: RunRanks) -> None:
    """Where one rank has fewer microbatches: its reductions met the others' in another order."""
    microbatches = (Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 5))
    first = ("tokens", "positions", "layers.0")
    plan = Plan(
        5,
        (Group((1, 0), microbatches, zero=3),),
        (Ministage(0, first), Ministage(0, ("layers.1", "head"))),
    )
    assert_exact(run_ranks, lambda: TwoEmbeddings().double(), plan)


class Repeated(nn.Module):
    """One layer, applied three times."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Layer()] * 3)
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers:
            h = layer(h)
        return self.output(h) if self.output is not None else h


def test_one_layer_applied_several_times(run_ranks: RunRanks) -> None:
    plan = two_groups(("tok_embeddings", "layers"), ("output",))
    assert_exact(run_ranks, lambda: Repeated().double(), plan)


class LooselyTied(nn.Module):
    """Holds a module's weight as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layer = Layer()
        self.head = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embedding(x)) @ self.head.t()


def test_a_parameter_of_the_model_that_a_module_shares(run_ranks: RunRanks) -> None:
    assert_exact(run_ranks, lambda: LooselyTied().double(), one_group(("embedding", "layer")))


# -- dtypes ----------------------------------------------------------------------------------------

NAMES = module_names(2)
PLAN = two_groups(tuple(NAMES[:2]), tuple(NAMES[2:]))


def plain() -> nn.Module:
    return Decoder(2).double()


def build_mixed(rank: int, world_size: int) -> str:
    model = on_meta(lambda: Decoder(2).bfloat16())
    model.get_submodule("layers.1.norm").float()
    try:
        HeteroPipeline(model, PLAN)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_two_dtypes_in_one_unit_are_refused_by_name(run_ranks: RunRanks) -> None:
    for message in run_ranks(build_mixed, 3):
        assert "'layers.1'" in message and "bfloat16 ('layers.1.up.weight')" in message
        assert "param_dtype" in message


def _note_dtype(seen: list[torch.dtype], original: Any, *args: Any, **kwargs: Any) -> Any:
    seen += [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return original(*args, **kwargs)


def look_at_reductions(rank: int, world_size: int) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # torch 2.13 renamed it
            original = getattr(torch.distributed, name, None)
            if original is not None:
                patch.setattr(torch.distributed, name, partial(_note_dtype, seen, original))
        with HeteroPipeline(on_meta(lambda: Decoder(2).bfloat16()), one_group(tuple(NAMES))) as pipe:
            pipe.step_global(*batch(0))
    return seen


def test_a_bf16_model_is_reduced_in_fp32(run_ranks: RunRanks) -> None:
    for dtypes in run_ranks(look_at_reductions, 2):
        assert dtypes and set(dtypes) == {torch.float32}


# -- calls -----------------------------------------------------------------------------------------


def call_within(rank: int, world_size: int) -> list[list[float]]:
    """Losses by ZeRO stage."""
    losses: list[list[float]] = []
    for zero in range(4):
        plan = two_groups(tuple(NAMES[:2]), tuple(NAMES[2:]), zero=(zero, zero))
        with HeteroPipeline(on_meta(plain), plan, optimizer=adamw) as pipe:
            losses.append([])
            for step in range(3):
                with torch.inference_mode():
                    pipe.evaluate_global(*batch(step))
                with torch.inference_mode(step == 1), torch.no_grad():
                    losses[-1].append(pipe.step_global(*batch(step)).loss)
    return losses


def test_a_callers_no_grad_and_inference_mode_change_nothing(run_ranks: RunRanks) -> None:
    ((losses, _),) = run_ranks(train_single, 1, plain)
    for found in run_ranks(call_within, 3):
        for zero, of_zero in enumerate(found):
            assert of_zero == pytest.approx(losses, abs=1e-12), zero


def refused_later(rank: int, world_size: int, what: str) -> tuple[str, float]:
    """What a mistake says in the second step, and the loss of the step after it."""
    message = "not refused"
    with HeteroPipeline(on_meta(plain), one_group(tuple(NAMES)), optimizer=adamw) as pipe:
        pipe.step_global(*batch(0))
        inputs, targets = batch(1)
        try:
            if what == "keyword":
                pipe.step_global(inputs, targets, maks=torch.ones(5))
            else:
                pipe.step(inputs[pipe.input_rows], targets[pipe.target_rows].numpy())
        except ConfigError as error:
            message = str(error)
        return message, pipe.step_global(inputs, targets).loss


@pytest.mark.parametrize(("what", "expected"), [("keyword", "'maks'"), ("array", "targets: a ndarray")])
def test_a_mistake_in_a_later_step_is_refused_and_changes_nothing(
    what: str, expected: str, run_ranks: RunRanks
) -> None:
    ((losses, _),) = run_ranks(train_single, 1, plain)
    for message, loss in run_ranks(refused_later, 2, what):
        assert expected in message
        assert loss == pytest.approx(losses[1], abs=1e-12)


def linear_layers() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCABULARY))


def lose_in_step(rank: int, world_size: int, what: str) -> None:
    """What would train on wrong numbers, or wait for ever."""

    def detached(outputs: Tensor, targets: Tensor) -> Tensor:
        return token_cross_entropy(outputs.detach(), targets)

    loss_fn = detached if what == "detached" else None
    inputs, targets = batch(0)
    plan = PLAN
    make: Make = partial(Decoder, 2)
    if what == "autocast":  # changes the dtype of what a linear layer returns
        plan, make = two_groups(("0", "1"), ("2",)), linear_layers
    with HeteroPipeline(on_meta(make), plan, loss_fn=loss_fn) as pipe:
        pipe.evaluate_global(inputs, targets)
        if what == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                pipe.step_global(inputs, targets)
        pipe.step_global(inputs, targets)
        match what, rank:
            case "state", 1:
                pipe.full_state_dict()
            case "evaluate", 1:
                pipe.evaluate_global(inputs, targets).loss  # noqa: B018
            case "close", 1:
                pipe.close()
        pipe.step_global(inputs, targets).loss  # noqa: B018


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("detached", "loss without a gradient"),
        ("autocast", "when its shapes were found"),
        ("state", "rank 1 failed first, in full_state_dict: it called full_state_dict() where rank"),
        ("evaluate", "it called evaluate() where rank"),
        ("close", "it called close() where rank"),
    ],
)
def test_what_cannot_go_on_ends_every_rank_with_its_reason(
    what: str, expected: str, run_ranks: RunRanks
) -> None:
    for end in run_ranks(lose_in_step, 3, what, allow_exit=True):
        assert end.code != 0
        assert expected in end.last_line, end.stderr[-2000:]


def test_the_odd_call_is_found_by_its_round() -> None:
    step, late = State("1F0", 3, call="step", called_in=3), State("", 4, call="step", called_in=3)
    assert find_mismatch({0: step, 1: late, 2: State("2F0", 4, call="evaluate", called_in=4)}) is None
    failure = find_mismatch({0: step, 1: late, 2: State("", 4, call="evaluate", called_in=3)})
    assert failure is not None and failure.rank == 2
    assert "evaluate() where ranks 0 and 1 called step()" in failure.reason


def test_of_two_calls_the_one_that_is_no_step_is_the_odd_one() -> None:
    """The third rank is still in the round before."""
    behind = State("0B0", 3, call="step", called_in=2)
    close, step = State("", 4, call="close", called_in=3), State("0UNSHARD", 3, call="step", called_in=3)
    failure = find_mismatch({0: behind, 1: close, 2: step})
    assert failure is not None and failure.rank == 1
    assert "it called close() where rank 2 called step()" in failure.reason
    failure = find_mismatch({0: behind, 1: step, 2: close})
    assert failure is not None and failure.rank == 2


class Skips(Decoder):
    """Leaves out a layer now and then, which a trace does not show."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for name, layer in self.layers.items():
            if name != "1" or type(h) is not Tensor or h.shape[0] == 2:
                h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def skip_layer(rank: int, world_size: int) -> None:
    names = module_names(3)
    with HeteroPipeline(on_meta(lambda: Skips(3)), one_group(tuple(names), zero=3)) as pipe:
        pipe.step_global(*batch(0))


def test_zero_3_refuses_a_forward_that_leaves_out_a_layer(run_ranks: RunRanks) -> None:
    for end in run_ranks(skip_layer, 2, allow_exit=True):
        assert end.code != 0
        assert "left out 'layers.1'" in end.last_line and "zero = 2" in end.last_line, end.stderr[-2000:]


# -- the loss --------------------------------------------------------------------------------------


def mean_of_one_row(rank: int, world_size: int) -> str:
    outputs, targets = torch.randn(1, 4, VOCABULARY), torch.arange(4)[None]
    check_additive(token_cross_entropy, lambda t: (t != -100).sum(), outputs, targets)
    try:
        check_additive(lambda o, t: token_cross_entropy(o, t) / t.numel(), torch.numel, outputs, targets)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_mean_is_found_with_one_row_too(run_ranks: RunRanks) -> None:
    assert "reduction='sum'" in run_ranks(mean_of_one_row, 1)[0]


@pytest.mark.parametrize("offload", [(), ("activations",)])
def test_a_graph_is_not_captured_inside_a_recomputed_forward(
    offload: tuple[str, ...], run_ranks: RunRanks
) -> None:
    """Graphs are made when a row count first comes; what that saves is no layer's."""
    rows = (Microbatch(0, 0, 1), Microbatch(0, 1, 2), Microbatch(0, 2, 5))
    group = Group((0,), rows, recompute="layer", offload=offload)
    names = module_names(2)
    plan = Plan(5, (group,), (Ministage(0, tuple(names[:2])), Ministage(0, tuple(names[2:]))))
    ((losses, state),) = run_ranks(train_single, 1, double_decoder)
    found_losses, found_state = run_ranks(train_exported, 1, plan)[0]
    assert found_losses == pytest.approx(losses, abs=1e-12)
    for name, tensor in state.items():
        assert torch.allclose(found_state[name], tensor, rtol=0, atol=1e-10), name


def double_decoder() -> nn.Module:
    return Decoder(2).double()


def train_exported(rank: int, world_size: int, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    pipe = HeteroPipeline(on_meta(double_decoder), plan, optimizer=adamw, split="export")
    losses = [pipe.step_global(*batch(step)).loss for step in range(3)]
    state = pipe.full_state_dict()
    pipe.close()
    return losses, state


# -- processes -------------------------------------------------------------------------------------

SCRIPT = """
import os
import sys
import torch
from tiny import Case, Decoder, module_names
from zorselike import HeteroPipeline
from zorselike.plan import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan

groups = tuple(Group((rank,), (Microbatch(rank, 0, 5),)) for rank in range(2))
names = module_names(2)
plan = Plan(5, groups, (Ministage(0, tuple(names[:2])), Ministage(1, tuple(names[2:]))))
case = Case(plan, 2)
children = []
for rank in range(2):
    if not (child := os.fork()):
        break
    children.append(child)
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    sys.exit()
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2
)
model = Decoder(2)
torch.nn.init.constant_(model.norm.weight, torch.distributed.get_rank())
try:
    HeteroPipeline(model, plan)
except ConfigError:
    with HeteroPipeline(case.model(), plan) as pipe:
        pipe.step_global(*case.batch(0))
    unused = HeteroPipeline(case.model(), plan)
    sys.stdout.write("refused, trained and built\\n")  # At once: both write to one pipe.
"""


def test_a_process_whose_pipeline_did_nothing_ends_well(tmp_path: Path) -> None:
    """One pipeline is refused, the last one is neither used nor closed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    path = f"{tests.parent}:{tests}/support:{tests}/support/models"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "store")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[:3000]
    said = "refused, trained and built"
    assert ended.stdout.splitlines() == [said, said, "[0, 0]"]
