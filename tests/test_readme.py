"""What the documentation names exists, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [page for page in ("README.md", "recipes/README.md", "tools/README.md") if (ROOT / page).exists()]
MAX_README_LINES = 250

_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_FILE = re.compile(r"`([a-z_0-9]+\.py)\b")
_PATH = re.compile(r"(?:zorselike|tools|tests|recipes|\.ci)/[\w./*-]*\w[/]?")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist(page: str) -> None:
    links = [link for link in _LINK.findall((ROOT / page).read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    text = re.sub(r"\]\([^)]*\)|(?:recipes|tools)/NAME\.\w+|outputs/[\w/]*", "", text)
    assert [path for path in _PATH.findall(text) if not list(ROOT.glob(path.rstrip("/")))] == []
    folders = ("zorselike", "tools", "recipes")
    assert [f for f in _FILE.findall(text) if not any(list((ROOT / d).rglob(f)) for d in folders)] == []


def test_links_inside_pages_have_a_heading() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", (ROOT / page).read_text()):
            linked = ROOT / page if not target else (ROOT / page).parent / target
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-").replace(",", "") for heading in headings]
