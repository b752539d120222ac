"""Tells people, and the leader, of cards that have become slower."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zorselike.elastic.contract import Control
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.drift.detector import DriftDetector
from zorselike.elastic.running import Running

logger = logging.getLogger("zorselike")


def name_drifts(
    running: Running, steps: Sequence[Sequence[float]], leader: Leader, control: Control, *, replans: bool
) -> None:
    """Looks at what every rank computed in some steps, in seconds; names in the leading process, once in a
    generation, who has become slower, and, with `replans`, has a plan for it looked for."""
    members = {member.id: member for member in running.generation.members}
    is_leading, is_news = running.generation.members[0].id == control.id, False
    for busy_s in steps:
        if running.drift is None:
            running.drift = DriftDetector(len(busy_s))
        for drift in running.drift.note(busy_s):
            member = members[running.generation.ranks[drift.rank]]
            if not leader.note_slower(member.id, drift.factor) or not is_leading:
                continue
            is_news = True
            logger.warning(
                "rank %d (device %d of node %s) computes %.2f times longer than at the start of this "
                "generation, and the others do not: look at its temperature, its clocks and what else runs "
                "there",
                *(drift.rank, member.local_rank, member.node, drift.factor),
            )
    if is_news and replans:
        leader.look_ahead(control.request_change)
