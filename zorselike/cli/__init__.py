"""The command line."""

from zorselike.errors import describe_missing_package

try:
    from zorselike.cli.main import main
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {describe_missing_package(error, 'the command line')}") from None

__all__ = ["main"]
