"""A training run under two agents of torchrun, as on two nodes, of which the one with the store is killed.

Agents start nannies, and these the workers (`recipes/README.md`). Either the agent alone is killed, or all
that it has started with it, as when a node is lost.
"""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..report import Figure
from .jobs import JobFailedError

_REPOSITORY = Path(__file__).parents[2]
_STEPS, _KILLED_AFTER = 60, 12
_NUM_NODES, _RANKS_A_NODE = 2, 2
_LIMIT_S = 300.0
_ROUND_OFF = 1e-4
"""Of a loss, relative: other plans add up otherwise, in fp32."""


def run_agents() -> dict[str, Any]:
    """Runs that go on without the first agent, and without its node, beside one to which nothing happens.

    Raises:
        JobFailedError: One does not come to its end, or to other losses.
    """
    with tempfile.TemporaryDirectory(prefix="agents") as folder:
        expected = _read_losses(_run(Path(folder) / "whole", "nothing")[0])
        found = {}
        for killed in ("agent", "node"):
            run, seconds = _run(Path(folder) / killed, killed)
            losses = _read_losses(run)
            error = max(abs(losses[step] / loss - 1) for step, loss in expected.items())
            lost = [line for line in (run / "log.txt").read_text().splitlines() if "elastic: lost" in line]
            if len(lost) != (killed == "node") or error > _ROUND_OFF:
                raise JobFailedError(f"{killed} killed: losses {error:.1e} apart, and {lost or 'none lost'}")
            found[killed] = {"seconds": seconds, "largest_error": error, "steps": len(losses), "said": lost}
            print(f"{killed} killed: {found[killed]}", flush=True)
        return found


def describe_agents(found: dict[str, Any]) -> list[Figure]:
    return [
        Figure(
            f"torchrun, node 0's {name} killed",
            each["steps"],
            _STEPS,
            note=f"steps done; {each['seconds']:.1f} s without one",
        )
        for name, each in found.items()
    ]


def _run(folder: Path, killed: str) -> tuple[Path, float]:
    """The run's folder, and the longest time between two steps after the loss."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agents = [_start_agent(node, port, folder) for node in range(_NUM_NODES)]
    try:
        seconds = _attend(agents, folder, killed)
    finally:
        for agent in agents:
            for process in [*_list_descendants(agent.pid), agent.pid]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            agent.wait()
    (run,) = folder.glob("runs/debug_cpu-*")
    return run, seconds


def _start_agent(node: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    given = ["--nnodes", str(_NUM_NODES), "--node-rank", str(node), "--nproc-per-node", str(_RANKS_A_NODE)]
    given += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--max-restarts", "0"]
    worker = ["-m", "zorselike.elastic.meeting.nanny", sys.executable, "-m", "zorselike.train"]
    recipe = ["--config", str(_REPOSITORY / "recipes" / "debug_cpu.toml"), "--elastic.enable"]
    own = [
        "--training.steps",
        str(_STEPS),
        "--metrics.log-freq",
        "1",
        "--job.dump-folder",
        str(folder / "runs"),
    ]
    environment = {"ZORSELIKE_NODE": f"node{node}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with (folder / f"agent{node}.txt").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *given, *worker, *recipe, *own],
            env={**os.environ, "PYTHONPATH": str(_REPOSITORY), **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _attend(agents: list[subprocess.Popen[bytes]], folder: Path, killed: str) -> float:
    """Until the run has done all steps; kills what is to be killed in the middle."""
    until = time.monotonic() + _LIMIT_S
    times: list[float] = []
    is_killed = killed == "nothing"
    while len(times) < _STEPS:
        num_steps = _count_steps(folder)
        times += [time.monotonic()] * (num_steps - len(times))
        if not is_killed and num_steps >= _KILLED_AFTER:
            is_killed = True
            below = list(_list_descendants(agents[0].pid)) if killed == "node" else []
            for process in [agents[0].pid, *below]:
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > until or all(agent.poll() is not None for agent in agents):
            said = "".join((folder / f"agent{i}.txt").read_text()[-3000:] for i in range(_NUM_NODES))
            raise JobFailedError(f"{killed} killed: only {len(times)} of {_STEPS} steps\n{said}")
        time.sleep(0.01)
    return max(b - a for a, b in pairwise(times[_KILLED_AFTER - 1 :]))


def _count_steps(folder: Path) -> int:
    return max((len(_read_losses(path)) for path in folder.glob("runs/debug_cpu-*")), default=0)


def _read_losses(run: Path) -> dict[int, float]:
    path = run / "metrics.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("loss_metrics/global_avg_loss")]
    return {int(float(row["step"])): float(row["loss_metrics/global_avg_loss"]) for row in rows}


def _list_descendants(process: int) -> Iterator[int]:
    """Of a process, by Linux's list."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield from _list_descendants(child)
                yield child
