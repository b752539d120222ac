"""The processes of a training job: they join, read the same data, and wait where a plan leaves them out."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import timedelta
from logging.handlers import MemoryHandler
from typing import TypeVar

import torch.distributed as dist

from zorselike.errors import ClusterError, ConfigError, PlanError
from zorselike.plan.plan import Plan
from zorselike.runtime._compat import Store, default_store
from zorselike.runtime.alarm.alarm import Alarm
from zorselike.runtime.alarm.failure import Failure, is_echo, reason_of
from zorselike.runtime.processes.device import find_device
from zorselike.runtime.processes.identity import find_identity
from zorselike.runtime.processes.processes import (
    Peers,
    Processes,
    choose_backend,
    make_processes,
)
from zorselike.runtime.watched import join_watched
from zorselike.text.wording import count
from zorselike.train.config.config import Config
from zorselike.train.report.colors import PlainFormatter
from zorselike.train.stop import SignalWatch

logger = logging.getLogger("zorselike")

_ENDED = "zorselike/train/ended"
_HEARD = "zorselike/train/heard"
_POLL_S = 1.0
_MOST_POLLS = 3
_MOST_EARLY = 10_000
"""Lines of a log that are kept until it has a file."""

T = TypeVar("T")


def join_job(config: Config, plan: Plan | None) -> AbstractContextManager[Processes]:
    """Joins the processes that a launcher started; one process alone needs none. Without a plan any number
    of them will do.

    Raises:
        PlanError: The number of processes is not the plan's.
        ConfigError: `[hetero] device` is not here.
        ClusterError: The processes do not find each other in time.
    """
    size = find_identity().size
    if plan is not None and size != plan.num_ranks:
        raise PlanError(
            f"the plan {config.hetero.plan} is for {count(plan.num_ranks, 'rank')}, but {size} "
            f"{'process runs' if size == 1 else 'processes run'}: start {plan.num_ranks}, on one machine by "
            f"torchrun --nproc-per-node {plan.num_ranks} -m zorselike.train ..."
        )
    device = find_device(
        config.hetero.device,
        without_gpu='[hetero] device = "cuda", but torch finds no GPU here; set it to "cpu"',
    )
    return join_watched(device, timeout=timedelta(seconds=config.comm.init_timeout_seconds))


@contextmanager
def narrow(processes: Processes, members: Sequence[int]) -> Iterator[Processes | None]:
    """The `members` alone, as if no others had been started; None on the others, which wait at the end until
    the members have ended, so that a launcher does not take them for lost. Collective.

    Raises `ClusterError` on the others where the members end in any other way.
    """
    if len(members) == processes.size:
        yield processes
        return
    store = default_store()
    dist.barrier(group=processes.control)  # Nobody leaves while others are still at what came before.
    dist.destroy_process_group()
    lost: dict[int, Failure] = {}
    # Not every launcher ends those that wait where one that trains dies. How members fail is theirs to say.
    alarm = Alarm(
        processes.rank,
        processes.size,
        store,
        on_loss=lambda failures: lost.update((each.rank, each) for each in failures),
    )
    alarm.idle()
    if processes.alarm is not None:
        processes.alarm.abandon()
    try:
        if processes.rank not in members:
            yield None
            with closing(SignalWatch()):  # The members stop after their step, and save.
                _await_end(store, members, lost)
            _await_those_who_wait(processes, members, store)
            return
        try:
            yield from _gather_members(processes, members, store)
        except BaseException as error:
            _say_end(store, f"process {processes.rank} by {reason_of(error)}")
            raise
        _await_those_who_wait(processes, members, store)
    finally:
        alarm.abandon()


def _gather_members(processes: Processes, members: Sequence[int], store: Store) -> Iterator[Processes]:
    rank = list(members).index(processes.rank)
    dist.init_process_group(
        choose_backend(processes.device),
        store=dist.PrefixStore("zorselike/planned", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=len(members),
        timeout=processes.timeout,
    )
    set_up_logging(rank)
    narrowed = make_processes(processes.device, timeout=processes.timeout)
    yield narrowed
    dist.barrier(group=narrowed.control)
    if rank == 0:
        _say_end(store, "")


def _say_end(store: Store, why: str) -> None:
    with suppress(RuntimeError):  # Its keeper may be one that waited and has been ended.
        store.compare_set(_ENDED, "", why)  # The first says why; an echo comes later.


def _await_those_who_wait(processes: Processes, members: Sequence[int], store: Store) -> None:
    """Where this process may keep the store: torch prints a stack for each that asks one which is gone."""
    until_s = time.monotonic() + _MOST_POLLS * _POLL_S
    with suppress(RuntimeError):
        while processes.rank == 0 and store.add(_HEARD, 0) < processes.size - len(members):
            if time.monotonic() > until_s:
                return
            time.sleep(_POLL_S / 10)


def _await_end(store: Store, members: Sequence[int], lost: Mapping[int, Failure]) -> None:
    why, is_said = "", False
    try:
        while not (is_said := store.check([_ENDED])) and lost.keys().isdisjoint(members):
            time.sleep(_POLL_S)
        why = store.get(_ENDED).decode() if is_said else ""
        store.add(_HEARD, 1)
    except RuntimeError:  # The process that keeps the store is gone: the alarm knows whether it was lost.
        time.sleep(_POLL_S)
    gone = [rank for rank in tuple(lost) if rank in members]
    if gone and (not is_said or is_echo(why)):
        why = f"process {gone[0]} first; look at what they printed last"
    if why:
        raise ClusterError(f"the processes that train have ended before the run was over, {why}")


def agree_on_data(processes: Peers, read: Callable[[], T], *, describe: Callable[[T], str]) -> T:
    """What `read` gives here, if every rank can read it and `describe` is the same everywhere.

    Raises:
        ConfigError: On every rank, when one of them raises it.
        ClusterError: On every rank, when they do not hold the same.
    """
    found: T | None = None
    try:
        found = read()
        said = ("", describe(found))
    except ConfigError as error:
        said = (str(error), "")
    except OSError as error:
        said = (f"{error.filename}: cannot be read: {error.strerror}", "")
    everyone = processes.gather(said)
    for rank, (error_text, _) in enumerate(everyone):
        if error_text:
            raise ConfigError(error_text if said[0] == error_text else f"on process {rank}: {error_text}")
    descriptions = [description for _, description in everyone]
    usual = Counter(descriptions).most_common(1)[0][0]
    for rank, description in enumerate(descriptions):
        if description != usual:
            raise ClusterError(
                f"process {rank} reads other data than the others ({description}, not {usual}): give "
                "every node the same files (for the standard library: the same Python), or one shared "
                "dataset_path"
            )
    assert found is not None
    return found


def set_up_logging(rank: int | None) -> None:
    """Rank 0 logs everything, on standard output; the others, and who has no rank yet, only what is wrong."""
    logging.raiseExceptions = False  # A log that no longer fits on the disk: no traceback a line.
    handler = logging.StreamHandler(sys.stdout)
    style = PlainFormatter if not sys.stdout.isatty() else logging.Formatter
    who = "" if not rank else f"rank {rank} - "
    handler.setFormatter(style(f"[zorselike] %(asctime)s - {who}%(levelname)s - %(message)s"))
    for old in logger.handlers:
        old.close()
    logger.handlers = [handler]
    if rank == 0:  # Until there is a file for it.
        logger.addHandler(MemoryHandler(_MOST_EARLY, flushLevel=logging.CRITICAL + 1))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
