"""Mixed precision: fp32 masters and fp32 sums beside shards in bf16.

A step in bf16 is held against one written out by hand: what each rank computes there are the same
kernels on the same rows, so the two differ only where fp32 numbers of several ranks are added up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import volume
from cases import CASES
from ranks import RunRanks
from tiny import Case, Decoder, Layer, adamw, module_names
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zorselike import HeteroPipeline, initialize
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.processes.device import choose_dtype, computes_in_fp16
from zorselike.runtime.processes.world import ProcessInfo

pytestmark = pytest.mark.pooled

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
CUTS = (NAMES[:2], NAMES[2:4], NAMES[4:])
State = dict[str, Tensor]
Factory = Callable[[Any], torch.optim.Optimizer]


def sgd(named_parameters: Any) -> torch.optim.Optimizer:
    """A step of this is a gradient."""
    return torch.optim.SGD(named_parameters, lr=1.0)


def one_group(zero: int, num_ranks: int = 1, *, offload: Sequence[str] = (), reduce: str = "once") -> Plan:
    """Four microbatches in turn on the ranks; three ministages."""
    rows = ((0, 1), (1, 3), (3, 4), (4, 6))
    microbatches = tuple(Microbatch(i % num_ranks, *rows[i]) for i in range(len(rows)))
    group = Group(tuple(range(num_ranks)), microbatches, zero=zero, offload=tuple(offload))
    group = replace(group, grad_reduce=reduce)  # type: ignore[arg-type]
    return Plan(6, (group,), tuple(Ministage(0, tuple(cut)) for cut in CUTS))


def masters_of(pipe: HeteroPipeline) -> State:
    """This rank's rows of what its optimizers update."""
    return {
        name: local_tensor(parameter.detach()).clone()
        for ministage in pipe._assembly.ministages.values()
        for name, parameter in ministage.trained.items()
    }


def shards_of(pipe: HeteroPipeline) -> State:
    """This rank's rows of what its layers are gathered from."""
    return {
        name: local_tensor(parameter.detach()).clone()
        for ministage in pipe._assembly.ministages.values()
        for name, parameter in ministage.module.named_parameters()
    }


# -- what the optimizer gets -----------------------------------------------------------------------


def build_and_look(rank: int, world_size: int, zeros: Sequence[int], offload: Sequence[str]) -> None:
    for zero in zeros:
        given: dict[str, nn.Parameter] = {}

        def factory(named: Any, given: dict[str, nn.Parameter] = given) -> torch.optim.Optimizer:
            given.update(named)
            return adamw(named)

        case = Case(one_group(zero, world_size, offload=offload), NUM_LAYERS)
        pipe = HeteroPipeline(case.model().float(), case.plan, optimizer=factory, param_dtype=torch.bfloat16)
        whole = dict(case.model().named_parameters())
        assert sorted(given) == sorted(whole)
        for name, master in given.items():
            assert isinstance(master, nn.Parameter) and isinstance(master, DTensor), name
            assert master.dtype == torch.float32 and master.requires_grad and master.is_leaf
            assert master.shape == whole[name].shape
        rows = torch.tensor([local_tensor(given[name].detach()).shape[0] for name in whole])
        dist.all_reduce(rows)
        copies = world_size if zero == 0 else 1
        assert rows.tolist() == [copies * parameter.shape[0] for parameter in whole.values()]
        with pipe.loaded():
            masters, shards = masters_of(pipe), shards_of(pipe)
        assert {shard.dtype for shard in shards.values()} == {torch.bfloat16}
        assert all(torch.equal(shards[name], masters[name].bfloat16()) for name in masters)
        pipe.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_optimizer_gets_fp32_masters_under_global_names(num_ranks: int, run_ranks: RunRanks) -> None:
    run_ranks(build_and_look, num_ranks, range(4), ())


def test_so_it_does_where_they_are_offloaded(run_ranks: RunRanks) -> None:
    run_ranks(build_and_look, 2, (0, 2, 3), OFFLOAD_KINDS)


