"""One ministage of a causal LM: the model's own forward over some of its modules.

Its module is a shallow copy of the model in which what other ministages have is a stand-in without
parameters. The forward runs as in the whole model. From the second ministage on it is given embeddings that
nobody reads: the first module of the ministage gets the hidden states that entered, whatever the model has
made until then. It ends where the first module of the next ministage would begin: what that one is given
leaves the ministage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zorselike.errors import ConfigError
from zorselike.runtime.model.decoder_probe import (
    Flow,
    ReturnForm,
    copy_plain_attributes,
    hidden_states,
    with_hidden_states,
)
from zorselike.runtime.model.part import Keywords
from zorselike.runtime.model.pruning import replace_modules
from zorselike.text.wording import count


class _Reached(Exception):
    """Ends a ministage's forward where the next ministage begins."""

    def __init__(self, name: str, hidden: Tensor) -> None:
        super().__init__()
        self.name = name
        self.hidden = hidden


class _Next(nn.Module):
    """In the place of a module of a later ministage."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self._name = name
        copy_plain_attributes(module, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(self._name, hidden_states(args, kwargs))


class _EarlierLayer(nn.Module):
    """In the place of a decoder layer of an earlier ministage."""

    def __init__(self, layer: nn.Module, form: ReturnForm) -> None:
        super().__init__()
        self._form = form
        copy_plain_attributes(layer, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._form.of(hidden_states(args, kwargs))


class _Earlier(nn.Module):
    """In the place of another module of an earlier ministage: zeros of the shape of its output, without
    memory, whether it is given what it is in the whole model or embeddings in the place of token ids."""

    def __init__(self, width: int, num_dims: int) -> None:
        super().__init__()
        self._width = width
        self._num_dims = num_dims
        self.like = torch.empty(0, device="cpu")
        """A tensor with the dtype and device of the hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        lead = hidden_states(args, kwargs).shape[: self._num_dims - 1]
        return self.like.new_zeros(()).expand(*lead, self._width)


def make_ministage(
    model: nn.Module, names: Sequence[str], flow: Flow, forms: Mapping[type, ReturnForm]
) -> nn.Module:
    """The model with only the modules of `names`, which are consecutive in `flow.order`."""
    start = flow.order.index(names[0])
    stop = start + len(names)
    new: dict[str, nn.Module] = {}
    for position, name in enumerate(flow.order):
        module = model.get_submodule(name)
        if position >= stop:
            new[name] = _Next(module, name)
        elif position < start and type(module) in forms:
            new[name] = _EarlierLayer(module, forms[type(module)])
        elif position < start:
            new[name] = _Earlier(*flow.widths[name])
    return replace_modules(model, new)


class MinistageForward:
    """The forward of one ministage's module."""

    def __init__(
        self,
        module: nn.Module,
        *,
        entry: str | None,
        exit: str | None,
        embedding_width: int,
        unpack: Callable[[Any], Any] | None,
    ) -> None:
        """`entry`: the module that is given what enters; None for the first ministage. `exit`: the module of
        the next ministage that is given what leaves; None for the last. `unpack`: of what the model returns;
        its logits if None."""
        self._module = module
        self._inner: Callable[..., Any] = module.forward
        self._earlier = [m for m in module.modules() if isinstance(m, _Earlier)]
        self._entry = entry
        self._exit = exit
        self._embedding_width = embedding_width
        self._unpack = unpack
        self._passes_cache_flag = "use_cache" in Keywords.of(module.forward)

    def __call__(self, *tensors: Tensor, **kwargs: Any) -> Any:
        if self._passes_cache_flag:
            kwargs["use_cache"] = False  # A cache would keep keys and values of every layer.
        if self._unpack is None and kwargs.get("output_router_logits"):
            raise ConfigError(
                "output_router_logits asks for a loss of transformers that is left out here; leave it "
                "out, and give each layer a loss of its own by zorselike.add_loss"
            )
        if len(tensors) != 1:
            raise ConfigError(
                "a causal LM takes its token ids as the one input; give everything else by keyword, such as "
                "attention_mask="
            )
        with self._entering(tensors[0]) as (ids, embeddings):
            try:
                output = self._inner(*ids, **embeddings, **kwargs)
            except _Reached as reached:
                if reached.name == self._exit:
                    return reached.hidden
                output = None
        if self._exit is not None:
            raise ConfigError(f"a forward left out '{self._exit}'; {_LAYER_DROP}")
        return logits_of(output) if self._unpack is None else self._unpack(output)

    @contextmanager
    def _entering(self, tensor: Tensor) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
        """Inside, the entry is given what entered; gives what the model itself is run with: token ids, or
        embeddings."""
        if self._entry is None:
            yield (tensor,), {}
            return
        num_calls = 0

        def give(_: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return with_hidden_states(args, kwargs, tensor)

        like = tensor.new_empty(0)  # Of `tensor` itself nothing may outlive the forward.
        for module in self._earlier:
            module.like = like
        # The first of its hooks: FSDP2 must see what really enters.
        entry = self._module.get_submodule(self._entry)
        hook = entry.register_forward_pre_hook(give, prepend=True, with_kwargs=True)
        try:
            zeros = like.new_zeros(()).expand(*tensor.shape[:-1], self._embedding_width)
            yield (), {"inputs_embeds": zeros}
        finally:
            hook.remove()
        if num_calls != 1:
            raise ConfigError(f"a forward ran '{self._entry}' {count(num_calls, 'time')}; {_LAYER_DROP}")


_LAYER_DROP = "every module must run once for every microbatch: turn off layer dropout (config.layerdrop = 0)"


def logits_of(output: Any) -> Any:
    """Of what a model returns, if they are all that is needed of it; else what it returned."""
    if isinstance(output, tuple) and len(output) == 1:  # With return_dict=False.
        return output[0]
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and getattr(output, "loss", None) is None else output
