"""Checkpoints and their writers, hurt in every way that can be thought of.

    python tools/torture_checkpoint.py --json result.json     # everything: minutes of one core
    python tools/torture_checkpoint.py --share 3              # every tenth case, beginning with the third
    python tools/torture_checkpoint.py --only kills flips

A writer is killed before, after and in the middle of every call that changes the disk; each of these calls
fails with a full disk, an input/output error, a read-only file system, a quota; power is lost after each, so
that only what was synced is sure; several writers begin at once. Every bit of manifest and headers is flipped
and 1,000 random bits of tensors; each file is cut, deleted, lengthened, replaced; the format is a newer one;
pickles lie under every name that a loader might open. In every case the newest complete checkpoint must be
found and hold what was saved, what was passed over must be named with its reason, and the next save succeed.
Last, jobs of several ranks are killed in their saves, one rank at a time, and jobs of another plan go on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # As a script this knows its own folder only.

from tools.checkpoint.damage import cut_files, flip_bits
from tools.checkpoint.jobs import kill_jobs
from tools.checkpoint.pickles import plant_pickles
from tools.checkpoint.power import lose_power
from tools.checkpoint.subject import FileLayer, Share, Subject, Tally
from tools.checkpoint.writers import fail, kill, rival
from tools.report import Figure, conclude, make_parser

Section = Callable[[Subject, Path, Share], Tally]

SECTIONS: dict[str, Section] = {
    "kills": kill,
    "errors": fail,
    "power": lose_power,
    "rivals": rival,
    "flips": flip_bits,
    "files": cut_files,
    "pickles": plant_pickles,
    "jobs": kill_jobs,
}
SHARES = 10
NUM_SHOWN = 5
"""Lost cases of a section that are shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sections asked for; the exit status says whether nothing was lost."""
    options = parse(arguments)
    share = Share() if options.share is None else Share(options.share, SHARES)
    tallies, seconds = [], {}
    for name in options.only or SECTIONS:
        begin_s = time.monotonic()
        tallies.append(torture(name, share, options.folder))
        seconds[name] = time.monotonic() - begin_s
        print(format_tally(tallies[-1], seconds[name]), flush=True)
    lost = {tally.name: tally.lost for tally in tallies if tally.lost}
    return conclude(options.json, list_figures(tallies), lost=lost, seconds=seconds, share=options.share)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--share", type=int, metavar="N", help="every tenth case, beginning with the Nth")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are written; by default a temporary one"
    )
    return parser.parse_args(arguments)


def torture(name: str, share: Share, folder: Path | None = None, subject: Subject | None = None) -> Tally:
    """One section, in a temporary folder."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return SECTIONS[name](subject or FileLayer(), Path(scratch), share)


def format_tally(tally: Tally, seconds: float) -> str:
    lines = [f"{tally.name:10} {tally.tried:7} tried, {len(tally.lost)} lost, {seconds:.0f} s"]
    lines += [f"  {one}" for one in tally.lost[:NUM_SHOWN]]
    return "\n".join(lines)


def list_figures(tallies: Sequence[Tally]) -> list[Figure]:
    """Of flips how many were found, of the rest how many were lost."""
    figures = []
    for tally in tallies:
        figures.append(Figure(f"{tally.name}_tried", tally.tried))
        if tally.name == "flips":
            figures.append(Figure("flips_found", tally.found, tally.tried))
        else:
            figures.append(Figure(f"{tally.name}_lost", len(tally.lost), 0, at_most=True))
    return figures


if __name__ == "__main__":
    sys.exit(main())