def note_collectives(rank: int, world_size: int, zero: int, reduce: str) -> tuple[set[str], set[str]]:
    """The dtypes of what is gathered, and of what is reduced, in one step."""
    gathered: set[str] = set()
    reduced: set[str] = set()

    def watch(patch: pytest.MonkeyPatch, name: str, found: set[str]) -> None:
        if (original := getattr(dist, name, None)) is None:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensor = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
            if tensor.numel() > 3:  # The loss and norms are a few numbers.
                found.add(str(tensor.dtype).removeprefix("torch."))
            return original(*args, **kwargs)

        patch.setattr(dist, name, watched)

    case = Case(one_group(zero, world_size, reduce=reduce), NUM_LAYERS)
    pipe = HeteroPipeline(case.model().float(), case.plan, optimizer=adamw, param_dtype=torch.bfloat16)
    with pipe, pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "all_gather_into_tensor"):
            watch(patch, name, gathered)
        for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"):
            watch(patch, name, reduced)
        pipe.step_global(*case.batch(0))
    return gathered, reduced


@pytest.mark.parametrize(("zero", "reduce"), [(0, "once"), (1, "once"), (2, "microbatch"), (3, "once")])
def test_two_bytes_are_gathered_and_four_reduced(zero: int, reduce: str, run_ranks: RunRanks) -> None:
    for gathered, reduced in run_ranks(note_collectives, 2, zero, reduce):
        assert gathered == (set() if zero == 0 else {"bfloat16"})
        assert reduced == {"float32"}


# -- one step, written out -------------------------------------------------------------------------


class Part(nn.Module):
    """A bf16 copy of one ministage; what is tied within it stays so."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        chosen = nn.ModuleDict({name.replace(".", "|"): model.get_submodule(name) for name in names})
        self.chosen = copy.deepcopy(chosen).bfloat16()
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self.trained = {
            first[id(model.get_parameter(path.replace("|", ".")))]: parameter
            for path, parameter in self.chosen.named_parameters()
            if parameter.requires_grad
        }
        """By the name that the model's own `named_parameters` has."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.chosen.values():
            x = module(x)
        return x

    def take_gradients(self) -> State:
        """In fp32, summed no further."""
        taken = {name: p.grad.float() for name, p in self.trained.items() if p.grad is not None}
        for parameter in self.trained.values():
            parameter.grad = None
        return taken


def step_by_hand(case: Case, factory: Factory) -> tuple[float, float, State]:
    """Loss, norm and fp32 masters of one step in bf16, microbatch by microbatch, in one process."""
    model = initialize(case.model().float(), seed=case.seed)
    inputs, targets = case.batch(0)
    num_targets = int((targets != -100).sum())
    parts = [Part(model, ministage.modules) for ministage in case.plan.ministages]
    passes: list[dict[Microbatch, tuple[Tensor, Tensor]]] = []
    rows = inputs
    for index, part in enumerate(parts):
        passes.append({})
        for m in case.plan.group_of(index).microbatches:
            x = rows[m.start : m.stop].detach().requires_grad_(index > 0)
            passes[-1][m] = (x, part(x))
        rows = join({m: y.detach() for m, (_, y) in passes[-1].items()})
    losses = {m: token_cross_entropy(y, targets[m.start : m.stop]) for m, (_, y) in passes[-1].items()}
    gradients: State = {}
    for index in reversed(range(len(parts))):
        entering: dict[Microbatch, Tensor] = {}
        of_rank: dict[int, State] = {}
        for m in reversed(case.plan.group_of(index).microbatches):
            x, y = passes[index][m]
            if index == len(parts) - 1:
                losses[m].backward(torch.tensor(1 / num_targets))
            elif y.requires_grad:
                y.backward(rows[m.start : m.stop])
            add_to(of_rank.setdefault(m.rank, {}), parts[index].take_gradients())
            if x.grad is not None:
                entering[m] = x.grad
        for own in of_rank.values():
            add_to(gradients, own)
        rows = join(entering) if entering else rows
    return float(sum(losses.values())) / num_targets, *update(model, gradients, factory, case.max_norm)


