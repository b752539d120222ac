"""What starts a plan whose nodes, or file, have names that shells and Kubernetes read in their own way."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from zorselike.cli.launch.job import Job, Program
from zorselike.cli.launch.launchers import write_launch
from zorselike.errors import ConfigError, PlanError
from zorselike.plan.plan import Device, Group, Microbatch, Ministage, Plan

POD = 63
"""Characters of a pod's name at most; Kubernetes adds five of its own after a hyphen."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launch(
    launcher: Any, *nodes: str, path: str = "plan.toml", types: tuple[str, ...] = ("T4",)
) -> list[str]:
    """What is told of a plan with a device on each node."""
    devices = tuple(Device(i, node, 0, types[i % len(types)]) for i, node in enumerate(nodes))
    ranks = tuple(range(len(nodes)))
    group = Group(ranks, tuple(Microbatch(rank, rank, rank + 1) for rank in ranks))
    plan = Plan(len(nodes), (group,), (Ministage(0, ("a", "b")),), devices).validate()
    plan.save(path)
    Path("my run.toml").touch()
    return write_launch(Job(plan=plan, path=path, program=Program(config="my run.toml")), launcher)


@pytest.mark.parametrize("name", ["$(touch taken)", "it's", "a;b", "a b", "#a"])
def test_torchrun_meets_at_a_name_that_a_shell_would_read(name: str) -> None:
    for line in launch("torchrun", name, "other")[:2]:
        words = shlex.split(line, comments=True)
        assert words[words.index("--rdzv-endpoint") + 1] == f"{name}:29500"
        assert words[-2:] == ["--hetero.plan", "plan.toml"]


@pytest.mark.parametrize("name", ["my desk", "a=b", "*"])
def test_slurm_refuses_names_that_it_cannot_pass_on(name: str) -> None:
    with pytest.raises(ConfigError, match="for Slurm a node's name has no spaces") as error:
        launch("slurm", name, "b")
    assert repr(name) in str(error.value) and "\n" not in str(error.value)
    launch("slurm", "büro-1.local", "10.0.0.2")


def test_a_line_of_a_comment_cannot_end_in_a_name() -> None:
    for device in (Device(0, "a\nrm -r x", 0, "T4"), Device(0, "a", 0, "T4\nrm -r x")):
        with pytest.raises(PlanError, match=r"devices\[0\]\.(node|type) .*use printable characters"):
            Plan(1, (Group((0,), (Microbatch(0, 0, 1),)),), (Ministage(0, ("a",)),), (device,)).validate()


@pytest.mark.parametrize("stem", ["7b", "p", "llama-7b-mixed-a100-v100-t4-zero2-recompute-30-11", "9" * 80])
def test_a_jobset_of_any_plan_has_names_that_kubernetes_takes(stem: str) -> None:
    yaml = pytest.importorskip("yaml")
    nodes = [f"n{i}" for i in range(24)]
    types = ("T4", "L4", "A10", "A40", "A100-40", "A100-80", "H100-SXM", "V100-16")
    types += tuple(f"RTX30{i}0" for i in (6, 7, 8, 9))
    (told,) = launch("jobset", *nodes, path=f"{stem}.plan.toml", types=types)
    _, jobset = yaml.safe_load_all(Path(told.removeprefix("wrote ").partition(": ")[0]).read_text())
    name = jobset["metadata"]["name"]
    assert name[0].isalpha()
    jobs = jobset["spec"]["replicatedJobs"]
    assert len({job["name"] for job in jobs}) == len(types)
    for job in jobs:
        last = job["template"]["spec"]["completions"] - 1
        assert len(f"{name}-{job['name']}-0-{last}-abcde") <= POD


def test_a_jobset_holds_a_recipe_that_begins_indented() -> None:
    yaml = pytest.importorskip("yaml")
    launch("jobset", "a")
    text = "\n   # mine\n[training]\n    steps = 2"
    Path("my run.toml").write_text(text + "\n")
    plan = Plan.load("plan.toml")
    write_launch(Job(plan=plan, path="plan.toml", program=Program(config="my run.toml")), "jobset")
    files, _ = yaml.safe_load_all(Path("plan.jobset.yaml").read_text())
    assert files["data"]["recipe.toml"] == text + "\n"
    Path("held.toml").write_text(files["data"]["plan.toml"])
    assert Plan.load("held.toml") == plan
