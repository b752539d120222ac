"""Other people's data, where `ZORSELIKE_PAPER_DATA` names a folder of their repositories (tools/README.md),
and files of Zorse's form made up of round numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from made_up_sailor import write

DATA = Path(os.environ.get("ZORSELIKE_PAPER_DATA", "/no/paper/data"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="ZORSELIKE_PAPER_DATA names no folder of the papers' public repositories"
)


def write_zorse(data: Path) -> Path:
    """Sizes of a small Llama and of a large one, and layer times in proportion to them; returns their
    folder."""
    stats, times = {}, {}
    for name, hidden, num_layers in (("tiny", 2048, 22), ("7b", 4096, 32)):
        parameters = 12 * hidden**2
        stats[f"deepspeedllama_{name}"] = {
            "hidden_size": hidden, "num_layers": num_layers, "parameters_per_layer": parameters
        }  # fmt: skip
        row_ms = parameters * 1024 / 1e10
        rows = [2 * row_ms + row_ms * n for n in range(1, 25)]
        lists = [[row_ms, 2 * row_ms], [2 * row_ms, 4 * row_ms], rows, [2 * each for each in rows]]
        fits = {"512": {"float32": [[9 * row_ms, row_ms], [18 * row_ms, row_ms]]}}
        a100 = {"a100x40": {"1024": {"float16": lists}}}
        times[f"deepspeedllama_{name}"] = a100 | {"v100x16": fits, "t4": fits}
    write(data / "zorse" / "data" / "model_stats.json", stats)
    write(data / "zorse" / "data" / "model_latencies.json", times)
    return data / "zorse" / "data"
