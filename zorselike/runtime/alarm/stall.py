"""A rank that has been at one thing for minutes says so: GPUs that wait for each other do not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from zorselike.runtime._compat import nccl_record
from zorselike.runtime.alarm.failure import State, describe_place
from zorselike.text.wording import count

LIMIT_S = 600.0
"""After so long it is said, and after twice as long once more, and so on. Longer than any usual action takes;
one may, and so it ends nothing."""
_MOST_LISTED = 8


class Stall:
    """Looks at one rank's progress."""

    def __init__(
        self, rank: int, say: Callable[[str], None], *, waits: Callable[[], Sequence[str]] | None = None
    ) -> None:
        """`say`: puts a text on the screen; `waits`: what this rank's GPU waits for, by default in NCCL."""
        self._rank, self._say = rank, say
        self._waits = waits or nccl_record()
        self._at = ("", -1)
        self._since_s = 0.0
        self._due_s = LIMIT_S

    def look(self, state: State, now: float) -> None:
        """Now and then. Speaks from a thread of its own, since who asks a GPU may wait for it."""
        if (at := (state.place, state.rounds)) != self._at:
            self._at, self._since_s, self._due_s = at, now, LIMIT_S
        elif now - self._since_s >= self._due_s:
            self._due_s *= 2
            threading.Thread(target=self._tell, args=(state.place, now - self._since_s), daemon=True).start()

    def _tell(self, place: str, seconds: float) -> None:
        if place:
            minutes = count(max(1, round(seconds / 60)), "minute")
            self._say(
                f"zorselike: rank {self._rank} has been {describe_place(place)} for {minutes}; "
                f"py-spy dump --pid {os.getpid()} shows where it waits\n"
            )
        if waits := self._waits():
            more = f", and {len(waits) - _MOST_LISTED} more" if len(waits) > _MOST_LISTED else ""
            self._say(
                f"zorselike: the GPU of rank {self._rank} waits in NCCL, first of all for: "
                f"{'; '.join(waits[:_MOST_LISTED])}{more}; in a step, who waits for a whole GPU "
                "keeps it from sending: a forward by torch.cuda.synchronize (leave it out), or an allocator "
                "short of memory (give this rank less)\n"
            )
