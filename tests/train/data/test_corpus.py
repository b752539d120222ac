"""Text and token files into rows: nothing lost, nothing padded, nothing silently wrong."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from zorselike import ConfigError
from zorselike.train.config.config import Config, Job, Model, Training
from zorselike.train.data.corpus import Corpus
from zorselike.train.data.sources import open_rows
from zorselike.train.data.text_files import list_files, list_standard_library, read_pieces
from zorselike.train.data.tokenizer import ByteTokenizer, load_tokenizer
from zorselike.train.parts import log_data


def make_config(folder: Path, data: Path | str = "", *, seq_len: int = 4, **training: object) -> Config:
    settings = Training(dataset_path=str(data), seq_len=seq_len)
    return Config(
        job=Job(dump_folder=str(folder / "outputs")),
        training=replace(settings, **training),  # type: ignore[arg-type]
    )


def read(corpus: Corpus, row: int) -> list[int]:
    """A row's inputs and the target of the last."""
    inputs, targets, _ = corpus.read_row(row)
    assert inputs[1:].tolist() == targets[:-1].tolist()
    return [*inputs.tolist(), int(targets[-1])]


def stream_of(corpus: Corpus) -> list[int]:
    """The corpus as its rows give it, without their overlaps."""
    rows = [read(corpus, row) for row in range(corpus.num_rows)]
    for row, after in pairwise(rows):
        assert row[-1] == after[0]
    return rows[0][:1] + [token for row in rows for token in row[1:]]


