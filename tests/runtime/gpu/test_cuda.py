"""What needs a GPU: the same numbers as on the CPU, over the transports that GPUs use."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise

import pytest
import torch
from gpus import need_gpus
from ranks import RunRanks
from tiny import Case, Outcome, adamw, assert_same, module_names, train_all_single, with_groups
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime.ministage.sharding import local_tensor

NAMES = module_names(4)
CUTS = (NAMES[:2], NAMES[2:3], NAMES[3:5], NAMES[5:])
SUBSETS = tuple(chain.from_iterable(combinations(OFFLOAD_KINDS, n) for n in range(1, 4)))

pytestmark = pytest.mark.gpu


def one_group(num_ranks: int, zero: int) -> Plan:
    """All ranks in one group with four ministages; rank 0 has most rows."""
    rows = (Microbatch(0, 0, 2), Microbatch(num_ranks - 1, 2, 3), Microbatch(0, 3, 6))
    ministages = tuple(Ministage(0, tuple(names)) for names in CUTS)
    return Plan(6, (Group(tuple(range(num_ranks)), rows, zero=zero),), ministages)


def two_groups(num_ranks: int) -> Plan:
    """Rank 0, then the others; visited twice, so that an edge of the cycle goes over Gloo."""
    others = tuple(range(1, num_ranks))
    rows = tuple(
        Microbatch(rank, i * 6 // len(others), (i + 1) * 6 // len(others)) for i, rank in enumerate(others)
    )
    groups = (Group((0,), (Microbatch(0, 0, 4), Microbatch(0, 4, 6))), Group(others, rows))
    return Plan(6, groups, tuple(Ministage(i % 2, tuple(names)) for i, names in enumerate(CUTS)))


def train_on_gpus(rank: int, world_size: int, case: Case) -> Outcome:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    pipe = HeteroPipeline(case.model(), case.plan, optimizer=adamw, max_norm=case.max_norm, device=device)
    results = [pipe.step_global(*case.batch(step)) for step in range(case.num_steps)]
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    state = pipe.full_state_dict()
    pipe.close()
    return Outcome(tuple(losses), tuple(norms), (), state)


@pytest.mark.parametrize("zero", range(4))
def test_one_gpu_equals_the_cpu(zero: int, run_ranks: RunRanks) -> None:
    need_gpus()
    check(Case(one_group(1, zero), 4, max_norm=0.1), run_ranks)


@pytest.mark.parametrize("zero", range(4))
def test_a_group_over_nccl_equals_the_cpu(zero: int, run_ranks: RunRanks) -> None:
    need_gpus(2)
    check(Case(one_group(2, zero), 4, max_norm=0.1), run_ranks)


@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_groups_over_nccl_and_gloo_equal_the_cpu(
    num_ranks: int, offload: tuple[str, ...], run_ranks: RunRanks
) -> None:
    need_gpus(num_ranks)
    check(Case(with_offload(two_groups(num_ranks), offload), 4, tied=True), run_ranks)


def check(case: Case, run_ranks: RunRanks) -> None:
    ((expected,),) = run_ranks(train_all_single, 1, [case])
    found = run_ranks(train_on_gpus, case.plan.num_ranks, case, timeout=180)[0]
    assert_same(found, expected, case)


def with_offload(plan: Plan, kinds: tuple[str, ...]) -> Plan:
    return with_groups(plan, lambda group: replace(group, offload=kinds))


# -- offloading ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A Llama large enough that its copies take time, and what it is trained with."""

    offload: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    zero: int = 2
    max_norm: float | None = None
    recompute: bool = True
    compiles: bool = False
    dim: int = 256
    num_layers: int = 6
    num_ministages: int = 4
    num_steps: int = 4

    def model(self) -> Llama:
        config = LlamaConfig(
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=4,
            num_kv_heads=4,
            ffn_hidden=3 * self.dim,
            vocab_size=512,
            max_seq_len=128,
        )
        with torch.device("meta"):
            return Llama(config)

    def plan(self) -> Plan:
        names = module_names(self.num_layers)
        cuts = [i * len(names) // self.num_ministages for i in range(self.num_ministages + 1)]
        ministages = [Ministage(0, tuple(names[a:b])) for a, b in pairwise(cuts)]
        rows = tuple(Microbatch(0, i, i + 2) for i in range(0, 8, 2))
        recompute = "layer" if self.recompute else "none"
        group = Group((0,), rows, zero=self.zero, offload=self.offload, recompute=recompute)
        return Plan(8, (group,), tuple(ministages))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(512, (2, 8, 128), generator=generator)
        return inputs, targets


@dataclass(frozen=True)
class Numbers:
    """All that a training run shows of itself, and the most it held on the device after two steps."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]
    moments: list[Tensor]
    peak_bytes: int
    planned_bytes: int

    def differs_from(self, other: Numbers) -> str:
        """The first thing that is not equal, bit for bit; empty if all is."""
        if (self.losses, self.norms) != (other.losses, other.norms):
            return f"losses or norms: {self.losses} {self.norms}, not {other.losses} {other.norms}"
        for name, weight in other.weights.items():
            if not torch.equal(self.weights[name], weight):
                return name
        pairs = list(zip(self.moments, other.moments, strict=True))
        return "" if all(torch.equal(a, b) for a, b in pairs) else "moments"


def train(training: Training) -> Numbers:
    pipe = HeteroPipeline(
        training.model(),
        training.plan(),
        optimizer=adamw,
        max_norm=training.max_norm,
        param_dtype=training.dtype,
        compile=training.compiles,
        device=torch.device("cuda", 0),
    )
    results = []
    for step in range(training.num_steps):
        if step == 2:  # From now on every buffer exists.
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        results.append(pipe.step_global(*training.batch(step)))
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    planned_bytes = pipe.memory_report().device_planned_bytes
    weights = pipe.full_state_dict()
    with pipe.loaded():
        moments = [
            local_tensor(value).to("cpu", copy=True)
            for _, optimizer in sorted(pipe.optimizers.items())
            for state in optimizer.state.values()
            for value in state.values()
        ]
    pipe.close()
    return Numbers(tuple(losses), tuple(norms), weights, moments, peak_bytes, planned_bytes)


def begin_deterministic() -> None:
    """Before anything else touches CUDA in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Filling what is allocated would hide reads of what nobody wrote, and change the timing.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.cuda.set_device(0)


def compare_subsets(rank: int, world_size: int, resident: Training) -> dict[tuple[str, ...], str]:
    """What differs, by subset, from keeping everything on the device."""
    begin_deterministic()
    expected = train(resident)
    again = expected.differs_from(train(resident))
    assert not again, f"not even two equal runs are equal: {again}"
    found = {kinds: train(replace(resident, offload=kinds)).differs_from(expected) for kinds in SUBSETS}
    return {kinds: difference for kinds, difference in found.items() if difference}


@pytest.mark.parametrize(
    ("zero", "dtype", "max_norm"),
    [
        *((zero, dtype, None) for zero in range(4) for dtype in (None, torch.bfloat16)),
        (2, torch.bfloat16, 0.5),
        (2, torch.float16, None),
    ],
)
def test_offloading_changes_no_bit(
    zero: int, dtype: torch.dtype | None, max_norm: float | None, run_ranks: RunRanks
) -> None:
    need_gpus()
    resident = Training(dtype=dtype, zero=zero, max_norm=max_norm)
    assert run_ranks(compare_subsets, 1, resident, timeout=300) == [{}]


def test_offloading_without_recomputation_changes_no_bit(run_ranks: RunRanks) -> None:
    need_gpus()
    assert run_ranks(compare_subsets, 1, Training(dtype=torch.bfloat16, recompute=False), timeout=300) == [{}]


def train_both(rank: int, world_size: int, resident: Training) -> tuple[Numbers, Numbers]:
    torch.cuda.set_device(0)
    found = train(resident)
    torch.cuda.empty_cache()
    return found, train(replace(resident, offload=OFFLOAD_KINDS))


def test_offloading_frees_what_the_device_held(run_ranks: RunRanks) -> None:
    need_gpus()
    large = Training(dtype=torch.bfloat16, dim=1024, num_layers=12, num_ministages=6)
    ((resident, offloaded),) = run_ranks(train_both, 1, large, timeout=300)
    # Of 14 bytes a parameter two sixths at a time, beside gradients, gathered weights and workspaces.
    assert offloaded.peak_bytes < 0.7 * resident.peak_bytes
    assert offloaded.planned_bytes < 0.7 * resident.planned_bytes
    for numbers in (resident, offloaded):
        # Logits, what a layer saves while it is computed again and workspaces are in no plan.
        assert 0 < numbers.planned_bytes < 1.1 * numbers.peak_bytes


def train_compiled(rank: int, world_size: int, plain: Training) -> tuple[Numbers, Numbers]:
    torch.cuda.set_device(0)
    return train(plain), train(replace(plain, compiles=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-4), (torch.bfloat16, 0.01)])
