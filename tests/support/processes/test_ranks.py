"""The fixture that the other multi-rank tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Apart, RankError, RunRanks, take_slot

from zorselike.errors import PlanError


def _sum(rank: int, world_size: int, offset: int) -> torch.Tensor:
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return total


def test_values_come_back_by_rank(run_ranks: RunRanks) -> None:
    assert run_ranks(_sum, 3, 1) == [6.0, 6.0, 6.0]


def _raise_on_rank_2(rank: int, world_size: int) -> None:
    if rank == 2:
        raise PlanError("no such row")
    dist.barrier()


def test_the_first_error_is_raised_with_its_traceback(run_ranks: RunRanks) -> None:
    with pytest.raises(PlanError, match="no such row") as raised:
        run_ranks(_raise_on_rank_2, 3)
    assert "rank 2:" in str(raised.value.__cause__)
    assert "in _raise_on_rank_2" in str(raised.value.__cause__)


def _raise_local(rank: int, world_size: int) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("it cannot be pickled")


def test_an_error_that_cannot_be_pickled_is_told(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="it cannot be pickled"):
        run_ranks(_raise_local, 1, init=False)


def _return_local(rank: int, world_size: int) -> object:
    return lambda: None


def test_a_value_that_cannot_be_pickled_is_told(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="cannot be pickled"):
        run_ranks(_return_local, 1, init=False)


def _die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_signal_is_named(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match="rank 1 died of SIGKILL"):
        run_ranks(_die_on_rank_1, 3)


def _hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(3600)
    dist.barrier()


def test_a_timeout_shows_where_each_rank_hangs(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"rank\(s\) 0, 1 of 2 did not end in 2 s") as raised:
        run_ranks(_hang, 2, timeout=2)
    assert str(raised.value).count("in _hang") == 2


def _end_in_many_ways(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        sys.exit(3)
    print("a word", file=sys.stderr)
    return "done"


def test_exits_are_returned_where_they_are_expected(run_ranks: RunRanks) -> None:
    done, stopped, left = run_ranks(_end_in_many_ways, 3, allow_exit=True, init=False)
    assert (done.code, done.value, done.last_line) == (0, "done", "a word")
    assert (stopped.code, stopped.was_stopped) == (-signal.SIGKILL, True)
    assert left.code == 3


def _skip(rank: int, world_size: int) -> None:
    pytest.skip("a reason")


def test_a_skip_on_a_rank_skips(run_ranks: RunRanks) -> None:
    with pytest.raises(pytest.skip.Exception, match="a reason"):
        run_ranks(_skip, 2, init=False)


def test_so_many_processes_have_a_slot(tmp_path: Path) -> None:
    with take_slot(tmp_path, 2) as first, take_slot(tmp_path, 2) as second:
        assert {first, second} == {0, 1}
        child = os.fork()
        if child == 0:
            with take_slot(tmp_path, 2):
                os._exit(0)
        time.sleep(0.2)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _act(how: str) -> None:
    os.environ["SEEN_BY"] = str(os.getpid())
    if how == "skips":
        pytest.skip("not here")
    if how == "raises":
        raise PlanError("it ran")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    assert "SEEN_LATER" not in os.environ


def test_what_is_called_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = Apart()
    monkeypatch.setenv("SEEN_LATER", "by this process")
    apart.call(_act, {"how": "returns"})
    with pytest.raises(PlanError, match="it ran"):
        apart.call(_act, {"how": "raises"})
    with pytest.raises(pytest.skip.Exception, match="not here"):
        apart.call(_act, {"how": "skips"})
    with pytest.raises(RankError, match="SIGKILL"):
        apart.call(_act, {"how": "dies"})
    apart.call(_act, {"how": "returns"})
    assert "SEEN_BY" not in os.environ
    apart.close()


_FORK_AFTER_FAKE_TENSORS = """
import gpus, os, torch
from torch._subclasses.fake_tensor import FakeTensorMode

gpus.settle_autograd()
with FakeTensorMode():
    torch.ones(1)
torch.ones((), requires_grad=True).backward()
if os.fork() == 0:
    torch.ones((), requires_grad=True).backward()
    os._exit(0)
assert os.wait()[1] == 0
"""


def test_forks_run_backwards_after_fake_tensors() -> None:
    """It failed where torch is built for CUDA."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", _FORK_AFTER_FAKE_TENSORS], env=environment, check=True)
