"""The launchers for which there are files, and what these are called."""

from __future__ import annotations

from shlex import quote
from typing import Literal, NamedTuple, Protocol

from zorselike.cli.launch.job import Job, name_job
from zorselike.cli.launch.jobset import write_jobset
from zorselike.cli.launch.ray import write_driver
from zorselike.cli.launch.skypilot import write_task
from zorselike.cli.launch.slurm import write_batch_script
from zorselike.cli.launch.torchrun import list_commands
from zorselike.errors import ConfigError, FileError
from zorselike.text.files import write_text

Launcher = Literal["torchrun", "slurm", "jobset", "skypilot", "ray"]


class _Write(Protocol):
    def __call__(self, job: Job, *, file: str) -> str: ...


class _File(NamedTuple):
    """A launcher's file."""

    suffix: str
    write: _Write
    start: str
    """The command that starts it, before its name."""


_FILES: dict[Launcher, _File] = {
    "slurm": _File(".sbatch", write_batch_script, "sbatch"),
    "jobset": _File(".jobset.yaml", write_jobset, "kubectl apply --server-side -f"),
    "skypilot": _File(".sky.yaml", write_task, "sky jobs launch"),
    "ray": _File(".ray.py", write_driver, "ray job submit --working-dir . -- python"),
}


def name_file(launcher: Launcher, *, plan: str) -> str | None:
    """The file that is written here for the plan of this path; None where commands are printed."""
    return None if launcher == "torchrun" else f"{name_job(plan)}{_FILES[launcher].suffix}"


def write_launch(job: Job, launcher: Launcher, *, output: str | None = None) -> list[str]:
    """Lines for the user: torchrun's commands, or the name of the file that was written and how to start it.

    `output`: the file; unless given, here and by the plan's name.

    Raises:
        ConfigError: the launcher cannot start such a job, or the file cannot be written.
    """
    path = output or name_file(launcher, plan=job.path)
    if path is None:
        return list_commands(job)
    target = _FILES[launcher]
    text = target.write(job, file=path)
    try:
        write_text(path, text)
    except FileError as error:
        raise ConfigError(f"launch: {path} {error}") from None
    return [f"wrote {path}: {target.start} {quote(path)}"]
