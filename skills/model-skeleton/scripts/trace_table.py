"""The table of a trace: a line a module call, as a tree."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from module_trace import Call, Made, Trace

HEAD = ("module", "in", "out", "dtype", "rms", "min", "max", "not finite", "bytes", "grad rms")


def rows(found: Trace) -> list[dict[str, Any]]:
    """Return the calls as plain values, for the report."""
    return [asdict(call) for call in found.calls]


def table(found: Trace) -> list[str]:
    """Return the lines of the table, columns aligned."""
    lines = [HEAD] + [_row(call, call in found.running) for call in found.calls]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines]  # fmt: skip


def _row(call: Call, broke: bool) -> tuple[str, ...]:
    name = call.path
    if call.depth:
        parts = call.path.split(".")
        name = ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
    label = f"{'  ' * call.depth}{name} ({call.kind}){' <- raised' if broke else ''}"
    main = next((m for m in call.outputs if m.rms is not None), None)
    main = main or (call.outputs[0] if call.outputs else None)
    numbers = ("", "", "", "")
    if main is not None and main.rms is not None:
        numbers = (_short(main.rms), _short(main.low), _short(main.high), f"{main.bad_share:.2%}")
    elif main is not None and main.bad_share:
        numbers = ("", "", "", f"{main.bad_share:.2%}")
    dtype = "" if main is None else f"{main.dtype} {main.device}"
    gradient = "" if call.gradient_rms is None else _short(call.gradient_rms)
    return (
        label,
        _shapes(call.inputs),
        _shapes(call.outputs),
        dtype,
        *numbers,
        f"{call.bytes + call.parameters}",
        gradient,
    )


def _shapes(made: list[Made]) -> str:
    shown = ["x".join(map(str, m.shape)) or "scalar" for m in made[:3]]
    return " ".join(shown) + (" ..." if len(made) > 3 else "")


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
