"""What waits in host memory between uses: whoever holds the tensors sees nothing but their values.

Whatever the optimizer keeps, whatever is read or changed between steps, and wherever a step broke off.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from ranks import RunRanks
from tiny import Case, adamw, module_names
from torch import Tensor, nn

from zorselike import HeteroPipeline
from zorselike.plan.errors import ConfigError
from zorselike.plan.plan import OFFLOAD_KINDS, Group, Microbatch, Ministage, Plan
from zorselike.runtime.memory import Memory
from zorselike.runtime.mirror import Mirror
from zorselike.runtime.sharding import local_tensor
from zorselike.runtime.streams import ImmediateStreams

NUM_LAYERS = 3
NAMES = module_names(NUM_LAYERS)
CPU = torch.device("cpu")
Parameters = list[tuple[str, nn.Parameter]]
Factory = Callable[[Parameters], torch.optim.Optimizer]


# -- a mirror by itself ----------------------------------------------------------------------------


def make(tensors: dict[str, Tensor]) -> tuple[Mirror, Memory]:
    memory = Memory.of(CPU, ImmediateStreams())
    streams = memory.streams
    mirror = Mirror(
        tensors, purpose="optimizer state", memory=memory, homes=[streams.compute], inbound=streams.load_state
    )
    return mirror, memory


def leave(mirror: Mirror, memory: Memory) -> None:
    mirror.free(mirror.store(memory.streams.compute.record()))


def test_values_come_back_into_the_same_tensors() -> None:
    whole = torch.arange(12.0)
    tensors = {
        "row": torch.arange(7.0),
        "column": torch.arange(12.0).view(3, 4).t(),
        "padded": whole[2:9],
        "narrow": torch.arange(5, dtype=torch.int16),
        "empty": torch.empty(0),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    mirror, memory = make(tensors)
    num_bytes = 4 * (7 + 12 + 12) + 2 * 5
    assert mirror.num_bytes == num_bytes == memory.ledger.held("optimizer state", "device")
    for _ in range(3):
        leave(mirror, memory)
        assert memory.ledger.device_bytes == 0
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
        for name, tensor in tensors.items():
            assert torch.equal(mirror.host_copy(name, tensor), before[name]), name
        mirror.load()
        assert all(torch.equal(tensors[name], value) for name, value in before.items())
        tensors["row"].add_(1)
        before["row"].add_(1)
    assert memory.ledger.device_peak == num_bytes
    assert torch.equal(whole[2:9], before["padded"]) and whole[0] == 0 and whole[11] == 11


def test_a_storage_that_several_tensors_share_is_moved_once() -> None:
    whole = torch.arange(16.0)
    tensors = {"low": whole[:8], "all": whole, "high": whole[8:].view(2, 4)}
    mirror, memory = make(tensors)
    assert mirror.num_bytes == memory.ledger.peak("optimizer state", "host") == 64
    leave(mirror, memory)
    assert torch.equal(mirror.host_copy("high", tensors["high"]), torch.arange(8.0, 16.0).view(2, 4))
    mirror.load()
    assert torch.equal(whole, torch.arange(16.0))


def test_room_is_made_without_values_and_discarded_buffers_are_used_again() -> None:
    tensor = torch.ones(32)
    mirror, memory = make({"x": tensor})
    leave(mirror, memory)
    mirror.make_room(memory.streams.update)
    tensor.fill_(2)
    leave(mirror, memory)
    mirror.load()
    assert float(tensor.sum()) == 64
    host = memory.ledger.peak("optimizer state", "host")
    mirror.discard(memory.streams.update.record())
    assert memory.ledger.device_bytes == 0
    again = Mirror(
        {"x": torch.zeros(32)},
        purpose="optimizer state",
        memory=memory,
        homes=[memory.streams.compute],
        inbound=memory.streams.load_state,
    )
    leave(again, memory)
    assert memory.ledger.peak("optimizer state", "host") == host == 128


# -- whatever the optimizer keeps ------------------------------------------------------------------


class Odd(torch.optim.Optimizer):
    """Keeps its state in one of many ways."""

    def __init__(self, named: Parameters, kind: str) -> None:
        self._update = getattr(self, kind)
        self._num_steps = 0
        super().__init__([parameter for _, parameter in named], {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(self.state[parameter], parameter, parameter.grad)
                    parameter.add_(update, alpha=-group["lr"])

    def replaced(self, state: dict[str, Any], _: Tensor, grad: Tensor) -> Tensor:
        """Another tensor every time."""
        state["m"] = state.get("m", torch.zeros_like(grad)) * 0.9 + grad
        return state["m"]

    def unpacked(self, state: dict[str, Any], _: Tensor, grad: Tensor) -> Tensor:
        """None at all during the update, as an optimizer of few bits has it."""
        if "q" in state:
            grad = grad + 0.9 * state.pop("q").to(grad.dtype) / 1000
        state["q"] = (grad * 1000).round().to(torch.int32)
        return grad

    def at_first(self, state: dict[str, Any], parameter: Tensor, grad: Tensor) -> Tensor:
        """From the first step only."""
        if not state:
            state["start"] = parameter.detach().clone()
        return grad + 0.1 * (parameter - state["start"])

    def later(self, state: dict[str, Any], parameter: Tensor, grad: Tensor) -> Tensor:
        """More from the third step on."""
        state.setdefault("m", torch.zeros_like(grad)).mul_(0.9).add_(grad)
        if self._num_steps < 3:
            return state["m"]
        return state["m"] + parameter - state.setdefault("slow", parameter.detach().clone())

    def no_longer(self, state: dict[str, Any], _: Tensor, grad: Tensor) -> Tensor:
        """Nothing from the third step on."""
        if self._num_steps < 3:
            state["m"] = grad.clone()
        else:
            state.clear()
        return grad

    def referring(self, state: dict[str, Any], parameter: Tensor, grad: Tensor) -> Tensor:
        """The last gradient and the parameter themselves."""
        last = state.get("last", grad)
        state.update(last=grad, own=parameter.detach())
        return grad + 0.5 * last

    def shared(self, state: dict[str, Any], parameter: Tensor, grad: Tensor) -> Tensor:
        """One tensor for all parameters."""
        first = self.state[self.param_groups[0]["params"][0]]
        state["sum"] = first.setdefault("sum", torch.zeros(64, dtype=parameter.dtype))
        state["sum"].add_(local_tensor(grad).sum())
        return grad

    def nested(self, state: dict[str, Any], _: Tensor, grad: Tensor) -> Tensor:
        """In a list, where nobody looks; it stays on the device."""
        state.setdefault("all", [torch.zeros_like(grad)])[0].mul_(0.9).add_(grad)
        return state["all"][0]


ODD = ("replaced", "unpacked", "at_first", "later", "no_longer", "referring", "shared", "nested")


def odd(kind: str) -> Factory:
    return lambda named: Odd(named, kind)


def grouped(named: Parameters) -> torch.optim.Optimizer:
    """Two parameter groups, and one parameter that is in neither."""
    trained = [(name, p) for name, p in named if name != "layers.1.up.bias"]
    decayed = [p for _, p in trained if p.dim() > 1]
    others = [p for _, p in trained if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


TORCH: dict[str, Factory] = {
    "SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "RMSprop": lambda named: torch.optim.RMSprop(named, centered=True, momentum=0.5),
    "amsgrad": lambda named: torch.optim.Adam(named, amsgrad=True),
    "fused": lambda named: torch.optim.AdamW(named, fused=True),
    "foreach": lambda named: torch.optim.AdamW(named, foreach=True),
    "NAdam": lambda named: torch.optim.NAdam(named),
    "RAdam": lambda named: torch.optim.RAdam(named),
    "Adadelta": lambda named: torch.optim.Adadelta(named),
    "ASGD": lambda named: torch.optim.ASGD(named),
    "grouped": grouped,
}
FACTORIES = TORCH | {kind: odd(kind) for kind in ODD}


@dataclass(frozen=True)
class Setting:
    """How a `Decoder` of three ministages is trained."""

    num_ranks: int = 1
    zero: int = 2
    dtype: torch.dtype | None = None
    max_norm: float | None = None
    num_ministages: int = 3
    recompute: str = "none"
    tied: bool = True
    frozen: tuple[str, ...] = ()

    def case(self, offload: Sequence[str]) -> Case:
        cuts = [len(NAMES) * i // self.num_ministages for i in range(self.num_ministages + 1)]
        ministages = [Ministage(0, tuple(NAMES[a:b])) for a, b in itertools.pairwise(cuts)]
        rows = ((0, 1), (1, 3), (3, 4))
        own = tuple(Microbatch(i % self.num_ranks, *rows[i]) for i in range(len(rows)))
        group = Group(tuple(range(self.num_ranks)), own, self.zero, offload=tuple(offload))
        group = replace(group, recompute=self.recompute)  # type: ignore[arg-type]
        return Case(Plan(4, (group,), tuple(ministages)), NUM_LAYERS, tied=self.tied, frozen=self.frozen)

    def build(self, offload: Sequence[str], factory: Factory = adamw) -> HeteroPipeline:
        case = self.case(offload)
        return HeteroPipeline(
            case.model() if self.dtype is None else case.model().float(),
            case.plan,
            optimizer=factory,
            param_dtype=self.dtype,
            max_norm=self.max_norm,
        )


IN_PLACE = Setting()
DEFERRED = Setting(dtype=torch.bfloat16, max_norm=0.5, recompute="layer")


def state_tensors(pipe: HeteroPipeline) -> Iterator[Tensor]:
    """What the optimizers keep of each parameter, and the parameters themselves."""
    for optimizer in pipe.optimizers.values():
        for parameter, state in optimizer.state.items():
            kept = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            yield from (local_tensor(tensor.detach()) for tensor in (parameter, *kept))


def train(setting: Setting, offload: Sequence[str], factory: Factory, num_steps: int = 5) -> list[Any]:
    """Losses, weights and state after some steps."""
    pipe = setting.build(offload, factory)
    case = setting.case(offload)
    numbers: list[Any] = []
    host_bytes = []
    for step in range(num_steps):
        result = pipe.step_global(*case.batch(step))
        numbers += [result.loss, result.grad_norm]
        host_bytes.append(pipe.memory_report().host_peak_bytes)
    assert host_bytes[-1] == host_bytes[-2], "host memory grows from step to step"
    with pipe.loaded():
        numbers += [tensor.clone() for tensor in state_tensors(pipe)]
    numbers += list(pipe.full_state_dict().values())
    pipe.close()
    return numbers


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )


def compare(rank: int, world_size: int, setting: Setting, names: Sequence[str]) -> list[str]:
    """The optimizers that offloading changes."""
    return [
        name
        for name in names
        if not same(*(train(setting, offload, FACTORIES[name]) for offload in ((), OFFLOAD_KINDS)))
    ]


@pytest.mark.parametrize("setting", [IN_PLACE, DEFERRED, replace(DEFERRED, num_ranks=2, dtype=torch.float16)])
def test_any_optimizer_does_with_offload_what_it_does_without(setting: Setting, run_ranks: RunRanks) -> None:
    for names in (list(TORCH), list(ODD)):
        for differing in run_ranks(compare, setting.num_ranks, setting, names, timeout=120):
            assert differing == []


def look_after_steps(rank: int, world_size: int, setting: Setting, kinds: Sequence[str]) -> list[str]:
    """The optimizers whose state is on the device between steps."""
    found = []
    for kind in kinds:
        pipe = setting.build(OFFLOAD_KINDS, FACTORIES[kind])
        for step in range(4):
            pipe.step_global(*setting.case(OFFLOAD_KINDS).batch(step))
            held = sum(
                local_tensor(value).untyped_storage().nbytes()
                for optimizer in pipe.optimizers.values()
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor) and value.dim()
            )
            if held or pipe._assembly.shared.memory.ledger.held("optimizer state", "device"):
                found.append(f"{kind} after step {step}: {held} bytes")
        pipe.close()
    return found


@pytest.mark.parametrize("setting", [IN_PLACE, DEFERRED])
def test_all_that_an_optimizer_keeps_is_on_the_host_between_steps(
    setting: Setting, run_ranks: RunRanks
) -> None:
    kinds = ("momentum", "Adagrad", "amsgrad", "fused", "replaced", "unpacked", "at_first", "later", "shared")
    assert run_ranks(look_after_steps, 1, setting, kinds, timeout=120) == [[]]


# -- between steps ---------------------------------------------------------------------------------


def step_and_look(rank: int, world_size: int, setting: Setting) -> list[float]:
    """Losses of steps with looks, evaluations and second looks in between."""
    pipe, case = setting.build(OFFLOAD_KINDS), setting.case(OFFLOAD_KINDS)
    losses = []
    for step in range(4):
        for _ in range(step):
            with pipe.loaded():
                assert all(bool(tensor.isfinite().all()) for tensor in state_tensors(pipe))
        if step % 2:
            losses.append(pipe.evaluate_global(*case.batch(9)).loss)
        with pipe.loaded(), pipe.loaded():
            pass
        losses.append(pipe.step_global(*case.batch(step)).loss)
        pipe.full_state_dict()
    pipe.close()
    return losses


def step_resident(rank: int, world_size: int, setting: Setting) -> list[float]:
    pipe, case = setting.build(()), setting.case(())
    losses = []
    for step in range(4):
        if step % 2:
            losses.append(pipe.evaluate_global(*case.batch(9)).loss)
        losses.append(pipe.step_global(*case.batch(step)).loss)
    pipe.close()
    return losses


@pytest.mark.parametrize("num_ministages", [1, 2, 3])
@pytest.mark.parametrize(
    "setting", [IN_PLACE, DEFERRED, replace(DEFERRED, zero=3), replace(IN_PLACE, zero=0)]
)
def test_looking_changes_nothing(setting: Setting, num_ministages: int, run_ranks: RunRanks) -> None:
    setting = replace(setting, num_ministages=num_ministages)
    assert run_ranks(step_and_look, 1, setting) == run_ranks(step_resident, 1, setting)


def change_between_steps(
    rank: int, world_size: int, setting: Setting, offload: Sequence[str]
) -> tuple[list[float], bool]:
    """Losses where weights, moments, learning rates and groups change between steps."""
    pipe, case = setting.build(offload), setting.case(offload)
    schedulers = pipe.lr_schedulers(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    losses = []
    for step in range(4):
        losses.append(pipe.step_global(*case.batch(step)).loss)
        schedulers.step()
        for optimizer in pipe.optimizers.values():
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        with pipe.loaded():
            pass
        with pipe.loaded(), torch.no_grad():
            for tensor in state_tensors(pipe):
                tensor.mul_(0.75)
        losses.append(pipe.evaluate_global(*case.batch(step)).loss)
    with pipe.loaded(), torch.no_grad():
        for optimizer in pipe.optimizers.values():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.zero_()
    state = pipe.full_state_dict()
    is_zero = all(not tensor.any() for tensor in state.values())
    pipe.close()
    return losses, is_zero


@pytest.mark.parametrize(
    "setting", [IN_PLACE, replace(DEFERRED, tied=False), replace(DEFERRED, tied=False, zero=0, num_ranks=2)]
)
def test_what_is_changed_while_loaded_is_what_goes_on(setting: Setting, run_ranks: RunRanks) -> None:
    """Also where layers compute with rounded copies of what is changed."""
    found, expected = (
        run_ranks(change_between_steps, setting.num_ranks, setting, offload)
        for offload in (OFFLOAD_KINDS, ())
    )
    assert found == expected
    assert found[0][1]


def resume(rank: int, world_size: int, setting: Setting, offload: Sequence[str]) -> tuple[list[float], ...]:
    """Losses of a run, and of one that goes on from its middle with another pipeline; whether what
    was loaded from is still there."""
    first, case = setting.build(offload), setting.case(offload)
    losses = [first.step_global(*case.batch(step)).loss for step in range(2)]
    with first.loaded():
        saved = {i: copy.deepcopy(optimizer.state_dict()) for i, optimizer in first.optimizers.items()}
    weights = [first.full_state_dict()]
    torch.distributed.broadcast_object_list(weights)
    losses = [first.step_global(*case.batch(step)).loss for step in (2, 3)]
    first.close()
    model = case.model().float() if setting.dtype is not None else case.model()
    model.to_empty(device="cpu").load_state_dict(weights[0])
    again = HeteroPipeline(
        model, case.plan, optimizer=adamw, param_dtype=setting.dtype, max_norm=setting.max_norm
    )
    with again.loaded():
        for i, optimizer in again.optimizers.items():
            optimizer.load_state_dict(saved[i])
    resumed = [again.step_global(*case.batch(step)).loss for step in (2, 3)]
    again.close()
    sums = [
        float(local_tensor(value).sum())
        for state in saved.values()
        for moments in state["state"].values()
        for value in moments.values()
    ]
    return losses, resumed, sums


@pytest.mark.parametrize(
    "setting", [replace(IN_PLACE, num_ranks=2, tied=False), replace(DEFERRED, tied=False)]
)
def test_a_run_goes_on_from_a_saved_state(setting: Setting, run_ranks: RunRanks) -> None:
    for losses, resumed, sums in run_ranks(resume, setting.num_ranks, setting, OFFLOAD_KINDS):
        assert losses == resumed and sums


def misuse(rank: int, world_size: int) -> list[str]:
    """What is said of things that would crash, or lose something."""
    messages = []

    def expect_refusal(call: Callable[[], object]) -> None:
        with pytest.raises(ConfigError) as refused:
            call()
        messages.append(str(refused.value))

    def load(pipe: HeteroPipeline) -> None:
        with pipe.loaded():
            pass

    expect_refusal(lambda: IN_PLACE.build((), lambda named: torch.optim.LBFGS([p for _, p in named])))
    pipe = IN_PLACE.build(OFFLOAD_KINDS)
    pipe.step_global(*IN_PLACE.case(()).batch(0))
    expect_refusal(pipe.optimizers[0].state_dict)
    with pipe.loaded():
        assert pipe.optimizers[0].state_dict()["state"]
    pipe.close()
    pipe.close()
    expect_refusal(lambda: load(pipe))
    expect_refusal(pipe.full_state_dict)
    return messages


def test_misuse_is_refused_by_name(run_ranks: RunRanks) -> None:
    closure, outside, closed, exported = run_ranks(misuse, 1)[0]
    assert "LBFGS" in closure and "loaded()" in outside
    assert "closed" in closed and "closed" in exported
