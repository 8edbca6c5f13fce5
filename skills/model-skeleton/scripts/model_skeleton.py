#!/usr/bin/env python3
"""Follow one batch from the dataset through model, loss and gradients, or check a model's wiring.

Every module's shapes, dtypes, devices and values are in trace.txt (--table prints them). Named are
the module and the line where NaN or infinity begins, forward or backward, where a shape, a dtype or
a device changes unasked, where the graph is cut, and parameters that are not used.
`--check [NAME ...]` looks instead whether a project's models and datasets are wired: file, line in
the literal dict, YAML, documented Config, protocol, a pass that works, test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: model-skeleton needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402

SKILL = "model-skeleton"
THRESHOLDS = {
    "trace-unused": 4,  # batches in which a parameter must get a gradient at least once
}
IDS = {
    "trace-nonfinite": "loss and gradients are finite",
    "trace-shape": "no broadcast, no moved dim, no example that sees another",
    "trace-detached": "the graph reaches every parameter that is used",
    "trace-dtype": "no float64 or float32 comes in unasked",
    "trace-device": "everything stays on the device of the parameters",
    "trace-unused": "every trainable parameter is used",
}


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    parser.add_argument("--table", action="store_true", help="print the table of all modules")
    parser.add_argument(
        "--batch", type=int, default=0, metavar="N", help="batch to follow (default 0, the first)"
    )
    parser.add_argument(
        "--check",
        nargs="*",
        metavar="NAME",
        help="check the wiring of these models and datasets (default: all that are registered)",
    )


def check_flags(args: Any) -> None:
    """Refuse what names no batch, and --check of other code."""
    if args.batch < 0:
        raise UsageError(f"--batch {args.batch}", "batches count from 0")
    if args.check is not None and args.target is not None:
        raise UsageError("--check with --target", "wiring is that of a project", "leave one out")


def work(call: cli.Invocation) -> Report:
    """Trace a batch, or check the wiring."""
    if call.args.check is not None:
        from wiring import check_wiring

        return check_wiring(call, Report(SKILL))
    return trace_batch(call)


def trace_batch(call: cli.Invocation) -> Report:
    """Follow one batch and judge what it showed."""
    from batch_way import way_of
    from trace_table import rows, table

    call.expect(None, "then a few passes of one batch")
    target = call.load_target(probe=False)
    if target.kind == "project" and target.runtime.config.compile:
        raise UsageError(
            "compile=true: a compiled block hides its modules",
            "the trace runs plain blocks",
            "add --set compile=false",
        )
    report = Report(SKILL)
    way, found = judge(target, report, call.args.batch, way_of)
    lines = [*way, "", *table(found)]
    path = call.out / "trace.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report.artifacts.append(str(path))
    report.numbers["modules"] = rows(found)
    report.numbers["way"] = way
    if call.args.table:
        print("\n".join(lines), flush=True)
    return report


def judge(target: Any, report: Report, number: int, way_of: Any = None) -> tuple[list[str], Any]:
    """Trace batch `number` and add the checks; returns (the batch's way, the trace)."""
    import findings
    from module_trace import trace

    batch = take(target, number)
    way = [] if way_of is None else way_of(target, batch)
    with preserved(target):
        found = trace(target, batch)
    made: list[Any] = []
    skipped: dict[str, str] = {}
    if found.error is not None:
        made.append(findings.raised(found))
        explain_in_place(target, batch, found, made[0])
        skipped = dict.fromkeys(IDS, f"the {found.stage} pass ended before")
    else:
        made += finite_and_whole(target, found, number, skipped, report)
        made += [] if made else hangs_on(target, batch)
        made += shapes(target, batch, found, skipped)
        made += [*findings.dtypes(target, found), *findings.devices(target, found)]
    write_checks(report, made, skipped)
    modules = len({call.path for call in found.calls})
    loss = "no loss" if found.loss is None else f"loss {float(found.loss.detach()):.4g}"
    report.summary = f"{len(found.calls)} calls of {modules} modules, {loss}"
    report.numbers["operations"] = len(found.tape.ops)
    return way, found


def take(target: Any, number: int) -> Any:
    """Return a batch by its number; a project's loader goes back to where it was."""
    with preserved(target):
        for at, batch in enumerate(target.batches):
            if at == number:
                return batch
    raise UsageError(f"--batch {number}", f"there are {at + 1} batches")


def finite_and_whole(
    target: Any, found: Any, number: int, skipped: dict[str, str], report: Report
) -> list[Any]:
    """Judge values, graph and use of the parameters."""
    import findings

    made = [bad] if (bad := findings.not_finite(found)) else []
    names = findings.trained_names(target)
    if not names:
        skipped["trace-detached"] = skipped["trace-unused"] = "no parameter is trainable"
        return made
    if not found.loss.requires_grad:
        skipped["trace-unused"] = "no gradient is computed"
        return [*made, findings.loss_without_graph(found)]
    missing = names - found.reached
    cut, unused = findings.without_gradient(found, missing)
    made += cut
    idle = [name for name in unused if findings.not_chosen(found, name)]
    if idle:
        report.evidence.append(
            f"{idle[0]} and {len(idle) - 1} more: nothing was sent there in this batch"
        )
    unused = {name: why for name, why in unused.items() if name not in idle}
    if unused:
        unused = in_later_batches(target, unused, number, report)
    if unused:
        name, why = next(iter(unused.items()))
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        todo = "use it, remove it, or freeze it by requires_grad_(False)"
        where = findings.place_of(target, found, name)
        message = f"{name}{more}: {why}"
        made.append(findings.Finding("trace-unused", message, where, todo, len(unused)))
    made += [stranger] if (stranger := findings.unregistered(target, found)) else []
    if not cut:
        rows = findings.rows_without_gradient(target, found)
        made += [rows] if rows else []
        stops = {op.where: findings.place(op) for op in reversed(findings.stop_gradients(found))}
        told = [f"stop-gradient: {where} on the way to the loss" for where in stops.values()]
        report.evidence += reversed(told)
    return made


def hangs_on(target: Any, batch: Any) -> list[Any]:
    """Go forward and back twice: a state that is kept holds the first graph, which is gone."""
    import findings

    try:
        with preserved(target):
            for _ in range(2):
                loss = target.loss_fn(target.model, batch)
                if loss.requires_grad:
                    loss.backward()
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        message = "backward of a second batch goes into the graph of the first: a state is kept"
        todo = "detach what is kept from one batch to the next"
        return [findings.Finding("trace-detached", message, None, todo)]
    return []


def in_later_batches(
    target: Any, unused: dict[str, str], number: int, report: Report
) -> dict[str, str]:
    """Leave the parameters that no later batch uses either: an expert may have had no token."""
    left = dict(unused)
    with preserved(target):
        for at, batch in enumerate(target.batches):
            if at >= number + THRESHOLDS["trace-unused"] or not left:
                break
            if at == number:
                continue
            for parameter in target.model.parameters():
                parameter.grad = None
            loss = target.loss_fn(target.model, batch)
            if loss.requires_grad:
                loss.backward()
            named = dict(target.model.named_parameters(remove_duplicate=False))
            left = {name: why for name, why in left.items() if named[name].grad is None}
    if len(left) < len(unused):
        report.evidence.append(
            f"{len(unused) - len(left)} parameters are used in some batches only"
        )
    return left


def shapes(target: Any, batch: Any, found: Any, skipped: dict[str, str]) -> list[Any]:
    """Judge broadcasts, moved dims and examples that see each other."""
    from example_mixing import mixing
    from shape_findings import broadcasts, loss_shapes, moved_dims

    made = [*broadcasts(found), *moved_dims(found, batch)]
    try:
        with preserved(target):
            observed = observe_loss(target, batch)
        made += loss_shapes(observed)
        with preserved(target):
            mixed, why = mixing(target, batch, sizes_in(found))
    except Exception as error:  # the traced pass worked: this one asks for more than it has to do
        mixed, why = None, f"a pass with an exchanged example raised {type(error).__name__}"
    if mixed is not None and not any(one.where == mixed.where for one in made):
        made.append(mixed)
    if why and not made:
        skipped["example mixing"] = why
    return made


def sizes_in(found: Any) -> set[int]:
    """Return all sizes of the tensors that modules read and made."""
    made = [one for call in found.calls for one in (*call.inputs, *call.outputs)]
    return {size for one in made for size in one.shape}


def observe_loss(target: Any, batch: Any) -> list[Any]:
    """Return the loss functions that one pass calls."""
    from kit.observation import observe

    return observe(target, batch).calls


def explain_in_place(target: Any, batch: Any, found: Any, finding: Any) -> None:
    """Say which operation changed what backward needed."""
    import findings
    from module_trace import writers_of

    if found.stage != "backward" or "inplace" not in str(found.error):
        return
    with preserved(target):
        pair = writers_of(target, batch)
    if pair is None:
        return
    reader, writer = pair
    finding.message = (
        f"backward breaks: {findings.place(writer)} changes in place what"
        f" {findings.place(reader)} had kept"
    )
    finding.where, finding.todo = writer.where, "write into a copy: drop the in-place form here"


def write_checks(report: Report, made: list[Any], skipped: dict[str, str]) -> None:
    """Add one check for each finding, and one for each id without any."""
    for finding in made:
        report.check(
            finding.id,
            "fail",
            value=finding.value,
            message=finding.message,
            fix=finding.fix(),
        )
    failed = {finding.id for finding in made}
    for id, words in IDS.items():
        if id in failed:
            continue
        if id in skipped:
            report.check(id, "skipped", message=skipped[id])
        else:
            report.check(id, "pass", message=words)
    if why := skipped.get("example mixing"):
        report.evidence.append(f"examples were not exchanged: {why}")


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
