"""Profiles and model sizes of Sailor (github.com/eth-easl/sailor): `profile.json`, `llm_info.json`.

A profile holds seconds by microbatch, tensor-parallel degree and pseudo-layer, `[forward, backward, update]`:
layer 0 the embedding, 1..L the blocks, L+1 the final norm and head; fp32. They were measured on a model of
embedding, two blocks and head (their docs/PROFILING.md and profile.sh): the second block stands for all
further ones, and `update` is one optimizer step of that whole small model, the same for every layer.
`llm_info` holds what one GPU has of each layer at each degree: parameters and activations of one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from zorselike.cost.profile import LayerTimes, Profile, Source, UpdateTime
from zorselike.errors import ProfileError
from zorselike.plan.workload import LayerKind, Workload

from ..data import read_object

DTYPE = "float32"
SEQUENCE_LENGTH = 2048
PROFILED_BLOCKS = (1, 2)
"""Blocks of the small model that was measured."""

DEVICES: Mapping[str, str] = {
    "A100-40": "A100-40",
    "A100-80": "A100-80",
    "GH-96": "GH200",
    "RTX-2080": "RTX2080Ti",
    "RTX-3090": "RTX3090",
    "Titan-RTX": "TitanRTX",
    "V100-16": "V100-16",
}
"""Their names of device types."""

_FIRST, _BLOCK, _EMBEDDING, _HEAD = "first layer", "layer", "embedding", "head"


@dataclass(frozen=True)
class LayerShape:
    """What one GPU of a tensor-parallel group has of a pseudo-layer."""

    num_parameters: int
    input_elements: int
    output_elements: int
    activation_bytes: int
    """Activations of one row, kept until its backward."""


Shapes = Mapping[int, tuple[LayerShape, ...]]
"""Shapes of all pseudo-layers by tensor-parallel degree."""


def kind_of(layer: int, num_layers: int) -> str:
    """The kind of a pseudo-layer; the first block was measured apart from the others."""
    if layer == 0:
        return _EMBEDDING
    if layer == num_layers - 1:
        return _HEAD
    return _FIRST if layer == 1 else _BLOCK


def module_of(layer: int, num_layers: int) -> str:
    """A module name for a pseudo-layer."""
    kind = kind_of(layer, num_layers)
    return kind if kind in (_EMBEDDING, _HEAD) else f"layers.{layer - 1}"


def read_shapes(path: Path, model: str) -> Shapes:
    """The sizes of a model's pseudo-layers; raises `ProfileError` naming what `llm_info.json` lacks."""
    found = read_object(path)
    if model not in found:
        raise ProfileError(f"{path}: no model {model}; it has {', '.join(sorted(found))}")
    try:
        return {
            int(degree): tuple(_read_shape(layers[str(i)]) for i in range(len(layers)))
            for degree, layers in found[model].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"{path}: {model}: layers must be 0, 1, 2, ... with all sizes ({error!r})"
        ) from None


def _read_shape(entry: Mapping[str, Any]) -> LayerShape:
    return LayerShape(
        num_parameters=int(entry["params_floats"]),
        input_elements=int(entry["act_input_floats"]),
        output_elements=int(entry["act_output_floats"]),
        activation_bytes=int(entry["act_mem_bytes"]),
    )


def read_workload(path: Path, model: str, tensor_parallel: int) -> Workload:
    """What one GPU computes of a model at a tensor-parallel degree, by pseudo-layers.

    A block's FLOPs are two for each parameter and token, and its share of attention's.

    Raises:
        ProfileError: The file lacks the model or the degree.
    """
    shapes = read_shapes(path, model)
    if tensor_parallel not in shapes:
        raise ProfileError(
            f"{path}: {model} has no tensor parallelism {tensor_parallel}, only "
            f"{', '.join(map(str, sorted(shapes)))}"
        )
    own = shapes[tensor_parallel]
    names = [kind_of(i, len(own)) for i in range(len(own))]
    return Workload(
        model=model,
        sequence_length=SEQUENCE_LENGTH,
        dtype=DTYPE,
        layers=tuple((module_of(i, len(own)), name) for i, name in enumerate(names)),
        kinds={
            name: _make_kind(name, own[names.index(name)], tensor_parallel) for name in dict.fromkeys(names)
        },
    )


def _make_kind(name: str, shape: LayerShape, tensor_parallel: int) -> LayerKind:
    attention = 4 * SEQUENCE_LENGTH * shape.output_elements // tensor_parallel
    forward = {_EMBEDDING: 0, _HEAD: 2 * shape.num_parameters * SEQUENCE_LENGTH}.get(
        name, 2 * shape.num_parameters * SEQUENCE_LENGTH + attention
    )
    return LayerKind(
        name=name,
        num_parameters=shape.num_parameters,
        forward_flops_per_row=float(forward),
        # Their input counts the attention mask beside the activations.
        input_elements_per_row=shape.output_elements if name in (_FIRST, _BLOCK) else shape.input_elements,
        output_elements_per_row=shape.output_elements,
        activation_bytes_per_row=shape.activation_bytes,
    )


