"""Other people's data, read under `--data` in clones of their public repositories or copies of their
files."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorselike.cost.curves import CurveWarning
from zorselike.errors import ClusterError, ConfigError, PlanError, ProfileError

from ..report import make_parser


@dataclass(frozen=True)
class Repository:
    """A public repository and what is read of it."""

    address: str
    files: Mapping[str, str]
    """Paths in the repository by the name that a file has here."""

    @property
    def clone(self) -> str:
        """The folder that `git clone` makes."""
        return self.address.rpartition("/")[2]

    def find(self, data: Path, name: str, below: str = "") -> Path:
        """A file or folder of the repository, or what is `below` it, in a folder of clones, in the clone
        itself, or under the plain name; raises `ProfileError` if it is in none."""
        for root in (data / self.clone, data):
            for path in (root / self.files[name] / below, root / name / below):
                if path.exists():
                    return path
        missing = "/".join(part for part in (self.files[name], below) if part)
        raise ProfileError(
            f"{data}: no {missing} of {self.address}; git clone https://{self.address} {data / self.clone}"
        )


SAILOR = Repository(
    "github.com/eth-easl/sailor",
    {
        "llm_info.json": "sailor/Planner/llm_info.json",
        "profiles": "sailor/Planner/sailor_planner/profiles",
        "providers/multizone_bandwidths_het.json": "sailor/providers/multizone_bandwidths_het.json",
        "providers/communication_cost.json": "sailor/providers/gcp/communication_cost.json",
        "traces": "sailor/Controller/trace_based",
        "simulator_profiles.json": "sailor/Planner/simulations/profiles_tmp.json",
        "measured/OPT-350-GH200": "sailor/Planner/simulations/validation/clariden/OPT-350",
        "measured/GPT-Neo-2.7-GH200": "sailor/Planner/simulations/validation/clariden/GPT-NEO",
    },
)
ZORSE = Repository(
    "github.com/benson-guo/zorse",
    {"model_latencies.json": "data/model_latencies.json", "model_stats.json": "data/model_stats.json"},
)


def make_data_parser(doc: str | None, repository: Repository) -> argparse.ArgumentParser:
    """A command line with `--data`; its help says what has to be there."""
    files = "\n".join(f"  {path}" for path in repository.files.values())
    parser = make_parser(
        f"{doc}\n--data DIR holds a clone of {repository.address}, or is one; read are\n{files}"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"with {repository.address}")
    return parser


def report_errors(work: Callable[[], int]) -> int:
    """What a script returns; 2, with the reason in one line, where data are missing or wrong."""
    # Of the authors' times some fall by a few percent where more is computed; curves repair them.
    warnings.simplefilter("ignore", CurveWarning)
    try:
        return work()
    except (ClusterError, ConfigError, PlanError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 2


def say_progress(line: str) -> None:
    print(f"... {line}", file=sys.stderr, flush=True)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ProfileError` naming the file if there is none."""
    return _read(path, dict, "an object")


def read_list(path: Path) -> list[Any]:
    """The list in a JSON file; raises `ProfileError` naming the file if there is none."""
    return _read(path, list, "a list")


def _read(path: Path, kind: type, expected: str) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}; check the data folder") from None
    except ValueError as error:
        raise ProfileError(f"{path}: is not JSON ({error}); fetch the file again") from None
    if not isinstance(found, kind):
        raise ProfileError(f"{path}: holds a {type(found).__name__}; expected {expected}")
    return found
