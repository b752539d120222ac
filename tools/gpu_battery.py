"""The first minutes on a GPU: every open question in one sitting, on a machine with torch and numpy alone.

    python tools/gpu_battery.py A --out DIR           # is it right (9 minutes)
    python tools/gpu_battery.py B --out DIR           # is it fast and small (9)
    python tools/gpu_battery.py C --out DIR           # is it foretold (8)
    python tools/gpu_battery.py multi --out DIR       # several cards, one process each; also under torchrun
    python tools/gpu_battery.py A B C multi --device cpu   # small, to see that all of it runs

Writes DIR/A.json and DIR/A.txt, whole after every part. Each part is a process of its own with a limit, at
which all its threads say where they are before it is killed; what it had found is kept. First it names the
packages that the machine lacks and what each absence costs; a part that cannot run is skipped, and is
never counted as passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # As a script this knows its own folder only.

from tools.gpu.battery.letters import LETTERS, Letter
from tools.gpu.battery.packages import find_missing, format_missing, is_there
from tools.gpu.battery.page import SCHEMA, write_letter
from tools.gpu.battery.part import Part, Settings
from tools.gpu.battery.supervise import describe_skipped, run_part
from tools.report import describe_machine

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "THP_MEM_ALLOC_ENABLE": "1",
    "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
}
"""Of every part, where the caller has not said otherwise."""
_SHORTEST_S = 40.0
"""What a part gets at least, as long as there is time."""
_LEAST_S = 5.0
"""With less time left, no part is started."""
_CPU_SECONDS = 300.0
"""Of a letter on a CPU, where nothing is measured and the machine may be busy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no part failed and no target was missed."""
    options = parse(arguments)
    if options.list:
        for name, letter in LETTERS.items():
            print(f"{name}: {letter.question} ({letter.seconds / 60:.0f} minutes)")
            print("\n".join(f"  {part.name:12} {part.limit_s:4.0f} s  {part.what}" for part in letter.parts))
        return 0
    if not (is_first := os.environ.get("RANK", "0") == "0"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Under torchrun one process speaks.
    packages = format_missing(find_missing())
    print(packages, flush=True)
    environment = make_environment(options.device)
    print("\n".join(f"{name}={value}" for name, value in environment.items()), flush=True)
    if options.device == "cpu":
        _import_once(environment)
        import_module("torch._dynamo")  # FSDP2 imports it in every process that it first runs in.
    is_fine = True
    with tempfile.TemporaryDirectory(prefix="gpu-battery-") as work:
        # The others have their say in its parts.
        out = options.out if is_first else Path(work)
        out.mkdir(parents=True, exist_ok=True)
        for name in options.letters:
            settings = Settings(options.device, Path(work), out, environment)
            is_fine = run_letter(name, LETTERS[name], settings, options, out, packages) and is_fine
    return int(not is_fine)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("letters", nargs="*", metavar="A|B|C|multi", help="what to run, in this order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_battery"), metavar="DIR", help="of the results")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="for each letter (default 540, C 480); fewer shorten the limit of each of its parts alike",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts of these names")
    parser.add_argument("--list", action="store_true", help="name all parts and their limits")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.letters if name not in LETTERS]:
        parser.error(f"there is no {unknown[0]}; choose of {', '.join(LETTERS)}")
    if not options.letters and not options.list:
        parser.error(f"say what to run: {', '.join(LETTERS)}")
    known = {part.name for letter in LETTERS.values() for part in letter.parts}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only {unknown[0]}: there is no such part; --list names them")
    return options


def make_environment(device: str) -> dict[str, str]:
    """What parts run with: the caller's own values count."""
    own = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return own | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _import_once(environment: Mapping[str, str]) -> None:
    """Imports what parts do, so that those which follow begin at once. With a GPU one of them has imported it
    before: imports that fail or hang have been told of."""
    os.environ.update(environment)
    with contextlib.suppress(ImportError):
        import_module("tools.gpu.battery.foretold")


def run_letter(
    name: str, letter: Letter, settings: Settings, options: argparse.Namespace, out: Path, packages: str
) -> bool:
    """Runs the parts asked for; whether none failed and no target was missed."""
    begin_s = time.monotonic()
    seconds = options.seconds or (_CPU_SECONDS if options.device == "cpu" else letter.seconds)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "letter": name,
        "question": letter.question,
        "device": options.device,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": 0.0,
        "machine": describe_machine(),
        "environment": dict(settings.environment),
        "packages": packages,
        "missing": [package.wheel for package in find_missing()],
        "parts": [],
    }

    def write(*running: dict[str, Any]) -> None:
        content["seconds"] = round(time.monotonic() - begin_s, 1)
        write_letter(out, content | {"parts": [*content["parts"], *running]})

    print(f"\n{name}: {letter.question}", flush=True)
    for part in letter.parts:
        if options.only and part.name not in options.only:
            continue
        left_s = seconds - (time.monotonic() - begin_s)
        found = _run(part, settings, left_s, scale=seconds / letter.seconds, told=write)
        content["parts"].append(found)
        write()
        if found["status"] == "passed":
            _import_once(settings.environment)
        print(
            f"  {found['status']:9} {part.name:12} {found['seconds']:6.1f} s  {found['reason'][:150]}",
            flush=True,
        )
    print(f"  {out / name}.txt and .json", flush=True)
    wrong = [part for part in content["parts"] if part["status"] in ("failed", "timed out")]
    missed = [figure for part in content["parts"] for figure in part["figures"] if figure["met"] is False]
    for figure in missed:
        print(f"  missed: {figure['name']} {figure['value']:.3f}, not {figure['target_text']}", flush=True)
    return not wrong and not missed


def _run(part: Part, settings: Settings, left_s: float, *, scale: float, told: Any) -> dict[str, Any]:
    lacking = [module for module in part.needs if not is_there(module)]
    if lacking:
        return describe_skipped(part, f"this machine has no {' and no '.join(lacking)}")
    if left_s < _LEAST_S:
        return describe_skipped(part, "no time left")
    # A first import of torch from a slow disk takes a while.
    limit_s = left_s if settings.is_small else min(left_s, max(_SHORTEST_S, part.limit_s * scale))
    return run_part(part, settings, limit_s, told=told)


if __name__ == "__main__":
    raise SystemExit(main())
