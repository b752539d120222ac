"""`torchrun --nproc-per-node N -m zorselike.train --config recipes/x.toml`"""

from __future__ import annotations

import sys
from contextlib import suppress

from zorselike.errors import USER_ERRORS, ConfigError, describe_missing_package
from zorselike.runtime.processes.launcher import is_first_of_node, report_mistake
from zorselike.text.files import open_closed_streams
from zorselike.train.config.checks import load_plan
from zorselike.train.config.file import parse_command_line

_MISTAKEN, _STOPPED = 2, 130


def main() -> int:
    """Trains as the command line says; returns 2 after an error that the user can correct, 130 after Ctrl-C
    before the first step."""
    open_closed_streams()
    try:
        request = parse_command_line()
        plan = load_plan(request.config)

        # Imported after the checks: torch takes seconds, which a misspelt key should not cost.
        if request.config.elastic.enable and not request.dry_run:
            from zorselike.train.elastic.program import run_elastic

            return run_elastic(request, plan)
        from zorselike.train.trainer import run

        return run(request, plan)
    except ModuleNotFoundError as error:
        return _end(ConfigError(describe_missing_package(error, "the training program")))
    except USER_ERRORS as error:
        return _end(error)
    except KeyboardInterrupt:
        print("stopped before the first step", file=sys.stderr)
        return _STOPPED
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit):
            _tell_others(error)
        elif error.code:
            _tell_others(ConfigError("the command line is wrong"))
        raise


def _end(error: Exception) -> int:
    """Says why, on the screen and to the others: who does not speak for its node in the other order, so that
    it has mostly ended before it repeats what stands there."""
    does_speak = is_first_of_node()
    if not does_speak:
        _tell_others(error)
    report_mistake(error)
    if does_speak:
        _tell_others(error)
    return _MISTAKEN


def _tell_others(error: Exception) -> None:
    """So that none waits for this process in vain."""
    # Not found, perhaps, or given up by Ctrl-C: what is told on the screen is `error`.
    with suppress(Exception, KeyboardInterrupt):
        from zorselike.elastic.meeting.environment import meets_by_store
        from zorselike.runtime.processes.launcher_store import tell_others

        if meets_by_store():
            tell_others(error)


if __name__ == "__main__":
    sys.exit(main())
