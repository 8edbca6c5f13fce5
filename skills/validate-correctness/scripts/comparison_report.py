"""From finished runs to checks: two gates, each with a verdict of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from likely_cause import likely_cause
from run_curves import draw
from run_folders import FinishedRun
from speed_gate import IDS as SPEED_IDS
from speed_gate import judge_speed
from step_comparison import Comparison, Group, judge, not_finite, repeats_bitwise, shift

from kit.cli import Invocation
from kit.report import Report


@dataclass
class Gates(Report):
    """A report whose verdict is that of correctness; a failed performance gate fails it too.

    A performance gate that cannot tell changes nothing.
    """

    @property
    def correctness(self) -> str:
        """The verdict of all checks but those of speed."""
        found = {c["verdict"] for c in self.checks if c["id"] not in SPEED_IDS}
        if "fail" in found:
            return "fail"
        return "pass" if found - {"skipped"} == {"pass"} else "unclear"

    @property
    def verdict(self) -> str:
        """fail if either gate fails, else what correctness says."""
        slow = any(c["verdict"] == "fail" for c in self.checks if c["id"] in SPEED_IDS)
        return "fail" if slow else self.correctness

    def refused(self, why: str) -> None:
        """Say that the head cannot even read its configuration or data."""
        message = f"the head takes no such run: {why}"
        self.check("validate-crash", "fail", message=message)
        self.summary = "correctness: fail; the head does not start, the base does"
        self.numbers = {"correctness": "fail", "performance": None}


def report_on(
    call: Invocation,
    report: Gates,
    groups: Sequence[Group],
    comparison: Comparison,
    told: dict[str, Any],
    changed: Sequence[str],
) -> None:
    """Add all checks, the cause, the numbers and the picture."""
    args, runs = call.args, [run for group in groups for run in (*group.base, *group.head)]
    heads = [run for group in groups for run in group.head]
    precision = told["base"]["config"]["precision"]
    judge_ends(report, runs, args.steps)
    judge_finite(report, groups, precision)
    data = judge_data(report, groups, told)
    if heads:
        judge(report, comparison, groups)
        repeats = judge_repeats(report, groups)
        moved = shift(groups[0].base[0], heads[0])
        cause = likely_cause(
            comparison,
            batches=data["batches"],
            hashed=data["hashed"],
            tokens=data["tokens"],
            shifted=moved,
            repeats=repeats,
        )
        tell_cause(report, comparison, cause, changed)
    speed = None
    if heads and not args.no_performance:
        speed = judge_speed(report, groups, args.max_slowdown, args.max_memory)
        picture = draw(groups, comparison, call.out / "curves.png")
    elif heads:
        picture = draw(groups, comparison, call.out / "curves.png")
    else:
        picture = None
    report.artifacts += [str(picture)] if picture else []
    report.artifacts += [str(run.folder) for run in runs]
    settings = different_settings(told["base"]["config"], told["head"]["config"])
    report.evidence += [f"settings differ: {', '.join(settings[:5])}"] if settings else []
    count = max(len(group.base) for group in groups)
    how = "bitwise" if comparison.bitwise else f"within its noise, {count} runs"
    report.numbers |= {
        "correctness": report.correctness,
        "performance": speed,
        "base_repeats": "bitwise" if comparison.bitwise else "noise",
        "config_hash": {role: told[role]["config_hash"] for role in told},
        "settings": settings,
        "changed_files": list(changed),
        "runs": [numbers_of(run) for run in runs],
    }
    report.summary = (
        f"correctness: {report.correctness}"
        + (f", performance: {speed}" if speed else "")
        + f"; {args.model}, {args.mesh}, {args.steps} steps; the base repeats {how}"
    )


def judge_ends(report: Report, runs: Sequence[FinishedRun], steps: int) -> None:
    """Judge how every run ended, and whether it logged each of its steps once."""
    crashed = [(run, run.crash()) for run in runs if run.crash()]
    place = next((run.place for run, _ in crashed if run.place), None)
    fix = {"file": place[0], "line": place[1], "text": "it failed here"} if place else None
    report.check(
        "validate-crash",
        "fail" if crashed else "pass",
        value=len(crashed),
        message="; ".join(f"{run.name} {how}" for run, how in crashed) or "all runs are done",
        fix=fix,
    )
    wrong = [(run, run.steps_problem(steps)) for run in runs if run.steps_problem(steps)]
    report.check(
        "validate-steps",
        "fail" if wrong else "pass",
        value=len(wrong),
        message="; ".join(f"{run.name}: {how}" for run, how in wrong)
        or f"all runs logged the steps 1-{steps}, each once",
    )


def judge_finite(report: Report, groups: Sequence[Group], precision: str) -> None:
    """Fail on NaN and infinity, and say whether the base has them too."""
    found = {
        run.name: not_finite(run, precision)[0]
        for group in groups
        for run in (*group.base, *group.head)
        if not_finite(run, precision)
    }
    text = "; ".join(f"{name}: {key} from step {step} on" for name, (step, key) in found.items())
    sides = {name.partition("-")[0] for name in found}
    if sides == {"base", "head"}:
        text += " (the base too: it is not sound itself)"
    elif sides == {"base"}:
        text += " (only the base: it is not sound itself)"
    verdict = "fail" if found else "pass"
    text = text or "all losses and norms are finite"
    report.check("validate-nonfinite", verdict, value=len(found), message=text)


def judge_data(report: Report, groups: Sequence[Group], told: dict[str, Any]) -> dict[str, Any]:
    """Judge corpus, batches and token counts; return the first steps in which they differ."""
    base, head = told["base"], told["head"]
    hashed = bool(base["batches"] and head["batches"])
    pairs = list(zip(base["batches"], head["batches"], strict=False))
    batches = next((i for i, (b, h) in enumerate(pairs, 1) if b != h), None)
    tokens, text = None, []
    for group in groups:
        for run in group.head:
            rows = group.base[0].rows
            common = sorted(set(rows) & set(run.rows))
            wrong = [s for s in common if rows[s].get("tokens") != run.rows[s].get("tokens")]
            if wrong and (tokens is None or wrong[0] < tokens):
                tokens = wrong[0]
                found, wanted = (r[tokens].get("tokens") for r in (run.rows, rows))
                text = [f"{found} tokens after step {tokens}, base {wanted}"]
    if batches is not None:
        text.insert(0, f"the batches differ from step {batches} on: changed data or its order")
    later = [side.get("second_epoch") for side in (base, head)]
    if None not in later and later[0] != later[1]:
        text.append("the first batch of the second epoch differs: changed data or its order")
    if base["data_hash"] != head["data_hash"]:
        text.insert(0, "the prepared corpus differs")
    fine = f"the batches of {len(pairs)} steps are equal" if hashed else "token counts are equal"
    why = head["why"] or base["why"]
    fine += f"; batches could not be compared ({why})" if why else ""
    report.check("validate-data", "fail" if text else "pass", message="; ".join(text) or fine)
    return {"batches": batches, "hashed": hashed, "tokens": tokens}


def judge_repeats(report: Report, groups: Sequence[Group]) -> bool | None:
    """Judge whether the head repeats itself, where it was run twice."""
    twice = [group for group in groups if len(group.head) > 1]
    if not twice:
        return None
    repeats = all(repeats_bitwise(group.head) for group in twice)
    text = "two runs of the head are equal" if repeats else "two runs of the head differ"
    text += "" if repeats else ", two of the base do not: randomness without a seed, or a race"
    report.check("validate-head-repeats", "pass" if repeats else "fail", message=text)
    return repeats


def tell_cause(report: Report, comparison: Comparison, cause: Any, changed: Sequence[str]) -> None:
    """Say what differs first, what fits it, and which changed files hold such code."""
    first = comparison.first()
    if first is not None:
        shown = first._asdict() | {"cause": cause.text if cause else None}
        report.numbers["first_difference"] = shown
    if cause is None:
        return
    report.evidence.insert(0, cause.text)
    near = [file for file in changed if file.startswith(cause.files)]
    read = near or list(changed) or list(cause.files)
    where = "changed there" if near else "changed"
    report.next.append(f"read what is {where}: {', '.join(read[:4])}")


def different_settings(base: Any, head: Any, key: str = "") -> list[str]:
    """List the settings that the two states resolve differently."""
    if isinstance(base, dict) and isinstance(head, dict):
        return [
            text
            for name in {**base, **head}
            if not (key == "data" and name == "cache_dir")
            for text in different_settings(
                base.get(name), head.get(name), f"{key}.{name}".lstrip(".")
            )
        ]
    return [] if base == head else [f"{key} {base} -> {head}"]


def numbers_of(run: FinishedRun) -> dict[str, Any]:
    """Give what the report keeps of a run."""
    last = run.rows[max(run.rows)] if run.rows else {}
    return {
        "name": run.name,
        "code": run.code,
        "steps": len(run.rows),
        "loss": last.get("loss"),
        "val/loss": last.get("val/loss"),
        "started": run.started,
        "seconds": round(run.ended - run.started, 1),
        "folder": str(run.folder),
    }
