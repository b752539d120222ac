"""Layer times and model sizes of Zorse's authors (github.com/benson-guo/zorse, `model_latencies.json`).

Milliseconds of one transformer layer by model, GPU, sequence length and dtype:
`[[forward slope, intercept], [backward slope, intercept], [forward of 1..k rows], [backward of 1..k rows]]`,
backward without recomputation. Some entries have only the two fits; a bare number, or a fit alone without
its backward, says too little and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zorselike.cost.profile import LayerTimes, Profile, Source
from zorselike.errors import ProfileError
from zorselike.plan.workload import LayerKind, Workload

from ..data import ZORSE, read_object
from .paper import TABLES

TIMES_FILE = "model_latencies.json"
STATS_FILE = "model_stats.json"
PREFIX = "deepspeedllama_"
VOCABULARY = 49152
"""What the authors' totals of parameters come to, and what their example of a planner's input says."""

DEVICES: Mapping[str, str] = TABLES["device_of"]
"""Their names of device types that we know."""
SUSPECT_SEQUENCE, SUSPECT_ROWS = 4096, 2
SUSPECT_MS: Mapping[str, Mapping[str, Sequence[float]]] = TABLES["suspect_ms"]
"""Forward and backward by GPU and model that look typed in by hand; below 0: not suspect."""

FIT_ROWS = (4, 8, 16)
"""Where an entry has only its linear fit, the fit at these rows stands for it: small ones can be negative."""


def find_folder(data: Path) -> Path:
    """The folder with both files of Zorse's authors; raises `ProfileError` if there is none."""
    ZORSE.find(data, STATS_FILE)
    return ZORSE.find(data, TIMES_FILE).parent


def read_profile(folder: Path, model: str, sequence_length: int, *, dtype: str = "float16") -> Profile:
    """The authors' times of one model's layer at one sequence length, on every device that has them.

    Args:
        folder: holds `model_latencies.json`.
        model: `7b`, `13b`, `33b`, `65b`.

    Raises:
        ProfileError: The file lacks the model, or has no times of it at that length and dtype.
    """
    path = folder / TIMES_FILE
    by_gpu = _of_model(read_object(path), path, model)
    layers = []
    for gpu, by_sequence in sorted(by_gpu.items()):
        entry = by_sequence.get(str(sequence_length), {}) if isinstance(by_sequence, dict) else {}
        if gpu in DEVICES and isinstance(entry, dict) and dtype in entry:
            times = _read_entry(entry[dtype], model, gpu, sequence_length, dtype)
            layers += [] if times is None else [times]
    if not layers:
        raise ProfileError(f"{path}: no {dtype} times of {PREFIX}{model} at {sequence_length} tokens")
    return Profile(model=spell_model(model), layers=tuple(layers))


def read_workload(folder: Path, model: str, sequence_length: int, *, dtype: str = "float16") -> Workload:
    """A Llama of the authors' sizes, with embedding and head of their vocabulary.

    A layer's FLOPs are two for each of its parameters and token, and of its attention
    4 x sequence^2 x hidden size; recomputed, it keeps its input.

    Raises:
        ProfileError: The file lacks the model or one of its sizes.
    """
    path = folder / STATS_FILE
    stats = _of_model(read_object(path), path, model)
    try:
        hidden, num_layers = int(stats["hidden_size"]), int(stats["num_layers"])
        num_parameters = int(stats["parameters_per_layer"])
    except KeyError as error:
        raise ProfileError(f"{path}: {PREFIX}{model} has no {error}") from None
    return make_workload(
        spell_model(model),
        hidden=hidden,
        num_layers=num_layers,
        num_parameters=num_parameters,
        sequence_length=sequence_length,
        dtype=dtype,
    )


