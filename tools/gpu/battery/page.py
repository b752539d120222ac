"""What a letter has found, as JSON and as a page of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...report import format_machine
from .part import write_whole

SCHEMA = 1
"""Of the JSON; changed with any of its keys."""
_MARKS = {"passed": "ok", "failed": "WRONG", "skipped": "skipped"}


def write_letter(out: Path, content: dict[str, Any]) -> None:
    """Both files, each whole at any time."""
    letter = content["letter"]
    write_whole(out / f"{letter}.json", json.dumps(content, indent=1) + "\n")
    write_whole(out / f"{letter}.txt", format_letter(content))


def format_letter(content: dict[str, Any]) -> str:
    """The summary first, then every part."""
    parts: Sequence[dict[str, Any]] = content["parts"]
    head = f"{content['letter']}: {content['question']}  [{content['device']}, {content['seconds']:.0f} s]"
    lines = [head, "", format_machine(content["machine"]), "", content["packages"], ""]
    lines += [f"{name}={value}" for name, value in content["environment"].items()]
    lines += ["", *(_summarise(part) for part in parts), ""]
    figures = [figure for part in parts for figure in part["figures"]]
    if figures:
        lines += [*map(_format_figure, figures), ""]
    for part in parts:
        lines += _format_part(part)
    return "\n".join(lines) + "\n"


def _summarise(part: dict[str, Any]) -> str:
    reason = f"  {part['reason']}" if part["reason"] else ""
    return f"{part['status'].upper():9} {part['name']:12} {part['seconds']:6.1f} s{reason}"


def _format_figure(own: dict[str, Any]) -> str:
    verdict = {None: "", True: "met", False: "MISSED"}[own["met"]]
    return f"{own['name']:44} {own['value']:10.3f} {own['target_text']:>9} {verdict:7} {own['note']}"


def _format_part(part: dict[str, Any]) -> list[str]:
    lines = [f"== {part['name']}: {part['what']}", *(f"  {line}" for line in part["lines"])]
    for check in part["checks"]:
        detail = f": {check['detail']}" if check["detail"] else ""
        lines.append(f"  [{_MARKS[check['status']]}] {check['name']}{detail}")
    for title, text in (("its output ends", part["log"]), ("where it stood at its limit", part["stack"])):
        if text:
            lines += [f"  {title}:", *(f"    {line}" for line in text.splitlines())]
    return [*lines, ""]
