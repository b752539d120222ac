"""Optimizers that keep their state in other ways than AdamW does, to be offloaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from offloaded import Factory
from torch import Tensor, nn
from torch.optim import Optimizer


class _Momentum(Optimizer):
    """Descends along an average of gradients; a subclass says how that is kept."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__(named_parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.keep_average(self.state[parameter], parameter.grad)
                    parameter.add_(average, alpha=-group["lr"])

    def keep_average(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        raise NotImplementedError


class Replacing(_Momentum):
    """Puts a new tensor into its state in each step."""

    def keep_average(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        state["average"] = 0.9 * state["average"] + gradient if state else gradient.clone()
        return state["average"]  # type: ignore[no-any-return]


class Late(_Momentum):
    """Has no state before its third step, and one tensor more after its fourth."""

    def keep_average(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        if state["count"] >= 3:
            average = state.setdefault("average", torch.zeros_like(gradient))
            gradient = average.mul_(0.9).add_(gradient)
        if state["count"] >= 4:
            gradient = gradient + state.setdefault("first", gradient.clone())
        return gradient


class Alternating(_Momentum):
    """Drops its state in every second step."""

    def keep_average(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        if "average" in state:
            return gradient + state.pop("average")  # type: ignore[no-any-return]
        state["average"] = gradient.clone()
        return gradient


ODD_OPTIMIZERS: dict[str, Factory] = {
    "state from the constructor": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "no state": lambda named: torch.optim.SGD(named, lr=0.05),
    "state that begins as the gradient": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
    "a new tensor each step": Replacing,
    "state from the third step": Late,
    "state in every second step": Alternating,
}
"""By what is odd about them."""
