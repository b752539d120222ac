"""Saves that fail, disks that nodes do not share, damage, random numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RunRanks
from ranks import run_ranks as run_apart
from saved import contents
from tiny import DIM, VOCABULARY, Case, adamw
from torch import nn

from zorselike import HeteroPipeline
from zorselike.checkpoint.folder import commit, list_steps
from zorselike.checkpoint.layout import step_folder
from zorselike.errors import CheckpointError, ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.memory.host_backed import HostBackedTensors
from zorselike.runtime.ministage.sharding import local_tensor
from zorselike.runtime.state import save, snapshot
from zorselike.runtime.state.schedulers import LRSchedulers, merge_schedules
from zorselike.runtime.state.snapshot import Snapshot

pytestmark = pytest.mark.pooled

RANKS = 3
PLAN = Plan(
    4,
    (
        Group((0, 2), (Microbatch(0, 0, 1), Microbatch(2, 1, 4))),
        Group((1,), (Microbatch(1, 0, 2), Microbatch(1, 2, 4)), offload=("optimizer", "params")),
    ),
    (
        Ministage(0, ("tok_embeddings",)),
        Ministage(1, ("layers.0",)),
        Ministage(0, ("layers.1", "norm")),
        Ministage(1, ("output",)),
    ),
)
CASE = Case(PLAN, 2, tied=True)


def build(case: Case = CASE, **options: Any) -> HeteroPipeline:
    return HeteroPipeline(case.model(), case.plan, optimizer=adamw, **options)


def refused(call: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- what fails -------------------------------------------------------------------------------------


@contextmanager
def full_disk(*, on: bool) -> Iterator[None]:
    """No byte more than the header of a file."""
    write = os.write

    def fail(descriptor: int, content: Any) -> int:
        if len(content) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    os.write = fail if on else write  # type: ignore[assignment]
    try:
        yield
    finally:
        os.write = write


def fail_to_save(rank: int, size: int, folder: Path) -> list[str]:
    said = []
    (folder / f"here-{rank}").mkdir()
    os.chdir(folder / f"here-{rank}")
    Path("kept").touch()
    folder = folder / "checkpoints"
    with build() as pipe:
        pipe.step_global(*CASE.batch(0))
        pipe.save(folder)
        pipe.step_global(*CASE.batch(1))
        with full_disk(on=rank == 1):
            said.append(refused(lambda: pipe.save(folder)))
            in_background = pipe.save(folder, wait=False)
            assert in_background is not None
            pipe.step_global(*CASE.batch(2))
            said.append(refused(in_background.wait))
        if rank == 0:
            (folder / "file").touch()
        said.append(refused(lambda: pipe.save(folder / "file")))
        for optimizer in pipe.optimizers.values():
            optimizer.param_groups[0]["strange"] = object()
        said.append(refused(lambda: pipe.save(folder)))
        for optimizer in pipe.optimizers.values():
            del optimizer.param_groups[0]["strange"]
            optimizer.state["steps"] = 3 if rank == 1 else {"all": torch.ones(2)}
        pipe.step_global(*CASE.batch(2))
        said.append(refused(lambda: pipe.save(folder)))
        for optimizer in pipe.optimizers.values():
            del optimizer.state["steps"]
        assert sorted(path.name for path in folder.iterdir()) == ["file", "lease.json", step_folder(1)]
        said.append(refused(lambda: pipe.save(folder, model_only=rank == 2)))
        said.append(refused(lambda: pipe.save(folder, extra={"seen": rank + 1})))
        said.append(refused(lambda: pipe.save(folder, extra={"seen": {rank}})))
        pipe.save(folder, extra={"seen": 7} if rank == 1 else {})
        assert pipe.load(folder).extra == {"seen": 7}
        extra = {"seen": [7]}
        in_background = pipe.save(folder / "beside", extra=extra, wait=False)
        extra["seen"].append(rank)
        assert in_background is not None
        assert pipe.load(in_background.wait()).extra == {"seen": [7]}
        pipe.step_global(*CASE.batch(3))
    assert [path.name for path in Path.cwd().iterdir()] == ["kept"]
    return said


def test_a_save_that_fails_says_why_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    for said in run_apart(fail_to_save, RANKS, tmp_path):
        full, in_background, no_folder, strange, of_none, unlike, unlike_extra, no_json = said
        assert "different extra" in unlike_extra and "extra.seen is a set" in no_json
        assert "different model_only" in unlike
        for error in (full, in_background):
            assert "rank 1" in error and error.endswith("No space left on device")
            assert "rank-00001.safetensors" in error
        assert "file" in no_folder and "rank 0" in no_folder
        assert "option strange is a object" in strange
        assert "a state under 'steps', which is no parameter" in of_none
    steps = [path.name for path in list_steps(tmp_path / "checkpoints")]
    assert steps == [step_folder(4), step_folder(1)]


def leave_some_out(named: Any) -> torch.optim.Optimizer:
    return adamw([(name, own) for name, own in named if not name.endswith(".bias")])


def load_what_was_left_out(rank: int, size: int, folder: Path) -> None:
    batches = [CASE.batch(step) for step in range(3)]

    def train(folder: Path, steps: range, optimizer: Any) -> list[float]:
        with HeteroPipeline(CASE.model(), CASE.plan, optimizer=optimizer) as pipe:
            if steps.start:
                pipe.load(folder)
            losses = [pipe.step_global(*batches[step]).loss for step in steps]
            if not steps.start:
                pipe.save(folder)
                losses += [pipe.step_global(*batches[step]).loss for step in (1, 2)]
                pipe.load(folder)
                losses += [pipe.step_global(*batches[step]).loss for step in (1, 2)]
            return losses

    _, *went_on = train(folder / "some", range(1), leave_some_out)
    assert went_on[:2] == went_on[2:] == train(folder / "some", range(1, 3), leave_some_out)
    train(folder / "all", range(1), adamw)
    assert len(train(folder / "all", range(1, 3), leave_some_out)) == 2


def test_an_optimizer_may_leave_parameters_out(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(load_what_was_left_out, RANKS, tmp_path)


def save_twice(rank: int, size: int, folder: Path) -> list[bool]:
    goes_on = threading.Event()
    with build() as pipe:
        first = pipe.save(folder, wait=False, after=lambda path: (goes_on.wait(), None)[1])
        pipe.step_global(*CASE.batch(0))
        second = pipe.save(folder, wait=False)
        goes_on.set()
        assert first is not None
        first.wait()
        pipe.step_global(*CASE.batch(1))
        third = pipe.save(folder, wait=False)
        return [save is not None for save in (first, second, third)]


def test_one_save_at_a_time(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(save_twice, RANKS, tmp_path) == [[True, False, True]] * RANKS
    assert [path.name for path in list_steps(tmp_path)] == [step_folder(2), step_folder(0)]


def save_where_all_was_deleted(rank: int, size: int, folder: Path) -> list[str]:
    with build() as pipe:
        pipe.save(folder / "deleted")
        if rank == 0:
            shutil.rmtree(folder / "deleted")
        save = pipe.save(folder / "deleted", wait=False)
        assert save is not None and save.wait().exists()
        return save.warnings


def test_a_folder_that_was_deleted_is_made_again(run_ranks: RunRanks, tmp_path: Path) -> None:
    warnings = run_ranks(save_where_all_was_deleted, RANKS, tmp_path)
    assert [len(told) for told in warnings] == [1, 0, 0] and "it is made anew" in warnings[0][0]
    assert [path.name for path in list_steps(tmp_path / "deleted")] == [step_folder(0)]


def save_without_room(rank: int, size: int, folder: Path) -> list[str]:
    with build() as pipe:
        pipe.step_global(*CASE.batch(0))
        pool = pipe._assembly.resources.memory.pool

        def refuse(purpose: str, sizes: object) -> None:
            raise ConfigError("no room")

        pool.reserve = refuse  # type: ignore[method-assign]
        save = pipe.save(folder / "tight", wait=False)
        assert save is not None and save.finished.is_set()
        del pool.reserve
        pipe.save(folder / "roomy")
        return save.warnings


def test_without_room_for_copies_training_waits(run_ranks: RunRanks, tmp_path: Path) -> None:
    for warnings in run_ranks(save_without_room, RANKS, tmp_path):
        assert ["no room for a copy" in warning for warning in warnings] == [True]
    assert contents(tmp_path / "tight") == contents(tmp_path / "roomy")


# -- beside the next step ------------------------------------------------------------------------------


def save_late(rank: int, size: int, folder: Path) -> None:
    """Rank 1 begins to copy while a ministage's shards have come for its forward, and copies when they have
    left again and the first update waits."""
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(5)), "norm", "output"]
    groups = tuple(Group((r,), (Microbatch(r, 0, 4),), offload=("optimizer", "params")) for r in range(2))
    case = Case(Plan(4, groups, tuple(Ministage(i % 2, (name,)) for i, name in enumerate(names))), 5)
    loaded, copying, updating, taken = (threading.Event() for _ in range(4))
    load, take, written, await_ = HostBackedTensors.load, Snapshot.take, snapshot._written, snapshot._await

    def take_late(self: Snapshot) -> None:
        assert loaded.wait(20)
        take(self)
        taken.set()

    def written_late(part: Any, values: torch.Tensor) -> torch.Tensor:
        copying.set()
        assert updating.wait(20)
        return written(part, values)

    def await_noted(*args: Any) -> None:
        updating.set()
        assert taken.wait(20)
        await_(*args)

    def load_and_hold(self: HostBackedTensors) -> None:
        load(self)
        loaded.set()
        assert copying.wait(20)

    with contextlib.ExitStack() as stack, HeteroPipeline(case.model(), case.plan, optimizer=adamw) as pipe:
        pipe.step_global(*case.batch(0))
        pipe.save(folder / "still")
        if rank == 1:
            patches = {"_written": written_late, "_await": await_noted}
            stack.enter_context(mock.patch.multiple(snapshot, **patches))
            stack.enter_context(mock.patch.object(Snapshot, "take", take_late))
            stack.enter_context(mock.patch.object(HostBackedTensors, "load", load_and_hold))
        save = pipe.save(folder / "beside", wait=False)
        pipe.step_global(*case.batch(1))
        assert save is not None
        save.wait()


def test_what_is_offloaded_is_saved_as_it_was_however_late(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(save_late, 2, tmp_path)
    assert contents(tmp_path / "beside") == contents(tmp_path / "still")


# -- what cannot be loaded ----------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 16
    path.write_bytes(content)


def load_damaged(rank: int, size: int, folder: Path) -> list[Any]:
    found: list[Any] = []
    with build() as pipe:
        for step in range(2):
            pipe.step_global(*CASE.batch(step))
            pipe.save(folder)
        if rank == 0:
            flip(folder / step_folder(2) / "optim" / "rank-00002.safetensors", -3)
        expected = pipe.step_global(*CASE.batch(2)).loss
        loaded = pipe.load(folder)
        found.append((loaded.step, [(path.name, reason) for path, reason in loaded.skipped]))
        pipe.step_global(*CASE.batch(1))
        assert pipe.step_global(*CASE.batch(2)).loss == expected
        found.append(refused(lambda: pipe.load(folder / step_folder(2))))
        found.append(refused(lambda: pipe.step_global(*CASE.batch(0)), ConfigError))
        pipe.load(folder / step_folder(1))
        pipe.step_global(*CASE.batch(1))
        found.append(refused(lambda: pipe.load(folder / "nowhere")))
        pipe.save(folder / "model", model_only=True)
        found.append(refused(lambda: pipe.load(folder / "model")))
        assert pipe.load(folder / "model", model_only=True).step == 2
    other = replace(CASE, num_layers=1, plan=one_rank_each(1))
    with build(other) as pipe:
        found.append(refused(lambda: pipe.load(folder / step_folder(1))))
    with HeteroPipeline(CASE.model(), PLAN, optimizer=lambda named: torch.optim.SGD(named)) as pipe:
        found.append(refused(lambda: pipe.load(folder / step_folder(1))))
        pipe.load(folder / step_folder(1), model_only=True)
    return found


def one_rank_each(num_layers: int) -> Plan:
    names = ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    cuts = [0, 1, 2, len(names)]
    return Plan(
        4,
        tuple(Group((rank,), (Microbatch(rank, 0, 4),)) for rank in range(RANKS)),
        tuple(Ministage(i, tuple(names[cuts[i] : cuts[i + 1]])) for i in range(RANKS)),
    )


def test_what_cannot_be_loaded_is_named_on_every_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    for found in run_ranks(load_damaged, RANKS, tmp_path):
        (step, skipped), damaged, half, nowhere, model_only, other, optimizer = found
        assert step == 1 and [name for name, _ in skipped] == [step_folder(2)]
        for reason in (skipped[0][1], damaged):
            assert "optim/rank-00002.safetensors: tensor exp_avg" in reason and "checksum" in reason
        assert "a load failed half-way" in half
        assert "nowhere: there is no such folder" in nowhere
        assert "model_only=True" in model_only
        assert "is of another model: this one has no layers.1." in other
        assert "AdamW" in optimizer and "SGD" in optimizer


# -- nodes that share no disk -------------------------------------------------------------------------


def train_on_own_disk(rank: int, size: int, folder: Path, *, loads: bool) -> list[float]:
    """Rank 0 on one disk, the others on another; a relative path is a different folder on each."""
    node = folder / ("first" if rank == 0 else "second")
    node.mkdir(exist_ok=True)
    os.chdir(node)
    case = replace(CASE, plan=one_rank_each(2)) if loads else CASE
    with build(case) as pipe:
        if loads:
            pipe.load("checkpoints")
        else:
            pipe.step_global(*case.batch(0))
            pipe.save("checkpoints")
        return [pipe.step_global(*case.batch(step)).loss for step in (1, 2)]


def test_nodes_need_not_share_a_disk(tmp_path: Path) -> None:
    expected = run_apart(partial(train_on_own_disk, loads=False), RANKS, tmp_path)
    files = {
        node: sorted(
            str(path.relative_to(tmp_path / node)) for path in (tmp_path / node).rglob("*.safetensors")
        )
        for node in ("first", "second")
    }
    assert all("rank-00000" in file for file in files["first"]) and len(files["first"]) == 2
    assert not any("rank-00000" in file for file in files["second"]) and len(files["second"]) == 4
    found = run_apart(partial(train_on_own_disk, loads=True), RANKS, tmp_path)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    # Without the second disk's files no rank sees all.
    for path in (tmp_path / "second").rglob("rank-00001.safetensors"):
        path.unlink()
    with pytest.raises(Exception, match=r"no rank sees .*rank-00001"):
        run_apart(partial(train_on_own_disk, loads=True), RANKS, tmp_path)


def fail_on_one_disk(rank: int, size: int, folder: Path) -> list[str]:
    """Rank 0 on one disk, the others on another; first that one's commit fails, then rank 0's."""
    node = folder / ("first" if rank == 0 else "second")
    node.mkdir(exist_ok=True)
    said = []
    with build() as pipe:
        for failing in (1, 0):
            lost = OSError(errno.EIO, "lost", f"disk {failing}")
            with mock.patch.object(
                save, "commit", **({"side_effect": lost} if rank == failing else {"side_effect": commit})
            ):
                said.append(refused(lambda: pipe.save(node / "checkpoints")))
            assert rank == 2 or list_steps(node / "checkpoints") == []  # Who committed there deletes it.
        pipe.save(node / "checkpoints")
    return said


def test_all_disks_have_a_checkpoint_or_none(run_ranks: RunRanks, tmp_path: Path) -> None:
    for said in run_ranks(fail_on_one_disk, RANKS, tmp_path):
        assert [f"disk {failing}: lost" in error for failing, error in zip((1, 0), said, strict=True)] == [
            True
        ] * 2
    for node in ("first", "second"):
        assert sorted(path.name for path in (tmp_path / node / "checkpoints").iterdir() if path.is_dir()) == [
            step_folder(0)
        ]


# -- random numbers -----------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)) for i in range(3)}
        )
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


NAMES = ("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output")
ROWS = ((0, 1), (1, 4))
"""Of both plans' microbatches."""
BEFORE = Plan(4, (Group((0,), tuple(Microbatch(0, *rows) for rows in ROWS)),), (Ministage(0, NAMES),))
AFTER = Plan(
    4,
    (
        Group((0, 2), tuple(Microbatch(r, *rows) for r, rows in zip((2, 0), ROWS, strict=True)), zero=3),
        Group((1,), tuple(Microbatch(1, *rows) for rows in ROWS), recompute="layer"),
    ),
    (Ministage(0, NAMES[:2]), Ministage(1, NAMES[2:3]), Ministage(0, NAMES[3:4]), Ministage(1, NAMES[4:])),
)


