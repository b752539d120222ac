"""Processes that simulate beforehand what a search will ask for.

They change no answer: a search asks for the same simulations in the same order however many help, and one
that a helper has done is only there sooner. They are forked when the search begins, so that nothing of the
problem need be sent to them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

MOST_HELPERS = 15
_WAITING_S = 0.05
"""How often who waits for an answer looks at the time."""


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Helpers(Generic[Question, Answer]):
    """So many processes that answer questions ahead of time."""

    def __init__(self, number: int, answer: Callable[[Question], Answer]) -> None:
        """`answer` is called in the helpers, with all that it knows when they are forked; none are where that
        is not safe (torch has threads), or the machine cannot fork."""
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._asked: dict[Question, Connection] = {}
        self._answers: dict[Question, Answer] = {}
        if "torch" in sys.modules or "fork" not in multiprocessing.get_all_start_methods():
            number = 0
        context = multiprocessing.get_context("fork") if number > 0 else None
        for _ in range(min(number, MOST_HELPERS)):
            assert context is not None
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, [ours, *self._pipes], answer), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def offer(self, question: Question) -> bool:
        """Asks a helper, if one is idle and none was asked before; False where none is idle."""
        if question in self._asked or question in self._answers:
            return True
        busy = {*map(id, self._asked.values())}
        for pipe in self._pipes:
            if id(pipe) in busy and pipe.poll():
                self._receive(pipe)
                busy.discard(id(pipe))
            if id(pipe) not in busy:
                pipe.send(question)
                self._asked[question] = pipe
                return True
        return False

    def take(self, question: Question, check: Callable[[], None]) -> Answer | None:
        """The answer, waited for if a helper is at it; None if none was asked. `check` is called while
        waiting, and may raise."""
        while (pipe := self._asked.get(question)) is not None:
            if pipe.poll(_WAITING_S):
                self._receive(pipe)
            else:
                check()
        return self._answers.pop(question, None)

    def _receive(self, pipe: Connection) -> None:
        question = next(own for own, other in self._asked.items() if other is pipe)
        del self._asked[question]
        try:
            self._answers[question] = pipe.recv()
        except EOFError:  # It is gone: what it was at is not answered.
            self._pipes.remove(pipe)

    def close(self) -> None:
        """Ends them, whatever they are at."""
        for process in self._processes:
            process.terminate()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, others: Sequence[Connection], answer: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()
    with suppress(EOFError, OSError):
        while True:
            pipe.send(answer(pipe.recv()))
