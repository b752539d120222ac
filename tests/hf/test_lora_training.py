"""Adapters train over unequal ranks as `peft` trains them alone, come out as `peft` saves them, and go on
from their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_families
import pytest
import torch
import torch.distributed as dist
import volume
from hf_families import make_model, names_of, tokens
from ranks import RunRanks
from safetensors.torch import load_file, save_file
from tiny import adamw
from torch import Tensor

import zorselike.hf
from zorselike.checkpoint.adapters import export_adapters, export_merged
from zorselike.checkpoint.diff import diff
from zorselike.checkpoint.export import export
from zorselike.checkpoint.read import read_manifest
from zorselike.errors import CheckpointError
from zorselike.hf import Lora
from zorselike.plan.plan import Group, Microbatch, Ministage, Plan
from zorselike.runtime.loss import token_cross_entropy
from zorselike.runtime.pipeline import HeteroPipeline

pytestmark = pytest.mark.pooled

peft = pytest.importorskip("peft")
transformers = hf_families.transformers

ROWS = 7
NUM_STEPS = 2
LORA = Lora(rank=3, alpha=4.0)


def make_plan(names: Sequence[str], zero: int) -> Plan:
    """Three ranks with 2, 1 and 1 microbatches, and one that offloads; the first ministage has no adapter."""
    microbatches = tuple(Microbatch(*m) for m in ((0, 0, 2), (2, 2, 3), (0, 3, 4), (1, 4, 7)))
    group = Group((2, 0, 1), microbatches, zero=zero, recompute="layer")
    other = Group((3,), (Microbatch(3, 0, 3), Microbatch(3, 3, 7)), offload=("params", "optimizer"))
    first = names.index(next(name for name in names if name.endswith(".0")))
    cuts = (names[:first], names[first : first + 2], names[first + 2 : first + 4], names[first + 4 :])
    return Plan(ROWS, (group, other), tuple(Ministage(i % 2, tuple(own)) for i, own in enumerate(cuts)))


def other_plan(names: Sequence[str]) -> Plan:
    groups = (Group((1,), (Microbatch(1, 0, 7),)), Group((0,), (Microbatch(0, 0, 7),), zero=3))
    return Plan(ROWS, groups, (Ministage(0, tuple(names[:3])), Ministage(1, tuple(names[3:]))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    return tokens(ROWS, seed=step), tokens(ROWS, seed=10 + step)


def save(rank: int, world_size: int, family: str, folder: Path, dtype: torch.dtype = torch.float64) -> None:
    make_model(family).to(dtype).save_pretrained(folder, max_shard_size="20KB")


def make_folder(run_ranks: RunRanks, family: str, folder: Path, dtype: torch.dtype = torch.float64) -> Path:
    run_ranks(save, 1, family, folder, dtype)
    names_of(folder, LORA)  # Asked before ranks are forked, which then find shapes and rules of names warm.
    return folder


def open_pipeline(
    folder: Path, plan: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> HeteroPipeline:
    options = {"lora": LORA, "optimizer": adamw, "dtype": dtype, **options}
    return zorselike.hf.pipeline(folder, plan(names_of(folder, LORA)), **options)


def count_gathers(patch: pytest.MonkeyPatch, run: Any) -> int:
    count = 0
    # Before torch 2.13 the latter.
    name = next(n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n))
    original = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    patch.setattr(dist, name, counted)
    run()
    return count


def adapters_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if "lora_" in name}


def train_planned(rank: int, world_size: int, folder: Path, zero: int) -> Any:
    """Adapters as they begin, losses, adapters as they end."""
    with open_pipeline(folder, lambda names: make_plan(names, zero)) as pipe:
        first = pipe.full_state_dict()
        losses = [pipe.step_global(*batch(step)).loss for step in range(NUM_STEPS)]
        last = pipe.full_state_dict()
    frozen = [name for name in first if "lora_" not in name]
    assert all(torch.equal(first[name], last[name]) for name in frozen)
    return adapters_of(first), losses, adapters_of(last)


def train_alone(rank: int, world_size: int, folder: Path, first: dict[str, Tensor]) -> Any:
    """Losses and adapters of `peft`, which begins with `first`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).double()
    prefix = "base_model.model."
    missing = model.load_state_dict({f"{prefix}{n}": t for n, t in first.items()}, strict=False)
    assert not missing.unexpected_keys and not adapters_of(dict.fromkeys(missing.missing_keys))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(first)
    optimizer, losses = adamw(trained), []
    for step in range(NUM_STEPS):
        inputs, targets = batch(step)
        loss = token_cross_entropy(model(inputs, use_cache=False).logits, targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name.removeprefix(prefix): t.detach().clone() for name, t in model.state_dict().items()}
    return losses, adapters_of(state)


