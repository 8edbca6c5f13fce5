#!/usr/bin/env python3
"""Look for leaks between training and held-out data.

Three kinds of data:
  a project's own      --project DIR [--set KEY=VALUE ...]
  text files           --train PATH --test PATH [--eval PATH ...] [--group KEY]
  a table              --table FILE --target COLUMN [--split COLUMN], or --train FILE --test FILE;
                       with --group, --time and --embargo, and --pipeline FILE.py:FUNCTION
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # the bundle is never written to
KIT_HOME = Path(__file__).resolve().parents[2] / "custom-check" / "scripts"
if not (KIT_HOME / "kit" / "cli.py").is_file():
    print(
        "error: leakage-safe-data needs skills/custom-check/scripts/kit, which is missing; "
        "install the whole curry-train bundle, not this folder alone",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path.insert(0, str(KIT_HOME))

from kit import cli, target  # noqa: E402
from kit.errors import UsageError  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.state import preserved  # noqa: E402
from kit.user_code import load_function, parse_spec, user_code  # noqa: E402

SKILL = "leakage-safe-data"
WITH_PIPELINE = ("leak-fit-before-split", "leak-shuffled-labels")
MEGABYTES_A_SECOND = 10
TABLE_ENDS = (".csv", ".csv.gz", ".tsv", ".npy", ".npz")


def add_flags(parser: Any) -> None:
    """Add the flags of this skill."""
    add = parser.add_argument
    add("--train", metavar="PATH", help=".txt, .jsonl, .jsonl.gz, .parquet, a folder; or a table")
    add("--test", metavar="PATH", help="the same, held out")
    add(
        "--eval", metavar="PATH", action="append", default=[], help="a benchmark's text; repeatable"
    )
    add("--text-key", metavar="KEY", default="text", help="key or column of the text (text)")
    add(
        "--table",
        metavar="FILE",
        help=".csv, .csv.gz, .tsv, .parquet, .npy, .npz; + --target COLUMN",
    )
    add("--split", metavar="COLUMN", help="which rows are train and which held out")
    add(
        "--group",
        metavar="COLUMN",
        help="rows of one group belong together (text: key of a record)",
    )
    add("--time", metavar="COLUMN", help="when a row is: numbers or dates")
    add("--embargo", metavar="D", help="least time between train and test: 7d, 36h, or a number")
    add("--task", choices=("auto", "classes", "values"), default="auto", help="kind of the target")
    add(
        "--pipeline",
        metavar="FILE.py:FUNCTION",
        help="(features, target, train, test) -> predicted",
    )


def check_flags(args: Any) -> None:
    """Tell the three kinds of data apart; in a table --target names a column."""
    args.mode = _mode(args)
    args.column = None
    if args.mode == "table":
        if args.target is None:
            raise UsageError("a table without --target", fix="set --target COLUMN")
        args.column, args.target = args.target, None
    elif args.mode == "project":
        target.check_request(
            Path(args.project).expanduser().absolute(), args.target, args.set, args.device
        )
    only_tables = ("split", "time", "embargo", "pipeline")
    wrong = [name for name in only_tables if getattr(args, name) and args.mode != "table"]
    wrong += ["group"] if args.group and args.mode == "project" else []
    if wrong:
        raise UsageError(
            f"--{wrong[0]} without a table", fix="set --table FILE, or --train and --test tables"
        )
    if args.embargo is not None and args.time is None:
        raise UsageError("--embargo without --time", fix="set --time COLUMN")
    if args.pipeline is not None:
        path, function = parse_spec(args.pipeline, flag="--pipeline")
        args.pipeline = f"{path}:{function}"


def _mode(args: Any) -> str:
    files = [path for path in (args.train, args.test) if path]
    if args.table is not None:
        if files or args.eval:
            raise UsageError("--table with --train, --test or --eval", fix="set one or the other")
        return "table"
    if not files and not args.eval:
        return "project"
    column = args.target is not None and ".py:" not in args.target
    tables = [path.lower().endswith(TABLE_ENDS) for path in files]
    if any(tables) or (column and files):
        if args.split is not None:
            raise UsageError("--split with --train and --test", fix="the files are the split")
        if len(files) != 2 or args.eval:
            raise UsageError("tables take --train FILE and --test FILE, both", fix="set both")
        return "table"
    if args.target is not None:
        raise UsageError("--target with text files", fix="leave it out")
    if args.train is None or not (args.test or args.eval):
        raise UsageError(
            "text takes --train and what it is compared with",
            fix="set --train and --test or --eval",
        )
    return "text"


def modules(args: Any) -> list[str]:
    """Files need numpy and scipy only."""
    return list(target.PROJECT_MODULES) if args.mode == "project" else ["numpy", "scipy"]


def work(call: cli.Invocation) -> Report:
    """Read, compare, judge, rank, draw."""
    report = Report(SKILL)
    began = time.monotonic()
    {"project": of_project, "text": of_text, "table": of_table}[call.args.mode](call, report)
    report.numbers["seconds"] = round(time.monotonic() - began, 3)
    return report


def of_text(call: cli.Invocation, report: Report) -> None:
    """Compare text files."""
    from leak_pictures import draw_sets
    from severities import deliver
    from text_checks import check_collections
    from text_documents import open_collection

    args = call.args
    places = [("--test", args.test, "test")] if args.test else []
    places += [("--eval", path, f"eval {Path(path).name}") for path in args.eval]
    opened = [
        open_collection(flag, path, name=name, text_key=args.text_key, group_key=args.group)
        for flag, path, name in [("--train", args.train, "train"), *places]
    ]
    size = sum(collection.bytes for collection in opened) / 1e6
    call.expect(max(1.0, size / MEGABYTES_A_SECOND), f"{size:.1f} MB of text")
    findings, sets, numbers = check_collections(opened[0], opened[1:], call.progress)
    deliver(report, findings)
    report.numbers.update(numbers)
    report.artifacts += draw_sets(sets, call.out / "leakage.png")
    report.summary = f"{numbers['train']['documents']} training documents against " + ", ".join(
        f"{len(held.places)} of {held.name}" for held in sets
    )


def of_table(call: cli.Invocation, report: Report) -> None:
    """Judge a table, and a pipeline on it."""
    from pipeline_checks import open_pipeline
    from table_reading import joined, read_table
    from table_split import assign

    args = call.args
    function = None
    if args.pipeline is not None:
        function = load_function(args.pipeline, flag="--pipeline", project=call.project)
    call.expect(None, "then a few seconds for 100 000 rows")
    parts = None
    if args.table is not None:
        table = read_table("--table", args.table)
    else:
        import numpy as np

        train, test = read_table("--train", args.train), read_table("--test", args.test)
        table = joined(train, test)
        parts = (np.arange(train.rows), np.arange(train.rows, table.rows))
    rows = assign(table, args, parts)
    pipeline = None
    if function is not None:
        pipeline = open_pipeline(function, getattr(function, "__name__", "pipeline"), rows)
    judge_rows(call, report, rows, pipeline)


def judge_rows(
    call: cli.Invocation,
    report: Report,
    rows: Any,
    pipeline: Any = None,
    more: Sequence[Any] = (),
) -> None:
    """Run every check of a table and write the report."""
    import column_checks as columns
    from leak_pictures import draw_table
    from pipeline_checks import check_pipeline
    from severities import Finding, deliver

    findings, scored, told = table_findings(rows)
    findings += more
    if pipeline is None:
        why = "no --pipeline FILE.py:FUNCTION"
        findings += [Finding(id, "skipped", why) for id in WITH_PIPELINE]
    else:
        found, report.numbers["pipeline"] = check_pipeline(pipeline, call.progress)
        findings += found
    report.evidence += columns.describe_columns(rows)
    deliver(report, findings)
    report.next += columns.suggestions(rows)
    report.numbers.update(
        rows={"train": len(rows.train), "test": len(rows.test)},
        columns={s.name: {"score": s.score, "kind": s.kind} for s in scored[:50]},
        classes=rows.classes,
    )
    report.artifacts += draw_table(scored, told, call.out / "leakage.png")
    split = f"{len(rows.train)} training and {len(rows.test)} held-out rows"
    if not rows.is_split:
        split = f"{rows.count} rows without a split"
        report.next.append("--split COLUMN, or --train and --test files: judges the split too")
    kind = f"{len(rows.classes)} classes" if rows.classes else "values"
    report.summary = f"{split}, {len(rows.features)} columns, target {rows.target.name} ({kind})"


def table_findings(rows: Any) -> tuple[list[Any], list[Any], Any]:
    """Judge rows and columns; returns findings, the columns' scores, and those of the shift."""
    import column_checks as columns
    import row_checks

    scored = columns.score_columns(rows)
    shift, told = columns.check_shift(rows)
    findings = [
        row_checks.check_copies(rows),
        row_checks.check_near_copies(rows),
        row_checks.check_groups(rows),
        row_checks.check_time(rows),
        columns.check_columns(rows, scored),
        columns.check_encodings(rows),
        shift,
    ]
    return findings, scored, told


