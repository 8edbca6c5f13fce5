"""Make, commit and prune step folders so that a kill at any moment leaves only whole ones.

Everything happens under a temporary name and becomes visible, or stops being visible, by one
rename. Imports no torch. Rank 0 alone calls these functions.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curry_train.checkpoint import (
    MANIFEST,
    CheckpointError,
    complete_checkpoints,
    is_complete,
    manifest_sha256,
    read_manifest,
)

_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{6}")
_STALE_SECONDS = 3600.0
"""Age at which a temporary folder made on another host counts as left behind."""


def claim(final: Path, samples_consumed: int) -> Path | None:
    """Make the temporary folder of a save; None when this very state is already saved.

    Resume is exact, so step and data position decide the state: a complete checkpoint of both is
    kept as it is. At another position it belongs to another history and the save is refused. A
    folder of that name that is not complete is moved aside to step-XXXXXXXX.incomplete-<hex>.

    Raises: CheckpointError when the step is saved at another data position.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(final.parent)
    if is_complete(final):
        saved = read_manifest(final)["samples_consumed"]
        if saved == samples_consumed:
            return None
        raise CheckpointError(
            f"{final} already holds this step at samples_consumed={saved}, now it is "
            f"{samples_consumed}: another history. Checkpoints are never overwritten; start a new "
            "run from the checkpoint you want (run.resume=CHECKPOINT)"
        )
    if final.exists():
        os.replace(final, final.with_name(f"{final.name}.incomplete-{secrets.token_hex(3)}"))
    temporary = _temporary_sibling(final)
    temporary.mkdir()
    return temporary


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, flush it, give the folder its name and point `latest` to it.

    Once the folder has its name the checkpoint stands: a pointer that cannot be moved is a warning.
    Raises: CheckpointError when the disk refuses before that.
    """
    content = {**manifest, "sha256": manifest_sha256(dict(manifest))}
    try:
        _write_synced(temporary / MANIFEST, json.dumps(content) + "\n")
        _sync_folder(temporary)
        os.replace(temporary, final)
    except OSError as error:
        raise CheckpointError(
            f"{final} cannot be written: {error.strerror}; older checkpoints stay valid. Free disk "
            "space or lower run.keep"
        ) from error
    try:
        pointer = final.parent / f"latest.tmp-{secrets.token_hex(3)}"
        _write_synced(pointer, final.name + "\n")
        os.replace(pointer, final.parent / "latest")
        _sync_folder(final.parent)
    except OSError as error:
        warnings.warn(f"{final.parent / 'latest'} could not be moved: {error}", stacklevel=2)


def prune(root: Path, keep: int, newest: Path) -> None:
    """Remove all but the `keep` newest complete checkpoints; never `newest`, nothing at keep=0.

    The rename comes first: a kill during removal leaves a temporary folder, not half a
    checkpoint under a valid name. A folder that cannot be removed stays, with a warning.
    """
    if keep == 0:
        return
    kept = [newest]
    for folder in complete_checkpoints(root):
        if folder == newest:
            continue
        if len(kept) < keep:
            kept.append(folder)
            continue
        doomed = _temporary_sibling(folder)
        try:
            os.replace(folder, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"{folder} could not be pruned: {error}", stacklevel=2)


def remove_stale(root: Path) -> None:
    """Remove temporary folders that no living process will finish."""
    for folder in root.glob("step-*.tmp-*"):
        match = _TEMPORARY.fullmatch(folder.name)
        if match and _is_abandoned(folder, match["host"], int(match["pid"])):
            shutil.rmtree(folder, ignore_errors=True)
    for pointer in root.glob("latest.tmp-*"):
        pointer.unlink(missing_ok=True)


def _is_abandoned(folder: Path, host: str, pid: int) -> bool:
    if host == _host():
        if pid == os.getpid():
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False
    try:
        return time.time() - folder.stat().st_mtime > _STALE_SECONDS
    except OSError:
        return False


def _temporary_sibling(final: Path) -> Path:
    return final.with_name(f"{final.name}.tmp-{_host()}-{os.getpid()}-{secrets.token_hex(3)}")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
