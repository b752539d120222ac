"""The manifest's text: read back equal, every change of it found, nothing of it believed."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from checkpoint_files import make_manifest, make_tensors, write_files
from hypothesis import given
from hypothesis import strategies as st

from zorselike.checkpoint.manifest import FileRecord, Manifest
from zorselike.checkpoint.read import read_manifest
from zorselike.errors import CheckpointError, FileError
from zorselike.plan.holdings import VALUE


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    tensors = make_tensors()
    return make_manifest(12, write_files(tmp_path_factory.mktemp("root"), tensors), tensors)


def test_it_is_read_back_equal(manifest: Manifest) -> None:
    text = manifest.to_text()
    assert Manifest.from_text(text) == manifest
    assert Manifest.from_text(text).to_text() == text
    bare = replace(manifest, optimizer=None, loss_scale=None, plan=None, extra=MappingProxyType({}))
    assert Manifest.from_text(bare.to_text()) == bare
    assert json.loads(text)["version"] == 1 and text.isascii()


def test_slices_are_found_by_name_and_kind(manifest: Manifest) -> None:
    assert manifest.kinds_of("a.w") == (VALUE, "exp_avg", "exp_avg_sq")
    assert manifest.kinds_of("frozen") == (VALUE,) and manifest.kinds_of("?") == ()
    found = manifest.slices_of("a.w", "exp_avg")
    assert sum(record.box.num_elements for _, record in found) == 35
    assert all(record in file.slices and record.entry == "exp_avg.a.w" for file, record in found)
    assert manifest.slices_of("a.w", "?") == manifest.slices_of("?", VALUE) == ()


def test_files_travel_as_json(manifest: Manifest) -> None:
    for file in manifest.files:
        assert FileRecord.from_table(json.loads(json.dumps(file.to_table()))) == file


def read(text: str, expected: Manifest) -> bool:
    """Whether a text is refused; it must not be another manifest."""
    try:
        assert Manifest.from_text(text) == expected
    except CheckpointError as error:
        assert "\n" not in str(error)
        return True
    return False


def test_every_flipped_bit_is_found(manifest: Manifest, tmp_path: Path) -> None:
    small = replace(manifest, files=manifest.files[:1])
    content = bytearray(small.to_text().encode())
    for i in range(0, len(content), 37):  # The torture tool tries all.
        for bit in range(8):
            content[i] ^= 1 << bit
            (tmp_path / "manifest.json").write_bytes(content)
            with pytest.raises(CheckpointError, match=r"manifest\.json: "):
                read_manifest(tmp_path)
            content[i] ^= 1 << bit


@given(st.data())
def test_no_mutation_is_another_manifest(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_text()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.one_of(st.integers(start, min(start + 8, len(text))), st.just(len(text))))
        pieces = st.sampled_from(
            ["", "{", "[" * 9000, "9" * 5000, "null", "1e999", "\ud800", '"sha256": "",']
        )
        text = text[:start] + data.draw(st.one_of(st.text(max_size=5), pieces)) + text[stop:]
    assert read(text, manifest) or text == manifest.to_text()


@given(st.text(max_size=40))
def test_no_text_is_an_error_of_another_kind(manifest: Manifest, text: str) -> None:
    assert read(text, manifest)


def sign(table: dict[str, Any]) -> str:
    """The text of a manifest that says anything, as if it had been saved."""
    lines = text_of(table)
    return f'{{"format": "zorselike-checkpoint", "version": 1, "sha256": "{digest(lines)}",\n{lines}'


def text_of(table: dict[str, Any]) -> str:
    return json.dumps(table)[1:]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def table_of(manifest: Manifest) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(manifest.to_text())
    return {key: value for key, value in table.items() if key not in ("format", "version", "sha256")}


def at(*path: str | int) -> Callable[[Any, Any], None]:
    def put(table: Any, value: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return put


SLICE = ("files", 0, "slices", 0)


@pytest.mark.parametrize(
    ("put", "value", "said"),
    [
        (at("step"), "1", "step is '1'; it must be an integer"),
        (at("step"), -1, "step is -1; it must be 0 or more"),
        (at("step"), True, "step is True"),
        (at("seed"), None, "seed is None"),
        (at("extra"), None, "extra is None; it must be a table"),
        (at("files"), {}, "files is {}; it must be a list"),
        (at("files", 0), 3, r"files\[0\] is 3; it must be a table"),
        (at("files", 0, "file"), "../x.safetensors", r"files\[0\]\.file is '../x.safetensors', which is no"),
        (at("files", 0, "file"), "/etc/passwd", "which is no file of a checkpoint"),
        (at("files", 0, "file"), "model/../../rank-00000.safetensors", "which is no file"),
        (at("files", 0, "file"), "model/rank-00001.safetensors\n", "which is no file"),
        (at("files", 0, "file"), "model/rank-00001.safetensors", "one is there twice"),
        (at("files", 0, "num_bytes"), 10**9, "are not the file's 1000000000 bytes"),
        (at(*SLICE, "offset"), 7, "begins at byte"),
        (at(*SLICE, "dtype"), "F31", "dtype is 'F31'; it must be one of BOOL"),
        (at(*SLICE, "sums"), [], "0 checksums do not fit"),
        (at(*SLICE, "sums"), [1.5], "a list of integers"),
        (at(*SLICE, "stops"), [99, 99], "is not inside"),
        (at(*SLICE, "starts"), [0], "equally many dimensions"),
        (at(*SLICE, "name"), "other", "is not among the tensors"),
        (at("tensors", "a.w", "shape"), [7, 6], "of shape (7, 5) is not among the tensors"),
        (at("tensors", "a.w", "new"), 1, "tensors.a.w.new is not a key"),
        (at("aliases", "head.w"), "nothing", "aliases.head.w is 'nothing', which is not among"),
        (at("loss_scale", "scale"), "big", "loss_scale.scale is 'big'; it must be a number"),
        (at("versions"), {"torch": 2}, "versions.torch is 2"),
        (at("new"), 1, "new is not a key"),
    ],
)
def test_what_it_says_is_checked(
    manifest: Manifest, put: Callable[[Any, Any], None], value: object, said: str
) -> None:
    table = copy.deepcopy(table_of(manifest))
    put(table, value)
    with pytest.raises(CheckpointError) as raised:
        Manifest.from_text(sign(table))
    assert said.replace("\\", "") in str(raised.value)


def test_the_signed_text_of_these_tests_is_read(manifest: Manifest) -> None:
    assert Manifest.from_text(sign(table_of(manifest))) == manifest


@pytest.mark.parametrize("key", ["step", "tensors", "files", "extra", "saved_at", "plan", "optimizer"])
def test_what_is_missing_is_named(manifest: Manifest, key: str) -> None:
    table = table_of(manifest)
    del table[key]
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        Manifest.from_text(sign(table))


def test_a_newer_version_asks_for_an_upgrade(manifest: Manifest) -> None:
    text = sign(table_of(manifest) | {"something": "new"}).replace('"version": 1', '"version": 2')
    with pytest.raises(CheckpointError, match=r"format version 2.*reads version 1: upgrade zorselike"):
        Manifest.from_text(text)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"format": "other", "version": 1}'])
def test_other_files_are_no_manifest(text: str) -> None:
    with pytest.raises(CheckpointError, match="is no manifest"):
        Manifest.from_text(text)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"best": math.inf}, "extra.best is inf"),
        ({"a": [1, {2: 3}]}, r"extra.a\[1\] has the key 2"),
        ({"a": np.zeros(3)}, "extra.a is a ndarray"),
        ({"a": {1}}, "extra.a is a set"),
    ],
)
def test_what_is_not_json_is_refused_before_it_is_saved(
    manifest: Manifest, extra: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        replace(manifest, extra=extra).to_text()


def test_what_contradicts_itself_is_refused_before_it_is_saved(manifest: Manifest) -> None:
    tensors = {name: record for name, record in manifest.tensors.items() if name != "emb"}
    with pytest.raises(CheckpointError, match=r"emb of shape .* is not among the tensors"):
        replace(manifest, tensors=tensors).to_text()
    tensors = {name: replace(record, dtype="float32") for name, record in manifest.tensors.items()}
    with pytest.raises(CheckpointError, match="is of dtype 'float32'"):
        replace(manifest, tensors=tensors).to_text()
    with pytest.raises(CheckpointError, match="one is there twice"):
        replace(manifest, files=manifest.files[:1] * 2).to_text()


def test_a_rank_s_table_is_checked(manifest: Manifest) -> None:
    with pytest.raises(FileError, match="slices is missing"):
        FileRecord.from_table({"file": "model/rank-00000.safetensors"})
