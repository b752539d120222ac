"""One generation as one process runs it: formed, filled, trained in, left."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from zorselike.elastic.contract import Generation, GenerationOver, Member
from zorselike.elastic.drift.detector import DriftDetector
from zorselike.elastic.held import Held
from zorselike.elastic.replicas import Replicas
from zorselike.elastic.switch import Arrived, fill
from zorselike.elastic.wire import Wire
from zorselike.runtime._compat import Store, forget_unmade_world
from zorselike.runtime.alarm.failure import Failure, is_echo, reason_of
from zorselike.runtime.alarm.heartbeat import LOOPBACK_HOSTS, refuse_loopback
from zorselike.runtime.alarm.watch import OnLoss
from zorselike.runtime.comm.connections import Connections
from zorselike.runtime.leaving import forget
from zorselike.runtime.pipeline import HeteroPipeline

_PATIENCE = timedelta(days=1)
"""Nobody waits for who is lost: that is heard otherwise, and ends the connections. A stopped debugger may."""
_CONNECT_LIMIT = timedelta(seconds=20)
_ECHO_S = 20.0
"""How long an error that reads like the end of another rank waits to be told which one it was."""
_STUCK_S, _STUCK_IN_GLOO_S = 60.0, 5.0
"""After so long at a standstill a thread will not leave: longer than compilers of other processes take, and
where it calls what ends with the connections."""
_CALL_GLOO = ("/torch/distributed/", "/zorselike/runtime/comm/", "/zorselike/runtime/ministage/")

Build = Callable[[OnLoss], HeteroPipeline]


class Running:
    """What this process has of a generation; made before anything is connected."""

    def __init__(self, generation: Generation, id: str) -> None:
        self.generation = generation
        self.rank = generation.ranks.index(id) if id in generation.ranks else None
        """None for a spare, and for who leaves."""
        self.pipe: HeteroPipeline | None = None
        self.replicas: Replicas | None = None
        self.drift: DriftDetector | None = None
        self.losses: tuple[Failure, ...] = ()
        """Ranks that the alarm has reported."""
        self.remains: tuple[HeteroPipeline | None, Connections] | None = None
        """Of a generation that was left without the others; to be kept until these have left it too."""
        self.is_over = threading.Event()
        """Set when something outside of this thread has ended it."""
        self._changed = threading.Event()
        """Set when it is over, or its store was reached."""
        self._id = id
        self._connections = Connections()
        self._left = threading.Event()
        self._store: Store | None = None
        self._is_inside = False
        self._thread = threading.get_ident()
        """That trains."""
        self._clock = time.pthread_getcpuclockid(self._thread)

    @property
    def number(self) -> int:
        return self.generation.number

    @property
    def summary(self) -> str:
        """What the leader has decided for it."""
        return str(self.generation.decision["summary"])

    def interrupt(self) -> None:
        """Frees the thread that trains from whatever it waits for; from any thread."""
        is_first = not self.is_over.is_set()
        self.is_over.set()
        self._changed.set()
        if self.replicas is not None:
            self.replicas.keep()
        self._connections.keep_shut()
        if is_first and not self._left.is_set():
            threading.Thread(target=self._end_if_stuck, name="elastic leaving", daemon=True).start()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While the thread that trains does what `interrupt` must free it from."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _end_if_stuck(self) -> None:
        """Ends this process where its thread waits in Gloo for good, so that others do not wait for it.

        Gloo forgets what it is about to send to a process that has just been killed, and then waits for its
        end though the connection has ended (torch 2.13, by its system calls).
        """
        if self.pipe is not None:
            self.pipe.assembly.groups.abort()  # What NCCL runs keeps threads waiting for the device.
        with suppress(OSError):  # That thread has ended.
            used_s, since_s = time.clock_gettime(self._clock), time.monotonic()
            while not self._left.wait(0.5):
                now_used_s = time.clock_gettime(self._clock)
                stood_s = time.monotonic() - since_s
                if now_used_s > used_s or not self._is_inside:
                    used_s, since_s = now_used_s, time.monotonic()
                elif stood_s > _STUCK_S or (stood_s > _STUCK_IN_GLOO_S and self._calls_gloo()):
                    faulthandler.dump_traceback(all_threads=True)
                    print(
                        f"zorselike: generation {self.number} is over, and this process has waited in it for "
                        f"{stood_s:.0f} s and cannot be freed: it ends, and the job goes on without it",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)

    def _calls_gloo(self) -> bool:
        """Whether the thread that trains may be in Gloo now."""
        frame = sys._current_frames().get(self._thread)
        return frame is not None and any(folder in frame.f_code.co_filename for folder in _CALL_GLOO)

    def is_own(self, error: BaseException) -> bool:
        """Whether this process itself has failed, or only hears by this error that the generation is over."""
        if isinstance(error, GenerationOver) or self.is_over.is_set():
            return False
        return not (is_echo(reason_of(error)) and self.is_over.wait(_ECHO_S))

    def is_the_callers(self, error: BaseException) -> bool:
        """Whether an error is about a call's arguments, and the generation goes on."""
        return self.pipe is not None and not self.pipe.is_broken and self.is_own(error)

    def form(self, backend: str, build: Build, on_loss: Callable[[Running], object]) -> None:
        """Makes the groups and the pipeline; collective among the ranks."""
        generation = self.generation
        self._store = self._connect()
        self._store.set_timeout(_PATIENCE)
        self._connections.add_store(generation.port)  # Before, it would only try again.
        if self.is_over.is_set():
            raise GenerationOver
        if self.rank is None:
            return
        hosts = {member.host for member in generation.members if member.id in generation.ranks}
        if len({*nodes_of(generation)}) > 1 and len(hosts - LOOPBACK_HOSTS) > 1:
            refuse_loopback()
        _say_who_this_is(generation, self.rank)
        if "nccl" in backend:  # Else its watchdog ends this process for the end of another one. Not seen yet.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        size = len(generation.ranks)
        store = self._meet("world", size)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=size, timeout=_PATIENCE)

        def note(losses: tuple[Failure, ...]) -> None:
            self.losses = losses
            on_loss(self)

        self.pipe = build(note)

    def _connect(self) -> Store:
        """The generation's store; in a thread, since torch goes on trying where its keeper has ended, for
        each of its addresses as long as the limit says, and nothing frees a thread that does."""
        generation, found = self.generation, Future[Store]()

        def connect() -> None:
            try:
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    generation.host,
                    generation.port,
                    is_master=False,
                    timeout=_CONNECT_LIMIT,
                    wait_for_workers=False,
                )
                found.set_result(store)
            except Exception as error:
                found.set_exception(error)
            self._changed.set()

        threading.Thread(target=connect, name="elastic store", daemon=True).start()
        self._changed.wait()
        if self.is_over.is_set():
            raise GenerationOver
        return found.result()

    def fill(self, givers: Sequence[str], held: Sequence[Held]) -> Arrived | None:
        """Takes part in moving state if this process is a rank or gives some; collective among these."""
        ranks = self.generation.ranks
        everyone = [*ranks, *(giver for giver in givers if giver not in ranks)]
        if self._id not in everyone:
            return None
        store = self._meet("fill", len(everyone))
        wire = Wire(store, everyone.index(self._id), len(everyone), timeout=_PATIENCE)
        return fill(self.pipe, held, wire)

    def leave_together(self) -> None:
        """Gives groups, buffers and threads back; collective among the ranks. Copies stay."""
        if self.replicas is not None:
            self.replicas.close()
        if self.pipe is not None:
            self.pipe.close()
        self._end()

    def leave_alone(self, error: BaseException | None = None, *, is_own: bool = False) -> None:
        """The same though others may be gone, in whatever state this generation is. Copies stay."""
        self.is_over.set()
        if error is not None and not is_own:
            forget(error)
        if self._left.is_set():
            return
        self.remains = self.pipe, self._connections
        self._connections.shut()
        # Its thread may wait for a GPU, and that for who is lost, until groups have ended.
        abandon = self.replicas.abandon if self.replicas is not None else lambda: True
        if self.pipe is not None:
            self.pipe.abandon(error, is_own=is_own, beside=abandon)
        abandon()
        self._end()

    def _end(self) -> None:
        self._left.set()
        self._connections.end()
        self.pipe = None
        self._store = None
        if self.rank is not None and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        forget_unmade_world()
        gc.collect()  # FSDP's modules and their groups are in circles.

    def _meet(self, name: str, size: int) -> Store:
        """A part of the generation's store, when all who are to use it are there; freed by `interrupt`.

        Gloo waits for who has come and gone again, and has no connection by which to free it. So a last one,
        which was stopped while the others gave it up, waits here instead: they do not answer.
        """
        assert self._store is not None
        part: Store = dist.PrefixStore(f"{self.number}/{name}", self._store)  # type: ignore[attr-defined]
        for each in ("come", "answered"):
            if part.add(each, 1) == size:
                part.set(f"all {each}", "")
            part.wait([f"all {each}"], _PATIENCE)
        return part


def _say_who_this_is(generation: Generation, rank: int) -> None:
    """By a launcher's variables, which this process had for another generation, or not at all."""
    members = {member.id: member for member in (*generation.members, *generation.leaving)}
    nodes = [members[id].node for id in generation.ranks]
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(nodes)),
        LOCAL_RANK=str(here.index(rank)),
        LOCAL_WORLD_SIZE=str(len(here)),
    )


def backend_of(device: torch.device) -> str:
    """Of the default group."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def nodes_of(generation: Generation) -> list[str]:
    """By rank."""
    members: dict[str, Member] = {member.id: member for member in (*generation.members, *generation.leaving)}
    return [members[id].node for id in generation.ranks]
