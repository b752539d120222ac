"""`zorselike profile`, `plan --shares` and `doctor`: from a machine to a plan that a run can use."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
from ranks import RankExit, RunRanks, free_port

# What commands import when they run, before ranks are forked, so that they need not, each for itself.
import zorselike.hf.lora
import zorselike.models.workload
import zorselike.profiler.machine.examine
import zorselike.profiler.session
import zorselike.profiler.summary  # noqa: F401
from zorselike.cli import main
from zorselike.cli.main import COMMANDS
from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.runtime.processes import processes
from zorselike.runtime.processes.world import ProcessInfo, describe_process

SMALL = ("--seq-len", "16", "--override", "num_layers=2", "vocab_size=64", "--repeats", "1")
QUICK = (*SMALL, "--dtype", "float32", "--most-rows", "2")


def run_here(rank: int, size: int, folder: Path, arguments: tuple[str, ...], port: int, nodes: Any) -> int:
    """The command line on one rank, as torchrun would start it; one rank alone without it."""
    gc.freeze()
    os.chdir(folder)
    if size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(ZORSELIKE_NODE=nodes[rank], LOCAL_RANK=str(nodes[:rank].count(nodes[rank])))
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
    code = main(arguments)
    if code:
        raise SystemExit(code)
    return code


@pytest.fixture
def run(run_ranks: RunRanks, tmp_path: Path) -> Any:
    """`run(*arguments, nodes=("a",))`: what each rank said and how it ended, one rank an entry of `nodes`."""

    def call(*arguments: str, nodes: tuple[str, ...] = ("a",)) -> list[RankExit]:
        exits: list[RankExit] = run_ranks(
            run_here, len(nodes), tmp_path, arguments, free_port(), nodes, init=False, allow_exit=True
        )
        return exits

    return call


def fine(exits: list[RankExit]) -> str:
    """What rank 0 printed, if all went well."""
    assert [e.code for e in exits] == [0] * len(exits), exits[0].stderr
    return exits[0].stdout


def test_a_hugging_face_folder_with_adapters_is_measured_and_planned_for(run: Any, tmp_path: Path) -> None:
    settings = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = hf_families.transformers.LlamaConfig(**settings, num_attention_heads=2)
    config.save_pretrained(tmp_path / "tiny")
    model = ("--hf", "tiny", "--lora-rank", "2")
    quick = ("--seq-len", "16", "--repeats", "1", "--dtype", "float32", "--most-rows", "2")
    fine(run("profile", *model, *quick, "--only", "layers", "update", "program"))
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.model == "hf tiny lora 2" and profile.overheads.action_s
    backward = {times.kind: times.backward_s for times in profile.layers}
    assert backward.keys() == {"embedding", "layer", "norm", "head"}
    assert [kind for kind, seconds in backward.items() if not any(seconds)] == ["embedding"]
    planned = ("plan", "--from-profile", "profile.json", "--global-batch", "2", "--budget", "1s")
    assert "992 of 6,448 parameters train" in fine(run(*planned, *model))
    for arguments, why in (
        (planned, "give --hf tiny --lora-rank 2"),
        ((*planned, *model[:2]), "the profile is of 'hf tiny lora 2', the workload is 'hf tiny'"),
        ((*planned, "--family", "gpt", "--flavor", "debug", "--seq-len", "8"), "the profile is of 'hf tiny"),
        (("profile", *model, "--family", "gpt"), "leave out --family"),
    ):
        (ended,) = run(*arguments)
        assert ended.code == 2 and why in ended.stderr


def test_one_device_is_measured_and_planned_for(run: Any, tmp_path: Path) -> None:
    said = fine(run("profile", *QUICK, "--recompute", "both"))
    assert "this takes about" in said and "wrote profile.json and cluster.toml" in said
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.model == "llama debug num_layers=2 vocab_size=64"
    assert [(t.kind, t.recompute) for t in profile.layers] == [
        ("embedding", "none"),
        ("layer", "none"),
        ("layer", "layer"),
        ("norm", "none"),
        ("head", "none"),
    ]
    assert all(times.rows == (1, 2) and times.device == "CPU" for times in profile.layers)
    assert [(batch.zero, batch.max_rows, batch.refused_rows) for batch in profile.largest_batches] == [
        (0, 2, None)
    ]
    assert not profile.links and not profile.collectives and profile.updates and profile.host_links
    assert all(entry.source.kind == "measured" for entry in (*profile.layers, *profile.updates))
    cluster = Cluster.load(tmp_path / "cluster.toml")
    assert cluster.nodes[0].devices == ("CPU",) and cluster.nodes[0].host_link is not None

    known = ("--profile", "profile.json", "--cluster", "cluster.toml", "--global-batch", "6")
    fine(run("plan", "--shares", *known, "--ministages", "2", "--rows-per-microbatch", "4"))
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.model == profile.model and plan.sequence_length == 16
    assert plan.workload_fingerprint == profile.workload_fingerprint
    assert [m.num_rows for m in plan.groups[0].microbatches] == [4, 2] and plan.num_ministages == 2


def test_what_is_known_is_not_measured_again(run: Any, tmp_path: Path) -> None:
    fine(run("profile", *QUICK, "--only", "layers"))
    first = Profile.load(tmp_path / "profile.json")
    said = fine(run("profile", *QUICK, "--only", "layers", "update"))
    assert "profile.json has 4 measurements already, 1 more to go" in said
    second = Profile.load(tmp_path / "profile.json")
    assert second.layers == first.layers and second.updates
    assert "has everything already" in fine(run("profile", *QUICK, "--only", "layers", "update"))
    assert Profile.load(tmp_path / "profile.json") == second
    fine(run("profile", *QUICK, "--only", "layers", "--again"))
    third = Profile.load(tmp_path / "profile.json")
    assert third.updates == second.updates and third.layers != second.layers


def test_what_was_measured_before_a_failure_is_kept(run: Any, tmp_path: Path) -> None:
    """Layers are measured, then a rank fails in what comes after."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("the machine is on fire")

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr("zorselike.profiler.tasks.measure_update", fail)
        (ended,) = run("profile", *QUICK, "--only", "layers", "update")
    assert ended.code == 2
    assert ended.last_line.startswith("error: rank 0 (node ") and "the machine is on fire" in ended.last_line
    assert len(Profile.load(tmp_path / "profile.json").layers) == 4
    assert "1 more to go" in fine(run("profile", *QUICK, "--only", "layers", "update"))


