"""Hugging Face's `transformers`: a model's folder becomes a pipeline, and no rank holds the whole model.

Needs `pip install 'zorselike[hf]'`.
"""

from zorselike.hf.adapters import load_adapters
from zorselike.hf.folder import build_on_meta, find_parts, load_weights, pipeline
from zorselike.hf.lora import Lora, add_lora

__all__ = ["Lora", "add_lora", "build_on_meta", "find_parts", "load_adapters", "load_weights", "pipeline"]
