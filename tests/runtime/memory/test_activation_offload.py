"""Activations that wait on the host for their backward: the same gradients, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import volume
from ranks import RunRanks
from tiny import DIM, SEQUENCE, VOCABULARY, Case, adamw, module_names
from torch import Tensor, nn

from zorselike import Broadcast, HeteroPipeline
from zorselike.cost import MinistageBytes, Purpose, walk_memory
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime.memory.activation_offload import ActivationOffload
from zorselike.runtime.memory.memory import Memory
from zorselike.runtime.memory.streams import Streams
from zorselike.schedule import ScheduleSpec, build
from zorselike.schedule.actions import COMPUTE, Action, Kind

pytestmark = pytest.mark.pooled

CPU = torch.device("cpu")
KEY = (0, 0)
Function = Callable[[Tensor, Tensor], Tensor]


# -- the offload by itself ---------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """Saves an input, its output and what is neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x * x * x * w
        ctx.save_for_backward(x, w, x * x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        _, w, squares, y = ctx.saved_tensors
        return 3 * squares * w * grads[0], grads[0] * y / w


def complex_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def gather_largest(x: Tensor, w: Tensor) -> Tensor:
    ordered = (x * w).gather(-1, x.argsort(-1))
    return ordered * ordered.max(-1, keepdim=True)[0] * (x > 0)


FUNCTIONS: dict[str, Function] = {
    "the same tensor often": lambda x, w: x * w * x + torch.sin(x) * x,
    "views of one": lambda x, w: sum(part * part for part in torch.tanh(x * w).chunk(4, -1)),  # type: ignore[misc]
    "a little of much": lambda x, w: (x * w).exp()[:, :1] * (x * w).repeat(1, 9)[:, ::9],
    "transposed": lambda x, w: (x * w).t() @ (x * x).contiguous(),
    "overlapping": lambda x, w: (x * w).sigmoid().unfold(-1, 3, 1) ** 2,
    "broadcast": lambda x, w: (x * w).sum(-1, keepdim=True).expand(-1, 7).square() * x[:, :7],
    "numbers": lambda x, w: (x * w).sum() * (x.mean() * w.sum()).exp(),
    "integers": gather_largest,
    "no elements": lambda x, w: (x * w)[:0].square().sum() + (x * w).square().sum(),
    "softmax": lambda x, w: torch.softmax(x * w, -1) @ x.t(),
    "a function of one's own": lambda x, w: Cube.apply(x, w) * x,  # type: ignore[no-untyped-call]
    "conjugate": lambda x, w: torch.view_as_real(complex_of(x * w) * complex_of(x * x).conj()),
    "negative": lambda x, w: complex_of(x * w).conj().imag ** 2 * complex_of(x * w).real,
    "changed after its use": lambda x, w: torch.relu_((x * w).mul_(2).add_(1)) * w,
    "normalised": lambda x, w: nn.functional.layer_norm(x, (8,), w).pow(3),
    "in bf16": lambda x, w: (x.bfloat16() * w.bfloat16()).exp().float(),
}


def make_offload(*, keeps_strides: bool = False) -> tuple[ActivationOffload, Memory]:
    memory = Memory.of(CPU, Streams())
    return ActivationOffload(memory, keeps_strides=keeps_strides), memory


def leaves() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.rand(6, 8, generator=generator), torch.rand(8, generator=generator) + 0.5
    return (x - 0.5).requires_grad_(), w.requires_grad_()


def differentiate(
    function: Function, offload: ActivationOffload | None, *, leaves_out: bool = True
) -> tuple[Tensor, ...]:
    """Gradients of a function, with activations by way of the host if told so."""
    x, w = leaves()
    if offload is None:
        function(x, w).sum().backward()
    else:
        with offload.keeping(KEY), offload.leaving_out([w] if leaves_out else []):
            y = function(x, w).sum()
        offload.offload(KEY)
        offload.finish()
        offload.load(KEY)
        offload.arrive(KEY)
        y.backward()
        offload.drop(KEY)
    assert x.grad is not None and w.grad is not None
    return x.grad, w.grad


def keep_sparse(rank: int, world_size: int) -> bool:
    offload, _ = make_offload()
    table = torch.eye(6).to_sparse()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.sparse.mm(table, x * w)

    expected = differentiate(function, None)
    with offload.leaving_out([table]):  # As a buffer of a module is.
        found = differentiate(function, offload)
    return all(map(torch.equal, found, expected))


def test_sparse_tensors_stay_where_they_are(run_ranks: RunRanks) -> None:
    assert run_ranks(keep_sparse, 1) == [True]


def compare_functions(rank: int, world_size: int) -> list[str]:
    """The functions that a way over the host changes."""
    found = []
    for name, function in FUNCTIONS.items():
        expected = differentiate(function, None)
        for leaves_out in (True, False):
            offload, memory = make_offload()
            grads = differentiate(function, offload, leaves_out=leaves_out)
            if not all(map(torch.equal, grads, expected)):
                found.append(f"{name}: {grads} instead of {expected}")
            if memory.ledger.device_bytes:
                found.append(f"{name}: {memory.ledger.device_bytes} bytes stay on the device")
    return found


class Strict(torch.autograd.Function):
    """What a compiled layer does: it takes what was saved with the strides that it had alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.strides, ctx.values = x.stride(), x.tolist()
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        assert x.stride() == ctx.strides and x.tolist() == ctx.values
        return grad


def keep_strides(rank: int, world_size: int) -> None:
    """Of a third of each row, in two parts and transposed, as of fused projections; of whole rows; and of a
    row that stands for several. What lies between is kept for the last alone, which shares memory."""
    offload, memory = make_offload(keeps_strides=True)
    with offload.keeping(KEY):
        z = torch.arange(48.0).view(4, 12).requires_grad_() * 1
        total = Strict.apply(z[:1].T).sum() + Strict.apply(z[:, 1:5].view(4, 2, 2).transpose(0, 1)).sum()
        assert memory.ledger.held("activations", "device") == 4 * (12 + 16)
        total = total + Strict.apply((z * 1)[:1, :4].expand(2, 4)).sum()
        assert memory.ledger.held("activations", "device") == 4 * (12 + 16 + 48)
    offload.offload(KEY)
    offload.finish()
    offload.load(KEY)
    offload.arrive(KEY)
    total.backward()
    offload.drop(KEY)


def test_strides_are_kept_for_compiled_layers(run_ranks: RunRanks) -> None:
    run_ranks(keep_strides, 1, init=False)


def test_gradients_are_bit_equal(run_ranks: RunRanks) -> None:
    assert run_ranks(compare_functions, 1, init=False) == [[]]


def count_bytes(rank: int, world_size: int) -> list[int]:
    """What is kept of: one tensor saved often; views that cover it; a parameter and a buffer besides;
    a tensor of another device; nothing, outside of `keeping`."""

    def kept(function: Callable[[], object], *left_out: Tensor) -> int:
        offload, memory = make_offload()
        with offload.keeping(KEY), offload.leaving_out(left_out):
            outputs = function()
        found = memory.ledger.held("activations", "device")
        offload.offload(KEY)
        offload.finish()
        assert memory.ledger.device_bytes == 0
        assert memory.ledger.held("activations", "host") <= -(-found // 64) * 64
        offload.forget()
        del outputs
        return found

    x, w = leaves()
    buffer, elsewhere = torch.ones(6, 8), torch.ones(6, 8, device="meta", requires_grad=True)
    data = x.detach()
    return [
        kept(lambda: [data * w, data * w, data[:] * w, data.t().t() * w], w),
        kept(lambda: [data.view(8, 6) * w[:6], data[:5] * w], w),
        kept(lambda: [(data * w) * buffer, nn.functional.linear(buffer, w[None])], w, buffer),
        kept(lambda: elsewhere * elsewhere),
        kept(lambda: data[:1] * w, w),
    ]


def test_each_storage_is_kept_once_and_parameters_not_at_all(run_ranks: RunRanks) -> None:
    whole = 6 * 8 * 4
    assert run_ranks(count_bytes, 1, init=False) == [[whole, whole, whole, 0, 8 * 4]]


# -- whatever a layer does -------------------------------------------------------------------------


class Block(nn.Module):
    """One linear map, and what a kind of layer does with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(DIM, 3 * DIM)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], *, mask: Tensor) -> Tensor:
        q, k, v = torch.tanh(self.linear(x)).chunk(3, -1)
        match self.kind:
            case "attention":
                return x + 0.5 * nn.functional.scaled_dot_product_attention(q * tables[0], k, v)
            case "dropout":
                return x + self.dropout(q) * mask[..., None]
            case "identity":
                return x
            case "rotary":
                rotated = complex_of(q) * torch.polar(tables[0], tables[1])[:, : DIM // 2].conj()
                return x + 0.1 * torch.view_as_real(rotated * complex_of(k).conj()).flatten(-2)
            case "in place":
                q = q * mask[..., None]
                q.add_(x)
                return torch.relu_(q) + v.clone().mul_(0.5)
            case "of one's own":
                return x + 0.1 * Cube.apply(q, k + 2)  # type: ignore[no-untyped-call]
            case "spoilt":
                y = torch.exp(q)
                z = y * v
                y.add_(1.0)
                return y + z
            case _:
                q = q * mask[..., None]
                self.energy = (q * q).mean()  # Nobody differentiates this.
                q.add_(x)
                return q


class Net(nn.Module):
    """On the convention; layers take a tuple of tables and a mask by keyword."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Block(kind) for i in range(3)})
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(
        self, x: Tensor, *, tables: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if tables is None or mask is None:
            tables, mask = (x.new_ones(SEQUENCE, DIM).float(),) * 2, x.new_ones(x.shape[:2]).float()
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            h = layer(h, tables, mask=mask)
        return self.output(h) if self.output is not None else h


NAMES = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "output"]
KINDS = ("attention", "dropout", "identity", "rotary", "in place", "of one's own", "unused")


def one_rank(offload: Sequence[str], *, recompute: str = "none", zero: int = 2) -> Plan:
    """Three microbatches through three ministages."""
    own = (Microbatch(0, 0, 1), Microbatch(0, 1, 3), Microbatch(0, 3, 4))
    group = Group((0,), own, zero=zero, offload=tuple(offload))
    group = replace(group, recompute=recompute)  # type: ignore[arg-type]
    cuts = (NAMES[:2], NAMES[2:3], NAMES[3:])
    return Plan(4, (group,), tuple(Ministage(0, tuple(cut)) for cut in cuts))


def two_ranks(offload: Sequence[str], *, recompute: str = "none", zero: int = 2) -> Plan:
    """Each a group, so that activations travel."""
    rows = (((0, 2), (2, 4)), ((0, 1), (1, 4)))
    groups = tuple(
        replace(
            Group((rank,), tuple(Microbatch(rank, *r) for r in own), zero=zero, offload=tuple(offload)),
            recompute=recompute,  # type: ignore[arg-type]
        )
        for rank, own in enumerate(rows)
    )
    cuts = (NAMES[:2], NAMES[2:3], NAMES[3:4], NAMES[4:])
    return Plan(4, groups, tuple(Ministage(i % 2, tuple(cut)) for i, cut in enumerate(cuts)))


def build_net(kind: str, plan: Plan) -> HeteroPipeline:
    with torch.device("meta"):
        model = Net(kind)
    return HeteroPipeline(model, plan, optimizer=adamw, split="decoder")


def step_net(pipe: HeteroPipeline, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(VOCABULARY, (2, 4, SEQUENCE), generator=generator)
    mask = torch.rand(4, SEQUENCE, generator=generator).round()
    tables = (torch.rand(SEQUENCE, DIM, generator=generator), torch.ones(SEQUENCE, DIM))
    return pipe.step_global(inputs, targets, mask=mask, tables=Broadcast(tables)).loss


def train_net(kind: str, plan: Plan) -> list[Any]:
    pipe = build_net(kind, plan)
    losses = [step_net(pipe, step) for step in range(2)]
    state = pipe.full_state_dict()
    pipe.close()
    return [losses, *(weight.tolist() for weight in state.values())]


def compare_layers(rank: int, world_size: int, recompute: str) -> list[str]:
    """The kinds of layers that train otherwise where activations, or all, are offloaded; on two ranks,
    where activations travel, all."""
    make = one_rank if world_size == 1 else two_ranks
    offloads = (("activations",), OFFLOAD_KINDS) if world_size == 1 else (OFFLOAD_KINDS,)
    found = []
    for kind in volume.part(KINDS, least=2):
        expected = train_net(kind, make((), recompute=recompute))
        for offload in offloads:
            if train_net(kind, make(offload, recompute=recompute)) != expected:
                found.append(f"{kind}, {offload}")
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_of_any_kind_train_alike(num_ranks: int, recompute: str, run_ranks: RunRanks) -> None:
    """With the same masks of dropout, whether a layer is computed once or twice."""
    assert run_ranks(compare_layers, num_ranks, recompute, timeout=120) == [[]] * num_ranks


def spoil(rank: int, world_size: int, offload: Sequence[str]) -> str:
    with pytest.raises(RuntimeError) as refused:
        step_net(build_net("spoilt", one_rank(offload)), 0)
    return str(refused.value)


@pytest.mark.parametrize("offload", [(), ("activations",), OFFLOAD_KINDS])
def test_what_autograd_refuses_is_refused(offload: Sequence[str], run_ranks: RunRanks) -> None:
    assert "modified by an inplace operation" in run_ranks(spoil, 1, offload)[0]


# -- what stays ------------------------------------------------------------------------------------


def look_for_remains(
    rank: int, world_size: int, recompute: str, zero: int
) -> tuple[int, list[int], list[int]]:
    """Layer outputs of a step that are alive after it; tensors and host bytes after some steps."""
    make = one_rank if world_size == 1 else two_ranks
    pipe = build_net("attention", make(OFFLOAD_KINDS, recompute=recompute, zero=zero))
    outputs: list[weakref.ref[Tensor]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        outputs.append(weakref.ref(output))

    for ministage in pipe._assembly.ministages.values():
        for module in ministage.module.modules():
            module.register_forward_hook(note)
    num_alive, num_tensors, host_bytes = 0, [], []
    for step in range(10):
        outputs.clear()
        step_net(pipe, step)
        gc.collect() if step in (4, 9) else None
        num_alive += sum(output() is not None for output in outputs)
        ledger = pipe._assembly.resources.memory.ledger
        assert ledger.held("activations", "device") == ledger.held("gradient shards", "device") == 0
        if step in (4, 9):
            num_tensors.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
            host_bytes.append(pipe.memory_report().host_peak_bytes)
    pipe.close()
    return num_alive, num_tensors, host_bytes


@pytest.mark.parametrize(
    ("num_ranks", "recompute", "zero"), [(1, "none", 2), (1, "layer", 3), (2, "layer", 2)]
)
def test_nothing_of_a_step_stays(num_ranks: int, recompute: str, zero: int, run_ranks: RunRanks) -> None:
    for num_alive, tensors, host in run_ranks(look_for_remains, num_ranks, recompute, zero, timeout=120):
        assert num_alive == 0
        assert tensors[0] == tensors[1] and host[0] == host[1]


def watch_copies(rank: int, world_size: int) -> tuple[list[int], bool]:
    """Of a step of many microbatches: how much is computed from a copy's begin (to the host) until that is
    waited for; and whether what is held at most is what the memory walk says."""
    rows = 32
    groups = [
        Group((own,), tuple(Microbatch(own, row, row + 1) for row in range(rows)), offload=("activations",))
        for own in range(world_size)
    ]
    names = module_names(2)
    plan = Plan(rows, tuple(groups), (Ministage(0, tuple(names[:2])), Ministage(1, tuple(names[2:]))))
    case = Case(plan, 2)
    begun: deque[int] = deque()
    hidden, num_computed, is_over = [], 0, False
    let_go = ActivationOffload._let_go

    def note(offload: ActivationOffload, copies: list[Any]) -> None:
        for _ in copies:
            computed = num_computed - begun.popleft()
            if not is_over:
                hidden.append(computed)
        let_go(offload, copies)

    def leave(action: Action) -> None:
        nonlocal num_computed
        num_computed += action.kind in COMPUTE
        if action.kind is Kind.OFFLOAD and action.microbatch is not None:
            begun.append(num_computed)

    with HeteroPipeline(case.model(), plan, optimizer=adamw) as pipe, pytest.MonkeyPatch.context() as patch:
        finish = pipe.assembly.resources.activations.finish  # type: ignore[union-attr]

        def end() -> None:
            nonlocal is_over
            is_over = True
            finish()

        patch.setattr(pipe.assembly.resources.activations, "finish", end)
        patch.setattr(ActivationOffload, "_let_go", note)
        with pipe.watching(lambda _: None, leave):
            pipe.step_global(*case.batch(0))
        ledger = pipe.assembly.resources.memory.ledger
        kept = max(pipe.assembly.resources.activations.kept_bytes.values())  # type: ignore[union-attr]
        none = dict.fromkeys(("gathered_bytes", "shard_bytes", "gradient_bytes", "gradient_shard_bytes"), 0)
        sizes = MinistageBytes(**none, state_bytes=0, activation_bytes_per_row=kept)
        lists = build(ScheduleSpec(plan))
        walk = walk_memory(plan, rank, lists[rank], {0: sizes, 1: sizes}, on_gpu=False)
        is_foretold = ledger.peak(Purpose.ACTIVATIONS, "device") == walk.device[Purpose.ACTIVATIONS]
    return hidden, is_foretold


def test_what_is_computed_hides_every_copy_to_the_host(run_ranks: RunRanks) -> None:
    """Of two groups the first goes forward and backward in turn, and each time takes one microbatch back."""
    first, last = run_ranks(watch_copies, 2)
    assert len(first[0]) > 20 and min(first[0]) > 0
    assert min(last[0], default=1) > 0
    assert first[1]
