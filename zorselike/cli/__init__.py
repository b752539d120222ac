"""The command line."""

from zorselike.cli.main import main

__all__ = ["main"]
