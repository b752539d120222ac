"""What tests see of this machine's GPUs.

A process whose forks are to use GPUs must not have asked CUDA anything, and one whose forks are to run a
backward must not have run one that started autograd's threads for devices. So a process that runs tests finds
no GPU (`hide_gpus`), like one on any machine without; those about GPUs are called by a fork of it that was
made before (`ranks.Apart`).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

_NUMBER = "ZORSELIKE_TESTS_NUM_GPUS"


def count_gpus() -> int:
    """CUDA devices, counted once for this process and all that it starts, by another one."""
    if _NUMBER not in os.environ:
        count = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        built = torch.backends.cuda.is_built()
        os.environ[_NUMBER] = (
            subprocess.run(count, check=True, capture_output=True, text=True).stdout.strip() if built else "0"
        )
    return int(os.environ[_NUMBER])


def need_gpus(count: int = 1) -> None:
    """Skips the test on a machine that has fewer."""
    if (found := count_gpus()) < count:
        pytest.skip(f"needs {count} CUDA devices, this machine has {found}")


def hide_gpus() -> None:
    """This process and all that it starts find none. It must not have looked for any."""
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", _NUMBER: "0"})


def settle_autograd() -> None:
    """Autograd has the threads for devices that it starts in its first backward: none, where no GPU is found.
    A `FakeTensorMode` before that makes up one where torch is built for CUDA."""
    torch.ones((), requires_grad=True).backward()
