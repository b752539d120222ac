"""Compiled layers compute what the layers themselves do, under everything else that a plan can ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import volume
from ranks import RunRanks
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.errors import ConfigError
from zorselike.models import build_model, get_config, module_names
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan

SEQUENCE = 8
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "dim": 32,
    "ffn_hidden": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 64,
}
COMPILE = torch.compile


@pytest.fixture(scope="module", autouse=True)
def what_ranks_inherit() -> None:
    """Compilers import as much again as torch itself: here once, and not in every rank, nor in processes that
    would help it to compile the few kernels there are. These are scalar: no trials of what the CPU can."""
    import torch._inductor.compile_fx

    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.simdlen = 1


Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Setting:
    """Two layers, each in a ministage of its own, and how they are trained."""

    rows: tuple[tuple[int, int, int], ...] = ((0, 0, 2), (0, 2, 4))
    zero: int = 2
    offload: tuple[str, ...] = ()
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    """What the model is in, but for bf16, in which layers of an fp32 model compute."""
    num_steps: int = 2
    evaluates: bool = False
    ranks: tuple[Any, ...] = ()
    """Of a group with tensor-parallel replicas."""

    def plan(self) -> Plan:
        names = module_names(get_config("llama", "debug", **SIZES))
        microbatches = tuple(Microbatch(*row) for row in self.rows)
        ranks = self.ranks or tuple(sorted({microbatch.rank for microbatch in microbatches}))
        recompute = "layer" if self.recompute else "none"
        group = Group(ranks, microbatches, zero=self.zero, offload=self.offload, recompute=recompute)
        ministages = (Ministage(0, tuple(names[:2])), Ministage(0, tuple(names[2:])))
        length = SEQUENCE if self.ranks else None
        num_rows = max(stop for _, _, stop in self.rows)
        return Plan(num_rows, (group,), ministages, sequence_length=length)

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = build_model("llama", "debug", **SIZES)
        return model.double() if self.dtype is torch.float64 else model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        shape = (2, self.plan().global_batch, SEQUENCE)
        inputs, targets = torch.randint(SIZES["vocab_size"], shape, generator=generator)
        return inputs, targets


@dataclass(frozen=True)
class Numbers:
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: dict[str, Tensor]
    """On rank 0."""


def sgd(named_parameters: Any) -> torch.optim.Optimizer:
    """With a state to offload, and steps that do not turn round-off into a direction."""
    return torch.optim.SGD(named_parameters, lr=0.1, momentum=0.9)


def train(setting: Setting, backend: Backend | None) -> Numbers:
    """`backend`: what compiles; None: nothing does."""
    if backend is not None:
        torch.compile = partial(COMPILE, backend=backend)
    half = setting.dtype if setting.dtype is torch.bfloat16 else None
    pipe = HeteroPipeline(
        setting.model(), setting.plan(), optimizer=sgd, param_dtype=half, compile=backend is not None
    )
    results = []
    for step in range(setting.num_steps):
        if setting.evaluates:
            results.append(pipe.evaluate_global(*setting.batch(step)))
        results.append(pipe.step_global(*setting.batch(step)))
    losses, norms = tuple(r.loss for r in results), tuple(r.grad_norm for r in results)
    numbers = Numbers(losses, norms, pipe.full_state_dict())
    pipe.close()
    return numbers


def compare(rank: int, world_size: int, settings: list[tuple[Setting, str]]) -> dict[Setting, float]:
    """The largest difference of each, compiled by its backend: of losses and norms relative to themselves, of
    weights to their tensor's largest."""
    found = {}
    for setting, backend in settings:
        expected, numbers = train(setting, None), train(setting, backend)
        pairs = zip(numbers.losses + numbers.norms, expected.losses + expected.norms, strict=True)
        found[setting] = max(abs(ours - theirs) / max(abs(theirs), 1e-30) for ours, theirs in pairs)
        if setting.dtype is not torch.bfloat16:
            for name, weight in expected.weights.items():
                difference = (numbers.weights[name] - weight).abs().max() / weight.abs().max()
                found[setting] = max(found[setting], float(difference))
    return found


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
ALONE = ((0, 0, 2), (0, 2, 4), (0, 4, 5))
UNEVEN = ((0, 0, 2), (1, 2, 5), (0, 5, 7), (0, 7, 8))


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [ALONE, UNEVEN], ids=["one rank", "two ranks"])
def test_compiled_layers_compute_the_same(
    rows: tuple[tuple[int, int, int], ...], run_ranks: RunRanks
) -> None:
    double, single, half = (Setting(rows, dtype=dtype) for dtype in TOLERANCES)
    settings = [
        (replace(double, recompute=True, offload=OFFLOAD_KINDS, evaluates=True), "aot_eager"),
        (replace(single, recompute=True, zero=3, offload=("activations",)), "aot_eager"),
        (replace(half, zero=3), "aot_eager"),
    ]
    num_ranks = len({rank for rank, _, _ in rows})
    if num_ranks == 1:  # What more ranks change about these is nothing that is compiled.
        settings += [
            (replace(single, offload=OFFLOAD_KINDS), "aot_eager"),
            (replace(half, recompute=True, offload=OFFLOAD_KINDS), "aot_eager"),
            # Of one number of rows, as each has kernels of its own and a compiler takes long.
            (replace(single, rows=ALONE[:2], recompute=True, offload=OFFLOAD_KINDS), "inductor"),
        ]
    drawn = volume.part(settings)
    for found in run_ranks(compare, num_ranks, drawn, timeout=300):
        for setting, backend in drawn:
            assert found[setting] <= TOLERANCES[setting.dtype], setting
            assert found[setting] or backend != "inductor", "nothing was compiled"


