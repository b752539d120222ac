"""The version that checks and reports name."""

__version__ = "0.1.0"
