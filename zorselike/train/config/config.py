"""Every setting of a training job. These dataclasses are the source of truth.

Sections and keys carry the names of TorchTitan's last TOML release (v0.2.2); what is ours alone
lives in `[hetero]`, or says so. `zorselike/train/config/file.py` reads TOML files and the
command line into them; `zorselike/train/config/titan_keys.py` names the keys of TorchTitan that have
no place here, with what takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from zorselike.text.annotations import Must, Natural, Positive, Quantity
from zorselike.text.units import parse_time

HUGGING_FACE = "hf"
"""The `[model] name` of what is in a folder."""

AUTO = "auto"
"""In place of a plan file: measure what is missing, plan, and train."""


Share = Annotated[float, Must(lambda share: 0 <= share <= 1, "give one from 0 to 1")]
Beta = Annotated[float, Must(lambda beta: 0 <= beta < 1, "give one from 0 to below 1")]
Budget = Annotated[str, Must(lambda text: (parse_time(text) or 0) > 0, 'write seconds, such as "30s"')]
Single = Annotated[
    float, Must(lambda value: 0 <= value <= 3.4e38, "give 0 or more, and no more than fp32 has (3.4e38)")
]
"""A number of the optimizer, which computes in fp32."""
STEP_OR_NEWEST = Must(lambda step: step >= -1, "give a step, or -1 for the newest")


@dataclass(frozen=True)
class Job:
    dump_folder: str = "./outputs"
    """Folder that holds one folder a run: its configuration, plan, log and metrics."""
    description: str = ""
    """What this job is, for people; printed at the start."""
    print_config: bool = False
    """Print the merged configuration at the start."""


@dataclass(frozen=True)
class Model:
    name: str = "llama"
    """Which model family to train (`llama`, `gpt`), or `hf`: the Hugging Face model in `path`."""
    path: str = ""
    """With `name = "hf"`: folder of a causal LM, with `config.json` and, unless it begins at random,
    `.safetensors`; nothing is downloaded (ours)."""
    flavor: str = "debug"
    """Which size of that family."""
    override: tuple[str, ...] = ()
    """Settings that differ from that size's, such as `["num_layers=8", "vocab_size=32000"]` (ours)."""
    hf_assets_path: str = ""
    """Folder that holds a Hugging Face `tokenizer.json` (or that file). Empty: that of `path` if there is
    one, else byte tokens."""


@dataclass(frozen=True)
class DataLoader:
    num_workers: Annotated[int, Must(lambda count: 0 <= count <= 1024, "give 0 to 1024")] = 1
    """Processes per rank that read rows ahead; 0 reads in the training process."""
    pin_memory: bool = False
    """Hand rows over in pinned memory, from which copies to a GPU run in the background."""
    prefetch_factor: Annotated[int, Must(lambda count: 1 <= count <= 10000, "give 1 to 10000")] | None = None
    """Batches that each worker reads ahead; 2 unless given. Only with `num_workers` > 0."""


