"""The contract of `HeteroPipeline`, on real ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from tiny import (
    DIM,
    SEQUENCE,
    VOCABULARY,
    Case,
    Decoder,
    adamw,
    assert_same,
    module_names,
    train_planned,
    train_single,
)
from torch import Tensor, nn

from zorselike import Broadcast, HeteroPipeline, initialize
from zorselike.plan import ConfigError, PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy

pytestmark = pytest.mark.pooled

NUM_LAYERS = 4
NAMES = module_names(NUM_LAYERS)


def two_groups(**changes: Any) -> Plan:
    """Ranks 0 and 1 with unequal rows, then rank 2; two ministages each."""
    first = Group((0, 1), tuple(Microbatch(*m) for m in ((0, 0, 2), (1, 4, 5), (0, 2, 4))), **changes)
    second = Group((2,), (Microbatch(2, 0, 3), Microbatch(2, 3, 5)))
    cuts = (NAMES[:2], NAMES[2:3], NAMES[3:5], NAMES[5:])
    return Plan(5, (first, second), tuple(Ministage(i % 2, tuple(names)) for i, names in enumerate(cuts)))


CASE = Case(two_groups(), NUM_LAYERS)


def in_ranks(run_ranks: RunRanks, function: Callable[..., Any], num_ranks: int = 3, *args: Any) -> list[Any]:
    return run_ranks(function, num_ranks, *args, timeout=60)


# -- rows and results --------------------------------------------------------------------------


def watch(rank: int, world_size: int) -> bool:
    told: list[tuple[str, str]] = []
    with HeteroPipeline(CASE.model(), CASE.plan, loss_fn=token_cross_entropy) as pipe:
        tokens = torch.zeros(5, SEQUENCE, dtype=torch.int64)
        with pipe.watching(
            lambda a: told.append(("enter", a.text)), lambda a: told.append(("leave", a.text))
        ):
            pipe.step_global(tokens, tokens)
        actions = pipe._assembly.compiled.step_actions[pipe.rank]
        pipe.step_global(tokens, tokens)  # Nobody watches any more.
    return told == [(what, action.text) for action in actions for what in ("enter", "leave")]


def test_actions_can_be_watched(run_ranks: RunRanks) -> None:
    assert in_ranks(run_ranks, watch) == [True] * 3


def lose_in_place(rank: int, world_size: int, in_place: bool) -> list[list[float]]:
    """Losses where the last outputs, a view as a linear layer with a bias returns it, are changed."""

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        halved = logits.mul_(0.5) if in_place else logits * 0.5
        return token_cross_entropy(halved, targets)

    found = []
    for zero in (2, 3):
        model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)).double()
        group = Group((0, 1), (Microbatch(0, 0, 2), Microbatch(1, 2, 4), Microbatch(0, 4, 5)), zero=zero)
        plan = Plan(5, (group,), (Ministage(0, ("0", "1")),))
        with HeteroPipeline(model, plan, optimizer=adamw, loss_fn=loss_fn, seed=0) as pipe:
            found.append([pipe.step_global(*CASE.batch(step)).loss for step in range(3)])
    return found


def test_a_loss_may_change_outputs_in_place(run_ranks: RunRanks) -> None:
    first, second = (in_ranks(run_ranks, lose_in_place, 2, in_place) for in_place in (True, False))
    assert first == second


def report_rows(rank: int, world_size: int) -> tuple[list[int], list[int], list[int]]:
    with HeteroPipeline(CASE.model(), CASE.plan) as pipe:
        return pipe.input_rows, pipe.target_rows, pipe.rows


def test_rows_of_each_rank(run_ranks: RunRanks) -> None:
    assert in_ranks(run_ranks, report_rows) == [
        ([0, 1, 2, 3], [], [0, 1, 2, 3]),
        ([4], [], [4]),
        ([], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ]


def step_by_rows(rank: int, world_size: int) -> tuple[float, int]:
    """Each rank hands over its own rows only."""
    with HeteroPipeline(CASE.model(), CASE.plan, optimizer=adamw) as pipe:
        inputs, targets = CASE.batch(0)
        result = pipe.step(
            inputs[pipe.input_rows] if pipe.input_rows else None,
            targets[pipe.target_rows] if pipe.target_rows else None,
        )
        return result.loss, int(result.num_targets)


def single_loss(rank: int, world_size: int) -> tuple[float, int]:
    _, targets = CASE.batch(0)
    return train_single(CASE).losses[0], int((targets != -100).sum())


def test_step_takes_each_ranks_own_rows(run_ranks: RunRanks) -> None:
    ((loss, count),) = run_ranks(single_loss, 1)
    for found, num_targets in in_ranks(run_ranks, step_by_rows):
        assert found == pytest.approx(loss, abs=1e-12)
        assert num_targets == count


# -- keyword arguments and what crosses boundaries -----------------------------------------------


class Mixed(nn.Module):
    """Hands on a tuple of a floating-point, an integer and a bool tensor; takes keywords."""

    def __init__(self, is_first: bool = False, is_last: bool = False) -> None:
        super().__init__()
        self.is_last = is_last
        self.embedding = nn.Embedding(VOCABULARY, DIM) if is_first else None
        self.linear = nn.Linear(DIM, VOCABULARY if is_last else DIM)

    def forward(self, *inputs: Any) -> Any:
        if self.embedding is not None:
            (tokens,) = inputs
            return torch.tanh(self.linear(self.embedding(tokens))), tokens, tokens > 3
        h, tokens, flags = inputs[0] if isinstance(inputs[0], tuple) else inputs
        h = torch.tanh(self.linear(h)) if not self.is_last else self.linear(h)
        h = h * torch.where(flags, 2.0, 0.5).to(h.dtype)[..., None] + tokens[..., None]
        return h if self.is_last else (h, tokens, flags)


class WithKeywords(nn.Module):
    """On the convention, with a mask by rows and a scale for all."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): nn.Linear(DIM, DIM) for i in range(2)})
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor, *, mask: Tensor, scale: Tensor, power: float = 1.0) -> Tensor:
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h = torch.tanh(layer(h * mask[..., None])) * scale * power
        return self.output(h) if self.output is not None else h


