"""Measurements (README.md). What judges the package by code of its own is shared with the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "oracles"))