def test_several_nodes_are_measured_together(run: Any, tmp_path: Path) -> None:
    nodes = ("a", "a", "b")
    parts = ("--only", "layers", "update", "links", "collectives", "largest_batch")
    fine(run("profile", *QUICK, *parts, "--largest-message", "100KiB", nodes=nodes))
    profile = Profile.load(tmp_path / "profile.json")
    assert sorted(entry.between for entry in profile.links) == [("a", "a"), ("a", "b")]
    assert {entry.num_bytes[-1] for entry in (*profile.links, *profile.collectives)} == {2**16}
    assert {(entry.devices, entry.num_nodes) for entry in profile.collectives} == {
        (("CPU", "CPU", "CPU"), 2),
        (("CPU", "CPU"), 1),
    }
    assert [(batch.zero, batch.num_ranks) for batch in profile.largest_batches] == [(0, 1)]
    cluster = Cluster.load(tmp_path / "cluster.toml")
    assert [(node.name, len(node.devices)) for node in cluster.nodes] == [("a", 2), ("b", 1)]
    assert cluster.nodes[0].fabric is not None
    known = ("--profile", "profile.json", "--cluster", "cluster.toml", "--global-batch", "6")
    fine(run("plan", "--shares", *known, "--group-by", "node"))
    plan = Plan.load(tmp_path / "plan.toml")
    assert [group.ranks for group in plan.groups] == [(0, 1), (2,)]
    assert [(device.node, device.local_rank) for device in plan.devices] == [("a", 0), ("a", 1), ("b", 0)]

    # The same nodes keep the file, other ones are refused.
    said = run("profile", *QUICK, nodes=("a", "c"))
    assert all(e.code == 2 for e in said) and "is of other nodes" in said[0].stderr


