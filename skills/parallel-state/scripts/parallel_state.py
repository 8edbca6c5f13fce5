#!/usr/bin/env python3
"""Prove that a project's layout of ranks trains as one process does, and say who talks to whom.

Forks --world ranks (up to 32) on this machine's CPU and takes three optimizer steps in float64 on a
small model of the project's kind, by the code that train.py runs. Every gradient, weight, norm and
loss of every rank is held against one process. A layout that the rules refuse starts nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: parallel-state needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from rank_picture import draw, shared_groups  # noqa: E402

from kit import cli, layouts  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "parallel-state"
THRESHOLDS = {
    "gradients-differ": 1e-12,  # of the largest element of a tensor
    "norm-differs": 1e-12,  # relative; in the later steps 1e-8
    "losses-differ": 1e-12,  # relative; in the later steps 1e-8
    "validation-differs": 1e-8,  # relative, after three steps
    "parameters-differ": 1e-8,  # of the learning rate; 1e-5 where a gradient is rounding noise
}
KINDS = {
    "gradients-differ": "gradient",
    "norm-differs": "norm",
    "losses-differ": "loss",
    "validation-differs": "validation",
    "parameters-differ": "update",
}
HINTS = {
    "gradients-differ": "read parallel/grads.py and what sums this tensor: a factor, or a group",
    "norm-differs": "gradients are right, so read copies in parallel/grads.py (global_norm)",
    "losses-differ": "gradients are right, so read count_once and sum_over_world in step.py",
    "validation-differs": "read evaluate.py: tokens counted twice, or batches that ranks lack",
    "parameters-differ": "gradients are right, so read what follows the optimizer's step",
    "tensor-missing": "read parallel/shards.py: boxes of all ranks must make the tensor once",
    "ranks-fail": "read the traceback above: the first rank that failed",
}
TIMEOUT = 300.0


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help=f"ranks to fork, at most {layouts.MOST_RANKS} (default: the product of the axes)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="print the groups only; no rank starts"
    )


def prove(call: cli.Invocation) -> Report:
    """Read the layout, explain it, prove it."""
    report, words = Report(SKILL), layouts.words_of(call)
    config, sentences = layouts.load(call, words)
    if config is None:
        raise layouts.refuse("layout-refused", sentences)
    world = layouts.ranks_of(config, call.args.world)
    if sentences := layouts.refused(config, world):
        raise layouts.refuse("layout-refused", sentences)
    from curry_train.config import config_hash
    from curry_train.parallel.dims import ParallelDims

    dims = ParallelDims.of(config.parallel).resolve(world)
    print(dims.explain(), flush=True)
    report.check("layout-refused", "pass", message="the rules accept it")
    groups = shared_groups(dims)
    hashed = config_hash(config)
    report.numbers = {"world": world, "axes": dims.sizes, "groups": groups, "config": hashed}
    picture = draw(dims, call.out / "ranks.png")
    report.artifacts += [str(picture)] if picture else []
    if call.args.explain:
        report.summary = f"{world} ranks in {len(groups)} kinds of groups; nothing was run"
        return report
    call.expect(None, f"then three steps in one process, and on {world} forked ranks")
    with tempfile.TemporaryDirectory() as folder:
        values = layouts.small(config, world, Path(folder))
        compare(call, report, config, world, [*words, *layouts.written(values)])
    return report


def compare(
    call: cli.Invocation, report: Report, config: Any, world: int, words: list[str]
) -> None:
    """Run the small model in one process and on ranks, and judge what differs."""
    tiny, sentences = layouts.load(call, words)
    sentences = sentences or layouts.refused(tiny, world)
    if sentences:
        raise layouts.refuse("the small model of this layout", sentences)
    changed = layouts.changes(config, tiny)
    changed.pop("data.input", None)
    report.numbers["changed"] = changed
    sizes = [f"{key} {here} -> {there}" for key, (here, there) in changed.items()]
    print(f"small model: {', '.join(sizes)}", flush=True)
    report.evidence.append(f"float64, {len(sizes)} sizes made smaller, as listed above")
    with user_code("importing curry_train.equality of the project"):
        from curry_train import equality
    told = mock.patch.object(equality, "compare", apart(equality.compare))
    with told, user_code("one process, or a rank"):
        try:
            proof = equality.prove(words, world, project=call.project, timeout=TIMEOUT)
        except AssertionError as error:
            print(error, file=sys.stderr)
            first = str(error).partition("\n")[0]
            report.check("ranks-fail", "fail", message=first)
            report.summary = f"{world} ranks did not get through three steps"
            report.next.append(HINTS["ranks-fail"])
            return
    judge(report, proof, world)


def apart(real: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Make validation a kind of its own."""

    def told(*args: Any) -> Iterator[Any]:
        for gap in real(*args):
            yield gap._replace(kind="validation") if gap.name.startswith("val/") else gap

    return told


def judge(report: Report, proof: Any, world: int) -> None:
    """Turn a proof into checks; the worst value of each kind is told with its place."""
    report.check("ranks-fail", "pass", message=f"{world} ranks took three steps")
    missing = proof.problems
    report.check(
        "tensor-missing",
        "fail" if missing else "pass",
        value=len(missing),
        message=missing[0] if missing else f"ranks hold each of {proof.tensors} tensors once",
    )
    for id, kind in KINDS.items():
        gap = proof.gaps[kind]
        fails = not gap.ratio <= 1.0
        place = (
            f"{gap.name}{gap.place}" if gap.place and kind in ("gradient", "update") else gap.name
        )
        where = f"worst {place}, rank {gap.rank}"
        where += f", layer {gap.layer}" if gap.layer != "none" else ""
        if fails:
            where += f": {gap.found:.6g}, one process {gap.wanted:.6g}"
        allowed = gap.error / gap.ratio if gap.ratio else THRESHOLDS[id]
        report.check(
            id,
            "fail" if fails else "pass",
            value=gap.error,
            threshold=float(f"{allowed:.1e}") if allowed == allowed else THRESHOLDS[id],
            message=where,
        )
    failed = [check["id"] for check in report.checks if check["verdict"] == "fail"]
    report.numbers["gaps"] = {kind: gap._asdict() for kind, gap in proof.gaps.items()}
    report.numbers |= {"clipped_steps": proof.clipped, "tensors": proof.tensors}
    report.summary = f"{world} ranks {'do NOT train' if failed else 'train'} as one process does"
    report.next += [HINTS[cause(failed, proof.gaps)]] if failed else []


def cause(failed: list[str], gaps: dict[str, Any]) -> str:
    """Return the failed check that the others follow from: what a step does first, in step 1."""
    order = ["tensor-missing", "gradients-differ"]
    for id in ("norm-differs", "losses-differ"):
        order += [id] if gaps[KINDS[id]].name.endswith("of step 1") else []
    order += ["parameters-differ", "validation-differs", *KINDS]
    return next(id for id in order if id in failed)


if __name__ == "__main__":
    sys.exit(
        cli.run(
            SKILL, prove, doc=__doc__, add_flags=add_flags, check_flags=layouts.check_layout_flags
        )
    )