def drop(rank: int, size: int, plan: Plan, folder: Path, steps: range) -> list[float]:
    with torch.device("meta"):
        model = Dropping().double()
    with HeteroPipeline(model, plan, optimizer=adamw, seed=5) as pipe:
        if steps.start:
            pipe.load(folder)
        losses = []
        torch.manual_seed(rank)
        own = torch.get_rng_state()
        for step in steps:
            losses.append(pipe.step_global(*CASE.batch(step)).loss)
            if step == 1:
                pipe.save(folder)
        assert torch.equal(torch.get_rng_state(), own)  # The caller's numbers are left alone.
        return losses


def test_dropout_is_the_same_under_another_plan_and_after_a_load(run_ranks: RunRanks, tmp_path: Path) -> None:
    (whole,) = run_ranks(drop, 1, BEFORE, tmp_path, range(4))
    assert len(set(whole)) == 4
    assert run_ranks(drop, 1, BEFORE, tmp_path, range(2, 4)) == [whole[2:]]
    for losses in run_ranks(drop, RANKS, AFTER, tmp_path, range(2, 4)):
        assert losses == pytest.approx(whole[2:], rel=1e-12)


# -- learning rates ------------------------------------------------------------------------------------


class OneState:
    """In place of a ministage's named state."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0 + (name > "a")} for name in names]
        self.optimizer = torch.optim.SGD(groups)

    def group_names(self) -> list[list[str]]:
        return [[name] for name in self.names]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=3)
    decay = schedulers.CosineAnnealingLR(optimizer, 10)
    return schedulers.SequentialLR(optimizer, [warmup, decay], milestones=[3])


def rates_of(schedulers: LRSchedulers, names: dict[int, list[str]]) -> dict[str, float]:
    return {
        name: group["lr"]
        for number, own in names.items()
        for name, group in zip(own, schedulers.schedulers[number].optimizer.param_groups, strict=True)
    }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_go_on_with_other_groups_of_parameters() -> None:
    before, after = {0: ["a", "b"], 1: ["c"]}, {0: ["a"], 1: ["b"]}
    one, two = (
        LRSchedulers({i: OneState(own) for i, own in names.items()}, schedule)  # type: ignore[misc]
        for names in (before, after)
    )
    for _ in range(5):
        one.step()
    state = one.state_dict()
    two.load_state_dict(state)
    for _ in range(4):
        expected, found = rates_of(one, before), rates_of(two, after)
        assert {name: expected[name] for name in found} == found
        one.step()
        two.step()
    assert len({*expected.values()}) == 2
    assert merge_schedules([None, state]) == state
    other = LRSchedulers({0: OneState(["a"])}, lambda own: torch.optim.lr_scheduler.StepLR(own, 2))  # type: ignore[dict-item]
    why = refused(lambda: other.load_state_dict(state), ConfigError)
    assert "SequentialLR(LinearLR, CosineAnnealingLR), and this job has StepLR" in why


# -- what a user changes between steps ---------------------------------------------------------------


def change_all(rank: int, size: int, zero: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """The loss with all parameters changed: nothing offloaded; and offloaded, after a pass that leaves some
    parameters whole."""
    names = ["tok_embeddings", "layers.0", "layers.1", "norm", "output"]
    microbatches = tuple(Microbatch(r, 2 * r, 2 * r + 2) for r in range(size))
    losses = []
    for offload in ((), ("params", "optimizer")):
        group = Group(tuple(range(size)), microbatches, zero=zero, offload=offload)
        plan = Plan(2 * size, (group,), (Ministage(0, tuple(names[:2])), Ministage(0, tuple(names[2:]))))
        case = Case(plan, 2, frozen=("layers.1.", "norm.bias"))
        model = case.model().float()
        with HeteroPipeline(model, plan, optimizer=adamw, param_dtype=dtype) as pipe:
            if offload:
                pipe.evaluate_global(*case.batch(0))
            with pipe.loaded(), torch.no_grad():
                trained = [p for o in pipe.optimizers.values() for p in o.param_groups[0]["params"]]
                for parameter in [*trained, *(p for p in model.parameters() if not p.requires_grad)]:
                    local_tensor(parameter).add_(0.25)
            losses.append(pipe.evaluate_global(*case.batch(0)).loss)
    return losses[0], losses[1]


@pytest.mark.parametrize(("zero", "dtype"), [(0, None), (3, None), (2, torch.bfloat16)])
def test_what_is_changed_inside_loaded_is_what_computes(
    run_ranks: RunRanks, zero: int, dtype: torch.dtype | None
) -> None:
    for resident, offloaded in run_ranks(change_all, 2, zero, dtype):
        assert offloaded == resident
