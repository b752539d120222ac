"""Errors a user can mend: each says what is wrong, where, and what to do."""


class PlanError(ValueError):
    """A plan contradicts itself, the model, or the running world."""


class ConfigError(ValueError):
    """A recipe, a command-line flag or an argument of the public API is wrong."""


class DataError(ConfigError):
    """A data file holds what the model cannot take; where that is found in mid-run, no code is to blame."""


class ClusterError(ValueError):
    """A cluster description, or the machines that came up, are wrong."""


class ProfileError(ValueError):
    """A profile is malformed or belongs to something else."""


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or of something else."""


class OtherCheckpointError(CheckpointError):
    """A checkpoint is of another model or another optimizer, as those beside it will be."""


class FileError(ValueError):
    """A file cannot be read or written, or does not say what it must.

    Only between the functions that read files and those that know whose file it is, which raise one
    of the errors above with the file's name.
    """


USER_ERRORS = (ConfigError, PlanError, ClusterError, ProfileError, CheckpointError)
"""What a program reports in one line, without a traceback."""


def describe_missing_package(error: ModuleNotFoundError, what: str) -> str:
    """One line: `what` needs a package that is not installed. Raises `error` again if it is one of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "zorselike"):
        raise error
    return f"{what} needs the package {package}, which is not installed: pip install {package}"