@volume.parametrize("family, zero", [("llama, tied", 0), ("llama", 2), ("gpt2", 3)])
def test_adapters_train_as_peft_trains_them_alone(
    family: str, zero: int, tmp_path: Path, run_ranks: RunRanks
) -> None:
    make_folder(run_ranks, family, tmp_path)
    first, losses, found = run_ranks(train_planned, 4, tmp_path, zero)[0]
    ((expected, adapters),) = run_ranks(train_alone, 1, tmp_path, first)
    for name, tensor in first.items():
        bound = 1 / tensor.shape[1] ** 0.5 if "lora_A" in name else 0.0
        assert tensor.abs().max() <= bound and (not bound or tensor.std() > bound / 4)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert found.keys() == adapters.keys()
    assert all((found[name] - tensor).abs().max() <= 1e-10 for name, tensor in adapters.items())
    assert all(not torch.equal(tensor, first[name]) for name, tensor in found.items())


# -- memory ------------------------------------------------------------------------------------


def even_plan(names: Sequence[str]) -> Plan:
    group = Group((0, 1), (Microbatch(0, 0, 4), Microbatch(1, 4, 7)), zero=2)
    cuts = (names[:1], names[1:4], names[4:])
    return Plan(ROWS, (group,), tuple(Ministage(0, tuple(own)) for own in cuts))


def measure(rank: int, world_size: int, folder: Path, param_dtype: torch.dtype | None) -> Any:
    """By ministage: what this rank holds, and the bytes of moments; a loss; the gathers of a step."""
    options = {"dtype": torch.float32, "param_dtype": param_dtype}
    with pytest.MonkeyPatch.context() as patch, open_pipeline(folder, even_plan, **options) as pipe:
        loss = pipe.step_global(*batch(0)).loss
        gathers = count_gathers(patch, lambda: pipe.step_global(*batch(1)))
        found = {}
        for i, ministage in pipe._assembly.ministages.items():
            shards = {n: p.to_local() for n, p in ministage.sharded.items()}  # type: ignore[attr-defined]
            assert all("lora_" in n or t.dtype == torch.bfloat16 for n, t in shards.items())
            trained = sum(t.numel() for n, t in shards.items() if "lora_" in n)
            found[i] = (ministage.sizes, ministage.state.moment_bytes, trained)
        return found, loss, gathers


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_only_adapters_have_gradients_and_optimizer_state(
    param_dtype: torch.dtype | None, tmp_path: Path, run_ranks: RunRanks
) -> None:
    """Also where weights in bf16 and adapters in fp32 are gathered together: one gather a layer."""
    make_folder(run_ranks, "llama", tmp_path, torch.bfloat16)
    for found, _, gathers in run_ranks(measure, 2, tmp_path, param_dtype):
        sizes = [own for own, _, _ in found.values()]
        layers, others = hf_families.NUM_LAYERS, 2  # Norm and head.
        # Of the last ministage, where a microbatch goes back at once, one.
        assert gathers == 1 + 2 * 3 + (layers - 3 + others)
        width = 2 if param_dtype else 4
        for own, moments, trained in found.values():
            assert own.gradient_shard_bytes == 4 * trained
            assert moments == 8 * trained
            assert own.state_bytes == (4 * trained if param_dtype else 0)  # fp32 masters
        assert sizes[0].gradient_bytes == sizes[0].gradient_shard_bytes == 0 < sizes[0].gathered_bytes
        per_layer = LORA.rank * (
            16 * 4 + 16 * 2 + 8 * 2 + 16 * 3 + 24 * 3
        )  # Inputs and outputs of 7 products.
        assert sizes[1].gradient_bytes == 4 * 3 * per_layer
        whole = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 3 + 2 * 16) + width * per_layer
        assert sizes[1].gathered_bytes == 3 * whole


# -- checkpoints -------------------------------------------------------------------------------


def train_in_parts(rank: int, world_size: int, folder: Path, steps: Path) -> Any:
    """Losses of the last two of three steps and adapters after them, with a checkpoint after the first."""
    with open_pipeline(folder, lambda names: make_plan(names, 3)) as pipe:
        pipe.step_global(*batch(0))
        pipe.save(steps / "a")
        unbroken = [pipe.step_global(*batch(step)).loss for step in (1, 2)]
        pipe.save(steps / "unbroken")
        return unbroken, adapters_of(pipe.full_state_dict())


def go_on(rank: int, world_size: int, folder: Path, steps: Path) -> Any:
    """Adapters as they are loaded and saved again, losses, and adapters at the end."""
    with open_pipeline(folder, other_plan) as pipe:
        pipe.load(steps / "a")
        pipe.save(steps / "again")
        first = adapters_of(pipe.full_state_dict())
        losses = [pipe.step_global(*batch(step)).loss for step in (1, 2)]
        return first, losses, adapters_of(pipe.full_state_dict())


def begin_with(rank: int, world_size: int, folder: Path, adapters: Path) -> Any:
    model = zorselike.hf.build_on_meta(folder, lora=LORA)
    with open_pipeline(folder, other_plan) as pipe:
        zorselike.hf.load_adapters(pipe, model, adapters)
        return adapters_of(pipe.full_state_dict())


def refuse_unknown(rank: int, world_size: int, folder: Path, adapters: Path) -> str:
    model = zorselike.hf.build_on_meta(folder, lora=LORA)
    with open_pipeline(folder, other_plan) as pipe, pytest.raises(CheckpointError) as caught:
        zorselike.hf.load_adapters(pipe, model, adapters)
    return str(caught.value)


