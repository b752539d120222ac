"""Fresh processes for jobs: CUDA keeps memory, streams and compiled kernels of what ran before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from .job import Job, Outcome


def spawn(job: Job, script: Path, timeout_s: float) -> Outcome:
    """Runs `script --job JSON` in a process of its own and reads what it hands back."""
    result_fd = os.memfd_create("result")
    command = [sys.executable, str(script), "--job", job.to_json(), "--result-fd", str(result_fd)]
    # A process of its own session, so that one that hangs in the driver can be ended with its threads.
    child = subprocess.Popen(command, pass_fds=[result_fd], start_new_session=True)
    try:
        code = child.wait(timeout_s)
        text = os.pread(result_fd, os.fstat(result_fd).st_size, 0)
    except subprocess.TimeoutExpired:
        return Outcome(None, "time", f"not over after {timeout_s:.0f} s")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        os.close(result_fd)
    return Outcome(**json.loads(text)) if text else _without_result(code)


def hand_back(outcome: Outcome, result_fd: int) -> NoReturn:
    """The child's side of `spawn`; does not return, since a process that only ends need not first
    unlock what it locked."""
    with os.fdopen(result_fd, "wb") as memory:
        memory.write(json.dumps(vars(outcome)).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _without_result(code: int) -> Outcome:
    if code == -signal.SIGKILL:
        return Outcome(None, "host memory", "ended by the system (SIGKILL)")
    return Outcome(None, "other", f"ended with code {code} and without a result")
