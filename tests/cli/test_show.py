"""`zorselike show`: plans, schedules and the largest model, and one clear line for a mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zorselike import Group, Microbatch, Ministage, Plan
from zorselike.cli import main
from zorselike.cli.show import Show
from zorselike.schedule import ScheduleSpec, build, format_actions

FIT = ("show", "--fit", "--memory", "24GiB", "--host-memory", "64GiB")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def plan() -> Plan:
    group = Group(
        ranks=(0,), microbatches=(Microbatch(0, 0, 2), Microbatch(0, 2, 3)), offload=("params", "activations")
    )
    return Plan(3, (group,), tuple(Ministage(0, (f"layers.{i}",)) for i in range(3)))


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> str:
    plan.save(tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def test_ctrl_c_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def interrupt(command: Show) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Show, "run", interrupt)
    assert main(("show", path)) == 130
    captured = capsys.readouterr()
    assert not captured.out and captured.err == "interrupted; files already written are kept\n"


@pytest.mark.parametrize("asks_for_help", [False, True])
def test_who_has_read_enough_gets_no_traceback(path: str, asks_for_help: bool) -> None:
    command = [sys.executable, "-m", "zorselike.cli", "show", "--help" if asks_for_help else path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_who_has_no_output_gets_no_traceback(path: str) -> None:
    command = [sys.executable, "-m", "zorselike.cli", "show", path]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=True)
    assert done.stderr == b""


# -- plans -----------------------------------------------------------------------------------


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str], plan: Plan, path: str) -> None:
    assert run(capsys, "show", path) == plan.explain() + "\n"


@pytest.mark.parametrize(("dtype", "masters"), [("bfloat16", True), ("float32", False)])
def test_a_schedule_is_what_build_makes(
    capsys: pytest.CaptureFixture[str], plan: Plan, path: str, dtype: str, masters: bool
) -> None:
    shown = run(capsys, "show", path, "--schedule", "--dtype", dtype)
    assert shown.startswith(plan.explain())
    assert max(map(len, shown.splitlines())) <= 110
    listed = " ".join(shown.partition("rank 0: ")[2].split())
    assert listed == format_actions(build(ScheduleSpec(plan, masters=masters))[0])


def test_bounds_with_which_no_step_would_end_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Four rows of the first group make one microbatch of the second."""
    path = str(tmp_path / "low.plan.toml")
    rows = tuple(Microbatch(0, i, i + 1) for i in range(4))
    groups = (Group((0,), rows, max_in_flight=2), Group((1,), (Microbatch(1, 0, 4),)))
    Plan(4, groups, (Ministage(0, ("layers.0",)), Ministage(1, ("layers.1",)))).save(path)
    for more in ((), ("--schedule",)):
        message = fail(capsys, "show", path, *more)
        assert f"{path}: groups[0].max_in_flight is 2 and must be 4 or more" in message


# -- the largest model -----------------------------------------------------------------------


def test_fit_is_a_table_with_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, *FIT)
    assert "device: 24.0 GiB (as --memory says)" in shown
    assert "host memory for what is offloaded: 64.0 GiB (as --host-memory says)" in shown
    assert "16,384 tokens in 8 rows of 2,048, 1 row a microbatch" in shown
    assert "Assumed: 1.0 GiB of the device" in shown
    lines = shown.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("offload "))
    table = lines[start + 1 : start + 6]
    assert [line.split("  ")[0] for line in table] == [
        "none",
        "none, recompute layers",
        "+ activations",
        "+ params",
        "+ optimizer: everything",
    ]
    assert all("device: " in line or "host RAM: " in line for line in table)
    assert "B parameters" in table[-1]


def test_fit_follows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    more = "--family gpt --dtype float32 --rows 2 --rows-per-microbatch 2 --seq-len 4096 --ministages 4"
    shown = run(capsys, *FIT, *more.split(), "--optimizer-moments", "1")
    assert "the largest gpt that one device trains" in shown
    assert "8,192 tokens in 2 rows of 4,096, 2 rows a microbatch" in shown
    assert "precision: float32; 1 fp32 moment a parameter" in shown
    assert "4 ministages at most" in shown


def test_fit_says_where_its_numbers_are_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zorselike.cli.show._find_devices", dict)
    shown = run(capsys, "show", "--fit")
    assert "no GPU here: the host's free memory is taken instead, or give --memory" in shown
    assert "% of what is free here" in shown
    monkeypatch.setattr(
        "zorselike.cli.show._find_devices", lambda: {"Card A": 8 * 2**30, "Card B": 24 * 2**30}
    )
    shown = run(capsys, "show", "--fit")
    assert shown.index("8.0 GiB (Card A)") < shown.index("24.0 GiB (Card B)")


def test_where_nothing_fits_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "show", "--fit", "--memory", "2GiB", "--host-memory", "1GiB")
    assert shown.count("none, not even one layer") == 5


# -- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show",), "give a plan file, or --fit"),
        (("show", "missing.toml"), "missing.toml: there is no such file"),
        (("show", "a.toml", "--fit"), "takes no plan; leave out 'a.toml' or --fit"),
        (("show", "a.toml", "--rows-per-microbatch", "2"), "--rows-per-microbatch goes with --fit"),
        (("show", "a.toml", "--schedule-csv", "./a.toml"), "--schedule-csv is ./a.toml, which is read too"),
        (("show", "a.toml", "--memory", "8GiB"), "--memory goes with --fit"),
        (("show", "--fit", "--schedule"), "leave one out"),
        (("show", "--fit", "--schedule-csv", "a.csv"), "leave one out"),
        (("show", "--fit", "--memory", "24"), "--memory is '24'; write it as 24GiB"),
        (("show", "--fit", "--host-memory", "0GiB"), "--host-memory is '0GiB'"),
        (("show", "--fit", "--rows", "0"), "--rows is 0; it must be at least 1"),
        (("show", "--fit", "--rows-per-microbatch", "-1"), "--rows-per-microbatch is -1"),
        (("show", "--fit", "--optimizer-moments", "-1"), "must be at least 0"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in fail(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments", [(), ("plant",), ("show", "--family", "opt", "--fit"), ("show", "--nope")]
)
def test_what_does_not_exist_ends_with_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_help_and_plans_need_no_torch(path: str) -> None:
    code = """
import sys
from zorselike.cli import main
main(["show", sys.argv[1], "--schedule"])
try:
    main(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: zorselike" in done.stdout
