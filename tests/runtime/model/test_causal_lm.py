"""Causal LMs of `transformers` are cut between their layers, by what their own forward does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hf_families
import pytest
import torch
import torch.distributed as dist
import volume
from chain import grads_of, plan_over, run_chain, trace, train_chain
from hf_families import (
    FAMILIES,
    LENGTH,
    PADS_LEFT,
    VOCABULARY,
    documents,
    exact_norms,
    family_names,
    make_model,
    masks,
    tokens,
)
from ranks import RunRanks
from tiny import adamw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zorselike import HeteroPipeline, initialize, list_modules
from zorselike.models.registry import build_model
from zorselike.plan import ConfigError, PlanError
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.profiler.workload.module_workload import measure_workload
from zorselike.runtime.model.decoder_cut import CannotCut, cut_causal_lm
from zorselike.runtime.model.export import Exporter
from zorselike.runtime.model.part import ModelPart
from zorselike.runtime.model.partition import partition

pytestmark = pytest.mark.pooled

ROWS = 3
transformers = hf_families.transformers


def cut(model: nn.Module, *cuts: int) -> tuple[list[ModelPart], Plan]:
    names = list_modules(model)
    plan = plan_over(*(names[a:b] for a, b in pairwise([0, *cuts, len(names)])))
    return partition(model, plan), plan


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "around"),
    [
        ("llama", ["model.embed_tokens", "model.norm", "lm_head"]),
        ("gpt2", ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"]),
        (
            "opt",  # It registers its last norm first, and its projections in the other order.
            ["embed_tokens", "embed_positions", "project_in", "final_layer_norm", "project_out"],
        ),
    ],
)
def test_modules_are_listed_as_they_run(family: str, around: list[str]) -> None:
    with torch.device("meta"):
        model = make_model(family)
    names = list_modules(model)
    if family == "opt":
        around = [*(f"model.decoder.{name}" for name in around), "lm_head"]
    assert family_names(names) == around
    assert len(names) == len(around) + hf_families.NUM_LAYERS
    workload = measure_workload(model, tokens(2), dtype="float32", kwargs={"use_cache": False})
    assert tuple(name for name, _ in workload.layers) == names


def test_a_model_without_decoder_layers_has_no_list() -> None:
    config = transformers.T5Config(vocab_size=19, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    with pytest.raises(ConfigError, match=r"'encoder.block' and 'decoder.block' of T5Block found where one"):
        list_modules(transformers.T5ForConditionalGeneration(config))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8,), "conv_kernel": (2,), "conv_stride": (2,)}
    config = transformers.HubertConfig(**sizes, **convolutions, num_conv_pos_embedding_groups=2)
    with torch.device("meta"), pytest.raises(ConfigError, match="it has no embeddings of token ids"):
        list_modules(transformers.HubertForSequenceClassification(config))
    for model in (nn.Sequential(nn.Linear(2, 2)), build_model("llama", "debug")):
        with pytest.raises(ConfigError, match=f"model: {type(model).__name__} is not made of decoder layers"):
            list_modules(model)


# -- exactness -----------------------------------------------------------------------------


def compare_with_whole(rank: int, world_size: int, family: str) -> list[str]:
    """What differs, for every way to cut that there is to tell apart."""
    with exact_norms(family):
        return [text for kwargs in arguments_of(family) for text in differences(family, kwargs)]


def arguments_of(family: str) -> list[dict[str, Tensor]]:
    mask = {"attention_mask": masks(ROWS, left=family in PADS_LEFT)}
    return [{}, mask, {"position_ids": documents(ROWS)}, {**mask, "position_ids": documents(ROWS)}]


def differences(family: str, kwargs: dict[str, Tensor]) -> list[str]:
    model = make_model(family)
    names = list_modules(model)
    first = next(i for i, name in enumerate(names) if name.endswith(".0"))
    inputs, found = tokens(ROWS), []

    def loss_fn(logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), tokens(ROWS).roll(-1, 1).flatten(), reduction="sum")

    output = model(inputs, use_cache=False, **kwargs).logits
    loss_fn(output).backward()
    expected = grads_of(model)
    for cuts in ([], range(first, len(names))):
        parts, plan = cut(model, *cuts)
        if not torch.equal(run_chain(parts, inputs, **kwargs), output):
            found.append(f"logits with cuts {[*cuts]} and {[*kwargs]}")
        model.zero_grad()
        train_chain(parts, trace(parts, plan, inputs, **kwargs), loss_fn, inputs, **kwargs)
        for name, grad in grads_of(model).items():
            reference = expected[name]
            if grad is None or reference is None or not torch.allclose(grad, reference, rtol=0, atol=1e-12):
                found.append(f"gradient of {name} with cuts {[*cuts]} and {[*kwargs]}")
    return found


@volume.parametrize("family", list(FAMILIES), least=1)
def test_a_cut_before_every_module_changes_nothing(family: str, run_ranks: RunRanks) -> None:
    assert run_ranks(compare_with_whole, 1, family) == [[]]


_BART = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
ODD: dict[str, dict[str, Any]] = {
    # It looks up positions with the embeddings at hand where it is given no token ids.
    "whisper": {**_BART, "max_target_positions": 32, "is_decoder": True},
    # Its layers return lists.
    "openai-gpt": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    # What it says must not be split are parts of layers.
    "roberta-prelayernorm": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "is_decoder": True,
    },
}


@pytest.mark.parametrize("family", list(ODD))
def test_odd_families_are_cut_between_their_layers(family: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, pad_token_id=0, **ODD[family])
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    parts, plan = cut(model, *range(next(i for i, n in enumerate(list_modules(model)) if ".0" in n), 5))
    assert not isinstance(parts[0].skeleton, Exporter)
    inputs = tokens(ROWS)
    trace(parts, plan, inputs)
    assert torch.equal(run_chain(parts, inputs), model(inputs).logits)


def test_packed_documents_do_not_see_each_other() -> None:
    model = make_model("llama")
    parts, _ = cut(model, 3)
    packed = tokens(1)
    together = run_chain(parts, packed, position_ids=documents(1))
    apart = [run_chain(parts, packed[:, :4]), run_chain(parts, packed[:, 4:])]
    assert torch.allclose(together, torch.cat(apart, dim=1), rtol=0, atol=1e-12)


def test_a_model_that_returns_a_tuple_gives_its_logits_too() -> None:
    """`return_dict=False` ended in the loss, to which a tuple was given."""
    parts, _ = cut(make_model("llama"), 3)
    logits = run_chain(parts, tokens(1))
    assert torch.equal(run_chain(parts, tokens(1), return_dict=False), logits)


def test_layers_may_be_asked_before_they_are_called() -> None:
    """As those of ModernBERT are for the kind of their attention."""
    settings = {**FAMILIES["mistral"], "sliding_window": 4, "global_attn_every_n_layers": 3}
    config = transformers.ModernBertConfig(**{k: v for k, v in settings.items() if k != "model_type"})
    model = transformers.ModernBertForMaskedLM(config).double()
    parts, _ = cut(model, 2, 4)
    assert torch.equal(run_chain(parts, tokens(ROWS)), model(tokens(ROWS)).logits)


def test_only_what_the_head_is_asked_for_crosses_to_it() -> None:
    model = make_model("llama")
    parts, plan = cut(model, 3, len(list_modules(model)) - 1)
    found = trace(parts, plan, tokens(ROWS), logits_to_keep=2)
    assert [str(spec) for b in found.boundaries for spec in b.tensors] == [
        f"int64 [rows, {LENGTH}]",
        f"float64 [rows, {LENGTH}, 16]",
        "float64 [rows, 2, 16]",
        f"float64 [rows, 2, {VOCABULARY}]",
    ]
    expected = model(tokens(ROWS), logits_to_keep=2).logits
    assert torch.equal(run_chain(parts, tokens(ROWS), logits_to_keep=2), expected)


# -- as fine as our own models -------------------------------------------------------------


def test_attention_is_causal_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, _ = cut(make_model("llama"), 1, 3, 6)
    called = watch_attention(monkeypatch)
    run_chain(parts, tokens(ROWS))
    assert called == [(True, True)] * hf_families.NUM_LAYERS
    called.clear()
    run_chain(parts, tokens(ROWS), attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.int64))
    assert called == [(True, True)] * hf_families.NUM_LAYERS  # Nothing is masked.
    called.clear()
    run_chain(parts, tokens(ROWS), attention_mask=masks(ROWS, left=True))
    assert called == [(False, False)] * hf_families.NUM_LAYERS


def watch_attention(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of every call of the kernel: whether there is no mask, and whether it is told to be causal."""
    original = torch.nn.functional.scaled_dot_product_attention
    called = []

    def watched(
        *args: Any, attn_mask: Tensor | None = None, is_causal: bool = False, **kwargs: Any
    ) -> Tensor:
        called.append((attn_mask is None, is_causal))
        return original(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    return called


def count_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """All-gathers and attentions of a step, without and with recomputation of layers."""
    counts = []
    for recompute in ("none", "layer"):
        model = make_model("llama")
        names = list_modules(model)
        group = Group((0, 1), (Microbatch(0, 0, 2), Microbatch(1, 2, 3)), zero=3, recompute=recompute)  # type: ignore[arg-type]
        plan = Plan(3, (group,), (Ministage(0, names[:3]), Ministage(0, names[3:])))
        gathers = attentions = 0
        with pytest.MonkeyPatch.context() as patch, HeteroPipeline(model, plan, optimizer=adamw) as pipe:
            pipe.step_global(tokens(3), tokens(3))
            called = watch_attention(patch)
            gathers = count_gathers(patch, lambda: pipe.step_global(tokens(3), tokens(3)))
            attentions = len(called)
        counts.append((gathers, attentions))
    return counts


def count_gathers(patch: pytest.MonkeyPatch, run: Any) -> int:
    counts = dict.fromkeys(
        ("all_gather_single", "all_gather_into_tensor"), 0
    )  # Before torch 2.13 the latter.
    for name in counts:
        if (original := getattr(dist, name, None)) is None:
            continue

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        patch.setattr(dist, name, counted)
    run()
    return max(counts.values())


def test_zero_3_gathers_and_recomputes_layer_by_layer(run_ranks: RunRanks) -> None:
    units, layers = hf_families.NUM_LAYERS + 3, hf_families.NUM_LAYERS
    for counts in run_ranks(count_steps, 2):
        assert counts == [(2 * units, layers), (2 * units, 2 * layers)]


def test_every_module_of_the_plan_is_a_unit() -> None:
    parts, plan = cut(make_model("gpt2"), 3, 6)
    assert [part.units for part in parts[1:]] == [m.modules for m in plan.ministages[1:]]
    assert parts[0].units == ("transformer.wte", "transformer.wpe", "transformer.h.0")
    (alone,), _ = cut(make_model("llama"))
    assert alone.units == list_modules(make_model("llama"))
    held = [name for part in parts for name, _ in part.module.named_parameters()]
    assert sorted(held) == sorted(n for n, _ in make_model("gpt2").named_parameters(remove_duplicate=False))


# -- dropout, initialization ---------------------------------------------------------------


def train_on_meta(rank: int, world_size: int) -> tuple[float, float]:
    """The loss of a first step, and the same of a model that is initialized as a whole."""
    with torch.device("meta"):
        model = make_model("llama")
    names = list_modules(model)
    groups = (Group((0,), (Microbatch(0, 0, 3),)), Group((1,), (Microbatch(1, 0, 3),)))
    plan = Plan(3, groups, (Ministage(0, names[:3]), Ministage(1, names[3:])))
    with HeteroPipeline(model, plan, optimizer=adamw, seed=5) as pipe:
        found = pipe.evaluate_global(tokens(3), tokens(3)).loss
    with torch.device("meta"):
        whole = make_model("llama")
    logits = initialize(whole, seed=5)(tokens(3)).logits
    return found, float(cross_entropy(logits.flatten(0, 1), tokens(3).flatten()))


def test_a_model_on_meta_is_initialized_module_by_module(run_ranks: RunRanks) -> None:
    for found, expected in run_ranks(train_on_meta, 2):
        assert found == pytest.approx(expected, rel=1e-12)


def train_with_dropout(rank: int, world_size: int) -> list[list[float]]:
    """Losses of two steps, by plan."""
    losses = []
    for cuts in ((2, 4), (3, 7)):
        model = make_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
        names = list_modules(model)
        group = Group((0,), (Microbatch(0, 0, 2), Microbatch(0, 2, 3)), recompute="layer")
        bounds = pairwise([0, *cuts, len(names)])
        plan = Plan(3, (group,), tuple(Ministage(0, names[a:b]) for a, b in bounds))
        with HeteroPipeline(model, plan, optimizer=adamw) as pipe:
            losses.append([pipe.step_global(tokens(3), tokens(3)).loss for _ in range(2)])
    return losses


def test_dropout_does_not_depend_on_the_cuts(run_ranks: RunRanks) -> None:
    ((first, second),) = run_ranks(train_with_dropout, 1)
    assert first == pytest.approx(second, rel=1e-12)


# -- refusals ------------------------------------------------------------------------------


def test_wrong_plans_are_refused_with_the_right_names() -> None:
    model = make_model("opt")
    names = list_modules(model)
    all_names = r"model\.decoder\.layers\.0 \.\. model\.decoder\.layers\.4, model\.decoder\.final_layer_norm"
    with pytest.raises(PlanError, match=rf"has no module 'layers\.0'.* this model has .*{all_names}"):
        partition(model, plan_over(["layers.0"], ["lm_head"]))
    with pytest.raises(PlanError, match=rf"no ministage has module 'lm_head'.* this model has .*{all_names}"):
        partition(model, plan_over(names[:4], names[4:-1]))
    as_registered = [n for n in names if "norm" not in n]
    as_registered.insert(3, "model.decoder.final_layer_norm")
    with pytest.raises(PlanError, match=rf"is in ministage 0, before what it follows; .*{all_names}"):
        partition(model, plan_over(as_registered[:5], as_registered[5:]))
    with pytest.raises(PlanError, match=r"put model.decoder.embed_tokens, .* into one ministage"):
        partition(model, plan_over(names[:1], names[1:]))


def test_what_would_be_computed_twice_or_in_part_is_refused() -> None:
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match=r'gradient_checkpointing_disable\(\) and set recompute = "layer"'):
        cut(model, 3)
    parts, plan = cut(make_model("mixtral"), 3)
    with pytest.raises(ConfigError, match=r"leave it out, and set model.config.output_router_logits = False"):
        trace(parts, plan, tokens(ROWS), output_router_logits=True)
    with pytest.raises(ConfigError, match=r"and set model.config.output_hidden_states = False"):
        trace(*cut(make_model("llama", output_hidden_states=True), 3), tokens(ROWS))
    with pytest.raises(
        ConfigError, match="takes its token ids as the one input; give everything else by key"
    ):
        trace(parts, plan, tokens(ROWS), masks(ROWS, left=False))
    with pytest.raises(ConfigError, match="a loss computed inside the model"):
        trace(parts, plan, tokens(ROWS), labels=tokens(ROWS))