def make_workload(
    name: str,
    *,
    hidden: int,
    num_layers: int,
    num_parameters: int,
    sequence_length: int,
    dtype: str,
    vocabulary: int = VOCABULARY,
) -> Workload:
    """A workload of `num_layers` equal layers of `num_parameters` between embedding, norm and head."""
    itemsize = 4 if dtype == "float32" else 2
    elements = sequence_length * hidden
    table = vocabulary * hidden
    logits = sequence_length * vocabulary
    attention = 4 * sequence_length**2 * hidden
    kinds = {
        "embedding": LayerKind(
            name="embedding",
            num_parameters=table,
            forward_flops_per_row=0.0,
            output_elements_per_row=elements,
        ),
        "layer": LayerKind(
            name="layer",
            num_parameters=num_parameters,
            forward_flops_per_row=2.0 * num_parameters * sequence_length + attention,
            input_elements_per_row=elements,
            output_elements_per_row=elements,
            activation_bytes_per_row=LAYER_ACTIVATIONS * elements * itemsize,
        ),
        "norm": LayerKind(
            name="norm",
            num_parameters=hidden,
            forward_flops_per_row=0.0,
            input_elements_per_row=elements,
            output_elements_per_row=elements,
        ),
        "head": LayerKind(
            name="head",
            num_parameters=table,
            forward_flops_per_row=2.0 * table * sequence_length,
            input_elements_per_row=elements,
            output_elements_per_row=logits,
            activation_bytes_per_row=elements * itemsize,
            # Logits in half precision, and in fp32 with their gradient for the loss.
            working_bytes_per_row=logits * (itemsize + 8),
        ),
    }
    layers = [("embedding", "embedding"), *((f"layers.{i}", "layer") for i in range(num_layers))]
    return Workload(
        model=name,
        sequence_length=sequence_length,
        dtype=dtype,
        layers=(*layers, ("norm", "norm"), ("head", "head")),
        kinds=kinds,
    )


LAYER_ACTIVATIONS = 17
"""What a Llama layer keeps between forward and backward, in units of its input, with fused attention:
inputs of two norms and of four products of attention (6), attention's output and keys (3), gate, up and
their product at 8/3 of the hidden size (8)."""


def spell_model(model: str) -> str:
    return f"llama {model}"


def _of_model(found: Mapping[str, Any], path: Path, model: str) -> dict[str, Any]:
    entry = found.get(PREFIX + model)
    if not isinstance(entry, dict):
        known = sorted(name[len(PREFIX) :] for name in found if name.startswith(PREFIX))
        raise ProfileError(f"{path}: no {PREFIX}{model}; it has {', '.join(known) or 'no such models'}")
    return entry


def _read_entry(entry: Any, model: str, gpu: str, sequence_length: int, dtype: str) -> LayerTimes | None:
    """Seconds by rows; None for an entry that says too little."""
    lists = [part for part in entry if _is_numbers(part)] if isinstance(entry, list) else []
    if len(lists) == 4:
        pairs = dict(enumerate(zip(lists[2], lists[3], strict=False), start=1))
        source = Source("measured", note=f"{TIMES_FILE} of Zorse's authors")
        if sequence_length == SUSPECT_SEQUENCE and _is_suspect(pairs, model, gpu):
            del pairs[SUSPECT_ROWS]
            source = Source(
                "measured", note=f"{source.note}, without the suspect value at {SUSPECT_ROWS} rows"
            )
    elif len(lists) == 2 and all(len(part) == 2 for part in lists):
        forward, backward = lists
        pairs = {rows: (_on_line(forward, rows), _on_line(backward, rows)) for rows in FIT_ROWS}
        source = Source("interpolated", note=f"linear fit in {TIMES_FILE} of Zorse's authors")
    else:
        return None
    pairs = {rows: pair for rows, pair in pairs.items() if min(pair) > 0}
    if not pairs:
        return None
    return LayerTimes(
        kind="layer",
        device=DEVICES[gpu],
        dtype=dtype,
        sequence_length=sequence_length,
        rows=tuple(pairs),
        forward_s=tuple(forward_ms / 1e3 for forward_ms, _ in pairs.values()),
        backward_s=tuple(backward_ms / 1e3 for _, backward_ms in pairs.values()),
        source=source,
    )


def _is_numbers(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(x, int | float) and math.isfinite(x) for x in part)


def _on_line(fit: Sequence[float], rows: int) -> float:
    return fit[0] * rows + fit[1]


def _is_suspect(pairs: Mapping[int, tuple[float, float]], model: str, gpu: str) -> bool:
    """Whether the point at two rows holds one of the values that look typed in."""
    known = SUSPECT_MS.get(gpu, {}).get(model, ())
    return SUSPECT_ROWS in pairs and any(a == b for a, b in zip(known, pairs[SUSPECT_ROWS], strict=False))
