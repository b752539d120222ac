"""What crosses boundaries, what may not, and what a loss must be."""

from __future__ import annotations

import logging
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any

import pytest
import torch
from chain import plan_over, run_chain, trace
from tiny import DIM, SEQUENCE, VOCABULARY, Decoder, Layer, module_names
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zorselike.plan import ConfigError
from zorselike.runtime._compat import FAKE_TENSOR_LOG
from zorselike.runtime.loss import check_additive, count_valid_tokens, token_cross_entropy
from zorselike.runtime.model.boundaries import check_kwargs, trainable_ministages
from zorselike.runtime.model.partition import partition
from zorselike.runtime.model.signature import (
    Broadcast,
    KwargTensor,
    Signature,
    TensorSpec,
    describe_kwargs,
)
from zorselike.runtime.model.tracing import Recorder, fake_copies, make_fake_mode

TOKENS = torch.zeros(3, SEQUENCE, dtype=torch.int64)
NAMES = module_names(2)
PLAN = plan_over(NAMES[:2], NAMES[2:3], NAMES[3:])


# -- signatures and keyword arguments ------------------------------------------------------


def test_a_signature_survives_its_way_to_other_ranks() -> None:
    signature = Signature.of((torch.zeros(3, 4, 5, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bool)))
    assert signature.tensors == (TensorSpec((4, 5), torch.bfloat16), TensorSpec((), torch.bool))
    assert pickle.loads(pickle.dumps(signature)) == signature
    assert str(signature) == "bfloat16 [rows, 4, 5] and bool [rows]"
    assert Signature.of(torch.zeros(7, 4)) == Signature.of((torch.zeros(2, 4),))
    with pytest.raises(ConfigError, match="tensor 0 has no dimensions"):
        Signature.of(torch.tensor(1))


def test_keyword_arguments_by_row_and_whole() -> None:
    tables = (torch.zeros(4, 2), [torch.zeros(1)])
    specs = describe_kwargs({"mask": torch.zeros(3, 4), "tables": Broadcast(tables), "flag": True})
    assert specs == {
        "mask": KwargTensor((4,), torch.float32, has_rows=True),
        "tables": (
            KwargTensor((4, 2), torch.float32, has_rows=False),
            [KwargTensor((1,), torch.float32, has_rows=False)],
        ),
        "flag": True,
    }
    assert specs["mask"].shape_at(5) == (5, 4)
    with pytest.raises(ConfigError, match=r"tables= is a tuple of tensors.*Broadcast"):
        describe_kwargs({"tables": tables})
    with pytest.raises(ConfigError, match=r"scale= is a tensor without rows; pass Broadcast\(scale\)"):
        describe_kwargs({"scale": torch.tensor(2.0)})


class WithMask(Decoder):
    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_a_keyword_that_no_forward_names_is_refused() -> None:
    parts = partition(WithMask(2), PLAN)
    check_kwargs(["mask"], parts)
    with pytest.raises(ConfigError, match=r"keyword argument 'msk'; did you mean 'mask'\?; they take mask"):
        trace(parts, PLAN, TOKENS, msk=TOKENS)
    with pytest.raises(ConfigError, match="'mask'; they take none"):
        check_kwargs(["mask"], partition(Decoder(2), PLAN))


# -- what crosses --------------------------------------------------------------------------


def test_shapes_dtypes_and_calls_of_a_decoder() -> None:
    parts = partition(Decoder(2), PLAN)
    found = trace(parts, PLAN, TOKENS)
    hidden = Signature((TensorSpec((SEQUENCE, DIM), torch.float32, requires_grad=True),))
    assert found.boundaries[0] == Signature((TensorSpec((SEQUENCE,), torch.int64),))
    assert found.boundaries[1:3] == (hidden, hidden)
    assert found.boundaries[3].tensors[0].shape_per_row == (SEQUENCE, VOCABULARY)
    assert found.unit_calls == (("tok_embeddings", "layers.0"), ("layers.1",), ("norm", "output"))


