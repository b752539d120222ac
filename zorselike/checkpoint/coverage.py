"""Whether a checkpoint holds every tensor whole, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zorselike.checkpoint.layout import entry_name
from zorselike.checkpoint.manifest import Manifest, SliceRecord
from zorselike.errors import CheckpointError
from zorselike.plan.holdings import VALUE, Box, subtract


def refuse_gaps(manifest: Manifest) -> None:
    """Raises `CheckpointError` for the first of `find_gaps`."""
    for entry, fault in find_gaps(manifest):
        raise CheckpointError(f"{entry}: {fault}")


def find_gaps(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Tensors, as files call them, of which something is missing or there twice, and what."""
    for name, tensor in manifest.tensors.items():
        for kind in {VALUE: None} | dict.fromkeys(manifest.kinds_of(name)):
            records = [record for _, record in manifest.slices_of(name, kind)]
            shape = records[0].shape if records else tensor.shape
            fault = _find_gap(Box.whole(name, kind, shape), records)
            if fault is not None:
                yield entry_name(name, kind), fault


def _find_gap(whole: Box, records: Sequence[SliceRecord]) -> str | None:
    missing = [whole] if whole.num_elements else []
    for record in records:
        missing = [rest for part in missing for rest in subtract(part, record.box)]
    if missing:
        return f"nobody saved what is from {missing[0].starts} to {missing[0].stops}"
    if sum(record.box.num_elements for record in records) > whole.num_elements:
        return "some of it was saved twice"
    return None
