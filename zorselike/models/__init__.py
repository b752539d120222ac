"""Small pure models: they know nothing of parallelism and nothing of plans.

All follow TorchTitan's decoder convention (`Decoder`), by which a model is cut into ministages.
"""

from zorselike.models.decoder import Decoder, DecoderConfig
from zorselike.models.flops import (
    flops_per_token,
    forward_flops_by_module,
    num_parameters,
    parameters_by_module,
)
from zorselike.models.gpt import GPT, GPTConfig
from zorselike.models.llama import Llama, LlamaConfig
from zorselike.models.registry import build_model, flavors, get_config, model_names, module_names
from zorselike.models.rope import RopeScaling

__all__ = [
    "GPT",
    "Decoder",
    "DecoderConfig",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "build_model",
    "flavors",
    "flops_per_token",
    "forward_flops_by_module",
    "get_config",
    "model_names",
    "module_names",
    "num_parameters",
    "parameters_by_module",
]
