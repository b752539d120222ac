"""torch built for CUDA on a machine without a GPU: threads that trace and end."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

_TRACES = """
import threading
import torch
from torch._subclasses import FakeTensorMode
from zorselike.runtime._compat import settle_device_guard

def trace():
    with FakeTensorMode():
        torch.ones(2) + 1

settle_device_guard()
for _ in range(20):
    thread = threading.Thread(target=trace)
    thread.start()
    thread.join()
    junk = [bytearray(size) for size in range(8, 64) for _ in range(200)]  # Over what was freed.
    trace()
"""


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is not built for CUDA")
def test_a_thread_that_has_traced_may_end() -> None:
    ended = subprocess.run([sys.executable, "-c", _TRACES], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
