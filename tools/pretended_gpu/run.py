"""Runs CUDA paths on a machine without a GPU: on pretended cards, under a torch that is built for CUDA.

    python tools/pretended_gpu/run.py                               # all scenes of one rank
    python tools/pretended_gpu/run.py --ranks 2 --gpus 2 two-groups line
    python tools/pretended_gpu/run.py --list

Streams, events, the caching allocator, FSDP2 and ProcessGroupNCCL are torch's own; kernels and collectives
do nothing, and memory of a card reads as zero. It shows exceptions on CUDA paths, tensors on wrong devices,
waits of the host for its card in steps after the first, and contexts on cards that are not the rank's; of
several ranks also calls of NCCL that differ, are made late or would wait for ever (order.py). It shows no
numbers, no speed, no races and no memory that does not suffice. `--log DIR` keeps what every rank printed
(`out.RANK`), and what it asked of CUDA and NCCL in which order (`log.RANK.PID`). The exit status is 1 if any
of this was found, and 2 if something is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # As a script this knows its own folder only.

from tools.pretended_gpu.build import DRIVER, PRETENDED, build, default_folder, find_torch
from tools.pretended_gpu.order import compare, find_deadlock, read_logs
from tools.pretended_gpu.scenes import SAVED, SCENES
from tools.report import make_parser, positive_s, write_json
from zorselike.errors import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUPPORT = [ROOT / "tests" / "support" / name for name in (".", "models", "processes")]


@dataclass(frozen=True)
class Outcome:
    """Of a rank in a scene."""

    scene: str
    rank: int | None
    """None: of all together."""
    reason: str
    """Why it failed; empty if it did not."""
    seconds: float = 0.0
    waits: dict[str, int] = field(default_factory=dict)
    """How often the host waited for its card, by place."""
    foreign: tuple[int, ...] = ()
    """Cards of others that it has a context on."""

    @property
    def is_clean(self) -> bool:
        return not (self.reason or self.waits or self.foreign)

    def lines(self) -> list[str]:
        verdict = f"failed: {self.reason}" if self.reason else f"ok, {self.seconds:.1f} s"
        return [
            f"{self.scene}, {'all ranks' if self.rank is None else f'rank {self.rank}'}: {verdict}",
            *(f"  waits for its card {n} times: {place}" for place, n in self.waits.items()),
            *(f"  has a context on card {card}, which is not its own" for card in self.foreign),
        ]


def play(scene: str, ranks: int, gpus: int, libraries: Path, folder: Path, limit_s: float) -> list[Outcome]:
    """Starts the ranks of one scene and waits for them; what they leave is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.json"), *folder.glob("log.*")]:
        old.unlink()
    shutil.rmtree(folder / SAVED, ignore_errors=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        path = [*map(str, (ROOT, *SUPPORT)), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "LD_PRELOAD": str(libraries / PRETENDED),
            "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
            "PRETENDED_GPUS": str(gpus or 1),
            "PRETENDED_HIDDEN": str(0 if gpus else rank),
            "PRETENDED_LOG": str(folder / f"log.{rank}"),
            "PRETENDED_TRACE": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",  # Those would need more of the driver.
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "PYTHONPATH": ":".join(filter(None, path)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        command = [sys.executable, str(HERE / "rank.py"), scene, str(rank), str(ranks), str(folder)]
        with (folder / f"out.{rank}").open("w") as out:
            started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    until = time.monotonic() + limit_s
    try:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.wait()
    is_cut = SCENES[scene].loses_last
    if is_cut and started[-1].returncode == -signal.SIGKILL:
        started.pop()
    outcomes = [
        read_outcome(scene, rank, gpus, folder, process.returncode) for rank, process in enumerate(started)
    ]
    if ranks > 1 and not any(outcome.reason for outcome in outcomes):
        processes = read_logs(folder)
        faults = [*compare(processes, is_cut=is_cut), *([] if is_cut else find_deadlock(processes))]
        outcomes += [Outcome(scene, None, fault) for fault in faults]
    return outcomes


def read_outcome(scene: str, rank: int, gpus: int, folder: Path, status: int) -> Outcome:
    logs = "".join(path.read_text() for path in sorted(folder.glob(f"log.{rank}.*")))
    cards = {int(card) for card in re.findall(r"^context on device (\d+)", logs, re.MULTILINE)}
    foreign = tuple(sorted(cards - {rank % (gpus or 1)}))
    result = folder / f"{rank}.json"
    if not result.exists():
        printed = (folder / f"out.{rank}").read_text(errors="replace").strip().splitlines()
        last = printed[-1] if printed else "it printed nothing"
        reason = f"ended with status {status}, or was not done in time: {last}"
        return Outcome(scene, rank, reason, foreign=foreign)
    found: dict[str, Any] = json.loads(result.read_text())
    return Outcome(scene, rank, found["reason"], found["seconds"], found["waits"], foreign)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays scenes one after the other; the exit status is that of the text above."""
    parser = make_parser(__doc__)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help="default: all for so many ranks")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="cards (default: one a rank; 0: so, but each rank sees its own alone)",
    )
    parser.add_argument("--list", action="store_true", help="name the scenes and end")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where libraries are or will be")
    parser.add_argument("--log", type=Path, metavar="DIR", help="keep logs in a folder for each scene")
    parser.add_argument(
        "--seconds",
        type=positive_s,
        default=400.0,
        metavar="S",
        help="limit of a scene (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.list:
        for name, scene in SCENES.items():
            ranks = f"{scene.least}{'' if scene.most == scene.least else '+'} ranks"
            print(f"{name:<20} {ranks}: {scene.explained}")
        return 0
    names = options.scenes or [
        name for name, scene in SCENES.items() if scene.least <= options.ranks <= scene.most
    ]
    outcomes: list[Outcome] = []
    try:
        _check(names, options.ranks, gpus := options.ranks if options.gpus is None else options.gpus)
        torch = find_torch()
        libraries = (options.into or default_folder(torch)).absolute()
        if not all((libraries / name).exists() for name in (PRETENDED, DRIVER)):
            build(torch, libraries)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            folder = (options.log or Path(scratch)).absolute() / name
            for outcome in play(name, options.ranks, gpus, libraries, folder, options.seconds):
                outcomes.append(outcome)
                print("\n".join(outcome.lines()), flush=True)
    write_json(options.json, outcomes)
    return int(not all(outcome.is_clean for outcome in outcomes))


def _check(names: Sequence[str], ranks: int, gpus: int) -> None:
    if ranks < 1 or gpus < 0:
        raise ConfigError("--ranks is 1 or more, --gpus 0 or more")
    for name in names:
        if name not in SCENES:
            raise ConfigError(f"there is no scene {name}: it is one of {', '.join(SCENES)}")
        least, most = SCENES[name].least, SCENES[name].most
        if not least <= ranks <= most:
            raise ConfigError(f"scene {name} needs --ranks {least}{' at least' if most > least else ''}")


if __name__ == "__main__":
    sys.exit(main())
