"""The event loop: when every task of some consecutive steps begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import chain

from zorselike.simulator.network.traffic import Event, Traffic
from zorselike.simulator.slowdown import Slowdown
from zorselike.simulator.tasks.graph import NOTHING, PENDING, Tasks, Times

_CHECKED_EVERY = 1000
"""Times that traffic is settled from one look whether to go on to the next: less than half a second with a
thousand ranks."""


def run(
    tasks: Tasks,
    num_steps: int,
    capacities: Sequence[float],
    *,
    slowdown: float = 1.0,
    is_followed: bool = False,
    check: Callable[[], None] | None = None,
) -> Times:
    """Runs the tasks of a step `num_steps` times; tasks that cannot run stay `PENDING`.

    Args:
        is_followed: whether ranks that end early go on with a step that is not counted, and use wires and
            copies beside those that do not.
        check: is called every now and then, and ends it by what it raises.
    """
    num_tasks = len(tasks.seconds)
    num_counted = num_left = num_tasks * num_steps
    num_steps += is_followed
    following = tasks.link_steps()
    later = list(tasks.num_awaited)
    for follower in chain.from_iterable(following.values()):
        later[follower] += 1
    missing = tasks.num_awaited + later * (num_steps - 1)
    seconds, bundles, followers = tasks.seconds, tasks.bundle, tasks.followers
    begin, end = [PENDING] * len(missing), [PENDING] * len(missing)
    cause = [NOTHING] * len(missing)
    heap: list[Event] = []
    traffic = Traffic(capacities, tasks.bundles, heap)
    slowed = None if slowdown == 1.0 else Slowdown(tasks, slowdown, heap)
    last_step = num_tasks * (num_steps - 1)
    ready = [task for task, count in enumerate(missing) if not count][::-1]
    ended: list[int] = []
    now = 0.0
    num_settled = 0
    while True:
        while ended:
            task = ended.pop()
            end[task] = now
            if task < num_counted:
                num_left -= 1
            local = task % num_tasks
            base = task - local
            for follower in followers[local]:
                follower += base
                missing[follower] -= 1
                if not missing[follower]:
                    cause[follower] = task
                    ready.append(follower)
            if local in following and task < last_step:
                base += num_tasks
                for follower in following[local]:
                    follower += base
                    missing[follower] -= 1
                    if not missing[follower]:
                        cause[follower] = task
                        ready.append(follower)
            if slowed is not None:
                slowed.end(now, task, local)
        if not num_left:
            return Times(begin, end, cause).part(0, num_counted)
        if ready:
            task = ready.pop()
            begin[task] = now
            local = task % num_tasks
            bundle = bundles[local]
            if slowed is not None:
                slowed.begin(now, task, local)
            if bundle >= 0:
                if traffic.start(now, task, bundle):
                    ended.append(task)
            elif seconds[local] <= 0.0:
                ended.append(task)
            elif slowed is None or not slowed.times(local):
                heappush(heap, (now + seconds[local], task))
            continue
        if not traffic.is_settled and (not heap or heap[0][0] > now):
            traffic.settle(now)
            num_settled += 1
            if check is not None and not num_settled % _CHECKED_EVERY:
                check()
        if not heap:
            return Times(begin, end, cause).part(0, num_counted)
        now, code = heappop(heap)
        if code < 0:
            ended += traffic.handle(now, code)
        elif slowed is None or slowed.is_over(now, code, code % num_tasks):
            ended.append(code)
