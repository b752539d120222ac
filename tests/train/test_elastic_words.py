"""What the processes of an elastic run tell each other and people, and who must not start them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from zorselike.elastic.contract import Member
from zorselike.errors import ConfigError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.processes import launcher_store
from zorselike.train import __main__ as program
from zorselike.train.config.checks import check_config
from zorselike.train.config.config import Config, Elastic, Hetero
from zorselike.train.config.model import find_model
from zorselike.train.elastic.known import Known, agree, count_change, describe_change
from zorselike.train.elastic.pipeline import Change
from zorselike.train.elastic.planning import find_plan, refuse_launcher

OLD = Known(job="a", folder="runs/1", first_step=2, validated=7, process="1 of a")
NEW = Known(process="2 of b")


def make_member(number: int) -> Member:
    return Member(f"id{number}", number, "h", 1, f"node{number}", 0, "cpu", 1)


def test_a_newcomer_learns_what_is_known_and_the_newest_counts() -> None:
    seen = Change("loss", lost=(make_member(3),), step_before=8, why={})
    other = replace(seen, why={"id3": "killed"}, step_before=9)
    said = [
        NEW,
        replace(OLD, saved=(4, {}), last=(8, math.nan, math.nan), change=seen),
        replace(OLD, saved=(6, {"step": 6}), last=(8, 0.5, 1.0), validated=8, change=other),
    ]
    known = agree(said)
    assert (known.job, known.folder, known.first_step, known.validated) == ("a", "runs/1", 2, 8)
    assert known.saved == (6, {"step": 6})
    assert known.last == (8, 0.5, 1.0)
    assert known.change is not None
    line = describe_change(known.change, 7, "a plan for 2 ranks in groups of 2, from step 7")
    assert line.startswith("lost node3 local rank 0 (killed); goes on after step 7 from memory within ")
    assert line.endswith("2 steps lost; now a plan for 2 ranks in groups of 2")
    numbers = count_change(known.change, generation=5, num_ranks=2, step=7)
    assert (numbers["elastic/num_lost"], numbers["elastic/steps_lost"]) == (1, 2)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    "environment, why",
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "torchrun ends all processes of a node"),
        (SLURM | {"SLURM_KILL_BAD_EXIT": "1", "SLURM_TASKS_PER_NODE": "1(x2)"}, "srun --no-kill"),
    ],
)
def test_launchers_that_end_survivors_are_refused(environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        refuse_launcher(environment)


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "ZORSELIKE_NANNY_FD": "3"},
        TORCHRUN | {"LOCAL_WORLD_SIZE": "1"},
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "ZORSELIKE_JOIN": "a:1"},
    ],
)
def test_others_are_not(environment: dict[str, str]) -> None:
    refuse_launcher(environment)


@pytest.mark.parametrize("address", [None, "ZORSELIKE_FOUND", "ZORSELIKE_JOIN"])
def test_who_meets_members_by_an_address_looks_for_no_launchers_store(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """A worker in the place of a lost one, say, under srun or mpirun, whose variables are still set."""
    told: list[BaseException] = []
    monkeypatch.setattr(launcher_store, "tell_others", told.append)
    if address is not None:
        monkeypatch.setenv(address, "127.0.0.1:1")
    program._tell_others(ConfigError("no such plan"))
    assert len(told) == (address is None)


def test_ctrl_c_ends_the_telling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(_: BaseException) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher_store, "tell_others", tell)
    program._tell_others(ConfigError("no such plan"))


def test_nobody_plans_for_drift_where_nobody_knows_what_devices_take() -> None:
    config = Config(elastic=Elastic(True, replan_on_drift=True), hetero=Hetero("p.toml", device="cpu"))
    plan = Plan(2, (Group((0,), (Microbatch(0, 0, 2),)),), (Ministage(0, ("layers.0",)),))
    model = find_model(replace(config, model=replace(config.model, flavor="debug")))
    with pytest.raises(ConfigError, match=r"replan_on_drift = true: .* name \[hetero\] profile and cluster"):
        find_plan(config, plan, model, None, torch.device("cpu"))


def test_a_profile_that_is_named_and_not_there_is_no_reason_to_plan_without() -> None:
    hetero = Hetero("p.toml", device="cpu", profile="nowhere.json", cluster="nowhere.toml")
    config = Config(elastic=Elastic(True), hetero=hetero)
    plan = Plan(2, (Group((0,), (Microbatch(0, 0, 2),)),), (Ministage(0, ("layers.0",)),))
    model = find_model(config)
    with pytest.raises(ConfigError, match=r'profile = "nowhere.json": is not there'):
        find_plan(config, plan, model, None, torch.device("cpu"))
    stays = replace(config, elastic=Elastic(True, replan="same groups"))
    assert find_plan(stays, plan, model, None, torch.device("cpu"))[2] is None


@pytest.mark.parametrize(
    "config, why",
    [
        (Config(elastic=Elastic(min_ranks=2)), r"\[elastic\] min_ranks = 2: .*enable = true"),
        (Config(elastic=Elastic(True, mirror_share=0.0)), "mirror_share"),
        (
            Config(elastic=Elastic(True, replan_on_drift=True, replan="same groups")),
            'replan_on_drift = true: needs replan = "auto"',
        ),
        (
            Config(elastic=Elastic(True), hetero=Hetero("p.toml", profile="x")),
            "name both profile and cluster",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_named(config: Config, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_config(replace(config, hetero=replace(config.hetero, plan=config.hetero.plan or "p.toml")))
