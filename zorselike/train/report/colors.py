"""TorchTitan's colours of log lines, and a formatter that removes them."""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass

_CODES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Colors:
    """Terminal codes; empty strings if the output is no terminal."""

    red: str = ""
    green: str = ""
    orange: str = ""
    turquoise: str = ""
    blue: str = ""
    cyan: str = ""
    magenta: str = ""
    yellow: str = ""
    reset: str = ""

    @classmethod
    def for_terminal(cls, *, disabled: bool) -> Colors:
        """Colours if standard output is a terminal and they are not disabled."""
        if disabled or not sys.stdout.isatty():
            return cls()
        return cls(
            red="\033[31m",
            green="\033[32m",
            orange="\033[38;2;180;60;0m",
            turquoise="\033[38;2;54;234;195m",
            blue="\033[34m",
            cyan="\033[36m",
            magenta="\033[35m",
            yellow="\033[33m",
            reset="\033[39m",
        )


class PlainFormatter(logging.Formatter):
    """Removes colours, for files."""

    def format(self, record: logging.LogRecord) -> str:
        return _CODES.sub("", super().format(record))
