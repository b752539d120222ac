"""A small share of the torture of checkpoints, and that it finds what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import volume
from checkpoint_files import make_manifest, make_tensors, write_files

from tools import torture_checkpoint
from tools.checkpoint import jobs
from tools.checkpoint.subject import FileLayer, OnCommit, Share, ignore
from tools.torture_checkpoint import SECTIONS, SHARES, torture
from zorselike.checkpoint.layout import MANIFEST, step_folder

pytestmark = pytest.mark.usefixtures("forks_inherit")
SPARED = {
    "kills": 6,
    "errors": 20,
    "power": 6,
    "rivals": 3,
    "flips": 100,
    "files": 1,
    "pickles": 1,
    "jobs": 40,
}
"""Of a tenth only every so manieth case, but for nightly runs."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", SECTIONS)
def test_nothing_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not volume.is_full():
        monkeypatch.setattr(jobs, "STEPS", 2)
    first = volume.part(range(SHARES))[0]
    tally = torture(name, Share(first, SHARES * (1 if volume.is_full() else SPARED[name])))
    assert tally.tried and tally.lost == []


class Careless(FileLayer):
    """Saves as one might at first: into the folder that is read."""

    def save(self, folder: Path, step: int, on_commit: OnCommit = ignore) -> None:
        root = folder / step_folder(step)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        tensors = make_tensors(step)
        files = write_files(root, tensors, num_ranks=1)
        (root / MANIFEST).write_text(make_manifest(step, files, tensors).to_text())
        on_commit()


class Forgetful(FileLayer):
    """Loads without looking."""

    def find_fault(self, checkpoint: object) -> str | None:
        return "nothing is as it was"


def test_a_careless_writer_is_found_out() -> None:
    assert torture("kills", Share(3, 9), subject=Careless()).lost
    assert torture("power", Share(2, 9), subject=Careless()).lost
    assert torture("files", Share(0, 50), subject=Forgetful()).lost


def test_figures_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert torture_checkpoint.main(["--only", "files", "pickles", "--share", "4", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["figures"]["files_tried"] > 5 and result["figures"]["files_lost"] == 0
    assert result["targets"]["pickles_lost"] == {"target": "<= 0", "met": True, "note": ""}
    assert result["lost"] == {} and result["share"] == 4
    assert "files_lost" in capsys.readouterr().out