def test_nodes_that_cannot_work_together_are_not_measured_together(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They would wait for each other for good, as a rank on a card, over NCCL, does for one on a CPU."""

    def describe(device: torch.device, *, rank: int) -> ProcessInfo:
        return replace(describe_process(device, rank=rank), torch=f"2.{11 + rank}.0")

    monkeypatch.setattr(processes, "describe_process", describe)
    exits = run("profile", *QUICK, "--only", "update", "links", nodes=("a", "b"))
    assert [e.code for e in exits] == [2, 2] and not list(tmp_path.glob("profile.json"))
    assert exits[0].last_line.startswith("error: torch must be the same everywhere: 2.11.0 on node a")


def test_a_card_that_computes_bfloat16_slowly_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(device: torch.device, *, rank: int) -> ProcessInfo:
        info = describe_process(device, rank=rank)
        return replace(info, device_name="NVIDIA GeForce RTX 2080 Ti", architecture="sm_75")

    monkeypatch.setattr(processes, "describe_process", describe)
    said = fine(run("profile", *SMALL, "--most-rows", "2", "--only", "update"))
    assert "RTX 2080 Ti computes bfloat16 slowly: give --dtype float16" in said
    assert "slowly" not in fine(run("profile", *QUICK, "--only", "update", "-o", "other.json"))


def test_without_links_of_its_devices_no_cluster_is_written(run: Any, tmp_path: Path) -> None:
    nodes = ("a", "a", "b")
    said = fine(run("profile", *QUICK, "--only", "update", nodes=nodes))
    assert "cluster.toml is not written: nothing was measured of what connects the devices of node a" in said
    assert said.rstrip().endswith("wrote profile.json") and not (tmp_path / "cluster.toml").exists()
    fine(run("profile", *QUICK, "--only", "links", "--largest-message", "100KiB", nodes=nodes))
    assert Profile.load(tmp_path / "profile.json").updates
    said = fine(run("profile", *QUICK, "--only", "update", nodes=nodes))
    assert "not written" not in said and said.rstrip().endswith("wrote profile.json and cluster.toml")


def test_a_limit_of_memory_is_a_limit_of_rows(run: Any, tmp_path: Path) -> None:
    wide = (*SMALL, "--dtype", "float32", "--most-rows", "64", "--only", "layers", "largest_batch")
    fine(run("profile", *wide, "--memory", "4MB"))
    profile = Profile.load(tmp_path / "profile.json")
    layer = next(times for times in profile.layers if times.kind == "layer")
    assert layer.max_rows is not None and layer.max_rows == layer.rows[-1] < 64
    found = profile.largest_batches[0]
    assert found.max_rows < layer.max_rows and found.refused_rows == found.max_rows + 1
    assert found.limit_bytes == 4 * 10**6


def test_what_does_not_fit_is_said(run: Any, tmp_path: Path) -> None:
    said = fine(run("profile", *QUICK, "--only", "layers", "largest_batch", "--memory", "300KB"))
    assert "not even one row fits, so nothing is known of: layer, recompute none" in said
    profile = Profile.load(tmp_path / "profile.json")
    assert "layer" not in {times.kind for times in profile.layers} and profile.largest_batches
    assert {(batch.max_rows, batch.refused_rows) for batch in profile.largest_batches} == {(0, 1)}


MIXED = """
version = 1
default_link = { bandwidth = "25Gb/s" }
[[nodes]]
name = "fast"
device = "A100-40"
count = 2
fabric = { bandwidth = "200GB/s" }
[[nodes]]
name = "slow"
device = "T4"
count = 2
fabric = { bandwidth = "10GB/s" }
"""


def test_a_cluster_written_by_hand_is_planned_for_by_the_catalogue(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.toml").write_text(MIXED)
    Profile(model="llama 7b").save(tmp_path / "empty.json")
    known = ("--profile", "empty.json", "--cluster", "mixed.toml", "--global-batch", "8")
    assert main(("plan", "--shares", *known, "--seq-len", "512", "--dtype", "float16")) == 0
    said = capsys.readouterr().out
    assert "assumed: A100-40: nothing was measured on it" in said and "wrote plan.toml" in said
    plan = Plan.load(tmp_path / "plan.toml")
    # 312 against 65 TFLOP/s: 27 of 32 layers and a head of 0.6 layers; the embedding costs nothing.
    assert [len(ministage.modules) for ministage in plan.ministages] == [28, 7]
    assert main(("plan", "--shares", *known)) == 2
    assert "empty.json has no sequence length; give --seq-len" in capsys.readouterr().err


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "--flavor", "7c"), "has no flavor '7c'"),
        (("profile", "--override", "layers"), "'layers' is not a setting; write it as num_layers=8"),
        (("profile", "--override", "num_layers = many"), "num_layers = 'many' is neither a number"),
        (("profile", "--override", "num_layers=2", "num_layers=None"), "num_layers is given twice"),
        (("profile", "--seq-len", "0"), "--seq-len is 0"),
        (("profile", "--seq-len", "9999999"), "do not fit max_seq_len"),
        (("profile", "--repeats", "0"), "--repeats is 0"),
        (("profile", "--memory", "16"), "--memory is '16'; write it as 24GiB"),
        (("profile", "--largest-message", "big"), "--largest-message is 'big'"),
        (("profile", "--output", "nowhere/profile.json"), "in a folder that does not exist"),
        (("profile", "--output", "a" * 300), "cannot be written: File name too long; name another file"),
        (("doctor", "--plan", "missing.toml"), "there is no such file"),
        (("profile", "--timeout", "-1"), "--timeout is -1; give seconds, above 0"),
        (("doctor", "--timeout", "nan"), "--timeout is nan; give seconds, above 0"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--dtype", "bfloat16"),
            "no layers for bfloat16, only for float32 at 128 tokens; leave --dtype out",
        ),
        (("--seq-len", "64"), "no layers for 64 tokens, only for float32 at 128 tokens; leave --seq-len out"),
        (("--seq-len", "0"), "--seq-len is 0; it must be at least 1"),
    ],
)
def test_what_was_not_measured_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed.toml").write_text(MIXED)
    times = LayerTimes(
        kind="layer",
        device="T4",
        dtype="float32",
        sequence_length=128,
        rows=(1,),
        forward_s=(1.0,),
        backward_s=(2.0,),
        source=Source("measured"),
    )
    Profile(model="llama debug", layers=(times,)).save(tmp_path / "one.json")
    known = ("--profile", "one.json", "--cluster", "mixed.toml", "--global-batch", "8")
    assert main(("plan", "--shares", *known, *arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [*COMMANDS, *(f"checkpoint {name}" for name in ("ls", "verify", "show", "diff", "export", "import"))],
)
def test_help_answers(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main((*command.split(), "--help"))
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"zorselike {command}" in said
    assert "None" not in said and "(default: )" not in said  # Of Python, and nobody would write it.


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--zero", "('0', '1', '2', '3')"),
        ("--group-by", "('type', 'node')"),
        ("--dtype", "('bfloat16', 'float16', 'float32')"),
        ("--launch", "('torchrun', 'slurm', 'jobset', 'skypilot', 'ray')"),
    ],
)
def test_a_wrong_choice_is_told_those_there_are(
    capsys: pytest.CaptureFixture[str], option: str, choices: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("plan", "--global-batch", "8", option, "7"))
    words = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and f"Expected one of {choices}" in words


def test_a_profile_of_something_else_is_not_continued(run: Any, tmp_path: Path) -> None:
    fine(run("profile", *QUICK, "--only", "update"))
    before = (tmp_path / "profile.json").read_text()
    (ended,) = run("profile", *QUICK[:-4], "--dtype", "bfloat16", "--only", "update")
    assert ended.code == 2 and "can only be continued for the same model" in ended.last_line
    (ended,) = run("profile", *QUICK, "--family", "gpt", "--only", "update")
    assert ended.code == 2 and "llama debug" in ended.last_line and "gpt debug" in ended.last_line
    assert (tmp_path / "profile.json").read_text() == before


# -- the doctor ------------------------------------------------------------------------------


def test_the_doctor_finds_nothing_wrong_here(run: Any) -> None:
    said = fine(run("doctor", "--device", "cpu", "--data", "/", nodes=("a", "a")))
    assert "inside a" in said and "GB/s" in said and "breaks" not in said


def test_the_doctor_names_the_node_that_lacks_the_data(run: Any, tmp_path: Path) -> None:
    exits = run("doctor", "--device", "cpu", "--data", str(tmp_path / "none"), nodes=("a", "a"))
    assert [e.code for e in exits] == [2, 2]
    assert "breaks: node a: ranks 0 and 1 cannot read" in exits[0].stdout
    assert exits[0].last_line.startswith("error: doctor: 1 thing would break a job: node a")
    assert "Traceback" not in exits[0].stderr


def wait_alone(rank: int, size: int, port: int) -> int:
    """One of two ranks whose other one never comes."""
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return main(("doctor", "--timeout", "1"))


def test_a_rank_that_does_not_come_is_no_traceback(run_ranks: RunRanks) -> None:
    (ended,) = run_ranks(wait_alone, 1, free_port(), init=False, allow_exit=True)
    assert ended.value == 2 and "Traceback" not in ended.stderr
    assert "could not join the others: of 2 ranks, rank 1 did not come within 1 s" in ended.last_line
