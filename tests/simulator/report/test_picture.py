"""A step as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from handmade import SPANS, make_case

from zorselike.errors import ConfigError
from zorselike.simulator.report.picture import draw_timeline, save_picture


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_picture(make_case(), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_every_span_is_a_bar_of_its_length_in_its_rank_s_row() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw_timeline(figure, make_case())
    (axes,) = figure.axes
    bars = []
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            bars.append((2 - int(box.y0), round(box.x0, 6), round(box.x1, 6)))
    assert sorted(bars) == sorted((rank, start, stop) for rank, _, start, stop, _ in SPANS)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0  A100-40", "1  T4", "2  T4"]
    assert axes.get_title() == "chain: 10 s per step, 40 tokens/s (simulated)"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "forward of ministage 0",
        "its backward",
        "ministage 1, and so on",
        "update",
        "reduce",
        "send",
        "receive",
    ]


def test_forward_and_backward_and_ministages_have_colours_of_their_own() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    draw_timeline(figure, make_case())
    colors = {tuple(collection.get_facecolor()[0]) for collection in figure.axes[0].collections}
    assert len(colors) == 4 + 4  # Two ministages each way; update, reduce, send, receive.


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'zorselike\[viz\]'"):
        save_picture(make_case(), tmp_path / "step.png")


@pytest.mark.parametrize("name", ["no/such/step.png", "step.nonsense"])
def test_a_picture_that_cannot_be_written_is_one_clear_error(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="the picture cannot be written"):
        save_picture(make_case(), tmp_path / name)
