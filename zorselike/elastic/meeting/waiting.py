"""What a member waits for that has no part in its job, in words for whoever started it."""

from __future__ import annotations

from zorselike.elastic.membership.machine import Membership


def is_spare(machine: Membership) -> bool:
    """Whether its job runs, as far as this member knows, and it is no rank of it."""
    roster, generation = machine.committed, machine.generation
    if roster is None or not roster.number:
        return False
    return machine.me.id not in roster or (generation is not None and machine.me.id not in generation.ranks)


def describe_wait(machine: Membership, unanswered: str = "") -> str:
    """Empty where it waits for others that are about to answer, or has a part. `unanswered`: see `Links`."""
    roster, num_founding, me = machine.committed, machine.leading.num_founding, machine.me
    leader = machine.find(machine.leader or "")
    if machine.round is not None or machine.over is not None:
        return ""
    if roster is None or leader is None:
        return "waits for a member of its job to answer" + (f" ({unanswered})" if unanswered else "")
    job = f"the job that {leader.host}:{leader.port} leads"
    if num_founding:
        return (
            f"waits for members: {1 + len(machine.arrivals)} of the {num_founding} that its job starts with "
            f"are at {me.host}:{me.port}"
        )
    if not roster.number:
        return f"waits for the other members with which {job} starts"
    if is_spare(machine):
        return (
            f"waits as a spare: {job} takes it in when a rank is lost or leaves, or when a plan with it pays "
            "back"
        )
    return ""
