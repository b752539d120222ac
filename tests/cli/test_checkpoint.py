"""`zorselike checkpoint`: what a person sees of checkpoints, good and damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import make_manifest, make_tensors, save, write_files

from zorselike.checkpoint.folder import commit, make_partial, set_aside
from zorselike.checkpoint.read import read_manifest
from zorselike.cli import main

TENSORS = make_tensors()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 10, damaged 20, one that was never completed."""
    save(tmp_path, 10, TENSORS)
    damaged = save(tmp_path, 20, TENSORS)
    next((damaged / "model").iterdir()).unlink()
    make_partial(tmp_path, 30)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == code
    return capsys.readouterr().out


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_ls_shows_all_with_their_state(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    partial = make_partial(folder, 5)
    manifest = replace(make_manifest(5, write_files(partial, TENSORS), TENSORS), optimizer=None)
    commit(partial, manifest)
    set_aside(save(folder, 4, TENSORS))
    (folder / "model-step-00000020").mkdir()
    (folder / "model-step-00000020" / "model.safetensors").write_bytes(bytes(2**21))
    head, *lines = run(capsys, "ls", folder).splitlines()
    assert head.split() == ["step", "saved", "size", "files", "state"]
    assert [line.split()[0].partition(".")[0] for line in lines] == [
        "step-00000020",
        "step-00000010",
        "step-00000005",
        "model-step-00000020",
        "step-00000030",
        "step-00000004",
    ]
    assert "model/rank-" in lines[0] and lines[0].endswith("is missing")
    assert lines[1].endswith("complete") and "2026-01-02T03:04:05+00:00" in lines[1]
    assert lines[2].endswith("complete, model only")
    assert lines[3].split()[1:] == ["2.0", "MiB", "1", "the", "model", "alone,", "handed", "on"]
    assert lines[4].endswith("its writer died, or is still writing")
    assert "was set aside" in lines[5]


def test_where_nothing_is_every_command_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "none: is not there" in fail(capsys, "ls", tmp_path / "none")
    assert "holds no checkpoints" in fail(capsys, "ls", tmp_path)
    for command in ("verify", "show"):
        assert "none: there is no such folder" in fail(capsys, command, tmp_path / "none")
        assert "holds no complete checkpoint" in fail(capsys, command, tmp_path)


def test_beside_checkpoints_it_is_said_where_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a job's folder in place of the one in it; and of what a run has handed on."""
    checkpoints = tmp_path / "outputs" / "checkpoint"
    save(checkpoints, 10, TENSORS)
    newest = save(checkpoints, 20, TENSORS)
    for command in (["ls"], ["verify"], ["show"]):
        assert fail(capsys, *command, tmp_path / "outputs").endswith(f"; there is {newest}\n")
    model = checkpoints / "model-step-00000020"
    model.mkdir()
    assert "is a model that a run handed on: `zorselike checkpoint import`" in fail(capsys, "verify", model)


def test_verify_takes_the_newest_complete_one(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["checkpoint", "verify", str(folder)]) == 1  # Though what it takes is whole.
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{folder / 'step-00000010'}: ") and "as they were saved" in captured.out
    assert "newer checkpoint" in captured.out
    passed = captured.err.splitlines()
    assert len(passed) == 2 and all(line.startswith(f"passed over {folder}/step-000000") for line in passed)


def test_verify_names_every_fault(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    root = folder / "step-00000010"
    file = read_manifest(root).files[0]
    flip(root / file.file, file.slices[1].offset)
    first, last = run(capsys, "verify", folder, code=1).splitlines()
    assert first.startswith(f"{file.file}: {file.slices[1].entry}: bytes 0 to ")
    assert last == f"{root}: 1 fault"
    flip(root / "manifest.json", 300)
    first, _ = run(capsys, "verify", root, code=1).splitlines()
    assert first.startswith("manifest.json: ")


def test_show_says_what_it_holds(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    root = folder / "step-00000010"
    text = run(capsys, "show", root)
    for said in (
        "step           10, 80 rows seen, seed 0",
        "tied           head.w is a.w",
        'options: {"lr": 1e-05, "betas": [0.9, 0.95]}',
        "exp_avg_sq: ",
        'loss_scale     {"scale": 65536.0, "good_steps": 3}',
        "extra          best: 1.5",
    ):
        assert said in text
    assert "emb" not in text
    (line,) = (line for line in run(capsys, "show", root, "--tensors").splitlines() if line.startswith("emb"))
    assert line.split() == ["emb", "11", "x", "3", "x", "2", "F32", "F32", "3", "exp_avg,", "exp_avg_sq"]
    assert run(capsys, "show", root, "--plan") == "version = 1\n# größer\n"
    model_only = replace(read_manifest(root), optimizer=None, plan=None)
    (root / "manifest.json").write_text(model_only.to_text())
    assert "the model alone was saved" in run(capsys, "show", root)
    assert "holds no plan" in fail(capsys, "show", root, "--plan")


def test_help_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["ls"], ["verify"], ["show"], ["diff"], ["export"], ["import"]):
        with pytest.raises(SystemExit) as raised:
            main(["checkpoint", *arguments, "--help"])
        assert raised.value.code == 0 and "usage: zorselike checkpoint" in capsys.readouterr().out


def test_diff_says_what_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    changed = TENSORS | {("a.b", "exp_avg"): TENSORS["a.b", "exp_avg"] + 1}
    a, b = save(tmp_path / "a", 1, TENSORS), save(tmp_path / "b", 1, changed)
    assert run(capsys, "diff", a, a.parent) == "no differences\n"
    assert run(capsys, "diff", a, b, code=1) == "exp_avg.a.b: 7 of 7 elements, by up to 1\n"


def test_weights_go_out_and_in(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = run(capsys, "export", folder, out, "--dtype", "bfloat16", "--max-shard-size", "200B")
    assert text.splitlines()[0] == f"{folder / 'step-00000010'} exported to:"
    assert text.splitlines()[-1] == f"  {out / 'model.safetensors.index.json'}"
    assert "is there already" in fail(capsys, "export", folder / "step-00000010", out)
    new = tmp_path / "new"
    assert run(capsys, "import", out, new) == f"5 tensors imported to {new / 'step-00000000'}\n"
    assert "BF16" in run(capsys, "show", new, "--tensors")
    assert "give one or more safetensors files, then a folder" in fail(capsys, "import", out)


def test_what_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "out"
    assert str(tmp_path / "file") in fail(capsys, "export", folder / "step-00000010", target)
