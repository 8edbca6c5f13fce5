"""A small model in the project's layout on forked ranks, against one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from kit import cli, fewer_ranks
from kit.report import Report


def prove(
    call: cli.Invocation, report: Report, config: Any, world: int, limits: dict[str, float]
) -> None:
    """Train a small model in this layout on forked ranks, and hold it against one process."""
    from curry_train.equality import prove as compare
    from curry_train.parallel.dims import resolve

    sizes = resolve(config.parallel, world).sizes
    axes = fewer_ranks.fewer_axes(sizes, call.args.proof_ranks, ("pp",))
    shown = " ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
    call.progress(1, 2, f"proof on CPU ranks, {shown}")
    fewer_ranks.import_for_ranks()
    with tempfile.TemporaryDirectory() as folder:
        words, ranks = fewer_ranks.small_words(config, axes, Path(folder))
        words = [*call.args.set, *words]
        report.numbers["proof"] = {"ranks": ranks, "axes": axes, "overrides": words}
        try:
            proof = compare(words, ranks, project=call.project)
        except AssertionError as error:
            lines = str(error).splitlines() or ["no message"]
            verdict = "unclear" if lines[0].startswith("refused") else "fail"
            report.check("pipeline-gradients", verdict, message=f"on {ranks} ranks: {lines[0]}")
            return
    judge_proof(report, proof, shown, limits)


def judge_proof(report: Report, proof: Any, shown: str, limits: dict[str, float]) -> None:
    """Gradients, norm and updates in one check, losses of steps and of validation in another."""
    report.numbers["proof"] |= {kind: gap._asdict() for kind, gap in proof.gaps.items()}
    kinds = {"pipeline-gradients": ("gradient", "norm", "update"), "pipeline-losses": ("loss",)}
    for name, members in kinds.items():
        found = [gap for kind, gap in proof.gaps.items() if kind in members]
        worst = max(found, key=lambda gap: gap.ratio)
        missing = proof.problems if name == "pipeline-gradients" else []
        first = proof.gaps["gradient"] if name == "pipeline-gradients" else worst
        wrong = bool(missing) or not worst.ratio <= 1 or not first.error <= limits[name]
        message = f"{', '.join(members)} as of one process, small model with {shown}"
        if wrong:
            message = missing[0] if missing else f"worst {worst.name}, rank {worst.rank}"
            message += f" ({worst.kind}): found {worst.found:.6g}, wanted {worst.wanted:.6g}"
        report.check(
            name,
            "fail" if wrong else "pass",
            value=first.error,
            threshold=limits[name],
            message=message,
        )
