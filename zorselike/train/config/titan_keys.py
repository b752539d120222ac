"""Keys of TorchTitan v0.2.2 that have no place here, with what takes their place."""

from __future__ import annotations

REFUSED_SECTIONS: dict[str, str] = {
    "quantize": "not supported yet; remove the section",
    "memory_estimation": "use --dry-run, which builds everything without memory",
    "fault_tolerance": "[elastic] goes on in the same processes when ranks are lost",
    "experimental": "not supported; use HeteroPipeline from a script of your own (recipes/train_by_hand.py)",
}
"""Whole sections."""

_ROWS = "rows are read and computed as the plan divides them; remove the key"
_HF_IN = 'a Hugging Face model is [model] name = "hf", path = "DIR"; remove the key'
_HF_OUT = "last_save_model_only writes a Hugging Face model as such; remove the key"
_RECOMPUTE = 'the plan\'s groups say recompute = "none" or "layer"; remove the key'
_RECOMPUTE_KEYS = (
    "selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
    "visualize_memory_budget_pareto preserve_rng_state determinism_check debug"
)
_PLAN = "the plan says who computes what: groups, ministages and ZeRO stages ([hetero] plan)"
_PARALLELISM_KEYS = (
    "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
    "pipeline_parallel_split_points module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage "
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
    "pipeline_parallel_expert_parallel_overlap context_parallel_degree context_parallel_rotate_method "
    "expert_parallel_degree expert_tensor_parallel_degree"
)
_FLIGHT = "set the variables TORCH_FR_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE of torch itself; remove the key"

REFUSED_KEYS: dict[str, dict[str, str]] = {
    "job": {
        "config_file": "give it on the command line: --config FILE",
        "save_config_file": "every run's folder holds its merged config.toml; remove the key",
        "custom_config_module": "use HeteroPipeline from a script of your own (recipes/train_by_hand.py)",
    },
    "profiling": {
        "enable_memory_snapshot": "not supported yet; remove the key",
        "save_memory_snapshot_folder": "not supported yet; remove the key",
    },
    "model": {
        "tokenizer_path": "use hf_assets_path",
        "converters": "not supported yet; remove the key",
        "print_after_conversion": "--dry-run prints what each rank holds; remove the key",
    },
    "parallelism": dict.fromkeys(_PARALLELISM_KEYS.split(), _PLAN),
    "optimizer": {
        "early_step_in_backward": "ministages already update as soon as they have reduced, while the next "
        'one computes, where max_norm = 0 or [hetero] clip = "ministage"; remove the key'
    },
    "training": {
        "local_batch_size": "the plan says which rows each rank computes; remove the key",
        "enable_cpu_offload": "the plan's groups say what is offloaded (offload = [...]); remove the key",
        "dtype": "weights and optimizer states are fp32; mixed_precision_param is what layers compute in",
        "gc_debug": "not supported; remove the key",
        "max_context_length": "use seq_len",
        "num_tokens_per_train_step": "the plan's global_batch, times seq_len, says it; remove the key",
        "num_tokens_per_microbatch_per_dp_rank": "the plan's microbatches say it; remove the key",
    },
    "training.dataloader": {
        "persistent_workers": "rows never end, so workers live as long as the run; remove the key"
    },
    "validation": {
        "local_batch_size": _ROWS,
        "seq_len": "rows have the length of [training] seq_len; remove the key",
        "dataloader": _ROWS,
    },
    "checkpoint": {
        "enable_ft_dataloader_checkpoints": "what has been read is the number of rows alone; remove the key",
        "initial_load_in_hf": _HF_IN,
        "initial_load_in_hf_quantized": "quantized weights are not read; remove the key",
        "last_save_in_hf": _HF_OUT,
        "exclude_from_loading": "initial_load_model_only leaves out all but the model; remove the key",
        "create_seed_checkpoint": "[debug] seed gives every plan the same weights; remove the key",
        "load_only": "a run saves at its end; another folder, and initial_load_path, leave what is loaded as "
        "it is; remove the key",
    },
    "activation_checkpoint": dict.fromkeys(_RECOMPUTE_KEYS.split(), _RECOMPUTE),
    "comm": {
        "train_timeout_seconds": "a rank that dies or falls silent ends the job within seconds by itself "
        "(the variable ZORSELIKE_SILENCE_S says after how many); remove the key",
        "trace_buf_size": _FLIGHT,
        "save_traces_folder": _FLIGHT,
        "save_traces_file_prefix": _FLIGHT,
        "mode": "use --dry-run, which needs no process group",
    },
    "debug": {"moe_force_load_balance": "routers choose as the model has it; remove the key"},
}
"""Keys of sections that exist here too."""

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "compile.components": {
        "loss": 'losses are computed by the function as it is; only layers are compiled: ["model"]'
    },
    "compile.backend": dict.fromkeys(
        ("eager", "aot_eager", "cudagraphs"), 'made for debugging or for fixed memory; use "inductor"'
    ),
    "activation_checkpoint.mode": dict.fromkeys(
        ("selective", "memory_budget"), 'a plan recomputes whole layers or none: "plan", "none" or "full"'
    ),
    "training.dataset": dict.fromkeys(
        ("c4", "c4_test", "c4_validation"), "not built in; give text or token files by dataset_path"
    ),
}
"""Values, by `section.key`."""


def refusal(section: str, key: str | None = None) -> str | None:
    """What to use instead of a key (or section) of TorchTitan; `None` if it is none of its."""
    if section in REFUSED_SECTIONS:
        return REFUSED_SECTIONS[section]
    return REFUSED_KEYS.get(section, {}).get(key or "")
