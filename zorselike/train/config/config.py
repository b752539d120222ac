"""Every setting of a training job. These dataclasses are the source of truth.

Sections and keys carry the names of TorchTitan's last TOML release (v0.2.2); what is ours alone
lives in `[hetero]`, or says so. `zorselike/train/config/file.py` reads TOML files and the
command line into them; `zorselike/train/config/titan_keys.py` names the keys of TorchTitan that have
no place here, with what takes their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from zorselike.errors import ClusterError, ConfigError, FileError, PlanError, ProfileError
from zorselike.plan.plan import Plan
from zorselike.text.units import read_time

USER_ERRORS = (ConfigError, PlanError, ClusterError, ProfileError)
"""What a user can mend; each is one line."""


@dataclass(frozen=True)
class Job:
    dump_folder: str = "./outputs"
    """Folder that holds one folder a run: its configuration, plan, log and TensorBoard events."""

    description: str = ""
    """What this job is, for people; printed at the start."""

    print_config: bool = False
    """Print the merged configuration at the start."""


@dataclass(frozen=True)
class Model:
    name: str = "llama"
    """Which model family to train; see `zorselike/models`."""

    flavor: str = "debug"
    """Which size of that family."""

    hf_assets_path: str = ""
    """Folder that holds a Hugging Face `tokenizer.json` (or that file). Empty: byte tokens."""


@dataclass(frozen=True)
class DataLoader:
    num_workers: int = 1
    """Processes per rank that read rows ahead; 0 reads in the training process."""

    pin_memory: bool = False
    """Hand rows over in pinned memory, from which copies to a GPU run in the background."""

    prefetch_factor: int | None = None
    """Batches that each worker reads ahead; 2 unless given. Only with `num_workers` > 0."""


@dataclass(frozen=True)
class Training:
    dataset: Literal["stdlib"] = "stdlib"
    """Built-in text, read unless `dataset_path` is given: the sources of Python's standard library."""

    dataset_path: str = ""
    """Text or token files: one `.txt`, `.jsonl` (key `text`) or `.bin` file, or a folder of them."""

    dataset_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the numbers in `.bin` token files (ours, not TorchTitan's)."""

    global_batch_size: int = -1
    """Rows per optimizer step. The plan says it; if given here, it must be the plan's. Needed where the
    plan is `auto`."""

    seq_len: int = 2048
    """Tokens per row."""

    max_norm: float = 1.0
    """Gradients are clipped to this norm; 0 clips nothing, so that ministages update at once (not so in
    float16)."""

    steps: int = 10000
    """Optimizer steps to run."""

    mixed_precision_param: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Type in which layers compute; master weights and optimizer states are fp32. `float16` scales the
    loss and skips steps that overflow. `auto` (ours): `float16` as soon as one card of the job is older
    than Ampere, else `bfloat16`."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are reduced."""

    gc_freq: int = 50
    """Steps between Python garbage collections, so that ranks collect together; 0: Python's own rule."""

    dataloader: DataLoader = field(default_factory=DataLoader)
    """How rows are read."""


@dataclass(frozen=True)
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Which optimizer; norms and biases are never decayed."""

    lr: float = 8e-4
    """Highest learning rate of the schedule."""

    beta1: float = 0.9
    """Decay of the running mean of gradients."""

    beta2: float = 0.95
    """Decay of the running mean of squared gradients."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decay of weights, not of norms and biases."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """`fused` is fastest; where torch or the device has none, `foreach` takes its place, and says so."""


@dataclass(frozen=True)
class LRScheduler:
    warmup_steps: int = 200
    """Steps in which the learning rate rises to `optimizer.lr`."""

    total_steps: int | None = None
    """Length of the schedule if it is not `training.steps`, so that a short run keeps a long one's curve."""

    decay_ratio: float | None = None
    """Share of the steps, at the end, in which the rate decays (warm-up, stable, decay).
    Unless given, it decays from the end of the warm-up on."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; `cosine` without `decay_ratio` is the usual cosine schedule."""

    min_lr_factor: float = 0.0
    """The decay ends at this share of `optimizer.lr`."""


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    """Checkpoints are not there yet: `true` is refused."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: Literal["plan", "none", "full"] = "plan"
    """The plan says `recompute` per group. `none` or `full` demand it of every group, or refuse the plan."""


@dataclass(frozen=True)
class Compile:
    enable: bool = False
    """`torch.compile` each numbered layer by itself, once for every number of rows that a rank computes."""

    components: tuple[Literal["model"], ...] = ("model",)
    """What is compiled: layers of the model. TorchTitan's default has the loss too."""

    backend: Literal["inductor"] = "inductor"
    """torch's own compiler."""


@dataclass(frozen=True)
class Metrics:
    log_freq: int = 10
    """Steps between log lines and between TensorBoard points; the first step is always logged."""

    enable_tensorboard: bool = True
    """Write TensorBoard events into the run's folder (TorchTitan's default is off)."""

    disable_color_printing: bool = False
    """No colours in log lines; there are none anyway where the output is not a terminal."""

    save_tb_folder: str = "tb"
    """Folder of the events inside the run's folder."""

    save_for_all_ranks: bool = False
    """Write events of every rank, each into a folder `rank_N`, not those of rank 0 alone."""


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = False
    """Write Chrome traces of every rank; actions carry the schedule's own words."""

    save_traces_folder: str = "profile_traces"
    """Folder of the traces inside the run's folder."""

    profile_freq: int = 10
    """Steps from one trace to the next."""

    profiler_active: int = 1
    """Steps in one trace."""

    profiler_warmup: int = 3
    """Steps for which the profiler runs before each trace, unrecorded."""


@dataclass(frozen=True)
class Comm:
    init_timeout_seconds: int = 300
    """Seconds that ranks wait for each other at the start."""


@dataclass(frozen=True)
class Debug:
    seed: int = 0
    """Seeds weights, dropout and the order of the data."""

    deterministic: bool = False
    """Only deterministic kernels; an operation that has none raises."""

    deterministic_warn_only: bool = False
    """With `deterministic`: warn where an operation has no deterministic kernel."""


AUTO = "auto"
"""In place of a plan file: measure what is missing, plan, and train."""


@dataclass(frozen=True)
class Hetero:
    plan: str = ""
    """The plan file: which rank computes which rows of which layers. `auto`: the devices that run are
    measured, a plan is made for them and kept in `[job] dump_folder`, from where later runs take it."""

    profile: str = ""
    """With `plan = "auto"`: the profile to plan with; what it lacks is measured and added.
    Unless given, it is kept beside the plan."""

    cluster: str = ""
    """With `plan = "auto"`: the cluster file to plan with, written if it is not there.
    Unless given, it is kept beside the plan."""

    plan_budget: str = "30s"
    """With `plan = "auto"`: how long to look for a better plan, at most."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto`: CUDA where torch finds a GPU, else CPU."""

    clip: Literal["global", "ministage"] = "global"
    """`global` clips by the norm of all gradients, so updates wait for it; `ministage` clips each
    ministage by its own norm and updates at once."""


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    hetero: Hetero = field(default_factory=Hetero)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    metrics: Metrics = field(default_factory=Metrics)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)


