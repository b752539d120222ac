"""Whole jobs of several ranks: one is killed anywhere in its saves, and a job of another plan goes on."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zorselike import HeteroPipeline, Plan
from zorselike.models import build_model
from zorselike.plan.plan import Group, Microbatch, Ministage

from .calls import count_calls, disturbed, kill_at
from .subject import Share, Subject, Tally

STEPS = 4
NAMES = ("tok_embeddings", "layers.0", "layers.1", "norm", "output")
BEFORE = Plan(
    4,
    (
        Group((0, 2), (Microbatch(0, 0, 1), Microbatch(2, 1, 4))),
        Group((1,), (Microbatch(1, 0, 4),), offload=("optimizer",)),
    ),
    (Ministage(0, NAMES[:2]), Ministage(1, NAMES[2:])),
)
AFTER = Plan(
    4,
    (Group((1,), (Microbatch(1, 0, 2), Microbatch(1, 2, 4))), Group((0,), (Microbatch(0, 0, 4),))),
    (Ministage(0, NAMES[:3]), Ministage(1, NAMES[3:])),
)
TOLERANCE = 1e-10
"""Of losses, in fp64."""


def kill_jobs(_: Subject, scratch: Path, share: Share) -> Tally:
    """Every rank is killed before and after each call that changes the disk; the job that follows must go on
    from what is complete, with the losses of one that never stopped."""
    tally = Tally("jobs")
    (scratch / "whole").mkdir()
    codes = _run(BEFORE, scratch / "whole")
    assert codes == [0] * BEFORE.num_ranks, f"the undisturbed job ended with {codes}"
    expected = _read_losses(scratch / "whole")
    fault = _find_fault(scratch / "whole", expected)
    assert fault is None, f"the undisturbed job cannot be followed: {fault}"
    expected |= _read_losses(scratch / "whole")
    cases = [
        (rank, number, how)
        for rank in range(BEFORE.num_ranks)
        for number in range(json.loads((scratch / "whole" / f"calls-{rank}").read_text()))
        for how in ("before", "after")
    ]
    num_spared = 0
    for rank, number, how in share.of(cases):
        folder = scratch / "job"
        folder.mkdir()
        codes = _run(BEFORE, folder, killed=(rank, number, how))
        # One call more or less, and the last of them never comes: then the job must have ended well.
        num_spared += not any(codes)
        ended = (codes[rank] == -9 and 0 not in codes) or not any(codes)
        fault = None if ended else f"the ranks ended with {codes}"
        tally.add(f"rank {rank} killed {how} call {number}", fault or _find_fault(folder, expected))
        shutil.rmtree(folder)
    if num_spared > tally.tried // 10 + 1:
        tally.lost.append(f"{num_spared} of {tally.tried} jobs were not killed")
    return tally


def _find_fault(folder: Path, expected: dict[int, float]) -> str | None:
    codes = _run(AFTER, folder)
    if codes != [0] * AFTER.num_ranks:
        return f"the next job ended with {codes}"
    losses = _read_losses(folder)
    if STEPS not in losses:
        return f"the next job took the steps {[*losses]}"
    for step, loss in losses.items():
        if abs(loss - expected.get(step, loss)) > TOLERANCE:
            return f"step {step} has the loss {loss}, not {expected[step]}"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    left = [name for name in names if "." in name]
    return f"{left} is left" if left else None


def _run(plan: Plan, folder: Path, *, killed: tuple[int, int, str] | None = None) -> list[int]:
    """A job; its ranks' exit codes."""
    (folder / "store").unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(plan.num_ranks):
        pid = os.fork()
        if not pid:
            try:
                _be_rank(plan, rank, folder, killed)
            except BaseException:
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _be_rank(plan: Plan, rank: int, folder: Path, killed: tuple[int, int, str] | None) -> None:
    os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), plan.num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.num_ranks)
    with torch.device("meta"):
        model = build_model("llama", "debug", num_layers=2, vocab_size=32, max_seq_len=8).double()
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    num_steps = STEPS + (plan is AFTER)  # There is always one to take, and to save.
    # Beside other work a rank may be silent for long; that one was killed its connection says.
    with HeteroPipeline(model, plan, optimizer=optimizer, silence_s=60.0) as pipe:
        if pipe.checkpoint_steps(folder / "checkpoints"):
            pipe.load(folder / "checkpoints")
        if killed is not None and killed[0] == rank:
            with disturbed(kill_at(killed[1], killed[2])):
                _train(pipe, folder, num_steps)
        elif killed is None:
            calls = count_calls(lambda: _train(pipe, folder, num_steps))
            (folder / f"calls-{rank}").write_text(json.dumps(len(calls)))
        else:
            _train(pipe, folder, num_steps)


def _train(pipe: HeteroPipeline, folder: Path, num_steps: int) -> None:
    """Saves after every step, beside the next."""
    losses = {}
    save = None
    for step in range(pipe.num_steps, num_steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(32, (4, 9), generator=generator)
        losses[step] = pipe.step_global(rows[:, :-1], rows[:, 1:]).loss
        if save is not None:
            save.wait()  # Else the next one may be left out, as time has it, and calls cannot be counted.
        save = pipe.save(folder / "checkpoints", wait=False)
    if save is not None:
        save.wait()
    if pipe.rank == 0:
        (folder / "losses").write_text(json.dumps(losses))


def _read_losses(folder: Path) -> dict[int, float]:
    losses: dict[str, float] = json.loads((folder / "losses").read_text())
    return {int(step): loss for step, loss in losses.items()}
