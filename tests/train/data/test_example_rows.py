"""Examples as rows: whole, apart, in one order for ever, and nothing lost without a word."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import save_tokenizer, turns, write_lines
from hypothesis import given
from hypothesis import strategies as st

from zorselike import ConfigError
from zorselike.train.config.config import Config, Job, Model, Training, Validation
from zorselike.train.data.example_rows import ExampleRows, write_rows
from zorselike.train.data.packing import pack
from zorselike.train.data.rows import Row, Rows
from zorselike.train.data.sources import open_rows
from zorselike.train.data.tokenizer import Encoded

SEQ_LEN = 8
Document = tuple[list[int], list[bool]]


# -- packing -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20)), st.integers(20, 40))
def test_every_document_is_in_one_row(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in row) <= capacity for row in rows)
    assert rows == sorted(rows) and all(row == sorted(row) for row in rows)
    half_empty = [row for row in rows if 2 * sum(lengths[document] for document in row) <= capacity]
    assert len(half_empty) <= 1


def test_the_longest_go_first_where_they_fit_best() -> None:
    assert pack([2, 5, 8, 3, 6, 4], 10) == [[0, 2], [1, 3], [4, 5]]


# -- rows ----------------------------------------------------------------------------------


def write(folder: Path, documents: list[Document], *, packs: bool = True, **options: Any) -> ExampleRows:
    examples = [
        Encoded(np.array(tokens, dtype=np.int64), np.array(is_answer, dtype=np.bool_))
        for tokens, is_answer in documents
    ]
    settings: dict[str, Any] = {"noun": "test", "dtype": "uint16", "seq_len": SEQ_LEN}
    write_rows(folder, examples, packs=packs, **settings, trains_on_input=False, **options)
    return ExampleRows(folder, source="test")


def documents_in(row: Row) -> list[list[tuple[int, int]]]:
    """Inputs with their targets, document by document; padding is one."""
    positions = np.arange(SEQ_LEN) if row.positions is None else row.positions
    cuts = np.flatnonzero(positions == 0)
    for start, stop in zip(cuts, [*cuts[1:], SEQ_LEN], strict=True):
        assert positions[start:stop].tolist() == list(range(stop - start))
    pairs = list(zip(row.inputs.tolist(), row.targets.tolist(), strict=True))
    return [pairs[start:stop] for start, stop in zip(cuts, [*cuts[1:], SEQ_LEN], strict=True)]


def expected_pairs(document: Document) -> list[tuple[int, int]]:
    tokens, is_answer = (side[: SEQ_LEN + 1] for side in document)
    following = zip(tokens[1:], is_answer[1:], strict=True)
    return [
        (token, target if counts else -100)
        for token, (target, counts) in zip(tokens, following, strict=False)
    ]


@st.composite
def documents(draw: st.DrawFn) -> Document:
    tokens = draw(st.lists(st.integers(1, 1000), max_size=SEQ_LEN + 4))
    return tokens, draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))


@given(st.lists(documents(), min_size=1, max_size=12), st.booleans())
def test_rows_hold_every_example_and_padding(
    tmp_path_factory: pytest.TempPathFactory, found: list[Document], packs: bool
) -> None:
    kept = [pairs for pairs in map(expected_pairs, found) if any(target != -100 for _, target in pairs)]
    folder = tmp_path_factory.mktemp("rows") / "rows"
    if not kept:
        with pytest.raises(ConfigError, match="nothing is left to train on"):
            write(folder, found, packs=packs)
        return
    rows = write(folder, found, packs=packs)
    read = []
    for number in range(rows.num_rows):
        row = rows.read_row(number)
        assert all(len(side) == SEQ_LEN and side.dtype == np.int64 for side in row if side is not None)
        assert (row.positions is not None) == packs
        *filled, last = documents_in(row)
        if packs:
            read += filled if all(pair == (0, -100) for pair in last) else [*filled, last]
        else:
            length = np.flatnonzero([pair != (0, -100) for pair in last])[-1] + 1
            read.append(last[: max(length, len(kept[number]))])
    assert sorted(read) == sorted(kept)
    if not packs:
        assert read == kept
    told = rows.describe()
    assert f"{len(kept)} tests, " in told
    assert f"{sum(target != -100 for pairs in kept for _, target in pairs)} of them in the loss" in told
    assert ("left out" in told) == (len(kept) < len(found))
    assert ("lost the end" in told) == any(len(tokens) > SEQ_LEN + 1 for tokens, _ in found)


def test_a_fingerprint_covers_tokens_targets_and_rows(tmp_path: Path) -> None:
    document = [5, 6, 7], [False, True, True]
    others = [
        [document],
        [document],
        [([5, 6, 8], document[1])],
        [(document[0], [False, False, True])],
        [document, document],
    ]
    prints = [write(tmp_path / str(i), each).fingerprint() for i, each in enumerate(others)]
    prints.append(write(tmp_path / "apart", [document, document], packs=False).fingerprint())
    assert prints[0] == prints[1] and len(set(prints)) == 5


def test_rows_travel_by_name(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows", [([1, 2, 3], [True] * 3)] * 5000)
    content = pickle.dumps(rows)
    assert len(content) < 1000
    again = pickle.loads(content)
    for one, other in zip(again.read_row(2), rows.read_row(2), strict=True):
        assert one.tolist() == other.tolist()


# -- files ---------------------------------------------------------------------------------


def make_config(folder: Path, data: Path, *, assets: Path | None = None, **training: Any) -> Config:
    settings = Training(dataset_path=str(data), seq_len=80)
    return Config(
        job=Job(dump_folder=str(folder / "outputs")),
        model=Model(hf_assets_path=str(assets or "")),
        training=replace(settings, **training),
        validation=Validation(enable=True, dataset_path=str(data)),
    )


def num_answers(rows: Rows) -> int:
    return sum(int((rows.read_row(row).targets != -100).sum()) for row in range(rows.num_rows))


def test_conversations_become_rows_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assets = save_tokenizer(tmp_path / "tokenizer")
    path = write_lines(tmp_path / "x.jsonl", [turns("a", "b" * (1 + i % 5)) for i in range(20)])
    config = make_config(tmp_path, path, assets=assets)
    with ThreadPoolExecutor(3) as pool:
        rows, *others = pool.map(lambda _: open_rows(config, vocab_size=260), range(3))
    assert len({each.fingerprint() for each in (rows, *others)}) == 1 and rows.is_packed
    assert "20 conversations, " in rows.describe() and "packed rows, " in rows.describe()
    assert num_answers(rows) == sum(1 + i % 5 + 2 for i in range(20))
    held_out = open_rows(config, vocab_size=260, section="validation")
    assert held_out.fingerprint() == rows.fingerprint() and held_out.source.startswith("[validation]")
    cache = tmp_path / "outputs" / "dataset_cache"
    assert len(list(cache.glob("*.rows"))) == 1
    for changes in ({"seq_len": 90}, {"packing": False}, {"train_on_input": True}):
        other = open_rows(make_config(tmp_path, path, assets=assets, **changes), vocab_size=260)
        assert other.fingerprint() != rows.fingerprint()
    assert len(list(cache.glob("*.rows"))) == 4
    assert {file.suffix for file in cache.iterdir()} == {".rows", ".lock"}
    with pytest.raises(ConfigError, match=r"the tokenizer has 260 tokens, .* only 259"):
        open_rows(config, vocab_size=259)


def test_completions_need_no_tokenizer_file(tmp_path: Path) -> None:
    lines = [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "x" * 99, "completion": "4"}]
    path = write_lines(tmp_path / "x.jsonl", lines)
    rows = open_rows(make_config(tmp_path, path), vocab_size=256)
    assert (rows.num_rows, num_answers(rows)) == (1, 2)
    assert "1 completion longer than seq_len + 1 = 81 tokens lost the end" in rows.describe()
    assert "1 completion without an answer left out" in rows.describe()
    whole = open_rows(make_config(tmp_path, path, train_on_input=True), vocab_size=256)
    assert (whole.num_rows, num_answers(whole)) == (2, 9 + 80)


def test_a_file_that_ends_in_an_error_leaves_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}, {"text": "c"}])
    with pytest.raises(ConfigError, match=r"x\.jsonl, line 2: "):
        open_rows(make_config(tmp_path, path), vocab_size=256)
    assert {file.suffix for file in (tmp_path / "outputs" / "dataset_cache").iterdir()} == {".lock"}


def test_conversations_need_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(turns("a", "b")))
    with pytest.raises(ConfigError, match=r"needs a tokenizer with a chat template: let .* hf_assets_path"):
        open_rows(make_config(tmp_path, path), vocab_size=256)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_model_whose_tokenizer_must_be_converted_gets_no_bytes(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}])
    folder = tmp_path / "model"
    folder.mkdir()
    config = replace(make_config(tmp_path, path), model=Model(name="hf", path=str(folder)))
    assert open_rows(config, vocab_size=256).num_rows == 1  # A model without any tokenizer is of bytes.
    (folder / name).touch()
    with pytest.raises(ConfigError, match=rf"model has the tokenizer {name} and no tokenizer.json: make one"):
        open_rows(config, vocab_size=256)