def check_config(config: Config) -> None:
    """Raises `ConfigError` for the first value that no run can use, naming section, key and mend."""
    for key, value, is_good, expected in _rules(config):
        if not is_good:
            section, _, name = key.rpartition(".")
            raise ConfigError(f"[{section}] {name} = {value}: {expected}")


def load_plan(config: Config) -> Plan | None:
    """The plan of `[hetero] plan`, None if it is `auto`; raises `PlanError` if it is wrong, and
    `ConfigError` where recipe and plan contradict each other."""
    if config.hetero.plan == AUTO:
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
    wanted = {"none": "none", "full": "layer"}.get(config.activation_checkpoint.mode)
    for number, group in enumerate(plan.groups):
        if wanted is not None and group.recompute != wanted:
            raise ConfigError(
                f'[activation_checkpoint] mode = "{config.activation_checkpoint.mode}", but group {number} '
                f'of the plan {plan_path} has recompute = "{group.recompute}": set recompute = "{wanted}" '
                'there, or mode = "plan" here'
            )


def plan_budget_s(hetero: Hetero) -> float | None:
    """Seconds of `plan_budget`; None if it is no time."""
    try:
        return read_time(hetero.plan_budget, "plan_budget")
    except FileError:
        return None


_Rule = tuple[str, object, bool, str]
"""`(section.key, value, whether it is good, what is expected)`."""


