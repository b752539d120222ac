"""What differs between two checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import make_manifest, make_tensors, save, write_files

from zorselike.checkpoint import blocks
from zorselike.checkpoint.diff import Difference, _compare_keys, diff
from zorselike.checkpoint.folder import commit, make_partial
from zorselike.plan.holdings import VALUE

TENSORS = make_tensors()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 50)


def test_other_plans_make_no_difference(tmp_path: Path) -> None:
    a = save(tmp_path / "a", 7, TENSORS, seed=1)
    b = save(tmp_path / "b", 7, TENSORS, seed=2, columns=True)
    done: list[int] = []
    assert diff(a, b, progress=done.append) == []
    assert sum(done) == sum(array.nbytes for array in TENSORS.values())


def test_values_shapes_dtypes_and_names_are_compared(tmp_path: Path) -> None:
    changed = {key: array.copy() for key, array in TENSORS.items()}
    changed["a.w", VALUE][0, 0] += 0.5
    changed["a.w", VALUE][6, 2] += 0.25  # In another block.
    changed["a.b", "exp_avg"][3] = np.nan
    changed["scale", VALUE] = changed["scale", VALUE].astype(np.float64)
    changed["emb", VALUE] = changed["emb", VALUE][:5]
    del changed["frozen", VALUE]
    same_nan = changed["a.b", VALUE]
    same_nan[1] = np.nan
    before = TENSORS | {("a.b", VALUE): same_nan}
    a, b = save(tmp_path / "a", 7, before), save(tmp_path / "b", 8, changed)
    found = {difference.name: difference for difference in diff(a, b)}
    assert found.pop("step").what == "7 and 8" and found.pop("rows_seen").what == "56 and 64"
    assert found.pop("a.w").what == "2 of 35 elements, by up to 0.5"
    assert found.pop("exp_avg.a.b").what == "1 of 7 elements, by up to nan"
    assert found == {
        "scale": Difference("scale", "dtype F32 and F64"),
        "emb": Difference("emb", "shape (11, 3, 2) and (5, 3, 2)"),
        "frozen": Difference("frozen", f"only in {a}"),
    }


def test_options_are_compared_by_key(tmp_path: Path) -> None:
    a = save(tmp_path / "a", 7, TENSORS)
    partial = make_partial(tmp_path / "b", 7)
    manifest = make_manifest(7, write_files(partial, TENSORS), TENSORS)
    optimizer = {"class": "AdamW", "options": [{"lr": 2e-5, "betas": [0.9, 0.95]}], "of": {"a.w": 0}}
    b = commit(partial, replace(manifest, optimizer=optimizer, loss_scale=None, plan="x", versions={}))
    assert [difference.name for difference in diff(a, b)] == ["optimizer.options", "loss_scale", "plan"]
    (alone,) = _compare_keys("optimizer", None, optimizer)
    assert str(alone.what) == "only in the second"
