"""What a checkpoint holds, whole, to compare with another's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from zorselike.checkpoint.folder import find_newest
from zorselike.checkpoint.layout import DTYPE_BYTES
from zorselike.checkpoint.read import SlicesReader
from zorselike.plan.holdings import Box


def contents(folder: Path) -> tuple[dict[tuple[str, str], bytes], dict[str, Any]]:
    """All tensors whole, and what the manifest says beside them that no plan may change."""
    found, skipped = find_newest(folder)
    assert found is not None and not skipped
    manifest = found.manifest
    with closing(SlicesReader(found.path, manifest)) as reader:
        tensors = {}
        for name, tensor in manifest.tensors.items():
            for kind in manifest.kinds_of(name):
                whole = Box(name, kind, (0,) * len(tensor.shape), tensor.shape)
                (_, record), *_ = manifest.slices_of(name, kind)
                content = bytearray(whole.num_elements * DTYPE_BYTES[record.dtype])
                reader.read_box(whole, memoryview(content))
                tensors[name, kind] = bytes(content)
    optimizer = dict(manifest.optimizer or {})
    optimizer["of"] = {name: optimizer["options"][number] for name, number in optimizer["of"].items()}
    del optimizer["options"]
    others = [vars(manifest)[key] for key in ("step", "rows_seen", "seed", "tensors", "aliases", "extra")]
    schedule = [manifest.loss_scale, manifest.schedule and manifest.schedule["common"]]
    return tensors, {"optimizer": optimizer, "others": others, "schedule": schedule}
