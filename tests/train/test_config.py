"""Configuration: strict TOML, command line over file over defaults, TorchTitan's keys by name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zorselike import ConfigError, Group, Microbatch, Ministage, Plan, __version__, cli
from zorselike.runtime.processes import launcher
from zorselike.train.config.checks import check_against_plan, load_plan
from zorselike.train.config.config import AUTO, Compile, Config
from zorselike.train.config.file import dump_config, load_config, parse_command_line
from zorselike.train.config.titan_keys import REFUSED_SECTIONS, refusal
from zorselike.train.equal_replicas import make_equal_plan

RECIPES = Path(__file__).parents[2] / "recipes"

# Every key of torchtitan/config/job_config.py, v0.2.2.
TITAN = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
    "enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks "
    "enable_wandb",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps "
    "enable_cpu_offload dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug dataloader",
    "training.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
    "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
    "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
    "pipeline_parallel_expert_parallel_overlap context_parallel_degree context_parallel_rotate_method "
    "expert_parallel_degree expert_tensor_parallel_degree",
    "checkpoint": "enable enable_ft_dataloader_checkpoints folder interval initial_load_path "
    "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized last_save_model_only "
    "last_save_in_hf export_dtype async_mode keep_latest_k load_step exclude_from_loading "
    "enable_first_step_checkpoint create_seed_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns "
    "early_stop memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "compile": "enable components backend",
    "quantize": "linear grouped_mm",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder "
    "save_traces_file_prefix mode",
    "memory_estimation": "enable disable_fake_mode",
    "fault_tolerance": "enable process_group replica_id",
    "experimental": "custom_import custom_args_module",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps dataloader",
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
}


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def load_error(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    message = str(caught.value)
    assert "recipe.toml" in message
    return message


def has_key(section: str, key: str) -> bool:
    value = Config()
    for name in (*section.split("."), key):
        value = getattr(value, name, None)
        if value is None:
            break
    owner: object = Config()
    for name in section.split("."):
        owner = getattr(owner, name, None)
    return owner is not None and key in {field.name for field in dataclasses.fields(owner)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("section", "key"), [(s, k) for s, keys in TITAN.items() for k in keys.split()])
def test_every_key_of_torchtitan_is_ours_or_refused_by_name(section: str, key: str) -> None:
    assert has_key(section, key) != (refusal(section, key) is not None)


def test_what_stands_for_load_only_keeps_what_was_loaded() -> None:
    """A larger interval does not: a run saves at its end."""
    assert "another folder, and initial_load_path" in str(refusal("checkpoint", "load_only"))


@pytest.mark.parametrize("section", REFUSED_SECTIONS)
def test_refused_sections_say_what_to_use(tmp_path: Path, section: str) -> None:
    message = load_error(tmp_path, f"[{section}]\nenable = true\n")
    assert f"[{section}]" in message
    assert REFUSED_SECTIONS[section] in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nstepz = 3\n", "[training] stepz is not a key; did you mean 'steps'?"),
        ("[training]\nlog_freq = 3\n", "[training] log_freq is not a key; log_freq is one of [metrics]"),
        ("[trainin]\nsteps = 3\n", "[trainin] is not a section; did you mean 'training'?"),
        ("steps = 3\n", "steps stands outside of any section"),
        ("version = 1\n[[ministages]]\n", "is a plan, where a recipe is needed; give a recipe file"),
        ("[training]\nzzzzzz = 3\n", "[training] zzzzzz is not a key; valid keys are"),
        ('[training]\nsteps = "ten"\n', "[training] steps is 'ten'; it must be an integer"),
        ("[training]\nsteps = 1.5\n", "[training] steps is 1.5; it must be an integer"),
        ("[training]\nsteps = true\n", "[training] steps is True; it must be an integer"),
        ("[metrics]\nenable_tensorboard = 1\n", "enable_tensorboard is 1; it must be true or false"),
        ('[optimizer]\nlr = "big"\n', "lr is 'big'; it must be a number"),
        ("[hetero]\nplan = 3\n", "plan is 3; it must be a string"),
        ('[optimizer]\nimplementation = "fast"\n', "is 'fast'; give one of 'for-loop', 'foreach', 'fused'"),
        ("[training]\nlocal_batch_size = 8\n", "local_batch_size is a TorchTitan key without a place here"),
        ("[training.dataloader]\npersistent_workers = true\n", "workers live as long as the run"),
        ("[training.dataloader]\nnum_worker = 1\n", "[training] dataloader.num_worker is not a key; did you"),
        ("[training]\ndataloader = 3\n", "[training] dataloader is 3; it must be a table"),
        ('[activation_checkpoint]\nmode = "selective"\n', "whole layers or none"),
        ('[training]\ndataset = "c4"\n', "not built in"),
        (
            '[training]\nmixed_precision_param = "fp16"\n',
            "is 'fp16'; give one of 'bfloat16', 'float16', 'float32', 'auto'",
        ),
        ('[compile]\ncomponents = ["model", "loss"]\n', '[compile] components = "loss": losses are computed'),
        ('[compile]\ncomponents = "model"\n', "components is 'model'; it must be a list of strings"),
        ("[compile]\ncomponents = [3]\n", "components[0] is 3; it must be a string"),
        ('[compile]\nbackend = "aot_eager"\n', 'use "inductor"'),
        ("[compile]\nenabled = true\n", "[compile] enabled is not a key; did you mean 'enable'?"),
        (
            "[checkpoint]\nlast_save_in_hf = true\n",
            "last_save_model_only writes a Hugging",
        ),
        ("[training\n", "is not TOML"),
        (f"[training]\nsteps = {'9' * 5000}\n", "is not TOML: Exceeds the limit"),
        (f"[training]\n{'.'.join(['a'] * 2000)} = 1\n", "nests tables and lists more than 100 deep"),
        ('[hetero]\nplan = "a\\u0000b"\n', "[hetero] plan = 'a\\x00b': a path has no such character"),
    ],
)
def test_bad_files_name_file_key_and_mend(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in load_error(tmp_path, text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere\.toml: there is no such file; check the path of the recipe"
    ):
        parse_command_line(["--config", str(tmp_path / "nowhere.toml")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[checkpoint]\nload_step = -2\n", "[checkpoint] load_step is -2; give a step, or -1 for the newest"),
        ("[lora]\nrank = 5\n", "[lora] rank = 5: there are no adapters without enable = true"),
        ("[checkpoint]\nload_step = 5\n", "nothing is loaded without enable = true"),
        ("[checkpoint]\nenable = true\nkeep_best = true\n", "needs [checkpoint] enable = true and [valid"),
        ("[training]\nsteps = 0\n", "[training] steps is 0; give 1 or more"),
        ("[optimizer]\nbeta2 = 1.0\n", "[optimizer] beta2 is 1.0; give one from 0 to below 1"),
        ("[lr_scheduler]\ndecay_ratio = 2.0\n", "[lr_scheduler] decay_ratio is 2.0; give one from 0 to 1"),
        ("[training.dataloader]\nnum_workers = 0\nprefetch_factor = 2\n", "needs num_workers"),
        ('[hetero]\nplan_budget = "soon"\n', "[hetero] plan_budget is 'soon'; write seconds, such as"),
        ('[hetero]\nplan_budget = "0s"\n', "[hetero] plan_budget is '0s'; write seconds"),
        (
            '[hetero]\nplan = "auto"\n',
            '[training] global_batch_size = -1: say how many rows a step has, since [hetero] plan = "auto"',
        ),
        ('[hetero]\nprofile = "p.json"\n', 'p.json": is for plan = "auto"; remove it, or plan that way'),
        (
            '[model]\nname = "hf"\npath = "m"\noverride = ["num_layers=2"]\n',
            "a Hugging Face model is what its config.json says",
        ),
        ('[hetero]\nplan = ""\n', '[hetero] plan is ""; name a plan file, for example recipes/debug_cpu'),
        (
            '[hetero]\nplan = ""\n[parallelism]\ntensor_parallel_degree = 2\n',
            '[training] global_batch_size = -1: say how many rows a step has, since [hetero] plan = ""',
        ),
        (
            '[hetero]\nplan = "auto"\n[parallelism]\ntensor_parallel_degree = 2\n',
            "[parallelism] tensor_parallel_degree = 2: says the plan, and",
        ),
        (
            '[hetero]\nplan = ""\n[parallelism]\ntensor_parallel_degree = 2\n[elastic]\nenable = true\n',
            "[elastic] enable = true begins with a plan: name a plan file",
        ),
        (
            '[model]\nname = "hf"\npath = "m"\n[checkpoint]\nenable = true\ninitial_load_path = "c"\n'
            '[lora]\nenable = true\ninitial_load_path = "a"\n',
            "a run begins with these adapters or with those of [checkpoint] initial_load_path",
        ),
        ("[parallelism]\npipeline_parallel_degree = 2\n", "the plan says who computes what"),
        ("[profiling]\nenable_profiling = true\nprofile_freq = 2\n", "profiler_active + profiler_warmup = 4"),
        ("[training]\nmax_norm = -1\n", "[training] max_norm is -1.0; give a finite number, 0 or more"),
        (
            '[training]\nmax_norm = 0\n[hetero]\nclip = "ministage"\nplan = "p.toml"\n',
            '[hetero] clip = "ministage": [training] max_norm = 0 clips nothing',
        ),
        ("[optimizer]\nlr = inf\n", "[optimizer] lr is inf; give 0 or more, and no more than fp32 has"),
        ("[optimizer]\nlr = 1e308\n", "[optimizer] lr is 1e+308; give 0 or more, and no more than fp32 has"),
        ("[optimizer]\neps = inf\n", "[optimizer] eps is inf; give 0 or more, and no more than fp32 has"),
        ("[optimizer]\nweight_decay = inf\n", "weight_decay is inf; give 0 or more, and no more than fp32"),
        ("[comm]\ninit_timeout_seconds = 10000000000000000000\n", "give 1 to 1000000000"),
        ("[training]\ndataloader.num_workers = 100000\n", "num_workers is 100000; give 0 to 1024"),
        ("[training]\ndataloader.prefetch_factor = 1000000\n", "prefetch_factor is 1000000; give 1 to 10000"),
        (
            "[compile]\nenable = true\ncomponents = []\n",
            "[compile] components = []: with enable = true say what",
        ),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, with_plan(text))
    with pytest.raises(ConfigError) as caught:
        parse_command_line(["--config", str(path)])
    assert expected in str(caught.value)


def with_plan(text: str) -> str:
    """The text of a recipe with a plan, unless it has one."""
    if "plan =" in text:
        return text
    head = '[hetero]\nplan = "p.toml"\n'
    return head + text.removeprefix("[hetero]\n")


def test_a_recipe_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[hetero\] plan"):
        parse_command_line([])


@pytest.mark.parametrize("flag", ["--config", "--job.config_file", "--job.config-file", "--config="])
def test_command_line_over_file_over_defaults(tmp_path: Path, flag: str) -> None:
    path = write(tmp_path, '[hetero]\nplan = "p.toml"\n[training]\nsteps = 7\nseq_len = 9\n')
    chosen = [f"{flag}{path}"] if flag.endswith("=") else [flag, str(path)]
    more = ["--training.seq_len", "11", "--metrics.no_enable_tensorboard", "--dry-run"]
    request = parse_command_line([*chosen, *more])
    assert request.config.training.steps == 7
    assert request.config.training.seq_len == 11
    assert request.config.optimizer.lr == Config().optimizer.lr
    assert not request.config.metrics.enable_tensorboard
    assert request.dry_run
    assert request.config_path == path


def test_auto_is_no_path_and_what_it_plans_with_is(tmp_path: Path) -> None:
    path = write(tmp_path, '[hetero]\nplan = "auto"\nprofile = "p.json"\ncluster = "/c.toml"\n')
    hetero = load_config(path).hetero
    assert (hetero.plan, hetero.profile, hetero.cluster) == (AUTO, str(tmp_path / "p.json"), "/c.toml")


def test_compile_as_torchtitan_writes_it(tmp_path: Path) -> None:
    text = (
        '[hetero]\nplan = "p.toml"\n[compile]\nenable = true\ncomponents = ["model"]\nbackend = "inductor"\n'
    )
    request = parse_command_line(["--config", str(write(tmp_path, text))])
    assert request.config.compile == Compile(enable=True)
    flags = ["--hetero.plan", "p.toml", "--compile.enable", "--compile.components", "model"]
    assert parse_command_line(flags).config.compile == Compile(enable=True)
    assert not parse_command_line(["--hetero.plan", "p.toml"]).config.compile.enable


def test_the_last_of_two_files_counts(tmp_path: Path) -> None:
    path = write(tmp_path, '[hetero]\nplan = "p.toml"\n[training]\nsteps = 7\n')
    request = parse_command_line(["--config", "nowhere.toml", f"--job.config_file={path}"])
    assert request.config_path == path
    assert request.config.training.steps == 7


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    path = write(tmp_path, '[hetero]\nplan = "p.toml"\n[training]\ndataset_path = "/data"\n')
    config = load_config(path)
    assert config.hetero.plan == str(tmp_path / "p.toml")
    assert config.training.dataset_path == "/data"
    request = parse_command_line(["--config", str(path), "--hetero.plan", "here.toml"])
    assert request.config.hetero.plan == "here.toml"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parallelism.pipeline_parallel_degree", "2"], "the plan says who computes what"),
        (["--training.local-batch-size=2"], "the plan says which rows"),
        (["--validation.local_batch_size=8"], "as the plan divides them"),
        (["--training.dataloader.persistent_workers"], "workers live as long as the run"),
    ],
)
def test_flags_of_torchtitan_are_refused_by_name(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(arguments)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ("--checkpoint.interval=500", "--checkpoint.enable"),
        ("--checkpoint.enable --checkpoint.export-dtype bfloat16", "--checkpoint.last_save_model_only"),
        (
            "--checkpoint.enable --checkpoint.no-initial_load_model_only",
            "--checkpoint.initial_load_path",
        ),
        ("--validation.freq 5", "--validation.enable"),
        ("--training.dataset stdlib --training.dataset_path p", '--training.dataset_path ""'),
        ("--debug.deterministic_warn_only", "--debug.deterministic"),
        ("--elastic.min_ranks 1", "--elastic.enable"),
    ],
)
def test_a_flag_that_says_nothing_is_refused(arguments: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"says nothing without {needed}: add")):
        parse_command_line(["--hetero.plan", "p.toml", *arguments.split()])


@pytest.mark.parametrize(
    "arguments",
    [
        "--checkpoint.no-enable --checkpoint.interval 5",
        "--debug.no-deterministic_warn_only",
        "--elastic.no_enable",
        "--checkpoint.upload=",
        "--model.name=hf --model.path=p --model.flavor=",
        "--lora.no_enable",
    ],
)
def test_what_is_off_may_be_said(arguments: str, tmp_path: Path) -> None:
    text = (
        '[hetero]\nplan = "p.toml"\n[validation]\nfreq = 3\n[checkpoint]\ninterval = 7\nupload = "s3://b"\n'
        "[debug]\ndeterministic_warn_only = true\n[profiling]\nprofile_freq = 1\n"
        "[elastic]\nenable = false\nmin_ranks = 2\n"
    )
    if "lora" in arguments:
        text += "[lora]\nenable = true\nrank = 8\n"
    parse_command_line(["--config", str(write(tmp_path, text)), *arguments.split()])


def test_an_unknown_flag_ends_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--training.stepz", "3"])
    assert caught.value.code == 2
    assert "--training.steps" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("argument", "code"), [("--training.stepz", 2), ("--help", 0), ("--version", 0)])
def test_the_first_of_a_node_speaks_for_all(
    rank: int, argument: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "_HEAD_START_S", 0.0)
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for parse in (parse_command_line, cli.main):
        try:
            assert parse([argument]) == code
        except SystemExit as end:
            assert (end.code or 0) == code
        printed = capsys.readouterr()
        assert bool(printed.out + printed.err) == (rank == 0)
        assert argument != "--version" or rank or printed.out == f"zorselike {__version__}\n"


def test_ctrl_c_while_the_first_of_a_node_speaks_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launcher.time, "sleep", interrupted)
    launcher.report_mistake(ConfigError("wrong"))
    assert capsys.readouterr().err == "error: wrong\n"


def test_torchruns_report_names_a_wrong_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        parse_command_line(["--training.stepz", "3"])
    assert "the command line is wrong" in (tmp_path / "error.json").read_text()


def test_help_shows_the_merged_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "[training]\nsteps = 4321\n")
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--config", str(path), "--help"])
    assert caught.value.code == 0
    assert "4321" in capsys.readouterr().out


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    more = ["--debug.seed", "5", "--compile.enable"]
    request = parse_command_line(["--config", str(RECIPES / "two_gpus.toml"), *more])
    path = write(tmp_path, dump_config(request.config, comment="two\nlines"))
    assert load_config(path) == request.config


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.name)
def test_recipes_load_and_fit_their_plans(recipe: Path) -> None:
    if recipe.name.endswith(".plan.toml"):
        Plan.load(recipe)
        return
    config = parse_command_line(["--config", str(recipe)]).config
    assert (load_plan(config) is None) == (config.hetero.plan in (AUTO, ""))


def make_plan(**changes: object) -> Plan:
    group = Group(ranks=(0,), microbatches=(Microbatch(0, 0, 4),), recompute="layer")
    plan = Plan(global_batch=4, groups=(group,), ministages=(Ministage(0, ("all",)),))
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    [
        (["--training.global_batch_size", "8"], {}, "global_batch_size = 8, but the plan"),
        (["--training.seq_len", "8"], {"sequence_length": 16}, "sequence_length = 16"),
        (
            ["--parallelism.tensor_parallel_degree", "2"],
            {},
            "tensor_parallel_degree = 2, but group 0 of the plan p.toml has replicas of 1: leave the key out",
        ),
        (["--activation_checkpoint.mode", "none"], {}, 'group 0 of the plan p.toml has recompute = "layer"'),
    ],
)
def test_contradictions_with_the_plan(
    arguments: list[str], changes: dict[str, object], expected: str
) -> None:
    config = parse_command_line(["--hetero.plan", "p.toml", *arguments]).config
    with pytest.raises(ConfigError) as caught:
        check_against_plan(config, make_plan(**changes))
    assert expected in str(caught.value)


def test_agreement_with_the_plan() -> None:
    arguments = ["--training.global_batch_size", "4", "--activation_checkpoint.mode", "full"]
    config = parse_command_line(["--hetero.plan", "p.toml", *arguments]).config
    check_against_plan(config, make_plan(sequence_length=config.training.seq_len))


def test_a_degree_without_a_plan_makes_equal_replicas() -> None:
    arguments = ["--parallelism.tensor_parallel_degree", "2", "--training.global_batch_size", "4"]
    config = parse_command_line([*arguments, "--activation_checkpoint.mode", "full"]).config
    plan = make_equal_plan(config, ["a", "b"], 4)
    (group,) = plan.groups
    assert (group.ranks, group.zero, group.recompute) == (((0, 1), (2, 3)), 2, "layer")
    assert plan.microbatches_of_rank(3) == (Microbatch(2, 2, 3), Microbatch(2, 3, 4))
    assert [ministage.modules for ministage in plan.ministages] == [("a", "b")]
    check_against_plan(dataclasses.replace(config), plan)
    for num_ranks, message in (
        (3, "3 processes cannot be divided"),
        (6, "share 4 rows eq"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_equal_plan(config, ["a", "b"], num_ranks)


def test_configuration_needs_no_torch() -> None:
    code = (
        "import sys; from zorselike.train.config.file import parse_command_line; "
        "parse_command_line(['--hetero.plan', 'p']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_home_folder_is_one_wherever_the_path_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "x.toml").write_text(
        '[job]\ndump_folder = "~/runs"\n[hetero]\nplan = "x.plan.toml"\n'
        '[checkpoint]\nenable = true\ninitial_load_path = "begun"\n'
    )
    config = parse_command_line(["--config", str(tmp_path / "x.toml")]).config
    assert config.job.dump_folder == str(tmp_path / "home" / "runs")
    assert config.checkpoint.initial_load_path == str(tmp_path / "begun")
    given = parse_command_line(["--hetero.plan", "x", "--job.dump_folder=~/y"]).config
    assert given.job.dump_folder == str(tmp_path / "home" / "y")
    with pytest.raises(ConfigError, match=r"\[job\] dump_folder = '~nobody_here/x': there is no such home"):
        parse_command_line(["--hetero.plan", "x", "--job.dump_folder=~nobody_here/x"])
