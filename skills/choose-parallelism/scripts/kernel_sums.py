"""Sums of a profiler's chrome trace: products, attention, messages by kind, the rest, idle time.

Reads what torch.profiler exports, plain or gzipped. With GPU kernels in it those are summed, else
the time that CPU operators spend outside of others.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

from kit.errors import UsageError

KINDS = [
    ("all-gather", r"all_?gather"),
    ("reduce-scatter", r"reduce_?scatter"),
    ("all-reduce", r"all_?reduce"),
    ("all-to-all", r"all_?to_?all"),
    ("send-receive", r"send_?recv|nccl.*(send|recv)|gloo.*(send|recv)"),
    ("other messages", r"nccl|gloo|c10d::|nvshmem|deep_?ep"),
    ("attention", r"flash|fmha|attention|sdpa"),
    (
        "products",
        r"gemm|cutlass|cublas|wgmma|matmul|grouped_mm|gmm|\b(add|b|badd)?mm\b|nvjet|linear",
    ),
]
MESSAGES = {kind for kind, _ in KINDS[:6]}
WANTED = "--trace takes what torch.profiler's export_chrome_trace wrote"


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator by its name."""
    return next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), "rest")


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the complete events of a trace: name, cat, ts and dur in microseconds."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        trace = json.loads(data)
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror or error}", WANTED) from None
    except (ValueError, EOFError):
        raise UsageError(f"--trace {path} is no JSON", WANTED) from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise UsageError(f"--trace {path} has no traceEvents", WANTED)
    return [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and _timed(e)]


def _timed(event: dict[str, Any]) -> bool:
    numbers = (event.get("ts"), event.get("dur"))
    return all(isinstance(n, (int, float)) for n in numbers) and event["dur"] >= 0


def sums(path: Path) -> dict[str, Any]:
    """Return seconds: window, idle, exposed (messages that nothing covers), and of each kind.

    The window goes from the first to the last kernel; kernels of streams that run at once are
    each counted in full, so that kinds may add up to more than the window.
    """
    events = read_events(path)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    spans = [(e["ts"], e["ts"] + e["dur"], kind_of(str(e.get("name")))) for e in kernels]
    device = "gpu"
    if not spans:
        device, spans = "cpu", _own_time([e for e in events if e.get("cat") == "cpu_op"])
    if not spans:
        raise UsageError(
            f"--trace {path} has no kernel and no operator",
            WANTED,
            "record a step with ProfilerActivity.CUDA (or CPU) and export it again",
        )
    start, end = min(s for s, _, _ in spans), max(e for _, e, _ in spans)
    kinds: dict[str, float] = {}
    for first, last, kind in spans:
        kinds[kind] = kinds.get(kind, 0.0) + (last - first) / 1e6
    work = union([(s, e) for s, e, kind in spans if kind not in MESSAGES])
    busy = union([(s, e) for s, e, _ in spans])
    return {
        "device": device,
        "window": (end - start) / 1e6,
        "idle": (end - start - busy) / 1e6,
        "exposed": (busy - work) / 1e6,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
    }


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of what the spans cover."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _own_time(events: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Cut operators into the pieces of time in which no operator inside them runs."""
    found: list[tuple[float, float, str]] = []
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for inside in threads.values():
        stack: list[list[Any]] = []  # [end, kind, since when it runs itself]
        for event in [*sorted(inside, key=lambda e: (e["ts"], -e["dur"])), None]:
            now = float("inf") if event is None else event["ts"]
            while stack and stack[-1][0] <= now:
                end, kind, since = stack.pop()
                found.append((since, end, kind))
                if stack:
                    stack[-1][2] = max(stack[-1][2], end)
            if event is None:
                break
            if stack:
                found.append((stack[-1][2], now, stack[-1][1]))
            kind = kind_of(str(event.get("name")))
            stack.append([now + event["dur"], kind, now])
    return [(s, e, kind) for s, e, kind in found if e > s]