def test_nothing_below_the_lowest_trained_ministage_carries_gradients() -> None:
    model = Decoder(2)
    model.tok_embeddings.requires_grad_(False)
    model.layers["0"].requires_grad_(False)
    model.output.requires_grad_(False)
    parts = partition(model, PLAN)
    assert trainable_ministages(parts) == (False, True, True)
    flags = [b.tensors[0].requires_grad for b in trace(parts, PLAN, TOKENS).boundaries]
    assert flags == [False, False, True, True]


def test_layers_compute_in_the_given_dtype() -> None:
    parts = partition(Decoder(2), PLAN)
    found = trace(parts, PLAN, TOKENS, param_dtype=torch.bfloat16)
    assert [b.tensors[0].dtype for b in found.boundaries] == [torch.int64, *[torch.bfloat16] * 3]
    assert next(parts[0].module.parameters()).dtype == torch.float32


class Handing(Layer):
    """Hands on whatever it is made for, in its first half; takes it in its second."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any) -> Any:
        h = super().forward(x[0] if isinstance(x, tuple) else x)
        match self.kind:
            case "mixed":
                return h, h.argmax(-1), h.detach(), h[:, 0, 0] > 0
            case "dict":
                return {"hidden": h}
            case "strings":
                return h, ["a"]
            case "list":
                return [h]
            case "nothing":
                return ()
            case "transposed":
                return h.transpose(0, 1)
            case "flat":
                return h.flatten(0, 1)
            case "pooled":
                return h.mean(0)
            case "scalar":
                return h.sum()
            case "detached":
                return h.detach()
            case "ragged":
                return h.repeat(1, len(h), 1)
            case "in place":
                h = x
                h += 1
                return h
            case "named":
                return Output(logits=h)
            case "loss":
                return Output(loss=h.sum(), logits=h)
            case "data":
                return Logits(h)
            case "pair":
                return h.sum(), h
        return h


class Output(OrderedDict[str, Any]):
    pass


@dataclass
class Logits:
    logits: Tensor
    loss: Tensor | None = None


def handing(first: str = "", last: str = "", **kwargs: Any) -> Any:
    model = nn.Sequential(Handing(first), Handing(last))
    plan = plan_over(["0"], ["1"])
    return trace(partition(model, plan, **kwargs), plan, torch.zeros(3, SEQUENCE, DIM))


def test_a_tuple_of_mixed_dtypes() -> None:
    boundary = handing("mixed").boundaries[1]
    assert boundary.tensors == (
        TensorSpec((SEQUENCE, DIM), torch.float32, requires_grad=True),
        TensorSpec((SEQUENCE,), torch.int64),
        TensorSpec((SEQUENCE, DIM), torch.float32),
        TensorSpec((), torch.bool),
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dict", r"ministage 0 \(0\) returns a dict; only tensors"),
        ("named", r"ministage 0 \(0\) returns an Output"),
        ("data", r"ministage 0 \(0\) returns a Logits"),
        ("list", r"ministage 0 \(0\) returns a list of Tensor"),
        ("strings", r"ministage 0 \(0\) returns a tuple with a list of str at 1"),
        ("nothing", "returns an empty tuple"),
        ("transposed", r"tensor 0 that ministage 0 \(0\) returns is \[4, 2, 8\] for 2 rows"),
        ("flat", r"is \[8, 8\] for 2 rows; dimension 0 must be rows"),
        ("pooled", r"is \[4, 8\] for 2 rows"),
        ("ragged", r"returns float32 \[2, 8, 8\] for 2 rows, but float32 \[3, 12, 8\] for 3"),
        ("detached", "returns nothing that carries a gradient"),
    ],
)
def test_what_may_not_cross(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        handing(kind)


def test_changing_an_input_in_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ministage 1 \(1\): '1' changes its input in place.*x = x \+ y"):
        handing("", "in place")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("named", r"ministage 1 \(1\) returns an Output; pass unpack="),
        ("data", "returns a Logits; pass unpack="),
        ("list", r"returns a list of Tensor; pass unpack=.*lambda out: out\[0\]"),
        ("strings", "returns a tuple of a Tensor and a list of str; pass unpack="),
        ("loss", "returns a loss computed inside the model.*unpack="),
        ("pair", "returns a loss computed inside the model.*unpack="),
        ("scalar", "returns a loss computed inside the model.*unpack="),
        ("flat", r"tensor 0 that ministage 1 \(1\) returns is \[8, 8\].*unpack="),
    ],
)
def test_what_a_model_may_not_return(kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        handing("", kind)


@pytest.mark.parametrize(
    ("kind", "unpack"),
    [
        ("named", lambda out: out["logits"]),
        ("loss", lambda out: out["logits"]),
        ("data", lambda out: out.logits),
        ("flat", lambda out: out.unflatten(0, (-1, SEQUENCE))),
        ("list", tuple),
    ],
)
def test_unpack_makes_tensors_of_it(kind: str, unpack: Any) -> None:
    (spec,) = handing("", kind, unpack=unpack).boundaries[2].tensors
    assert spec == TensorSpec((SEQUENCE, DIM), torch.float32, requires_grad=True)


def test_an_error_in_a_forward_names_ministage_and_shapes() -> None:
    parts = partition(Decoder(2), PLAN, split="decoder")
    with pytest.raises(ConfigError, match=r"the model fails on int64 \[2\]: RuntimeError: .*broadcast"):
        trace(parts, PLAN, torch.zeros(2, dtype=torch.long))
    plan = plan_over(["0"], ["1"])
    with pytest.raises(ConfigError, match=r"ministage 1 \(1\) fails on float32 \[2, 4\]: RuntimeError: "):
        trace(partition(nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6)), plan), plan, torch.zeros(2, 3))


class OnCard(nn.Module):
    """Makes a tensor on a device that it names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x + (x.cuda() if self.how == "moved" else torch.ones(DIM, device="cuda"))


