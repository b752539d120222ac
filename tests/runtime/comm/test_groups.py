"""How a pipeline's groups end."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from torch.distributed import distributed_c10d

from zorselike.runtime import _compat
from zorselike.runtime.comm import ranks
from zorselike.runtime.comm.ranks import Groups, Ranks


def test_two_threads_abort_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that frees the other, and that one as it leaves."""
    groups, calls = Groups(Ranks(0, (0,))), []
    begun, may_end = threading.Event(), threading.Event()

    def abort(doomed: list[Any], device: int, *, deadline_s: float) -> bool:
        calls.append(list(doomed))
        assert groups.is_aborted
        begun.set()
        return may_end.wait(10.0)

    monkeypatch.setattr(ranks, "abort_groups", abort)
    monkeypatch.setattr(ranks, "has_nccl", lambda group: group == "nccl")
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda group: None)
    groups._made = ["gloo", "nccl"]  # type: ignore[list-item]
    frees = threading.Thread(target=groups.abort)
    frees.start()
    assert begun.wait(10.0)
    threading.Timer(0.2, may_end.set).start()
    assert groups.abandon() and may_end.is_set()
    frees.join()
    assert calls == [["nccl"]] and not groups._made


def test_any_thread_aborts_on_the_device_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has used no GPU yet has the first, where it would open a context."""
    main, used, aborted = threading.current_thread(), [], []

    class Group(dist.ProcessGroup):
        def abort(self) -> None:
            aborted.append(self)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2 if threading.current_thread() is main else 0)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(ranks, "has_nccl", lambda group: True)
    monkeypatch.setattr(ranks, "let_wait", lambda group, limit: None)
    groups, made = Groups(Ranks(0, (0,))), Group(0, 1)
    groups._keep(made)
    frees = threading.Thread(target=groups.abort)
    frees.start()
    frees.join()
    assert aborted == [made] and used == [2]


def test_where_nothing_is_aborted_what_is_computed_counts() -> None:
    groups = Groups(Ranks(0, (0,)))
    assert groups.abort() and not groups.is_aborted


def make_groups(rank: int, world_size: int, bound: torch.device | None) -> list[tuple[timedelta, int]]:
    """How long operations of groups may take, and how many at a time: all ranks', two ranks', own ones."""
    default = dist.distributed_c10d._get_default_group()
    default.bound_device_id = bound
    groups = Groups(Ranks(rank, tuple(range(world_size))))
    new_group = dist.new_group

    def make(*args: Any, **options: Any) -> Any:
        assert default.bound_device_id is None
        return new_group(*args, **options)

    dist.new_group = make
    made = [groups.make(range(world_size), "gloo"), groups.make((0, 2), "gloo")]
    made += [groups.make_own("gloo")] if rank else []
    assert default.bound_device_id == bound
    found = []
    for group in filter(None, made):
        dist.barrier(group)
        options = group._get_backend(torch.device("cpu")).options
        found.append((options._timeout, options._threads))
    groups.close()
    return found


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 0)])
def test_groups_are_their_own_and_wait_as_long_as_a_step_may_take(
    bound: torch.device | None, run_ranks: RunRanks
) -> None:
    """Also where `init_process_group` was given a device, from whose communicator torch would split them."""
    limits = timedelta(days=1), 1
    assert run_ranks(make_groups, 3, bound) == [[limits] * 2, [limits] * 2, [limits] * 3]


def make_own_groups_between(rank: int, world_size: int) -> int:
    """Two of rank 1 alone, then one of all, with names as torch 2.14 counts them; its size."""
    name_group = distributed_c10d._process_group_name

    def name_and_count(ranks: Any, use_hashed_name: bool) -> Any:
        before = distributed_c10d._world.group_count
        name = name_group(ranks, use_hashed_name)
        distributed_c10d._world.group_count = before + 1
        return name

    distributed_c10d._process_group_name = name_and_count
    groups = Groups(Ranks(rank, tuple(range(world_size))))
    own = [groups.make_own("gloo") for _ in range(2 * (rank == 1))]
    everyone = groups.make(range(world_size), "gloo")
    for group in (*own, everyone):
        dist.barrier(group)
    assert everyone is not None
    size = everyone.size()
    groups.close()
    return size


def test_a_group_of_one_process_changes_no_name_of_later_ones(run_ranks: RunRanks) -> None:
    assert run_ranks(make_own_groups_between, 2, timeout=30) == [2, 2]


def test_torch_may_say_more_of_a_gloo_group_than_it_did(tmp_path: Path) -> None:
    """From 2.14 on it says whether groups may be reconfigured."""
    with _compat.one_collective_at_a_time():
        make: Any = distributed_c10d.ProcessGroupGloo
    group = make(
        dist.FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=30), enable_reconfigure=False
    )
    assert group.size() == 1