def test_rotations_that_grow_with_rows_are_cut() -> None:
    """On fake tensors nothing says how long rows are, and such a model was said to have no decoder layers."""
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = make_model("llama", rope_parameters=rotary, max_position_embeddings=LENGTH - 2)
    expected = model(tokens(ROWS), use_cache=False).logits
    plain = make_model("llama")(tokens(ROWS), use_cache=False).logits
    parts, plan = cut(model, 3)
    assert trace(parts, plan, tokens(ROWS)).boundaries
    found = run_chain(parts, tokens(ROWS))
    assert torch.equal(found, expected) and not torch.allclose(found, plain)
    assert len(measure_workload(model, tokens(2), dtype="float32", kwargs={"use_cache": False}).layers) == 8


class Adds(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Something made of the token ids is added to what the last layer gives."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        assert kwargs["use_cache"] is False
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + self.model.embed_tokens(input_ids).sum()
        return output


def test_a_model_that_cannot_be_cut_gives_its_logits_too() -> None:
    """A plan of one ministage was told to pass `unpack`, for which a recipe has no key."""
    model = Adds(transformers.LlamaConfig(**{**FAMILIES["llama"], "tie_word_embeddings": False})).double()
    plan = plan_over(list_modules(make_model("llama")))
    (part,) = partition(model, plan)
    trace([part], plan, tokens(ROWS))
    assert torch.equal(run_chain([part], tokens(ROWS)), model(tokens(ROWS), use_cache=False).logits)


@pytest.mark.parametrize("cuts", [(), (3,)])
def test_what_a_model_would_add_to_its_loss_is_refused(cuts: tuple[int, ...]) -> None:
    """A single ministage left the router's loss out and said nothing."""
    named = (
        r"config.output_router_logits = True adds to the loss .* set model.config.output_router_logits = F"
    )
    with pytest.raises(ConfigError, match=named):
        cut(make_model("mixtral", output_router_logits=True), *cuts)
    model = make_model("llama")
    model.config.z_loss_coefficient = 0.1  # Of Bamba.
    with pytest.raises(ConfigError, match=r"config.z_loss_coefficient = 0.1 adds .* = 0.0, in a folder in"):
        cut(model, *cuts)


def test_a_loss_of_routers_that_a_step_asks_for_is_refused() -> None:
    """A single ministage left it out and said nothing."""
    parts, plan = cut(make_model("mixtral"))
    with pytest.raises(ConfigError, match=r"output_router_logits asks for a loss .*; leave it out, and"):
        trace(parts, plan, tokens(ROWS), output_router_logits=True)
    assert trace(parts, plan, tokens(ROWS), output_router_logits=False).boundaries


def test_splits_convention_is_not_theirs() -> None:
    names = list_modules(make_model("llama"))
    with pytest.raises(ConfigError, match="leave split out: a causal LM of transformers is cut between its"):
        partition(make_model("llama"), plan_over(names[:3], names[3:]), split="decoder")


def test_dropped_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"config.layerdrop = 0.1 leaves out layers at random"):
        cut(make_model("opt", layerdrop=0.1), 4)
    bart = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "encoder_layers": 1}
    config = transformers.BartConfig(vocab_size=VOCABULARY, is_decoder=True, decoder_layerdrop=0.1, **bart)
    with torch.device("meta"):
        model = transformers.BartForCausalLM(config)
    with pytest.raises(ConfigError, match=r"config.decoder_layerdrop = 0.1 leaves out layers at random"):
        partition(model, plan_over(["model.decoder", "lm_head"]))
    parts, _ = cut(make_model("opt"), 4)
    for part in parts:
        part.module.get_submodule("model.decoder").layerdrop = 1.0
    with pytest.raises(ConfigError, match=r"left out 'model.decoder.layers.1'; .* \(config.layerdrop = 0\)"):
        run_chain(parts[:1], tokens(ROWS))
    with pytest.raises(ConfigError, match=r"ran 'model.decoder.layers.1' 0 times"):
        parts[1].module(torch.zeros(ROWS, LENGTH, 16, dtype=torch.float64))