def _rules(config: Config) -> Iterator[_Rule]:
    """Every rule."""
    training, loader, scheduler = config.training, config.training.dataloader, config.lr_scheduler
    yield from _rules_of_planning(config)
    if config.checkpoint.enable:
        mend = "checkpoints are not there yet; set it to false, and the run trains without them"
        yield "checkpoint.enable", "true", False, mend
    if config.compile.enable and not config.compile.components:
        yield "compile.components", "[]", False, 'with enable = true say what to compile: ["model"]'
    for key, count, least in (
        ("training.steps", training.steps, 1),
        ("training.seq_len", training.seq_len, 1),
        ("training.gc_freq", training.gc_freq, 0),
        ("training.dataloader.num_workers", loader.num_workers, 0),
        ("lr_scheduler.warmup_steps", scheduler.warmup_steps, 0),
        ("metrics.log_freq", config.metrics.log_freq, 1),
        ("profiling.profiler_active", config.profiling.profiler_active, 1),
        ("profiling.profiler_warmup", config.profiling.profiler_warmup, 0),
        ("comm.init_timeout_seconds", config.comm.init_timeout_seconds, 1),
        ("debug.seed", config.debug.seed, 0),
    ):
        yield key, count, count >= least, f"must be at least {least}"
    for key, number in (
        ("training.max_norm", training.max_norm),
        ("optimizer.lr", config.optimizer.lr),
        ("optimizer.eps", config.optimizer.eps),
        ("optimizer.weight_decay", config.optimizer.weight_decay),
    ):
        yield key, number, number >= 0, "must not be negative"
    for key, beta in (
        ("optimizer.beta1", config.optimizer.beta1),
        ("optimizer.beta2", config.optimizer.beta2),
    ):
        yield key, beta, 0 <= beta < 1, "must be in [0, 1)"
    ratio = scheduler.decay_ratio
    yield "lr_scheduler.decay_ratio", ratio, ratio is None or 0 <= ratio <= 1, "must be in [0, 1]"
    floor = scheduler.min_lr_factor
    yield "lr_scheduler.min_lr_factor", floor, 0 <= floor <= 1, "must be in [0, 1]"
    total = scheduler.total_steps
    yield "lr_scheduler.total_steps", total, total is None or total >= 1, "must be at least 1"
    ahead = loader.prefetch_factor
    is_good = ahead is None or (ahead >= 1 and loader.num_workers > 0)
    yield (
        "training.dataloader.prefetch_factor",
        ahead,
        is_good,
        "must be at least 1, and needs num_workers >= 1",
    )
    profiling = config.profiling
    least = profiling.profiler_active + profiling.profiler_warmup
    mend = f"must be at least profiler_active + profiler_warmup = {least}"
    yield "profiling.profile_freq", profiling.profile_freq, profiling.profile_freq >= least, mend


def _rules_of_planning(config: Config) -> Iterator[_Rule]:
    """What `[hetero]` asks for."""
    hetero, size = config.hetero, config.training.global_batch_size
    if not hetero.plan:
        mend = 'name a plan file, for example recipes/debug_cpu.plan.toml, or write "auto"'
        yield "hetero.plan", '""', False, mend
    budget_s = plan_budget_s(hetero)
    is_good = budget_s is not None and budget_s > 0
    yield "hetero.plan_budget", f'"{hetero.plan_budget}"', is_good, 'write seconds, such as "30s"'
    if hetero.plan == AUTO:
        mend = f'say how many rows a step has, since [hetero] plan = "{AUTO}" has no plan that says it'
        yield "training.global_batch_size", size, size >= 1, mend
        return
    for key in ("profile", "cluster"):
        value, mend = getattr(hetero, key), f'is for plan = "{AUTO}"; remove it, or plan that way'
        yield f"hetero.{key}", f'"{value}"', not value, mend
