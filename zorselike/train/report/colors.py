"""TorchTitan's colours of log lines, and their removal."""

from __future__ import annotations

import logging
import re

RED = "\033[31m"
GREEN = "\033[32m"
ORANGE = "\033[38;2;180;60;0m"
TURQUOISE = "\033[38;2;54;234;195m"
BLUE = "\033[34m"
CYAN = "\033[36m"
MAGENTA = "\033[35m"
YELLOW = "\033[33m"
RESET = "\033[39m"

_CODES = re.compile(r"\x1b\[[0-9;]*m")


def remove_colors(text: str) -> str:
    """The text without terminal codes."""
    return _CODES.sub("", text)


class PlainFormatter(logging.Formatter):
    """Removes colours, for files."""

    def format(self, record: logging.LogRecord) -> str:
        return remove_colors(super().format(record))
