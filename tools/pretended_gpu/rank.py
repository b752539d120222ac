"""One rank of a scene, started by run.py: `rank.py SCENE RANK RANKS FOLDER`; writes FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

import torch
import torch.distributed as dist

from tools.pretended_gpu.scenes import SAVED, SCENES
from zorselike.text.wording import first_line

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAITS: Counter[str] = Counter()
"""Of the host for its card, by place."""


def place_of_caller() -> str:
    """The innermost lines of this checkout that led here, and the line beneath if it is torch's."""
    stack = traceback.extract_stack()
    frames = [f for f in stack if Path(f.filename).parent != HERE and Path(f.filename).name != "warnings.py"]
    own = [f for f in frames if f.filename.startswith(str(ROOT / "zorselike"))][-2:]
    shown = [*own, *(f for f in frames[-1:] if f not in own)]
    return " < ".join(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in reversed(shown))


def on_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = str(message)
    if "prototype feature" in text:  # Of set_sync_debug_mode itself.
        return
    if "synchronizing CUDA operation" in text:
        WAITS[place_of_caller()] += 1
    else:
        print(f"{filename}:{lineno}: {category.__name__}: {text}", file=sys.stderr)


def main(scene: str, rank: int, ranks: int, folder: Path) -> None:
    warnings.showwarning = on_warning
    warnings.simplefilter("always")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    if not SCENES[scene].makes_groups:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    began, reason = time.monotonic(), ""
    try:
        SCENES[scene].play(ranks, folder / SAVED)
    except BaseException as error:
        traceback.print_exc()
        reason = first_line(error)
    found = {"reason": reason, "seconds": time.monotonic() - began, "waits": WAITS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(0)  # What would end the process group waits for others, which may have failed.


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
