"""`[hetero] plan = "auto"`: from devices to a trained step, and what is left for the next run."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import debug_llama
import hf_families
import pytest
import ranks
import scipy.optimize  # noqa: F401  Its BLAS starts a thread for good, before anything is counted.
import torch
import torch.distributed as dist
from ranks import RankExit, RunRanks, free_port

import zorselike.models.registry as registry
from zorselike.cost.profile import Profile
from zorselike.errors import ClusterError
from zorselike.models import build_model
from zorselike.plan.cluster.cluster import Cluster
from zorselike.plan.plan import Plan
from zorselike.planner.problem import PlanProblem
from zorselike.profiler.program import timing as program_timing
from zorselike.runtime.processes.processes import make_processes
from zorselike.runtime.processes.world import ProcessInfo
from zorselike.train import trainer
from zorselike.train.__main__ import main
from zorselike.train.auto import plan as auto_plan
from zorselike.train.config.file import load_config, parse_command_line
from zorselike.train.config.model import find_model
from zorselike.train.elastic.known import Alone
from zorselike.train.traits import check_same_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = (
    *("--training.steps", "2", "--metrics.log_freq", "1", "--training.seq_len", "16"),
    *("--training.global_batch_size", "5", "--hetero.plan_budget", "1s"),
)
NODES = ("a", "b")


make_problem, PARTS = auto_plan.make_problem, auto_plan.PARTS


def make_problem_of(*known: Any, first: int, last: int | None = None) -> PlanProblem:
    """One group of all devices from `first` on, since a single one would be faster for this little work."""
    problem = make_problem(*known)
    group = tuple(range(first, problem.cluster.num_devices))[:last]
    return replace(problem, fixed=replace(problem.fixed, groups=(group,)))


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    """A small model, measured a little: what is inherited by the ranks that are forked."""
    debug_llama.warm_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.LLAMA_FLAVORS, "debug", replace(registry.LLAMA_FLAVORS["debug"], num_layers=3))
        patch.setattr(auto_plan, "make_problem", partial(make_problem_of, first=0))
        patch.setattr(auto_plan, "PARTS", PARTS - {"program"})
        patch.setattr(auto_plan, "_REPEATS", 1)
        patch.setattr(auto_plan, "MOST_ROWS", 2)
        patch.setattr(auto_plan, "_LARGEST_MESSAGE_BYTES", 2**12)
        with torch.device("meta"):
            build_model("llama", "debug")
        yield


def start(rank: int, size: int, port: int, arguments: list[str], nodes: tuple[str, ...]) -> None:
    """What torchrun does for one process; at the end of a run the weights' hash is printed."""
    gc.freeze()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(ZORSELIKE_NODE=nodes[rank], LOCAL_RANK=str(nodes[:rank].count(nodes[rank])))
    run_steps = trainer._run_steps

    def run_and_hash(config: Any, pipe: Any, *more: Any) -> int:
        code = run_steps(config, pipe, *more)
        state = pipe.full_state_dict()
        if pipe.rank == 0:
            digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
            print("weights", digest.hexdigest())
        return code

    trainer._run_steps = run_and_hash
    sys.argv = ["train", *arguments]
    sys.exit(main())


def run(
    folder: Path, *more: str, nodes: tuple[str, ...] = NODES, recipe: Path | None = None
) -> list[RankExit]:
    command = ["--config", str(recipe or RECIPES / "auto.toml"), "--job.dump_folder", str(folder), *SHORT]
    command += more
    return ranks.run_ranks(
        start, len(nodes), free_port(), command, nodes, init=False, allow_exit=True, timeout=90
    )


def fine(ends: list[RankExit]) -> str:
    assert [end.code for end in ends] == [0] * len(ends), ends[0].stderr
    return "".join(end.stdout for end in ends)


def hash_of(said: str) -> str:
    (found,) = re.findall(r"weights (\w+)", said)
    return str(found)


