"""A script of the kit's form that runs the jobs of a file: `queue_of_jobs.py --jobs FILE`.

The file holds {jobs: [{name, command, config_hash}], slots, tree_hash, guess_s}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "skills/custom-check/scripts"))
sys.dont_write_bytecode = True

from kit import cli  # noqa: E402
from kit.report import Report  # noqa: E402
from kit.runner import Work, run_all, slots  # noqa: E402


def work(call: cli.Invocation) -> Report:
    """Run the jobs; a failed one is a failed check."""
    asked = json.loads(Path(call.args.jobs).read_text(encoding="utf-8"))
    outcomes = run_all(
        call,
        call.project / "runs" / "checks" / "jobs",
        [Work(**job) for job in asked["jobs"]],
        tree_hash=asked.get("tree_hash", "tree"),
        places=slots(asked.get("slots", 2)),
        guess_s=asked.get("guess_s"),
    )
    report = Report("custom-check", summary="jobs")
    for outcome in outcomes:
        report.check(
            outcome.name,
            "fail" if outcome.exit_code else "pass",
            value=outcome.exit_code,
            message=f"{'kept' if outcome.kept else 'ran'} {outcome.slot}",
        )
    return report


if __name__ == "__main__":
    sys.exit(
        cli.run(
            "custom-check",
            work,
            doc=__doc__,
            add_flags=lambda parser: parser.add_argument("--jobs", required=True),
            modules=lambda _: (),
        )
    )
