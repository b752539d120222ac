"""Plans drawn beforehand for the loss of each node, so that after one nobody waits for a search.

In the leader a thread of low priority asks the planner while the job trains. After a loss what it has found
is taken at once, or else the rule that keeps the groups; where the planner then finds a plan whose steps are
enough faster to pay for going over to it, all go over to it between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from zorselike.cost.profile import Profile
from zorselike.elastic.deciding.decisions import Placement, Planner, Situation, keep_groups
from zorselike.elastic.deciding.memory_left import with_less_memory
from zorselike.elastic.drift.slowed import slow_down, with_own_types
from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.workload import Workload
from zorselike.planner.problem import PlanProblem
from zorselike.planner.search.search import search_plans
from zorselike.text.wording import list_few

logger = logging.getLogger("zorselike")

_NICENESS = 15
Key = frozenset[tuple[str, float, int]]
"""Ids of who is there, how much slower they have become, and how often their memory did not suffice."""


class SearchPlanner:
    """A planner that searches: the best plan for the devices of who is there, by a profile."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        profile: Profile,
        global_batch: int,
        *,
        budget_s: float = 10.0,
    ) -> None:
        """`cluster`: of all nodes that may ever come, by the names that members give theirs."""
        self._problem = PlanProblem(
            workload=workload,
            cluster=cluster,
            profile=profile,
            global_batch=global_batch,
            is_mirrored=True,
        )
        self._budget_s = budget_s
        self._unknown: set[str] = set()
        """Who was said to have no place in the cluster."""

    def __call__(self, situation: Situation) -> Placement:
        """Raises `PlanError` where nothing fits, or nobody who is there is in the cluster."""
        cluster = self._problem.cluster
        names = [node.name for node in cluster.nodes]
        place_of = {(names[place.node], place.local_rank): i for i, place in enumerate(cluster.places)}
        devices = {
            place_of[where]: member
            for member in situation.members
            if (where := (member.node, member.local_rank)) in place_of
        }
        known = {member.id for member in devices.values()}
        others = [f"{m.node} local rank {m.local_rank}" for m in situation.members if m.id not in known]
        if not devices:
            raise PlanError(f"the cluster file has {list_few(names, 'node')}, and not {list_few(others)}")
        if news := [other for other in others if other not in self._unknown]:
            self._unknown.update(news)
            logger.warning("elastic: no plan is looked for with %s: not in the cluster file", list_few(news))
        slower = {
            device: situation.slower[member.id]
            for device, member in devices.items()
            if member.id in situation.slower
        }
        exhausted = {
            device: situation.exhausted[member.id]
            for device, member in devices.items()
            if member.id in situation.exhausted
        }
        problem = replace(self._problem, devices=tuple(sorted(devices)))
        problem = slow_down(with_less_memory(problem, exhausted), slower)
        try:
            answer = search_plans(problem, budget_s=self._budget_s, top=1)
        except (ProfileError, ClusterError) as error:
            raise PlanError(str(error)) from None
        plan = with_own_types(answer.best.case.plan) if slower else answer.best.case.plan
        index_of = {place: i for i, place in enumerate(cluster.places)}
        ids = tuple(devices[index_of[place]].id for place in cluster.place_ranks(plan))
        return Placement(plan, ids)


class Contingencies:
    """What a slow planner has found for who may be left, by who that is."""

    def __init__(self, planner: Planner, *, draw: Callable[[Placement], object] = lambda _: None) -> None:
        """`draw`: raises `PlanError` or `ConfigError` for a plan that the model refuses."""
        self._planner, self._draw = planner, draw
        self._lock = threading.Lock()
        self._found: dict[Key, Placement | None] = {}
        self._thread: threading.Thread | None = None
        self._due: list[Situation] = []
        self._first: Key = frozenset()
        self._then: Callable[[], object] = lambda: None
        """Called once that situation's plan is found, or none is."""
        self._said = ""
        """Why none was found for who was there."""

    def place(self, situation: Situation) -> Placement:
        """At once: what was found for these members, else what the rule says."""
        with self._lock:
            found = self._found.get(_key(situation))
        return keep_groups(situation) if found is None or situation.refused else found

    def find(self, situation: Situation) -> Placement | None:
        """What was found for these members; None: nothing, or not yet."""
        with self._lock:
            return self._found.get(_key(situation))

    def knows(self, situation: Situation) -> bool:
        """Whether these members were looked at, whatever was found."""
        with self._lock:
            return _key(situation) in self._found

    def prepare(self, situation: Situation, then: Callable[[], object] = lambda: None) -> None:
        """Looks, in a thread, for the best plan of who is there (and calls `then`), and for that of who is
        left when a node is lost, node by node. What was found for others is forgotten."""
        due = [situation, *each_node_lost(situation)]
        with self._lock:
            keys = set(map(_key, due))
            self._found = {key: found for key, found in self._found.items() if key in keys}
            self._due = [one for one in due if _key(one) not in self._found]
            self._first, self._then = _key(situation), then
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="elastic contingencies", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether all that is due was looked at within so many seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":  # Niceness is a thread's own there.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                situation = self._due.pop(0)
            found, why = None, ""
            try:
                placement = self._planner(situation)
                self._draw(placement)
                found = placement
            except (PlanError, ConfigError) as error:
                why = str(error)
            with self._lock:
                self._found[_key(situation)] = found
                is_first, then = _key(situation) == self._first, self._then
            if is_first:
                if why not in ("", self._said):
                    self._said = why
                    logger.warning("elastic: no plan was found for who is there, and groups stay: %s", why)
                then()


def each_node_lost(situation: Situation) -> Iterator[Situation]:
    """The situation without each of its nodes; not without the last."""
    nodes = list(dict.fromkeys(member.node for member in situation.members))
    for node in nodes if len(nodes) > 1 else ():
        yield replace(
            situation,
            players=tuple(None if player and player.node == node else player for player in situation.players),
            spares=tuple(spare for spare in situation.spares if spare.node != node),
        )


def pays_back(old_step_s: float, new_step_s: float, switch_s: float, payback_s: float) -> bool:
    """Whether going over to a plan is worth it: what its steps are faster within `payback_s` is more than the
    pause."""
    if not 0 < new_step_s < old_step_s:
        return False
    return payback_s * (1 - new_step_s / old_step_s) > switch_s


def _key(situation: Situation) -> Key:
    slower, exhausted = situation.slower, situation.exhausted
    ids = (member.id for member in situation.members)
    return frozenset((id, slower.get(id, 1.0), exhausted.get(id, 0)) for id in ids)