def test_files_of_a_folder_that_are_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were left out without a word: a run trained on a part of its data."""
    monkeypatch.setattr(logging.getLogger("zorselike"), "propagate", True)
    for name in ("b.jsonl.gz", "c.TXT", "d.JSONL", "e.parquet", "README.md", "LICENSE"):
        (tmp_path / name).write_text("a")
    with pytest.raises(ConfigError, match=r"no .*; \.JSONL, \.TXT, .* files in it are not read"):
        list_files(str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    for _ in range(2):
        assert list_files(str(tmp_path)) == [tmp_path / "a.txt"]
    (record,) = caplog.records
    assert ".JSONL, .TXT, .jsonl.gz and .parquet files in the folder are left" in record.getMessage()


def test_text_becomes_bytes_with_an_end_after_each_document(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "b.txt").write_text("bé\n")
    (data / "sub" / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    (data / "a.txt").write_text("aaa")
    (data / "ignored.md").write_text("no")
    corpus = open_rows(make_config(tmp_path, data, seq_len=3), vocab_size=256)
    expected = list("aaa\0bé\n\0one\0two\0".encode())
    assert corpus.num_tokens == len(expected)
    assert stream_of(corpus) == expected[: 3 * ((len(expected) - 1) // 3) + 1]


def test_that_packing_says_nothing_of_a_stream_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with caplog.at_level(logging.INFO, "zorselike"):
        for packing, number in ((True, 1), (False, 2)):
            caplog.clear()
            config = make_config(tmp_path, tmp_path / "a.jsonl", packing=packing)
            log_data(config, open_rows(config, vocab_size=256))
            assert len(caplog.messages) == number
    assert "packing = false is for lines of" in caplog.messages[-1]


def test_token_files_are_one_stream(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.arange(101)
    for name, part in (("0.bin", tokens[:3]), ("1.bin", tokens[3:4]), ("2.bin", []), ("3.bin", tokens[4:])):
        np.asarray(part, dtype="uint32").tofile(data / name)
    corpus = open_rows(make_config(tmp_path, data, seq_len=10, dataset_dtype="uint32"), vocab_size=101)
    assert corpus.num_rows == 10
    assert stream_of(corpus) == tokens.tolist()
    assert not (tmp_path / "outputs").exists()


def test_a_corpus_travels_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.arange(50_000, dtype="uint16").tofile(path)
    corpus = open_rows(make_config(tmp_path, path), vocab_size=50_000)
    content = pickle.dumps(corpus)
    assert len(content) < 1000
    assert read(pickle.loads(content), 7) == read(corpus, 7)


def test_fingerprint_tells_streams_apart(tmp_path: Path) -> None:
    prints = []
    for first in (0, 0, 1):
        path = tmp_path / "x.bin"
        np.arange(first, 5000 + first, dtype="uint16").tofile(path)
        prints.append(open_rows(make_config(tmp_path, path), vocab_size=6000).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    np.array([1, 2, 3, 4, 5, 300, 7, 8, 9], dtype="uint16").tofile(path)
    corpus = open_rows(make_config(tmp_path, path), vocab_size=256)
    assert read(corpus, 0) == [1, 2, 3, 4, 5]
    for look in (lambda: corpus.read_row(1), corpus.fingerprint):
        with pytest.raises(ConfigError, match=r"x\.bin: token 300 at 5 .* vocabulary of 256"):
            look()


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello world")
    with pytest.raises(ConfigError, match=r'has 256 tokens, .* only 100: .*"vocab_size=256"'):
        open_rows(make_config(tmp_path, tmp_path / "x.txt"), vocab_size=100)


def bad_data(folder: Path, kind: str) -> Path:
    path = folder / "data"
    if kind == "missing":
        return path
    if kind in (
        "other suffix",
        "odd bytes",
        "too small",
        "no text",
        "no key known",
        "no json",
        "text is a number",
    ):
        name, content = {
            "other suffix": ("data.md", b"hi"),
            "odd bytes": ("data.bin", b"123"),
            "too small": ("data.txt", b"abc"),
            "no text": ("data.jsonl", b'{"text": "fine"}\n{"body": "x"}\n'),
            "no key known": ("data.jsonl", b'{"body": "x"}\n'),
            "no json": ("data.jsonl", b"{\n"),
            "text is a number": ("data.jsonl", b'{"text": 3}\n'),
        }[kind]
        (folder / name).write_bytes(content)
        return folder / name
    path.mkdir()
    if kind == "mixed":
        (path / "a.txt").write_text("hello")
        (path / "b.bin").write_bytes(b"12")
    if kind == "nothing known":
        (path / "a.md").write_text("hello")
    return path


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "there is no such file or folder"),
        ("empty", "contains no .txt, .jsonl or .bin file"),
        ("nothing known", "contains no .txt, .jsonl or .bin file"),
        ("mixed", "text and .bin token files"),
        ("other suffix", "must be a .txt, .jsonl or .bin file"),
        ("odd bytes", "no whole number of uint16"),
        ("too small", "4 tokens do not fill one row"),
        ("no text", 'line 2: is not a JSON object with a key "text"'),
        ("no key known", "line 1: is not a JSON object with the keys of one kind"),
        ("no json", "line 1: is not JSON"),
        ("text is a number", '"text" is not a string'),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, kind: str, expected: str) -> None:
    path = bad_data(tmp_path, kind)
    with pytest.raises(ConfigError) as caught:
        open_rows(make_config(tmp_path, path), vocab_size=256)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_text_is_tokenized_once(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("hello world")
    config = make_config(tmp_path, path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: open_rows(config, vocab_size=256), range(4)))
    cache = tmp_path / "outputs" / "dataset_cache"
    assert len(list(cache.glob("*.bin"))) == 1
    path.write_text("hello world, again")
    assert open_rows(config, vocab_size=256).num_tokens == 19
    assert len(list(cache.glob("*.bin"))) == 2
    assert not [file for file in cache.iterdir() if file.suffix not in (".bin", ".lock")]


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zorselike.train.data.text_files._PIECE_BYTES", 10)
    text = "".join(f"line {number} é\r\n" for number in range(50))
    (tmp_path / "x.txt").write_text(text, newline="")
    corpus = open_rows(make_config(tmp_path, tmp_path / "x.txt", seq_len=1), vocab_size=256)
    assert bytes(stream_of(corpus)) == text.encode() + b"\0"


def test_text_that_is_not_utf_8_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("für\n".encode("utf-8-sig"))
    assert "".join(piece.text for piece in read_pieces(path)) == "für\n" and not caplog.messages
    path.write_bytes("für\ndas\n".encode("latin-1"))
    with caplog.at_level("WARNING", logger="zorselike"):
        assert "".join(piece.text for piece in read_pieces(path)) == "f\ufffdr\ndas\n"
    assert caplog.messages == [f"{path}: what is not UTF-8 is read as \ufffd; save it as UTF-8"]
    path.write_bytes("für\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="is UTF-16; save it as UTF-8"):
        list(read_pieces(path))


def test_the_standard_library_is_the_default(tmp_path: Path) -> None:
    files = list_standard_library()
    assert files == list_standard_library()
    assert len(files) > 200
    assert not [file for file in files if {"site-packages", "test", "__pycache__"} & set(file.parts)]
    corpus = open_rows(make_config(tmp_path, seq_len=128), vocab_size=256)
    assert corpus.num_rows > 10_000


def test_files_of_a_folder_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [file.relative_to(tmp_path).as_posix() for file in list_files(str(tmp_path))] == [
        "a.txt",
        "b.txt",
        "c/a.txt",
    ]


def test_what_a_run_writes_is_no_data_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be inside that of the data, or have the data inside."""
    (tmp_path / "a.txt").write_text("hello world")
    monkeypatch.chdir(tmp_path)
    for data in (".", tmp_path):
        corpus = open_rows(make_config(Path(), data), vocab_size=256)
        assert isinstance(corpus, Corpus) and corpus.num_tokens == 12
        (tmp_path / "outputs" / "log.txt").write_text("finished after 3 of 3 steps")
    (tmp_path / "outputs" / "data").mkdir()
    (tmp_path / "outputs" / "data" / "a.txt").write_text("hello")
    assert open_rows(make_config(Path(), "outputs/data"), vocab_size=256).num_rows == 1
    with pytest.raises(ConfigError, match=r"= outputs is \[job\] dump_folder too, .* name another"):
        open_rows(make_config(Path(), "outputs"), vocab_size=256)