@dataclass(frozen=True)
class Training:
    dataset: Literal["stdlib"] = "stdlib"
    """Built-in text, read unless `dataset_path` is given: the sources of Python's standard library."""
    dataset_path: str = ""
    """One `.txt`, `.jsonl` or `.bin` (tokens) file, or a folder of them. All lines of `.jsonl` have
    `messages` (a list of `role` and `content`, for the tokenizer's chat template), `prompt` and `completion`,
    or `text`."""
    train_on_input: bool = False
    """For `messages` and `prompt`: let what is not an answer count in the loss too (torchtune's key)."""
    packing: bool = True
    """For `messages` and `prompt`: put several lines into one row, where they do not see each other (TRL's
    key); `false`: one line a row, and padding."""
    dataset_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the numbers in `.bin` token files (ours, not TorchTitan's)."""
    global_batch_size: int = -1
    """Rows per optimizer step. The plan says it; if given here, it must be the plan's. Needed where the
    plan is `auto`."""
    seq_len: Positive = 2048
    """Tokens per row. A line of `messages` or `prompt` with more than `seq_len` + 1 tokens loses its end, and
    is left out if no answer is left of it."""
    max_norm: Quantity = 1.0
    """Gradients are clipped to this norm; 0 clips nothing, so that ministages update at once (not so in
    float16)."""
    steps: Positive = 10000
    """Optimizer steps to run."""
    mixed_precision_param: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Type in which layers compute; master weights and optimizer states are fp32. `float16` scales the
    loss and skips steps that overflow. `auto` (ours): `float16` as soon as one card of the job is older
    than Ampere, else `bfloat16`."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are reduced."""
    gc_freq: Natural = 50
    """Steps between Python garbage collections, so that ranks collect together; 0: Python's own rule."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """How rows are read."""


@dataclass(frozen=True)
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Which optimizer; norms and biases are never decayed."""
    lr: Single = 8e-4
    """Highest learning rate of the schedule."""
    beta1: Beta = 0.9
    """Decay of the running mean of gradients."""
    beta2: Beta = 0.95
    """Decay of the running mean of squared gradients."""
    eps: Single = 1e-8
    """Added to the denominator."""
    weight_decay: Single = 0.1
    """Decay of weights, not of norms and biases."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """`fused` is fastest; where torch or the device has none, `foreach` takes its place, and says so."""


@dataclass(frozen=True)
class LRScheduler:
    warmup_steps: Natural = 200
    """Steps in which the learning rate rises to `optimizer.lr`."""
    total_steps: Positive | None = None
    """Length of the schedule if it is not `training.steps`, so that a short run keeps a long one's curve."""
    decay_ratio: Share | None = None
    """Share of the steps, at the end, in which the rate decays (warm-up, stable, decay).
    Unless given, it decays from the end of the warm-up on."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; `cosine` without `decay_ratio` is the usual cosine schedule."""
    min_lr_factor: Share = 0.0
    """The decay ends at this share of `optimizer.lr`."""


@dataclass(frozen=True)
class Lora:
    enable: bool = False
    """Train adapters beside the weights of a Hugging Face model (`[model] name = "hf"`), which are frozen, in
    `mixed_precision_param` alone; checkpoints hold the adapters alone (all of this section is ours)."""
    rank: Positive = 16
    """Rows of an adapter's A, columns of its B."""
    alpha: Quantity = 0.0
    """What an adapter adds is multiplied by `alpha / rank`; 0: twice the rank."""
    dropout: Beta = 0.0
    """Share of an adapter's inputs that are dropped in training."""
    target_modules: tuple[str, ...] = ()
    """Linear layers that get one, by name or end of name: `["q_proj", "v_proj"]`; none given: all in decoder
    layers."""
    initial_load_path: str = ""
    """Where `[checkpoint] folder` has none yet: adapters to begin with, a folder that peft wrote."""
    save_merged: bool = False
    """With `[checkpoint] last_save_model_only`: hand on the model with its adapters in it, in the dtype of
    its folder, and not the adapters alone."""


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = False
    """Save the run every `interval` steps, at its end, and where a signal stops it; and go on from the newest
    complete checkpoint in `folder`, under whatever plan."""
    folder: str = "checkpoint"
    """Folder of checkpoints inside `[job] dump_folder`, one `step-N` each; the job's runs share it."""
    interval: Positive = 500
    """Steps from one save to the next."""
    load_step: Annotated[int, STEP_OR_NEWEST] = -1
    """Step to go on from, the last there is; -1: the newest that is complete."""
    initial_load_path: str = ""
    """Where `folder` has no checkpoint yet: one to begin with, a `step-N` or a folder of them."""
    initial_load_model_only: bool = True
    """Begin with its model alone; `false` goes on with its optimizer, its step and its place in the data."""
    keep_latest_k: Natural = 10
    """Older checkpoints than so many are deleted; 0 keeps all."""
    keep_every: Natural = 0
    """Never delete those of steps that are multiples of it (ours, not TorchTitan's); 0: no such steps."""
    keep_best: bool = False
    """Save whenever a validation finds the lowest loss so far, and keep that one (ours)."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """`async` copies the state to host memory, pinned for GPUs, and writes it beside the next steps
    (TorchTitan's default is `disabled`: training waits for the disk); both its modes are the same here."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step too."""
    last_save_model_only: bool = False
    """At the end of the last step keep the model alone: `model-step-N` beside the checkpoints, safetensors
    under the model's own names in `export_dtype`; with `[lora]` a folder as `peft` writes it, beside the last
    checkpoint. (TorchTitan's default is true. A run that is prolonged goes on from the checkpoint before.)"""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the exported model's numbers."""
    upload: str = ""
    """Copy every checkpoint to an object store too (ours): `s3://bucket/run`, `gs://...`, by fsspec."""


@dataclass(frozen=True)
class Parallelism:
    tensor_parallel_degree: Positive = 1
    """So many ranks of a node share every layer. Above 1 and without a plan: one group of such replicas, in
    the order of ranks, with equal rows and ZeRO 2; each computes a row at a time. A plan, where degrees may
    differ, must agree."""


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
    log_freq: Positive = 10
    """Steps between log lines, and between points of `metrics.csv` and TensorBoard; the first step is always
    logged."""
    enable_tensorboard: bool = True
    """Write TensorBoard events into the run's folder (TorchTitan's default is off)."""
    disable_color_printing: bool = False
    """No colours in log lines; there are none anyway where the output is not a terminal."""
    save_tb_folder: str = "tb"
    """Folder of the events inside the run's folder."""
    save_for_all_ranks: bool = False
    """Write events of every rank, each into a folder `rank_N`, not those of rank 0 alone."""
    enable_wandb: bool = False
    """Send the same numbers to Weights & Biases, from rank 0 (`pip install 'zorselike[wandb]'`). The
    variables WANDB_PROJECT, WANDB_TEAM and WANDB_RUN_NAME name the run."""


@dataclass(frozen=True)
class Validation:
    enable: bool = False
    """Compute the loss over validation data every `freq` steps and at the end."""
    dataset: Literal["stdlib"] = "stdlib"
    """Built-in text, read unless `dataset_path` is given."""
    dataset_path: str = ""
    """Files of any kind, as in `[training]`; give some that training does not read."""
    freq: Positive = 10
    """Steps from one validation to the next."""
    steps: Annotated[int, Must(lambda steps: steps == -1 or steps > 0, "give 1 or more, or -1 for all")] = -1
    """Global batches of each validation, always the first of the data; -1: all of it."""


@dataclass(frozen=True)
class Profiling:
    enable_profiling: bool = False
    """Write Chrome traces of every rank; actions carry the schedule's own words."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces inside the run's folder."""
    profile_freq: int = 10
    """Steps from one trace to the next."""
    profiler_active: Positive = 1
    """Steps in one trace."""
    profiler_warmup: Natural = 3
    """Steps for which the profiler runs before each trace, unrecorded."""


@dataclass(frozen=True)
class Comm:
    init_timeout_seconds: Annotated[int, Must(lambda wait: 1 <= wait <= 10**9, "give 1 to 1000000000")] = 300
    """Seconds that ranks wait for each other at the start."""


@dataclass(frozen=True)
class Debug:
    seed: Natural = 0
    """Seeds weights, dropout and the order of the data."""
    deterministic: bool = False
    """Only deterministic kernels; an operation that has none raises."""
    deterministic_warn_only: bool = False
    """With `deterministic`: warn where an operation has no deterministic kernel."""


@dataclass(frozen=True)
class Hetero:
    plan: str = ""
    """The plan file: which rank computes which rows of which layers. `auto`: the devices that run are
    measured, a plan is made for them and kept in `[job] dump_folder`, from where later runs take it. May be
    left out with `[parallelism] tensor_parallel_degree`."""
    profile: str = ""
    """With `plan = "auto"`: the profile to plan with; what it lacks is measured and added.
    Unless given, it is kept beside the plan."""
    cluster: str = ""
    """With `plan = "auto"`: the cluster file to plan with, written if it is not there.
    Unless given, it is kept beside the plan."""
    plan_budget: Budget = "30s"
    """With `plan = "auto"`: how long to look for a better plan, at most."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto`: CUDA where torch finds a GPU, else CPU."""
    clip: Literal["global", "ministage"] = "global"
    """`global` clips by the norm of all gradients, so updates wait for it; `ministage` clips each
    ministage by its own norm and updates at once."""


@dataclass(frozen=True)
class Elastic:
    enable: bool = False
    """Go on in the same processes when some of them die, leave or come; start them by `zorselike run` (all
    of this section is ours)."""
    min_ranks: Positive = 1
    """With fewer ranks the run is saved, if `[checkpoint]` is enabled, and ends."""
    mirror_share: Annotated[float, Must(lambda share: 0 < share <= 1, "give one above 0 and up to 1")] = 0.1
    """Share of the time in which mirrors of the state may be on their way to other nodes' memory. It says
    how many steps a loss undoes at most; the log names them."""
    notice_s: Quantity = 0.0
    """Seconds from SIGTERM to the end of the machine: a process that has not left by then, at a step
    boundary, ends itself, and the others go on as after a loss. 0: no such limit."""
    replan: Literal["auto", "same groups"] = "auto"
    """Which plan after a change. `auto`: the best for who is there, where profile and cluster file are known
    (`[hetero]`), found beforehand; `same groups`: spares replace who is lost, or else the others of its group
    do its work."""
    payback_s: Quantity = 600.0
    """Within so many seconds a better plan must have paid for the pause of going over to it."""
    replan_on_drift: bool = False
    """Go over to another plan where a card that has become slower than it was makes that pay back; needs
    `replan = "auto"`, a profile and a cluster file. Such cards are named in the log in any case."""


@dataclass(frozen=True)
class Config:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    hetero: Hetero = field(default_factory=Hetero)
    parallelism: Parallelism = field(default_factory=Parallelism)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    lora: Lora = field(default_factory=Lora)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    elastic: Elastic = field(default_factory=Elastic)
    debug: Debug = field(default_factory=Debug)
