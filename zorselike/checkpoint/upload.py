"""Copies committed checkpoints to an object store, by fsspec: `s3://bucket/run`, `gs://...`, `file://...`."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from zorselike.checkpoint.layout import MANIFEST
from zorselike.checkpoint.read import read_manifest
from zorselike.errors import CheckpointError, describe_missing_package
from zorselike.text.wording import first_line

_TRY = b"whether a store keeps what it is given"


def upload(path: Path, url: str) -> bool:
    """Copies a step's folder under a URL, the manifest last: what has none there is no checkpoint.

    Where nodes have disks of their own, each copies the files it has, and the manifest follows with the last
    of them.

    Args:
        path: a step's folder.
        url: the folder of checkpoints there, in the words of fsspec.

    Returns:
        Whether it is complete there.

    Raises:
        CheckpointError: The store refuses something, or holds another checkpoint of this step.
    """
    manifest = read_manifest(path)
    target = f"{url.rstrip('/')}/{path.name}"
    doing = "opened"
    try:
        store, root = _open(target)
        content = (path / MANIFEST).read_bytes()
        doing = "looked at"
        if store.exists(f"{root}/{MANIFEST}"):
            if store.cat_file(f"{root}/{MANIFEST}") != content:
                raise CheckpointError(
                    f"{target}: holds another checkpoint of this step; upload to another place"
                )
            # Where others have files too, they may have taken one of an earlier attempt for this node's.
            if all((path / file.file).is_file() for file in manifest.files):
                return True
        is_complete = True
        for file in manifest.files:
            doing = f"given {file.file}"
            there = f"{root}/{file.file}"
            if (path / file.file).is_file():
                store.makedirs(there.rpartition("/")[0], exist_ok=True)
                store.put_file(str(path / file.file), there)
                size = store.info(there)["size"]
                if size != file.num_bytes:
                    raise CheckpointError(
                        f"{target}/{file.file}: has {size} bytes there, not {file.num_bytes}"
                    )
            else:
                is_complete &= store.exists(there) and store.info(there)["size"] == file.num_bytes
        if is_complete:
            doing = f"given {MANIFEST}"
            store.pipe_file(f"{root}/{MANIFEST}", content)
    except CheckpointError:
        raise
    except Exception as error:  # Each store has errors of its own.
        raise CheckpointError(f"{target}: could not be {doing}: {first_line(error)}") from None
    return is_complete


def check_target(url: str) -> None:
    """Raises `CheckpointError` unless something can be written under a URL and read back; leaves nothing."""
    name = f"{url.rstrip('/')}/zorselike-{uuid.uuid4().hex[:8]}.try"
    doing = "opened"
    try:
        store, path = _open(name)
        doing = "written to"
        store.makedirs(path.rpartition("/")[0], exist_ok=True)
        store.pipe_file(path, _TRY)
        doing = "read from"
        found = store.cat_file(path)
        doing = "deleted from"
        store.rm_file(path)
    except CheckpointError:
        raise
    except Exception as error:  # Each store has errors of its own.
        raise CheckpointError(f"{url}: cannot be {doing}: {first_line(error)}") from None
    if found != _TRY:
        raise CheckpointError(f"{url}: gives back other bytes than were written")


def _open(url: str) -> tuple[Any, str]:
    """The store and the path in it."""
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise CheckpointError(describe_missing_package(error, "uploading checkpoints")) from None
    store, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return store, root