def join(pieces: Mapping[Microbatch, Tensor]) -> Tensor:
    """All rows of the batch, in their order."""
    return torch.cat([pieces[m] for m in sorted(pieces, key=lambda m: m.start)])


def add_to(total: State, more: State) -> None:
    for name, gradient in more.items():
        total[name] = total[name] + gradient if name in total else gradient


def update(
    model: nn.Module, gradients: State, factory: Factory, max_norm: float | None
) -> tuple[float, State]:
    """The fp32 weights after the step, and the norm before it."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    limit = float("inf") if max_norm is None else max_norm
    norm = torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], limit)
    factory(trained).step()
    return float(norm), {name: parameter.detach().clone() for name, parameter in trained}


def step_planned(case: Case, factory: Factory) -> tuple[float, float, State]:
    """The same through the pipeline; the weights are on rank 0."""
    pipe = HeteroPipeline(
        case.model().float(),
        case.plan,
        optimizer=factory,
        param_dtype=torch.bfloat16,
        max_norm=case.max_norm,
        seed=case.seed,
    )
    result = pipe.step_global(*case.batch(0))
    numbers = (result.loss, result.grad_norm, pipe.full_state_dict())
    pipe.close()
    return numbers


def compare(rank: int, world_size: int, cases: Sequence[Case], factory: Factory) -> list[tuple[float, float]]:
    """By case: how far loss and norm, and weights, are from the step by hand, as shares of the largest."""
    shares = []
    for case in cases:
        loss, norm, state = step_planned(case, factory)
        if rank:
            continue
        own_loss, own_norm, masters = step_by_hand(case, factory)
        numbers = max(abs(loss - own_loss) / own_loss, abs(norm - own_norm) / own_norm)
        assert all(state[name].dtype == torch.float32 for name in masters)
        differences = [(state[name] - m).abs().max() / m.abs().max() for name, m in masters.items()]
        shares.append((numbers, float(max(differences))))
    return shares


@pytest.mark.parametrize("zero", range(4))
def test_a_step_of_one_rank_is_the_one_by_hand_bit_for_bit(zero: int, run_ranks: RunRanks) -> None:
    """The same kernels, then the same additions in fp32 in the same order: AdamW shows no bit of
    difference. Only the loss and the norm are summed in another precision."""
    cases = [Case(one_group(zero, offload=offload), NUM_LAYERS) for offload in ((), OFFLOAD_KINDS)]
    cases += [replace(case, tied=True, frozen=("layers.1.",)) for case in cases]
    for numbers, weights in run_ranks(compare, 1, cases, adamw)[0]:
        assert weights == 0 and numbers <= 1e-6


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_step_of_any_plan_is_the_one_by_hand(num_ranks: int, run_ranks: RunRanks) -> None:
    """To fp32 round-off of sums over ranks and microbatches, far below the 4e-3 of bf16: a gradient
    that was rounded after its reduction would show. (One step: afterwards the round-off may turn the
    rounding of a shard.)"""
    cases = [case for case in CASES if case.plan.num_ranks == num_ranks]
    assert len(cases) >= 5
    cases = volume.part(cases)
    for numbers, weights in run_ranks(compare, num_ranks, cases, sgd, timeout=120)[0]:
        assert numbers <= 1e-6 and weights <= 1e-6


# -- what fp32 is for ------------------------------------------------------------------------------


class Weigh(nn.Module):
    """Its weight's gradient is the sum of its input's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def group_of_many(num_ranks: int, zero: int, reduce: str, offload: Sequence[str]) -> Group:
    """24 microbatches of a row each."""
    microbatches = tuple(Microbatch(row % num_ranks, row, row + 1) for row in range(24))
    group = Group(tuple(range(num_ranks)), microbatches, zero=zero, offload=tuple(offload))
    return replace(group, grad_reduce=reduce)  # type: ignore[arg-type]


