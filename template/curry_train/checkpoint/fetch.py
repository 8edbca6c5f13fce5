"""Bring files of the hub into the local cache, in the layout of the hub's own library.

    models--OWNER--NAME/
      blobs/<etag>            a file's bytes; <etag>.incomplete while they arrive
      refs/main               the commit that the name stands for
      snapshots/<commit>/     links to the blobs under the files' own names

The library begins a broken file anew at the next call; here a half-fetched blob is continued, and
every file is compared with its size and hash before it gets its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from curry_train.checkpoint import CheckpointError
from curry_train.tracking.scrub import scrub

SILENCE_SECONDS, ATTEMPTS = 20.0, 3
"""A download that brings nothing for so long is begun again, so many times in a row at most."""
CHUNK_BYTES, PROGRESS_SECONDS = 2**22, 10.0
COMMIT = re.compile("[0-9a-f]{40}")


class HubUnreachable(CheckpointError):
    """The hub gave no answer, or must not be asked."""


class RemoteFile(NamedTuple):
    """A file of the hub: its path there, its bytes, and its etag.

    etag: 64 digits are the sha256 of the file, 40 the sha1 of the git blob.
    """

    name: str
    bytes: int
    etag: str


class Listing(NamedTuple):
    """What one commit of the hub holds for us. kind: model or dataset."""

    name: str
    kind: str
    revision: str
    commit: str
    files: list[RemoteFile]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


def stored_at(name: str, kind: str) -> Path:
    """Return where the hub's library keeps a repository: blobs/, refs/, snapshots/."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"{kind}s--{name.replace('/', '--')}"


def url_of(name: str, file: str, *, kind: str, revision: str = "main") -> str:
    """Return the address of a file's bytes."""
    from huggingface_hub import constants

    place = f"{'' if kind == 'model' else kind + 's/'}{name}/resolve/{quote(revision, safe='')}"
    return f"{constants.ENDPOINT}/{place}/{quote(file)}"


def download(listing: Listing) -> Path:
    """Fetch what the cache lacks and return the snapshot's folder, in the library's own layout.

    Raises: CheckpointError, HubUnreachable; the same call continues.
    """
    stored = stored_at(listing.name, listing.kind)
    folder = stored / "snapshots" / listing.commit
    missing = [file for file in listing.files if not (folder / file.name).is_file()]
    _check_room(listing.name, stored, sum(file.bytes for file in missing))
    try:
        for number, file in enumerate(missing, start=1):
            blob = stored / "blobs" / (file.etag or hashlib.sha256(file.name.encode()).hexdigest())
            if not blob.is_file():
                where = f"file {number} of {len(missing)}"
                _fetch(listing, file, blob, f"{listing.name}/{file.name} ({where})")
            pointer = folder / file.name
            pointer.parent.mkdir(parents=True, exist_ok=True)
            pointer.unlink(missing_ok=True)
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        if COMMIT.fullmatch(listing.revision) is None:
            reference = stored / "refs" / listing.revision
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(listing.commit, encoding="utf-8")
    except OSError as error:
        raise in_words(listing.name, error) from None
    return folder


def _fetch(listing: Listing, file: RemoteFile, blob: Path, told: str) -> None:
    """Bring one file to `blob`; tries again as long as bytes arrive, then leaves what it has."""
    url = url_of(listing.name, file.name, kind=listing.kind, revision=listing.commit)
    partial = blob.with_name(f"{blob.name}.incomplete")
    blob.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # a second process waits, then finds the blob
        if blob.is_file():
            partial.unlink(missing_ok=True)
            return
        in_vain = 0
        while stream.tell() < file.bytes or not file.bytes:
            begin = stream.tell()
            try:
                _receive(url, stream, file.bytes, told)
                break
            except Exception as error:
                in_vain = 0 if stream.tell() > begin else in_vain + 1
                status = getattr(getattr(error, "response", None), "status_code", 500)
                if in_vain < ATTEMPTS and status >= 500:
                    time.sleep(1.0)
                    continue
                refusal = in_words(listing.name, error)
                so_far = f"{readable(stream.tell())} of {readable(file.bytes)}"
                kept = f"{told} broke off at {so_far}; that is kept, the same call continues"
                raise type(refusal)([kept, *refusal.problems]) from None
        stream.flush()
        os.fsync(stream.fileno())
        if problem := _damage(partial, file):
            partial.unlink()
            raise CheckpointError(
                f"{told} {problem}; it was removed, the same call fetches it anew"
            )
        os.replace(partial, blob)