def test_compiled_layers_offload_and_recompute(
    dtype: torch.dtype | None, tolerance: float, run_ranks: RunRanks
) -> None:
    need_gpus()
    plain = Training(dtype=dtype, offload=OFFLOAD_KINDS)
    ((expected, compiled),) = run_ranks(train_compiled, 1, plain, timeout=400)
    assert compiled.losses == pytest.approx(expected.losses, rel=tolerance)


# -- precision -----------------------------------------------------------------------------


class FloatCase(Case):
    """The same in fp32, whose initial weights are others than fp64's."""

    def model(self) -> nn.Module:
        return super().model().float()


def train_half(
    rank: int, world_size: int, case: Case, dtype: torch.dtype | str
) -> tuple[list[float], torch.dtype | None, tuple[int, int]]:
    """Losses with layers in half precision, what these computed in, and the card's capability."""
    torch.cuda.set_device(0)
    pipe = HeteroPipeline(
        case.model(),
        case.plan,
        optimizer=adamw,
        param_dtype=dtype,
        device=torch.device("cuda", 0),
    )
    results = [pipe.step_global(*case.batch(step)) for step in range(case.num_steps)]
    losses = [result.loss for result in results]
    pipe.close()
    return losses, pipe.param_dtype, torch.cuda.get_device_capability(0)


@pytest.mark.parametrize("offload", [(), OFFLOAD_KINDS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.01)])
def test_half_precision_follows_the_cpu(
    dtype: torch.dtype, tolerance: float, offload: tuple[str, ...], run_ranks: RunRanks
) -> None:
    need_gpus()
    case = FloatCase(with_offload(one_group(1, 2), offload), 4)
    ((expected,),) = run_ranks(train_all_single, 1, [case])
    ((losses, _, _),) = run_ranks(train_half, 1, case, dtype, timeout=180)
    assert losses == pytest.approx(expected.losses, rel=tolerance)


def test_auto_is_what_the_card_multiplies_fast(run_ranks: RunRanks) -> None:
    need_gpus()
    case = FloatCase(one_group(1, 2), 4)
    ((losses, dtype, capability),) = run_ranks(train_half, 1, case, "auto", timeout=180)
    wanted = torch.bfloat16 if capability >= (8, 0) else torch.float16
    assert dtype is wanted
    ((explicit, _, _),) = run_ranks(train_half, 1, case, wanted, timeout=180)
    assert losses == pytest.approx(explicit, rel=1e-3)
