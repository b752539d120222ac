"""Sizes of ministages from counts are those that the runtime finds in a real model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import volume
from hypothesis import given, settings
from plans import plans
from ranks import RunRanks

from zorselike import HeteroPipeline
from zorselike.cost.parameter_bytes import ParameterBytes
from zorselike.cost.sizes import (
    KeptBytes,
    MinistageBytes,
    RowBytes,
    UnitSize,
    add_up,
    count_updated,
    find_boundary_bytes,
    find_row_bytes,
    find_tie_bytes,
    list_units,
    measure_ministages,
)
from zorselike.models import build_model, get_config, module_names
from zorselike.models.workload import make_workload
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.plan.workload import LayerKind, Workload
from zorselike.runtime.memory_report import measure_ministage

pytestmark = pytest.mark.pooled

SEQUENCE = 8
SHAPE: dict[str, Any] = {
    "dim": 16,
    "num_layers": 4,
    "num_heads": 2,
    "ffn_hidden": 32,
    "vocab_size": 32,
    "max_seq_len": SEQUENCE,
}
"""All sizes divide by two, so that FSDP2 pads nothing."""


@dataclass(frozen=True)
class Case:
    """A plan of ranks 0 and 1 before rank 2, and what it divides."""

    family: str
    zero: int
    dtype: str
    cuts: tuple[int, ...]
    """Modules before which a ministage begins."""
    recompute: bool = False
    tied: bool = False

    @property
    def overrides(self) -> dict[str, Any]:
        return {**SHAPE, "tie_embeddings": self.tied}

    def plan(self) -> Plan:
        names = module_names(get_config(self.family, "debug", **self.overrides))
        bounds = [0, *self.cuts, len(names)]
        parts = [tuple(names[a:b]) for a, b in pairwise(bounds)]
        how: dict[str, Any] = {"zero": self.zero, "recompute": "layer" if self.recompute else "none"}
        first = Group(ranks=(0, 1), microbatches=(Microbatch(0, 0, 2), Microbatch(1, 2, 3)), **how)
        second = Group(ranks=(2,), microbatches=(Microbatch(2, 0, 3),), **how)
        groups = (first, second) if len(parts) > 1 else (first,)
        ministages = tuple(Ministage(i % len(groups), part) for i, part in enumerate(parts))
        return Plan(global_batch=3, groups=groups, ministages=ministages).validate()

    def workload(self) -> Workload:
        config = get_config(self.family, "debug", **self.overrides)
        return make_workload(config, sequence_length=SEQUENCE, dtype=self.dtype, model="small")


CASES = [
    Case("llama", 2, "float32", (2, 4, 5)),
    Case("llama", 2, "float32", (2, 4), tied=True),
    Case("llama", 3, "bfloat16", (3,), recompute=True),
    Case("gpt", 1, "bfloat16", (2, 4, 6), tied=True),
    Case("gpt", 0, "bfloat16", (3,), recompute=True, tied=True),
    Case("gpt", 2, "bfloat16", (), tied=True),
]


def find_real_sizes(rank: int, world_size: int, case: Case) -> dict[int, MinistageBytes]:
    """What the runtime says of this rank's ministages after a step."""
    model = build_model(case.family, "debug", **case.overrides)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    dtype = None if case.dtype == "float32" else torch.bfloat16
    tokens = torch.arange(3 * SEQUENCE).reshape(3, SEQUENCE) % SHAPE["vocab_size"]
    with HeteroPipeline(model, case.plan(), optimizer=optimizer, param_dtype=dtype) as pipe:
        pipe.step_global(tokens, tokens)
        assembly = pipe._assembly
        return {
            i: measure_ministage(ministage, assembly, pipe._crossing.last)
            for i, ministage in assembly.ministages.items()
        }


@volume.parametrize("case", CASES, least=2, ids=str)
def test_sizes_are_those_of_the_runtime(case: Case, run_ranks: RunRanks) -> None:
    plan = case.plan()
    real = run_ranks(find_real_sizes, plan.num_ranks, case)
    counted = measure_ministages(plan, case.workload())
    for rank in range(plan.num_ranks):
        assert counted[rank].keys() == real[rank].keys()
        for i, sizes in counted[rank].items():
            expected = asdict(real[rank][i])
            found = {key: value for key, value in asdict(sizes).items() if key not in PER_ROW}
            assert found == {key: expected[key] for key in found}, f"rank {rank}, ministage {i}"


PER_ROW = ("activation_bytes_per_row", "working_bytes_per_row", "boundary_bytes_per_row")


