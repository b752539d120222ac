"""A library of Sailor's files made up of round numbers: five layers, two types of GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.papers.sailor.library import Library

NUM_LAYERS = 5
"""Embedding, three blocks, head; the head gives four times as much."""
ELEMENTS, PARAMETERS, ACTIVATION = 250_000, 50_000_000, 10**8
SECONDS = {"A100-40": 0.03, "V100-16": 0.09}
"""Of a layer and row, forward and backward."""
NEAR, FAR = 1.0, 0.5
"""GB/s in a zone and between two, at every size."""
EGRESS = 0.01


def write_library(folder: Path, zones: Sequence[str]) -> Library:
    root = folder / "sailor"
    write(root / "llm_info.json", {"Tiny": {str(t): shapes(t) for t in (1, 2)}})
    for gpu, seconds in SECONDS.items():
        times = {
            str(rows): {
                str(t): {
                    str(i): [seconds * rows / t / 3, seconds * rows / t * 2 / 3, 0.01 * (i + 1)]
                    for i in range(NUM_LAYERS)
                }
                for t in (1, 2)
            }
            for rows in (1, 2)
        }
        write(root / "profiles" / "Tiny" / gpu / "profile.json", times)
    write(
        root / "providers" / "multizone_bandwidths_het.json",
        {
            zone: {
                gpu: {str(n): {other: fits(zone == other) for other in zones} for n in (1, 2)}
                for gpu in SECONDS
            }
            for zone in zones
        },
    )
    prices = {zone: {other: EGRESS * (zone != other) for other in zones} for zone in zones}
    write(root / "providers" / "communication_cost.json", prices)
    return Library(folder)


def shapes(degree: int) -> dict[str, dict[str, int]]:
    return {
        str(i): {
            "params_floats": PARAMETERS // degree,
            "act_input_floats": ELEMENTS,
            "act_output_floats": ELEMENTS * (4 if i == NUM_LAYERS - 1 else 1),
            "act_mem_bytes": ACTIVATION // degree,
        }
        for i in range(NUM_LAYERS)
    }


def fits(is_near: bool) -> dict[str, dict[str, list[object]]]:
    rate = NEAR if is_near else FAR
    return {gpu: {str(n): [[0.0, 0.0, rate * n], rate * n * 1e9] for n in (1, 2)} for gpu in SECONDS}


def write(path: Path, found: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")
