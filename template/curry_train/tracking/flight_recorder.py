"""torch's flight recorder: the newest collectives of every rank, kept in the folder of a lost run.

torch holds the last TORCH_FR_BUFFER_SIZE collectives of a process in a ring, over gloo as over
NCCL. When a collective timed out or a peer went away, every rank that still lives writes its ring
and where its program stands to <run folder>/flight-recorder/rank-00000.json, and the rank that
reports compares them: who wrote nothing, and who had not come to the collective.

Point-to-point transfers over gloo are not in the ring (torch 2.11 to 2.13).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curry_train.parallel.mesh import Mesh

FOLDER = "flight-recorder"
# torch's own dump is a pickle in the folder for temporary files; ours is JSON in the run folder.
SETTINGS = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def switch_on(env: MutableMapping[str, str]) -> None:
    """Set what torch reads before its first collective; what the user has set stays."""
    for name, value in SETTINGS.items():
        env.setdefault(name, value)


def trace(device_type: str, *, only_state: bool = False) -> dict[str, Any]:
    """Return torch's record of this process; cheap with `only_state`, without the collectives."""
    from torch._C import _distributed_c10d as c10d

    names = ["_dump_fr_trace_json"]
    if device_type == "cuda":
        names.insert(0, "_dump_nccl_trace_json")
    dump = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), None)
    return {} if dump is None else json.loads(dump(includeCollectives=not only_state))


def write(folder: Path, mesh: Mesh, stack: Sequence[traceback.FrameSummary]) -> Path | None:
    """Write this rank's record into the run folder, whole or not at all; never raises."""
    path = _path(folder, mesh.rank)
    record = {
        "v": 1,
        "time": time.time(),
        "rank": mesh.rank,
        "host": socket.gethostname(),
        "stack": [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in stack],
    }
    try:
        record["trace"] = trace(mesh.device.type)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record) + "\n")
        os.replace(temporary, path)
    except (OSError, ValueError, RuntimeError):
        return None
    return path


def main_stack() -> traceback.StackSummary:
    """Return where the main thread stands."""
    frames = sys._current_frames()
    return traceback.extract_stack(frames[threading.main_thread().ident or 0])


def reported(folder: Path) -> bool:
    """Tell whether any rank of this attempt has written its record."""
    return (folder / FOLDER).is_dir()


def last_collective(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the oldest collective that did not end, or else the newest; None without a trace."""
    entries = record.get("trace", {}).get("entries", [])
    open_ones = [e for e in entries if not e["retired"] and e["state"] != "completed"]
    return min(open_ones or entries[-1:], key=lambda e: e["record_id"], default=None)


def explain(folder: Path, mesh: Mesh, *, wait: float, enough: Callable[[], bool]) -> str:
    """Compare this rank's record with those of its peers and say who was silent, in one line.

    Waits up to `wait` seconds for the records of the others, or until `enough()`.
    """
    mine = _read(folder, mesh.rank) or {}
    last = last_collective(mine)
    name, peers = _group(last, mesh)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline and not enough():
        if all(_path(folder, rank).exists() for rank in peers):
            break
        time.sleep(0.05)
    clauses = []
    if last is not None:
        what = f"{_op(last)} no. {last['collective_seq_id']} of group {name}"
        clauses.append(f"the last collective was {what} (ranks {_some(peers)})")
    silent = [rank for rank in peers if not _path(folder, rank).exists()]
    if silent:
        clauses.append(f"rank {_some(silent)} wrote no record (killed, stopped or cut off)")
    clauses += _elsewhere(folder, last, [rank for rank in peers if rank not in silent], deadline)
    if last is not None and len(clauses) == 1 and _waited(last):
        clauses.append("all of them had come to it, and nothing got through between them")
    return "; ".join(clauses)


def _elsewhere(
    folder: Path, last: dict[str, Any] | None, peers: Sequence[int], deadline: float
) -> list[str]:
    """Say of each peer that was not in the collective `last` where it was, while time remains."""
    found = []
    for rank in peers:
        record = _read(folder, rank) if time.monotonic() < deadline + 1.0 else None
        if record is None or last is None:
            continue
        where = record["stack"][-1] if record["stack"] else "an unknown place"
        of_group = [e for e in record["trace"].get("entries", []) if _same_group(e, last)]
        same = [e for e in of_group if e["collective_seq_id"] == last["collective_seq_id"]]
        newest = max((e["collective_seq_id"] for e in of_group), default=0)
        if newest < last["collective_seq_id"]:
            found.append(f"rank {rank} had not come to it but was at {where}")
        elif same and _op(same[0]) != _op(last):
            found.append(f"rank {rank} was in {_op(same[0])} instead, at {where}")
    return found


class Progress:
    """Sees a collective that does not end, for backends that do not raise (NCCL).

    NCCL's own watchdog ends a process without a word to Python; looking a little earlier leaves
    the time for a report.
    """

    def __init__(self, mesh: Mesh, limit: float) -> None:
        self.device, self.limit = mesh.device.type, limit
        self.state: Any = None
        self.since = time.monotonic()

    def stuck(self) -> bool:
        """Tell whether a collective is open for longer than the limit; costs microseconds."""
        state = trace(self.device, only_state=True).get("pg_status")
        if state != self.state:
            self.state, self.since = state, time.monotonic()
        if time.monotonic() - self.since < self.limit:
            return False
        self.since = time.monotonic()
        last = last_collective({"trace": trace(self.device)})
        if last is None or last["retired"] or last["state"] == "completed":
            return False
        return time.time() - last["time_created_ns"] / 1e9 >= self.limit


def _path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank:05d}.json"


def _read(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        return json.loads(_path(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _waited(entry: dict[str, Any]) -> bool:
    """Tell whether this collective used up its timeout; another transfer may have."""
    age = time.time() - entry["time_created_ns"] / 1e9
    return age >= 0.8 * entry["timeout_ms"] / 1000


def _op(entry: dict[str, Any]) -> str:
    return entry["profiling_name"].partition(":")[2] or entry["profiling_name"]


def _same_group(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    return entry["process_group"][0] == other["process_group"][0] and not entry["is_p2p"]


def _group(entry: dict[str, Any] | None, mesh: Mesh) -> tuple[str, list[int]]:
    """Return the name and the ranks of an entry's group; the world when there is no entry."""
    import torch.distributed as dist

    if entry is not None:
        for name, group in mesh.groups.items():
            if group is not None and group.group_name == entry["process_group"][0]:
                return name, dist.get_process_group_ranks(group)
    name = "unknown" if entry is None else entry["process_group"][1] or entry["process_group"][0]
    return name, list(range(mesh.world))


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