class Skips(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Adds the embeddings to what the head reads."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        output = self.model(input_ids, **kwargs)
        embedded = self.model.embed_tokens(input_ids) if input_ids is not None else kwargs["inputs_embeds"]
        return transformers.modeling_outputs.CausalLMOutput(
            logits=self.lm_head(output.last_hidden_state + embedded)
        )


class Scales(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """What the head reads is multiplied by something made of the token ids."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        inputs = input_ids if input_ids is not None else kwargs["inputs_embeds"][..., 0]
        factors = (inputs != 3).sum(-1, keepdim=True)[..., None]
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state * factors)
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


class ScalesInPlace(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """As CTRL does with embeddings that it is given, or has made."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids) if input_ids is not None else kwargs["inputs_embeds"]
        embedded *= 4
        return super().forward(**{**kwargs, "inputs_embeds": embedded})


@pytest.mark.parametrize("kind", [Skips, Scales, ScalesInPlace])
def test_what_needs_more_than_hidden_states_is_exported(kind: type[nn.Module]) -> None:
    model = kind(transformers.LlamaConfig(**{**FAMILIES["llama"], "tie_word_embeddings": False})).double()
    names = [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(hf_families.NUM_LAYERS)),
        "model.norm",
        "lm_head",
    ]
    plan = plan_over(names[:3], names[3:])
    with pytest.raises(CannotCut, match=r"cannot be cut before 'model.layers.2': "):
        cut_causal_lm(model, plan, None)
    parts = partition(model, plan)
    assert isinstance(parts[0].skeleton, Exporter)
    assert "is cut by torch.export (it cannot be cut before 'model.layers.2'" in parts[0].skeleton.note
    (alone,) = partition(model, plan_over(names))
    assert alone.units == tuple(names)
