#!/usr/bin/env python3
"""Prove that a checkpoint of one layout of a project goes on in another, or that one is whole.

--from and --to: a small model of the project's kind takes steps on forked CPU ranks of the first
layout, saves, and goes on; ranks of the second load the save. Every tensor and moment must be the
same bit for bit, and the next steps must be those of the run that went on.
--checkpoint: every byte of a checkpoint or run folder is read; then it is held against the
project's configuration (--set) and layout: would a run go on from it?
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: distributed-checkpoint needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from fits import misfits  # noqa: E402
from two_layouts import Side, save_and_go_on, small_sides  # noqa: E402

from kit import cli, layouts  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.user_code import user_code  # noqa: E402

SKILL = "distributed-checkpoint"
THRESHOLDS = {
    "checkpoint-differs": 0.0,  # largest difference of any element of any tensor or moment
    "resume-differs": 1e-8,  # relative, of losses, gradient norms and learning rates
    "resume-weights": 1e-5,  # of the weights after the last step, over the learning rate
}
POSITION = ("step", "samples_consumed", "tokens", "seed", "data_hash", "seq_len", "loss_scale")
"""What a manifest says of how far a run is."""
HINTS = {
    "checkpoint-damaged": "delete nothing; go on from an older one: run.resume=CHECKPOINT",
    "checkpoint-differs": "read training_tensors and restore in checkpoint/training_state.py and "
    "the Parts of parallel/shards.py: what is saved, and which box",
    "random-states-differ": "read rng_tensors and set_rng in checkpoint/training_state.py",
    "resume-differs": "tensors are right, so read restore in checkpoint/training_state.py: step, "
    "samples_consumed, tokens, loss scale, buffers",
    "resume-weights": "losses are right, so compare by python -m curry_train.checkpoint diff",
    "ranks-fail": "read the traceback above: the first rank that failed",
    "checkpoint-misfit": "set what the sentence names, or start anew by run.init_from=CHECKPOINT",
}


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    for flag, dest, text in (
        ("--from", "source", "the layout that saves"),
        ("--to", "goal", "the layout that goes on"),
    ):
        parser.add_argument(
            flag,
            dest=dest,
            metavar="KEY=VALUE",
            nargs="+",
            help=f"{text}, as parallel.tp=2 parallel.dp_shard=2 (default: the project's)",
        )
    parser.add_argument(
        "--checkpoint", metavar="PATH", type=Path, help="a run folder, checkpoints/ or one of them"
    )
    parser.add_argument(
        "--world", type=int, metavar="N", help="ranks that would go on from --checkpoint"
    )


def check_flags(args: Any) -> None:
    """Refuse a call that asks for nothing, or for what no rank of this machine can do."""
    layouts.check_layout_flags(args)
    if args.checkpoint is None and args.source is None and args.goal is None:
        raise UsageError(
            "nothing to check",
            "it takes two layouts or a checkpoint",
            "set --from parallel.tp=2 --to parallel.pp=2, or --checkpoint PATH",
        )
    if args.world is not None and args.checkpoint is None:
        raise UsageError("--world without --checkpoint", "axes or devices=N make the ranks")
    for flag, words in (("--from", args.source), ("--to", args.goal)):
        for word in split(words):
            if not re.fullmatch(r"(parallel\.\w+|devices)=.+", word):
                raise UsageError(
                    f"{flag} {word}",
                    "it takes parallel.KEY=VALUE, such as parallel.tp=2, and devices=N",
                    "other settings go to --set",
                )


def split(words: list[str] | None) -> list[str]:
    """Return words that stand apart or joined by commas; lists keep theirs."""
    parts = (re.split(r",(?=[\w.]+=)", word) for word in words or ())
    return [part for group in parts for part in group if part]


def check(call: cli.Invocation) -> Report:
    """Do what the flags ask for."""
    report = Report(SKILL)
    told = []
    if call.args.checkpoint is not None:
        told.append(examine(call, report))
    if call.args.source is not None or call.args.goal is not None:
        told.append(prove(call, report))
    report.summary = "; ".join(told)
    failed = {entry["id"] for entry in report.checks if entry["verdict"] == "fail"}
    report.next += [text for id, text in HINTS.items() if id in failed][:1]
    return report


def examine(call: cli.Invocation, report: Report) -> str:
    """Read a checkpoint or all of a run, and hold the newest against the configuration."""
    path, words = Path(call.args.checkpoint).absolute(), layouts.words_of(call)
    config, sentences = layouts.load(call, words)
    if config is None:
        raise layouts.refuse("the configuration", sentences)
    from curry_train.checkpoint import CheckpointError
    from curry_train.checkpoint.audit import audit, stored_bytes
    from curry_train.checkpoint.views import locate

    try:
        place = locate(path)
    except CheckpointError as error:
        raise UsageError(f"--checkpoint: {error}") from None
    folders = [f for f in place.folders if place.single or "." not in f.name]
    if not folders:
        raise UsageError(f"--checkpoint {path} holds no checkpoint")
    total = sum(map(stored_bytes, folders))
    call.expect(total / 5e8, f"to read {total / 1e6:.0f} MB of {len(folders)} checkpoints")
    found = {folder: audit(folder) for folder in folders}
    problems = [problem for of in found.values() for problem in of]
    whole = [folder for folder, of in found.items() if not of]
    count = f"{len(folders)} checkpoint{'s' * (len(folders) > 1)} read, {total / 1e6:.1f} MB"
    report.check(
        "checkpoint-damaged",
        "fail" if problems else "pass",
        value=len(problems),
        message=problems[0] if problems else count,
    )
    report.evidence += problems[1:3]
    report.numbers |= {"problems": problems, "checkpoints": [*map(str, folders)], "bytes": total}
    if not whole:
        report.check("checkpoint-misfit", "skipped", message="no checkpoint is whole")
        return f"{path.name} holds no whole checkpoint"
    newest = whole[-1]
    wrong = misfits(config, newest, layouts.ranks_of(config, call.args.world))
    report.check(
        "checkpoint-misfit",
        "fail" if wrong else "pass",
        value=len(wrong),
        message=wrong[0] if wrong else f"a run of this configuration goes on from {newest.name}",
    )
    report.numbers |= {"misfits": wrong, "newest_whole": str(newest)}
    return f"{len(whole)} of {len(folders)} whole"


def prove(call: cli.Invocation, report: Report) -> str:
    """Save on ranks of one layout, go on with those of another, and judge what differs."""
    words = layouts.words_of(call)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        sides, changed = small_sides(
            call, words, split(call.args.source), split(call.args.goal), home
        )
        names = [f"{side.name} on {side.world} rank{'s' * (side.world > 1)}" for side in sides]
        report.numbers |= {"from": names[0], "to": names[1], "changed": changed}
        print(f"from {names[0]}\nto   {names[1]}", flush=True)
        print("small model: " + ", ".join(f"{k} {a} -> {b}" for k, (a, b) in changed.items()))
        call.expect(None, "then steps on both layouts")
        with user_code("saving or going on"):
            try:
                answers = save_and_go_on(sides, home)
            except AssertionError as error:
                print(error, file=sys.stderr)
                first = str(error).partition("\n")[0]
                report.check("ranks-fail", "fail", message=first)
                return "the ranks did not get through"
        report.check("ranks-fail", "pass", message="all ranks saved, loaded and took their steps")
        judge(report, home, sides, answers)
    failed = any(entry["verdict"] == "fail" for entry in report.checks)
    report.evidence.append(f"float64, {len(changed)} sizes made smaller, as listed above")
    return f"{names[0]} {'does NOT go on' if failed else 'goes on'} exactly as {names[1]}"


def judge(report: Report, home: Path, sides: list[Side], answers: list[dict[str, Any]]) -> None:
    """Hold the two runs against each other, by their checkpoints and by their numbers."""
    from curry_train.checkpoint import read_manifest
    from curry_train.checkpoint.audit import audit

    saved, loaded = (
        [home / side.role / "checkpoints" / name for side in sides] for name in answers[0]["names"]
    )
    problems = [problem for path in (*saved, *loaded) for problem in audit(path)]
    report.check(
        "checkpoint-damaged",
        "fail" if problems else "pass",
        value=len(problems),
        message=problems[0] if problems else "4 checkpoints are whole",
    )
    names, worst = compare(*saved)
    first = read_manifest(saved[0])["tensors"]
    held = f"{len(first)} tensors, {sum(n.startswith('optim.exp') for n in first)} of them moments"
    failed = bool(names or worst)
    message = names[0] if names else f"{held}, bit for bit"
    if worst and not names:
        message = f"worst {worst[0].name}{worst[0].place}, {len(worst)} of {held}"
    report.check(
        "checkpoint-differs",
        "fail" if failed else "pass",
        value=worst[0].largest if worst else 0.0,
        threshold=THRESHOLDS["checkpoint-differs"],
        message=message,
    )
    random = random_states(*saved)
    report.check(
        "random-states-differ",
        "fail" if random else "pass",
        value=len(random),
        message=f"of {', '.join(random)}" if random else "ranks of both layouts draw on alike",
    )
    judge_steps(report, answers)
    _, drifted = compare(*loaded)
    weights = [d for d in drifted if not d.name.startswith("optim.")]
    lr = answers[0]["numbers"]["lr of step 1"]
    top = max(weights, key=lambda d: d.largest, default=None)
    off = top.largest / lr if top else 0.0
    report.check(
        "resume-weights",
        "fail" if not off <= THRESHOLDS["resume-weights"] else "pass",
        value=off,
        threshold=THRESHOLDS["resume-weights"],
        message=f"worst {top.name}{top.place}" if top else "weights after the steps, bit for bit",
    )


def compare(first: Path, second: Path) -> tuple[list[str], list[Any]]:
    """Return what only one has or has otherwise, position included, and differences of values."""
    from curry_train.checkpoint import read_manifest
    from curry_train.checkpoint.contents import differences

    manifests = [read_manifest(path) for path in (first, second)]
    ours, theirs = (manifest["tensors"] for manifest in manifests)
    here, there = ([manifest.get(key) for key in POSITION] for manifest in manifests)
    pairs = zip(POSITION, here, there, strict=True)
    names = [f"{key} is {a}, after the load {b}" for key, a, b in pairs if a != b]
    names += [f"{name} is in one of them only" for name in sorted(ours.keys() ^ theirs.keys())]
    both = sorted(ours.keys() & theirs.keys())
    for name in both:
        kinds = [f"{of[name]['dtype']} {of[name]['shape']}" for of in (ours, theirs)]
        names += [f"{name} is {kinds[0]}, then {kinds[1]}"] if kinds[0] != kinds[1] else []
    equal = [name for name in both if ours[name]["shape"] == theirs[name]["shape"]]
    return names, differences((first, ours), (second, theirs), equal)


def random_states(first: Path, second: Path) -> list[str]:
    """Return the ranks of both whose random states are not the same after the load."""
    files = [{f.name: f.read_bytes() for f in path.glob("rank-*")} for path in (first, second)]
    return sorted(n for n in files[0].keys() & files[1].keys() if files[0][n] != files[1][n])


def judge_steps(report: Report, answers: list[dict[str, Any]]) -> None:
    """Hold the numbers of the steps after the save against those of the run that went on."""
    errors = {}
    for name, wanted in answers[0]["numbers"].items():
        found = answers[1]["numbers"][name]
        error = abs(found - wanted) / max(abs(wanted), 1e-12)
        errors[name] = error if error == error else float("inf")
    worst = max(errors, key=errors.__getitem__)
    found, wanted = (answer["numbers"][worst] for answer in reversed(answers))
    report.check(
        "resume-differs",
        "fail" if not errors[worst] <= THRESHOLDS["resume-differs"] else "pass",
        value=errors[worst],
        threshold=THRESHOLDS["resume-differs"],
        message=f"worst {worst} after the load: {found:.6g}, undisturbed {wanted:.6g}",
    )
    report.numbers["steps"] = [answer["numbers"] for answer in answers]


if __name__ == "__main__":
    sys.exit(cli.run(SKILL, check, doc=__doc__, add_flags=add_flags, check_flags=check_flags))