def test_a_folder_that_cannot_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may read everything is told so by a stand-in."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scan = os.scandir

    def scan_open(path: str) -> object:
        if Path(path).name in ("closed", "lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_open)
    with pytest.raises(ConfigError, match=r"/closed cannot be read: Permission denied$"):
        list_files(str(tmp_path))
    (tmp_path / "closed").rename(tmp_path / "lost+found")
    assert list_files(str(tmp_path)) == [tmp_path / "a.txt"]


def make_tokenizer(folder: Path, *, eos: object = "<end>") -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"hello": 0, "world": 1, "?": 2, "<end>": 300}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>"}])
def test_a_tokenizer_file(tmp_path: Path, eos: object) -> None:
    assets = make_tokenizer(tmp_path / "assets", eos=eos)
    (tmp_path / "x.txt").write_text("hello world hello mars world")
    config = replace(
        make_config(tmp_path, tmp_path / "x.txt", seq_len=5), model=Model(hf_assets_path=str(assets))
    )
    corpus = open_rows(config, vocab_size=301)
    assert read(corpus, 0) == [0, 1, 0, 2, 1, 300]
    with pytest.raises(ConfigError, match="the tokenizer has 301 tokens"):
        open_rows(config, vocab_size=300)


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    assets = make_tokenizer(tmp_path / "assets", eos=None)
    assert load_tokenizer(str(assets)).end_of_document is None
    assert load_tokenizer(str(assets / "tokenizer.json")).end_of_document is None


def test_a_tokenizer_saved_as_it_cut_and_padded_does_neither(tmp_path: Path) -> None:
    """As transformers saves one after `tokenizer(texts, truncation=True, padding="max_length")`."""
    path = make_tokenizer(tmp_path / "assets") / "tokenizer.json"
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    library.enable_truncation(2)
    library.enable_padding(length=2)
    library.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("hello world hello").tolist() == [0, 1, 0]
    assert tokenizer.encode("world").tolist() == [1]
    encoded = tokenizer.encode_answer("hello ", "world world")
    assert encoded.tokens.tolist() == [0, 1, 1, 300]
    assert encoded.is_answer.tolist() == [False, True, True, True]


def test_tokenizers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'zorselike\[tokenizers\]'"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_bytes_round_trip() -> None:
    text = "a\u00e9\U0001f600\ud800"
    assert bytes(ByteTokenizer().encode(text)).decode() == "a\u00e9\U0001f600?"
