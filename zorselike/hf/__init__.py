"""Hugging Face's `transformers`: a model's folder becomes a pipeline, and no rank holds the whole model.

Needs `pip install 'zorselike[hf]'`.
"""

from zorselike.hf.folder import build_on_meta, load_weights, pipeline

__all__ = ["build_on_meta", "load_weights", "pipeline"]
