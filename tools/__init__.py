"""Measurements (README.md). What judges the package by code of its own is shared with the tests."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(_TESTS / "oracles"), str(_TESTS / "support" / "checkpoints")]
