"""From what a recipe names to rows: tokenized, and packed, where that was not yet done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from zorselike.errors import ConfigError
from zorselike.train.config.config import Config, Model, Training
from zorselike.train.data.cache import make_once, name_of
from zorselike.train.data.chat import ChatTokenizer
from zorselike.train.data.corpus import Corpus, write_tokens
from zorselike.train.data.example_rows import ExampleRows, write_rows
from zorselike.train.data.examples import Conversation, Kind, find_kind, read_examples
from zorselike.train.data.rows import Rows
from zorselike.train.data.text_files import TOKEN_SUFFIX, list_files, list_standard_library
from zorselike.train.data.tokenizer import TOKENIZER, Encoded, Tokenizer, load_tokenizer

_OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files of which transformers makes a tokenizer.json."""
_LAYOUT = "rows 1"
"""Of the folders of rows; another one is another name in the cache."""


Section = Literal["training", "validation"]


def find_files(config: Config, section: Section) -> tuple[str, list[Path]]:
    """What a section says of its data, and their files. Raises `ConfigError` where there are none."""
    data = config.training if section == "training" else config.validation
    if data.dataset_path:
        source = f"[{section}] dataset_path = {data.dataset_path}"
        outputs = Path(config.job.dump_folder)
        return source, list_files(data.dataset_path, section=section, outputs=outputs)
    return f'[{section}] dataset = "{data.dataset}"', list_standard_library()


def open_rows(
    config: Config,
    *,
    vocab_size: int,
    section: Section = "training",
    before_packing: Callable[[], object] = lambda: None,
) -> Rows:
    """The rows that a section names: a stream of tokens, or examples to fine-tune on.

    Args:
        config: the job's configuration.
        vocab_size: vocabulary size of the model.
        section: which data; how they become rows `[training]` says for both.
        before_packing: called before documents are packed, to raise where the model cannot keep them apart.

    Raises:
        ConfigError: no data, data of the wrong kind, or tokens outside of the model's vocabulary.
    """
    training = config.training
    source, files = find_files(config, section)
    dtype: str = training.dataset_dtype
    if files[0].suffix != TOKEN_SUFFIX:
        cache = Path(config.job.dump_folder) / "dataset_cache"
        assets = find_assets(config.model)
        kind = find_kind(files)
        if kind != "text":
            tokenizer = _load(kind, assets, vocab_size)
            if training.packing:
                before_packing()
            folder = _make_rows(files, kind, tokenizer, training, cache)
            return ExampleRows(folder, source=source)
        stream_tokenizer = load_tokenizer(assets)
        dtype = _check_vocabulary(stream_tokenizer, vocab_size)
        files = [_make_stream(files, stream_tokenizer, dtype, cache)]
    return Corpus(files, dtype=dtype, seq_len=training.seq_len, vocab_size=vocab_size, source=source)


def find_assets(model: Model) -> str:
    """Where the tokenizer is; a model's folder may have none. Raises `ConfigError` for one that must be
    converted: bytes in its place would train on what the model has never seen."""
    own = Path(model.path).expanduser()
    if model.hf_assets_path or not model.path:
        return model.hf_assets_path
    if (own / TOKENIZER).is_file():
        return str(own)
    if others := [name for name in _OTHER_TOKENIZERS if (own / name).is_file()]:
        raise ConfigError(
            f"{own} has the tokenizer {others[0]} and no {TOKENIZER}: make one with "
            f"transformers.AutoTokenizer.from_pretrained('{own}').save_pretrained('{own}'), or let [model] "
            "hf_assets_path name a folder that has one"
        )
    return ""


def _load(kind: Kind, assets: str, vocab_size: int) -> Tokenizer | ChatTokenizer:
    if kind != "messages":
        tokenizer: Tokenizer | ChatTokenizer = load_tokenizer(assets)
    elif not assets:
        raise ConfigError(
            'data with "messages" needs a tokenizer with a chat template: let [model] hf_assets_path name '
            'its folder, or write the data as lines with "prompt" and "completion"'
        )
    else:
        path = Path(assets)
        tokenizer = ChatTokenizer(path.parent if path.is_file() else path)
    _check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def _check_vocabulary(tokenizer: Tokenizer | ChatTokenizer, vocab_size: int) -> str:
    """The smallest type for the tokenizer's tokens, all of which the model knows."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model of [model] only {vocab_size}: "
            f'give one of ours as many by [model] override = ["vocab_size={tokenizer.vocab_size}"], '
            "or let [model] hf_assets_path name another tokenizer"
        )
    return np.min_scalar_type(max(tokenizer.vocab_size - 1, 0)).name


def _make_stream(files: Sequence[Path], tokenizer: Tokenizer, dtype: str, cache: Path) -> Path:
    """The token file of these text files."""
    name = name_of(files, f"{tokenizer.fingerprint} {dtype}")
    return make_once(cache / f"{name}.{dtype}.bin", partial(write_tokens, files, tokenizer, dtype=dtype))


def _make_rows(
    files: Sequence[Path],
    kind: Kind,
    tokenizer: Tokenizer | ChatTokenizer,
    training: Training,
    cache: Path,
) -> Path:
    """The folder of rows of these files."""
    dtype = np.min_scalar_type(max(tokenizer.vocab_size - 1, 0)).name
    seq_len, packs, trains_on_input = training.seq_len, training.packing, training.train_on_input
    made_by = f"{_LAYOUT} {tokenizer.fingerprint} {dtype} {kind} {seq_len} {packs} {trains_on_input}"

    def write(folder: Path) -> None:
        write_rows(
            folder,
            _encode(files, kind, tokenizer),
            noun="conversation" if kind == "messages" else kind,
            dtype=dtype,
            seq_len=seq_len,
            packs=packs,
            trains_on_input=trains_on_input,
        )

    return make_once(cache / f"{name_of(files, made_by)}.rows", write)


def _encode(files: Sequence[Path], kind: Kind, tokenizer: Tokenizer | ChatTokenizer) -> Iterator[Encoded]:
    total = sum(file.stat().st_size for file in files)
    # `delay`: no bar for what takes a few seconds.
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", delay=5) as progress:
        for file in files:
            for example, where, num_bytes in read_examples(file, kind):
                if isinstance(tokenizer, ChatTokenizer):
                    assert isinstance(example, Conversation)
                    yield tokenizer.encode(example, where)
                else:
                    assert not isinstance(example, Conversation)
                    yield tokenizer.encode_answer(example.prompt, example.completion)
                progress.update(num_bytes)