@pytest.mark.parametrize("how", ["moved", "made"])
@pytest.mark.parametrize("split", [None, "export"])
def test_a_forward_that_names_a_device_is_told_the_mend(how: str, split: Any) -> None:
    plan = plan_over(["0"], ["1"])
    with pytest.raises(ConfigError, match=r"\(test_boundaries.py:\d+\); .* as by device=x.device"):
        trace(
            partition(nn.Sequential(OnCard(how), OnCard(how)), plan, split=split), plan, torch.zeros(2, DIM)
        )


# -- copies --------------------------------------------------------------------------------


def test_fake_copies_share_what_their_originals_share() -> None:
    model = Decoder(1, tied=True)
    model.register_buffer("table", torch.ones(2))
    model.plain = torch.ones(3)
    other = nn.Sequential(model.norm)
    copy, other_copy = fake_copies([model, other], make_fake_mode())
    assert isinstance(copy, Decoder)
    assert copy.output.weight is copy.tok_embeddings.weight
    assert other_copy[0] is copy.norm
    assert copy.norm is not model.norm and copy.plain is not model.plain
    assert type(copy.plain) is type(copy.table) is not Tensor
    assert torch.equal(model.plain, torch.ones(3))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Decoder(2)
    model.lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match=r"a copy of Decoder .* cannot be made \(TypeError"):
        partition(model, PLAN)