def _receive(url: str, stream: Any, total: int, told: str) -> None:
    """Append what is missing of a file to the stream; progress goes to stderr."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    begin, shown = stream.tell(), time.monotonic()
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={begin}-"} if begin else {}
    whole = readable(total)
    print(f"fetching {told}: {readable(begin)} of {whole}", file=sys.stderr, flush=True)
    with get_session().stream("GET", url, headers=headers, timeout=SILENCE_SECONDS) as response:
        hf_raise_for_status(response)
        if begin and response.status_code != 206:  # the whole file comes again
            stream.truncate(0)
            stream.seek(0)
        for chunk in response.iter_bytes():
            stream.write(chunk)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                print(
                    f"  {readable(stream.tell())} of {readable(total)}", file=sys.stderr, flush=True
                )


def _check_room(name: str, place: Path, wanted: int) -> None:
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if wanted > free:
        raise CheckpointError(
            f"{name} needs {readable(wanted)}, {place} has {readable(free)} free; set HF_HOME to a "
            "larger disk"
        )


def _damage(path: Path, file: RemoteFile) -> str | None:
    """Compare a whole file with what the hub says of it; None when all is well."""
    size = path.stat().st_size
    if file.bytes and size != file.bytes:
        return f"has {size} bytes here, {file.bytes} on the hub"
    if len(file.etag) not in (40, 64):
        return None
    if len(file.etag) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return None if digest.hexdigest() == file.etag else "does not have the hash that the hub names"


def readable(count: float) -> str:
    """Write bytes in the unit that people read."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def in_words(name: str, error: Exception, found: Iterable[str] = ()) -> CheckpointError:
    """Say what an error of the hub's library means and what to do; never shows a token."""
    from huggingface_hub import constants, errors

    endpoint = scrub(constants.ENDPOINT)
    login = "log in with `hf auth login` or set HF_TOKEN"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        text = f"{name} is gated: accept its terms at {endpoint}/{name}, then {login}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{name} is on the hub and has no such revision; leave it out for main"
    elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        text = f"{endpoint} answers {status or 404} for {name}: there is no such name, or it is "
        text += f"private; check the spelling, or {login}. No folder of this name is here either"
    elif isinstance(error, errors.HFValidationError):
        text = f"{name} is no name of the hub: {error}; give a folder or OWNER/NAME"
    elif isinstance(error, OSError) and error.errno is not None:
        text = f"{error.filename or 'the cache'} cannot be written: {error.strerror}; set HF_HOME"
    else:
        first = (str(error).splitlines() or [""])[0]
        why = f"answered {status}" if status else f"cannot be reached ({type(error).__name__}"
        why += "" if status else f": {first})" if first else ")"
        return HubUnreachable(scrub(ways_out(name, found, f"{endpoint} {why}")))
    return CheckpointError(scrub(text))


def ways_out(name: str, found: Iterable[str], why: str) -> str:
    from huggingface_hub import constants

    state = "; ".join(found) or "not in the cache"
    return (
        f"{name}: {state} ({constants.HF_HUB_CACHE}), and {why}. Three ways out:\n"
        "  give a folder that holds config.json and *.safetensors, copied from elsewhere\n"
        "  set HF_HOME to a folder whose hub/ has it, such as a shared one\n"
        "  fill the cache where there is network, such as a login node: HF_HOME=SHARED python -m "
        f"curry_train.checkpoint.hub {name}"
    )