def save_adapters(rank: int, world_size: int, folder: Path, steps: Path) -> None:
    with open_pipeline(folder, other_plan) as pipe:
        pipe.step_global(*batch(0))
        pipe.save(steps)


def refuse(rank: int, world_size: int, folder: Path, steps: Path, *loras: Lora | None) -> list[str]:
    """What is said with each of these."""
    said = []
    for lora in loras:
        with (
            open_pipeline(folder, other_plan, lora=lora) as pipe,
            pytest.raises(CheckpointError) as caught,
        ):
            pipe.load(steps)
        said.append(str(caught.value))
    return said


def logits_of(rank: int, world_size: int, folder: Path, adapters: Path | None, saved: Path | None) -> Any:
    """Of a folder, perhaps with adapters, which `peft` then saves; and the adapters that it has."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    state = {}
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, adapters)
        state = {name: tensor.clone() for name, tensor in adapters_of(model.state_dict()).items()}
        if saved is not None:
            model.save_pretrained(saved)
    model.eval()
    with torch.no_grad():
        return model(tokens(ROWS), use_cache=False).logits, model.dtype, state


@volume.parametrize("family", ["llama, tied", "gpt2"])
def test_checkpoints_hold_adapters_and_become_folders(
    family: str, tmp_path: Path, run_ranks: RunRanks
) -> None:
    folder, steps = make_folder(run_ranks, family, tmp_path / "model"), tmp_path / "steps"
    unbroken, adapters = run_ranks(train_in_parts, 4, folder, steps)[0]
    first, losses, found = run_ranks(go_on, 2, folder, steps)[0]
    assert losses == pytest.approx(unbroken, rel=1e-12)
    assert all((found[name] - tensor).abs().max() <= 1e-10 for name, tensor in adapters.items())

    (own,), (again,) = ((steps / name).glob("step-*") for name in ("a", "again"))
    manifest = read_manifest(own)
    assert {difference.name for difference in diff(own, again)} <= {"plan"}
    assert set(manifest.tensors) == set(first) and manifest.base is not None

    (last,) = (steps / "unbroken").glob("step-*")
    export_adapters(last, tmp_path / "adapters")
    export_merged(last, tmp_path / "merged")
    begun = run_ranks(begin_with, 2, folder, tmp_path / "adapters")[0]
    assert begun.keys() == adapters.keys()
    assert all(torch.equal(begun[name], tensor) for name, tensor in adapters.items())
    ((expected, dtype, state),) = run_ranks(logits_of, 1, folder, tmp_path / "adapters", tmp_path / "peft")
    prefix = "base_model.model."
    assert state.keys() == {prefix + name for name in adapters}
    assert all(torch.equal(state[prefix + name], tensor) for name, tensor in adapters.items())
    name = "adapter_model.safetensors"
    assert (tmp_path / "adapters" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes()
    configs = [json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("adapters", "peft")]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]
    ((merged, merged_dtype, _),) = run_ranks(logits_of, 1, tmp_path / "merged", None, None)
    assert merged_dtype == dtype == torch.float64
    assert (merged - expected).abs().max() < 1e-5 * expected.abs().max()
    assert sorted(p.name for p in (tmp_path / "merged").iterdir()) == sorted(p.name for p in folder.iterdir())


def test_what_a_model_lacks_is_named_as_in_the_file(tmp_path: Path, run_ranks: RunRanks) -> None:
    folder, adapters = make_folder(run_ranks, "llama", tmp_path / "model"), tmp_path / "adapters"
    run_ranks(save_adapters, 2, folder, tmp_path / "steps")
    (step,) = (tmp_path / "steps").glob("step-*")
    export_adapters(step, adapters)
    file, more = adapters / "adapter_model.safetensors", "base_model.model.lm_head.weight"
    save_file({**load_file(file), more: torch.ones(2, 2)}, file)
    for said in run_ranks(refuse_unknown, 2, folder, adapters):
        assert said.endswith(f"this one has no {more}")


def test_adapters_of_other_weights_are_refused(tmp_path: Path, run_ranks: RunRanks) -> None:
    folder, steps = make_folder(run_ranks, "llama", tmp_path / "model"), tmp_path / "steps"
    run_ranks(save_adapters, 2, folder, steps)
    (step,) = steps.glob("step-*")
    for without, other in run_ranks(refuse, 2, folder, step, None, Lora(rank=3, alpha=5.0)):
        assert "holds adapters, without the model of" in without
        assert "have rank 3 and alpha 4, and these have 3 and 5; set" in other
    with pytest.raises(CheckpointError, match="holds adapters, without the model of"):
        export(step, tmp_path / "whole")
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for (own,) in run_ranks(refuse, 2, folder, step, LORA):
        assert "its adapters were trained beside other weights than" in own
        assert "bring those back, or train into another folder" in own
    with pytest.raises(CheckpointError, match="has other weights than those beside which"):
        export_merged(step, tmp_path / "merged")
