"""The optimizer of a ministage: AdamW or Adam without weight decay of norms and biases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zorselike.train.config.config import Optimizer as OptimizerConfig

NamedParameters = list[tuple[str, nn.Parameter]]

_CLASSES: dict[str, type[torch.optim.AdamW] | type[torch.optim.Adam]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
}

_FUSED_DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})

logger = logging.getLogger("zorselike")


def build_optimizer_factory(config: OptimizerConfig) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """The factory that `HeteroPipeline` calls for each ministage with `[(global name, parameter)]`."""

    def build(named_parameters: NamedParameters) -> torch.optim.Optimizer:
        groups = group_by_decay(named_parameters, weight_decay=config.weight_decay)

        implementation = config.implementation
        if implementation == "fused" and not all(has_fused_kernel(p) for _, p in named_parameters):
            logger.info('[optimizer] implementation = "foreach", since this device has no fused kernels')
            implementation = "foreach"
        return _CLASSES[config.name](
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=implementation == "fused",
            foreach=implementation == "foreach",
        )

    return build


def has_fused_kernel(parameter: torch.Tensor) -> bool:
    """Whether torch (from 2.11) has a fused kernel for it; torch itself says so only at the first step."""
    return parameter.device.type in _FUSED_DEVICES and parameter.is_floating_point()


def group_by_decay(
    named_parameters: Sequence[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer, with names; empty groups are left out."""
    groups = (
        ([(name, p) for name, p in named_parameters if is_decayed(name, p)], weight_decay),
        ([(name, p) for name, p in named_parameters if not is_decayed(name, p)], 0.0),
    )
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """True for matrices; false for vectors, biases and parameters of norms."""
    *owners, leaf = name.split(".")
    return parameter.ndim >= 2 and leaf != "bias" and not any("norm" in owner.lower() for owner in owners)