def count_graphs(rank: int, world_size: int, setting: Setting, depths: tuple[int, ...]) -> list[int]:
    """How many there are after each of these numbers of layers, one after the other."""
    counts = []
    for num_layers in depths:
        SIZES["num_layers"] = num_layers
        train(setting, "eager")
        counts.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return counts


def test_layers_of_replicas_are_compiled_between_the_collectives(run_ranks: RunRanks) -> None:
    """Both blocks, and what comes before, between and after them; a rank alone has a graph or two. Layers
    that look alike share them."""
    setting = Setting(((0, 0, 2), (2, 2, 4)), ranks=((0, 1), 2), num_steps=1)
    few, many = zip(*run_ranks(count_graphs, 3, setting, (3, 4), timeout=120), strict=True)
    *joined, alone = many
    assert few == many
    assert 4 <= min(joined) <= 10 and 1 <= alone <= 2


@pytest.mark.nightly
def test_compiled_layers_of_replicas_compute_the_same(run_ranks: RunRanks) -> None:
    """Each in graphs between which ranks of a replica meet."""
    rows = ((0, 0, 2), (2, 2, 4), (0, 4, 6))
    double = Setting(rows, dtype=torch.float64, ranks=((0, 1), 2))
    settings = [
        (replace(double, recompute=True, offload=OFFLOAD_KINDS, evaluates=True), "aot_eager"),
        (replace(double, zero=3), "aot_eager"),
    ]
    for found in run_ranks(compare, 3, volume.part(settings), timeout=300):
        assert all(difference <= TOLERANCES[torch.float64] for difference in found.values()), found


class Recorder:
    """A compiler that runs graphs as they are, and remembers which ran."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.graphs_of: defaultdict[int, set[int]] = defaultdict(set)
        """By row count."""
        self.num_calls = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        number = self.num_graphs
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            (rows,) = {arg.shape[0] for arg in args if isinstance(arg, Tensor) and arg.dim() == 3}
            self.graphs_of[rows].add(number)
            self.num_calls += 1
            return graph(*args)

        return run


def record(rank: int, world_size: int, setting: Setting) -> tuple[dict[int, set[int]], list[int]]:
    """The graphs by row count, and how many there were after each number of steps."""
    recorder = Recorder()
    counts = []
    for num_steps in (1, 4):
        train(replace(setting, num_steps=num_steps), recorder)
        counts.append(recorder.num_graphs)
    return dict(recorder.graphs_of), counts


def test_a_layer_is_computed_again_by_the_graph_that_computed_it(run_ranks: RunRanks) -> None:
    """Another graph could save other tensors than the backward of the first asks for."""
    rows = tuple((0, sum(range(2, n)), sum(range(2, n + 1))) for n in range(2, 6))
    setting = Setting(rows, recompute=True, offload=("activations",))
    ((graphs_of, counts),) = run_ranks(record, 1, setting, timeout=120)
    assert {rows: len(graphs) for rows, graphs in graphs_of.items()} == {2: 1, 3: 1, 4: 1, 5: 1}
    # Two layers share them, and later steps, and another pipeline, need no others.
    assert counts == [4, 4]


def refuse_exported(rank: int, world_size: int) -> str:
    setting = Setting()
    with pytest.raises(ConfigError) as refused:
        HeteroPipeline(setting.model(), setting.plan(), split="export", compile=True)
    return str(refused.value)


def test_a_model_without_layers_to_compile_is_refused_with_how_it_was_cut(run_ranks: RunRanks) -> None:
    (said,) = run_ranks(refuse_exported, 1)
    assert "compile=True" in said
    assert "Llama is cut by torch.export" in said