@pytest.fixture(scope="module")
def first(quick: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the first run on two nodes says, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("auto")
    return fine(run(folder)), folder


def copy_of(folder: Path, target: Path) -> Path:
    """The files that a run leaves for the next one, for a test that changes them."""
    (target / "auto-plan").mkdir()
    for path in (folder / "auto-plan").iterdir():
        (target / "auto-plan" / path.name).write_bytes(path.read_bytes())
    return target / "auto-plan"


def test_measures_plans_trains_and_says_so(first: tuple[str, Path]) -> None:
    said, folder = first
    assert "this takes about" in said
    assert re.search(r"planned in .* s: a step should take \S+ s, \S+ tokens/s", said)
    assert "group 0: ranks 0, 1" in said and "step:  2" in said
    assert re.search(r"rank 1: estimated \S+ s per step, measured", said)
    (made,) = folder.glob("auto-2*")
    kept = folder / "auto-plan"
    for name in ("plan.toml", "profile.json", "cluster.toml"):
        assert (made / name).read_text() == (kept / name).read_text()
    plan, cluster = Plan.load(kept / "plan.toml"), Cluster.load(kept / "cluster.toml")
    profile = Profile.load(kept / "profile.json")
    assert plan.global_batch == 5 and plan.estimates.iteration_s
    assert [(d.node, d.local_rank, d.type) for d in plan.devices] == [("a", 0, "CPU"), ("b", 0, "CPU")]
    assert {node.name for node in cluster.nodes} == {"a", "b"}
    assert plan.cluster_fingerprint == cluster.fingerprint
    assert plan.workload_fingerprint == profile.workload_fingerprint
    assert {(t.kind, t.rows[-1]) for t in profile.layers} == {
        (kind, 2) for kind in ("embedding", "layer", "norm", "head")
    }


def test_trains_bit_for_bit_as_with_the_plan_that_it_wrote(first: tuple[str, Path], tmp_path: Path) -> None:
    said, folder = first
    (made,) = folder.glob("auto-2*")
    assert load_config(made / "config.toml").hetero.plan == str(made / "plan.toml")
    again = fine(run(tmp_path, recipe=made / "config.toml"))
    assert "this takes about" not in again and "planned in" not in again
    assert hash_of(again) == hash_of(said)


def test_a_later_run_takes_the_plan_again(first: tuple[str, Path], tmp_path: Path) -> None:
    said, folder = first
    kept = copy_of(folder, tmp_path)
    again = fine(run(tmp_path, nodes=("b", "a")))
    assert "made by an earlier run; remove it to plan anew" in again
    assert "this takes about" not in again and "planned in" not in again
    assert hash_of(again) == hash_of(said)
    before = (kept / "profile.json").read_text()
    (kept / "plan.toml").unlink()
    anew = fine(run(tmp_path))
    assert "profile.json has everything already" in anew and "planned in" in anew
    assert (kept / "profile.json").read_text() == before
    assert Plan.load(kept / "plan.toml").num_ranks == 2


def start_apart(rank: int, size: int, port: int, arguments: list[str], nodes: tuple[str, ...]) -> None:
    """Each on a node of its own; the second has other arguments."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    start(rank, size, port, [*arguments, *(("--hetero.plan", "none.toml") if rank else ())], nodes)


def test_a_node_that_cannot_begin_ends_the_others_with_its_reason(quick: None, tmp_path: Path) -> None:
    command = ["--config", str(RECIPES / "auto.toml"), "--job.dump_folder", str(tmp_path), *SHORT]
    ends = ranks.run_ranks(
        start_apart, 2, free_port(), command, NODES, init=False, allow_exit=True, timeout=60
    )
    text = "none.toml: there is no such file; check the path of the plan"
    assert [end.code for end in ends] == [2, 2], ends[0].stderr
    assert ends[0].last_line == f"error: rank 1 on node b ended before it joined: {text}"
    assert ends[1].last_line == f"error: {text}"


def one_error(ends: list[RankExit]) -> str:
    """The one line that every rank ends with."""
    assert all(end.code == 2 for end in ends), ends[0].stderr
    (said,) = {end.last_line for end in ends}
    assert said.startswith("error: ")
    assert sum(line.startswith("error: ") for line in ends[0].stderr.splitlines()) == 1
    return said


def test_what_has_changed_since_is_one_error_with_the_mend(first: tuple[str, Path], tmp_path: Path) -> None:
    kept = copy_of(first[1], tmp_path)
    mend = f"or remove {kept / 'plan.toml'}, and a plan is made for what runs"
    said = one_error(run(tmp_path, nodes=("a", "a", "b")))
    assert "was made for other machines (a: CPU, b: CPU) than run here (a: CPU CPU, b: CPU)" in said
    assert said.endswith(mend)
    said = one_error(run(tmp_path, "--training.global_batch_size", "7"))
    assert "global_batch_size = 7, but the plan" in said and said.endswith(mend)
    said = one_error(run(tmp_path, "--training.mixed_precision_param", "bfloat16"))
    assert "was made for another workload (llama debug, " in said and said.endswith(mend)


def test_a_plan_that_no_longer_fits_the_cluster_file_is_refused(
    first: tuple[str, Path], tmp_path: Path
) -> None:
    kept = copy_of(first[1], tmp_path)
    cluster = Cluster.load(kept / "cluster.toml")
    (kept / "cluster.toml").write_text(replace(cluster, currency="EUR").to_text())
    again = fine(run(tmp_path, "--training.steps", "1"))
    assert f"{kept / 'cluster.toml'} has changed since {kept / 'plan.toml'} was made; remove" in again
    nodes = tuple(
        replace(node, memory_bytes=(2**20,)) if node.name == "b" else node for node in cluster.nodes
    )
    (kept / "cluster.toml").write_text(replace(cluster, nodes=nodes).to_text())
    said = one_error(run(tmp_path))
    assert f"on rank 1, of which {kept / 'cluster.toml'} says 1.0 MiB by now: say more there, " in said
    assert said.endswith(f"or remove {kept / 'plan.toml'}, and a plan is made for what runs")


@pytest.mark.parametrize(
    ("name", "content", "mend"),
    [
        ("plan.toml", b"", "or remove {}/plan.toml, and a plan is made for what runs"),
        ("cluster.toml", b"version = 1\n[[no", "or remove {}/plan.toml, and a plan is made for what runs"),
        ("profile.json", b"\xff", "(byte 0); a profile is text in UTF-8; mend or remove it"),
    ],
)
def test_a_damaged_file_is_one_error_with_the_mend(
    first: tuple[str, Path], tmp_path: Path, name: str, content: bytes, mend: str
) -> None:
    kept = copy_of(first[1], tmp_path)
    (kept / name).write_bytes(content)
    said = one_error(run(tmp_path))
    assert said.startswith(f"error: {kept / name}: ") and said.endswith(mend.format(kept))


def test_files_of_something_else_are_put_aside(first: tuple[str, Path], tmp_path: Path) -> None:
    kept = copy_of(first[1], tmp_path)
    (kept / "plan.toml").unlink()
    old = (kept / "profile.json").read_text().replace('"version": 2', '"version": 1')
    (kept / "profile.json").write_text(old)
    said = fine(run(tmp_path, "--training.seq_len", "8", nodes=("c",)))
    assert f"INFO - {kept / 'profile.json'}: version is 1; " in said
    assert "kept as profile.old.json and made anew" in said
    assert "is of other machines (a: CPU, b: CPU) than run here (c: CPU); kept as cluster.old.toml" in said
    assert (kept / "profile.old.json").read_text() == old
    assert Plan.load(kept / "plan.toml").sequence_length == 8


def test_files_that_the_recipe_names_are_not(first: tuple[str, Path], tmp_path: Path) -> None:
    kept = first[1] / "auto-plan"
    profile = tmp_path / "mine.json"
    profile.write_bytes((kept / "profile.json").read_bytes())
    given = ("--hetero.profile", str(profile), "--hetero.cluster", str(kept / "cluster.toml"))
    said = one_error(run(tmp_path, *given, "--training.seq_len", "8"))
    assert f"[hetero] profile = {profile}: " in said and "name another file" in said
    said = one_error(run(tmp_path, *given, nodes=("c", "d")))
    assert "[hetero] cluster = " in said and "is of other machines" in said
    said = fine(run(tmp_path, *given))
    assert "mine.json has everything already" in said
    assert [path.name for path in (tmp_path / "auto-plan").iterdir()] == ["plan.toml"]


def test_a_failing_measurement_ends_all_ranks_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the machine is on fire")

    monkeypatch.setattr("zorselike.profiler.tasks.measure_update", fail)
    assert "the machine is on fire" in one_error(run(tmp_path))
    assert not (tmp_path / "auto-plan" / "plan.toml").exists()
    assert not list(tmp_path.glob("auto-2*"))


def test_wrong_data_is_said_before_devices_are_measured(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    said = one_error(run(tmp_path, "--training.dataset_path", str(data)))
    assert "line 2" in said
    assert not (tmp_path / "auto-plan").exists()


def test_where_nothing_fits_all_ranks_say_so(first: tuple[str, Path], tmp_path: Path) -> None:
    kept = copy_of(first[1], tmp_path)
    (kept / "plan.toml").unlink()
    cluster = Cluster.load(kept / "cluster.toml")
    nodes = tuple(replace(node, memory_bytes=(2**17,)) for node in cluster.nodes)
    replace(cluster, nodes=nodes).save(kept / "cluster.toml")
    said = one_error(run(tmp_path))
    assert "fit" in said and not (kept / "plan.toml").exists()


THREE = ("c", "a", "b")


@pytest.fixture(scope="module")
def left_out(quick: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run says whose plan leaves out the first of three processes, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("left_out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_plan, "make_problem", partial(make_problem_of, first=1))
        return fine(run(folder, nodes=THREE)), folder


def test_devices_that_a_plan_leaves_out_wait(left_out: tuple[str, Path], tmp_path: Path) -> None:
    """The run is that of the other two alone."""
    said, folder = left_out
    assert "faster without CPU 0 of node c" in said and "ranks 0, 1" in said
    assert said.count("finished after 2 of 2 steps") == 1
    copy_of(folder, tmp_path)
    again = fine(run(tmp_path, nodes=THREE))
    assert "made by an earlier run" in again and hash_of(again) == hash_of(said)
    alone = fine(run(tmp_path, "--hetero.plan", str(tmp_path / "auto-plan" / "plan.toml")))
    assert "earlier" not in alone and hash_of(alone) == hash_of(said)


def test_devices_that_a_plan_leaves_out_end_in_silence_where_a_process_keeps_the_store(
    left_out: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under srun: torch printed a stack, since the store went while they still asked it."""
    (copy_of(left_out[1], tmp_path) / "plan.toml").unlink()
    monkeypatch.setattr(auto_plan, "make_problem", partial(make_problem_of, first=0, last=1))
    ends = run(tmp_path, nodes=THREE)
    assert [end.code for end in ends] == [0] * 3, ends[0].stderr
    assert "faster without" in ends[0].stdout
    assert not ends[1].stderr and not ends[2].stderr


@pytest.mark.parametrize(("how", "why"), [("killed", "first; look at"), ("raises", "by ValueError: x")])
def test_devices_that_a_plan_leaves_out_end_with_the_others(
    how: str, why: str, left_out: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves: not every launcher ends them."""
    open_data = trainer.open_data

    def fail(config: Any, model: Any, module: Any, world: Any, **more: Any) -> Any:
        if world.size == 2 and world.rank == 1:
            if how == "raises":
                raise ValueError("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return open_data(config, model, module, world, **more)

    copy_of(left_out[1], tmp_path)
    monkeypatch.setattr(trainer, "open_data", fail)
    waited = run(tmp_path, nodes=THREE)[0]
    assert waited.code == 2
    assert f"train have ended before the run was over, process 2 {why}" in waited.stderr


def test_devices_that_a_plan_leaves_out_say_so_where_the_keeper_of_the_store_is_killed(
    first: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_data = trainer.open_data

    def die(config: Any, model: Any, module: Any, world: Any, **more: Any) -> Any:
        if world.size == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return open_data(config, model, module, world, **more)

    (copy_of(first[1], tmp_path) / "plan.toml").unlink()
    monkeypatch.setattr(auto_plan, "make_problem", partial(make_problem_of, first=0, last=1))
    monkeypatch.setattr(trainer, "open_data", die)
    waited = run(tmp_path)[1]
    assert waited.code == 2
    assert "train have ended before the run was over, process 0 first; look at" in waited.stderr


def test_a_dry_run_says_what_would_be_done(first: tuple[str, Path], tmp_path: Path) -> None:
    said = fine(run(tmp_path, "--dry-run", nodes=("a",)))
    assert "no plan yet for llama debug" in said and "plans for 5 rows a step, in at most 1s" in said
    assert not list(tmp_path.iterdir())
    kept = copy_of(first[1], tmp_path)
    said = fine(run(tmp_path, "--dry-run", nodes=("a",)))
    assert f"{kept / 'plan.toml'} exists from an earlier run" in said and "checked: " in said
    (kept / "plan.toml").write_text("")
    said = one_error(run(tmp_path, "--dry-run", nodes=("a",)))
    assert said.endswith(f"or remove {kept / 'plan.toml'}, and a plan is made for what runs")


def save_model(rank: int, size: int, folder: Path) -> None:
    settings = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = hf_families.transformers.LlamaConfig(**settings, num_attention_heads=2)
    hf_families.transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_a_hugging_face_model_with_adapters(quick: None, tmp_path: Path) -> None:
    ranks.run_ranks(save_model, 1, tmp_path / "tiny", init=False)
    folder = tmp_path / "out"
    model = ("--model.name", "hf", "--model.path", str(tmp_path / "tiny"), "--model.flavor", "")
    said = fine(run(folder, *model, "--lora.enable", "--lora.rank", "2"))
    assert "this takes about" in said and "planned in" in said
    plan = Plan.load(folder / "auto-plan" / "plan.toml")
    assert plan.model == "hf tiny lora 2" and "model.layers.0" in plan.ministage_of
    assert (
        Profile.load(folder / "auto-plan" / "profile.json").workload_fingerprint == plan.workload_fingerprint
    )


def describe_state() -> tuple[object, ...]:
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    kib = sum(tensor.untyped_storage().nbytes() for tensor in tensors) // 2**10  # Torch keeps small ones.
    tasks = len([*Path("/proc/self/task").iterdir()]) if sys.platform == "linux" else threading.active_count()
    groups = len(dist.distributed_c10d._world.pg_map)
    return kib, tasks, groups, torch.get_rng_state().tolist()


def measure_twice(rank: int, size: int, folder: Path) -> tuple[Any, Any]:
    """What a process is before and after it measured; once before, since some is made once and for good."""
    processes = make_processes(torch.device("cpu"), timeout=timedelta(seconds=60))
    config = replace(load_config(RECIPES / "auto.toml"))
    config = replace(config, training=replace(config.training, seq_len=16, global_batch_size=2))
    model = find_model(config)
    workload = auto_plan.make_auto_workload(config, model, processes.infos)
    program_timing.WARMUPS = program_timing.STEPS_PER_REPEAT = 1
    states = []
    for number in range(2):
        auto_plan.PARTS = PARTS - {"program"} if number == 0 else PARTS
        config = replace(config, job=replace(config.job, dump_folder=str(folder / str(number))))
        files = auto_plan.AutoFiles.of(config, None)
        files.make_folders()
        states.append(describe_state())
        auto_plan._measure(config, model, workload, files, processes)
        dist.barrier(processes.control)
    states.append(describe_state())
    assert {groups for *_, groups, _ in states} == {3}  # The default one, `control` and `alone`.
    return states[1], states[2]


def test_measuring_leaves_nothing_behind(run_ranks: RunRanks, tmp_path: Path) -> None:
    for before, after in run_ranks(measure_twice, 2, tmp_path):
        assert after == before


AUTO = ("--config", str(RECIPES / "auto.toml"))


@pytest.mark.parametrize(
    ("arguments", "dtype", "defers", "recompute"),
    [
        ("", "float32", True, None),
        ("--training.max_norm 0", "float32", False, None),
        ("--hetero.clip ministage --activation_checkpoint.mode full", "float32", False, "layer"),
        ("--training.max_norm 0 --training.mixed_precision_param auto", "float16", True, None),
        ("--hetero.clip ministage --training.mixed_precision_param bfloat16", "bfloat16", False, None),
        ("--activation_checkpoint.mode none", "float32", True, "none"),
    ],
)
def test_what_a_recipe_asks_of_the_planner(
    arguments: str, dtype: str, defers: bool, recompute: str | None
) -> None:
    config = parse_command_line([*AUTO, *arguments.split()]).config
    old_card = ProcessInfo(0, "a", 0, device="cuda", architecture="sm_70")
    workload = auto_plan.make_auto_workload(config, find_model(config), [old_card])
    assert (workload.dtype, workload.sequence_length, workload.num_moments) == (dtype, 128, 2)
    problem = make_problem(config, workload, Cluster(nodes=()), Profile(model=workload.model))
    assert (problem.global_batch, problem.defer_updates, problem.fixed.recompute) == (16, defers, recompute)


class TogetherWith(Alone):
    """The last of some processes, of which it knows what the others said."""

    def __init__(self, *said: Any) -> None:
        self.said = [*said]

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return self.said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"--hetero.plan {RECIPES / 'debug_cpu.plan.toml'}", '[hetero] plan is a file in process 1 and "'),
        ("--training.global_batch_size 8", "[training] global_batch_size is 8 in process 1 and 16 in"),
        ("--activation_checkpoint.mode full", "[activation_checkpoint] mode is full in process 1 and "),
    ],
)
def test_nodes_that_do_not_plan_together_are_refused(arguments: str, expected: str) -> None:
    """They would wait for each other without end."""
    world = TogetherWith()
    first, other = (parse_command_line([*AUTO, *more.split()]).config for more in ("", arguments))
    for _ in range(2):
        check_same_recipe(first, find_model(first), world)
    with pytest.raises(ClusterError, match=re.escape(expected)):
        check_same_recipe(other, find_model(other), TogetherWith(world.said[0]))


def test_local_ranks_of_a_plan_that_is_there_are_refused() -> None:
    infos = [ProcessInfo(rank, "a", local_rank) for rank, local_rank in enumerate((0, 3))]
    with pytest.raises(
        ClusterError, match=r"runs local rank 3 and no local rank 1; .* unset ZORSELIKE_LOCAL"
    ):
        auto_plan._list_devices(infos)