def read_profile(
    path: Path, model: str, gpu: str, shapes: Shapes, other_table: Path | None = None
) -> Profile:
    """The times of one model on one type of GPU at every tensor-parallel degree.

    Args:
        path: a `profile.json`.
        model: the workload's model.
        gpu: Sailor's name of the device type.
        shapes: of the model, against which the number of layers is checked, and by whose parameters the
            update is put in proportion.
        other_table: of all models, of which this one is taken where the profile is another model's: that of
            GPT-Neo-2.7 on GH-96 has the 26 layers of OPT-350M, and its runs had 34.

    Raises:
        ProfileError: A GPU that is not known, a layer that lacks times, a profile with another number of
            layers than the model.
    """
    if gpu not in DEVICES:
        raise ProfileError(f"{path}: GPU {gpu} is not known; known are {', '.join(sorted(DEVICES))}")
    num_layers = len(next(iter(shapes.values())))
    times = read_object(path)
    if other_table is not None and not _has_layers(times, num_layers):
        others = read_object(other_table).get(model, {}).get(gpu)
        if others is not None:
            path, times = other_table, others
    tables = _read_tables(times, path, num_layers)
    source = Source("measured", note=f"profile of {model} on {gpu} of Sailor's authors")
    layers = tuple(
        times
        for degree, table in sorted(tables.items())
        for times in _read_degree(table, num_layers, gpu, degree, source)
    )
    return Profile(model=model, layers=layers, updates=(_fit_update(tables, shapes, gpu, source),))


_Table = dict[int, dict[str, list[float]]]
"""Times of one degree by rows and pseudo-layer, `[forward, backward, update]`."""


def _has_layers(times: Mapping[str, Mapping[str, Any]], num_layers: int) -> bool:
    return all(len(layers) == num_layers for by_degree in times.values() for layers in by_degree.values())


def _read_tables(times: Mapping[str, Mapping[str, Any]], path: Path, num_layers: int) -> dict[int, _Table]:
    """Tables by tensor-parallel degree, rows rising; `path`: where they are from."""
    tables: dict[int, _Table] = {}
    for rows, by_degree in sorted(times.items(), key=lambda item: int(item[0])):
        for degree, layers in by_degree.items():
            if len(layers) != num_layers:
                raise ProfileError(
                    f"{path}: {len(layers)} layers at {rows} rows, tensor parallelism {degree}; "
                    f"the model has {num_layers}: a profile of another model"
                )
            missing = [str(i) for i in range(num_layers) if len(layers.get(str(i), ())) != 3]
            if missing:
                raise ProfileError(f"{path}: no three times of layer {missing[0]} at {rows} rows")
            tables.setdefault(int(degree), {})[int(rows)] = layers
    return tables


def _read_degree(table: _Table, num_layers: int, gpu: str, degree: int, source: Source) -> list[LayerTimes]:
    """One entry a kind; the first layer of a kind stands for all, which have its times."""
    first_of = {kind_of(i, num_layers): str(i) for i in reversed(range(num_layers))}
    return [
        LayerTimes(
            kind=kind,
            device=DEVICES[gpu],
            dtype=DTYPE,
            sequence_length=SEQUENCE_LENGTH,
            tensor_parallel=degree,
            rows=tuple(table),
            forward_s=tuple(layers[layer][0] for layers in table.values()),
            backward_s=tuple(layers[layer][1] for layers in table.values()),
            source=source,
        )
        for kind, layer in sorted(first_of.items())
    ]


def _fit_update(tables: Mapping[int, _Table], shapes: Shapes, gpu: str, source: Source) -> UpdateTime:
    """Seconds a call and a parameter, by a line through the degrees: each updates another number of
    parameters of the small model."""
    points = []
    for degree, table in sorted(tables.items()):
        if degree in shapes:
            own = shapes[degree]
            profiled = sum(own[i].num_parameters for i in (0, *PROFILED_BLOCKS, len(own) - 1))
            points.append((profiled, median(layers["0"][2] for layers in table.values())))
    if not points:
        raise ProfileError(f"{gpu}: no degree of the profile is among the model's sizes")
    slope, intercept = 0.0, 0.0
    if len({number for number, _ in points}) > 1:
        slope, intercept = linear_regression(*zip(*points, strict=True))
    if slope <= 0 or intercept < 0:
        slope, intercept = max(seconds / number for number, seconds in points), 0.0
    return UpdateTime(
        device=DEVICES[gpu],
        dtype=DTYPE,
        seconds_per_parameter=slope,
        seconds_per_call=intercept,
        source=source,
    )
