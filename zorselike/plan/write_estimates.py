"""Estimates into a plan file, with everything else in it as its author wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zorselike.errors import PlanError
from zorselike.plan.plan import Estimates, Plan
from zorselike.plan.toml import format_estimates
from zorselike.text.files import read_text, write_text

_HEADER = "[estimates]"


def write_estimates(path: str | Path, estimates: Estimates) -> None:
    """Replaces the `[estimates]` of a plan file, or adds them at its end; comments and shorthands stay.

    A file that holds its estimates in another form of TOML is written anew, without them.

    Raises:
        PlanError: The file is no valid plan, or cannot be written.
    """
    plan = replace(Plan.load(path), estimates=estimates)
    with Plan.errors(f"{path}: "):
        edited = _edit(read_text(path, "plan"), estimates)
        write_text(path, edited if _is_plan(edited, plan) else plan.format())


def _edit(text: str, estimates: Estimates) -> str:
    """The text with these estimates, where others were or at its end."""
    section = format_estimates(estimates)
    lines = text.rstrip().splitlines()
    headers = [number for number, line in enumerate(lines) if line.split("#")[0].strip() == _HEADER]
    if not headers:
        return "\n".join([*lines, "", *section, ""])
    begin = headers[0]
    following = (n for n in range(begin + 1, len(lines)) if lines[n].startswith("["))
    end = next(following, len(lines))
    # What stands before the next header is about that.
    while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return "\n".join([*lines[:begin], *section, *lines[end:], ""])


def _is_plan(text: str, plan: Plan) -> bool:
    try:
        return Plan.parse(text) == plan
    except PlanError:
        return False
