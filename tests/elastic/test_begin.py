"""What a job begins with, and goes back to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

import tools.elastic.ranks as job_ranks
from tools.elastic.faults import make_small
from tools.elastic.jobs import Fault, Job, JobFailedError, run
from zorselike import ElasticPipeline, HeteroPipeline
from zorselike.elastic.contract import Generation, Member, Request, StateLostError
from zorselike.elastic.deciding.leader import Leader
from zorselike.elastic.worker import ElasticWorker
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.checkpoints import Loaded
from zorselike.runtime.state.save import Save

NUM_BEFORE, NUM_AFTER = 3, 3
FROZEN = "layers.0."


build_whole = job_ranks.build_model


def build_model(job: Job) -> torch.nn.Module:
    model = build_whole(job)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def open_alone(job: Job, seed: int) -> HeteroPipeline:
    rows = tuple(Microbatch(0, row, row + 1) for row in range(job.plan.global_batch))
    modules = tuple(name for ministage in job.plan.ministages for name in ministage.modules)
    plan = Plan(job.plan.global_batch, (Group((0,), rows),), (Ministage(0, modules),))
    return HeteroPipeline(job.make_model(), plan, **job.make_options() | {"seed": seed})


def go_on(pipe: HeteroPipeline, job: Job, num_steps: int, begin: Any = None) -> list[float]:
    schedulers, losses = pipe.lr_schedulers(job_ranks.make_scheduler), []
    if begin is not None:
        begin(pipe)
    for _ in range(num_steps):
        losses.append(pipe.step_global(*job.make_rows(pipe.rows_seen)).loss)
        schedulers.step()
    return losses


def save_other_weights(rank: int, size: int, job: Job, folder: Path) -> None:
    with open_alone(job, seed=777) as pipe:
        go_on(pipe, job, NUM_BEFORE)
        pipe.save(folder, extra={"epoch": 5})


def load_alone(rank: int, size: int, job: Job, begin: Any) -> list[float]:
    with open_alone(job, seed=0) as pipe:
        return go_on(pipe, job, NUM_AFTER, begin)


KILLED = Fault(0, 1, "kill", 0.5)


@pytest.mark.usefixtures("forks_inherit")
@pytest.mark.parametrize(
    ("model_only", "fault"),
    # Who leaves gives its state, and nothing is loaded again, of whichever kind it was.
    [(False, KILLED), (True, KILLED), (False, Fault(1, 1, "leave", 0.5))],
)
def test_a_checkpoint_that_is_begun_with_outlasts_losses(
    model_only: bool, fault: Fault, tmp_path: Path
) -> None:
    """Frozen weights too; a rank is lost in the very first step."""
    first = 0 if model_only else NUM_BEFORE
    faults = (replace(fault, step=first + fault.step),)
    job = make_small(*faults, num_steps=first + NUM_AFTER)
    begin = partial(HeteroPipeline.load, path=tmp_path, model_only=model_only)
    with (
        mock.patch.object(job_ranks, "build_model", build_model),
        mock.patch.object(job_ranks, "ElasticPipeline", partial(ElasticPipeline, begin=begin)),
    ):
        run_ranks(save_other_weights, 1, job, tmp_path)
        (expected,) = run_ranks(load_alone, 1, job, begin)
        outcome = run(job)
    assert len(outcome.happened) == 1
    for step, loss in enumerate(expected, first):
        assert outcome.losses[step] and all(abs(own - loss) <= 1e-10 for own in outcome.losses[step]), step


class FakePipe:
    num_steps = 4

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self, path: str) -> Loaded:
        self.calls.append(path)
        return Loaded(Path(path), int(path[-1]), {"from": path})


def begin_anew(begin: Any, checkpoint: str | None) -> tuple[list[str], dict[str, Any], str | None]:
    elastic = SimpleNamespace(
        _begin=begin,
        _schedulers=SimpleNamespace(begin_anew=lambda: None),
        extra={},
        worker=SimpleNamespace(checkpoint=checkpoint),
    )
    pipe: Any = FakePipe()
    ElasticPipeline._begin_anew(elastic, pipe, checkpoint)  # type: ignore[arg-type]
    return pipe.calls, elastic.extra, elastic.worker.checkpoint


def test_a_checkpoint_of_the_job_comes_after_what_it_began_with() -> None:
    """One of adapters has no other weights; and a whole checkpoint is one to go back to."""

    def pretrained(pipe: Any) -> int:
        pipe.calls.append("pretrained")
        return 7

    assert begin_anew(None, None) == ([], {}, None)
    assert begin_anew(pretrained, None) == (["pretrained"], {}, None)
    assert begin_anew(pretrained, "ck-8") == (["pretrained", "ck-8"], {"from": "ck-8"}, "ck-8")
    assert begin_anew(lambda pipe: pipe.load("step-4"), None) == (["step-4"], {"from": "step-4"}, "step-4")
    assert begin_anew(lambda pipe: pipe.load("model-3"), None) == (["model-3"], {"from": "model-3"}, None)


@pytest.mark.usefixtures("forks_inherit")
def test_a_spare_that_is_left_alone_ends_the_job_and_does_not_begin_it_again() -> None:
    job = make_small(Fault(2, 0, "kill", others=(1, 2)))
    assert job.plan.num_ranks == 3
    with pytest.raises(JobFailedError, match="no checkpoint of it is there"):
        run(replace(job, num_spares=1))


@pytest.mark.parametrize(
    ("has_run", "has_begun", "num_steps", "is_refused"),
    [(True, False, 0, True), (True, False, 4, False), (True, True, 0, False), (False, False, 0, False)],
)
def test_who_is_left_with_nothing_of_the_job_s_state_begins_it_from_a_checkpoint_alone(
    has_run: bool, has_begun: bool, num_steps: int, is_refused: bool
) -> None:
    """All who had trained were lost as it came: it trained from step 0, as if that were the job's state."""
    plan = make_small().plan
    members = tuple(
        Member(f"id{i}", i, "127.0.0.1", 0, f"node{i}", 0, "cpu", 2**34) for i in range(plan.num_ranks)
    )
    leader = Leader(plan)
    worker = ElasticWorker(leader, SimpleNamespace())  # type: ignore[arg-type]
    offers = {member.id: worker.offer() | {"has_begun": has_begun} for member in members}
    request = Request("loss", members, (), (), members, {}, offers, (), has_run=has_run)
    decided = leader.decide(request)
    assert decided is not None
    ids, decision = decided
    generation = Generation(2, members, (), ids, "", 0, "loss", decision, None)
    if not is_refused:
        worker.refuse_lost_state(generation, num_steps)
        return
    with pytest.raises(StateLostError, match="no checkpoint of it is there") as caught:
        worker.refuse_lost_state(generation, num_steps)
    with pytest.raises(StateLostError):  # It ends, and tries nothing again.
        worker.fail(caught.value)


def test_a_save_that_is_not_there_yet_is_none_to_go_back_to(tmp_path: Path) -> None:
    worker = ElasticWorker(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    first, second, third = (Save(step, tmp_path / f"folder-{step}") for step in range(3))
    assert worker.offer()["checkpoint"] is None
    worker.note_save(first)
    assert worker.offer()["checkpoint"] is None
    first.path = tmp_path / "folder-0" / "step"
    worker.note_save(second)
    assert worker.offer()["checkpoint"] == str(tmp_path / "folder-0")
    worker.note_save(third)  # The second has failed.
    third.path = tmp_path / "folder-2" / "step"
    assert worker.offer()["checkpoint"] == str(tmp_path / "folder-2")
