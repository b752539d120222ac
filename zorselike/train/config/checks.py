"""What contradicts itself in a recipe, or the plan that it names: one error before work starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields

from zorselike.errors import ConfigError, FileError
from zorselike.plan.plan import Plan
from zorselike.text.dataclass_tables import check_dataclass
from zorselike.text.wording import list_few
from zorselike.train.config.config import AUTO, HUGGING_FACE, Config, Elastic, Lora

_NAME_A_PLAN = f'name a plan file, for example recipes/debug_cpu.plan.toml, or write "{AUTO}"'


_NEEDS: Mapping[str, tuple[Callable[[Config], bool], str]] = {
    "checkpoint": (lambda config: config.checkpoint.enable, "--checkpoint.enable"),
    "checkpoint.export_dtype": (
        lambda config: config.checkpoint.last_save_model_only,
        "--checkpoint.last_save_model_only",
    ),
    "checkpoint.initial_load_model_only": (
        lambda config: bool(config.checkpoint.initial_load_path),
        "--checkpoint.initial_load_path",
    ),
    "validation": (lambda config: config.validation.enable, "--validation.enable"),
    "validation.dataset": (lambda config: not config.validation.dataset_path, '--validation.dataset_path ""'),
    "training.dataset": (lambda config: not config.training.dataset_path, '--training.dataset_path ""'),
    "profiling": (lambda config: config.profiling.enable_profiling, "--profiling.enable_profiling"),
    "compile": (lambda config: config.compile.enable, "--compile.enable"),
    "lora": (lambda config: config.lora.enable, "--lora.enable"),
    "elastic": (lambda config: config.elastic.enable, "--elastic.enable"),
    "metrics.save_tb_folder": (
        lambda config: config.metrics.enable_tensorboard,
        "--metrics.enable_tensorboard",
    ),
    "metrics.save_for_all_ranks": (
        lambda config: config.metrics.enable_tensorboard,
        "--metrics.enable_tensorboard",
    ),
    "debug.deterministic_warn_only": (lambda config: config.debug.deterministic, "--debug.deterministic"),
    "model.flavor": (lambda config: config.model.name != HUGGING_FACE, "a --model.name that is a family"),
}
"""Of sections, and of keys, that say nothing without another key: whether that is there, and its flag."""


def check_given(config: Config, given: Collection[str]) -> None:
    """Raises `ConfigError` for a key of the command line that says nothing in this configuration.

    A recipe may carry keys of a section that is off; a flag is typed to change something, unless another
    turns its section off. `given`: `section.key` of each flag.
    """
    for name in given:
        section, _, key = name.partition(".")
        for needing in (section, name):
            is_there, needed = _NEEDS.get(needing, (lambda config: True, ""))
            is_off_on_purpose = needing == section and needed.removeprefix("--") in given
            if is_there(config) or is_off_on_purpose:
                continue
            home = getattr(config, section)
            value, default = getattr(home, key), getattr(type(home)(), key)
            if value or value not in ("", default):
                raise ConfigError(
                    f"command line: --{name} says nothing without {needed}: add that, or leave it out"
                )


def check_config(config: Config, *, said: Collection[str] = ()) -> None:
    """Raises `ConfigError` for the first value that no run can use, naming section, key and mend.

    `said`: `section.enable` of each section of which recipe or command line say whether it is on. One that is
    off without that was forgotten, if it has other keys.
    """
    try:
        for section in fields(Config):
            check_dataclass(getattr(config, section.name), f"[{section.name}] ")
    except FileError as error:
        raise ConfigError(str(error)) from None
    if config.compile.enable and not config.compile.components:
        raise ConfigError('[compile] components = []: with enable = true say what to compile: ["model"]')
    loader, profiling, hetero = config.training.dataloader, config.profiling, config.hetero
    if loader.prefetch_factor is not None and loader.num_workers == 0:
        raise ConfigError(
            f"[training] dataloader.prefetch_factor = {loader.prefetch_factor}: needs num_workers >= 1"
        )
    least = profiling.profiler_active + profiling.profiler_warmup
    if profiling.enable_profiling and profiling.profile_freq < least:
        raise ConfigError(
            f"[profiling] profile_freq = {profiling.profile_freq}: must be at least profiler_active + "
            f"profiler_warmup = {least}"
        )
    if hetero.clip == "ministage" and not config.training.max_norm:
        raise ConfigError(
            '[hetero] clip = "ministage": [training] max_norm = 0 clips nothing; give a norm, or no clip'
        )
    _check_parallelism(config)
    if hetero.plan in (AUTO, "") and config.training.global_batch_size < 1:
        raise ConfigError(
            f"[training] global_batch_size = {config.training.global_batch_size}: say how many rows a step "
            f'has, since [hetero] plan = "{hetero.plan}" has no plan that says it'
        )
    if config.model.path and config.model.name != HUGGING_FACE:
        raise ConfigError(
            f'[model] path = "{config.model.path}" is the folder of a Hugging Face model: say name = '
            f'"{HUGGING_FACE}" too'
        )
    if config.model.name == HUGGING_FACE and config.model.override:
        raise ConfigError(
            f"[model] override = {[*config.model.override]}: a Hugging Face model is what its config.json "
            "says; change that"
        )
    if config.model.name == HUGGING_FACE and not config.model.path:
        raise ConfigError(
            f'[model] name = "{HUGGING_FACE}" needs the folder of a Hugging Face model: path = "DIR"'
        )
    _check_lora(config, said)
    checkpoint = config.checkpoint
    for key, unused in (("load_step", -1), ("initial_load_path", "")):
        if getattr(checkpoint, key) != unused and not checkpoint.enable:
            raise ConfigError(
                f"[checkpoint] {key} = {getattr(checkpoint, key)!r}: nothing is loaded without enable = true"
            )
    if checkpoint.keep_best and not (checkpoint.enable and config.validation.enable):
        raise ConfigError(
            "[checkpoint] keep_best = true: needs [checkpoint] enable = true and [validation] enable = true"
        )
    for key in ("profile", "cluster"):
        if hetero.plan != AUTO and getattr(hetero, key) and not config.elastic.enable:
            raise ConfigError(
                f'[hetero] {key} = "{getattr(hetero, key)}": is for plan = "{AUTO}"; remove it, or plan '
                "that way"
            )
    _check_elastic(config, said)


def _check_parallelism(config: Config) -> None:
    """A plan, or what makes one."""
    degree, plan = config.parallelism.tensor_parallel_degree, config.hetero.plan
    where = f"[parallelism] tensor_parallel_degree = {degree}"
    if not plan and degree == 1:
        raise ConfigError(f'[hetero] plan is ""; {_NAME_A_PLAN}')
    if plan == AUTO and degree > 1:
        raise ConfigError(
            f'{where}: says the plan, and [hetero] plan = "{AUTO}" searches for one: leave one of them out'
        )
    if not plan and config.elastic.enable:
        raise ConfigError(f"{where}: [elastic] enable = true begins with a plan: {_NAME_A_PLAN}")


def _check_elastic(config: Config, said: Collection[str]) -> None:
    elastic, hetero = config.elastic, config.hetero
    if not elastic.enable:
        for key in fields(Elastic) if "elastic.enable" not in said else ():
            if getattr(elastic, key.name) != key.default:
                raise ConfigError(
                    f"[elastic] {key.name} = {getattr(elastic, key.name)!r}: says nothing without enable = "
                    "true"
                )
        return
    if elastic.replan_on_drift and elastic.replan != "auto":
        raise ConfigError(
            f'[elastic] replan_on_drift = true: needs replan = "auto", and it is "{elastic.replan}"'
        )
    given = [key for key in ("profile", "cluster") if getattr(hetero, key)]
    if hetero.plan != AUTO and len(given) == 1:
        raise ConfigError(
            f'[hetero] {given[0]} = "{getattr(hetero, given[0])}": to plan anew after a loss, name both '
            "profile and cluster"
        )


def _check_lora(config: Config, said: Collection[str]) -> None:
    lora = config.lora
    if not lora.enable:
        for key in fields(Lora) if "lora.enable" not in said else ():
            if getattr(lora, key.name) != key.default:
                raise ConfigError(
                    f"[lora] {key.name} = {getattr(lora, key.name)!r}: there are no adapters without "
                    "enable = true"
                )
    elif config.model.name != HUGGING_FACE:
        raise ConfigError(
            f"[lora] enable = true: adapters are for a Hugging Face model, and [model] name = "
            f'"{config.model.name}"; say name = "{HUGGING_FACE}" and path = "DIR"'
        )
    elif lora.initial_load_path and config.checkpoint.enable and config.checkpoint.initial_load_path:
        raise ConfigError(
            f'[lora] initial_load_path = "{lora.initial_load_path}": a run begins with these adapters or '
            "with those of [checkpoint] initial_load_path; leave one of them out"
        )
    elif lora.save_merged and not (config.checkpoint.enable and config.checkpoint.last_save_model_only):
        raise ConfigError(
            "[lora] save_merged = true: needs [checkpoint] enable = true and last_save_model_only = true"
        )


def load_plan(config: Config) -> Plan | None:
    """The plan of `[hetero] plan`, None if it is `auto` or left out; raises `PlanError` if it is wrong, and
    `ConfigError` where recipe and plan contradict each other."""
    if config.hetero.plan in (AUTO, ""):
        return None
    plan = Plan.load(config.hetero.plan)
    check_against_plan(config, plan)
    return plan


def check_against_plan(config: Config, plan: Plan) -> None:
    """Raises `ConfigError` where recipe and plan contradict each other."""
    plan_path = config.hetero.plan
    size = config.training.global_batch_size
    if size not in (-1, plan.global_batch):
        raise ConfigError(
            f"[training] global_batch_size = {size}, but the plan {plan_path} has global_batch = "
            f"{plan.global_batch}: remove the key, or make a plan for {size} rows"
        )
    if plan.sequence_length not in (None, config.training.seq_len):
        raise ConfigError(
            f"[training] seq_len = {config.training.seq_len}, but the plan {plan_path} was made for "
            f"sequence_length = {plan.sequence_length}: set one of them to the other"
        )
    degree = config.parallelism.tensor_parallel_degree
    for number, group in enumerate(plan.groups):
        others = {replica.degree for replica in group.replicas} - {degree}
        if degree > 1 and others:
            raise ConfigError(
                f"[parallelism] tensor_parallel_degree = {degree}, but group {number} of the plan "
                f"{plan_path} has replicas of {list_few(sorted(others))}: leave the key out, since "
                f"the plan says it, or list replicas of {degree} ranks there"
            )
    wanted = {"none": "none", "full": "layer"}.get(config.activation_checkpoint.mode)
    for number, group in enumerate(plan.groups):
        if wanted is not None and group.recompute != wanted:
            raise ConfigError(
                f'[activation_checkpoint] mode = "{config.activation_checkpoint.mode}", but group {number} '
                f'of the plan {plan_path} has recompute = "{group.recompute}": set recompute = "{wanted}" '
                'there, or mode = "plan" here'
            )
