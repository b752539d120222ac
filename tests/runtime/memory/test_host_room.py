"""How much host memory may be taken: the machine's, or what a container or job may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from zorselike.errors import ConfigError
from zorselike.runtime.memory import host_room
from zorselike.runtime.memory.host_room import find_host_memory, find_host_room

MIB = 2**20
REPOSITORY = Path(__file__).parents[3]


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1 GiB available and no control groups."""
    monkeypatch.setattr(host_room, "ROOT", tmp_path)
    monkeypatch.delenv("ZORSELIKE_HOST_MEMORY", raising=False)
    write(tmp_path, {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable:  1048576 kB"})
    return tmp_path


def test_without_control_groups_it_is_what_the_machine_has_available(root: Path) -> None:
    assert find_host_room().num_bytes == 1024 * MIB
    assert "available memory" in str(find_host_room())


def test_a_container_limits_it_but_not_by_cached_files(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 100 * MIB,
            "sys/fs/cgroup/memory.current": 90 * MIB,
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {60 * MIB}",
        },
    )
    assert find_host_room().num_bytes == 70 * MIB
    assert "container or job" in find_host_room().limit
    assert find_host_memory() == 100 * MIB


def test_the_tightest_group_above_the_process_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/job/step",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": 5 * MIB,
            "sys/fs/cgroup/job/memory.max": 50 * MIB,
            "sys/fs/cgroup/job/memory.current": 10 * MIB,
            "sys/fs/cgroup/memory.max": 500 * MIB,
            "sys/fs/cgroup/memory.current": 10 * MIB,
        },
    )
    assert find_host_room().num_bytes == 40 * MIB


def test_the_first_version_of_control_groups(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 30 * MIB,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 25 * MIB,
            "sys/fs/cgroup/memory/a/memory.stat": f"total_inactive_file {5 * MIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 25 * MIB,
        },
    )
    assert find_host_room().num_bytes == 10 * MIB


def test_a_path_of_the_host_is_not_there_in_a_container(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/docker/0123",
            "sys/fs/cgroup/memory.max": 8 * MIB,
            "sys/fs/cgroup/memory.current": 9 * MIB,
        },
    )
    assert find_host_room().num_bytes == 0


def test_a_person_knows_better_than_the_machine_and_its_limits(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        root,
        {
            "proc/meminfo": "MemTotal: 2097152 kB\nMemAvailable:  1048576 kB",
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 100 * MIB,
            "sys/fs/cgroup/memory.current": 90 * MIB,
        },
    )
    assert str(find_host_room()).endswith(
        "(memory limit of the container or job; ZORSELIKE_HOST_MEMORY=SIZE if there is more)"
    )
    monkeypatch.setenv("ZORSELIKE_HOST_MEMORY", "180GiB")
    assert str(find_host_room()) == "179.00 GiB (ZORSELIKE_HOST_MEMORY less what is in use)"
    assert find_host_memory() == 180 * 1024 * MIB
    monkeypatch.setenv("ZORSELIKE_HOST_MEMORY", "1 MiB")
    assert find_host_room().num_bytes == 0
    monkeypatch.setenv("ZORSELIKE_HOST_MEMORY", "180")
    with pytest.raises(ConfigError, match="ZORSELIKE_HOST_MEMORY is '180'; write a size with its unit"):
        find_host_room()


def test_everything_that_measures_host_memory_asks_here() -> None:
    """So that what a person says holds everywhere."""
    files = [path for folder in ("zorselike", "tools") for path in (REPOSITORY / folder).rglob("*.py")]
    asking = [
        path.name for path in files if "meminfo" in (text := path.read_text()) or "SC_PHYS_PAGES" in text
    ]
    assert {*asking} - {"machine.py"} == {"host_room.py"}  # The first shows what a machine says of itself.