def test_rows_are_those_of_the_runtime_between_ministages_of_layers(run_ranks: RunRanks) -> None:
    """The runtime knows of a row what enters, leaves, and is recomputed from. It counts token ids before
    the first ministage and logits after the last as if they were passed on; a workload does not."""
    case = Case("llama", 2, "bfloat16", (1, 3, 4), recompute=True)
    plan = case.plan()
    real = run_ranks(find_real_sizes, plan.num_ranks, case)
    counted = measure_ministages(plan, case.workload())
    hidden = SEQUENCE * SHAPE["dim"] * 2
    for rank, i, num_layers in ((2, 1, 2), (0, 2, 1), (1, 2, 1)):
        for sizes in (counted[rank][i], real[rank][i]):
            assert sizes.boundary_bytes_per_row == hidden
            assert sizes.activation_bytes_per_row == num_layers * hidden


# -- by hand -------------------------------------------------------------------------------


def make_layers(num_layers: int, *, dtype: str = "bfloat16", tied: bool = False, **changes: Any) -> Workload:
    """`emb`, `layers.*` and `head` of 1000, 600 and 900 parameters; tied, the head borrows 800."""
    layer = LayerKind(
        name="layer",
        num_parameters=600,
        forward_flops_per_row=1.0,
        input_elements_per_row=5,
        output_elements_per_row=5,
        activation_bytes_per_row=70,
        working_bytes_per_row=30,
    )
    head = replace(layer, name="head", num_parameters=100 if tied else 900, num_borrowed=800 if tied else 0)
    kinds = {
        "embedding": replace(layer, name="embedding", num_parameters=1000, input_elements_per_row=0),
        "layer": replace(layer, **changes),
        "head": head,
    }
    names = ("emb", *(f"layers.{i}" for i in range(num_layers)), "head")
    return Workload(
        model="m",
        sequence_length=4,
        dtype=dtype,
        layers=tuple((name, {"emb": "embedding", "head": "head"}.get(name, "layer")) for name in names),
        kinds=kinds,
        ties=(("emb", "head"),) if tied else (),
    )


def make_plan(workload: Workload, *cuts: int, ranks: tuple[int, ...] = (0, 1, 2), **how: Any) -> Plan:
    names = [name for name, _ in workload.layers]
    bounds = [0, *cuts, len(names)]
    parts = [tuple(names[a:b]) for a, b in pairwise(bounds)]
    microbatches = tuple(Microbatch(rank, i, i + 1) for i, rank in enumerate(ranks))
    group = Group(ranks=ranks, microbatches=microbatches, **how)
    return Plan(
        global_batch=len(ranks), groups=(group,), ministages=tuple(Ministage(0, part) for part in parts)
    ).validate()


def test_a_frozen_weight_is_gathered_and_sharded_and_no_more() -> None:
    workload = make_layers(2, num_trainable=60)
    frozen = {**workload.kinds, "embedding": replace(workload.kinds["embedding"], num_trainable=0)}
    workload = replace(workload, kinds=frozen)
    ((first, second),) = [measure_ministages(make_plan(workload, 1, zero=2), workload)[0].values()]
    assert (first.gathered_bytes, first.shard_bytes) == (2 * 1000, 2 * 334)
    assert not first.gradient_bytes + first.gradient_shard_bytes + first.state_bytes
    assert not first.largest_unit_rounded_gradient_bytes
    assert second.gathered_bytes == 2 * (1200 + 900)
    assert second.gradient_bytes == 4 * (120 + 900)
    assert second.gradient_shard_bytes == 2 * second.rounded_gradient_shard_bytes == 4 * (20 + 20 + 300)
    assert second.state_bytes == 12 * (20 + 20 + 300)


def test_a_frozen_weight_that_is_tied_has_no_gradient_anywhere() -> None:
    workload = make_layers(1, tied=True)
    kinds = {
        "embedding": replace(workload.kinds["embedding"], num_trainable=0),
        "layer": workload.kinds["layer"],
        "head": replace(workload.kinds["head"], num_trainable=0, num_borrowed_trainable=0),
    }
    workload = replace(workload, kinds=kinds)
    plan = make_plan(workload, 1, 2)
    units = list_units(plan, workload)
    assert units[0] == (UnitSize(num_parameters=1000, num_trainable=0, num_tied=800),)
    assert units[2] == (UnitSize(num_parameters=900, num_trainable=0, num_tied=800),)
    assert not any(find_tie_bytes(plan, workload, 4).values())


def test_every_stage_shares_what_it_says() -> None:
    workload = make_layers(2)
    sharded = measure_ministages(make_plan(workload, 2, zero=2), workload)[1]
    assert sharded[0] == MinistageBytes(
        gathered_bytes=2 * 1600,
        shard_bytes=2 * (334 + 200),
        gradient_bytes=4 * 1600,
        gradient_shard_bytes=4 * (334 + 200),
        state_bytes=12 * (334 + 200),
        masters=True,
        activation_bytes_per_row=140,
        working_bytes_per_row=30,
        boundary_bytes_per_row=10,
        largest_unit_bytes=2000,
        largest_unit_gradient_bytes=4000,
    )
    whole = measure_ministages(make_plan(workload, 2, zero=0), workload)[1]
    assert whole[0].shard_bytes == whole[0].gathered_bytes == 3200
    assert whole[0].state_bytes == 12 * 1600
    full = make_layers(2, dtype="float32")
    in_full = measure_ministages(make_plan(full, 2, zero=2), full)[1]
    assert not in_full[0].masters
    assert in_full[0].state_bytes == 8 * (334 + 200)