def sums_of_many(rank: int, world_size: int, groups: Sequence[Group]) -> list[list[float]]:
    return [sum_of_many(group).tolist() for group in groups]


def sum_of_many(group: Group) -> Tensor:
    """One gradient of 256 and 23 of one half, which bf16 would add up to 256; on rank 0."""
    plan = Plan(24, (group,), (Ministage(0, ("0",)), Ministage(0, ("1",))))
    with torch.device("meta"):
        model = nn.Sequential(Weigh(), Weigh())
    pipe = HeteroPipeline(
        model,
        plan,
        optimizer=sgd,
        param_dtype=torch.bfloat16,
        loss_fn=lambda outputs, _: outputs.sum(),
        count_fn=lambda targets: len(targets) / 24,
    )
    # The backward takes the newest microbatch first.
    inputs = torch.full((24, 4), 0.5).index_fill(0, torch.tensor(23), 256.0)
    pipe.step_global(inputs, torch.zeros(24))
    state = pipe.full_state_dict()
    pipe.close()
    return state.get("0.weight", torch.empty(0))


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_are_summed_in_fp32(num_ranks: int, run_ranks: RunRanks) -> None:
    stages = ((0, "once"), (1, "once"), (2, "once"), (2, "microbatch"), (3, "once"))
    groups = [group_of_many(num_ranks, *stage, kinds) for stage in stages for kinds in ((), OFFLOAD_KINDS)]
    groups = volume.part(groups, least=3)
    for group, found in zip(groups, run_ranks(sums_of_many, num_ranks, groups)[0], strict=True):
        assert found == [1.0 - (256 + 23 * 0.5)] * 4, group


