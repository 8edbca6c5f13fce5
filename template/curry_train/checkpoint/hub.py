"""Where weights lie: a folder, the local cache, or the hub, in this order.

`python -m curry_train.checkpoint.hub NAME` prints the folder and downloads what the cache lacks.

What is cached is taken without asking anybody. The hub is asked once, with a time limit of our own:
the library's calls may retry for half a minute, and looking up a host name knows no limit at all.
Only safetensors, JSON and tokenizer files are ever fetched.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curry_train.checkpoint import MANIFEST, CheckpointError
from curry_train.checkpoint.fetch import (
    COMMIT,
    HubUnreachable,
    Listing,
    RemoteFile,
    download,
    in_words,
    stored_at,
    url_of,
    ways_out,
)
from curry_train.tracking.scrub import scrub

if TYPE_CHECKING:
    from curry_train.parallel.mesh import Mesh

PROBE_SECONDS = 3.0
HEARTBEAT_SECONDS = 5.0
"""Ranks that wait for rank 0's download hear of it this often, so that no collective times out."""
INDEX = "model.safetensors.index.json"
WEIGHTS = "model*.safetensors"
BESIDE = ("*.json", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_weights(
    name_or_folder: str | Path, *, revision: str | None = None, mesh: Mesh | None = None
) -> Path:
    """Return the folder of the named weights; all ranks of a mesh call together.

    name_or_folder: a folder, or OWNER/NAME of the hub. revision: branch, tag or commit there; None
    is main. Rank 0 alone looks and downloads, every rank gets its answer or its error.
    Group: world; one broadcast, more while rank 0 downloads.
    Raises: CheckpointError on every rank, within 5 seconds when the hub does not answer.
    """

    def find() -> Path:
        folder = Path(name_or_folder).expanduser()
        if folder.is_dir():
            if problems := missing_files(folder):
                raise CheckpointError(f"{folder}: {problem}" for problem in problems)
            return folder
        name = _hub_name(str(name_or_folder))
        cached = cached_folder(name, revision)
        problems = ["not in the cache"] if cached is None else missing_files(cached)
        if cached is not None and not problems:
            return cached
        folder = download(list_files(name, revision, found=problems))
        if problems := missing_files(folder):
            raise CheckpointError(f"{name} on the hub: {problem}" for problem in problems)
        return folder

    return _by_rank_zero(mesh, find)


def missing_files(folder: Path) -> list[str]:
    """Say what a folder of weights lacks, one sentence each; a checkpoint of ours lacks nothing."""
    if (folder / MANIFEST).is_file():
        return []
    problems = [] if (folder / "config.json").is_file() else ["config.json is absent"]
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except FileNotFoundError:
        shards = _numbered(present) or {"model.safetensors"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [*problems, f"{INDEX} cannot be read: {type(error).__name__}: {error}"]
    absent = sorted(map(str, shards - present))
    if absent:
        listed = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        problems.append(f"{len(absent)} of {len(shards)} weight files are absent: {listed}")
    return problems


def _numbered(present: Iterable[str]) -> set[str]:
    """Return all names of a series of which some are there, model-00001-of-00003.safetensors."""
    for name in present:
        if match := re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.safetensors", name):
            start, _, count = match.groups()
            return {f"{start}-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
    return set()


def _hub_name(text: str) -> str:
    if _NAME.fullmatch(text) is None or ".." in text:
        raise CheckpointError(
            f"{text} is no folder; give a folder with config.json and *.safetensors, or OWNER/NAME "
            "of the hub"
        )
    return text


def cached_folder(name: str, revision: str | None = None, *, kind: str = "model") -> Path | None:
    """Return the snapshot in the local cache, perhaps an incomplete one; None without any.

    kind: model or dataset. HF_HOME and HF_HUB_CACHE say where the cache is.
    """
    revision, stored = revision or "main", stored_at(name, kind)
    try:
        if COMMIT.fullmatch(revision) is None:
            revision = (stored / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    folder = stored / "snapshots" / revision
    return folder if folder.is_dir() else None


def list_files(name: str, revision: str | None = None, *, found: Iterable[str] = ()) -> Listing:
    """Ask the hub which files of a model we would fetch, small ones first; one request.

    found: what is wrong with the cached copy, for the error's text.
    Raises: HubUnreachable; CheckpointError for what the hub refuses and for models without
    safetensors.
    """
    _hub_name(name)

    def ask() -> Any:
        from huggingface_hub import HfApi, constants

        api = HfApi(endpoint=constants.ENDPOINT)
        return api.model_info(name, revision=revision, files_metadata=True, timeout=PROBE_SECONDS)

    info = _probe(name, ask, found)
    files = {
        entry.rfilename: RemoteFile(entry.rfilename, entry.size or 0, _etag(entry))
        for entry in info.siblings or ()
        if "/" not in entry.rfilename
    }
    if INDEX in files:
        files.pop("model.safetensors", None)
    beside = [n for n in files if any(fnmatch.fnmatch(n, pattern) for pattern in BESIDE)]
    weights = fnmatch.filter(files, WEIGHTS)
    if not weights:
        pickles = [n for n in files if n.endswith((".bin", ".pt", ".pth"))]
        hint = f" ({', '.join(pickles[:3])} are pickles, which are never read)" if pickles else ""
        raise CheckpointError(
            f"{name} on the hub has no {WEIGHTS}{hint}; name a model that is published as "
            "safetensors, or convert it and give the folder"
        )
    wanted = [files[n] for n in [*sorted(beside), *sorted(weights)]]
    return Listing(name, "model", revision or "main", info.sha, wanted)


def find_file(name: str, file: str, *, kind: str = "dataset") -> Listing | Path:
    """Return the path of one file of the cache, else what `download` needs to fetch it.

    Raises: CheckpointError, HubUnreachable.
    """
    cached = cached_folder(name, kind=kind)
    if cached is not None and (cached / file).is_file():
        return cached / file

    def ask() -> Any:
        from huggingface_hub import get_hf_file_metadata

        return get_hf_file_metadata(url_of(name, file, kind=kind), timeout=PROBE_SECONDS)

    told = _probe(name, ask, [f"{file} is not in the cache"])
    found = RemoteFile(file, told.size or 0, told.etag or "")
    return Listing(name, kind, "main", told.commit_hash, [found])


def _etag(entry: Any) -> str:
    return entry.lfs["sha256"] if entry.lfs else entry.blob_id or ""


def _probe(name: str, ask: Callable[[], Any], found: Iterable[str]) -> Any:
    """Ask the hub in a thread that may be left behind; its answer, or an error in plain words."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable(ways_out(name, found, "HF_HUB_OFFLINE is set: the hub is not asked"))
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if not answer:
        why = f"{scrub(constants.ENDPOINT)} gave no answer within {PROBE_SECONDS:.0f} s"
        raise HubUnreachable(ways_out(name, found, why))
    if isinstance(answer[0], Exception):
        raise in_words(name, answer[0], found) from None
    return answer[0]


def _by_rank_zero(mesh: Mesh | None, work: Callable[[], Path]) -> Path:
    """Do work on rank 0; every rank returns its path, which must be visible there, or raises."""
    group = None if mesh is None else mesh.group("world")
    if mesh is None or group is None:
        return work()
    import torch.distributed as dist

    root, result = dist.get_global_rank(group, 0), []

    def run() -> None:
        try:
            result.append((work(), []))
        except CheckpointError as error:
            result.append((None, error.problems))
        except Exception as error:
            result.append((None, [scrub(f"{type(error).__name__}: {error}")]))

    thread = threading.Thread(target=run, daemon=True)
    if mesh.rank == 0:
        thread.start()
    answer: list[Any] = [None]
    while answer[0] is None:
        if mesh.rank == 0:
            thread.join(HEARTBEAT_SECONDS)
            answer = [result[0] if result else None]
        dist.broadcast_object_list(answer, src=root, group=group)
    path, problems = answer[0]
    if problems:
        raise CheckpointError(problems)
    seen: list[Any] = [None] * mesh.world
    dist.all_gather_object(seen, path.is_dir(), group=group)
    if not all(seen):
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        raise CheckpointError(
            f"{path} is not visible to ranks {blind}: put the weights, or HF_HOME, on a disk that "
            "all nodes share"
        )
    return path


def main(argv: list[str]) -> int:
    """Print the folder of the named weights; 0 done, 1 not found or not to be had."""
    parser = argparse.ArgumentParser(
        prog="python -m curry_train.checkpoint.hub",
        description="Print the folder of published weights: a folder, else the local cache, else "
        "the hub, from which only safetensors, JSON and tokenizer files are fetched.",
    )
    parser.add_argument("name", metavar="NAME", help="OWNER/NAME of the hub, or a folder")
    parser.add_argument("--revision", help="branch, tag or commit (default main)")
    args = parser.parse_args(argv)
    try:
        print(find_weights(args.name, revision=args.revision))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same call continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
