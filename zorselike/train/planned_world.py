"""The processes that a plan uses, where it uses fewer than were started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch.distributed as dist

from zorselike.runtime._compat import default_store
from zorselike.train.world import PATIENCE, World, choose_backend, set_up_logging

_ENDED = "zorselike/train/ended"
_POLL_S = 1.0


@contextmanager
def narrow_world(world: World, members: Sequence[int]) -> Iterator[World | None]:
    """The world of these processes alone, as if no others had been started; None on the others, which wait
    at its end until the members have ended, so that a launcher does not take them for lost. Collective."""
    if len(members) == world.size:
        yield world
        return
    store = default_store()
    dist.barrier(group=world.control)  # Nobody leaves while others are still at what came before.
    dist.destroy_process_group()
    if world.rank not in members:
        yield None
        _wait(lambda: store.check([_ENDED]))
        return
    rank = list(members).index(world.rank)
    dist.init_process_group(
        choose_backend(world.device),
        store=dist.PrefixStore("zorselike/planned", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=len(members),
        timeout=world.timeout,
    )
    set_up_logging(rank)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(control, dist.ProcessGroup)
    yield replace(world, rank=rank, size=len(members), control=control)
    dist.barrier(group=control)
    if rank == 0:
        with suppress(RuntimeError):  # Its keeper may be one that waited and got the signal that ended all.
            store.set(_ENDED, "")


def _wait(has_ended: Callable[[], bool]) -> None:
    """Until the members say that they have ended, or the process that keeps the store is gone."""
    with suppress(RuntimeError):
        while not has_ended():
            time.sleep(_POLL_S)
