"""Weights out of checkpoints and into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import make_tensors, save
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from zorselike.checkpoint import blocks
from zorselike.checkpoint.dtypes import decode, encode
from zorselike.checkpoint.export import AS_IN_MODEL, export, list_parts
from zorselike.checkpoint.folder import find_newest
from zorselike.checkpoint.imported import import_files
from zorselike.checkpoint.read import SlicesReader, read_manifest
from zorselike.checkpoint.safetensors_file import INDEX, holds_weights, open_folder
from zorselike.checkpoint.verify import verify
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box

TENSORS = make_tensors()
WEIGHTS = {name: torch.from_numpy(array) for (name, kind), array in TENSORS.items() if kind == VALUE}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), 7, TENSORS, columns=True)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@pytest.mark.parametrize("dtype", [None, AS_IN_MODEL, "F32", "BF16", "F16", "F64"])
def test_weights_are_exported_whole(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 50)  # Two rows or so.
    done: list[int] = []
    files = export(root, tmp_path / "new" / "out", dtype=dtype, progress=done.append)
    assert files == [tmp_path / "new" / "out" / "model.safetensors"]
    expected = {
        name: weight.to(TORCH.get(dtype or "", weight.dtype)) if weight.is_floating_point() else weight
        for name, weight in WEIGHTS.items()
    }
    assert equal(load_all(tmp_path / "new" / "out"), expected)
    assert sum(done) == sum(weight.nbytes for weight in expected.values())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def test_large_models_are_cut_and_have_an_index(root: Path, tmp_path: Path) -> None:
    files = export(root, tmp_path / "out", max_shard_bytes=200, aliases=True)
    names = [path.name for path in files]
    num_files = len(names) - 1
    assert num_files > 2 and names[0] == f"model-00001-of-{num_files:05}.safetensors"
    index = json.loads(files[-1].read_text())
    assert set(index["weight_map"]) == {*WEIGHTS, "head.w"}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert equal(load_all(tmp_path / "out"), WEIGHTS | {"head.w": WEIGHTS["a.w"]})
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in (*WEIGHTS.values(), WEIGHTS["a.w"]))


def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    root = save(tmp_path / "saved", 7, TENSORS)
    file = read_manifest(root).files[0]
    content = bytearray((root / file.file).read_bytes())
    content[-1] ^= 1
    (root / file.file).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file.file}: tensor {file.slices[-1].entry}: bytes"):
        export(root, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_an_export_replaces_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for target in (tmp_path, tmp_path / "x"):
        with pytest.raises(CheckpointError, match="is there already"):
            export(root, target)
    (tmp_path / "empty").mkdir()
    assert export(root, tmp_path / "empty")


@given(
    st.lists(st.floats(width=64), min_size=1), st.sampled_from(sorted(TORCH)), st.sampled_from(sorted(TORCH))
)
def test_values_are_rounded_as_torch_does(values: list[float], source: str, target: str) -> None:
    given_values = torch.tensor(values, dtype=torch.float64).to(TORCH[source])
    content = given_values.view(torch.uint8).numpy()
    found = torch.from_numpy(encode(decode(content, source), target)).view(TORCH[target])
    expected = given_values.to(TORCH[target])
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_every_half_is_rounded_as_torch_does() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    every = torch.from_numpy(
        np.concatenate([bits.astype(np.uint32) << 16 | low for low in (0, 0x7FFF, 0x8000, 1)])
    )
    content = every.view(torch.uint8).numpy()
    found = torch.from_numpy(encode(decode(content, "F32"), "BF16")).view(torch.bfloat16)
    expected = every.view(torch.float32).to(torch.bfloat16)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.isnan(), expected.isnan())


def test_float8_is_kept_and_not_converted(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    root = import_files([tmp_path / "m.safetensors"], tmp_path / "new")
    export(root, tmp_path / "out", dtype="F32")
    assert load_all(tmp_path / "out")["w"].dtype == torch.float8_e4m3fn
    with pytest.raises(CheckpointError, match="F8_E4M3 can be neither"):
        decode(np.zeros(4, np.uint8), "F8_E4M3")


# -- import ----------------------------------------------------------------------------------


def test_files_become_a_checkpoint_of_the_model_alone(tmp_path: Path) -> None:
    names = sorted(WEIGHTS)
    more = {"half": torch.randn(5, 3).bfloat16(), "none": torch.zeros(0, 4)}
    (tmp_path / "in").mkdir()
    save_file({name: WEIGHTS[name] for name in names[:2]}, tmp_path / "in" / "1.safetensors")
    save_file({name: WEIGHTS[name] for name in names[2:]} | more, tmp_path / "in" / "2.safetensors")
    root = import_files([tmp_path / "in"], tmp_path / "folder")
    found, skipped = find_newest(tmp_path / "folder")
    assert found is not None and found.path == root and not skipped and verify(root) == []
    assert found.manifest.step == 0 and found.manifest.optimizer is None
    assert found.manifest.tensors["half"].dtype == "BF16"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [root.name]
    export(root, tmp_path / "out")
    assert equal(load_all(tmp_path / "out"), WEIGHTS | more)
    reader = SlicesReader(root, found.manifest)
    target = np.empty((3, 5), np.float32)
    reader.read_box(Box("a.w", VALUE, (2, 0), (5, 5)), memoryview(target))
    reader.close()
    np.testing.assert_array_equal(target, TENSORS["a.w", VALUE][2:5])
    with pytest.raises(CheckpointError, match="a complete checkpoint of this step already"):
        import_files([tmp_path / "in"], tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [root.name]


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{i}.safetensors")
    with pytest.raises(CheckpointError, match=r"w is in .*1\.safetensors and in .*2\.safetensors"):
        import_files([tmp_path / "1.safetensors", tmp_path / "2.safetensors"], tmp_path / "folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        import_files([tmp_path / "empty"], tmp_path / "folder")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        import_files([tmp_path / "none.safetensors"], tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def header_of(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(begin: object, end: object, *, dtype: object = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        (2).to_bytes(8, "little") + b"{x" + bytes(8),
        header_of([]) + bytes(8),
        header_of({"w": 3}) + bytes(8),
        header_of({"w": entry(0, 8)}) + bytes(7),
        header_of({"w": entry(0, 8)}) + bytes(9),
        header_of({"w": entry(0, 7)}) + bytes(7),
        header_of({"w": entry(4, 12)}) + bytes(12),
        header_of({"w": entry(0, 8), "v": entry(4, 12)}) + bytes(12),
        header_of({"w": entry(0, 8), "v": entry(0, 8)}) + bytes(16),
        header_of({"w": entry(0, 8, dtype="F33")}) + bytes(8),
        header_of({"w": entry(0, 8, shape=[-1, -2])}) + bytes(8),
        header_of({"w": entry(0, 8, shape=["2"])}) + bytes(8),
        header_of({"w": entry(0, "8")}) + bytes(8),
        header_of({"w": {"dtype": "F32", "shape": [2]}}) + bytes(8),
    ],
)
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: is no safetensors file, or damaged: "):
        import_files([path], tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors")

    def refuse(*_: object) -> Callable[[], None]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        import_files([tmp_path / "m.safetensors"], tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


# -- as Hugging Face's libraries want it --------------------------------------------------------------


def test_what_lies_beside_weights_is_copied(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"torch_dtype": "float16", "hidden_size": 5}')
    (model / "tokenizer.json").write_text("{}")
    for name in ("pytorch_model.bin.index.json", "x.bin"):
        (model / name).write_text("weights of before")
    templates = Path("additional_chat_templates")
    (model / templates).mkdir()
    (model / templates / "rag.jinja").write_text("of documents")
    files = export(root, tmp_path / "out", dtype="BF16", like=model)
    names = ["model.safetensors", "config.json", "tokenizer.json", str(templates / "rag.jinja")]
    assert files == [tmp_path / "out" / name for name in names]
    assert {path for path in (tmp_path / "out").rglob("*") if path.is_file()} == set(files)
    assert (tmp_path / "out" / templates / "rag.jinja").read_text() == "of documents"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "hidden_size": 5,
    }
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        export(root, tmp_path / "other", like=tmp_path)
    assert not (tmp_path / "other").exists()


def test_a_folder_whose_index_names_files_that_are_not_there_is_not_empty(tmp_path: Path) -> None:
    """As where a download broke off: nothing may begin at random in its place."""
    assert not holds_weights(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert holds_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
        open_folder(tmp_path)


def test_weights_get_the_names_of_a_folder(root: Path, tmp_path: Path) -> None:
    """Some have others there, and some are there in parts."""
    manifest = read_manifest(root)
    assert list_parts(manifest, tmp_path) is None
    name = max(WEIGHTS, key=lambda name: WEIGHTS[name].ndim)
    whole = WEIGHTS[name]
    boxes = {f"entry.{i}": Box.of_rows(name, VALUE, whole.shape, (i, i + 1)) for i in range(1, len(whole))}
    half = whole.shape[1] // 2
    low, high = (0,) * whole.ndim, (1, *whole.shape[1:])
    boxes["left"] = Box(name, VALUE, low, (1, half, *whole.shape[2:]))
    boxes["right"] = Box(name, VALUE, (0, half, *low[2:]), high)
    there = {f"short.{key}": tensor for key, tensor in WEIGHTS.items() if key != name}
    for key, box in boxes.items():
        part = whole[tuple(slice(*ends) for ends in zip(box.starts, box.stops, strict=True))]
        there[key] = part[0] if key.startswith("entry") else part
    there = {key: tensor.contiguous() for key, tensor in there.items()}
    save_file({**there, "mask": torch.ones(1)}, tmp_path / "old.safetensors")

    def name_of(key: str) -> str | Box:
        return boxes.get(key, key.removeprefix("short."))

    parts = list_parts(manifest, tmp_path, name_of)
    export(root, tmp_path / "out", parts=parts, max_shard_bytes=100)
    assert equal(load_all(tmp_path / "out"), there)
    for spoilt, why in (
        ({key: tensor for key, tensor in there.items() if key != "right"}, "has a part of it alone"),
        ({key: tensor for key, tensor in there.items() if key.startswith("short")}, "has no such weight"),
        ({**there, "left": there["left"][:, :0]}, "has .* as left"),
        ({**there, f"short.{min(WEIGHTS)}": torch.zeros(99)}, "has .* as short"),
    ):
        save_file({key: tensor.contiguous() for key, tensor in spoilt.items()}, tmp_path / "old.safetensors")
        with pytest.raises(CheckpointError, match=why):
            list_parts(manifest, tmp_path, name_of)