class Recording:
    """Of a hook: holds a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.shapes = Lock(), list[tuple[int, ...]]()

    def note(self, module: nn.Module, given: Any, output: Tensor) -> None:
        with self.lock:
            self.shapes.append(tuple(output.shape))


@pytest.mark.parametrize("split", ["decoder", "export"])
def test_a_hook_may_hold_what_cannot_be_copied(split: Any) -> None:
    model, recording = Decoder(2), Recording()
    model.layers["1"].register_forward_hook(recording.note)
    parts = partition(model, PLAN, split=split)
    trace(parts, PLAN, TOKENS)
    seen = len(recording.shapes)
    run_chain(parts, TOKENS)
    # What is exported has no hooks, as is said.
    assert len(recording.shapes) - seen == (split == "decoder")
    assert ("hooks that note or print something" in parts[0].skeleton.note) == (split == "export")


# -- losses --------------------------------------------------------------------------------

LOGITS = torch.randn(5, SEQUENCE, VOCABULARY, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(5 * SEQUENCE).reshape(5, SEQUENCE) % VOCABULARY


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


@lru_cache
def make_factors(length: int) -> Tensor:
    return torch.linspace(0.5, 1.5, length)


class Remembers(nn.Module):
    """Keeps tensors that it makes once, in functions of its file and of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    @staticmethod
    @lru_cache(maxsize=2)
    def shifts(width: int) -> Tensor:
        return torch.arange(width) / width

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.embedding(ids) * make_factors(ids.shape[1])[:, None] + self.shifts(DIM))


@pytest.mark.parametrize("cuts", [(), (1,)])
def test_a_function_may_keep_tensors_that_it_has_made(cuts: tuple[int, ...]) -> None:
    model, names = Remembers(), ["embedding", "head"]
    expected = model(TOKENS)
    plan = plan_over(*(names[a:b] for a, b in pairwise([0, *cuts, 2])))
    parts = partition(model, plan)
    trace(parts, plan, TOKENS)
    assert torch.equal(run_chain(parts, TOKENS), expected)
    trace(parts, plan, TOKENS)


def test_sums_over_rows_pass() -> None:
    ignored = TARGETS.masked_fill(TARGETS < 6, -100)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for targets in (TARGETS, ignored, torch.full_like(TARGETS, -100)):
            check_additive(token_cross_entropy, count_valid_tokens, LOGITS.to(dtype), targets)


def test_means_are_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn is not additive.*5 rows.*reduction='sum'"):
        check_additive(mean_loss, count_valid_tokens, LOGITS, TARGETS)
    with pytest.raises(ConfigError, match="count_fn is not additive over rows: 1 for 5 rows, but 1 \\+ 1"):
        check_additive(token_cross_entropy, lambda targets: 1, LOGITS, TARGETS)
    with pytest.raises(ConfigError, match="loss_fn is not additive"):  # one row is taken twice
        check_additive(mean_loss, count_valid_tokens, LOGITS[:1], TARGETS[:1])


def test_nested_outputs_and_targets_are_cut_alike() -> None:
    def loss(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
        return token_cross_entropy(outputs[0], targets["labels"]) + outputs[1].sum()

    check_additive(loss, lambda t: t["labels"].numel(), (LOGITS, LOGITS[:, 0, 0]), {"labels": TARGETS})


def test_a_loss_that_is_not_finite_proves_nothing() -> None:
    check_additive(lambda o, t: o.sum() / 0, count_valid_tokens, LOGITS, TARGETS)
    assert not describe_kwargs({})


def test_keywords_of_a_forward_with_any() -> None:
    class Any_(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 1.0, **rest: Any) -> Tensor:
            return x * scale

    (part,) = partition(nn.Sequential(nn.Linear(2, 2)), plan_over(["0"]))
    assert "input" not in part.accepts
    model = Any_()
    model.inner = nn.Linear(2, 2)
    (part,) = partition(model, plan_over(["inner"]))
    assert list(part.accepts) == ["scale"] and "anything" in part.accepts
    check_kwargs(["anything"], [part])


# -- what is said meanwhile ----------------------------------------------------------------


def test_a_trace_silences_torch_about_what_fails_and_nobody_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAKE_TENSOR_LOG, "propagate", True)
    training = logging.getLogger("zorselike")
    mode = make_fake_mode()
    with mode, pytest.raises(RuntimeError), Recorder({}).recording():
        training.warning("a step of the job that trains meanwhile")
        torch.ones(3, 4) @ torch.ones(3, 4)
    training.warning("the next step")
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["a step of the job that trains meanwhile", "the next step"]