def test_recomputed_layers_keep_their_input_and_work_on_the_rest() -> None:
    workload = make_layers(3)
    plan = make_plan(workload, 2, recompute="layer")
    assert find_row_bytes(plan, workload, 0) == RowBytes(
        activation_bytes=70 + 10, working_bytes=100, boundary_bytes=10
    )
    assert find_row_bytes(plan, workload, 1) == RowBytes(
        activation_bytes=2 * 10 + 70, working_bytes=100, boundary_bytes=10
    )
    assert find_boundary_bytes(plan, workload) == (0, 10)


def test_measured_activations_go_before_counted_ones() -> None:
    workload = make_layers(3)
    plan = make_plan(workload, 2, recompute="layer")
    measured: KeptBytes = {
        ("layer", "T4", "none"): 80.5,
        ("layer", "T4", "layer"): 12.0,
        ("head", "T4", "none"): 7.0,
    }
    sizes = measure_ministages(plan, workload, devices=("T4", "T4", "A10G"), measured=measured)
    assert sizes[0][1].activation_bytes_per_row == 2 * 12 + 7
    assert sizes[0][1].working_bytes_per_row == 81 + 30
    assert sizes[2] == measure_ministages(plan, workload)[2]
    plain = make_plan(workload, 2)
    assert find_row_bytes(plain, workload, 1, "T4", measured).activation_bytes == 2 * 81 + 7


def test_frozen_parameters_are_held_and_not_trained() -> None:
    workload = make_layers(2, num_trainable=0)
    plan = make_plan(workload, 1, 3, zero=2)
    frozen = measure_ministages(plan, workload)[0][1]
    assert frozen.gathered_bytes == 2400 and frozen.shard_bytes == 2 * 400
    assert frozen.gradient_bytes == frozen.gradient_shard_bytes == frozen.state_bytes == 0
    assert count_updated(plan, workload)[0, 1] == 0


def test_a_borrower_holds_a_copy_that_it_does_not_update() -> None:
    workload = make_layers(2, tied=True)
    plan = make_plan(workload, 1, 3, zero=2, ranks=(0,))
    units = list_units(plan, workload)
    assert units[0] == (UnitSize(num_parameters=1000, num_trainable=1000, num_tied=800),)
    assert units[2] == (UnitSize(num_parameters=900, num_trainable=900, num_borrowed=800, num_tied=800),)
    sizes = measure_ministages(plan, workload)[0]
    assert sizes[2].state_bytes == 12 * 100
    assert sizes[2].kept_shard_bytes == sizes[0].kept_shard_bytes == 1600
    assert count_updated(plan, workload) == {(0, 0): 1000, (0, 1): 1200, (0, 2): 100}
    assert find_tie_bytes(plan, workload, 4) == {(0, 2): 3200}


def test_modules_tied_within_a_ministage_are_one_unit_that_comes_last() -> None:
    workload = make_layers(1, tied=True)
    plan = make_plan(workload, ranks=(0,))
    assert list_units(plan, workload) == (
        (
            UnitSize(num_parameters=600, num_trainable=600, is_cut=True),
            UnitSize(num_parameters=1100, num_trainable=1100),
        ),
    )
    assert find_tie_bytes(plan, workload, 4) == {}


@settings(max_examples=50)
@given(plans())
def test_shares_of_all_ranks_hold_everything_and_little_more(plan: Plan) -> None:
    names = list(plan.ministage_of)
    kind = make_layers(0).kinds["layer"]
    workload = Workload(
        model="m",
        sequence_length=4,
        dtype="bfloat16",
        layers=tuple((name, "layer") for name in names),
        kinds={"layer": kind},
    )
    sizes = measure_ministages(plan, workload)
    assert [set(own) for own in sizes] == [set(plan.ministages_of_rank(r)) for r in range(plan.num_ranks)]
    for i, ministage in enumerate(plan.ministages):
        ranks = plan.group_of(i).flat_ranks
        held = sum(sizes[rank][i].shard_bytes for rank in ranks)
        num_bytes = 2 * 600 * len(ministage.modules)
        if plan.group_of(i).zero == 0:
            assert held == num_bytes * len(ranks)
        else:
            assert num_bytes <= held < num_bytes + 2 * len(ranks) * len(ministage.modules)


def test_adding_up_nothing_is_nothing() -> None:
    empty = add_up([], RowBytes(), ParameterBytes(2, num_moments=2), num_shards=2)
    assert empty.shard_bytes == empty.largest_unit_bytes == empty.state_bytes == 0
