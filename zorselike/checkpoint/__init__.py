"""Checkpoints as files: slices of tensors in safetensors, a manifest in JSON, folders of both. No torch, no
pickle."""