def train_both(rank: int, world_size: int, kind: str) -> tuple[list[float], list[float]]:
    """Losses of a single process and of the plan, for three steps."""

    def make() -> nn.Module:
        with torch.device("meta"):
            if kind == "keywords":
                return WithKeywords().double()
            return nn.Sequential(Mixed(is_first=True), Mixed(), Mixed(), Mixed(is_last=True)).double()

    names = ["tok_embeddings", "layers.0", "layers.1", "output"] if kind == "keywords" else list("0123")
    template = two_groups()
    plan = Plan(5, template.groups, tuple(Ministage(i % 2, (name,)) for i, name in enumerate(names)))
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(5, SEQUENCE, generator=generator, dtype=torch.float64)
    scale = torch.tensor(1.5, dtype=torch.float64)
    reference = initialize(make(), seed=1)
    optimizer = adamw(reference.parameters())
    pipe = HeteroPipeline(make(), plan, optimizer=adamw, seed=1)
    expected, found = [], []
    for step in range(3):
        inputs, targets = CASE.batch(step)
        whole = {"mask": mask, "scale": scale, "power": 0.5} if kind == "keywords" else {}
        kwargs = {"mask": mask, "scale": Broadcast(scale), "power": 0.5} if kind == "keywords" else {}
        loss = token_cross_entropy(reference(inputs, **whole), targets) / (targets != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        found.append(pipe.step_global(inputs, targets, **kwargs).loss)
    pipe.close()
    return expected, found


@pytest.mark.parametrize("kind", ["keywords", "mixed"])
def test_keywords_and_tuples_of_mixed_dtypes(kind: str, run_ranks: RunRanks) -> None:
    for expected, found in in_ranks(run_ranks, train_both, 3, kind):
        assert found == pytest.approx(expected, abs=1e-12)


def leave_out_a_keyword(rank: int, world_size: int, without: int) -> None:
    names = ["tok_embeddings", "layers.0", "layers.1", "output"]
    plan = Plan(5, two_groups().groups, tuple(Ministage(i % 2, (name,)) for i, name in enumerate(names)))
    given = {"mask": torch.ones(5, SEQUENCE), "scale": Broadcast(torch.ones(())), "power": 0.5}
    if rank == without:
        given.pop("power")
    torch.manual_seed(0)
    with HeteroPipeline(WithKeywords(), plan, optimizer=adamw) as pipe:
        pipe.step_global(*CASE.batch(0), **given)


def test_a_keyword_that_one_rank_lacks_is_refused(run_ranks: RunRanks) -> None:
    """It would compute its rows with the default."""
    for end in run_ranks(leave_out_a_keyword, 3, 2, allow_exit=True, timeout=60):
        assert end.code == 1
        assert (
            "ConfigError: rank 2 was given no power=, and rank 0 was: pass it on every rank" in end.last_line
        )


# -- optimizers and schedulers -------------------------------------------------------------------


def look_at_optimizers(rank: int, world_size: int) -> tuple[list[str], list[int], list[float]]:
    seen: list[str] = []

    def factory(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.extend(name for name, _ in named_parameters)
        decays = [p for name, p in named_parameters if "norm" not in name]
        others = [p for name, p in named_parameters if "norm" in name]
        groups = [{"params": p, "weight_decay": w} for p, w in ((decays, 0.1), (others, 0.0)) if p]
        return torch.optim.AdamW(groups, lr=1.0)

    with HeteroPipeline(CASE.model(), CASE.plan, optimizer=factory) as pipe:
        schedulers = pipe.lr_schedulers(
            lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step)
        )
        rates = []
        for step in range(2):
            pipe.step_global(*CASE.batch(step))
            schedulers.step()
            rates.append(schedulers.get_last_lr()[0])
        return seen, sorted(pipe.optimizers), rates


def test_optimizers_get_global_names_and_schedulers_step_together(run_ranks: RunRanks) -> None:
    found = in_ranks(run_ranks, look_at_optimizers)
    names = {name for name, _ in CASE.model().named_parameters()}
    assert set(found[0][0]) == set(found[1][0])
    assert set(found[0][0]) | set(found[2][0]) == names
    assert not set(found[0][0]) & set(found[2][0])
    assert [ministages for _, ministages, _ in found] == [[0, 2], [0, 2], [1, 3]]
    assert all(rates == [0.5, 0.25] for _, _, rates in found)


def step_tensor_rates(rank: int, world_size: int) -> list[float]:
    factory = partial(torch.optim.AdamW, lr=torch.tensor(1.0, dtype=torch.float64))
    with HeteroPipeline(CASE.model(), CASE.plan, optimizer=factory) as pipe:
        schedulers = pipe.lr_schedulers(lambda own: torch.optim.lr_scheduler.ExponentialLR(own, 0.5))
        pipe.step_global(*CASE.batch(0))
        schedulers.step()
        return [float(group["lr"]) for own in pipe.optimizers.values() for group in own.param_groups]


def test_a_rate_that_is_a_tensor_is_each_optimizers_own(run_ranks: RunRanks) -> None:
    """Though the factory gives all of a rank the same one."""
    assert in_ranks(run_ranks, step_tensor_rates) == [[0.5, 0.5]] * 3


def clip_each_ministage(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after two steps: expected with clipping by ministage in one process, and found."""
    reference = initialize(CASE.model(), seed=0)
    optimizer = adamw(reference.parameters())
    pipe = HeteroPipeline(CASE.model(), CASE.plan, optimizer=adamw, max_norm=0.05, clip="ministage")
    for step in range(2):
        inputs, targets = CASE.batch(step)
        (token_cross_entropy(reference(inputs), targets) / (targets != -100).sum()).backward()
        for ministage in CASE.plan.ministages:
            own = [p for n, p in reference.named_parameters() if n.startswith(ministage.modules)]
            torch.nn.utils.clip_grad_norm_(own, 0.05)
        optimizer.step()
        optimizer.zero_grad()
        pipe.step_global(inputs, targets)
    state = pipe.full_state_dict()
    pipe.close()
    return {name: t.detach().clone() for name, t in reference.state_dict().items()}, state


def test_clipping_each_ministage_by_its_own_norm(run_ranks: RunRanks) -> None:
    expected, found = in_ranks(run_ranks, clip_each_ministage)[0]
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-12), name


# -- evaluation, dropout, weights that exist already ---------------------------------------------


def evaluate_with_dropout(rank: int, world_size: int) -> tuple[float, float, float, bool]:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, DIM), nn.Dropout(0.5), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCABULARY)
        )
    names = [("0", "1"), ("2",), ("3",)]
    plan = Plan(5, two_groups().groups, tuple(Ministage(i % 2, m) for i, m in enumerate(names)))
    with HeteroPipeline(model, plan) as pipe:
        batch = CASE.batch(0)
        first, second = pipe.evaluate_global(*batch).loss, pipe.evaluate_global(*batch).loss
        trained = pipe.step_global(*batch).loss
        modes = [
            m.training for ministage in pipe._assembly.ministages.values() for m in ministage.module.modules()
        ]
        return first, second, trained, all(modes)


def test_evaluate_switches_dropout_off_and_restores_it(run_ranks: RunRanks) -> None:
    for first, second, trained, is_training in in_ranks(run_ranks, evaluate_with_dropout):
        assert first == second != trained
        assert is_training


def train_given_weights(rank: int, world_size: int) -> Any:
    """A model that has its weights already, on every rank."""
    model = initialize(CASE.model(), seed=0)
    pipe = HeteroPipeline(model, CASE.plan, optimizer=adamw)
    losses = tuple(pipe.step_global(*CASE.batch(step)).loss for step in range(CASE.num_steps))
    pipe.close()
    return losses


def test_a_model_with_weights_keeps_them(run_ranks: RunRanks) -> None:
    (expected,) = run_ranks(train_reference, 1)
    for losses in in_ranks(run_ranks, train_given_weights):
        assert losses == pytest.approx(expected.losses, abs=1e-12)


def train_reference(rank: int, world_size: int) -> Any:
    return train_single(CASE)


def train_in_bf16(rank: int, world_size: int) -> tuple[list[float], list[str]]:
    with torch.device("meta"):
        model = Decoder(NUM_LAYERS)
    with HeteroPipeline(model, CASE.plan, optimizer=adamw, param_dtype=torch.bfloat16) as pipe:
        losses = [pipe.step_global(*CASE.batch(0)).loss for _ in range(20)]
        kinds = {str(p.dtype) for o in pipe.optimizers.values() for g in o.param_groups for p in g["params"]}
        return losses, sorted(kinds)


def test_bf16_layers_train_fp32_parameters(run_ranks: RunRanks) -> None:
    for losses, dtypes in in_ranks(run_ranks, train_in_bf16):
        assert losses[-1] < losses[0] - 0.1
        assert dtypes == ["torch.float32"]


# -- living together -----------------------------------------------------------------------------


def build_twice(rank: int, world_size: int) -> tuple[Any, Any, str]:
    first, second = train_planned(CASE), train_planned(CASE)
    with HeteroPipeline(CASE.model(), CASE.plan) as pipe:
        description = pipe.describe()
        pipe.close()  # Closing twice is no mistake.
    return first, second, description


def test_a_process_can_build_one_pipeline_after_another(run_ranks: RunRanks) -> None:
    (expected,) = run_ranks(train_reference, 1)
    first, second, description = in_ranks(run_ranks, build_twice)[0]
    assert_same(first, expected, CASE)
    assert_same(second, expected, CASE)
    assert "0 -> 2, activations: Gloo" in description
    assert "layers.0" in description


# -- refusals --------------------------------------------------------------------------------------


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def refused(rank: int, world_size: int, what: str) -> str:
    """What the pipeline says to one mistake, made alike on every rank."""
    plan = {
        "ranks": Plan(5, (*two_groups().groups, Group((3,), (Microbatch(3, 0, 5),))),
                      (*two_groups().ministages[:3], Ministage(2, ("layers.3", "norm", "output")))),
    }.get(what, two_groups())  # fmt: skip
    arguments: dict[str, Any] = {
        "clip": {"max_norm": 1.0, "clip": "layer"},
        "max_norm": {"max_norm": -1.0},
        "cuda": {"device": "cuda"},
        "optimizer": {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
    }.get(what, {})
    model = CASE.model()
    if what == "frozen":
        model.requires_grad_(False)
    inputs, targets = CASE.batch(0)
    try:
        pipe = HeteroPipeline(model, plan, **arguments)
        if what == "batch":
            pipe.step_global(inputs[:4], targets[:4])
        elif what == "rows":
            pipe.step(inputs[:1], targets[:1])
        elif what == "closed":
            pipe.close()
            pipe.step_global(inputs, targets)
    except (ConfigError, PlanError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("ranks", ["PlanError", "4", "3"]),
        ("clip", ["ConfigError", "clip = 'layer'", "ministage"]),
        ("max_norm", ["ConfigError", "max_norm = -1.0"]),
        ("cuda", ["ConfigError", "cuda"]),
        ("optimizer", ["ConfigError", "optimizer is of type SGD", "partial(torch.optim.SGD"]),
        ("frozen", ["ConfigError", "no parameter"]),
        ("batch", ["ConfigError", "inputs", "4 rows", "5 rows"]),
        ("closed", ["ConfigError", "closed"]),
    ],
)
def test_mistakes_are_one_clear_error_on_every_rank(
    what: str, expected: list[str], run_ranks: RunRanks
) -> None:
    for message in in_ranks(run_ranks, refused, 3, what):
        assert all(part in message for part in expected), message


def leave_early(rank: int, world_size: int) -> list[str]:
    """What calls say after the default group was destroyed; `close` says nothing."""
    pipe = HeteroPipeline(CASE.model(), CASE.plan)
    batch, said = CASE.batch(0), []
    pipe.step_global(*batch)
    dist.destroy_process_group()
    for call in (pipe.step_global, pipe.evaluate_global):
        with pytest.raises(ConfigError) as refused:
            call(*batch)
        said.append(str(refused.value))
    pipe.close()
    return said


def test_a_group_that_is_destroyed_before_the_pipeline_is_closed(run_ranks: RunRanks) -> None:
    exits = run_ranks(leave_early, 3, allow_exit=True, timeout=60)
    for end in exits:
        assert end.code == 0, end.stderr[-2000:]
        assert [said.partition(" was ")[0] for said in end.value] == [
            "torch.distributed.destroy_process_group"
        ] * 2


def fail_in_step(rank: int, world_size: int, what: str) -> None:
    """A mistake that shows while ranks work."""
    arguments: dict[str, Any] = {"loss_fn": mean_loss} if what == "mean" else {}
    with HeteroPipeline(CASE.model(), CASE.plan, **arguments) as pipe:
        inputs, targets = CASE.batch(0)
        pipe.step_global(inputs, targets)
        if what == "shape":
            pipe.step_global(inputs[:, :2], targets[:, :2])
        elif what == "rows":
            pipe.evaluate_global(inputs[:2], targets[:2])
        elif what == "sum":
            pipe._totals.start = None  # type: ignore[assignment, method-assign]
            pipe.step_global(inputs, targets)


@pytest.mark.parametrize(
    ("what", "place", "expected"),
    [
        ("mean", r"in 3F\d \(ministage 3, microbatch \d, forward\)", "reduction='sum'"),
        ("shape", r"in step\(\) \(before its first action\)", "pad to one shape"),
        ("rows", r"in evaluate\(\) \(its arguments\)", "has 2 rows"),
        ("sum", r"in step\(\) \(after its last action\)", "TypeError"),
    ],
)
def test_a_mistake_in_a_step_ends_every_rank_with_its_place_and_reason(
    what: str, place: str, expected: str, run_ranks: RunRanks
) -> None:
    exits = run_ranks(fail_in_step, 3, what, allow_exit=True, timeout=60)
    for end in exits:
        assert end.code != 0
        assert expected in end.last_line, end.stderr[-2000:]
        assert re.search(f"failed first, {place}: ", end.last_line), end.last_line
