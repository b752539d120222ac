"""A member's side of the job in a real process: links to the others, the job's start, its nanny.

`from_environment` is how a process that trains gets its `Meeting`.
"""

from __future__ import annotations

from zorselike.elastic.meeting.environment import from_environment
from zorselike.elastic.meeting.meeting import Meeting, make_member

__all__ = ["Meeting", "from_environment", "make_member"]