class WithMore(Layer):
    """Has a parameter that no row uses."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.empty(8))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.more)


def train_with_more(rank: int, world_size: int, plan: Plan, dtype: torch.dtype) -> list[list[float]]:
    losses = []
    for kind in (Layer, WithMore):
        with torch.device("meta"):
            model = Decoder(NUM_LAYERS)
            model.layers = nn.ModuleDict({name: kind() for name in model.layers})
        with HeteroPipeline(model, plan, optimizer=sgd, param_dtype=dtype) as pipe:
            losses.append([pipe.step_global(*Case(plan, NUM_LAYERS).batch(step)).loss for step in range(2)])
            more = [own for name, own in masters_of(pipe).items() if name.endswith(".more")]
            assert all(bool((own == 1).all()) for own in more)
    return losses


@pytest.mark.parametrize(("zero", "dtype"), [(0, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16)])
def test_what_no_row_uses_has_a_gradient_of_zero(zero: int, dtype: torch.dtype, run_ranks: RunRanks) -> None:
    """Beside it are gradients that backwards have added up in fp32."""
    plain, more = run_ranks(train_with_more, 2, one_group(zero, 2), dtype)[0]
    assert plain == more


def creep(rank: int, world_size: int, dtype: torch.dtype | None) -> tuple[State, State, State]:
    """Initial, expected and found weights after 40 steps of 1e-6; the model is in bf16 if no
    `dtype` is given."""

    def slow(named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=1e-6, weight_decay=0.0)

    case = Case(one_group(2), NUM_LAYERS)
    model = case.model().float() if dtype is not None else case.model().bfloat16()
    pipe = HeteroPipeline(model, case.plan, optimizer=slow, param_dtype=dtype)
    before = masters_of(pipe)
    for _ in range(40):
        pipe.step_global(*case.batch(0))
    after, state = masters_of(pipe), pipe.full_state_dict()
    pipe.close()
    return before, after, state


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_updates_that_bf16_would_lose_add_up(dtype: torch.dtype | None, run_ranks: RunRanks) -> None:
    before, after, state = run_ranks(creep, 1, dtype)[0]
    for name, start in before.items():
        assert start.dtype == torch.float32
        moved = (after[name] - start).abs()
        if not name.endswith("norm.bias"):  # They begin at zero, where bf16 loses nothing.
            # A step changes nothing where it is less than half a unit in the last place of bf16.
            half, lost = start.bfloat16(), start.abs() > 1e-6 * 2**10
            assert torch.equal((half - 1e-6)[lost], half[lost])
            assert lost.float().mean() > 0.9 and float(moved[lost].max()) > 2e-5, name
        assert state[name].dtype == torch.float32  # Also where the model was given in bf16.
        assert torch.equal(state[name], after[name])


# -- what is exported ------------------------------------------------------------------------------


def export(rank: int, world_size: int, case: Case, kind: torch.dtype) -> tuple[State, State, State]:
    """What `initialize` gives, and the state before and after a step in bf16."""
    initial = initialize(case.model().to(kind), seed=case.seed).state_dict()
    pipe = HeteroPipeline(case.model().to(kind), case.plan, optimizer=adamw, param_dtype=torch.bfloat16)
    before = pipe.full_state_dict()
    pipe.step_global(*case.batch(0))
    after = pipe.full_state_dict()
    pipe.close()
    return initial, before, after


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_full_state_is_the_masters_in_the_models_dtypes(kind: torch.dtype, run_ranks: RunRanks) -> None:
    case = Case(one_group(2, 2, offload=OFFLOAD_KINDS), NUM_LAYERS, frozen=("layers.1.",))
    initial, before, after = run_ranks(export, 2, case, kind)[0]
    for name, weight in initial.items():
        assert before[name].dtype == after[name].dtype == kind
        if name.startswith("layers.1."):  # What does not train has no master: it is what layers compute with.
            assert torch.equal(before[name], weight.bfloat16().to(kind))
            assert torch.equal(after[name], before[name])
        else:
            assert torch.equal(before[name], weight.float().to(kind))
            assert not torch.equal(after[name], before[name])
            assert not torch.equal(after[name], after[name].bfloat16().to(kind))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_tied_weight_is_exported_once_for_all_its_names(zero: int, run_ranks: RunRanks) -> None:
    case = Case(one_group(zero, 2), NUM_LAYERS, tied=True)
    _, before, after = run_ranks(export, 2, case, torch.float32)[0]
    for state in (before, after):
        assert torch.equal(state["output.weight"], state["tok_embeddings.weight"])


# -- which dtype -----------------------------------------------------------------------------------


def processes(*architectures: str) -> list[ProcessInfo]:
    return [
        ProcessInfo(rank, "node", rank, device="cuda" if name else "cpu", architecture=name)
        for rank, name in enumerate(architectures)
    ]


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (("sm_80",), torch.bfloat16),
        (("sm_90", "sm_100", "sm_120"), torch.bfloat16),
        (("sm_75",), torch.float16),
        (("sm_80", "sm_90", "sm_70"), torch.float16),
        (("sm_61", ""), torch.float16),
        (("gfx90a", "gfx942"), torch.bfloat16),
        (("gfx90a", "sm_75"), torch.float16),
        (("",), torch.bfloat16),
        (("", "sm_86"), torch.bfloat16),
    ],
)
def test_auto_is_what_every_card_can_do(architectures: Sequence[str], expected: torch.dtype) -> None:
    assert choose_dtype("auto", processes(*architectures)) is expected


@pytest.mark.parametrize("wanted", [None, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_asked_for_is_taken_whatever_the_cards(wanted: torch.dtype | None) -> None:
    assert choose_dtype(wanted, processes("sm_70", "sm_90")) is wanted


def test_what_computes_in_fp16_has_its_loss_scaled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert not computes_in_fp16(model, None)
    model[1].half()  # Through it the gradients of the first go.
    assert computes_in_fp16(model, None)
    assert computes_in_fp16(model, torch.float16)
    assert computes_in_fp16(model.half(), None)
    assert not computes_in_fp16(model, torch.bfloat16)