def of_project(call: cli.Invocation, report: Report) -> None:
    """Judge the data that a project, or a target, trains on."""
    from corpus_checks import check_corpus, check_order
    from leak_pictures import draw_sets
    from severities import deliver

    call.expect(None, "then about 0.1 s a MB of text")
    built = call.load_target()
    if built.kind == "foreign":
        of_foreign(call, report, built)
        return
    corpus = built.runtime.corpus
    with preserved(built), user_code("reading the project's data"):
        order = check_order(built)
        if isinstance(corpus.train, dict):
            from sample_rows import rows_of_samples

            rows = rows_of_samples(corpus, call.args.seed or 0)
            judge_rows(call, report, rows, more=[order])
            return
        findings, sets, numbers, notes = check_corpus(corpus, built.runtime.config, call.progress)
    deliver(report, [*findings, order])
    report.numbers.update(numbers)
    report.evidence += notes
    report.artifacts += draw_sets(sets, call.out / "leakage.png")
    report.summary = (
        f"{corpus.train.documents} training and {corpus.val.documents} held-out documents, "
        f"{corpus.train.tokens + corpus.val.tokens} tokens"
    )


def of_foreign(call: cli.Invocation, report: Report, built: Any) -> None:
    """Judge the batches of a target: what they are made of is in files or tables of its own."""
    from severities import deliver
    from target_labels import check_shuffled_labels
    from target_order import check_target_order

    with preserved(built), user_code("the batches and the model of the target"):
        finding, count = check_target_order(built, call.args.seed or 0)
        shuffled = check_shuffled_labels(built, call.progress)
    deliver(report, [finding, shuffled])
    report.summary = f"{count} samples of the target's batches"
    report.next.append("its files: --train PATH --test PATH, or --table FILE --target COLUMN")


def main() -> int:
    """Run."""
    return cli.run(
        SKILL, work, doc=__doc__, add_flags=add_flags, check_flags=check_flags, modules=modules
    )


if __name__ == "__main__":
    sys.exit(main())
